"""The plan of a forward whose keys would be split, where the kernel that splits them cannot be had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fa2tune.calling import forward_plans
from fa2tune.calling.choosing import Chooser
from fa2tune.calling.schedules import key_splits_schedule
from fa2tune.compiling.compiler import CompileError, HostTrouble, NoTritonError
from fa2tune.gpus import named
from fa2tune.launching.launch import CaptureMiss
from fa2tune.search_spaces.portable import fwd_split
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Problem

PROBLEM, H200 = Problem("bf16", 1, 32, 8, 1, 8192, 128, 128, FULL), named("h200")
Q = torch.empty(1, 32, 1, 128)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What SplitPlan was asked for; it raises ``error`` of the list's first place."""
    asked: list[Any] = []

    def splitting(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        raise asked[0]

    split = fwd_split.config_of(PROBLEM.specialization, 90, True, 16, 16)
    monkeypatch.setattr(key_splits_schedule, "config_of", lambda *of: split)
    monkeypatch.setattr(forward_plans, "SplitPlan", splitting)
    monkeypatch.setattr(forward_plans, "ForwardPlan", lambda *of: "tuned")
    monkeypatch.setattr(forward_plans, "_REFUSED", {})
    return asked


def plan(**options: Any) -> Any:
    return forward_plans.forward_plan(PROBLEM, Q, Q, Q, 1.0, Chooser(PROBLEM, H200).choose("fwd"), H200, **options)


@pytest.mark.parametrize(
    "error", [CompileError("x"), NoTritonError("x"), HostTrouble("x"), PermissionError("x")], ids=repr
)
def test_the_tuned_kernel_serves_and_the_other_is_not_tried_again(tries: list[Any], error: Exception) -> None:
    tries.append(error)
    assert plan() == "tuned" and len(tries) == 2
    assert plan() == "tuned" and len(tries) == 2


def test_a_kernel_that_is_not_loaded_during_a_capture_is_asked_for_again_after_it(tries: list[Any]) -> None:
    tries.append(CaptureMiss("fwd_split"))
    with pytest.raises(CaptureMiss):
        plan()
    assert plan(may_split=False) == "tuned" and len(tries) == 2
    with pytest.raises(CaptureMiss):
        plan()
    assert len(tries) == 3


def test_other_errors_are_not_hidden(tries: list[Any]) -> None:
    tries.append(ValueError("a fault of ours"))
    with pytest.raises(ValueError, match="a fault of ours"):
        plan()


def test_unaligned_tensors_are_not_split() -> None:

    config = Chooser(PROBLEM, H200).choose("fwd").config
    assert key_splits_schedule.config_of(PROBLEM, config, H200) is not None
    assert key_splits_schedule.config_of(replace(PROBLEM, aligned=False), config, H200) is None
