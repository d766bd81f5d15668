"""Split kernels at a time in place of the fused one for few tiles, and a program for each tile: off, and what turns them on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS, script

from fa2tune import gpus
from fa2tune.calling import backward_plans, choosing, dispatch, serving
from fa2tune.calling.schedules import few_split_schedule, fused_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.compiling.compiler import CompileError, NoTritonError
from fa2tune.fleet import precompile
from fa2tune.launching.beside import DQ_AT_ONCE
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, band
from fa2tune.spec.problem import Problem

H200, H100 = gpus.named("h200"), gpus.named("h100")
FEW = Problem("bf16", 4, 2, 2, 1003, 1003, 88, 88, CAUSAL)
SHORT = script("backward_calls").SHORT_CALLS


def chosen(problem: Problem, deterministic: bool = False, few_split: bool = True) -> tuple[str, dict[str, Choice]]:
    chooser = choosing.Chooser(problem, H200)
    return choosing.choose_backward(chooser, deterministic, few_split=few_split)


def order(problem: Problem) -> str:
    choices = chosen(problem)[1]
    return backward_plans.division(problem, choices, H200).order


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_split_schedule, "FEW_SPLIT", True)


def test_no_call_has_either_yet() -> None:
    assert not few_split_schedule.FEW_SPLIT and not fused_schedule.TILE_A_PROGRAM
    assert chosen(FEW)[0] == "fused" and chosen(FEW)[1]["bwd_fused"].config["PERSISTENT"] and order(FEW) == ""


def test_estimates_are_near_the_record() -> None:
    """AROUND_US and BOTH are fitted to these three: no other was timed."""
    record = json.loads((BENCHMARKS / "calls/short_backwards.json").read_text("utf-8"))
    for name in ("88, 1003", "96, 186 x 359", "128, 129"):
        problem, us = SHORT[name][0], record["calls"][name]["us"]
        split = choosing.choose_backward(choosing.Chooser(problem, H100), True, in_order=False)[1]
        assert few_split_schedule.at_once(problem, split, H100)
        assert few_split_schedule.predicted_us(problem, split) == pytest.approx(us["split, at a time"], abs=1.6)


@pytest.mark.usefixtures("split")
def test_it_serves_where_that_was_faster() -> None:
    strategy, choices = chosen(FEW)
    assert (strategy, set(choices), order(FEW)) == ("split", {"bwd_dq", "bwd_dkdv"}, DQ_AT_ONCE)
    assert not any(one.config["EARLY_START"] for one in choices.values()), "no kernel of the chain waits for another"
    for name in ("96, 186 x 359", "128, 129", "64, 300", "112, 600"):
        assert chosen(SHORT[name][0])[0] == "fused"


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize(
    "other",
    [
        replace(FEW, heads_q=4),  # grouped
        replace(FEW, head_dim=64, head_dim_v=64),
        replace(FEW, batch=40),
        replace(FEW, seqlen_q=3000, seqlen_k=100),  # one tile of keys
        replace(FEW, mask=band(256, 0)),
        Problem("bf16", 1, 2, 2, 1003, 1003, 88, 88, CAUSAL, extent=Extent(RAGGED, 3, 0)),
    ],
    ids=["grouped", "64 columns", "many tiles", "one tile of keys", "window", "packed"],
)
def test_other_calls_are_left_alone(other: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    now = chosen(other), order(other)
    monkeypatch.setattr(few_split_schedule, "FEW_SPLIT", False)
    assert (chosen(other), order(other)) == now


@pytest.mark.usefixtures("split")
def test_a_deterministic_call_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [chosen(replace(FEW, mask=mask), deterministic=True) for mask in (CAUSAL, FULL)]
    monkeypatch.setattr(few_split_schedule, "FEW_SPLIT", False)
    assert [chosen(replace(FEW, mask=mask), deterministic=True) for mask in (CAUSAL, FULL)] == now


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("error", [CompileError("x"), NoTritonError("x")], ids=repr)
def test_the_fused_kernel_serves_where_they_cannot_be_had(error: Exception) -> None:
    tried = []

    def make(strategy: str, choices: Mapping[str, Choice]) -> Mapping[str, Choice]:
        tried.append(strategy)
        if strategy == "split":
            raise error
        return choices

    plan = dispatch._backward_plan(choosing.Chooser(FEW, H200), False, make)
    assert tried == ["split", "fused"] and plan == chosen(FEW, few_split=False)[1]
    tried.clear()
    dispatch._backward_plan(choosing.Chooser(FEW, H200), False, make, own=True)
    assert tried == ["fused"], "in a capture where they are not loaded"


@pytest.mark.usefixtures("split")
def test_explain_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = serving.explain_problem(FEW, H200, present=False)
    whole, *kernels = told.kernels[1:]
    assert [one.kernel for one in kernels] == ["bwd_dq", "bwd_dkdv"] and whole.order == DQ_AT_ONCE
    assert whole.status == "estimated"
    assert "bwd: few tiles, so by split kernels, not as the row has it, which is expected to be faster" in str(told)
    assert "both kernels run at a time (dQ with delta)" in str(told)

    class Runs(serving._Runs):
        def __init__(self, needed: Any, *rest: Any) -> None:
            needed = list(needed)
            super().__init__(needed, *rest)
            self.lacking = "no file" if any("bwd_dq" in variant.name for variant, _, _ in needed) else ""

    monkeypatch.setattr(serving, "_Runs", Runs)
    other = serving.explain_problem(FEW, H200, present=False).kernels
    assert [one.kernel for one in other[1:]] == ["bwd", "bwd_fused"] and not other[1].order


def binaries(problem: Problem) -> set[Any]:
    """That a file holds of a problem's specialization."""
    node = choosing.toolchain()
    return {
        (variant.name, tuple(sorted(config.items())))
        for kernel, choice in precompile._choices(problem, H200, choosing.layers(), node)
        for variant, config, _ in [
            *((*one, problem) for one in precompile.runs(kernel, problem.specialization, choice, 90)),
            *precompile._by_shape(kernel, problem, choice, 90),
        ]
    }


@pytest.mark.usefixtures("split")
def test_files_of_binaries_have_them() -> None:
    held = binaries(FEW)
    for choice in chosen(FEW)[1].values():
        assert (choice.variant.name, tuple(sorted(choice.config.items()))) in held


# ---- a program for each tile


def test_a_program_for_each_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_split_schedule, "FEW_SPLIT", False)
    monkeypatch.setattr(fused_schedule, "TILE_A_PROGRAM", False)
    before = chosen(FEW)[1]["bwd_fused"]
    many = replace(FEW, batch=9)
    as_before = chosen(many)
    monkeypatch.setattr(fused_schedule, "TILE_A_PROGRAM", True)
    choice = chosen(FEW)[1]["bwd_fused"]
    assert choice.config == {**before.config, "PERSISTENT": False, "DYNAMIC": False} and choice.of_row == before.of_row
    assert chosen(many) == as_before, "more tiles than multiprocessors"
    times = {fused_schedule.predicted_us(FEW, one.config, H200) for one in (before, choice)}
    assert len(times) == 1
    told = str(serving.explain_problem(FEW, H200, present=False))
    assert "alone on the GPU, each kernel started early, a program for each tile, not as the row has it" in told
    assert (choice.variant.name, tuple(sorted(choice.config.items()))) in binaries(FEW)
