"""Score terms on the GPU, ``softcap=`` and ``score=``: the public call by the error rule, gradients included."""

from __future__ import annotations

import pytest
import torch
from added_terms import add_terms

import fa2tune
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import Score, score_of

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


@pytest.mark.parametrize("mask", [FULL, CAUSAL, band(128, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_term_of_rows_columns_sequences_and_heads(monkeypatch, head_dim, mask):
    add_terms(monkeypatch)
    for lengths in LENGTHS:
        compared("bf16", head_dim, lengths, mask, score=Score("alibi", 4))


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_packed_sequences_of_such_a_term(monkeypatch, mask):
    add_terms(monkeypatch)
    score, lengths = Score("alibi", 4), ((300, 300), (1, 70), (0, 5), (77, 900))
    queries, keys = (sum(side) for side in zip(*lengths, strict=True))
    inputs = reference.make_inputs(Problem("bf16", 1, 4, 2, queries, keys, 64, 64, mask), "cuda")
    starts = [torch.tensor([0, *side]).cumsum(0).int().cuda() for side in zip(*lengths, strict=True)]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (inputs.q, inputs.k, inputs.v))
    o, lse = fa2tune.attention_varlen(q, k, v, *starts, mask=mask, return_lse=True, score=score)
    row, key = 0, 0
    for number, (rows, seen) in enumerate(lengths):
        of_rows, of_keys = slice(row, row + rows), slice(key, key + seen)
        one = reference.Inputs(
            inputs.q[:, :, of_rows], inputs.k[:, :, of_keys], inputs.v[:, :, of_keys], inputs.do[:, :, of_rows], None
        )
        right = reference.oracle_and_reference(one, mask=mask, score=score, gradients=False, sequence=number)
        found = {"o": o.transpose(0, 1)[None, :, of_rows], "lse": lse[None, :, of_rows]}
        if rows:
            verify.compare(found, *right)
        row, key = of_rows.stop, of_keys.stop


@pytest.mark.parametrize("mask", [FULL, CAUSAL, band(128, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("score", [Score("softcap", 2.0), Score("alibi", 4)], ids=str)
def test_gradients_of_packed_sequences(monkeypatch, mask, head_dim, score):
    add_terms(monkeypatch)
    lengths = ((300, 300), (1, 70), (0, 5), (77, 900))
    queries, keys = (sum(side) for side in zip(*lengths, strict=True))
    inputs = reference.make_inputs(Problem("bf16", 1, 4, 2, queries, keys, head_dim, head_dim, mask), "cuda")
    starts = [torch.tensor([0, *side]).cumsum(0).int().cuda() for side in zip(*lengths, strict=True)]
    leaves = [tensor[0].transpose(0, 1).clone().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    o = fa2tune.attention_varlen(*leaves, *starts, mask=mask, score=score)
    gradients = torch.autograd.grad(o, leaves, inputs.do[0].transpose(0, 1))
    row, key = 0, 0
    for number, (rows, seen) in enumerate(lengths):
        of_rows, of_keys = slice(row, row + rows), slice(key, key + seen)
        one = reference.Inputs(
            inputs.q[:, :, of_rows], inputs.k[:, :, of_keys], inputs.v[:, :, of_keys], inputs.do[:, :, of_rows], None
        )
        found = {
            name: gradient.transpose(0, 1)[None, :, of_rows if name == "dq" else of_keys]
            for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True)
        }
        if rows:
            verify.compare(found, *reference.oracle_and_reference(one, mask=mask, score=score, sequence=number))
        else:
            assert not any(found[name].any() for name in ("dk", "dv"))
        row, key = of_rows.stop, of_keys.stop


@pytest.mark.parametrize("mask", [FULL, CAUSAL, band(1024, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 160, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_calls_that_rows_serve(head_dim, mask, deterministic):
    compared("bf16", head_dim, (4096, 4096), mask, 2.0, deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_keys(head_dim):
    """One tile of them: a kernel of its own makes all gradients."""
    for lengths in ((2000, 77), (100, 128)):
        compared("bf16", head_dim, lengths, FULL, 2.0)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_hopper_kernels_serve(head_dim):
    """But for the forward of up to 64 columns with a cap, where the portable one was measured to be faster."""
    q = torch.empty(1, 16, 4096, head_dim, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for cap in (None, 50.0):
        kernels = fa2tune.explain(q, q, q, causal=True, softcap=cap).kernels
        portable = [kernel.key.kernel for kernel in kernels if "LOADS" in kernel.config]
        assert len(kernels) > 1 and portable == (["fwd"] if cap and head_dim == 64 else [])


@pytest.mark.parametrize("softmax_scale", [0.0, -0.3, 1.0])
def test_any_scale(softmax_scale):
    compared("fp16", 64, (300, 400), CAUSAL, 1.5, softmax_scale=softmax_scale)


def test_scores_that_reach_the_cap():
    compared("bf16", 128, (512, 512), FULL, 3.0, scale=6.0)
