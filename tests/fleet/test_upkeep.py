"""Whether a cache file still holds, and mending it, with fake functions in real child processes: no GPU, no compiler."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tuner_fakes import logged, true_time
from variant_fakes import DEFAULT

from fa2tune import gpus
from fa2tune.cli.cache import cache
from fa2tune.compiling import limits
from fa2tune.compiling.registry import portable_of, variants
from fa2tune.fleet import finding, repair
from fa2tune.fleet.finding import FAILS, HOLDS, LOST, UNTIMED, UNTOLD, Finding, PresentGpu
from fa2tune.fleet.upkeep import Verification
from fa2tune.rows import reader, record
from fa2tune.rows.row import MEASURED, PORTED, PREDICTED, Row
from fa2tune.rows.store import Store
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import KERNELS
from fa2tune.spec.variant import WARP_SPECIALIZED
from fa2tune.tuning.request import plan
from fa2tune.tuning.request.plan import Target, TuneRequest
from fa2tune.tuning.request.provenance import Provenance
from fa2tune.tuning.request.watcher import Watcher, WorkerFunctions
from fa2tune.tuning.run import tuner
from fa2tune.tuning.select import evidence, finalists

pytestmark = pytest.mark.usefixtures("quick_starts")

FUNCTIONS = WorkerFunctions(
    "upkeep_fakes:compile_check", "upkeep_fakes:race", "upkeep_fakes:check", "upkeep_fakes:check_backward"
)
GPU = PresentGpu(gpus.named("h200"), "NVIDIA H200", "580.1")
KEY = TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, "causal", 512)
SHIPPED_PATHS = reader.shipped_paths


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.setenv("FA2TUNE_FAKE_LOG", str(tmp_path / "log.jsonl"))
    monkeypatch.setattr(reader, "shipped_paths", list)
    return tmp_path / "log.jsonl"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what goes wrong: (kind, entries of a config, figure)."""
    return lambda *wrong: monkeypatch.setenv("FA2TUNE_FAKE_FAULTS", json.dumps(wrong))


