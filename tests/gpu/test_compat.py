"""Drop-ins on the GPU: a tiny Llama in bfloat16 with attn_implementation="fa2tune" and "sdpa", padded, packed, compiled."""

from __future__ import annotations

import pytest
import torch

from fa2tune.compat import flash_attn

transformers = pytest.importorskip("transformers")

import fa2tune.compat.transformers  # noqa: E402, F401  # registers it

TOKENS = 300


def model(implementation):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    found = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return found.to("cuda", torch.bfloat16)


def ids(rows=2):
    return torch.randint(3, 128, (rows, TOKENS), generator=torch.Generator().manual_seed(1)).cuda()


def padding():
    found = torch.ones(2, TOKENS, dtype=torch.long, device="cuda")
    found[0, :77] = 0
    return found


def restarts():
    return torch.cat([torch.arange(length) for length in (100, 170, 30)])[None].cuda()


CASES = {
    "plain": (2, dict), "padded": (2, lambda: {"attention_mask": padding()}),
    "packed": (1, lambda: {"position_ids": restarts()}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(case):
    rows, given = CASES[case]
    inputs, found = given(), []
    for implementation in ("fa2tune", "sdpa"):
        one = model(implementation)
        logits = one(input_ids=ids(rows), use_cache=False, **inputs).logits
        seen = inputs.get("attention_mask", torch.ones_like(ids(rows))).bool()
        logits[seen].float().square().mean().backward()
        found.append([logits[seen], *(p.grad for p in one.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.03 * theirs.abs().max().item() + 1e-6, rtol=0.05)


@pytest.mark.parametrize("case", CASES)
def test_torch_compile_without_graph_breaks(case):
    rows, given = CASES[case]
    one, inputs, tokens = model("fa2tune"), given(), ids(rows)
    with torch.no_grad():
        run = torch.compile(lambda: one(input_ids=tokens, use_cache=False, **inputs).logits, fullgraph=True)
        torch.testing.assert_close(run(), one(input_ids=tokens, use_cache=False, **inputs).logits, atol=0.02, rtol=0.05)


def test_generate():
    options = {"attention_mask": padding(), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert model("fa2tune").generate(ids(), **options).shape == (2, TOKENS + 8)


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
