"""Forwards that one kernel computes in place of the tuned one, with no memory next to the results, run by Python
(tests/gpu_in_python.py) beside float64 attention. Results are poisoned with NaN, as is what lies around q, k and v."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import kernels_in_python
import pytest
import torch
from gpu_in_python import InPlaceGpu
from test_computed_in_python import Call, compare, inputs, unset, wanted
from test_grouped_in_python import within_nan

from fa2tune.launching import passes
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import SearchSpace


class LateCopies(kernels_in_python._Mbarrier):
    """Copies by TMA that land when their barrier is waited for, and not before. ``awaited``: whether a wait is one, by the
    copies that it is for."""

    def __init__(self) -> None:
        self.asked = defaultdict[Any, list[tuple[Any, ...]]](list)
        self.awaited: Callable[[int], bool] = lambda copies: True

    def load(self, descriptor: Any, coordinates: Any, barrier: Any, place: Any) -> None:
        self.asked[barrier].append((descriptor, coordinates, barrier, place))

    def wait(self, barrier: Any, phase: Any, pred: Any = True) -> None:  # type: ignore[override]
        if self.awaited(len(self.asked[barrier])):
            for copy in self.asked.pop(barrier):
                kernels_in_python._tma_load(*copy)
            super().wait(barrier, phase, pred)


class WholeTilesGpu(InPlaceGpu):
    """For plans of the kernel that has ``space``."""

    space: SearchSpace

    def config_of(self, problem: Problem, *form: Any) -> Config:
        raise NotImplementedError

    def forward(
        self, call: Call, given: dict[str, torch.Tensor], form: tuple[Any, ...], order: str = "bhsd"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, lse); ``form``: what ``config_of`` is asked for."""
        q, k, v = (within_nan(given[name], order) for name in "qkv")
        problem = passes.describe(q, k, v, call.mask, call.softmax_scale, call.score)
        config = self.config_of(problem, *form)
        assert all(config[name] in values for name, values in self.space.dimensions.items())
        tensors = {"q": q, "k": k, "v": v, "o": unset(q, call.dims[1]), "lse": torch.full(q.shape[:3], torch.nan)}
        return self.run_whole(problem, tensors, call.softmax_scale, config)


class LateGpu(WholeTilesGpu):
    """``late``: copies that have not landed; ``others``: more names of kernels' modules, and what they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **others: Any) -> None:
        super().__init__(monkeypatch)
        self.late = LateCopies()
        with_names(monkeypatch, mbarrier=self.late, tma_load=self.late.load, **others)


def with_names(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    """What these names are in modules of kernels."""
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, **names})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})


def check(gpu: WholeTilesGpu, call: Call, form: tuple[Any, ...], order: str = "bhsd") -> None:
    given = inputs(call, 0)
    o, lse = gpu.forward(call, given, form, order)
    compare({"o": o, "lse": lse}, wanted(call, given))
    if isinstance(gpu, LateGpu):
        assert not gpu.late.asked, "a program waits for all that it loads"


def check_infinite_scores(gpu: WholeTilesGpu, call: Call, form: tuple[Any, ...]) -> None:
    """A row of infinite scores is NaN as softmax has it, and no other query or head; of a call of four heads."""
    given = inputs(call, 0)
    given["q"][:, 1, 3, 0], given["k"][..., 0] = -torch.inf, 1.0
    o, lse = gpu.forward(call, given, form)
    assert o[:, 1, 3].isnan().all() and lse[0, 1, 3] == -torch.inf
    o[:, 1, 3] = 0
    assert not o.isnan().any(), "no other query, and no other head"