def config(kernel: str = "fwd", arch: int = 90, **changes: Any) -> dict[str, Any]:
    """One that the fake GPU runs faster than the default."""
    rival = finalists.rival(portable_of(kernel).space, KEY.specialization(), arch, "pointer")
    return {**rival, "BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3, **changes}


def made(key: TuningKey = KEY, implementation: str = "pointer", strategy: str = "", **changes: Any) -> Row:
    """A measured row as this toolchain's tuner would make it, with the times of the fake GPU."""
    chosen = changes.pop("config") if "config" in changes else config(key.kernel)
    time_us = true_time(chosen, key.bucket) if key.kernel != "bwd" else 100.0
    times = [time_us * (1 + 0.001 * turn) for turn in range(9)]
    provenance = Provenance(MEASURED, GPU.name, GPU.driver)
    row = evidence.measured(key, implementation, chosen, provenance, times, times, strategy)
    return replace(row, clock_mhz=1980, created="2026-01-01T00:00:00Z", **changes)


def predicted(**changes: Any) -> Row:
    key = replace(KEY, gpu="a100-sxm-80gb", sm_count=108, arch=80)
    chosen = config(arch=80)
    time_us = true_time(chosen, key.bucket)
    row = evidence.predicted(key, "pointer", chosen, Provenance(PREDICTED), time_us, time_us)
    return replace(row, created="2026-01-01T00:00:00Z", **changes)


def look(rows: list[Row], present: PresentGpu | None = GPU, among: list[Row] | None = None) -> Verification:
    return Verification(rows, rows if among is None else among, present, FUNCTIONS, 2)


def found(rows: list[Row], present: PresentGpu | None = GPU) -> list[Finding]:
    return look(rows, present).go()


def did(log: Path, kind: str) -> list[Any]:
    return [entry[1:] for entry in logged(log, kind)]


def test_what_holds_comes_with_todays_evidence(log: Path) -> None:
    other = made(replace(KEY, bucket=1024))
    [one, two] = found([made(), other])
    assert (one.state, two.state) == (HOLDS, HOLDS)
    assert one.fresh and one.fresh.key == KEY
    assert one.fresh.created > "2026-01-01T00:00:00Z"
    assert one.fresh.time_us == pytest.approx(made().time_us, rel=0.01)
    assert one.fresh.errors and one.fresh.samples == 9 and one.fresh.registers == 128
    assert abs(one.loss or 0.0) < 0.01
    assert len(did(log, "compile")) == 1, "one config, compiled once for all its lengths"
    assert len(did(log, "check")) == 1
    assert [entry[1] for entry in did(log, "proof")] == [512, 1024]


def test_a_changed_toolchain_makes_a_row_stale_and_verifying_makes_it_fresh() -> None:
    old = made(triton="3.5.1", kernel_hash="0" * 16)
    [one] = found([old])
    assert one.state == HOLDS
    assert [part.split()[0] for part in one.stale] == ["triton", "kernel"]
    assert one.fresh and not finding.toolchain_here(GPU).stale(one.fresh)


def test_another_driver_is_a_note_and_makes_no_row_stale() -> None:
    [one] = found([made(driver="570.1")])
    assert (one.state, one.stale, one.driver) == (HOLDS, (), f"timed under driver 570.1, here {GPU.driver}")
    assert one.fresh and one.fresh.driver == GPU.driver
    assert [f.driver for f in found([made()])] == [""]
    assert [f.driver for f in found([made(driver="570.1")], None)] == [""], "no GPU, no driver to compare with"


def test_what_goes_wrong_is_found_and_costs_no_other(faults: Any) -> None:
    expected = [  # BLOCK_N, MASKED, what is wrong with rows of these, and what is found
        (64, "last", None, HOLDS, "", False),
        (64, "first", ("compile", 1), FAILS, "compile_error: CompilationError: no", False),
        (64, "inside", ("wrong", 1), FAILS, "wrong_result: WrongResult: o: max error 1", True),
        (32, "last", ("crash", 1), FAILS, "crash", True),
        (32, "first", ("slow", 1.05), LOST, "5.0 % slower than recorded", False),
        (32, "inside", ("slow", 1.02), HOLDS, "", False),
        (16, "last", ("slow", 0.5), HOLDS, "", False),
        (16, "first", ("killed", 1), UNTOLD, "killed", False),
    ]
    wrong = [
        (what[0], {"BLOCK_N": n, "MASKED": masked, "BLOCK_M": 128}, what[1]) for n, masked, what, *_ in expected if what
    ]
    faults(*wrong)
    seen = found([made(config=config(BLOCK_N=n, MASKED=masked)) for n, masked, *_ in expected])
    assert [(one.state, one.dangerous) for one in seen] == [(state, dangerous) for *_, state, _, dangerous in expected]
    for one, (*_, state, said, _) in zip(seen, expected, strict=True):
        assert said in one.why
        assert (one.fresh is not None) == (state in (HOLDS, LOST))


def test_on_a_throttled_gpu_nothing_can_be_told(faults: Any) -> None:
    faults(["throttled", {}, 1])
    [one] = found([made()])
    assert (one.state, one.fresh) == (UNTOLD, None)
    assert "throttled" in one.why


def test_a_gpu_at_a_lower_clock_is_no_loss_and_a_default_that_overtook_is(faults: Any) -> None:
    mine = config(BLOCK_N=32)
    for clock, slow, state in (
        (1.06, 1.06, HOLDS),
        (0.8, 1.02, HOLDS),
        (0.8, 0.9, HOLDS),
        (0.8, 1.05, LOST),
    ):
        faults(["clock", {}, clock], ["slow", {}, slow])
        assert [f.state for f in found([made(config=mine)])] == [state], (clock, slow)
    faults(["slow", {"BLOCK_M": 64}, 0.3])
    [one] = found([made(config=mine)])
    assert one.state == LOST
    assert "the default config is now faster" in one.why


def test_at_a_much_lower_clock_a_row_holds_by_its_lead_over_the_default_or_nothing_is_told(faults: Any) -> None:
    mine, led = config(BLOCK_N=32), finalists.rival(portable_of("fwd").space, KEY.specialization(), 90, "pointer")
    row = replace(
        made(config=mine), default_time_us=true_time(led, KEY.bucket), gain=true_time(led, 512) / true_time(mine, 512)
    )
    faults(["clock", {}, 1.5], ["slow", {}, 1.5])
    [one] = found([row])
    assert (one.state, one.fresh) == (HOLDS, None) and "as before; the GPU ran at 1320 MHz, and at 1980" in one.why
    assert [f.state for f in found([replace(row, triton="3.5.1")])] == [UNTOLD], "the default may have lost as much"
    assert [f.state for f in found([replace(row, driver="570.1")])] == [HOLDS], "the same machine code, of both"
    faults(["clock", {}, 1.5], ["slow", {"BLOCK_N": 32}, 1.1], ["slow", {}, 1.05])
    assert [f.state for f in found([row])] == [UNTOLD]


def test_without_the_gpu_a_measured_row_is_compiled_and_that_is_said(log: Path, faults: Any) -> None:
    [one] = found([made()], None)
    assert one.state == UNTIMED
    assert one.why == "compiles within the limits; NVIDIA H200 is not here to time it"
    assert one.fresh is None
    faults(["compile", {}, 1])
    assert [f.state for f in found([made()], None)] == [FAILS]


def test_a_gpu_of_the_same_architecture_checks_but_does_not_time(log: Path) -> None:
    h100 = PresentGpu(gpus.named("h100"), "NVIDIA H100 80GB HBM3", "580.1")
    [one] = found([made()], h100)
    assert one.state == UNTIMED
    assert "correct on NVIDIA H100" in one.why
    assert len(did(log, "check")) == 1


def test_a_predicted_row_is_predicted_again_and_checked_in_the_interpreter(log: Path, faults: Any) -> None:
    [one] = found([predicted(proof="sibling")], None)
    assert one.state == HOLDS and one.fresh
    assert (one.fresh.proof, one.fresh.obtained) == ("interpreter", PREDICTED)
    assert did(log, "check")[0][1] == "cpu"
    faults(["slow", {}, 1.2])
    [one] = found([predicted()], None)
    assert (one.state, one.why) == (LOST, "20.0 % slower than recorded, by the model")


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ({"config": {}}, "a 'portable"),
        ({"config": config(num_warps="8")}, "which is no value"),
        ({"config": config(BLOCK_M=0)}, "which is no value"),
        ({"config": config(BLOCK_M=1 << 50)}, "which is no value"),
        ({"config": config(BLOCK_M=True)}, "which is no value"),
        ({"key": replace(KEY, kernel="later")}, "no call has kernel 'later'"),
        ({"key": replace(KEY, kernel="bwd_delta")}, "no call has kernel 'bwd_delta'"),
        ({"key": replace(KEY, dtype="fp8")}, "no call has dtype 'fp8'"),
        ({"key": replace(KEY, precision="tf32")}, "no call has precision 'tf32'"),
        ({"key": replace(KEY, head_dim=4096)}, "no call has head dim 4096"),
        ({"key": replace(KEY, bucket=1 << 40)}, "no call has length bucket"),
        ({"key": replace(KEY, kernel="bwd", bucket=1 << 40)}, "no call has length bucket"),
        ({"key": replace(KEY, gpu="h999", arch=80), "config": config(LOADS="descriptor")}, ""),
    ],
    ids=str,
)
def test_a_row_that_no_call_takes_fails_before_a_compile(spoilt: Any, said: str, log: Path) -> None:
    [one] = found([replace(made(), **spoilt)])
    assert one.state == FAILS
    assert one.why.startswith("refused: ")
    assert not log.exists()


