"""What packed calls over the same offsets share: the order of their tiles, made once and reused by all layers.

It is a value, a tensor that follows from the offsets alone: no call writes to it. So it may be saved for a backward, copied,
used on several streams and in several graphs (the counters of the queue are elsewhere: ``launching/counters.py``).
"""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import torch

from fa2tune.calling import distributed, used_lengths
from fa2tune.compiling.compiler import interpreted
from fa2tune.compiling.support import companion
from fa2tune.launching.counters import counter_for
from fa2tune.launching.launch import CaptureMiss, arch_of, bind, chain
from fa2tune.search_spaces.portable.packed_order import tables_shape
from fa2tune.spec.extent import OFFSETS, RAGGED, Extent
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.roles import PACKED_ORDERS
from fa2tune.spec.variant import Variant

NAME = "varlen_schedule"
_LIBRARY = torch.library.Library("fa2tune", "FRAGMENT")
_LIBRARY.define(
    "varlen_schedule(Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt total_q, SymInt total_k) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
#: (rows of q and k, sequences, device) -> what makes an order. Bounded: a full memo is emptied.
_MADE: dict[tuple[int, int, int, int], Any] = {}
KEPT = 1024

Given = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class VarlenSchedule(NamedTuple):
    """What ``varlen_schedule`` gives."""

    given: Given  #: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, as the caller has them
    versions: tuple[int, ...]  #: of these; () where they cannot be known
    offsets: tuple[torch.Tensor, torch.Tensor]  #: as kernels read them
    parts: int  #: ``Extent.parts``
    rows: tuple[int, int]  #: of q, and of k and v
    order: torch.Tensor  #: what the kernel of the role packed_orders makes


def varlen_schedule(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None = None, *, total_q: int, total_k: int | None = None,
    seqused_q: torch.Tensor | None = None, seqused_k: torch.Tensor | None = None,
) -> VarlenSchedule:  # fmt: skip
    """The order in which ``attention_varlen`` takes the tiles of packed sequences, the longest first. Made once a batch and
    passed to the calls of all layers (``schedule=``), it spares each forward, and each split backward, a launch of its own.
    Heads, head dims, dtypes, masks and windows of these calls are free; results are the same, bit for bit.

    One launch on the current stream; the host waits for nothing. Calls on other streams must be ordered behind it. Made while a
    CUDA graph is captured, it is made anew at each replay, of what cu_seqlens then holds: lengths may change between replays.
    Made before, its lengths are those of all replays, and it must outlive the graph. Under torch.compile it is an operator.

    Args:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: the tensors that the calls get, as ``attention_varlen`` has them.
            Their values are read now: changed in place later, they want a new schedule.
        total_q, total_k: rows of q, and of k and v; None: as many as of q.

    Returns:
        What ``schedule=`` takes. A call refuses one whose tensors or rows are not its own, or whose tensors were changed by an
        operator of torch since (what a kernel or a graph writes to them is not seen; nor under torch.compile).

    Raises:
        TypeError, ValueError: cu_seqlens or seqused are no int32 tensors of one dimension, of the same size and device, a CUDA
            device; total_q or total_k is no integer from 0 to 2^31 - 1.
        RuntimeError: the first one of a process, while a CUDA graph is captured.
    """
    rows = _rows("total_q", total_q), _rows("total_k", total_q if total_k is None else total_k)
    given = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    queries, keys, parts = used_lengths.divided(*given)
    queries = distributed.whole("cu_seqlens_q", queries)
    keys = queries if keys is None else distributed.whole("cu_seqlens_k", keys)
    check_offsets(queries, keys)
    if queries.device.type != "cuda" and not (queries.device.type == "cpu" and interpreted()):
        raise ValueError(
            f"cu_seqlens_q: got device {queries.device}, must be a CUDA device (CPU tensors only with TRITON_INTERPRET=1)"
        )
    offsets = queries.contiguous(), keys.contiguous()
    order = torch.ops.fa2tune.varlen_schedule(*offsets, *rows)
    return VarlenSchedule(given, _versions(given), offsets, parts, rows, order)


def _rows(name: str, value: Any) -> Any:
    symbolic = isinstance(value, torch.SymInt)
    if isinstance(value, bool) or not (symbolic or isinstance(value, numbers.Integral)):
        raise TypeError(f"{name}: got {value!r:.80}, must be an integer")
    if not 0 <= value < 1 << 31:
        raise ValueError(f"{name}: got {value}, must be from 0 to 2^31 - 1")
    return value if symbolic else int(value)


def check_offsets(cu_seqlens_q: Any, cu_seqlens_k: Any, q: Any = None) -> None:
    """TypeError, ValueError: they are not what ``attention_varlen`` takes, with this q."""
    for name, offsets in zip(OFFSETS, (cu_seqlens_q, cu_seqlens_k), strict=True):
        count = used_lengths.entries(name, offsets)
        if not torch.compiler.is_compiling() and not count:  # it may be unknown while a graph is made
            raise ValueError(f"{name}: got no entry, must have sequences + 1")
        other, where = ("q", q) if isinstance(q, torch.Tensor) else ("cu_seqlens_q", cu_seqlens_q)
        if offsets.device != where.device:
            raise ValueError(f"{name}: got device {offsets.device}, {other} is on {where.device}")
    if not torch.compiler.is_compiling() and cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(f"cu_seqlens_k: got {cu_seqlens_k.shape[0]} entries, cu_seqlens_q has {cu_seqlens_q.shape[0]}")


def check_sizes(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> None:
    """What is not known while a graph is made."""
    if not cu_seqlens_q.shape[0] or cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k: got {cu_seqlens_k.shape[0]} entries, cu_seqlens_q has {cu_seqlens_q.shape[0]}, must be as many, "
            "one or more"
        )


def _versions(given: Given) -> tuple[int, ...]:
    """How often torch has changed each in place; (): a graph is made, or they do not count that (of torch.inference_mode)."""
    there = [one for one in given if one is not None]
    if torch.compiler.is_compiling() or any(one.is_inference() for one in there):
        return ()
    return tuple(one._version for one in there)


def fitting(schedule: Any, q: Any, k: Any, given: Given) -> VarlenSchedule:
    """A call's schedule. TypeError, ValueError: it is none, or one of other tensors or rows than the call's."""
    if not isinstance(schedule, VarlenSchedule):
        raise TypeError(f"schedule: got {type(schedule).__name__}, must be what fa2tune.varlen_schedule gives, or None")
    for tensor, name, rows in ((q, "q", schedule.rows[0]), (k, "k", schedule.rows[1])):
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 3 and tensor.shape[0] != rows:
            raise ValueError(f"schedule: got one of {rows} rows of {name}, which has {tensor.shape[0]}")
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    for name, its, own in zip(names, _both(schedule.given), _both(given), strict=True):
        if not _same(its, own):
            raise ValueError(
                f"schedule: got one of another tensor than {name}: make one of the call's (varlen_schedule)"
            )
    if not torch.compiler.is_compiling() and schedule.versions not in ((), _versions(schedule.given)):
        raise ValueError("schedule: got one whose offsets were changed in place since: make it anew (varlen_schedule)")
    return schedule


def _both(given: Given) -> Given:
    """With the offsets of keys, which may be those of queries."""
    return given[0], given[0] if given[1] is None else given[1], *given[2:]


def _same(one: Any, other: Any) -> bool:
    """Whether it is the same tensor, or one that is detached from it."""
    if one is other:
        return True
    tensors = type(one) is type(other) is torch.Tensor
    if not tensors or torch.compiler.is_compiling() or one.device != other.device:
        return False
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def queue_of(order: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """What a forward gets of an order: it, and a counter; (): it has none, or no counter can be had, and makes both."""
    counter = None if order is None else counter_for(order)
    return () if order is None or counter is None else (order, counter)


# ---- the operator


def posed(total_q: int, total_k: int, sequences: int) -> Problem:
    """One binary serves all calls."""
    return Problem("fp16", 1, 1, 1, total_q, total_k, 16, 16, FULL, extent=Extent(RAGGED, sequences))


def needed(arch: int) -> tuple[Variant, Config, Problem]:
    """What makes an order, with its config and a problem whose specialization it is compiled for."""
    problem = posed(0, 0, 1)
    variant = companion(PACKED_ORDERS, problem.specialization, arch)
    return variant, variant.space.default(problem.specialization, arch), problem


def check_order(order: torch.Tensor, total_q: int, total_k: int, sequences: int, device: torch.device) -> None:
    """TypeError, ValueError: it is not what an operator of these rows and sequences gets."""
    shape = tables_shape(posed(total_q, total_k, sequences))
    if order.dtype is not torch.int32 or order.device != device:
        raise TypeError(f"order: got {order.dtype} on {order.device}, must be torch.int32 on {device}")
    if tuple(order.shape) != shape or not order.is_contiguous():
        raise ValueError(
            f"order: got shape {tuple(order.shape)}, strides {order.stride()}, must be contiguous, {shape}"
        )


def _order(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total_q: int, total_k: int) -> torch.Tensor:
    check_sizes(cu_seqlens_q, cu_seqlens_k)
    index, problem = cu_seqlens_q.get_device(), posed(total_q, total_k, cu_seqlens_q.shape[0] - 1)
    key = total_q, total_k, problem.extent.sequences, index
    if (make := _MADE.get(key)) is None:
        variant, config, _ = needed(arch_of(index) if index >= 0 else 0)
        try:
            launch = bind(variant, problem, config, {}, 1.0, (*OFFSETS, "order"), index)
        except CaptureMiss:
            raise RuntimeError(
                f"{NAME}: its kernel is not loaded yet, and a CUDA graph is being captured: make one before capturing"
            ) from None
        if len(_MADE) >= KEPT:
            _MADE.clear()
        make = _MADE[key] = chain([(launch, (0, 1, 2))], index)
    order = cu_seqlens_q.new_empty(tables_shape(problem))
    make((cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), order))
    return order


def _order_fake(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total_q: int, total_k: int) -> torch.Tensor:
    return cu_seqlens_q.new_empty(tables_shape(posed(total_q, total_k, cu_seqlens_q.shape[0] - 1)))


def forget() -> None:
    """Load its kernel anew."""
    _MADE.clear()


for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("varlen_schedule", _order, _key)
torch.library.register_fake("fa2tune::varlen_schedule", _order_fake, lib=_LIBRARY)
