"""Forwards whose programs have equal shares of all key blocks, on the GPU: the error rule, strides, CUDA graphs, gradients."""

from __future__ import annotations

import pytest
import torch
from hopper_cases import as_they_are
from in_place_checks import check_public_call, check_strides_and_scales

from fa2tune.launching import key_splits, passes
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.sm90 import fwd_shares
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
DIMS = [(64, 64), (96, 96), (128, 128), (160, 160), (192, 192), (216, 216), (240, 160), (256, 256)]
#: (queries, keys): many tiles and few, one, whole blocks, one key more, longer than the queries.
LENGTHS = [(700, 700), (137, 2549), (128, 4096), (1, 9000), (1333, 1460), (300, 301)]


def settings_of(problem):
    """As many programs as there are multiprocessors, and some odd ones, behind each number of whole rounds."""
    for shares in (132, 131, 7, 1):
        config = fwd_shares.config_of(problem.specialization, shares, 0)
        tiles = problem.query_tiles(config["BLOCK_M"]) * problem.heads_q
        for rounds in range(tiles // shares + 1 if problem.mask == FULL else 1):
            found = {**config, "ROUNDS": rounds}
            if fwd_shares.refused(problem, found) == "":
                yield found


def checked(asked, scale=None, view=as_they_are, **how):
    """One forward by each setting, in turn and not; memory that is not written holds NaN. How many ran."""
    inputs = reference.make_inputs(asked, "cuda", on_device=True, **how)
    scale = asked.head_dim**-0.5 if scale is None else scale
    oracle, same = reference.oracle_and_reference(inputs, mask=asked.mask, gradients=False, softmax_scale=scale)
    q, k, v = map(view, (inputs.q, inputs.k, inputs.v))
    problem, ran = passes.describe(q, k, v, asked.mask, scale), 0
    for usual in settings_of(problem):
        for turns in (False, True):
            config = {**usual, "PINGPONG": turns}
            with verify._strict("ieee"):
                o, lse = key_splits.forward(q, k, v, problem, scale, config)
                again = key_splits.forward(q, k, v, problem, scale, config)
            verify.compare({"o": o, "lse": passes.lse_of(lse)}, oracle, same)
            assert torch.equal(o, again[0]) and torch.equal(lse, again[1]), "the same bits on every run"
            ran += 1
    return ran


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize(("dims", "dtype"), [*((dims, "bf16") for dims in DIMS), ((192, 192), "fp16")], ids=str)
def test_lengths(dims, dtype, mask):
    ran = [checked(Problem(dtype, 2, 6, 2, queries, keys, *dims, mask)) for queries, keys in LENGTHS]
    assert min(ran) >= 2 and sum(ran) >= 30


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("dims", [(192, 192), (256, 256)], ids=str)
def test_more_tiles_than_multiprocessors(dims, mask):
    assert checked(Problem("bf16", 3, 24, 8, 500, 633, *dims, mask)) >= 6


def test_rows_without_a_key():
    assert checked(Problem("bf16", 2, 4, 4, 700, 640, 192, 192, CAUSAL)) >= 4


@pytest.mark.parametrize("dims", [(192, 192), (256, 256)], ids=str)
def test_strides_and_scales(dims):
    check_strides_and_scales(checked, Problem("bf16", 3, 8, 2, 137, 1549, *dims, FULL))


def test_a_public_call_with_gradients_and_a_graph():
    check_public_call((6, 1, 3369, 256), "sm90/fwd_shares")
