"""A run ends when everything that was asked for is settled; what is not is named, and the exit status says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from tuner_runs import FAKES, HERE, SPEC, Bench, Listener

from fa2tune import gpus
from fa2tune.cli import main
from fa2tune.rows import reader
from fa2tune.rows.row import PREDICTED, SIBLING
from fa2tune.spec.key import TuningKey
from fa2tune.tuning.request import plan
from fa2tune.tuning.request.plan import Target, TuneRequest
from fa2tune.tuning.run import tuner
from fa2tune.tuning.run.budget import Budget
from fa2tune.tuning.run.held_jobs import HeldJobs
from fa2tune.tuning.search.task import SearchTask
from fa2tune.tuning.select.completeness import close
from fa2tune.tuning.select.log import NONE_RIGHT

pytestmark = pytest.mark.usefixtures("portable_kernels", "quick_starts")

ABSENT = Target(gpus.named("a100"), PREDICTED, None)
ALIKE = Target(gpus.named("h100"), SIBLING, gpus.named("h200"))
TARGETS = pytest.mark.parametrize("target", [HERE, ALIKE, ABSENT], ids=["measured", "sibling", "predicted"])
TESTS = Path(__file__).parents[2]
KEY = TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, "causal", 512)
BOTH = ("bf16", "fp16")


def cells(rows: Any) -> set[tuple[Any, ...]]:
    """What rows say, without when they were made."""
    return {(row.key, row.filed_as, tuple(sorted(row.config.items())), row.time_us) for row in rows}


def keys(rows: Any) -> set[tuple[str, str, int]]:
    return {(row.key.kernel, row.key.dtype, row.key.bucket) for row in rows}


@TARGETS
def test_fp16_is_tuned_when_all_of_bf16_is_kept(bench: Bench, target: Target) -> None:
    first = bench.tune(target, trials=4)
    both = bench.tune(target, trials=4, dtypes=BOTH)
    assert keys(both.rows) == {("fwd", dtype, bucket) for dtype in BOTH for bucket in (512, 4096)}
    assert cells(first.rows) <= cells(both.rows) == cells(reader.read(bench.folder / "cache.sqlite"))
    assert cells(bench.tune(target, trials=4, dtypes=BOTH).rows) == cells(both.rows)


@TARGETS
def test_a_backward_is_whole_when_all_but_one_dtype_is_kept(bench: Bench, target: Target) -> None:
    bench.tune(target, trials=3, pass_="bwd", buckets=(1024,))
    both = bench.tune(target, trials=3, pass_="bwd", buckets=(1024,), dtypes=BOTH)
    kernels = ("bwd_dkdv", "bwd_dq", "bwd_fused", "bwd")
    assert keys(both.rows) == {(kernel, dtype, 1024) for kernel in kernels for dtype in BOTH}
    again = bench.tune(target, trials=3, pass_="bwd", buckets=(1024,), dtypes=BOTH)
    assert len(again.rows) == len(both.rows) and not again.compiled


@TARGETS
def test_the_same_command_goes_on_after_an_end_behind_the_first_row(
    bench: Bench, monkeypatch: Any, target: Target
) -> None:
    class Ends(Listener):
        def line(self, text: str) -> None:
            super().line(text)
            if "TFLOP/s" in text:
                raise KeyboardInterrupt

    monkeypatch.setattr(plan, "resolve_target", lambda name: target)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    request = TuneRequest(cache=bench.folder / "cache.sqlite", trials=4, buckets=(512,), dtypes=BOTH, masks=("causal",),
                          pass_="fwd", workers=2)  # fmt: skip
    assert tuner.tune(request, Ends(), FAKES).interrupted
    assert keys(reader.read(bench.folder / "cache.sqlite")) == {("fwd", "bf16", 512)}
    rows = tuner.tune(request, Listener(), FAKES).rows
    assert keys(rows) == {("fwd", dtype, 512) for dtype in BOTH}


# ---- what is not settled


def invoke(bench: Bench, monkeypatch: Any, target: Target, *arguments: str) -> Any:
    monkeypatch.setattr(plan, "resolve_target", lambda name: target)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("fa2tune.tuning.request.watcher.WorkerFunctions", lambda: FAKES)
    path = str(bench.folder / "cache.sqlite")
    return CliRunner().invoke(
        main, ["tune", "--pass", "fwd", "--causal", "--cache", path, "--workers", "2", *arguments]
    )


@TARGETS
def test_the_command_tunes_a_dtype_that_was_left_out_before(bench: Bench, monkeypatch: Any, target: Target) -> None:
    small = ["--seqlen", "512", "--trials", "3"]
    assert invoke(bench, monkeypatch, target, *small, "--dtype", "bf16").exit_code == 0
    result = invoke(bench, monkeypatch, target, *small)
    assert result.exit_code == 0 and "not tuned" not in result.output
    assert keys(reader.read(bench.folder / "cache.sqlite")) == {("fwd", dtype, 512) for dtype in BOTH}


@TARGETS
def test_what_a_time_budget_leaves_undone_is_named_and_the_status_is_1(
    bench: Bench, monkeypatch: Any, target: Target
) -> None:
    """Of two searches the second is not begun; the same command without the budget does it."""
    begun, real = [], HeldJobs.begin
    monkeypatch.setattr(HeldJobs, "begin", lambda held, name: (real(held, name), begun.append(name)))
    monkeypatch.setattr(Budget, "is_over", lambda budget: bool(begun))
    dims = ["--headdim", "64", "--headdim", "128", "--seqlen", "512", "--trials", "2", "--dtype", "bf16"]
    result = invoke(bench, monkeypatch, target, *dims)
    assert result.exit_code == 1
    assert "not tuned: fwd bf16 64 causal 512" in result.output and "not tuned: fwd bf16 128" not in result.output
    assert {row.key.head_dim for row in reader.read(bench.folder / "cache.sqlite")} == {128}
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(TESTS))
    monkeypatch.setenv("FA2TUNE_FAKE_LOG", str(bench.log))
    monkeypatch.setattr(reader, "shipped_paths", list)
    result = invoke(bench, monkeypatch, target, *dims)
    assert result.exit_code == 0 and "not tuned" not in result.output
    assert {row.key.head_dim for row in reader.read(bench.folder / "cache.sqlite")} == {64, 128}


@TARGETS
def test_a_run_that_stops_too_early_does_not_pass_for_a_whole_one(
    bench: Bench, monkeypatch: Any, target: Target
) -> None:
    """Whatever fault of the scheduler's it may be: here, fp16 waits for ever."""
    monkeypatch.setattr(SearchTask, "propose", lambda task, rows, real=SearchTask.propose: (
        real(task, rows) if task.spec.dtype == "bf16" else None))  # fmt: skip
    result = invoke(bench, monkeypatch, target, "--seqlen", "512", "--seqlen", "1024", "--trials", "2")
    assert result.exit_code == 1
    assert "not tuned: fwd fp16 128 causal 512, 1024\n" in result.output and "not tuned: fwd bf16" not in result.output


