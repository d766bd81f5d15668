"""The estimate of how long a run will go on."""

from __future__ import annotations

import re
import time
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from test_settled import ABSENT, invoke
from tuner_runs import HERE, Bench, Listener

from fa2tune.tuning.run import budget, progress
from fa2tune.tuning.run.remaining import Remaining

pytestmark = pytest.mark.usefixtures("quick_starts")


def test_nothing_is_said_before_some_candidates_are_done() -> None:
    """Fifteen seconds for the first of 160 are imports and child processes, not 15 s a candidate."""
    remaining = Remaining()
    assert remaining.seconds(1.0, 0, 160, 10.0) is None
    assert remaining.seconds(15.0, 1, 159, 10.0) is None
    assert remaining.seconds(16.0, 4, 156, 10.0) is None
    assert remaining.seconds(17.0, 5, 155, 10.0) == pytest.approx(0.5 * 155 + 10)


def test_candidates_come_in_batches() -> None:
    remaining = Remaining()
    assert remaining.seconds(20.0, 8, 40, 0.0) is None
    assert remaining.seconds(24.0, 16, 32, 0.0) == pytest.approx(0.5 * 32)


def test_finals_are_left_when_every_candidate_is_done() -> None:
    assert Remaining().seconds(5.0, 1, 0, 12.0) == 12.0
    assert Remaining().seconds(5.0, 0, 0, 12.0) is None, "all were kept: it is over at once"


def test_no_more_is_left_than_the_time_budget_leaves() -> None:
    """The case that was seen: 30 s of 240 spent, 2 candidates of 200 done."""
    remaining = Remaining(240.0)
    remaining.seconds(15.0, 1, 199, 10.0)
    assert remaining.seconds(75.0, 6, 194, 10.0) == 165.0
    assert remaining.seconds(239.0, 20, 180, 10.0) == 1.0
    assert remaining.seconds(300.0, 20, 180, 10.0) == 0.0


class Progress(Listener):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float | None]] = []

    def progress(self, done: int, total: int, left_s: float | None, now: str, statuses: Any) -> None:
        assert 0 <= done <= total
        self.seen.append((budget.time.monotonic(), left_s))


@pytest.mark.usefixtures("portable_kernels")
def test_a_run_keeps_its_estimate_within_its_time_budget(bench: Bench, monkeypatch: Any) -> None:
    """A compile is a second of its clock."""
    clock = SimpleNamespace(monotonic=lambda: float(len(bench.did("compile"))), process_time=time.process_time)
    seen = Progress()
    monkeypatch.setattr("tuner_runs.Listener", lambda: seen)
    monkeypatch.setattr(budget, "time", clock)
    monkeypatch.setattr(progress, "PROGRESS_S", 0.0)
    bench.tune(ABSENT, trials=1000, buckets=(512,), time_budget_s=14.0, workers=1)
    known = [(at, left_s) for at, left_s in seen.seen if left_s is not None]
    assert known and all(left_s <= 14.0 - at for at, left_s in known if at < 14.0)


@pytest.mark.usefixtures("portable_kernels")
def test_kept_trials_are_no_measure_of_pace(bench: Bench, monkeypatch: Any) -> None:
    """They are all there at once."""
    monkeypatch.setattr(progress, "PROGRESS_S", 0.0)
    bench.tune(HERE, trials=6, buckets=(512,))
    asked: list[int] = []
    real = Remaining.seconds
    monkeypatch.setattr(Remaining, "seconds", lambda self, spent, done, *rest: asked.append(done) or real(
        self, spent, done, *rest))  # fmt: skip
    bench.tune(HERE, trials=6, buckets=(512,), dtypes=("bf16", "fp16"))
    assert asked[0] == 0


@pytest.mark.usefixtures("portable_kernels")
def test_the_line_on_progress_names_the_estimate(bench: Bench, monkeypatch: Any) -> None:
    monkeypatch.setattr(progress, "PROGRESS_S", 0.0)
    monkeypatch.setattr(import_module("fa2tune.cli.tune"), "PROGRESS_EVERY_S", 0.0)
    result = invoke(
        bench, monkeypatch, ABSENT, "--seqlen", "512", "--trials", "12", "--dtype", "bf16", "--time-budget", "90"
    )
    assert result.exit_code == 0
    left = [int(found) for found in re.findall(r"candidates tried after \d+ s, about (\d+) s left", result.output)]
    assert left and max(left) <= 90


@pytest.mark.usefixtures("portable_kernels")
def test_counts_say_what_they_count(bench: Bench, monkeypatch: Any) -> None:
    monkeypatch.setattr(progress, "PROGRESS_S", 0.0)
    monkeypatch.setattr(import_module("fa2tune.cli.tune"), "PROGRESS_EVERY_S", 0.0)
    result = invoke(
        bench, monkeypatch, ABSENT, "--seqlen", "512", "--trials", "1", "--dtype", "bf16", "--kernel", "fwd"
    )
    assert result.exit_code == 0
    assert re.search(r"candidates to compile: portable/fwd bf16 1 \(from \d+ legal configs\)", result.output), (
        result.output
    )
    assert re.search(r"^1 of 1 candidate tried after", result.output, re.MULTILINE), result.output
    assert re.search(r"^1 candidate compiled in \d+ s, 1 result checked, 1 row, ", result.output, re.MULTILINE)
