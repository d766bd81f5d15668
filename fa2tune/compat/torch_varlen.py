"""``varlen_attn`` of ``torch.nn.attention.varlen``, with its arguments and results.

lse is (heads, total_q) float32, -inf in rows that see no key. What is not supported raises NotImplementedError (``LACKING`` in
fa2tune/spec/combinations.py).
"""

from __future__ import annotations

from typing import Any

import torch

from fa2tune.compat import terms


def varlen_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int | torch.Tensor | None, max_k: int | torch.Tensor | None, is_causal: bool = False, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """query (total_q, heads, head_dim), key and value (total_k, heads, head_dim), cu_seq int32 -> out, like query; with
    ``return_aux.lse`` (out, lse). window_size: (left, right), a negative side is unbounded, (-1, 0) is causal. key and value
    may have fewer heads than query, whatever ``enable_gqa`` says. seqused_k: (sequences,) int32, how many keys of each sequence
    are used.

    Raises:
        NotImplementedError: block_table or num_splits above 1.
        TypeError, ValueError: as ``fa2tune.attention_varlen``.
    """
    call = "varlen_attn"
    terms.refuse_absent(call, block_table=block_table, num_splits=num_splits)
    return_lse = return_aux is not None and bool(return_aux.lse)
    out, lse = terms.packed(
        call, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, softmax_scale=scale, deterministic=None,
        causal=is_causal, window=terms.sides(call, window_size, terms.length(max_k)), return_lse=return_lse,
        seqused_k=seqused_k,
    )  # fmt: skip
    return (out, lse) if return_lse else out
