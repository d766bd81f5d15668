"""The functions of FlashAttention-4 (``flash_attn.cute``): both return (out, lse), lse as ``fa2tune.attention`` has it: -inf
in rows that see no key, and differentiable.

``window_size``: (left, right), None for an unbounded side. What is not supported raises NotImplementedError (``LACKING`` in
fa2tune/spec/combinations.py).
"""

from __future__ import annotations

import numbers
from typing import Any

import torch

from fa2tune.calling.ops import Pair
from fa2tune.compat import terms

OpenWindowSize = tuple[int | None, int | None]


def _window(call: str, window_size: Any) -> OpenWindowSize:
    """A negative side shifts the band there: there is no such mask here."""
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"{call}: window_size: got {window_size!r:.80}, must be two, each an integer or None")
    for side in window_size:
        if isinstance(side, numbers.Integral) and side < 0:
            raise NotImplementedError(
                f"{call}: window_size: got {window_size!r:.80}, allowed are integers from 0 on, and None for an unbounded "
                "side: fa2tune does not support bands that are shifted off the diagonal"
            )
    left, right = window_size
    return left, right


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: OpenWindowSize = (None, None), learnable_sink: torch.Tensor | None = None, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, mask_mod: Any = None,
    full_block_cnt: Any = None, full_block_idx: Any = None, mask_block_cnt: Any = None, mask_block_idx: Any = None,
    block_size: Any = None, return_lse: bool = True,
) -> Pair:  # fmt: skip
    """q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v (..., head_dim_v) -> (out, lse), lse
    (batch, heads_q, seqlen_q) float32. ``pack_gqa`` and ``return_lse`` change nothing.

    Raises:
        NotImplementedError: learnable_sink, num_splits above 1, mask_mod, block masks, a negative side of window_size.
        TypeError, ValueError: as ``fa2tune.attention``.
    """
    call = "flash_attn_func"
    terms.refuse_absent(
        call, learnable_sink=learnable_sink, num_splits=num_splits, mask_mod=mask_mod, full_block_cnt=full_block_cnt,
        full_block_idx=full_block_idx, mask_block_cnt=mask_block_cnt, mask_block_idx=mask_block_idx, block_size=block_size,
    )  # fmt: skip
    return terms.dense(call, q, k, v, softmax_scale=softmax_scale, deterministic=deterministic, causal=causal,
                       window=_window(call, window_size), softcap=softcap, return_lse=True)  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None, seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: OpenWindowSize = (None, None), learnable_sink: torch.Tensor | None = None, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, score_mod: Any = None,
    mask_mod: Any = None, block_sparse_tensors: Any = None, cu_total_m_blocks: Any = None,
    cu_total_n_blocks: Any = None, aux_tensors: Any = None, return_lse: bool = True,
) -> Pair:  # fmt: skip
    """q (total_q, heads_q, head_dim), k and v (total_k, heads_kv, ...) with cu_seqlens, int32 -> (out, lse), lse (heads_q,
    total_q) float32. Without cu_seqlens as ``flash_attn_func``. seqused: (sequences,) int32, how many rows of each sequence are
    used.

    Raises:
        NotImplementedError: page_table, learnable_sink, num_splits above 1, functions of scores or masks.
        TypeError, ValueError: as ``fa2tune.attention_varlen``, or only one of both cu_seqlens is given.
    """
    call = "flash_attn_varlen_func"
    terms.refuse_absent(
        call, page_table=page_table, learnable_sink=learnable_sink, num_splits=num_splits, score_mod=score_mod,
        mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors, cu_total_m_blocks=cu_total_m_blocks,
        cu_total_n_blocks=cu_total_n_blocks, aux_tensors=aux_tensors,
    )  # fmt: skip
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "deterministic": deterministic, "causal": causal,
        "window": _window(call, window_size), "softcap": softcap, "return_lse": True,
    }  # fmt: skip
    if cu_seqlens_q is None and cu_seqlens_k is None:
        if seqused_q is None and seqused_k is None:
            return terms.dense(call, q, k, v, **options)
        return terms.used(call, q, k, v, seqused_q, seqused_k, **options)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        lacking = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{call}: {lacking}: got None, and the other is given: both or neither are allowed")
    return terms.packed(call, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q,
                        seqused_k=seqused_k, **options)  # fmt: skip
