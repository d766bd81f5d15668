"""What the drop-ins share: refusals, windows as flash-attn writes them, head dims of any size."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping
from typing import Any, NoReturn, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from fa2tune.calling import arguments
from fa2tune.calling.distributed import whole
from fa2tune.calling.ops import Layout, attention, compiling
from fa2tune.calling.varlen import attention_varlen
from fa2tune.compat.remembered import remembered
from fa2tune.spec.combinations import LACKING, Absent
from fa2tune.spec.maskfile import LARGEST
from fa2tune.spec.problem import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM


def refuse(call: str, name: str, value: Any, absent: Absent) -> NoReturn:
    allowed = " or ".join(map(repr, absent.neutral))
    advice = f"; {absent.instead}" if absent.instead else ""
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.80}"
    raise NotImplementedError(
        f"{call}: {name}: got {got}, allowed is {allowed}: fa2tune does not support {absent.what}{advice}"
    )


def refuse_absent(call: str, **given: Any) -> None:
    """NotImplementedError names the first argument that asks for what there is not, what came and what is allowed. None asks
    for nothing."""
    for name, value in given.items():
        if value is None:
            continue
        absent = LACKING[name]
        plain = isinstance(value, (bool, int, float, str, numbers.Number))
        if not (plain and value in absent.neutral):
            refuse(call, name, value, absent)


def rename(error: Exception, names: Mapping[str, str]) -> None:
    """In the text of an error of ``attention`` or ``attention_varlen``: the caller's names of arguments in place of theirs.
    ``names``: theirs -> the caller's. Not while a graph is made, whose tracing does not follow it."""
    if torch.compiler.is_compiling():
        return
    # what is in quotes is a value
    said = re.sub(rf"(?<!['\w])({'|'.join(names)})(?!\w)", lambda found: names[found[1]], str(error))
    error.args = (re.sub(r"\b(\w+), \1\b", r"\1", said),)  # two of theirs may be one of the caller's


def check_sides(call: str, window_size: Any, allowed: str) -> None:
    """TypeError: not two, each an integer or None; ``allowed``: how to say it. ValueError: more than ``window`` may be."""
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"{call}: window_size: got {window_size!r:.80}, {allowed}")
    for side in window_size:
        if isinstance(side, bool) or not isinstance(side, (numbers.Integral, torch.SymInt, type(None))):
            raise TypeError(f"{call}: window_size: got {window_size!r:.80}, {allowed}")
        if side is not None and cast(Any, side) > LARGEST:
            raise ValueError(f"{call}: window_size: got {window_size!r:.80}, must be at most 2^63 - 1")


def sides(call: str, window_size: Any, seqlen_k: int | None) -> tuple[int | None, int | None] | None:
    """flash-attn's ``window_size`` as ``window``: a negative side is unbounded; where the left one is, or is ``seqlen_k``
    or more, so is a right one of ``seqlen_k`` or more. It may be a tensor of two on the CPU. None: both are unbounded."""
    # types first: == of what may be a tensor reads it
    if type(window_size) is tuple and len(window_size) == 2:
        left, right = window_size
        if type(left) is type(right) is int and left == right == -1:
            return None
    allowed = "must be two integers, or a tensor of two on the CPU"
    if isinstance(window_size, torch.Tensor):
        window_size = whole(f"{call}: window_size", window_size)
        if window_size.device.type != "cpu" or window_size.shape != (2,) or window_size.is_floating_point():
            raise ValueError(
                f"{call}: window_size: got a tensor of shape {tuple(window_size.shape)}, {window_size.dtype} on "
                f"{window_size.device}, {allowed}"
            )
        window_size = window_size.tolist()
    check_sides(call, window_size, allowed)
    left, right = (None if side is None or side < 0 else side for side in window_size)
    return _reaching(left, right, seqlen_k)


def _reaching(left: int | None, right: int | None, seqlen_k: int | None) -> tuple[int | None, int | None] | None:
    """``sides``, of sides that are None or 0 and more."""
    # whichever queries there are, a left side of all keys hides none; a right side of all keys does, where queries are more
    if left is None or (seqlen_k is not None and left >= seqlen_k):
        left = None
        right = None if right is None or (seqlen_k is not None and right >= seqlen_k) else right
    return None if left is None and right is None else (left, right)


