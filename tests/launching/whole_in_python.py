"""Backwards that one kernel makes, with what adds up after it, run by Python (tests/gpu_in_python.py)."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from gpu_in_python import PythonGpu
from test_computed_in_python import SCALE, Call, unset
from test_grouped_in_python import within_nan

from fa2tune.launching import passes, whole_backward
from fa2tune.spec.problem import Config, Problem


class WholeGpu(PythonGpu):
    """For plans of ``module``, one of launching/."""

    module: ModuleType

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, values=True)
        self.count_launches_of(monkeypatch, whole_backward)

    def config_of(self, problem: Problem, *form: object) -> Config:
        raise NotImplementedError

    def backward(
        self, call: Call, given: dict[str, torch.Tensor], right: dict[str, torch.Tensor], form: tuple[object, ...],
        dlse: torch.Tensor | None = None, order: str = "bhsd", scale: float = SCALE,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Gradients; ``form``: what ``config_of`` is asked for."""
        q, k, v, do = (within_nan(given[name], order) for name in ("q", "k", "v", "do"))
        o, lse = within_nan(right["o"].half(), order), right["lse"].float()
        problem = passes.describe(q, k, v, call.mask, scale, call.score, o=o, do=do)
        config = self.config_of(problem, *form)
        gradients = {"dq": unset(q, call.dims[0]), "dk": unset(k, call.dims[0]), "dv": unset(v, call.dims[1])}
        tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, **gradients}
        tensors |= {} if dlse is None else {"dlse": dlse}
        plan = type("Plan", (), {})()
        plan.chain, block = self.module.bound(problem, tensors, scale, config, 0)
        spaces = self.module.workspaces(problem, config)
        self.placed.append(passes.placed(spaces, q.dtype, 0)[0])
        assert bool(block) == bool(spaces)
        addresses = [self.place_values(name, tensor) for name, tensor in tensors.items()]
        self.run(plan, [*addresses, self.place_workspaces()] if block else addresses)
        for buffer in self.buffers.values():
            if buffer.name in gradients or buffer.name.startswith("workspace"):
                assert (buffer.written == 1).all(), f"each word of {buffer.name} is written once"
        return gradients
