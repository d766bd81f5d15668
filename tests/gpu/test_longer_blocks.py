"""Forwards in blocks of 80 keys, on the GPU: the error rule, strides, CUDA graphs, gradients."""

from __future__ import annotations

import pytest
import torch
from hopper_cases import as_they_are
from in_place_checks import check_public_call, check_strides_and_scales

from fa2tune.launching import key_splits, passes
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.sm90 import fwd_80_keys
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Problem

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
DIMS = [(200, 200), (216, 216), (232, 232), (240, 256), (248, 208), (256, 256)]
#: (queries, keys): odd ones, one of either, whole blocks, one key more, a last block without a tail.
LENGTHS = [(137, 549), (128, 800), (128, 801), (333, 460), (1, 1000), (300, 1), (64, 144), (700, 145)]


def checked(asked, scale=None, view=as_they_are, **how):
    """One forward in each form; memory that is not written holds NaN."""
    inputs = reference.make_inputs(asked, "cuda", on_device=True, **how)
    scale = asked.head_dim**-0.5 if scale is None else scale
    oracle, same = reference.oracle_and_reference(inputs, mask=FULL, gradients=False, softmax_scale=scale)
    q, k, v = map(view, (inputs.q, inputs.k, inputs.v))
    problem = passes.describe(q, k, v, FULL, scale)
    for turns in (False, True):
        config = {**fwd_80_keys.config_of(problem.specialization), "PINGPONG": turns}
        with verify._strict("ieee"):
            o, lse = key_splits.forward(q, k, v, problem, scale, config)
            again = key_splits.forward(q, k, v, problem, scale, config)
        verify.compare({"o": o, "lse": lse}, oracle, same)
        assert torch.equal(o, again[0]) and torch.equal(lse, again[1]), "the same bits on every run"


@pytest.mark.parametrize(("dims", "dtype"), [*((dims, "bf16") for dims in DIMS), ((256, 256), "fp16")], ids=str)
def test_lengths(dims, dtype):
    for queries, keys in LENGTHS:
        checked(Problem(dtype, 2, 6, 2, queries, keys, *dims, FULL))


@pytest.mark.parametrize("dims", [(232, 232), (256, 256)], ids=str)
def test_more_tiles_than_multiprocessors(dims):
    checked(Problem("bf16", 3, 24, 8, 1000, 333, *dims, FULL))


@pytest.mark.parametrize("dims", [(232, 232), (256, 256)], ids=str)
def test_strides_and_scales(dims):
    check_strides_and_scales(checked, Problem("bf16", 3, 8, 2, 137, 549, *dims, FULL))


def test_a_public_call_with_gradients_and_a_graph():
    check_public_call((2, 8, 4096, 232), "sm90/fwd_80_keys")
