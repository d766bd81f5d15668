"""Arguments that ``attention`` does not take or that are missing, and tensors in another library's order: the error or warning
that says what to write.

None of this runs in a call that is warm and right.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from fa2tune.spec.combinations import LACKING, why


class _Missing:
    """Default of q, k and v, so that a call without one gets an error of this module and not Python's."""

    def __repr__(self) -> str:
        return "<required>"


MISSING: Any = _Missing()
ALLOWED = ("causal", "softmax_scale", "layout", "return_lse", "deterministic", "window", "mask", "softcap", "score")
#: The same of ``attention_varlen``, and what it takes by position, too.
ALLOWED_PACKED = (
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *(name for name in ALLOWED if name != "layout"),
    "seqused_q", "seqused_k", "schedule",
)  # fmt: skip

#: Argument of PyTorch's SDPA, flash-attn, FlexAttention, xFormers or Transformers -> what to write here
INSTEAD = {
    "query": "q=", "key": "k=", "value": "v=", "query_states": "q=", "key_states": "k=", "value_states": "v=",
    "is_causal": "causal=", "scale": "softmax_scale=", "sm_scale": "softmax_scale=", "return_softmax_lse": "return_lse=True",
    "return_attn_probs": "return_lse=True (attention probabilities are never stored)", "input_layout": "layout=",
    "tensor_layout": "layout=", "window_size": "window=(left, right)",
    "sliding_window": "window=(sliding_window - 1, 0) (Transformers counts the query itself)",
    **dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k"),
        "fa2tune.attention_varlen, for packed sequences,",
    ),
}  # fmt: skip
#: ... -> what to write in ``attention_varlen``
INSTEAD_PACKED = {
    **INSTEAD, "cu_seqlens": "cu_seqlens_q=", "max_seqlen": "max_seqlen_q=", "cu_seq_q": "cu_seqlens_q=",
    "cu_seq_k": "cu_seqlens_k=", "max_q": "max_seqlen_q=", "max_k": "max_seqlen_k=",
}  # fmt: skip
#: ... -> why it can be left out
NEEDLESS = {
    "enable_gqa": "k and v may have fewer heads than q without it",
    "pack_gqa": "k and v may have fewer heads than q without it",
    "num_splits": "the tuned config decides that",
}
#: Which tensors are taken for (batch, seqlen, heads, dim): see ``doubt_layout``.
MANY_HEADS, MOST_HEADS, LARGE_HEAD_DIM = 64, 128, 128
_doubted = False


def refuse(unknown: Mapping[str, Any], extra: Sequence[Any], q: Any, k: Any, v: Any, layout: Any) -> NoReturn:
    """TypeError for what ``attention`` does not take: keywords, positional arguments after v; and for a missing q, k or v."""
    said = [_said(name, value, q, k, layout) for name, value in unknown.items()]
    instead = {INSTEAD.get(name) for name in unknown}
    missing = [name for name, given in (("q", q), ("k", k), ("v", v)) if given is MISSING and f"{name}=" not in instead]
    if missing:
        said.append(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    if extra:
        said.append(f"got {3 + len(extra)} positional arguments, takes 3")
    if missing or extra or instead & {"q=", "k=", "v="}:
        names = ", ".join(f"{name}=" for name in ALLOWED)
        said.append(f"the tensors are q, k, v; everything after v is keyword-only: {names}")
    raise TypeError("attention: " + "; ".join(said))


def said(name: str, value: Any, call: str) -> str:
    """Of an argument that ``call``, another than ``attention``, does not take."""
    if name == "layout":
        return f"got layout=, which {call} has not: {why('packed sequences', 'layout')}"
    return _said(name, value, None, None, None, INSTEAD_PACKED, ALLOWED_PACKED)


def _said(
    name: str, value: Any, q: Any, k: Any, layout: Any, use: Mapping[str, str] = INSTEAD, allowed: Sequence[str] = ALLOWED
) -> str:  # fmt: skip
    if name in use:
        return f"got {name}=, use {use[name]} instead{_alignment(q, k, layout) if name == 'is_causal' else ''}"
    if name in NEEDLESS:
        return f"got {name}=, leave it out: {NEEDLESS[name]}"
    if name in LACKING:
        absent = LACKING[name]
        plain = value is None or isinstance(value, (bool, int, float, str))
        neutral = plain and any(value == one for one in (None, *absent.neutral))
        leave_out = f"; {name}={value!r:.40} can be left out" if neutral else ""
        return f"got {name}=, which is not supported yet ({absent.what}){leave_out}"
    return f"got an unknown argument {name}=, allowed are {', '.join(f'{one}=' for one in allowed)}"


def _alignment(q: Any, k: Any, layout: Any) -> str:
    """What differs from SDPA's mask where the lengths do."""
    rows = 1 if layout == "bshd" else 2
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() == 4 for tensor in (q, k)):
        return ""
    seqlen_q, seqlen_k = q.shape[rows], k.shape[rows]
    if seqlen_q == seqlen_k:
        return ""
    return (
        f" (with {seqlen_q} queries and {seqlen_k} keys the two differ: is_causal= aligns the mask at the top left, query i "
        'sees keys 0 to i, as mask="causal_top_left" does; causal= aligns it at the bottom right, query i sees keys '
        f"0 to i + {seqlen_k} - {seqlen_q})"
    )


