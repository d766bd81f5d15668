"""Query heads of a key head taken as one, in public calls whose kernels are run by Python (tests/public_gpu.py): results beside
float64, in the shapes and strides of other calls, and which kernels see which call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from public_gpu import PublicGpu
from test_public_calls_in_python import (
    AT_A_TIME,
    FEW,
    FUSED,
    GATHER,
    ONE_TILE,
    STORED,
    Case,
    Little,
    check,
    inputs,
    laid,
)

import fa2tune
from fa2tune import logs
from fa2tune.calling import backward_plans, copies, dispatch, forward_plans, merging
from fa2tune.calling.schedules import few_keys_schedule, multistage_schedule, query_tiles_schedule, stored_ds_schedule
from fa2tune.compiling.compiler import CompileError
from fa2tune.launching import merged_heads, passes
from fa2tune.launching.launch import CaptureMiss
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import HEADS_FIRST, QUERIES_FIRST, Problem
from fa2tune.spec.score import Score

pytestmark = pytest.mark.usefixtures("poison")
#: Names of the orders in which rows lie in memory.
LAYOUTS = {"bhsd": HEADS_FIRST, "bshd": QUERIES_FIRST}


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """It is expected to pay wherever it can be had; passes that ask are listed."""
    for schedule in (few_keys_schedule, multistage_schedule):
        monkeypatch.setattr(schedule, "MARGIN", 1.0)  # forwards of few keys have the kernels of those of many
    monkeypatch.setattr(query_tiles_schedule, "QUERY_TILES", False)  # as have backwards of few queries
    asked: list[str] = []

    def pays(chooser: Any, ours: Any, pass_: str, *others: Any) -> bool:
        asked.append(pass_)
        return True

    monkeypatch.setattr(merging, "pays", pays)
    return asked


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        ("bhsd", Case((77, 200), (64, 64), FULL, ("sm90/fwd", *FUSED), (6, 2))),
        ("bshd", Case((77, 200), (64, 64), FULL, ("sm90/fwd", *FUSED), (5, 1), dtype="fp16")),
        ("bshd", Case((45, 90), (80, 80), FULL, ("sm90/fwd", ONE_TILE, GATHER), (7, 1))),
        ("bhsd", Case((45, 90), (176, 176), FULL, (FEW, *AT_A_TIME), (4, 2), True)),
        ("bshd", Case((40, 140), (192, 128), FULL, ("sm90/fwd",), (3, 1), True)),
        ("bhsd", Case((40, 140), (72, 72), FULL, ("sm90/fwd",), (3, 1), scale=-0.3)),
        ("bshd", Case((77, 200), (64, 64), CAUSAL, ("sm90/fwd", *FUSED), (5, 1))),
        ("bshd", Case((205, 170), (64, 64), CAUSAL, ("sm90/fwd", *FUSED), (3, 1), dtype="fp16")),  # see no key
        ("bshd", Case((45, 90), (80, 80), CAUSAL, ("sm90/fwd", ONE_TILE, GATHER), (7, 1))),
        ("bshd", Case((120, 140), (192, 128), CAUSAL, ("sm90/fwd",), (3, 1))),
        ("bshd", Case((200, 190), (128, 128), CAUSAL, ("sm90/fwd",), (2, 1), True)),
    ],
    ids=str,
)
def test_results(gpu: PublicGpu, seen: list[str], layout: str, case: Case) -> None:
    given = laid(inputs(case, batch=2), layout)
    check(case, given)
    assert seen == ["fwd", "bwd"]
    assert tuple(gpu.ran[: len(case.runs)]) == case.runs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_look_like_those_of_other_calls(gpu: PublicGpu, layout: str) -> None:
    case = Case((77, 200), (64, 64), FULL, (), (5, 1))
    given = laid(inputs(case, batch=2), layout)
    q, k, v = (one.requires_grad_() for one in (given.q, given.k, given.v))
    o, lse = fa2tune.attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), given.do)
    assert (o.shape, o.stride(), lse.shape) == (q.shape, q.stride(), q.shape[:3])
    assert [one.stride() for one in (dq, dk, dv)] == [one.stride() for one in (q, k, v)]
    assert lse.is_contiguous()
    verify.compare({"o": o, "lse": lse}, *reference.oracle_and_reference(given, gradients=False))
    whole = torch.ops.fa2tune.attention(q, k, v, -1, -1, 0.125, False)
    assert whole[1].is_contiguous() and torch.equal(whole[1], lse)  # as torch.compile expects it


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("merged", ["fwd", "bwd"])
def test_one_pass_alone(gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch, merged: str, layout: str) -> None:
    """Rows of lse are put in the order that the backward reads."""
    monkeypatch.setattr(merging, "pays", lambda chooser, ours, pass_, *others: pass_ == merged)
    case = Case((77, 200), (64, 64), FULL, (), (5, 1))
    given = laid(inputs(case, batch=2), layout)
    for _ in range(2):  # the second time from the memo
        check(case, given)
    (plan,) = dispatch.BACKWARD_PLANS.values()
    assert isinstance(plan, copies.Copying) == (layout == "bshd")


def test_lse_that_lies_in_no_order_is_put_in_one(gpu: PublicGpu) -> None:
    case = Case((77, 200), (64, 64), FULL, (), (4, 2))
    given = inputs(case)
    call = {"mask": FULL, "softmax_scale": 0.125, "score": fa2tune.Score("none")}
    o, lse = dispatch.forward(given.q, given.k, given.v, **call)
    wide = torch.full((*lse.shape, 2), torch.nan)[..., 0].copy_(lse)
    found, wanted = (
        dispatch.backward(given.do, given.dlse, given.q, given.k, given.v, o, one, deterministic=True, **call)
        for one in (wide, lse)
    )
    assert all(map(torch.equal, found, wanted))


def test_a_gradient_in_another_order_is_read_as_it_lies(gpu: PublicGpu) -> None:
    case = Case((77, 200), (64, 64), FULL, (), (5, 1))
    rows, heads = laid(inputs(case), "bshd"), inputs(case)
    check(case, reference.Inputs(rows.q, rows.k, rows.v, heads.do, rows.dlse))
    assert merged_heads.stacked([rows.q, heads.do], 1) == ""


def test_queries_that_tma_cannot_address_are_copied(
    gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    monkeypatch.setattr(copies, "pays", lambda *asked: True)
    case = Case((77, 200), (64, 64), FULL, (), (4, 2))
    given = inputs(case)
    q = torch.full((1, 4, 77, 65), torch.nan, dtype=given.q.dtype)[..., 1:].copy_(given.q)
    check(case, reference.Inputs(q, given.k, given.v, given.do, given.dlse))
    assert seen == ["fwd", "bwd"]


def test_where_ds_finds_no_memory_split_kernels_serve(gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_ds_schedule, "MARGIN", -100.0)
    logs.warn_once.cache_clear()
    case = Case((300, 400), (144, 144), FULL, (), (3, 1))
    given = laid(inputs(case), "bshd")
    check(case, given)
    assert tuple(gpu.ran[-3:]) == STORED
    dispatch.reload()
    little = Little(monkeypatch, 1_000_000)
    for _ in range(2):
        gpu.ran.clear()
        check(case, given)
        assert not {*STORED} & {*gpu.ran[1:]}
    assert little.refused == 1


@pytest.mark.parametrize(
    "case",
    [
        Case((77, 200), (64, 64), CAUSAL, (), (4, 2)),
        Case((77, 200), (64, 64), band(30, None), (), (5, 1)),
        Case((77, 200), (64, 64), FULL, (), (2, 2)),
    ],
    ids=str,
)
def test_calls_that_it_would_not_suit(gpu: PublicGpu, seen: list[str], case: Case) -> None:
    given = inputs(case)
    fa2tune.attention(given.q, given.k, given.v, mask=case.mask)
    assert not seen


def test_rows_at_no_stride_of_their_own(gpu: PublicGpu, seen: list[str]) -> None:
    """Two key heads, (batch, seqlen, heads, dim), and heads of a larger tensor."""
    case = Case((77, 200), (64, 64), FULL, (), (4, 2))
    given = laid(inputs(case), "bshd")
    fa2tune.attention(given.q, given.k, given.v)
    wider = torch.zeros(1, 5, 80, 64, dtype=given.q.dtype)[:, :4, :77].copy_(given.q)
    fa2tune.attention(wider, given.k, given.v)
    assert not seen


@pytest.mark.parametrize(
    "changed", [{"dtype": "fp32"}, {"mask": CAUSAL}, {"score": Score("softcap", 20.0)}, {"tma": False}, {"stacked": ""}]
)
def test_what_it_is_not_for(changed: dict[str, Any]) -> None:
    problem = Problem("bf16", 1, 4, 2, 77, 200, 64, 64, FULL, stacked=HEADS_FIRST)
    assert merging.asked(problem, 90) and not merging.asked(problem, 80)
    assert not merging.asked(replace(problem, **changed), 90)


def test_rows_of_a_query_one_after_the_other_may_be_causal() -> None:
    problem = Problem("bf16", 1, 4, 1, 77, 200, 64, 64, CAUSAL, stacked=QUERIES_FIRST)
    one = merged_heads.merged(problem)
    assert (one.mask, one.seqlen_q, one.group) == (Mask("causal_stacked", 4), 308, 1)
    assert merging.asked(problem, 90) and one.mask.pairs(308, 200) == 4 * CAUSAL.pairs(77, 200)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_where_its_kernels_cannot_be_had_heads_are_taken_one_by_one(
    gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seen: list[str], mask: Mask
) -> None:
    """By Hopper's kernels, not by portable ones as one. Said once for each pass, and not tried again for another length."""
    logs.warn_once.cache_clear()
    planned = forward_plans.forward_plan, backward_plans.backward_plan

    def refusing(made: Callable[..., Any]) -> Callable[..., Any]:
        def plan(problem: Problem, *others: Any) -> Any:
            if problem.group == 1:
                raise CompileError("no such kernel")
            return made(problem, *others)

        return plan

    monkeypatch.setattr(forward_plans, "forward_plan", refusing(planned[0]))
    monkeypatch.setattr(backward_plans, "backward_plan", refusing(planned[1]))
    for length in (77, 81):
        gpu.ran.clear()
        case = Case((length, 200), (64, 64), mask, (), (5, 1))
        check(case, laid(inputs(case), "bshd"))
        assert {"sm90/bwd_fused"} <= {*gpu.ran} and not {"portable/fwd", "portable/bwd_dq"} & {*gpu.ran}
    assert seen == ["fwd", "bwd"]
    assert caplog.text.count("next: heads one by one") == 2