def backward() -> list[Row]:
    parts = [made(replace(KEY, kernel=name), config=config(name)) for name in ("bwd_dq", "bwd_dkdv")]
    time_us = sum(row.time_us or 0.0 for row in parts)
    return [*parts, replace(made(replace(KEY, kernel="bwd"), "portable", "split", config={}), time_us=time_us)]


def test_a_whole_backward_holds_as_its_kernels_do(faults: Any) -> None:
    rows = backward()
    assert [f.state for f in found(rows)] == [HOLDS] * 3
    [alone] = look(rows[2:], GPU, rows).go()
    assert alone.state == HOLDS, "its kernels are of the file, even if they were not asked for"
    [orphan] = found(rows[2:])
    assert (orphan.state, orphan.why) == (UNTOLD, "no measured row for its bwd_dkdv, bwd_dq")
    assert [f.state for f in found(rows, None)] == [UNTIMED] * 3
    faults(["wrong", {"num_stages": rows[0].config["num_stages"]}, 1])
    assert [f.state for f in found(rows)][2] == FAILS


# --- repair


@pytest.fixture
def tune(portable_kernels: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    here = Target(GPU.gpu, MEASURED, GPU.gpu)
    monkeypatch.setattr(plan, "resolve_target", lambda name: here)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: GPU.name)
    monkeypatch.setattr("fa2tune.compiling.fingerprint.driver_version", lambda: GPU.driver)
    asked: list[TuneRequest] = []

    def run(request: TuneRequest) -> Any:
        asked.append(request)
        return tuner.tune(request, Watcher(), FUNCTIONS)

    run.asked = asked  # type: ignore[attr-defined]
    return run


