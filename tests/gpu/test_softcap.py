"""Score terms on the GPU, ``softcap=`` and ``score=``: the public call by the error rule, gradients included."""

from __future__ import annotations

import pytest
import torch

import fa2tune
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import score_of

LENGTHS = ((512, 512), (1000, 1300), (1300, 1000), (77, 2000), (1, 777))


def compared(
    dtype, head_dim, lengths, mask, softcap=None, *, score=None, scale=1.0, softmax_scale=None, deterministic=None
):
    asked = Problem(dtype, 2, 4, 2, *lengths, head_dim, head_dim, mask)
    inputs = reference.make_inputs(asked, "cuda", scale=scale, with_dlse=True)
    options = {"mask": mask, "softmax_scale": softmax_scale}
    oracle, same = reference.oracle_and_reference(inputs, score=score_of(softcap, score), **options)
    q, k, v = (tensor.clone().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    term = {"softcap": softcap} if score is None else {"score": score}
    o, lse = fa2tune.attention(q, k, v, return_lse=True, deterministic=deterministic, **term, **options)
    gradients = torch.autograd.grad((o, lse), (q, k, v), (inputs.do, inputs.dlse))
    found = {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    verify.compare(found, oracle, same)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, band(128, 0), Mask("chunked", 256)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 80])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_public_call(head_dim, mask, deterministic):
    for lengths in LENGTHS:
        compared("bf16", head_dim, lengths, mask, 2.0, deterministic=deterministic)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("softcap", [0.3, 50.0])
def test_other_dtypes(dtype, softcap):
    compared(dtype, 64, (700, 900), CAUSAL, softcap)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("score", ["none", fa2tune.Score("softcap", 1.5), fa2tune.Score("softcap", 30.0)], ids=str)
def test_a_score_term_by_name(dtype, score):
    for lengths in ((700, 900), (900, 700)):
        compared(dtype, 128, lengths, CAUSAL, score=score)


@pytest.mark.parametrize("softmax_scale", [0.0, -0.3, 1.0])
def test_any_scale(softmax_scale):
    compared("fp16", 64, (300, 400), CAUSAL, 1.5, softmax_scale=softmax_scale)


def test_scores_that_reach_the_cap():
    compared("bf16", 128, (512, 512), FULL, 3.0, scale=6.0)
