"""Whatever a candidate does to its process costs that candidate, goes to the failure record, and is not tried again.

The faults are real where no GPU is needed (abort, segmentation fault, endless loop, memory without end); those of a GPU are
played here and real in tests/gpu/test_faults.py."""

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import fake_log
import isolation_fakes as faults
import optuna
import pytest
from click.testing import CliRunner
from tuner_fakes import true_time

from fa2tune import gpus
from fa2tune.cli.tune import tune as tune_command
from fa2tune.compiling import compiler
from fa2tune.compiling.registry import portable_of
from fa2tune.measuring import worker
from fa2tune.measuring.worker import Crew, Job, wait
from fa2tune.rows import reader
from fa2tune.rows.row import MEASURED
from fa2tune.sharing.storage import Storage, StorageError
from fa2tune.spec.problem import Specialization
from fa2tune.tuning.request import plan
from fa2tune.tuning.request.plan import Target, TuneRequest
from fa2tune.tuning.request.watcher import Watcher, WorkerFunctions
from fa2tune.tuning.run import compiles, tuner
from fa2tune.tuning.search import status
from fa2tune.tuning.search.compile_check import compile_check
from fa2tune.tuning.search.failures import BLAMELESS, COMPILE, FAULTS, LAUNCH, FailureRecord, FailureScope
from fa2tune.tuning.search.status import status_of
from fa2tune.tuning.select.gpu_jobs import GpuLost

HERE = str(Path(__file__).parents[1])
SPEC = Specialization("bf16", 128, 128, "causal")
ROOM = 200 << 20  #: bytes that a child may take beyond what it needs to be there
H200 = gpus.named("h200")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(HERE)


def outcome(crew, function, *arguments, seconds=20.0):
    """The ended job of one function of isolation_fakes."""
    crew.submit(Job(f"isolation_fakes:{function}", arguments, seconds))
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if ended := wait([crew], 1.0):
            return ended[0]
    raise AssertionError(f"{function} never ended")


def resident():
    """Bytes that a child holds which has imported isolation_fakes and done nothing yet: it depends on the libraries, and on
    how it is started."""
    return resident_of(subprocess.Popen)


@cache
def resident_of(_start):
    with Crew(1) as crew:
        return worker._held_bytes(outcome(crew, "pid").result)


def alive(pid):
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


# ---- processes


@pytest.mark.parametrize(
    ("function", "arguments", "status", "says"),
    [
        ("abort", (), "crash", "process died (SIGABRT): python: Layout.cpp:123: void convert(): Assertion"),
        ("segfault", (), "crash", "process died (SIGSEGV)"),
        ("leave", (), "crash", "process died (exit 3)"),
        ("spin", (), "timeout", "no answer within 1 s"),
        ("eat", (), "out_of_memory", "out of memory: it held"),
        ("broken", ("an illegal memory access was encountered",), "illegal_access", "Assertion `in bounds' failed"),
        ("broken", ("device-side assert triggered",), "device_assert", "CUDA error: device-side assert"),
        ("broken", ("uncorrectable ECC error encountered",), "failed", "ECC"),
        ("unspeakable", (), "crash", "process died (exit 1)"),
        ("kill_itself", (), "killed", "SIGKILL"),
    ],
)
def test_each_fault_costs_one_job_and_seconds_and_has_a_word(function, arguments, status, says):
    with Crew(1, memory=resident() + ROOM) as crew:
        first = outcome(crew, "pid").result
        begun = time.monotonic()
        job = outcome(crew, function, *arguments, seconds=1.0 if function == "spin" else 20.0)
        assert job.died and says in job.failure, job.failure
        assert status_of(job) == status and status in FAULTS | BLAMELESS
        assert not alive(first)
        second = outcome(crew, "pid")
        assert second.result != first and crew.started == 2 and time.monotonic() - begun < 60


def test_a_child_says_how_long_it_needs():
    with Crew(1) as crew:
        assert outcome(crew, "patient", 60.0, 3.0, seconds=2.0).result == "done"
        hung = outcome(crew, "patient", 0.5, 60.0, seconds=60.0)
        assert hung.failure == "no answer within 0 s" or hung.failure == "no answer within 1 s"
        assert hung.took < 50 and status_of(hung) == "timeout"