def test_a_capture_that_finds_none_of_its_kernels_takes_heads_one_by_one(
    gpu: PublicGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And calls after it have it again."""
    made, misses = forward_plans.forward_plan, []

    def plan(problem: Problem, *others: Any) -> Any:
        if problem.group == 1 and len(misses) < 2:  # with the choice's config and with the row's
            misses.append(problem)
            raise CaptureMiss("a kernel")
        return made(problem, *others)

    monkeypatch.setattr(forward_plans, "forward_plan", plan)
    case = Case((77, 200), (64, 64), FULL, (), (4, 2))
    given = inputs(case)
    call = [fa2tune.attention(given.q, given.k, given.v) for _ in range(2)]
    assert len(misses) == 2 and len(dispatch.FORWARD_PLANS) == 1
    for o in call:
        verify.compare({"o": o}, *reference.oracle_and_reference(given, gradients=False))


@pytest.mark.parametrize("heads", [(4, 2), (4, 1)])
def test_one_query(gpu: PublicGpu, heads: tuple[int, int]) -> None:
    case = Case((1, 200), (64, 64), FULL, (), heads)
    check(case, inputs(case, batch=2))
    expanded = inputs(case, batch=2)
    check(
        case,
        reference.Inputs(expanded.q[:, :1].expand_as(expanded.q), expanded.k, expanded.v, expanded.do, expanded.dlse),
    )
    assert merged_heads.stacked([expanded.q[:, :1].expand_as(expanded.q)], heads[1]) == ""


def test_a_view_has_the_same_rows() -> None:
    for layout, order in LAYOUTS.items():
        for rows in (1, 7):
            whole = torch.arange(2 * 3 * rows * 8.0).view(2, 3, rows, 8)
            tensor = whole if layout == "bhsd" else whole.transpose(1, 2).contiguous().transpose(1, 2)
            found = merged_heads.stacked([tensor], 1)
            assert found == (HEADS_FIRST if rows == 1 else order)
            one = merged_heads.view(tensor, 1, found)
            assert one.shape == (2, 1, 3 * rows, 8) and one.data_ptr() == tensor.data_ptr()
            wanted = tensor if order == HEADS_FIRST else tensor.transpose(1, 2)
            assert torch.equal(one.reshape(2, -1), wanted.reshape(2, -1))
            assert passes.empty_ordered(tensor, 8).stride()[0] == one.stride()[0]