@TARGETS
def test_a_key_without_a_row_says_why_each_time_and_the_status_is_0(
    bench: Bench, monkeypatch: Any, target: Target
) -> None:
    """No candidate compiles, whichever it is."""
    monkeypatch.setenv("FA2TUNE_FAKE_REFUSE", "1")
    for _ in range(2):
        result = invoke(bench, monkeypatch, target, "--seqlen", "512", "--trials", "2", "--dtype", "bf16")
        assert result.exit_code == 0, result.output
        assert f"no row: fwd bf16 128 causal 512: {NONE_RIGHT}" in result.output


def test_a_backward_that_lacks_a_kernel_says_which(bench: Bench) -> None:
    plan_ = SimpleNamespace(
        kernels=("bwd_dkdv", "bwd_dq", "bwd_fused"), specializations=lambda: [SPEC],
        keys=lambda spec, kernel: [KEY.with_(kernel=kernel)],
    )  # fmt: skip
    report: Any = SimpleNamespace(rows=[], failed={KEY.with_(kernel="bwd_fused"): "no legal config"}, missing=[])
    close(plan_, report)  # type: ignore[arg-type]
    assert {key.kernel for key in report.missing} == {"bwd_dkdv", "bwd_dq", "bwd"}
    report.rows = [SimpleNamespace(key=KEY.with_(kernel=kernel)) for kernel in ("bwd_dkdv", "bwd_dq")]
    close(plan_, report)  # type: ignore[arg-type]
    assert not report.missing and report.failed[KEY.with_(kernel="bwd")].startswith("no row of bwd_fused")
    report.rows += [SimpleNamespace(key=KEY.with_(kernel=kernel)) for kernel in ("bwd_fused", "bwd")]
    close(plan_, report)  # type: ignore[arg-type]
    assert not report.missing and not report.failed