def test_an_answer_that_waited_for_the_parent_is_not_late():
    """The parent may be busy burying another child while a deadline passes."""
    with Crew(1) as crew:
        outcome(crew, "pid")
        crew.submit(Job("isolation_fakes:patient", (0.5, 0.1), 0.5))
        time.sleep(3.0)
        while crew.load:
            ended = crew.collect([]) or wait([crew], 30)  # the first knows of no pipe that is ready
        assert [job.result for job in ended] == ["done"]


def test_imports_are_no_part_of_a_deadline(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(3.5)\ndef answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Crew(1) as crew:
        crew.submit(Job("slow_to_import:answer", (), 3.0))
        (job,) = wait([crew], 60)
        assert job.result == 42 and job.took < 3.0
        job = Job("no_such_module:answer", (), 20)
        crew.submit(job)
        wait([crew], 60)
        assert "ModuleNotFoundError" in job.failure and status_of(job) == "failed"  # no candidate's fault


@pytest.mark.parametrize("kind", ["stall", "eat"])
def test_what_a_compiler_started_ends_with_it(kind, tmp_path):
    """ptxas is a process of its own: it must not outlive its compile, and its memory counts."""
    with Crew(1, memory=2 * resident() + ROOM) as crew:
        hung_after = 3.0 if kind == "stall" else None
        job = outcome(crew, "spawn", kind, str(tmp_path / "pids"), hung_after, seconds=60.0)
        assert status_of(job) == {"stall": "timeout", "eat": "out_of_memory"}[kind]
        started, child = map(int, (tmp_path / "pids").read_text().split())
        assert until(lambda: not alive(started) and not alive(child))


def test_nobody_survives_a_parent_that_is_killed(tmp_path):
    """kill -9 on the tuner in the midst of a compile: neither the compiling child nor what it started goes on."""
    code = (
        f"import sys; sys.path[:0] = {[HERE, *sys.path]!r}\n"
        "from fa2tune.measuring.worker import Crew, Job, wait\n"
        "crew = Crew(2)\n"
        f"crew.submit(Job('isolation_fakes:spawn', ('stall', {str(tmp_path / 'pids')!r}), 600))\n"
        "crew.submit(Job('isolation_fakes:stall', (), 600))\n"
        f"open({str(tmp_path / 'children')!r}, 'w').write(' '.join(str(c.process.pid) for c in crew.children))\n"
        "wait([crew], 600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert until((tmp_path / "pids").exists, 60)
        family = [int(pid) for name in ("pids", "children") for pid in (tmp_path / name).read_text().split()]
        assert all(alive(pid) for pid in family) and len(set(family)) == 3
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert until(lambda: not any(alive(pid) for pid in family)), "orphans go on"


def test_a_spare_stands_by_and_takes_over():
    with Crew(1, spare="isolation_fakes") as crew:
        first = outcome(crew, "pid").result
        spare = next(child.process.pid for child in crew.children if child.process.pid != first)
        assert outcome(crew, "pid").result == first  # the spare replaces the dead only
        assert outcome(crew, "segfault").died
        assert outcome(crew, "pid").result == spare and crew.load == 0
        assert len(crew.children) == 2


def test_a_child_that_was_prepared_gets_the_first_job():
    with Crew(1, spare="isolation_fakes") as crew:
        crew.prepare()
        crew.prepare()
        [child] = crew.children
        assert crew.load == 0 and outcome(crew, "pid").result == child.process.pid
        assert crew.started == 2, "and the spare"
    with Crew(1) as crew:  # nothing is known that it could import
        crew.prepare()
        assert not crew.children


def test_a_spare_that_cannot_live_is_not_started_for_ever(monkeypatch):
    with Crew(1, spare="isolation_fakes") as crew:
        outcome(crew, "pid")
        crew.children[1].process.kill()
        until(lambda: wait([crew], 0.2) or len(crew.children) == 1)
        assert len(crew.children) == 1 and crew.started == 2


def test_a_process_that_cannot_be_killed_ends_the_run(monkeypatch):
    """In the driver's functions a process may outlive SIGKILL: then the GPU is not free, and nothing may be measured on it."""
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.2)
    with Crew(1) as crew:
        crew.submit(Job("isolation_fakes:stall", (), 0.5))
        (child,) = crew.children
        real = child.process.wait

        def never(timeout=None):
            raise subprocess.TimeoutExpired("child", timeout)

        child.process.wait = never
        (job,) = wait([crew], 60)
        assert job.stuck and job.died
        real(30)
    from fa2tune.tuning.select import gpu_jobs

    steps = gpu_jobs.run("fa2tune.measuring.measure:race", ())
    next(steps)
    with pytest.raises(GpuLost, match="cannot be killed"):
        steps.send(job)


# ---- the failure record

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


def test_nobody_is_blamed_for_what_he_did_not_do(tmp_path):
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
        "from test_isolation import DEFAULT, SPEC, TODAY\n"
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


# ---- the tuner

FAKES = WorkerFunctions(
    "isolation_fakes:compile_check", "isolation_fakes:race", "isolation_fakes:check", "tuner_fakes:check_backward"
)
BUCKETS = (512, 4096)


class Bench:
    """Runs the tuner over a small space, of which some configs are poisoned, and tells what came of it."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.log = folder, folder / "faults.jsonl"
        self.lines = []
        monkeypatch.setenv("FA2TUNE_FAKE_LOG", str(folder / "log.jsonl"))
        monkeypatch.setenv("FA2TUNE_FAULTS", str(folder / "faults.json"))
        monkeypatch.setattr(reader, "shipped_paths", list)
        monkeypatch.setattr(plan, "resolve_target", lambda name: Target(H200, MEASURED, H200))
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
        monkeypatch.setattr(compiles, "AT_FIRST", 10.0)
        monkeypatch.setattr(compiles, "AT_LEAST", 10.0)
        monkeypatch.setattr(compiles, "MEMORY", resident() + ROOM)
        self.space = FWD.space
        dimensions = {
            "BLOCK_M": (64, 128), "BLOCK_N": (32, 64), "LOADS": ("pointer", "descriptor"), "MASKED": ("last",),
            "HEADS_PER_WAVE": (1, 4), "num_warps": (4,), "num_stages": (2, 3), "maxnreg": (0,),
        }  # fmt: skip
        default = dict(self.space.default(SPEC, 90)) | {name: values[0] for name, values in dimensions.items()}
        small = replace(self.space, dimensions=dimensions, default=lambda spec, arch: default)
        object.__setattr__(FWD, "space", small)
        self.default = default
        compiler.runtime_names(FWD)  # imports Triton, which takes a second that deadlines as short as these would miss
        self.poison([])

    def close(self):
        object.__setattr__(FWD, "space", self.space)

    def poison(self, faulty):
        """(config, fault) of each that shall go wrong."""
        table = {"faults": list(faulty), "log": str(self.log)}
        (self.folder / "faults.json").write_text(json.dumps(table))
        return table

    def one_each(self, kinds, spared=()):
        """Each fault on a binary of its own; the default and ``spared`` stay healthy."""
        taken = [faults.binary_of(config) for config in (self.default, *spared)]
        chosen = []
        free = random.Random(1).sample(points := bench_configs(), len(points))
        for kind in kinds:
            config = next(config for config in free if faults.binary_of(config) not in taken)
            taken.append(faults.binary_of(config))
            chosen.append((config, kind))
        return chosen

    def request(self, name, **more):
        values = {
            "trials": 1000,
            "buckets": BUCKETS,
            "dtypes": ("bf16",),
            "masks": ("causal",),
            "pass_": "fwd",
            "workers": 2,
        }
        return TuneRequest(
            cache=self.folder / f"{name}.sqlite", studies=self.folder / f"{name}-studies.sqlite", **{**values, **more}
        )

    def tune(self, name, **more):
        self.log.unlink(missing_ok=True)
        lines = self.lines = []

        class Listener(Watcher):
            def line(self, text):
                lines.append(text)

        return tuner.tune(self.request(name, **more), Listener(), FAKES)

    def tried(self, name):
        """Every config of the studies of one file."""
        storage = f"sqlite:///{self.folder / name}-studies.sqlite"
        studies = [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]
        trials = [trial.params for study in studies for trial in study.trials]
        return [dict(found) for found in dict.fromkeys(tuple(sorted(params.items())) for params in trials)]

    def done(self):
        """(fault, config) of each that happened."""
        return [tuple(entry) for entry in fake_log.read(self.log)]


@pytest.fixture
def bench(tmp_path, monkeypatch, portable_kernels, quick_starts):
    """How a child starts is tested above."""
    bench = Bench(tmp_path, monkeypatch)
    yield bench
    bench.close()


def winners(report):
    return {(row.key.bucket, row.implementation): dict(row.config) for row in report.rows}


def test_three_poisoned_in_ten_change_no_winner_and_none_is_tried_twice(bench, monkeypatch):
    best = winners(bench.tune("clean"))
    assert set(best) == {(bucket, loads) for bucket in BUCKETS for loads in ("pointer", "descriptor")}

    kinds = (*faults.COMPILING, *faults.LAUNCHING)
    table = bench.poison(bench.one_each(kinds, best.values()))
    poisoned = bench.tune("poisoned")
    tried = bench.tried("clean")
    hit = [fault for config in tried if (fault := faults.fault_of(config, table))]
    assert len(hit) > 0.3 * len(tried) and {fault for fault, _ in bench.done()} == set(hit) == set(kinds)
    assert winners(poisoned) == best
    assert sorted(map(repr, bench.tried("poisoned"))) == sorted(map(repr, tried))  # none was lost on the way
    counted = Counter(faults.FATE[fault] for fault in hit)
    for row in poisoned.rows:
        assert {status: row.pruned.get(status, 0) for status in counted} == counted and "failed" not in row.pruned

    # a compile that took too long is given another chance, by the next run only
    monkeypatch.setattr(compiles, "AT_FIRST", 3.0)  # nothing else is compiled in that run
    second = bench.tune("poisoned")
    monkeypatch.setattr(compiles, "AT_FIRST", 10.0)
    assert {fault for fault, _ in bench.done()} == {"stall"} and second.compiled == 1 and winners(second) == best

    # another study (a file of its own, other lengths) leaves them out, and says so
    again = bench.tune("another", buckets=(1024,))
    assert not bench.done()
    assert len(bench.tried("another")) == len(tried) - len(hit)
    for row in again.rows:
        assert {name: row.pruned.get(f"{name}_before", 0) for name in counted} == counted
    (said,) = [line for line in bench.lines if "candidates left out, as they failed" in line]
    assert "--retry-failed" in said and said.count("earlier run") == 1 and "_" not in said
    assert {v: c for (_, v), c in winners(again).items()} == {v: c for (b, v), c in best.items() if b == 512}

    # the study they failed in resumes without a word, and takes a new length without them
    before = bench.tune("poisoned")
    assert before.compiled == 0 and winners(before) == best and not bench.done()
    assert not any("candidates left out" in line for line in bench.lines)
    bench.tune("poisoned", buckets=(*BUCKETS, 1024))
    assert not bench.done()


def test_a_check_that_hangs_disqualifies_its_candidate(bench):
    best = winners(bench.tune("clean", buckets=(512,)))
    bench.poison([(best[512, "pointer"], "check_hang")])
    sick = bench.tune("sick", buckets=(512,))
    assert {fault for fault, _ in bench.done()} == {"check_hang"} and len(bench.done()) == 2  # looked at twice
    assert set(winners(sick)) == set(best) and winners(sick)[512, "pointer"] != best[512, "pointer"]
    bench.tune("another", buckets=(512,))
    assert not bench.done()


def test_retry_failed_tries_again_and_a_cured_candidate_may_win(bench, monkeypatch):
    best = winners(bench.tune("clean", buckets=(512,)))
    bench.poison(zip(best.values(), ("crash", "illegal"), strict=True))
    sick = bench.tune("sick", buckets=(512,))
    failed = {json.dumps(config, sort_keys=True) for fault, config in bench.done()}
    assert failed and winners(sick) != best
    bench.poison([])
    assert winners(bench.tune("sick", buckets=(512,))) == winners(sick)  # cured, but not tried again
    cured = bench.tune("sick", buckets=(512,), retry_failed=True)
    assert cured.compiled == len(failed) and winners(cured) == best
    assert cured.statuses == {}
    assert winners(bench.tune("sick", buckets=(512,))) == best and not any("left out" in line for line in bench.lines)


def test_another_driver_tries_launches_again_and_compiles_not(bench, monkeypatch):
    driver = ["580.1"]
    monkeypatch.setattr("fa2tune.compiling.fingerprint.driver_version", lambda: driver[0])
    bench.poison(bench.one_each(faults.QUICK))
    bench.tune("study", buckets=(512,))
    kinds = Counter(fault for fault, _ in dict.fromkeys((f, json.dumps(c)) for f, c in bench.done()))
    assert sum(kinds[kind] for kind in faults.COMPILING) and sum(kinds[kind] for kind in faults.LAUNCHING)
    driver[0] = "590.1"
    rows = bench.tune("study", buckets=(512,)).rows
    assert rows and {row.driver for row in rows} == {"590.1"}  # none that was kept under the other
    again = Counter(fault for fault, _ in dict.fromkeys((f, json.dumps(c)) for f, c in bench.done()))
    assert {kind: n for kind, n in kinds.items() if kind not in faults.COMPILING} == again


def bench_configs():
    """Every point of the small space."""
    return list(FWD.space.points())


def test_the_failure_record_is_no_part_of_a_cache_file(bench):
    bench.poison(bench.one_each(("abort", "crash")))
    bench.tune("cache", buckets=(512,))
    assert (bench.folder / "ledger.sqlite").exists()
    with sqlite3.connect(bench.folder / "cache.sqlite") as connection:
        assert {name for (name,) in connection.execute("select name from sqlite_master")} == {"rows"}


def test_the_command_tells_what_failed_and_how_to_try_again(bench, monkeypatch):
    monkeypatch.setattr("fa2tune.tuning.request.watcher.WorkerFunctions", lambda: FAKES)
    bench.poison(bench.one_each(("abort", "crash")))
    bench.tune("first", buckets=(512,))
    arguments = [
        "--dtype",
        "bf16",
        "--causal",
        "--pass",
        "fwd",
        "--seqlen",
        "512",
        "--trials",
        "1000",
        "--workers",
        "2",
    ]
    files = ["--cache", str(bench.folder / "c.sqlite"), "--studies", str(bench.folder / "s.sqlite")]
    result = CliRunner().invoke(tune_command, [*arguments, *files])
    assert result.exit_code == 0, result.output
    (messages,) = [line for line in result.output.splitlines() if "candidates left out" in line]
    assert "--retry-failed" in messages and "crash: " in messages
    assert any(
        line.strip().startswith("fwd: ") and "crash, in an earlier run: " in line for line in result.output.splitlines()
    )
    (bench.folder / "ledger.sqlite").write_text("poem, and long enough that SQLite looks at it " * 20)
    result = CliRunner().invoke(tune_command, [*arguments, *files])
    assert result.exit_code == 1 and "no database" in result.output.replace("not a", "no") and "ledger" in result.output


def test_true_times_of_the_small_space_differ(bench):
    """Or else the same winner would be luck."""
    times = sorted(true_time(config, 512) for config in bench_configs() if config["LOADS"] == "pointer")
    assert times[0] < times[1]


def test_every_fault_has_a_status_that_the_failure_record_keeps():
    assert set(faults.FATE.values()) <= FAULTS
    assert {word for word, _ in status._WORDS} <= FAULTS | BLAMELESS | {"wrong_result"}