def mended(path: Path, tune: Any, present: PresentGpu | None = GPU) -> repair.Repaired:
    seen = look(reader.read(path), present)
    return repair.repair(path, seen.go(), seen, tune, trials=4, workers=2)


def test_repair_refreshes_what_holds_and_tunes_only_the_rest(tmp_path: Path, tune: Any, faults: Any) -> None:
    path = tmp_path / "cache.sqlite"
    lost = made(replace(KEY, bucket=1024), config=config(BLOCK_N=32), triton="3.5.1")
    Store(path).put([made(triton="3.5.1"), lost])
    faults(["slow at", {"bucket": 1024, "BLOCK_N": 32}, 1.5])
    done = mended(path, tune)
    [request] = tune.asked
    assert (request.kernels, request.buckets, request.head_dims, request.dtypes) == (
        ("fwd",),
        (1024,),
        (128,),
        ("bf16",),
    )
    assert (request.gpu, request.masks, request.studies) == ("h200", ("causal",), path.with_name("studies.sqlite"))
    assert [row.key.bucket for row in done.refreshed] == [512]
    assert {row.key.bucket for row in done.retuned} == {1024}
    rows = {(row.key.bucket, row.implementation): row for row in reader.read(path)}
    assert rows[512, "pointer"].config == made().config
    assert rows[1024, "pointer"].config["BLOCK_N"] != 32
    here = finding.toolchain_here(GPU)
    assert not any(here.stale(row) for row in rows.values())
    assert all(f.state == HOLDS for f in found(list(rows.values())))
    assert not done.kept and not done.withdrawn


def test_a_row_of_this_very_toolchain_is_searched_for_anew(tmp_path: Path, tune: Any, faults: Any) -> None:
    path = tmp_path / "cache.sqlite"
    tune(
        TuneRequest(
            gpu="h200",
            dtypes=("bf16",),
            masks=("causal",),
            pass_="fwd",
            buckets=(512,),
            trials=4,
            cache=path,
            workers=2,
        )
    )
    before = {row.filed_as: row for row in reader.read(path)}
    faults(["slow", {"num_warps": before["pointer"].config["num_warps"], "LOADS": "pointer"}, 3.0])
    done = mended(path, tune)
    after = {row.filed_as: row for row in reader.read(path)}
    assert [row.filed_as for row in done.retuned if row.implementation == "pointer"] or done.kept
    assert after["pointer"].created >= before["pointer"].created
    assert (after["pointer"].time_us or 0) != before["pointer"].time_us, "not what the studies kept"


