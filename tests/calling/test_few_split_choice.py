"""Split kernels at a time in place of the fused one for few tiles."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS, script

from fa2tune import gpus
from fa2tune.calling import backward_plans, choosing, dispatch, serving
from fa2tune.calling.schedules import few_split_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.compiling.compiler import CompileError, NoTritonError
from fa2tune.fleet import precompile
from fa2tune.gpus import Gpu
from fa2tune.launching.overlapped import DQ_AT_ONCE
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, band
from fa2tune.spec.problem import Problem

H200, H100 = gpus.named("h200"), gpus.named("h100")
FEW = Problem("bf16", 4, 2, 2, 1003, 1003, 88, 88, CAUSAL)
CALLS = script("backward_calls")
SHORT = CALLS.SHORT_CALLS


def chosen(problem: Problem, deterministic: bool = False, few_split: bool = True) -> tuple[str, dict[str, Choice]]:
    chooser = choosing.Chooser(problem, H200)
    return choosing.choose_backward(chooser, deterministic, few_split=few_split)


def order(problem: Problem) -> str:
    choices = chosen(problem)[1]
    return backward_plans.division(problem, choices, H200).order


@pytest.fixture(autouse=True)
def nothing_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "FEW_SPLIT_REFUSED", set())


def timed() -> Iterator[tuple[str, Problem, Gpu, Mapping[str, float]]]:
    """Calls whose split kernels were raced, on which GPU, with the times of all forms; "fused": of what served else."""
    for file, of, gpu in (("few_backwards", CALLS.FEW_CALLS, H200), ("short_backwards", CALLS.SHORT_CALLS, H100)):
        record = json.loads((BENCHMARKS / f"calls/{file}.json").read_text("utf-8"))["calls"]
        for name, call in record.items():
            if "split, at a time" in call["us"]:
                yield name, of[name][0], gpu, {"fused": call["us"].get("served", 0.0), **call["us"]}


def test_estimates_are_near_the_records() -> None:
    off = []
    for name, problem, gpu, us in timed():
        split = choosing.choose_backward(choosing.Chooser(problem, gpu), True, in_order=False)[1]
        assert few_split_schedule.at_once(problem, split, gpu)
        off.append(math.log(few_split_schedule.predicted_us(problem, split) / us["split, at a time"]))
        assert abs(off[-1]) < 0.14, name
    assert len(off) == 12 and math.sqrt(sum(one**2 for one in off) / len(off)) < 0.065


def test_the_choice_is_the_faster_one() -> None:
    for name, problem, gpu, us in timed():
        chooser = choosing.Chooser(problem, gpu)
        strategy, _ = choosing.choose_backward(chooser, False)
        best = min(us["fused"], us["split, at a time"])
        assert us["split, at a time" if strategy == "split" else "fused"] <= 1.1 * best, name


def test_it_serves_where_that_was_faster() -> None:
    strategy, choices = chosen(FEW)
    assert (strategy, set(choices), order(FEW)) == ("split", {"bwd_dq", "bwd_dkdv"}, DQ_AT_ONCE)
    assert not any(one.config["EARLY_START"] for one in choices.values()), "no kernel of the chain waits for another"
    for name in ("96, 186 x 359", "128, 129", "64, 300", "112, 600"):
        assert chosen(SHORT[name][0])[0] == "fused"


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
def test_other_calls_are_left_alone(other: Problem) -> None:
    assert chosen(other) == chosen(other, few_split=False)


def test_a_deterministic_call_is_left_alone() -> None:
    for mask in (CAUSAL, FULL):
        one = replace(FEW, mask=mask)
        assert chosen(one, deterministic=True) == chosen(one, deterministic=True, few_split=False)


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
    choosing.FEW_SPLIT_REFUSED.clear()
    dispatch._backward_plan(choosing.Chooser(FEW, H200), False, make, own=True)
    assert tried == ["fused"], "in a capture where they are not loaded"


def test_explain_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = serving.explain_problem(FEW, H200, present=False)
    whole, *kernels = told.kernels[1:]
    assert [one.kernel for one in kernels] == ["bwd_dq", "bwd_dkdv"] and whole.order == DQ_AT_ONCE
    assert whole.status == "estimated" and whole.by == "split warp_specialized"
    exact = serving.explain_problem(Problem("bf16", 1, 4, 4, 1024, 1024, 128, 128, CAUSAL), H200, present=False)
    only = replace(exact, kernels=exact.kernels[1:])
    assert only.verdict == "Estimated: bwd runs split warp_specialized, each kernel with its row's config."
    assert "bwd: few tiles, so by split kernels, not as the row has it, which is expected to be faster" in str(told)
    assert "both kernels run at a time (dQ with delta)" in str(told) and "schedule model" not in str(whole)
    said = told.as_dict()["kernels"][1]
    assert said["config"] == dict.fromkeys(("bwd_dq", "bwd_dkdv"), "warp_specialized")
    assert said["otherwise"]["config"] == {"bwd_fused": "warp_specialized"}

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


def test_what_cannot_be_had_is_not_asked_for_again() -> None:
    other = replace(FEW, seqlen_q=900, seqlen_k=900)
    assert chosen(other)[0] == "split"

    def make(strategy: str, choices: Mapping[str, Choice]) -> Mapping[str, Choice]:
        if strategy == "split":
            raise NoTritonError("x")
        return choices

    dispatch._backward_plan(choosing.Chooser(FEW, H200), False, make)
    assert chosen(other)[0] == "fused" and chosen(replace(other, head_dim=96, head_dim_v=96))[0] == "split"
    choosing.forget()
    assert chosen(other)[0] == "split"


def test_calls_that_cannot_fit_or_have_no_rows_of_both_kernels_ask_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    found = choosing.Chooser.choose

    def choose(self: choosing.Chooser, kernel: str, kind: Any = None) -> Choice:
        asked.append(kernel)
        return found(self, kernel, kind)

    monkeypatch.setattr(choosing.Chooser, "choose", choose)
    many = Problem("bf16", 16, 16, 16, 1024, 1024, 128, 128, CAUSAL)
    assert not few_split_schedule.may_fit(many, H200) and chosen(many)[0] == "fused" and asked == ["bwd_fused"]
    asked.clear()
    ladder = choosing.Chooser.ladder
    monkeypatch.setattr(
        choosing.Chooser, "ladder", lambda self, kernel: () if kernel == "bwd_dq" else ladder(self, kernel)
    )
    assert few_split_schedule.may_fit(FEW, H200) and chosen(FEW)[0] == "fused" and asked == ["bwd_fused"]


def test_files_of_binaries_have_them() -> None:
    held = binaries(FEW)
    for choice in chosen(FEW)[1].values():
        assert (choice.variant.name, tuple(sorted(choice.config.items()))) in held
