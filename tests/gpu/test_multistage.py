"""Forwards whose warps load for themselves, on the GPU: the error rule, strides, CUDA graphs, gradients."""

from __future__ import annotations

import pytest
import torch
from hopper_cases import as_they_are
from in_place_checks import check_public_call, check_strides_and_scales

from fa2tune.launching import key_splits, passes
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.sm90 import fwd_multistage
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
DIMS = [(16, 16), (40, 40), (64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (232, 232), (56, 248), (256, 256)]
#: (queries, keys): odd ones, one of either, whole blocks, one key more, more blocks than stages, queries that see no key.
LENGTHS = [(137, 549), (128, 512), (64, 513), (333, 60), (1, 1000), (300, 1), (64, 128), (700, 145)]


def checked(asked, scale=None, view=as_they_are, **how):
    """One forward by each tile; memory that is not written holds NaN."""
    inputs = reference.make_inputs(asked, "cuda", on_device=True, **how)
    scale = asked.head_dim**-0.5 if scale is None else scale
    oracle, same = reference.oracle_and_reference(inputs, mask=asked.mask, gradients=False, softmax_scale=scale)
    q, k, v = map(view, (inputs.q, inputs.k, inputs.v))
    problem = passes.describe(q, k, v, asked.mask, scale)
    for size in fwd_multistage.tiles(problem.specialization, 90):
        config = fwd_multistage.config_of(problem.specialization, *size)
        with verify._strict("ieee"):
            o, lse = key_splits.forward(q, k, v, problem, scale, config)
            again = key_splits.forward(q, k, v, problem, scale, config)
        verify.compare({"o": o, "lse": lse}, oracle, same)
        assert torch.equal(o, again[0]) and torch.equal(lse, again[1]), "the same bits on every run"


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize(("dims", "dtype"), [*((dims, "bf16") for dims in DIMS), ((128, 128), "fp16")], ids=str)
def test_lengths(dims, dtype, mask):
    for queries, keys in LENGTHS:
        checked(Problem(dtype, 2, 6, 2, queries, keys, *dims, mask))


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (256, 256)], ids=str)
def test_more_tiles_than_multiprocessors(dims, mask):
    checked(Problem("bf16", 3, 24, 8, 1000, 333, *dims, mask))


@pytest.mark.parametrize("dims", [(128, 128), (232, 232)], ids=str)
def test_strides_and_scales(dims):
    check_strides_and_scales(checked, Problem("bf16", 3, 8, 2, 137, 549, *dims, FULL))


def test_a_public_call_with_gradients_and_a_graph():
    check_public_call((1, 6, 665, 192), "sm90/fwd_multistage")