def test_repair_touches_nothing_but_what_is_to_be_mended(tmp_path: Path, tune: Any, faults: Any) -> None:
    """A search finds a row for every implementation of a key: the one that holds keeps its own, one that was not looked at,
    too, and one that the file lacked comes in. Also where the search is cut off."""
    path = tmp_path / "cache.sqlite"
    held = made(implementation="descriptor", config=config(LOADS="descriptor", num_stages=2), triton="3.5.1")
    elsewhere = made(replace(KEY, bucket=1024), triton="3.5.1")
    Store(path).put([held, made(triton="3.5.1"), elsewhere])
    faults(["slow at", {"LOADS": "pointer", "bucket": 512}, 1.05])
    seen = look([row for row in reader.read(path) if row.key == KEY], among=reader.read(path))
    findings = {finding.row.filed_as: finding for finding in seen.go()}
    assert (findings["descriptor"].state, findings["pointer"].state) == (HOLDS, LOST)

    def cut_off(request: TuneRequest) -> Any:
        assert request.cache != path
        report = tune(replace(request, buckets=(512, 1024)))
        report.interrupted = True
        return report

    with pytest.raises(KeyboardInterrupt):
        repair.repair(path, list(findings.values()), seen, cut_off, trials=4, workers=2)
    rows = {(row.key.bucket, row.implementation): row for row in reader.read(path)}
    assert rows[512, "descriptor"] == findings["descriptor"].fresh
    assert rows[1024, "pointer"] == elsewhere
    assert rows[512, "pointer"].created > made().created, "what was found by then"
    assert (1024, "descriptor") in rows, "which the file lacked"


def test_a_search_tries_what_serves_its_keys_beside_its_trials(tmp_path: Path, tune: Any, faults: Any) -> None:
    path = tmp_path / "cache.sqlite"
    best = config(num_stages=3)
    Store(path).put([made(config=best, triton="3.5.1")])
    report = tune(
        TuneRequest(
            gpu="h200",
            dtypes=("bf16",),
            masks=("causal",),
            pass_="fwd",
            buckets=(512,),
            trials=1,
            cache=path,
            workers=2,
        )
    )
    [pointer] = [row for row in report.rows if row.implementation == "pointer"]
    assert pointer.triton != "3.5.1" and pointer.config["BLOCK_M"] == best["BLOCK_M"]
    assert (pointer.time_us or 0) <= 1.01 * true_time(best, 512), "it, or another launch of its binary"


def test_what_nothing_replaces_is_kept_or_withdrawn_never_lost(tmp_path: Path, faults: Any) -> None:
    path = tmp_path / "cache.sqlite"
    slow, wrong = made(config=config(BLOCK_N=32)), made(replace(KEY, bucket=1024), config=config(BLOCK_N=16))
    broken = made(replace(KEY, bucket=2048), config=config(BLOCK_M=64))
    Store(path).put([slow, wrong, broken])
    faults(["slow", {"BLOCK_N": 32}, 1.5], ["wrong", {"BLOCK_N": 16}, 1], ["compile", {"BLOCK_M": 64}, 1])

    def in_vain(request: TuneRequest) -> Any:
        raise AssertionError("the plan refuses first")

    done = mended(path, in_vain)  # no GPU is present for the plan
    assert not done.retuned and not done.refreshed
    assert sorted(row.key.bucket for row, _ in done.kept) == [512, 2048]
    assert [row for row, _ in done.withdrawn] == [wrong]
    left = {row.key.bucket: row for row in reader.read(path)}
    assert set(left) == {512, 2048}
    assert left[512].time_us == pytest.approx((slow.time_us or 0) * 1.5, rel=0.01), "what it says is true again"
    assert left[2048] == broken
    assert reader.read(repair.withdrawn_path(path)) == [wrong]
    Store(path).merge(repair.withdrawn_path(path))
    assert wrong in reader.read(path)


