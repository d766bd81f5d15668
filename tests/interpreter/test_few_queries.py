"""Forwards whose keys are split among programs, in Triton's interpreter: the error rule for all masks, heads and lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fa2tune
from fa2tune.calling import dispatch
from fa2tune.calling.schedules import key_splits_schedule
from fa2tune.launching import key_splits, passes
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.portable import fwd_split
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import NONE, score_of

WINDOW = Mask("band", 20, 3)


@pytest.fixture(autouse=True)
def _poison():
    """torch.empty fills with NaN, so that an element that was not written is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def problem_of(heads, lengths, mask, dims=(32, 32), dtype="fp16", batch=2):
    return Problem(dtype, batch, *heads, *lengths, *dims, mask)


def split_forward(asked, inputs, splits, rows=16, loads="pointer", scale=None, score=NONE, **other):
    """By an explicit config."""
    scale = asked.head_dim**-0.5 if scale is None else scale
    problem = passes.describe(inputs.q, inputs.k, inputs.v, asked.mask, scale, score)
    config = fwd_split.config_of(problem.specialization, 80, False, rows, splits)
    config = {**config, "LOADS": loads, **other}
    return key_splits.forward(inputs.q, inputs.k, inputs.v, problem, scale, config)


def check(asked, splits, inputs=None, score=NONE, scale=None, **options):
    inputs = inputs or reference.make_inputs(asked, "cpu")
    oracle, same = reference.oracle_and_reference(
        inputs, mask=asked.mask, gradients=False, score=score, softmax_scale=scale
    )
    o, lse = split_forward(asked, inputs, splits, score=score, scale=scale, **options)
    verify.compare({"o": o, "lse": passes.lse_of(lse)}, oracle, same)
    return o, lse


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW, Mask("band", 9, -1), Mask("chunked", 48)], ids=str)
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        ((8, 2), (1, 100)),  # decode; more parts than some ranges have blocks
        ((6, 2), (5, 77)),  # a tile has queries of three heads
        ((6, 1), (4, 3)),  # more queries than keys: some see none
        ((2, 2), (37, 130)),  # no group; several tiles
        ((34, 2), (2, 64)),  # a group that no tile of 16 rows holds whole
    ],
)
def test_masks_groups_and_lengths(heads, lengths, mask, splits):
    check(problem_of(heads, lengths, mask), splits)


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
@pytest.mark.parametrize("dims", [(16, 16), (40, 24), (24, 72), (256, 256), (128, 64)])
def test_head_dims(dims, loads):
    check(problem_of((4, 2), (3, 70), CAUSAL, dims, batch=1), 2, loads=loads)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_tiles(rows):
    check(problem_of((8, 1), (9, 90), CAUSAL, batch=1), 3, rows=rows)


@pytest.mark.parametrize("splits", [1, 4])
def test_float32_has_both_words_of_lse(splits):
    asked = problem_of((4, 2), (3, 70), CAUSAL, dtype="fp32")
    inputs = reference.make_inputs(asked, "cpu")
    _, lse = check(asked, splits, inputs)
    assert lse.shape == (2, 2, 4, 3)
    exact = reference.evaluate(inputs, torch.float64, mask=CAUSAL, gradients=False)["lse"]
    assert (lse.double().sum(0) - exact).abs().max() < 0.5 * (lse[0].double() - exact).abs().max() + 1e-6


@pytest.mark.parametrize("splits", [1, 3])
def test_scores_with_a_cap_and_a_negative_scale(splits):
    asked = problem_of((4, 2), (3, 70), CAUSAL)
    check(asked, splits, score=score_of(2.0))
    check(asked, splits, scale=-0.3)


@pytest.mark.parametrize("splits", [1, 40])
def test_many_parts_are_put_together_by_turns(splits):
    check(problem_of((4, 2), (1, 700), FULL, batch=1), splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_any_strides(splits):
    """(b, s, h, d) in memory, a cut cache, expanded heads: o has the memory order of q."""
    asked = problem_of((4, 2), (5, 60), CAUSAL)
    inputs = reference.make_inputs(asked, "cpu")
    turned = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    cache = torch.full((2, 2, 80, 32), float("nan"), dtype=torch.float16)
    cache[:, :, :60] = inputs.k
    o, _ = check(asked, splits, replace(inputs, q=turned, k=cache[:, :, :60], v=inputs.v[:, :1].expand(-1, 2, -1, -1)))
    assert o.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_of_infinite_scores_are_nan_as_softmax_has_them(splits):
    asked = problem_of((2, 1), (2, 50), FULL, batch=1)
    inputs = reference.make_inputs(asked, "cpu")
    inputs.q[:, :, 0, 0], inputs.k[:, :, :, 0] = float("-inf"), 1.0
    o, lse = split_forward(asked, inputs, splits)
    assert o[:, :, 0].isnan().all() and not o[:, :, 1].isnan().any()
    assert (lse[:, :, 0] == float("-inf")).all()


def test_number_of_parts_changes_rounding_alone():
    asked = problem_of((4, 2), (3, 90), WINDOW, dtype="fp32")
    inputs = reference.make_inputs(asked, "cpu")
    whole = split_forward(asked, inputs, 1)
    for one, other in zip(whole, split_forward(asked, inputs, 5), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_public_call_takes_it_and_its_backward_is_the_same(monkeypatch):
    monkeypatch.setattr(key_splits_schedule, "MEASURED_ON", (80, 90))  # the interpreter passes for an A100
    monkeypatch.setattr(dispatch, "FORWARD_PLANS", {})
    asked = problem_of((4, 2), (2, 400), CAUSAL, dims=(16, 16), dtype="fp32", batch=1)
    inputs = reference.make_inputs(asked, "cpu")
    q, k, v = (t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    split = fa2tune.explain(q, k, v, causal=True).kernels[0].split
    assert split is not None and split["SPLITS"] > 1
    o, lse = fa2tune.attention(q, k, v, causal=True, return_lse=True)
    gradients = torch.autograd.grad(o, (q, k, v), inputs.do)
    oracle, same = reference.oracle_and_reference(inputs, mask=CAUSAL)
    got = {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    verify.compare(got, oracle, same)
