"""The functions of FlashAttention-4 (``flash_attn.cute``, arguments of 4.0.0b36): both return (out, lse), lse as
``fa2tune.attention`` has it: -inf in rows that see no key, and differentiable.

``window_size``: (left, right), None for an unbounded side; a negative side shifts the band off the diagonal, two of them are
no window. ``pack_gqa``, ``return_lse``, ``min_seqlen_k``, ``scheduler_metadata`` and ``disable_scheduler_metadata`` change
nothing. What is not supported raises NotImplementedError (``LACKING`` in fa2tune/spec/combinations.py).
"""

from __future__ import annotations

from typing import Any

import torch

from fa2tune.calling.ops import Pair
from fa2tune.calling.varlen import MaxSeqlen
from fa2tune.compat import bands, terms

OpenWindowSize = tuple[int | None, int | None]


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: OpenWindowSize = (None, None), learnable_sink: torch.Tensor | None = None, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, score_mod: Any = None,
    score_mod_bwd: Any = None, mask_mod: Any = None, aux_tensors: Any = None, aux_scalars: Any = None,
    block_sparse_tensors: Any = None, block_sparse_tensors_bwd: Any = None, return_lse: bool = False,
    gather_bwd_recompute_p: bool = False, gather_bwd_token_chunk: int | None = None,
) -> Pair:  # fmt: skip
    """q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v (..., head_dim_v) -> (out, lse), lse
    (batch, heads_q, seqlen_q) float32.

    Raises:
        NotImplementedError: qv, gather_kv_indices, learnable_sink, num_splits above 1, functions of scores or masks, block
            masks.
        TypeError, ValueError: as ``fa2tune.attention``.
    """
    call = "flash_attn_func"
    terms.refuse_absent(
        call, qv=qv, gather_kv_indices=gather_kv_indices, learnable_sink=learnable_sink, num_splits=num_splits,
        score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd, gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    return bands.dense(call, q, k, v, bands.asked(call, window_size, causal), softmax_scale=softmax_scale,
                       deterministic=deterministic, causal=causal, softcap=softcap)  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: MaxSeqlen = None,
    max_seqlen_k: MaxSeqlen = None, min_seqlen_k: int | None = None, seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None, gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: OpenWindowSize = (None, None), learnable_sink: torch.Tensor | None = None, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, score_mod: Any = None,
    score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None, aux_tensors: Any = None,
    aux_scalars: Any = None, return_lse: bool = False, scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None, disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False, gather_bwd_token_chunk: int | None = None,
) -> Pair:  # fmt: skip
    """q (total_q, heads_q, head_dim) with cu_seqlens_q, int32, or (batch, seqlen_q, heads_q, head_dim) without; k and v
    likewise, with or without cu_seqlens_k -> (out, lse), out like q, lse (heads_q, total_q) or (batch, heads_q, seqlen_q).
    seqused: (sequences,) int32, how many rows of each sequence are used.

    Raises:
        NotImplementedError: qv, gather_kv_indices, page_table, learnable_sink, num_splits above 1, functions of scores or
            masks, block masks.
        TypeError, ValueError: as ``fa2tune.attention_varlen``.
    """
    call = "flash_attn_varlen_func"
    terms.refuse_absent(
        call, qv=qv, gather_kv_indices=gather_kv_indices, page_table=page_table, learnable_sink=learnable_sink,
        num_splits=num_splits, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        seqlen_k_per_split=seqlen_k_per_split, gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    band = bands.asked(call, window_size, causal)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "deterministic": deterministic, "causal": causal, "softcap": softcap,
    }  # fmt: skip
    if cu_seqlens_q is None and cu_seqlens_k is None and seqused_q is None and seqused_k is None:
        return bands.dense(call, q, k, v, band, **options)
    return bands.lengths(call, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, band,
                         seqused_q=seqused_q, seqused_k=seqused_k, **options)  # fmt: skip
