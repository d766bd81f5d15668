"""What failed, and is not tried again."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import isolation_fakes as faults
import pytest

from fa2tune import gpus
from fa2tune.compiling import compiler
from fa2tune.compiling.registry import portable_of
from fa2tune.measuring import worker
from fa2tune.measuring.worker import Job
from fa2tune.sharing.storage import Storage, StorageError
from fa2tune.spec.problem import Specialization
from fa2tune.tuning.search import status
from fa2tune.tuning.search.compile_check import compile_check
from fa2tune.tuning.search.failures import BLAMELESS, COMPILE, FAULTS, LAUNCH, FailureRecord, FailureScope
from fa2tune.tuning.search.status import status_of

HERE = str(Path(__file__).parents[2])

SPEC = Specialization("bf16", 128, 128, "causal")

H200 = gpus.named("h200")


FWD = portable_of("fwd")

DEFAULT = dict(FWD.space.default(SPEC, 90))

OTHER = {**DEFAULT, "num_warps": 8 if DEFAULT["num_warps"] == 4 else 4}

TODAY = FailureScope("3.6.0", "NVIDIA H200", "580.1")


def test_the_failure_record_remembers_under_the_same_toolchain_only(tmp_path, monkeypatch):
    path = tmp_path / "ledger.sqlite"
    page = FailureRecord(Storage(None, path), TODAY).of_kernel(FWD, SPEC, 90)
    page.add(COMPILE, DEFAULT, "crash", "process died (SIGABRT)")
    page.add(LAUNCH, OTHER, "illegal_access", "CUDA error")

    def known(toolchain=TODAY, variant=FWD, spec=SPEC, arch=90):
        page = FailureRecord(Storage(None, path), toolchain).of_kernel(variant, spec, arch)
        return page.of(DEFAULT) is not None, page.of(OTHER) is not None

    assert known() == (True, True)
    found = FailureRecord(Storage(None, path), TODAY).of_kernel(FWD, SPEC, 90).of(OTHER)
    assert (found.stage, found.status, found.why) == (LAUNCH, "illegal_access", "CUDA error") and found.created
    assert known(replace(TODAY, triton="3.7.0")) == (False, False)
    assert known(replace(TODAY, driver="590.1")) == (True, False)  # a compile needs no driver
    assert known(replace(TODAY, gpu="NVIDIA H100 PCIe")) == (True, False)
    assert known(arch=80) == known(spec=replace(SPEC, mask="full")) == (False, False)
    assert known(variant=portable_of("bwd_dq")) == (False, False)
    monkeypatch.setattr("fa2tune.compiling.fingerprint.kernel_hash", lambda variant, mask: "another kernel")
    assert known() == (False, False)


def test_a_config_that_does_not_compile_stands_for_all_of_its_binary(tmp_path):
    assert "HEADS_PER_WAVE" in DEFAULT
    values = FWD.space.dimensions["HEADS_PER_WAVE"]
    page = FailureRecord(Storage(None, tmp_path / "ledger.sqlite"), TODAY).of_kernel(FWD, SPEC, 90)
    page.add(COMPILE, DEFAULT, "crash", "process died (SIGABRT)")
    page.add(LAUNCH, OTHER, "timeout", "no answer within 5 s")
    assert all(page.of({**DEFAULT, "HEADS_PER_WAVE": value}) for value in values)
    assert [bool(page.of({**OTHER, "HEADS_PER_WAVE": value})) for value in values] == [
        value == OTHER["HEADS_PER_WAVE"] for value in values
    ]


def test_a_compile_that_took_too_long_counts_when_it_happened_in_two_runs(tmp_path):
    def page():
        return FailureRecord(Storage(None, tmp_path / "ledger.sqlite"), TODAY).of_kernel(FWD, SPEC, 90)

    first = page()
    first.add(COMPILE, DEFAULT, "timeout", "no answer within 30 s")
    first.add(COMPILE, DEFAULT, "timeout", "no answer within 30 s")  # the same busy host
    assert first.of(DEFAULT).status == "timeout"  # not again in this run
    second = page()
    assert second.of(DEFAULT) is None and second.forgotten(DEFAULT, "timeout")
    second.add(COMPILE, DEFAULT, "timeout", "no answer within 30 s")
    assert page().of(DEFAULT).status == "timeout" and page().forget() == 1 and page().of(DEFAULT) is None
    page().add(COMPILE, DEFAULT, "timeout", "x")
    assert page().forget() == 1  # a first time is struck out, too
    page().add(COMPILE, DEFAULT, "timeout", "x")
    assert page().of(DEFAULT) is None


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(28, "No space left on device"), OSError),
        (MemoryError("std::bad_alloc"), MemoryError),
        *((RuntimeError(f"`ptxas` failed with error code {code}\n`ptxas` stderr:\n"), compiler.HostTrouble)
          for code in (-9, -15, 137, 143)),
        (RuntimeError("`ptxas` failed with error code 1\n`ptxas` stderr:\n"), None),
        (RuntimeError("`ptxas` failed with error code -11\n`ptxas` stderr:\n"), None),
    ],
)  # fmt: skip
def test_trouble_of_the_host_says_nothing_about_the_candidate(monkeypatch, error, raised):
    def failing(*arguments, **options):
        raise error

    monkeypatch.setattr("triton.compile", failing)
    if raised is None:
        result = compile_check("fwd", SPEC, DEFAULT, H200)
        assert result.status == "compile_error" and "failed with error code" in result.why
        return
    with pytest.raises(raised) as caught:
        compile_check("fwd", SPEC, DEFAULT, H200)
    job = Job(
        "fa2tune.tuning.search.compile_check:compile_check",
        (),
        20.0,
        began=True,
        failure=worker.reason_of(caught.value),
    )
    assert status_of(job) in BLAMELESS


def test_no_config_is_blamed_for_what_it_did_not_do(tmp_path):
    page = FailureRecord(Storage(None, tmp_path / "ledger.sqlite"), TODAY).of_kernel(FWD, SPEC, 90)
    for word in [*sorted(BLAMELESS), "wrong_result", "shared_memory", ""]:
        page.add(LAUNCH, DEFAULT, word, "why")
    assert page.of(DEFAULT) is None
    assert page.forgotten(DEFAULT, "killed") and page.forgotten(DEFAULT, "crash")
    assert not page.forgotten(DEFAULT, "shared_memory") and not page.forgotten(DEFAULT, "wrong_result")


def test_what_is_forgotten_is_gone_for_this_toolchain_only(tmp_path):
    path = tmp_path / "ledger.sqlite"
    older = replace(TODAY, driver="570.1")
    for toolchain in (TODAY, older):
        FailureRecord(Storage(None, path), toolchain).of_kernel(FWD, SPEC, 90).add(LAUNCH, OTHER, "crash", "x")
    FailureRecord(Storage(None, path), TODAY).of_kernel(FWD, SPEC, 90).add(
        LAUNCH, OTHER, "timeout", "twice the same is one entry"
    )
    assert FailureRecord(Storage(None, path), TODAY).of_kernel(FWD, SPEC, 90).forget() == 1
    assert FailureRecord(Storage(None, path), TODAY).of_kernel(FWD, SPEC, 90).of(OTHER) is None
    assert FailureRecord(Storage(None, path), older).of_kernel(FWD, SPEC, 90).of(OTHER).status == "crash"


def test_processes_write_the_failure_record_at_the_same_time(tmp_path):
    path = tmp_path / "ledger.sqlite"
    code = (
        f"import sys; sys.path[:0] = {[HERE, *sys.path]!r}\n"
        "from pathlib import Path\n"
        "from fa2tune.compiling.registry import portable_of\n"
        "from fa2tune.tuning.search.failures import LAUNCH, FailureRecord\n"
        "from fa2tune.sharing.storage import Storage\n"
        "from test_failures import DEFAULT, SPEC, TODAY\n"
        f"page = FailureRecord(Storage(None, Path({str(path)!r})), TODAY).of_kernel(portable_of('fwd'), SPEC, 90)\n"
        "for n in range(30):\n"
        "    page.add(LAUNCH, {**DEFAULT, 'maxnreg': int(sys.argv[1]) + n}, 'crash', 'x')\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(first)]) for first in (1000, 2000, 1015)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    page = FailureRecord(Storage(None, path), TODAY).of_kernel(FWD, SPEC, 90)
    found = page.failing({**DEFAULT, "maxnreg": n} for n in range(900, 2100))
    assert [config["maxnreg"] for config, _ in found] == [*range(1000, 1045), *range(2000, 2030)]


def test_a_file_that_is_no_failure_record_is_named(tmp_path):
    (tmp_path / "ledger.sqlite").write_text("poem, and long enough that SQLite looks at it " * 20)
    with pytest.raises(StorageError, match=r"ledger\.sqlite: .*not a database; move the file away"):
        FailureRecord(Storage(None, tmp_path / "ledger.sqlite"), TODAY)


def test_every_fault_has_a_status_that_the_failure_record_keeps():
    assert set(faults.STATUS.values()) <= FAULTS
    assert {word for word, _ in status._WORDS} <= FAULTS | BLAMELESS | {"wrong_result"}
