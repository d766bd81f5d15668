"""The public call for sequences of their own lengths, packed one after the other: checks, operators, autograd.

As :mod:`fa2tune.calling.ops` has them. In here tensors are (1, heads, total, dim) views. What the lengths are is known to the
GPU alone: nothing waits for it.
"""

from __future__ import annotations

import numbers
from typing import Any, Literal, NoReturn, overload

import torch

from fa2tune.calling import arguments, dispatch, distributed, ops, used_lengths, varlen_schedules
from fa2tune.calling.arguments import MISSING
from fa2tune.calling.dispatch import Tensors3
from fa2tune.calling.ops import Pair
from fa2tune.calling.varlen_schedules import VarlenSchedule
from fa2tune.launching.passes import empty_gradients, empty_ordered, in_one_batch, lse_of, lse_shape, without_batch
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import Mask, Window, mask_of, of_operator
from fa2tune.spec.problem import bucket_of
from fa2tune.spec.score import NO_VALUE, Score, refuse_numbered, score_of
from fa2tune.spec.score import of_operator as score_of_operator

#: Of a call, for a plan's key and for what is looked up: int, a tensor (not read), or None.
MaxSeqlen = int | torch.Tensor | None
NAME = "attention_varlen"


@overload
def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ..., max_seqlen_q: MaxSeqlen = ..., max_seqlen_k: MaxSeqlen = ..., *,
    causal: bool = ..., softmax_scale: float | None = ..., return_lse: Literal[False] = ...,
    deterministic: bool | None = ..., window: Window | None = ..., mask: str | Mask | None = ...,
    softcap: float | None = ..., score: str | Score | None = ..., seqused_q: torch.Tensor | None = ...,
    seqused_k: torch.Tensor | None = ..., schedule: VarlenSchedule | None = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ..., max_seqlen_q: MaxSeqlen = ..., max_seqlen_k: MaxSeqlen = ..., *,
    causal: bool = ..., softmax_scale: float | None = ..., return_lse: Literal[True],
    deterministic: bool | None = ..., window: Window | None = ..., mask: str | Mask | None = ...,
    softcap: float | None = ..., score: str | Score | None = ..., seqused_q: torch.Tensor | None = ...,
    seqused_k: torch.Tensor | None = ..., schedule: VarlenSchedule | None = ...,
) -> Pair: ...  # fmt: skip
@overload
def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ..., max_seqlen_q: MaxSeqlen = ..., max_seqlen_k: MaxSeqlen = ..., *,
    causal: bool = ..., softmax_scale: float | None = ..., return_lse: bool,
    deterministic: bool | None = ..., window: Window | None = ..., mask: str | Mask | None = ...,
    softcap: float | None = ..., score: str | Score | None = ..., seqused_q: torch.Tensor | None = ...,
    seqused_k: torch.Tensor | None = ..., schedule: VarlenSchedule | None = ...,
) -> torch.Tensor | Pair: ...  # fmt: skip
def attention_varlen(
    q: torch.Tensor = MISSING,
    k: torch.Tensor = MISSING,
    v: torch.Tensor = MISSING,
    cu_seqlens_q: torch.Tensor = MISSING,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: MaxSeqlen = None,
    max_seqlen_k: MaxSeqlen = None,
    *extra: Any,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    window: Window | None = None,
    mask: str | Mask | None = None,
    softcap: float | None = None,
    score: str | Score | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    schedule: VarlenSchedule | None = None,
    **unknown: Any,
) -> torch.Tensor | Pair:
    """``attention`` of sequences of their own lengths, packed one after the other: each query sees keys of its own sequence.

    Sequence s has the queries cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1 and the keys cu_seqlens_k[s] to cu_seqlens_k[s + 1]
    - 1. Lengths may be 0, and those of queries and keys may differ. The host never waits for the GPU to read them, so a CUDA
    graph may be replayed with other offsets.

    Args:
        q: (total_q, heads_q, head_dim); dtypes, head dims, heads and strides as ``attention`` has them.
        k: (total_k, heads_kv, head_dim).
        v: (total_k, heads_kv, head_dim_v).
        cu_seqlens_q: (sequences + 1,) int32, on the device of q: 0, and the sums of the lengths. total_q may be more than its
            last entry: rows behind it are not attended, their output is 0, their lse -inf, their gradients 0.
        cu_seqlens_k: the same of the keys; None: that of the queries.
        max_seqlen_q, max_seqlen_k: rows of the longest sequence. A number chooses among tuned configs and changes no result;
            of a tensor nothing is read; None: the mean length chooses.
        causal, window, mask: of each sequence, aligned at its bottom right.
        softmax_scale, return_lse, deterministic, softcap, score: as ``attention`` has them.
        seqused_q, seqused_k: (sequences,) int32, on the device of q: how many rows of each sequence are there, from its first
            one; None: all. The mask is aligned at the last used ones. Unused queries see no key; unused keys are seen by none,
            and their gradients are 0.
        schedule: what ``fa2tune.varlen_schedule`` gives for cu_seqlens and seqused of this call and its rows of q and k: calls
            of all layers may share it. It changes no result. None: each call makes its own.

    Returns:
        The output (total_q, heads_q, head_dim_v), dtype of q; with return_lse also lse, (heads_q, total_q) float32, natural
        log. A query that sees no key gives 0, lse -inf and zero gradients.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as ``attention``; and for cu_seqlens or seqused that are no
            int32 tensors of one dimension on the device of q, of the same size. Their values are not checked. Whatever they
            are, no memory outside the tensors is read or written. For a schedule of other tensors or rows.

    On compute capability 9.0 the warp-specialised kernels serve it, of bf16 and fp16 that TMA can address, also a deterministic
    backward; without wgmma those of kernels/sm80, but for a deterministic backward; otherwise the portable ones. Configs were
    tuned without packing. Differentiable once, through output and lse.
    """
    if unknown or extra or q is MISSING or k is MISSING or v is MISSING or cu_seqlens_q is MISSING:
        _refuse(unknown, extra, {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q})
    given, order = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), None
    if schedule is None:
        cu_seqlens_q, cu_seqlens_k, parts = used_lengths.divided(*given)
    else:
        _, _, (cu_seqlens_q, cu_seqlens_k), parts, _, order = varlen_schedules.fitting(schedule, q, k, given)
    if parts > 1:
        refuse_numbered(score, *used_lengths.DIVIDES)
    call = (causal, softmax_scale, deterministic, window, mask, softcap, score)
    sides = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, parts, order, return_lse)
    if ops.compiling() or not ops.plain(q, k, v):
        return _general(q, k, v, *sides, *call)
    longest = _longest(max_seqlen_q, max_seqlen_k)
    keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    try:
        dense = dispatch.forward_key(q, k, v, causal, softmax_scale, NAME, window, mask, softcap, score)
        queue = varlen_schedules.queue_of(order)
        key = (*dense, *_of(cu_seqlens_q), *_of(keys), longest, parts, bool(queue))
        plan = dispatch.FORWARD_PLANS.get(key)
    # sparse and nested tensors, what is no tensor, a list as a window
    except (RuntimeError, TypeError, AttributeError):
        _check(q, k, v, cu_seqlens_q, keys, *call)
        raise
    if plan is None:
        if distributed.given(cu_seqlens_q, keys):
            return _general(q, k, v, *sides, *call)
        _check(q, k, v, cu_seqlens_q, keys, *call)
        views = _views(q, k, v)
        extent = _extent(cu_seqlens_q, longest, parts, bool(queue))
        asked, scale = mask_of(bool(causal), window, mask), ops.scale_of(views[0], softmax_scale)
        plan = dispatch.forward_plan(key, *views, asked, scale, score_of(softcap, score), extent)
    offsets = cu_seqlens_q.contiguous(), keys.contiguous()
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        o, lse = _recorded(q, k, v, *offsets, queue, plan, deterministic, return_lse)
    else:
        o, lse = plan(q, k, v, *offsets, *queue)
    return (o, lse_of(lse)[0]) if return_lse else o


