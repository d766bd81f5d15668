"""Queries that see no key: how many there are, when they are filled in, and what explain says of it."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest
import torch
from benchmark_scripts import BENCHMARKS, script

from fa2tune import gpus
from fa2tune.calling import serving, unseen
from fa2tune.spec.extent import Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import BACKWARD, Problem

#: The first one is what the estimate was fitted to.
RECORD, HELD_OUT = (
    json.loads(gzip.decompress((BENCHMARKS / f"calls/{name}.json.gz").read_bytes()))["calls"]
    for name in ("filled_in", "filled_in_held_out")
)
H200, A100 = gpus.named("h200"), gpus.named("a100")
LONG = Problem("bf16", 24, 1, 1, 11465, 142, 56, 56, CAUSAL)


@pytest.mark.parametrize("lengths", [(5, 3), (3, 5), (4, 4), (9, 1)], ids=str)
@pytest.mark.parametrize(
    "mask", [CAUSAL, FULL, band(2, 0), band(1, 3), band(None, 2), band(3, None), Mask("chunked", 2)], ids=str
)
def test_they_are_those_that_the_mask_shows_nothing(lengths, mask):
    queries, keys = lengths
    problem = Problem("bf16", 1, 1, 1, queries, keys, 64, 64, mask.fitted(queries, keys))
    shown = problem.mask.visible(torch.arange(queries)[:, None], torch.arange(keys), queries, keys)
    blind = (~shown.expand(queries, keys).any(1)).tolist()
    rows = unseen.count(problem)
    assert all(blind[:rows])
    if mask.name in ("causal", "full") or mask.window:
        assert not any(blind[rows:])


def test_what_is_left_is_the_same_problem_of_fewer_queries():
    rows = unseen.count(LONG)
    assert unseen.behind(LONG, rows) == replace(LONG, seqlen_q=142) and unseen.count(unseen.behind(LONG, rows)) == 0
    assert unseen.behind(LONG, 0) is LONG


def test_when_they_are_filled_in():
    """The first three are calls that were timed (random_calls.json.gz): 57.9, 566.5 and 917.6 us forward, 75, 1533, 2947
    backward."""
    for problem, forward, backward in (
        (LONG, True, True),
        (Problem("bf16", 5, 69, 69, 5102, 772, 184, 184, CAUSAL), True, True),
        (Problem("bf16", 20, 47, 47, 2120, 969, 144, 144, CAUSAL), True, True),
        (Problem("bf16", 7, 25, 25, 545, 234, 64, 64, CAUSAL), False, True),
        (Problem("bf16", 2, 25, 25, 455, 310, 48, 48, CAUSAL), False, False),
        (replace(LONG, mask=FULL), False, False), (replace(LONG, seqlen_k=0), False, False),
        (replace(LONG, wide=True), False, False),
        (replace(LONG, extent=Extent("ragged", 4)), False, False),
    ):  # fmt: skip
        found = [bool(unseen.filled_in(problem, H200, pass_)) for pass_ in ("fwd", BACKWARD)]
        assert found == [forward, backward], problem
        assert not unseen.filled_in(problem, A100, BACKWARD)


@pytest.mark.parametrize("pass_", ["fwd", BACKWARD])
def test_what_is_filled_in_was_faster(pass_: str) -> None:
    """Of recorded calls, within 1 %; and calls that are computed were not slower by more than what the margin allows."""
    taken = 0
    for call in (*RECORD.values(), *HELD_OUT.values()):
        problem = script("dense_backwards").posed(call)
        filled, computed = call[pass_]["filled in"], call[pass_]["computed"]
        if unseen.filled_in(problem, H200, pass_):
            taken += 1
            assert filled < 1.01 * computed, call
        else:
            assert computed < filled * 1.02 + unseen.MARGIN_US, call
    assert taken > 35


def test_explain_says_so_and_names_what_serves_the_others():
    found = serving.explain_problem(LONG, H200)
    assert "The first 11323 queries see no key: filled in by the forward and the backward" in str(found)
    others = serving.explain_problem(unseen.behind(LONG, 11323), H200)
    assert [one.config for one in found.kernels] == [one.config for one in others.kernels]
    assert {one["filled_in"] for one in found.as_dict()["kernels"]} == {11323}
    bare = serving.explain_problem(LONG, H200, among=())
    assert f"--seqlen {unseen.behind(LONG, 11323).bucket}" in bare.next, bare.next
    assert "see no key" not in str(serving.explain_problem(replace(LONG, seqlen_k=11465), H200))
    assert serving.served_by(LONG, H200, True) == serving.served_by(unseen.behind(LONG, 11323), H200, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bshd", [True, False])
def test_rows_are_filled_in_and_no_others(dtype: torch.dtype, bshd: bool) -> None:
    """Of a stand-in for the kernels, which write behind them, and a head dim of V of its own."""
    problem = Problem("bf16" if dtype is torch.bfloat16 else "fp32", 2, 3, 3, 7, 4, 24, 8, CAUSAL)

    def new(rows: int, dim: int) -> torch.Tensor:
        shape = (2, rows, 3, dim) if bshd else (2, 3, rows, dim)
        return torch.randn(shape, dtype=dtype).transpose(1, 2) if bshd else torch.randn(shape, dtype=dtype)

    q, k, v, whole = new(7, 24), new(4, 24), new(4, 8), new(7, 8)
    seen = whole[:, :, 3:].clone()
    planes = (2,) if dtype is torch.float32 else ()
    lse_seen = torch.randn(*planes, 2, 3, 4)
    o, lse = unseen.Forward(problem, 3, 0.5, lambda q, k, v: (whole, lse_seen))(q, k, v)
    assert o.dtype is dtype and torch.equal(o[:, :, 3:], seen) and not o[:, :, :3].any()
    assert torch.equal(lse[..., 3:], lse_seen)
    first = lse[0] if planes else lse
    assert torch.equal(first[..., :3], torch.full((2, 3, 3), float("-inf"))) and (
        not planes or not lse[1, ..., :3].any()
    )
    grads = new(7, 24), new(4, 24), new(4, 8)
    seen = grads[0][:, :, 3:].clone()
    dq, *_ = unseen.Backward(3, lambda *tensors: grads)(o, None, q, k, v, o, lse)
    assert dq.dtype is dtype and torch.equal(dq[:, :, 3:], seen) and not dq[:, :, :3].any()


def test_rows_that_words_do_not_divide_stay_as_they_are() -> None:
    plain = torch.randn(2, 2, 4, 16, dtype=torch.bfloat16)
    assert unseen.in_words(plain).dtype is unseen.in_words(plain[:, :, 1:]).dtype is torch.complex128
    for odd in (
        plain[..., :12],
        plain[..., 1:9],
        plain.transpose(2, 3),
        torch.randn(2, 2, 4, 12, dtype=torch.bfloat16),
    ):
        assert unseen.in_words(odd) is odd
