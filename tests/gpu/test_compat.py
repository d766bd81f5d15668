"""Drop-ins on the GPU: tiny models with attn_implementation="fa2tune": loss and gradients against float64, within the errors of
"eager" in the same dtype; padded, packed, generating, compiled."""

from __future__ import annotations

import pytest
import torch

from fa2tune.compat import flash_attn

pytest.importorskip("transformers")

import tiny_models

SIZE = tiny_models.Size(tokens=300, padding=77, documents=(100, 170, 30), window=48, layers=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*tiny_models.DECODERS, *tiny_models.ENCODERS])
def test_loss_and_gradients_against_float64(name, dtype):
    faults = tiny_models.faults_trained(name, SIZE, dtype, "cuda")
    assert faults == {}


@pytest.mark.parametrize("name", tiny_models.DECODERS)
def test_generate_against_float64(name):
    faults = tiny_models.faults_generated(name, SIZE, 6, torch.bfloat16, "cuda")
    assert faults == []


@pytest.mark.parametrize("seed, dtype", [(0, torch.bfloat16), (1, torch.float16)], ids=str)
@pytest.mark.parametrize("name", [*tiny_models.DECODERS, *tiny_models.ENCODERS])
def test_sizes_drawn_at_random(name, seed, dtype):
    size = tiny_models.drawn(name, seed, 300)
    assert tiny_models.faults_trained(name, size, dtype, "cuda") == {}, size
    if name in tiny_models.DECODERS:
        assert tiny_models.faults_generated(name, size, 4, dtype, "cuda") == [], size


@pytest.mark.parametrize("name, case", tiny_models.COMPILED)
def test_torch_compile_without_graph_breaks(name, case):
    faults = tiny_models.faults_compiled(name, case, SIZE, torch.bfloat16, "cuda")
    assert faults == []


@pytest.mark.parametrize("dim", [59, 111])
def test_any_head_dim(dim):
    q, k, v = (torch.randn(2, 500, 4, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    o = flash_attn.flash_attn_func(q, k, v, causal=True)
    views = (t.transpose(1, 2) for t in (q, k, v))
    right = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True).transpose(1, 2)
    for ours, theirs in zip(
        (o, *torch.autograd.grad(o.sum(), (q, k, v))),
        (right, *torch.autograd.grad(right.sum(), (q, k, v))),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)
