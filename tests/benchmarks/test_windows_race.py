"""benchmarks/windows.py --race without a GPU: which forms it races, what it accepts and prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import pytest
import torch
from benchmark_scripts import script

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.spec.mask import mask_of

windows = script("windows")
H200, SHAPE = gpus.named("h200"), "1x4/2x2048x64:128"


def test_every_legal_form_is_raced_once_with_the_config_that_serves_among_them() -> None:
    for shape in windows.RACED:
        causal, keys = windows.shape_of(shape)
        problem = windows.replace(causal, mask=mask_of(True, (keys - 1, 0)))
        found = windows.forms(problem, windows.rows_of(problem, H200))
        assert {(64, 64, 1, 80), (64, 128, 1, 128), (128, 64, 2, 0), (128, 128, 1, 0), (192, 64, 1, 0)} <= set(found)
        assert len(found) <= 16  # a minute
        assert choosing.choose(problem, "fwd", H200).config in [config for config, _ in found.values()]
        for config, _ in found.values():
            assert windows.HOPPER.space.broken(config, problem.specialization, 90) is None
            assert config["RESCALE"] == "lazy" and config["HEADS_PER_WAVE"] == 0


def faked(monkeypatch: pytest.MonkeyPatch, result: Callable[[int], float]) -> None:
    """Plans that give ``result`` of BLOCK_M, and take as long."""

    class Plan:
        def __init__(self, _problem: Any, *args: Any) -> None:
            self.rows = args[-1]["BLOCK_M"]

        def __call__(self, q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
            return torch.full_like(q, result(self.rows)), None

    monkeypatch.setattr(windows.passes, "ForwardPlan", Plan)
    monkeypatch.setattr(windows.compiler, "compile_kernel", lambda *_, **__: None)
    monkeypatch.setattr(windows, "times", lambda calls, _: [call.func.rows / 1e3 for call in calls])


def test_the_race_is_in_order_of_time_and_marks_what_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch, lambda _: 1.0)
    found = list(windows.raced(SHAPE, 0.1, H200, "cpu"))
    assert [entry["us"] for entry in found] == sorted(entry["us"] for entry in found) and found[0]["us"] == 64
    assert sum(entry["chosen"] for entry in found) == 1
    assert any(entry["predicted_us"] for entry in found) and not all(entry["predicted_us"] for entry in found)
    printed = [windows.race_line(entry) for entry in found]
    assert [text.endswith("*") for text in printed] == [entry["chosen"] for entry in found]


@pytest.mark.parametrize("other", [1.5, float("nan")])
def test_a_wrong_result_ends_the_race(monkeypatch: pytest.MonkeyPatch, other: float) -> None:
    faked(monkeypatch, lambda rows: 1.0 if rows == 128 else other)
    with pytest.raises(click.ClickException, match="differs"):
        list(windows.raced(SHAPE, 0.1, H200, "cpu"))