def _refuse(unknown: dict[str, Any], extra: tuple[Any, ...], given: dict[str, Any]) -> NoReturn:
    said = [arguments.said(name, value, NAME) for name, value in unknown.items()]
    if missing := [name for name, value in given.items() if value is MISSING]:
        said.append(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    if extra:
        said.append(f"got {7 + len(extra)} positional arguments, takes 7")
    raise TypeError(f"{NAME}: " + "; ".join(said))


def _extent(cu_seqlens_q: torch.Tensor, longest: int, parts: int, scheduled: bool = False) -> Extent:
    """``longest``: as ``_longest`` has it, or a number of rows, which a graph does not round, as it would then hang on them."""
    if longest < 0:
        raise ValueError(f"max_seqlen_q, max_seqlen_k: got {longest}, must be 0 or more")
    return Extent(RAGGED, cu_seqlens_q.shape[0] - 1, bucket_of(longest, 0) if longest else 0, parts, scheduled)


def _of(offsets: torch.Tensor) -> tuple[Any, ...]:
    """What a plan depends on."""
    return offsets.shape, offsets.dtype, offsets.get_device(), type(offsets)


def _longest(*given: Any) -> int:
    """The bucket of the longest sequence, in a graph its rows; 0: a tensor or nothing says so, which are not read."""
    if not ops.compiling() and all(type(value) is int and value >= 0 for value in given):
        return bucket_of(*given)
    for name, value in zip(("max_seqlen_q", "max_seqlen_k"), given, strict=True):
        number = isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool)
        if not number and not isinstance(value, (torch.Tensor, type(None))):
            raise TypeError(f"{name}: got {value!r:.80}, must be an integer, a tensor or None")
    if ops.compiling():
        symbolic = [value for value in given if not isinstance(value, (torch.Tensor, type(None)))]
        return max(symbolic) if symbolic else 0
    known = [int(value) for value in given if isinstance(value, numbers.Integral)]
    if any(value < 0 for value in known):
        raise ValueError(f"max_seqlen_q, max_seqlen_k: got {min(known)}, must be 0 or more")
    return bucket_of(max(known), 0) if known else 0


