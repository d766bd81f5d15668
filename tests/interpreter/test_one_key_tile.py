"""Backwards whose keys are one tile, in Triton's interpreter: the error rule for all masks, heads, lengths and tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fa2tune.launching import one_key_tile, passes
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.portable import bwd_one_tile
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import score_of

WINDOW = Mask("band", 20, 3)


@pytest.fixture(autouse=True)
def _poison():
    """torch.empty fills with NaN, so that an element that was not written is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def problem_of(heads, lengths, mask, dims=(32, 32), dtype="fp16", batch=2):
    return Problem(dtype, batch, *heads, *lengths, *dims, mask)


def check(asked, parts=1, inputs=None, loads="pointer", scale=None, with_dlse=True, **other):
    inputs = inputs or reference.make_inputs(asked, "cpu", with_dlse=with_dlse)
    oracle, same = reference.oracle_and_reference(inputs, mask=asked.mask, softmax_scale=scale)
    o, lse = same["o"], oracle["lse"].float()
    scale = asked.head_dim**-0.5 if scale is None else scale
    problem = passes.describe(inputs.q, inputs.k, inputs.v, asked.mask, scale, o=o, do=inputs.do)
    assert one_key_tile.can(problem)
    keys = bwd_one_tile.keys_of(asked.seqlen_k)
    config = {**bwd_one_tile.config_of(problem.specialization, keys, parts, False), "LOADS": loads, **other}
    found = one_key_tile.backward(
        inputs.do, inputs.dlse, inputs.q, inputs.k, inputs.v, o, lse, problem, scale, config
    )  # fmt: skip
    got = dict(zip(("dq", "dk", "dv"), found, strict=True))
    verify.compare(got, {name: oracle[name] for name in got}, {name: same[name] for name in got})
    return found


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    "mask",
    [FULL, CAUSAL, WINDOW, Mask("band", 9, -1), Mask("chunked", 48), Mask("causal_top_left")],
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        ((3, 3), (70, 77)),
        ((4, 2), (150, 64)),  # causal: rows that see no key
        ((6, 1), (33, 100)),  # a block of each query head
        ((2, 2), (5, 1)),  # parts without blocks
    ],
)
def test_masks_groups_and_lengths(heads, lengths, mask, parts):
    check(problem_of(heads, lengths, mask), parts)


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("dims", [(16, 16), (40, 24), (24, 72), (128, 64), (200, 16), (256, 256)])
def test_head_dims_whole_and_in_halves(dims, halves, loads):
    check(problem_of((2, 1), (70, 80), CAUSAL, dims, batch=1), 2, loads=loads, HALVES=halves)


@pytest.mark.parametrize("rows", bwd_one_tile.ROWS)
def test_query_blocks(rows):
    check(problem_of((4, 2), (130, 90), CAUSAL, batch=1), 3, BLOCK_M=rows, with_dlse=False)


def test_a_negative_scale_and_one_of_zero():
    asked = problem_of((4, 2), (40, 70), CAUSAL)
    check(asked, scale=-0.3)


def test_any_strides():
    """(b, s, h, d) in memory, a cut cache, expanded heads: gradients have the memory order of their inputs."""
    asked = problem_of((4, 2), (50, 60), CAUSAL)
    inputs = reference.make_inputs(asked, "cpu", with_dlse=True)
    turned = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    cache = torch.full((2, 2, 80, 32), float("nan"), dtype=torch.float16)
    cache[:, :, :60] = inputs.k
    dlse = torch.stack([inputs.dlse, inputs.dlse], -1)[..., 0]
    moved = replace(inputs, q=turned, k=cache[:, :, :60], v=inputs.v[:, :1].expand(-1, 2, -1, -1), dlse=dlse)
    for parts in (1, 2):
        dq, _, _ = check(asked, parts, moved)
        assert dq.transpose(1, 2).is_contiguous()


def test_the_same_bits_on_every_run():
    asked = problem_of((4, 1), (100, 90), CAUSAL, dtype="bf16")
    inputs = reference.make_inputs(asked, "cpu")
    for one, other in zip(check(asked, 3, inputs), check(asked, 3, inputs), strict=True):
        assert torch.equal(one, other)


def test_what_it_cannot_compute():
    fine = problem_of((2, 2), (50, 128), CAUSAL)
    assert one_key_tile.can(fine)
    for other in ({"seqlen_k": 129}, {"dtype": "fp32"}, {"score": score_of(2.0)}):
        assert not one_key_tile.can(replace(fine, **other))