def doubt_layout(q: torch.Tensor, k: torch.Tensor, layout: str, stacklevel: int) -> None:
    """Warn, once per process, where tensors are likely to be (batch, seqlen, heads, dim) and are read as (batch, heads, seqlen,
    dim): both are equally valid where q and k have the same lengths. ``stacklevel``: of the call in the user's code."""
    global _doubted
    if _doubted or layout != "bhsd" or not _looks_like_bshd(q.shape, k.shape):
        return
    _doubted = True
    warnings.warn(
        f"attention: q of shape {tuple(q.shape)} is read as {q.shape[1]} heads of {q.shape[2]} tokens each. If it is (batch, "
        'seqlen, heads, dim), as flash-attn has it, pass layout="bshd"',
        UserWarning,
        stacklevel=stacklevel,
    )


def _looks_like_bshd(q: Sequence[int], k: Sequence[int]) -> bool:
    """Whether shapes have so many heads of so few tokens that no known model makes such a call.

    - Models with grouped queries: k has fewer heads than q. Read in the wrong order, both have the sequence's length.
    - Decoding, speculative too: k has more tokens than q. Read in the wrong order, it has as many, or fewer: its heads.
    - Short prompts of models with as many K/V heads as query heads. Such a model has up to 128 heads, and where it has 64 or
      more their dim is 128 or more (Llama 65B, GPT-3, BLOOM, DeepSeek-V3; T5-XXL, 64 heads of 64, adds a bias to the scores,
      which ``attention`` does not).
    """
    _, heads, tokens, dim = q
    if k[1] != heads or k[2] > tokens or tokens < 2 or heads < max(MANY_HEADS, 2 * tokens):
        return False
    # fewer keys than queries: a prompt never has that, grouped queries that are misread do
    if k[2] < tokens or heads > MOST_HEADS:
        return True
    return dim < LARGE_HEAD_DIM and heads >= 4 * tokens


def check_dense(name: str, tensor: Any) -> None:
    """TypeError: no tensor, or a nested or sparse one."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, must be a torch.Tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name}: got {kind}, must be a dense tensor (torch.strided)")


def check_among(name: str, value: Any, allowed: tuple[bool | None, ...]) -> None:
    """TypeError: not a bool. Under torch.compile its value may not be known yet. Values equal to an allowed one pass (0, 1,
    numpy's bools), as they do in the memo of plans."""
    if isinstance(value, (bool, torch.SymBool)):
        return
    if not isinstance(value, Hashable) or value not in frozenset(allowed):
        raise TypeError(f"{name}: got {value!r:.80}, allowed are {', '.join(map(str, allowed))}")
