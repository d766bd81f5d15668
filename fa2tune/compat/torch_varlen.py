"""``varlen_attn`` and ``varlen_attn_out`` of ``torch.nn.attention.varlen``, with their arguments and results.

lse is (heads, total_q) float32, -inf in rows that see no key. What is not supported raises NotImplementedError (``LACKING`` in
fa2tune/spec/combinations.py).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from fa2tune.calling import distributed
from fa2tune.compat import terms

try:
    from torch.nn.attention.varlen import varlen_attn as _of_torch
except ImportError:  # torch 2.9
    _of_torch = None  # type: ignore[assignment]

#: Names of ``attention_varlen`` -> names here.
_NAMES = {
    "q": "query", "k": "key", "v": "value", "cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k",
    "max_seqlen_q": "max_q", "max_seqlen_k": "max_k", "causal": "is_causal", "softmax_scale": "scale",
}  # fmt: skip
#: Whether torch's own call has ``enable_gqa``, and takes fewer heads of keys as a mistake without it. One that has not takes
#: them, as its flash backend does.
_ASKS = _of_torch is not None and "enable_gqa" in inspect.signature(_of_torch).parameters


def varlen_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor | None,
    max_q: int | torch.Tensor | None, max_k: int | torch.Tensor | None, is_causal: bool = False, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """query (total_q, heads, head_dim), key and value (total_k, heads, head_dim), cu_seq int32 -> out, like query; with
    ``return_aux.lse`` (out, lse). window_size: (left, right), a negative side is unbounded, (-1, 0) is causal. With
    ``enable_gqa``, or where the installed torch's call does not have it (2.11), key and value may have fewer heads than query.
    seqused_k: (sequences,) int32, how many keys of each sequence are used.

    Raises:
        NotImplementedError: block_table or num_splits above 1.
        TypeError, ValueError: as ``fa2tune.attention_varlen``; cu_seq_k is None, which goes with a block_table; fewer heads of
            key and value without enable_gqa, where torch's call has it.
    """
    call = "varlen_attn"
    terms.refuse_absent(call, block_table=block_table, num_splits=num_splits)
    if cu_seq_k is None:
        raise ValueError(f"{call}: cu_seq_k: got None, must be a tensor, (sequences + 1,) int32")
    _check_heads(call, query, key, enable_gqa)
    cu_seq_q, cu_seq_k, seqused_k = (
        distributed.whole(f"{call}: {name}", tensor)
        for name, tensor in {"cu_seq_q": cu_seq_q, "cu_seq_k": cu_seq_k, "seqused_k": seqused_k}.items()
    )
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise TypeError(
            f"{call}: return_aux: got {return_aux!r:.80}, must be None or torch's AuxRequest, which has lse"
        )
    return_lse = return_aux is not None and bool(return_aux.lse)
    window = terms.packed_sides(call, window_size, is_causal, query, cu_seq_q, cu_seq_k, max_k, seqused_k)
    try:
        out, lse = terms.packed(
            call, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, softmax_scale=scale, deterministic=None,
            causal=is_causal, window=window, return_lse=return_lse, seqused_k=seqused_k,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        terms.rename(error, _NAMES)
        raise
    return (out, lse) if return_lse else out


def _check_heads(call: str, query: Any, key: Any, enable_gqa: Any) -> None:
    """ValueError, in torch's words: another number of heads of the keys than it takes."""
    grouped = terms.asked_for(call, "enable_gqa", enable_gqa) or not _ASKS
    if not (_is_packed(query) and _is_packed(key)):
        return  # what is no packed tensor is refused by name later
    if grouped and key.shape[1] and query.shape[1] % key.shape[1]:
        raise ValueError(
            f"{call}: query: got {query.shape[1]} heads, must be a multiple of kv heads: {key.shape[1]} of key"
        )
    if not grouped and key.shape[1] != query.shape[1]:
        raise ValueError(
            f"{call}: key: got {key.shape[1]} heads, must be the {query.shape[1]} of query, or fewer with enable_gqa=True"
        )


def _is_packed(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and not tensor.is_nested and tensor.dim() == 3


def varlen_attn_out(
    out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None, max_q: int | torch.Tensor | None, max_k: int | torch.Tensor | None, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``varlen_attn`` whose output is copied into ``out``, (total_q, heads, dim of value), which is returned. No gradients.

    Raises:
        NotImplementedError, TypeError, ValueError: as ``varlen_attn``; and for an ``out`` of another shape, dtype or device.
    """
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"varlen_attn_out: out: got {type(out).__name__}, must be a torch.Tensor")
    with torch.no_grad():
        result = varlen_attn(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale,
            window_size=window_size, enable_gqa=enable_gqa, seqused_k=seqused_k, block_table=block_table,
            num_splits=num_splits,
        )  # fmt: skip
        found, *lse = result if isinstance(result, tuple) else (result,)
        if distributed.given(out) != distributed.given(found):
            raise TypeError(
                f"varlen_attn_out: out: got {type(out).__name__}, must be a {type(found).__name__} as query is"
            )
        for name in ("shape", "dtype", "device"):
            if getattr(out, name) != getattr(found, name):
                raise ValueError(
                    f"varlen_attn_out: out: got {name} {getattr(out, name)}, must be {getattr(found, name)}"
                )
        out.copy_(found)
    return (out, lse[0]) if lse else out
