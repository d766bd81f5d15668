"""The functions of flash-attn 2 (``from fa2tune.compat.flash_attn import flash_attn_func``), with its arguments and results.

Tensors are (batch, seqlen, heads, head_dim), packed ones (total, heads, head_dim). Head dims are 1 to 256, dtypes float16,
bfloat16 and, other than there, float32. With ``return_attn_probs`` a call returns (out, softmax_lse, S_dmask): softmax_lse is
(batch, heads, seqlen_q), of packed tensors (heads, total_q), float32, +inf in rows that see no key; S_dmask is empty, as it is
there without dropout. What is not supported raises NotImplementedError (``LACKING`` in fa2tune/spec/combinations.py).
"""

from __future__ import annotations

import numbers
from typing import Any, NoReturn

import torch

from fa2tune.calling import arguments
from fa2tune.calling.varlen import MaxSeqlen
from fa2tune.compat import terms

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WindowSize = tuple[int, int] | torch.Tensor


def _with_lse(out: torch.Tensor, lse: torch.Tensor) -> Result:
    return out, torch.where(lse == -torch.inf, torch.inf, lse), out.new_empty(0)


def _cap(softcap: Any) -> Any:
    """A negative soft cap is none, as there."""
    return 0.0 if isinstance(softcap, numbers.Real) and softcap < 0 else softcap


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: WindowSize = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, head_dim) -> out, like q.

    The mask is aligned at the bottom right. window_size: (left, right), both inclusive; a negative side is unbounded;
    where the left one is, or is seqlen_k or more, so is a right one of seqlen_k or more. softcap: 0 or less is none.

    Raises:
        NotImplementedError: dropout_p > 0 or alibi_slopes.
        TypeError, ValueError: as ``fa2tune.attention``, or window_size is no pair of integers.
    """
    return _dense("flash_attn_func", q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                  deterministic, return_attn_probs)  # fmt: skip


def _dense(
    call: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softmax_scale: float | None,
    causal: bool, window_size: WindowSize, softcap: float, alibi_slopes: torch.Tensor | None, deterministic: bool,
    return_attn_probs: bool,
) -> Result:  # fmt: skip
    terms.refuse_absent(call, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    window = terms.sides(call, window_size, terms.rows_of(k, 1))
    with_lse = terms.asked_for(call, "return_attn_probs", return_attn_probs)
    out, lse = terms.dense(call, q, k, v, softmax_scale=softmax_scale, deterministic=deterministic, causal=causal,
                           window=window, softcap=_cap(softcap), return_lse=with_lse)  # fmt: skip
    return _with_lse(out, lse) if with_lse else out


def _parts(call: str, name: str, tensor: Any, dimensions: int, count: int) -> tuple[torch.Tensor, ...]:
    """What is stacked in the last dimension but two."""
    arguments.check_dense(f"{call}: {name}", tensor)
    if tensor.dim() != dimensions or tensor.shape[-3] != count:
        wanted = "(batch, seqlen, {}, heads, head_dim)" if dimensions == 5 else "(total, {}, heads, head_dim)"
        raise ValueError(f"{call}: {name}: got shape {tuple(tensor.shape)}, must be {wanted.format(count)}")
    return tensor.unbind(-3)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """qkv (batch, seqlen, 3, heads, head_dim) -> out (batch, seqlen, heads, head_dim); the rest as ``flash_attn_func``."""
    call = "flash_attn_qkvpacked_func"
    q, k, v = _parts(call, "qkv", qkv, 5, 3)
    return _dense(call, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                  return_attn_probs)  # fmt: skip


def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """q as ``flash_attn_func``, kv (batch, seqlen_k, 2, heads_kv, head_dim) -> out, like q."""
    call = "flash_attn_kvpacked_func"
    k, v = _parts(call, "kv", kv, 5, 2)
    return _dense(call, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                  return_attn_probs)  # fmt: skip


def _packed(
    call: str, tensors: tuple[torch.Tensor, ...], offsets: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[MaxSeqlen, MaxSeqlen], dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: WindowSize, softcap: float, alibi_slopes: torch.Tensor | None, deterministic: bool,
    return_attn_probs: bool, block_table: torch.Tensor | None = None,
) -> Result:  # fmt: skip
    terms.refuse_absent(call, dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    q, k, v = tensors
    window = terms.packed_sides(call, window_size, causal, q, *offsets, longest[1])
    with_lse = terms.asked_for(call, "return_attn_probs", return_attn_probs)
    if offsets[1] is None:  # ``attention_varlen`` would take those of the queries
        arguments.check_dense(f"{call}: cu_seqlens_k", None)
    out, lse = terms.packed(call, q, k, v, *offsets, *longest, softmax_scale=softmax_scale, deterministic=deterministic,
                            causal=causal, window=window, softcap=_cap(softcap), return_lse=with_lse)  # fmt: skip
    return _with_lse(out, lse) if with_lse else out


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: MaxSeqlen, max_seqlen_k: MaxSeqlen, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: WindowSize = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Result:  # fmt: skip
    """q (total_q, heads_q, head_dim), k and v (total_k, heads_kv, head_dim) -> out, like q. cu_seqlens as
    ``fa2tune.attention_varlen`` has them: int32, (sequences + 1,).

    Raises:
        NotImplementedError: dropout_p > 0, alibi_slopes or block_table.
        TypeError, ValueError: as ``fa2tune.attention_varlen``, or window_size is no pair of integers.
    """
    return _packed("flash_attn_varlen_func", (q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k),
                   dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                   return_attn_probs, block_table)  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: MaxSeqlen, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: WindowSize = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """qkv (total, 3, heads, head_dim) -> out (total, heads, head_dim); the rest as ``flash_attn_varlen_func``."""
    call = "flash_attn_varlen_qkvpacked_func"
    parts = _parts(call, "qkv", qkv, 4, 3)
    try:
        return _packed(call, parts, (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen), dropout_p, softmax_scale, causal,
                       window_size, softcap, alibi_slopes, deterministic, return_attn_probs)  # fmt: skip
    except (TypeError, ValueError) as error:
        names = ("cu_seqlens", "max_seqlen")
        terms.rename(error, {f"{name}_{side}": name for name in names for side in "qk"})
        raise


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: MaxSeqlen,
    max_seqlen_k: MaxSeqlen, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """q as ``flash_attn_varlen_func``, kv (total_k, 2, heads_kv, head_dim) -> out, like q."""
    call = "flash_attn_varlen_kvpacked_func"
    k, v = _parts(call, "kv", kv, 4, 2)
    return _packed(call, (q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), dropout_p, softmax_scale,
                   causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *rest: Any, **options: Any
) -> NoReturn:
    """Not there yet; programs that import it with the others can be imported.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "flash_attn_with_kvcache: k_cache: fa2tune does not support key/value caches that a call appends to, in pages or not. "
        "fa2tune.attention_varlen takes the used length of each cache as seqused_k"
    )
