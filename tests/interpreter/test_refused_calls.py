"""Calls of the drop-ins that ask for something else than there is: the error names the argument, what came, what is allowed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import fa2tune
from fa2tune.compat import flash_attn, flash_attn_4, torch_varlen

drop_in = pytest.importorskip("fa2tune.compat.transformers")
BATCHES = torch.zeros(2, 9, 2, 16)
HEADS_FIRST = torch.zeros(2, 2, 9, 16)
PACKED = torch.zeros(9, 2, 16)
NESTED = torch.nested.nested_tensor([torch.zeros(9, 2, 16), torch.zeros(4, 2, 16)])
OFFSETS = torch.tensor([0, 4, 9], dtype=torch.int32)
TOKENS = torch.ones(2, 9, dtype=torch.bool)


def layer(query=HEADS_FIRST, key=HEADS_FIRST, value=HEADS_FIRST, attention_mask=None, **options):
    return drop_in.forward(SimpleNamespace(is_causal=True), query, key, value, attention_mask, **options)


def dense(k=BATCHES, **options):
    return flash_attn.flash_attn_func(BATCHES, k, k, **options)


def varlen(key=PACKED, cu_seq_q=OFFSETS, max_q=5, max_k=5, **options):
    return torch_varlen.varlen_attn(PACKED, key, key, cu_seq_q, OFFSETS, max_q, max_k, **options)


def stacked(cu_seqlens=OFFSETS, max_seqlen=5):
    return flash_attn.flash_attn_varlen_qkvpacked_func(torch.zeros(9, 3, 2, 16), cu_seqlens, max_seqlen)


def four(window_size=(-3, None), **options):
    """By default a band that takes rows off the used lengths."""
    return flash_attn_4.flash_attn_varlen_func(
        PACKED, PACKED, PACKED, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS, window_size=window_size, **options
    )


REFUSED = {
    "flash_attn_func: k: got a nested tensor, must be a dense": lambda: dense(NESTED),
    "flash_attn_func: k: got layout torch.sparse_coo, must be a dense": lambda: dense(BATCHES.to_sparse()),
    "flash_attn_func: deterministic: got 2, allowed are True, False, None": lambda: dense(deterministic=2),
    "flash_attn_func: return_attn_probs: got 'x', allowed": lambda: dense(return_attn_probs="x"),
    "flash_attn_qkvpacked_func: qkv: got layout torch.sparse_coo": lambda: flash_attn.flash_attn_qkvpacked_func(
        torch.zeros(2, 9, 3, 2, 16).to_sparse()
    ),
    "softcap: got 10000000000": lambda: dense(softcap=10**400),
    "flash_attn_func: window_size: got a tensor of shape (2,), torch.float32 on cpu, must be": lambda: dense(
        window_size=torch.tensor([1.0, 2.0])
    ),
    "flash_attn_func: window_size: got (3, 9223372036854775808), must be": lambda: dense(window_size=(3, 1 << 63)),
    "varlen_attn: window_size: got (9223372036854775808, 0), must be": lambda: varlen(
        max_q=None, max_k=None, window_size=(1 << 63, 0)
    ),
    "flash_attn_varlen_func: window_size: got (9223372036854775808, 0), must be": lambda: four(window_size=(1 << 63, 0)),
    "varlen_attn: return_aux: got ('lse',), must be None": lambda: varlen(return_aux=("lse",)),
    "cu_seq_q: got list, must be": lambda: varlen(cu_seq_q=[0, 8]),
    "cu_seq_q: got device meta, query is on cpu": lambda: varlen(cu_seq_q=OFFSETS.to("meta")),
    "cu_seq_k: got 3 entries, cu_seq_q has 2": lambda: varlen(cu_seq_q=OFFSETS[:2]),
    "max_q, max_k: got -3, must be": lambda: varlen(max_q=-3),
    "max_q: got 1.5, must be": lambda: varlen(max_q=1.5),
    "varlen_attn: key: got head dim 24, query has 16": lambda: varlen(key=torch.zeros(9, 2, 24)),
    "key: got dtype torch.float16, query has torch.float32": lambda: varlen(key=PACKED.half()),
    "is_causal: got 'causal', allowed": lambda: varlen(is_causal="causal"),
    "varlen_attn: query: got 2 heads, must be a multiple of kv heads: 3 of key": lambda: varlen(
        key=torch.zeros(9, 3, 16), enable_gqa=True
    ),
    "varlen_attn: enable_gqa: got 'x', allowed": lambda: varlen(enable_gqa="x"),
    "flash_attn_varlen_func: cu_seqlens_k: got NoneType, must be": lambda: flash_attn.flash_attn_varlen_func(
        PACKED, PACKED, PACKED, OFFSETS, None, 5, 5
    ),
    "flash_attn_varlen_qkvpacked_func: cu_seqlens: got NoneType, must be": lambda: stacked(cu_seqlens=None),
    "cu_seqlens: got list, must be": lambda: stacked(cu_seqlens=[0, 9]),
    "max_seqlen: got -3, must be": lambda: stacked(max_seqlen=-3),
    "cu_seq_lens_q: got shape (1, 3), must have 1": lambda: layer(cu_seq_lens_q=OFFSETS[None]),
    "max_length_q, max_length_k: got -3": lambda: layer(cu_seq_lens_q=OFFSETS, max_length_q=-3),
    "scaling: got 'x'": lambda: layer(scaling="x"),
    "seqused_q: got device meta": lambda: four(seqused_q=torch.ones(2, dtype=torch.int32, device="meta")),
    "fa2tune: query: got tuple, must be": lambda: layer(query=(1, 2)),
    "fa2tune: query: got shape (3,), must have 4": lambda: layer(query=torch.zeros(3), attention_mask=TOKENS),
    "fa2tune: is_causal: got 'x', allowed": lambda: layer(is_causal="x"),
    "fa2tune: sliding_window: got 'x', must be an integer": lambda: layer(sliding_window="x"),
    "fa2tune: sliding_window: got 0, must be 1 or more": lambda: layer(sliding_window=0),
    "fa2tune: attention_mask: got layout torch.sparse_coo": lambda: layer(attention_mask=TOKENS.to_sparse()),
    "fa2tune: attention_mask: got shape (3, 9), must be (2, at most 9": lambda: layer(
        attention_mask=torch.ones(3, 9, dtype=torch.bool)
    ),
    "fa2tune: attention_mask: got shape (2, 12), must be (2, at most 9": lambda: layer(
        attention_mask=torch.ones(2, 12, dtype=torch.bool)
    ),
    "fa2tune: attention_mask: got device meta, key is on cpu": lambda: layer(attention_mask=TOKENS.to("meta")),
    "fa2tune: key: got batch 1, query has 2": lambda: layer(key=HEADS_FIRST[:1], attention_mask=TOKENS),
    "fa2tune: value: got batch and length (2, 4), key has (2, 9)": lambda: layer(
        value=HEADS_FIRST[:, :, :4], attention_mask=TOKENS
    ),
    "fa2tune: cu_seq_lens_q: got list, must be": lambda: layer(cu_seq_lens_q=[0, 18]),
    "fa2tune: attention_mask: got Tensor of shape (9,), must be None or (batch, length)": lambda: drop_in.mask(
        2, 9, 9, attention_mask=torch.ones(9, dtype=torch.bool)
    ),
    "fa2tune: attention_mask: got str of shape (), must be": lambda: drop_in.mask(2, 9, 9, attention_mask="x"),
    "document_ids: got layout torch.sparse_coo, must": lambda: fa2tune.cu_seqlens(document_ids=OFFSETS.to_sparse()),
    "document_ids: got a nested tensor, must": lambda: fa2tune.cu_seqlens(
        document_ids=torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([1, 2])])
    ),
    "sequences: got 4294967296, must be from 1 to 2^31 - 1": lambda: fa2tune.cu_seqlens(
        document_ids=OFFSETS, sequences=1 << 32
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_the_argument_is_named(said):
    with pytest.raises((TypeError, ValueError)) as caught:
        REFUSED[said]()
    assert str(caught.value).startswith(said)


def test_integers_switches_and_scales_of_numpy_are_taken():
    numpy = pytest.importorskip("numpy")
    want = dense(window_size=(3, 0))
    assert torch.equal(dense(window_size=[numpy.int64(3), numpy.int32(0)], deterministic=numpy.bool_(True)), want)
    assert torch.equal(dense(softmax_scale=numpy.float32(0.5)), dense(softmax_scale=0.5))
    assert torch.equal(dense(window_size=(-1, 99)), dense()) and torch.equal(dense(window_size=(None, None)), dense())
    with pytest.raises(TypeError, match=r"window_size: got \(-1.0, -1.0\)"):
        dense(window_size=(-1.0, -1.0))
    with pytest.raises(NotImplementedError, match=r"dropout_p: got 0\.5"):
        dense(dropout_p=0.5)
    with pytest.raises(NotImplementedError, match="dropout_p: got ''"):
        dense(dropout_p="")


@pytest.mark.parametrize("side", [torch.tensor([1, 2]), torch.tensor(-1), torch.ones(2).numpy()], ids=str)
@pytest.mark.parametrize("other", [-1, None])
def test_a_side_of_a_window_is_an_integer_before_it_is_compared(side, other, monkeypatch):
    """Truth of a tensor on the GPU waits for it."""

    def read(tensor):
        raise AssertionError("the tensor is read")

    def four(**options):
        return flash_attn_4.flash_attn_func(BATCHES, BATCHES, BATCHES, **options)

    monkeypatch.setattr(torch.Tensor, "__bool__", read)
    for call in (dense, varlen, four):
        for window in ((side, other), (other, side)):
            with pytest.raises(TypeError, match=r"window_size: got .* two"):
                call(window_size=window)
