"""Tuning for GPUs without wgmma on a Hopper GPU, which runs their code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tuner_runs import A100, H200, Bench

from fa2tune import gpus
from fa2tune.rows.row import PORTED, PREDICTED
from fa2tune.tuning.request import plan
from fa2tune.tuning.request.plan import Target, TuneRequest, resolve_target
from fa2tune.tuning.request.watcher import PORTED_FUNCTIONS, WorkerFunctions
from fa2tune.tuning.run import tuner

pytestmark = pytest.mark.usefixtures("quick_starts")


@pytest.mark.parametrize(
    ("name", "obtained"),
    [
        ("a100", PORTED),
        ("a10", PORTED),
        ("l40s", PORTED),
        ("rtx-5090", PORTED),
        ("b200", PREDICTED),
        ("h100", "sibling"),
    ],
)
def test_what_a_hopper_gpu_can_stand_for(name: str, obtained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "present", lambda: H200)
    assert resolve_target(name) == Target(gpus.named(name), obtained, H200)


@pytest.mark.usefixtures("portable_kernels")
def test_rows_say_that_they_are_ported(bench: Bench) -> None:
    report = bench.tune(Target(A100, PORTED, H200), trials=3, buckets=(512,))
    assert {(r.key.gpu, r.key.arch, r.obtained, r.proof, r.obtained_on) for r in report.rows} == {
        ("a100-sxm-80gb", 80, "ported", "sibling", "NVIDIA H200")
    }
    assert all(r.samples and r.gain for r in report.rows)
    assert any("TFLOP/s ported on NVIDIA H200" in line for line in bench.lines)


@pytest.mark.usefixtures("both_kernels")
def test_they_race_the_kernels_of_their_own(bench: Bench) -> None:
    report = bench.tune(Target(A100, PORTED, H200), trials=6, buckets=(512,))
    assert {r.filed_as for r in report.rows} == {"pointer", "sm80"}
    best = min(report.rows, key=lambda r: r.rank_us)
    assert best.filed_as == "sm80" and best.obtained == PORTED


def test_such_a_run_launches_ported_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = []

    class Run:
        def __init__(self, plan: Any, watcher: Any, functions: WorkerFunctions) -> None:
            given.append(functions)

        def go(self) -> None:
            """Nothing."""

    monkeypatch.setattr(tuner, "Run", Run)
    for target in (Target(A100, PORTED, H200), Target(A100, PREDICTED, None)):
        monkeypatch.setattr(plan, "resolve_target", lambda name, target=target: target)
        tuner.tune(TuneRequest(cache=tmp_path / "cache.sqlite"))
    assert given == [PORTED_FUNCTIONS, WorkerFunctions()]
