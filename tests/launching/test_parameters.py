"""A kernel's parameters are its tensors, constexprs, and numbers that a call has."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fa2tune.compiling import registry
from fa2tune.launching import launch
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Problem


def misspelt(q: Any, o: Any, stride_qm: Any, heads_query: Any) -> None:
    """The head of a kernel."""


@pytest.mark.parametrize("device", [-1, 0])
def test_a_number_that_no_call_has_is_named(monkeypatch: pytest.MonkeyPatch, device: int) -> None:
    function = SimpleNamespace(image=SimpleNamespace(maps=[]))
    monkeypatch.setattr(launch, "load", lambda *_: function)
    variant = replace(registry.portable_of("fwd"), kernel=SimpleNamespace(fn=misspelt), descriptors={})
    problem = Problem("fp16", 1, 2, 2, 64, 64, 64, 64, FULL)
    config, strides = variant.space.default(problem.specialization, 80), {"q": (1, 1, 1), "o": (1, 1, 1)}
    said = r"^fwd: got a parameter heads_query, allowed are its tensors and batch, .*\bheads_q, .*\bstride_qm\b"
    with pytest.raises(ValueError, match=said):
        launch.bind(variant, problem, config, strides, 0.1, ("q", "o"), device)