def packed_sides(
    call: str, window_size: Any, causal: Any, q: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_k: Any,
    seqused_k: Any = None,
) -> tuple[int | None, int | None] | None:  # fmt: skip
    """``sides`` of packed sequences, of which seqlen_k is that of the longest. Of a right side that may depend on it
    max_seqlen_k is not believed, and the host waits for the lengths: without ``causal``, where some sequence may have more
    queries than keys. While a graph is made it is max_seqlen_k, if that is a number."""
    window = sides(call, window_size, None)
    if window is None:
        return None
    left, right = window
    known = length(max_seqlen_k)
    if not causal and right:
        rows = q.shape[0] if isinstance(q, torch.Tensor) and q.dim() == 3 else 0
        unlike = (
            cu_seqlens_q is not cu_seqlens_k or seqused_k is not None
        )  # else a right side of seqlen_k hides nothing
        if unlike and right < rows - 1 and not is_traced(q) and not capturing():
            known = _longest(cu_seqlens_k, seqused_k)
    return _reaching(left, right, known)


def _longest(offsets: Any, used: Any) -> int | None:
    """Of the sequences between the offsets, or of the ``used`` lengths, read once for a tensor. None: they are not that, as the
    call will say."""
    asked = offsets if used is None else used
    if not isinstance(asked, torch.Tensor) or asked.is_meta or asked.is_nested or asked.dim() != 1:
        return None

    def longest() -> int | None:
        lengths = whole("cu_seqlens_k", asked)
        lengths = lengths.diff() if used is None else lengths
        return int(lengths.max()) if len(lengths) else None

    name = "longest between offsets" if used is None else "longest"
    found: int | None = remembered(asked, name, longest, anew=asked.is_inference())
    return found


def is_traced(tensor: Any) -> bool:
    """Whether a graph is made of a call, so that no value of a tensor can be read."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor)


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def fitting(tensor: torch.Tensor) -> torch.Tensor:
    """With a head dim that kernels take: zeros are added, which change no product. A last dimension that is not contiguous is
    copied, as flash-attn does."""
    dim = tensor.shape[-1]
    wanted = max(MIN_HEAD_DIM, -(-dim // HEAD_DIM_STEP) * HEAD_DIM_STEP)
    if dim != wanted:
        return functional.pad(tensor, (0, wanted - dim))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def check(call: str, tensors: Mapping[str, Any], dimensions: int) -> None:
    for name, tensor in tensors.items():
        arguments.check_dense(f"{call}: {name}", tensor)
        if tensor.dim() != dimensions:
            raise ValueError(f"{call}: {name}: got shape {tuple(tensor.shape)}, must have {dimensions} dimensions")
        if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"{call}: {name}: got head dim {tensor.shape[-1]}, must be from 1 to {MAX_HEAD_DIM}")
    if "q" in tensors and "k" in tensors and tensors["k"].shape[-1] != tensors["q"].shape[-1]:  # padding could hide it
        raise ValueError(f"{call}: k: got head dim {tensors['k'].shape[-1]}, q has {tensors['q'].shape[-1]}")


#: What kernels take without padding.
_HEAD_DIMS = frozenset(range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP))


def _fit(q: Any, k: Any, v: Any, dimensions: int) -> bool:
    """Whether ``check`` passes and ``fitting`` changes nothing, at half of their time; while a graph is made: no."""
    if compiling() or not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return False
    if not q.dim() == k.dim() == v.dim() == dimensions:
        return False
    try:
        dim = q.shape[-1]
        return (
            dim in _HEAD_DIMS and k.shape[-1] == dim and v.shape[-1] in _HEAD_DIMS
            and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        )  # fmt: skip
    except RuntimeError:  # nested tensors have no shape, sparse ones no strides
        return False


def asked_for(call: str, name: str, value: Any) -> bool:
    """A switch of a drop-in; None: no. TypeError: no bool."""
    if value is True or value is False or value is None:
        return bool(value)
    arguments.check_among(f"{call}: {name}", value, (True, False, None))
    return bool(value)


def _exact(call: str, deterministic: Any) -> bool | None:
    """What is not asked to be deterministic follows torch's own setting."""
    return True if asked_for(call, "deterministic", deterministic) else None


def _scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    """Of the true head dim."""
    return 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale


def _result(result: Any, dim: int, return_lse: bool) -> tuple[torch.Tensor, Any]:
    """(out, lse or None) without the columns that were added."""
    out, lse = result if return_lse else (result, None)
    return out if out.shape[-1] == dim else out[..., :dim], lse


def dense(
    call: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None,
    deterministic: bool | None, return_lse: bool, layout: Layout = "bshd", **options: Any,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """(out, lse or None) of tensors with any head dim; ``options`` as ``attention`` takes them."""
    exact = _exact(call, deterministic)
    if _fit(q, k, v, 4):
        result: Any = attention(
            q, k, v, softmax_scale=softmax_scale, layout=layout, return_lse=return_lse, deterministic=exact, **options
        )
        return result if return_lse else (result, None)
    check(call, {"q": q, "k": k, "v": v}, 4)
    common: dict[str, Any] = {"softmax_scale": _scale(q, softmax_scale), "deterministic": exact}
    result = attention(fitting(q), fitting(k), fitting(v), layout=layout, return_lse=return_lse, **common, **options)
    return _result(result, v.shape[-1], return_lse)


def packed(
    call: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: Any, max_seqlen_k: Any, *, softmax_scale: float | None,
    deterministic: bool | None, return_lse: bool, **options: Any,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """(out, lse or None) of (total, heads, any head dim) tensors; ``options`` as ``attention_varlen`` takes them."""
    exact = _exact(call, deterministic)
    if _fit(q, k, v, 3):
        result: Any = attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale,
            return_lse=return_lse, deterministic=exact, **options,
        )  # fmt: skip
        return result if return_lse else (result, None)
    check(call, {"q": q, "k": k, "v": v}, 3)
    common: dict[str, Any] = {"softmax_scale": _scale(q, softmax_scale), "deterministic": exact}
    result = attention_varlen(
        fitting(q), fitting(k), fitting(v), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        return_lse=return_lse, **common, **options,
    )  # fmt: skip
    return _result(result, v.shape[-1], return_lse)


def lengths(
    call: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None, max_seqlen_q: Any, max_seqlen_k: Any, *, return_lse: bool, **options: Any,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """``packed`` where either side may have no cu_seqlens: its tensors are (batch, length, heads, any head dim) then, and so is
    the output of such a q, with lse (batch, heads, length)."""
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        return packed(call, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_lse=return_lse,
                      **options)  # fmt: skip
    check(call, {"q": q}, 4 if cu_seqlens_q is None else 3)
    check(call, {"k": k, "v": v}, 4 if cu_seqlens_k is None else 3)
    if cu_seqlens_q is None and cu_seqlens_k is None and k.shape[0] != q.shape[0]:
        raise ValueError(f"{call}: k: got batch {k.shape[0]}, q has {q.shape[0]}")
    if cu_seqlens_k is None and v.shape[:2] != k.shape[:2]:
        raise ValueError(f"{call}: v: got batch and length {tuple(v.shape[:2])}, k has {tuple(k.shape[:2])}")
    apart = None
    if cu_seqlens_q is None:
        apart = q.shape[:2]
        cu_seqlens_q, max_seqlen_q, q = _starts(q), apart[1], q.flatten(0, 1)
    if cu_seqlens_k is None:
        cu_seqlens_k, max_seqlen_k, k, v = _starts(k), k.shape[1], k.flatten(0, 1), v.flatten(0, 1)
    out, lse = packed(call, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_lse=return_lse,
                      **options)  # fmt: skip
    if apart is None:
        return out, lse
    # (heads, batch * length) as (batch, heads, length)
    lse = lse.unflatten(1, apart).transpose(0, 1).contiguous() if return_lse else None
    return out.unflatten(0, apart), lse


def _starts(tensor: torch.Tensor) -> torch.Tensor:
    """cu_seqlens of (batch, length, ...)."""
    return torch.arange(tensor.shape[0] + 1, dtype=torch.int32, device=tensor.device) * tensor.shape[1]


def rows_of(tensor: Any, dimension: int) -> int | None:
    """Of (batch, rows, heads, dim); None: it is nothing like that."""
    fits = isinstance(tensor, torch.Tensor) and not tensor.is_nested and tensor.dim() == 4
    return tensor.shape[dimension] if fits else None


def length(value: Any) -> int | None:
    """A max_seqlen that is known without waiting for the GPU."""
    return int(value) if isinstance(value, numbers.Integral) else None