def _views(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors3:
    """(total, heads, dim) as (1, heads, total, dim)."""
    return in_one_batch(q), in_one_batch(k), in_one_batch(v)


def _check(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, causal: Any, softmax_scale: Any, deterministic: Any,
    window: Any, mask: Any, softcap: Any, score: Any,
) -> None:  # fmt: skip
    """As ``ops.check``."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if isinstance(tensor, torch.Tensor) and not tensor.is_nested and tensor.dim() != 3:
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, must have 3 dimensions, (total, heads, head_dim)"
            )
    dense = (t.unsqueeze(0) if isinstance(t, torch.Tensor) and not t.is_nested else t for t in (q, k, v))
    varlen_schedules.check_offsets(cu_seqlens_q, cu_seqlens_k, q)
    q, k, v = dense
    ops.check(q, k, v, causal, softmax_scale, "bshd", deterministic, window, mask, softcap, score)


def checked(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, seqused_q: Any,
    seqused_k: Any, causal: Any, softmax_scale: Any, deterministic: Any, window: Any, mask: Any, softcap: Any, score: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Extent]:  # fmt: skip
    """(1, heads, total, dim) views and the extent as a call would pass them on, or the error that it would raise."""
    cu_seqlens_q, cu_seqlens_k, parts = used_lengths.divided(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if parts > 1:
        refuse_numbered(score, *used_lengths.DIVIDES)
    cu_seqlens_q = distributed.whole("cu_seqlens_q", cu_seqlens_q)
    keys = cu_seqlens_q if cu_seqlens_k is None else distributed.whole("cu_seqlens_k", cu_seqlens_k)
    q, k, v = ops.as_cast(*distributed.local_parts(q, k, v, "packed", score))
    _check(q, k, v, cu_seqlens_q, keys, causal, softmax_scale, deterministic, window, mask, softcap, score)
    return *_views(q, k, v), _extent(cu_seqlens_q, _longest(max_seqlen_q, max_seqlen_k), parts)


def _general(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: MaxSeqlen, max_seqlen_k: MaxSeqlen, parts: int, order: torch.Tensor | None, return_lse: bool, causal: bool,
    softmax_scale: float | None, deterministic: bool | None, window: Window | None, mask: str | Mask | None,
    softcap: float | None, score: str | Score | None,
) -> torch.Tensor | Pair:  # fmt: skip
    """The path through the operators."""
    cu_seqlens_q = distributed.whole("cu_seqlens_q", cu_seqlens_q)
    cu_seqlens_k = distributed.whole("cu_seqlens_k", cu_seqlens_k)
    if distributed.given(q, k, v):
        sides = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, parts, order, return_lse)
        call = (causal, softmax_scale, deterministic, window, mask, softcap, score)
        return distributed.by_parts(_general, q, k, v, "packed", sides + call, score)
    if not ops.compiling():
        ops.refuse_transforms(q, k, v)
    q, k, v = ops.autocast(q, k, v)
    keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    _check(q, k, v, cu_seqlens_q, keys, causal, softmax_scale, deterministic, window, mask, softcap, score)
    longest = _longest(max_seqlen_q, max_seqlen_k)
    views = _views(q, k, v)
    rest = ops.for_operators(views[0], causal, softmax_scale, deterministic, window, mask, softcap, score)
    # the score term and the order are the operator's last arguments, so that older calls of it mean what they meant
    given = (*views, cu_seqlens_q, keys, *rest[:6], longest, parts, *rest[6:])
    o, lse = torch.ops.fa2tune.attention_varlen(*given, order=order)
    return (without_batch(o), lse_of(lse)[0]) if return_lse else without_batch(o)


class _Varlen(torch.autograd.Function):
    """The short path with gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor, queue: tuple[torch.Tensor, ...], plan: Any, deterministic: bool | None, with_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        o, lse = plan(q, k, v, cu_seqlens_q, cu_seqlens_k, *queue)
        ctx.save_for_backward(q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k, *queue[:1])
        ctx.plan = plan
        ctx.deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        ctx.set_materialize_grads(False)
        return o, lse if with_lse else None

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, o, lse, *offsets = ctx.saved_tensors
        plan, posed = ctx.plan, ctx.plan.problem
        call = (do, dlse, q, k, v, o, lse, posed.mask, plan.softmax_scale, ctx.deterministic, posed.score, posed.extent,
                tuple(offsets))  # fmt: skip
        if torch.is_grad_enabled():  # create_graph: keep a node that raises if it is differentiated again
            found: Tensors3 = _VarlenGradients.apply(*call)  # type: ignore[no-untyped-call]
        else:
            found = dispatch.backward(*call)
        dq, dk, dv = found
        return without_batch(dq), without_batch(dk), without_batch(dv), *[None] * 6


#: As that of ``ops.attention``.
_recorded: Any = super(torch.autograd.Function, _Varlen).apply


class _VarlenGradients(torch.autograd.Function):
    """A node that raises if it is differentiated again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensors3:
        return dispatch.backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError(f"{NAME}: differentiating twice is not supported")


# The operators: as those of ops.py, with (1, heads, total, dim) views, the rows of the longest sequence (0: not known),
# ``Extent.parts`` and ``VarlenSchedule.order``.
_LIBRARY = torch.library.Library("fa2tune", "FRAGMENT")
_CALL = (
    "SymInt window_left, SymInt window_right, float softmax_scale, bool deterministic, str mask, float softcap, "
    f"SymInt longest, int parts=1, {ops.TERM}, Tensor? order=None"
)
_LIBRARY.define(
    f"attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, {_CALL}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_LIBRARY.define(
    "attention_varlen_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"Tensor cu_seqlens_q, Tensor cu_seqlens_k, {_CALL}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def _op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    window_left: int, window_right: int, softmax_scale: float, deterministic: bool, mask: str, softcap: float,
    longest: int, parts: int = 1, score: str | None = None, score_first: float = NO_VALUE, score_second: float = NO_VALUE,
    order: torch.Tensor | None = None,
) -> Pair:  # fmt: skip
    varlen_schedules.check_sizes(cu_seqlens_q, cu_seqlens_k)
    if order is not None:
        varlen_schedules.check_order(order, q.shape[2], k.shape[2], cu_seqlens_q.shape[0] - 1, q.device)
    queue = varlen_schedules.queue_of(order)
    asked = of_operator(mask, window_left, window_right)
    extent = _extent(cu_seqlens_q, longest, parts, bool(queue))
    term = score_of_operator(softcap, score, score_first, score_second)
    key = (*dispatch.forward_key(q, k, v, False, softmax_scale, "bhsd", None, asked, None, term), extent)
    plan = dispatch.FORWARD_PLANS.get(key)
    plan = plan or dispatch.forward_plan(key, q, k, v, asked, softmax_scale, term, extent)
    o, lse = plan(q, k, v, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), *queue)
    return in_one_batch(o), lse


def _backward_op(
    do: torch.Tensor | None, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    o: torch.Tensor, lse: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, window_left: int,
    window_right: int, softmax_scale: float, deterministic: bool, mask: str, softcap: float, longest: int,
    parts: int = 1, score: str | None = None, score_first: float = NO_VALUE, score_second: float = NO_VALUE,
    order: torch.Tensor | None = None,
) -> Tensors3:  # fmt: skip
    asked = of_operator(mask, window_left, window_right)
    extent = _extent(cu_seqlens_q, longest, parts, order is not None)
    offsets = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), *(() if order is None else (order,))
    term = score_of_operator(softcap, score, score_first, score_second)
    return dispatch.backward(do, dlse, q, k, v, o, lse, asked, softmax_scale, deterministic, term, extent, offsets)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Pair:
    return empty_ordered(q, v.shape[3]), q.new_empty(lse_shape(q), dtype=torch.float32)


def _backward_fake(do: Any, dlse: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Tensors3:
    return empty_gradients(q, k, v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.call, order = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, order)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    *saved, order = ctx.saved_tensors
    found = torch.ops.fa2tune.attention_varlen_backward(do, dlse, *saved, *ctx.call, order)
    return (*found, *[None] * (3 + len(ctx.call)))


def _refuse_twice(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError(f"{NAME}: differentiating twice is not supported")


for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("attention_varlen", _op, _key)
    _LIBRARY.impl("attention_varlen_backward", _backward_op, _key)
torch.library.register_fake("fa2tune::attention_varlen", _fake, lib=_LIBRARY)
torch.library.register_fake("fa2tune::attention_varlen_backward", _backward_fake, lib=_LIBRARY)
torch.library.register_autograd("fa2tune::attention_varlen", _backward, setup_context=_setup, lib=_LIBRARY)
torch.library.register_autograd("fa2tune::attention_varlen_backward", _refuse_twice, lib=_LIBRARY)