def test_withdrawn_rows_serve_no_call_and_one_that_takes_anothers_place_says_so(
    tmp_path: Path, faults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shipped"  # stands in for the one that is shipped
    monkeypatch.setattr(reader, "shipped_paths", SHIPPED_PATHS)
    monkeypatch.setattr("fa2tune.rows.reader.resources.files", lambda package: folder)
    faults(["wrong", {"BLOCK_N": 16}, 1])
    path = folder / "h200.sqlite"
    wrong = made(config=config(BLOCK_N=16))
    Store(path).put([wrong, made(replace(KEY, bucket=1024))])
    assert [row for row, _ in mended(path, None).withdrawn] == [wrong]
    assert reader.shipped_paths() == [path]
    assert [row.key.bucket for layer in reader.layers() for row in layer.rows] == [1024]
    assert sorted(file.name for file in folder.iterdir() if file.name[0] != ".") == [
        "h200.sqlite",
        "h200.sqlite.withdrawn",
    ]
    again = replace(wrong, created="2026-02-01T00:00:00Z")
    Store(path).put([again])
    [(row, why)] = mended(path, None).withdrawn
    assert row == again
    assert why.endswith("; replaces the row of 2026-01-01T00:00:00Z that was withdrawn before")


def test_rows_that_no_search_knows_are_kept_and_hold_up_nothing(tmp_path: Path, tune: Any, faults: Any) -> None:
    path = tmp_path / "cache.sqlite"
    changes: tuple[dict[str, Any], ...] = ({"kernel": "later_kernel"}, {"kernel": "bwd_delta"}, {"bucket": 77})
    odd = [replace(made(), key=replace(KEY, **change)) for change in changes]
    Store(path).put([*odd, made(replace(KEY, bucket=1024), config=config(BLOCK_N=32))])
    faults(["slow at", {"bucket": 1024, "BLOCK_N": 32}, 1.5])
    done = mended(path, tune)
    assert [request.buckets for request in tune.asked] == [(1024,)]
    assert {row.key.bucket for row in done.retuned} == {1024}
    assert {row.key for row, _ in done.kept} == {row.key for row in odd}
    for _, why in done.kept:
        assert "no call has" in why and "cannot search for its key: kept" in why
    left = reader.read(path)
    assert all(row in left for row in odd)


def test_an_interrupted_search_settles_nothing(tmp_path: Path, tune: Any, faults: Any) -> None:
    path = tmp_path / "cache.sqlite"
    wrong = made(config=config(BLOCK_N=16))
    Store(path).put([wrong])
    faults(["wrong", {"BLOCK_N": 16}, 1])

    def interrupted(request: TuneRequest) -> Any:
        report = tune(replace(request, trials=1))
        report.interrupted, report.rows = True, []
        return report

    with pytest.raises(KeyboardInterrupt):
        mended(path, interrupted)
    assert not repair.withdrawn_path(path).exists()


def test_a_whole_backward_is_compared_anew_on_the_repaired_kernels(tmp_path: Path, tune: Any, faults: Any) -> None:
    path = tmp_path / "cache.sqlite"
    rows = backward()
    Store(path).put([replace(row, time_us=(row.time_us or 0.0) / 1.2, triton="3.5.1") for row in rows])
    done = mended(path, tune)
    assert {request.kernels for request in tune.asked} == {("bwd_dq",), ("bwd_dkdv",)}
    assert "bwd" in {row.key.kernel for row in done.retuned}
    after = reader.read(path)
    assert all(f.state == HOLDS for f in found(after))
    assert {record.slot(row) for row in rows} <= {record.slot(row) for row in after}


def test_rows_of_one_slot_are_renewed_retuned_and_withdrawn_one_by_one(tmp_path: Path, tune: Any, faults: Any) -> None:
    """A slot may hold several configs: one that is wrong goes, the other stays with today's evidence."""
    path = tmp_path / "cache.sqlite"
    right, wrong = made(), made(config=config(BLOCK_N=32))
    Store(path).put([right, wrong])
    faults(["wrong", {"BLOCK_N": 32}, 1])

    def nothing_found(request: TuneRequest) -> Any:
        report = tune(replace(request, trials=1))
        report.rows = []
        return report

    done = mended(path, nothing_found)
    [kept] = reader.read(path)
    assert kept.config == right.config and kept.created > right.created
    assert (
        [row.config for row, _ in done.withdrawn]
        == [wrong.config]
        == [row.config for row in reader.read(repair.withdrawn_path(path))]
    )


# --- the command


@pytest.fixture
def command(tmp_path: Path, tune: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("fa2tune.cli.cache.verify._functions", lambda: FUNCTIONS)
    monkeypatch.setattr(finding, "present_gpu", lambda: GPU)
    return lambda *arguments: CliRunner().invoke(
        cache, ["verify", "--cache", str(tmp_path / "cache.sqlite"), "--workers", "2", *map(str, arguments)]
    )


def test_the_command_tells_writes_nothing_and_mends_when_it_is_told_to(
    tmp_path: Path, command: Any, faults: Any
) -> None:
    path = tmp_path / "cache.sqlite"
    slow = made(replace(KEY, bucket=1024), config=config(BLOCK_N=32))
    Store(path).put([made(triton="3.5.1"), slow])
    before = path.read_bytes()
    faults(["slow at", {"bucket": 1024, "BLOCK_N": 32}, 1.5])
    seen = command()
    assert seen.exit_code == 1, seen.output
    assert "2 of 2 rows, 1 stale" in seen.output
    assert "1 holds, 1 lost" in seen.output
    [line] = [line for line in seen.output.splitlines() if "lost" in line and "h200" in line]
    assert "+50.0 %" in line
    assert command("--bucket", 512).exit_code == 0
    assert command("--stale").exit_code == 0
    assert path.read_bytes() == before, "verify alone writes nothing"
    mended = command("--repair", "--trials", 4)
    assert mended.exit_code == 0, mended.output
    assert "1 row updated" in mended.output
    assert command().exit_code == 0
    assert "none of the rows to check is stale" in command("--stale").output


def test_the_command_counts_rows_of_another_driver_and_repairs_none_for_it(tmp_path: Path, command: Any) -> None:
    path = tmp_path / "cache.sqlite"
    Store(path).put([made(driver="570.1")])
    before = path.read_bytes()
    assert "none of the rows to check is stale" in command("--stale", "--repair").output
    seen = command()
    assert seen.exit_code == 0, seen.output
    assert "1 of 1 rows, 0 stale" in seen.output and "1 holds" in seen.output
    note = f"note, 1 row: timed under driver 570.1, here {GPU.driver}; that makes no row stale"
    assert note in " ".join(seen.output.split())
    assert path.read_bytes() == before
    assert command("--repair").exit_code == 0
    assert [row.driver for row in reader.read(path)] == [GPU.driver]
    assert "note" not in command().output


def test_the_command_without_a_gpu_says_that_nothing_was_timed(
    tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "present_gpu", lambda: None)
    Store(tmp_path / "cache.sqlite").put([made()])
    seen = command()
    assert seen.exit_code == 0, seen.output
    assert "no GPU, so nothing is timed" in seen.output
    assert "not timed, 1 row: compiles within the limits" in seen.output


def test_the_command_names_a_file_that_it_cannot_read_or_write(tmp_path: Path, command: Any) -> None:
    assert "no such file" in command().output
    assert "need --repair" in command("--trials", 3).output
    assert "0 is not in the range" in command("--repair", "--trials", 0).output
    (tmp_path / "cache.sqlite").write_text("x")
    assert "is not an SQLite database" in command("--repair").output
    (tmp_path / "cache.sqlite").unlink()
    Store(tmp_path / "cache.sqlite").put([])
    assert "no row to check" in command().output
    assert command().exit_code == 2
    Store(tmp_path / "cache.sqlite").put([made()])
    none = command("--kernel", "bwd_dq")
    assert none.exit_code == 2 and "it has 1 row, none passes" in none.output, "all of nothing does not hold"


# --- the real compiler


def test_a_shipped_row_verifies_on_the_toolchain_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """CI runs this with the tested and with the newest Triton: rows of one are compiled and compiled by the other."""
    monkeypatch.undo()
    [path] = [path for path in reader.shipped_paths() if path.name == "a100.sqlite"]
    held = reader.read(path)
    wanted = ("fwd", "bf16", 64, 512, "causal")
    chosen = [r for r in held if (r.key.kernel, r.key.dtype, r.key.head_dim, r.key.bucket, r.key.mask) == wanted]
    assert chosen
    assert {row.obtained for row in chosen} == {PREDICTED, PORTED}
    for one in Verification(chosen, held, None).go():
        if one.row.obtained == PORTED:
            assert one.state == UNTIMED and "on a Hopper GPU" in one.why
            continue
        assert one.state in (HOLDS, LOST), one.why
        assert one.fresh and one.fresh.proof == "interpreter"
        here = finding.toolchain_here(None)
        assert bool(one.stale) == bool(here.stale(one.row))
        assert not here.stale(one.fresh)


# --- warp-specialised variants


@pytest.mark.usefixtures("specialized_fakes")
def test_rows_of_several_variants_each_hold_to_their_own(faults: Any) -> None:
    special = {"config": dict(DEFAULT), "implementation": WARP_SPECIALIZED}
    portable = backward()
    names = ("bwd_dq", "bwd_dkdv")
    specialized = [made(replace(KEY, kernel=name), **special) for name in names]
    implementations = dict.fromkeys(names, WARP_SPECIALIZED)
    time_us = sum(row.time_us or 0.0 for row in specialized)
    whole = made(replace(KEY, kernel="bwd"), WARP_SPECIALIZED, "split", config=implementations)
    rows = [made(), made(**special), *portable, *specialized, replace(whole, time_us=time_us)]
    slow = ["slow", {"LOADS": "descriptor"}, 9.0]  # the defaults that they stand in for
    faults(slow)
    first = found(rows)
    assert [(f.state, f.why) for f in first] == [(HOLDS, "")] * len(rows)
    assert [f.fresh.filed_as for f in first if f.fresh] == [row.filed_as for row in rows]
    assert not any(finding.toolchain_here(GPU).stale(f.fresh) for f in first if f.fresh)
    faults(slow, ["wrong", {"GROUPS": DEFAULT["GROUPS"]}, 1])
    states = [f.state for f in found(rows)]
    assert states == [HOLDS, FAILS, HOLDS, HOLDS, HOLDS, FAILS, FAILS, FAILS]
    assert [f.state for f in found(rows[1:2], None)] == [UNTIMED]


def test_a_persistent_grid_tells_whose_tiles_its_programs_own() -> None:
    spec = KEY.specialization()
    for name, variant in variants().items():
        if variant.serves in KERNELS:
            chosen = dict(variant.space.default(spec, 90))
            for persistent in variant.space.dimensions.get("PERSISTENT", (False,)):
                mine = chosen | ({"PERSISTENT": persistent} if "PERSISTENT" in chosen else {})
                assert limits.owns_queries(variant, mine) == (variant.serves in ("fwd", "bwd_dq")), name
