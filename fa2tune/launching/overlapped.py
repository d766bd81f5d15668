"""Both kernels of a split Hopper backward at a time: dQ's and dK/dV's, each on a stream of its own.

One after the other, a kernel of few programs leaves multiprocessors idle, and one ends before the other begins. At a time, each
fills what the other leaves. dK/dV's kernel reads delta, which dQ's makes, so that is made before, by dQ's kernel over no keys:
the same machine code, so the same bits, and results are those of one kernel after the other. Its dQ, zeros, falls on a tensor
of one row: TMA drops what lies outside. dQ's kernel proper writes delta again, to memory of its own. Of packed sequences each
of the two has the order of its tiles made before, in memory of its own: they may run at a time. Delta's, of no keys, is made
also where the other comes with the call.

A side stream belongs to one stream of a device. The side waits for an event of the stream before its first launch, and the
stream for one of the side after its last: memory that torch gives out again on the stream is free of both kernels, so no tensor
is kept for longer; and a capture of the stream takes the side in and lets it go.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from ctypes import byref, c_int, c_void_p
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fa2tune.launching import cuda, launch
from fa2tune.launching.cuda import PER_THREAD, Chain, CudaError, Launch, Packed, ensure_context, relaxed_mode
from fa2tune.launching.group_parts import Bound
from fa2tune.launching.launch import InterpretedChain, TensorPlace
from fa2tune.logs import warn_once
from fa2tune.spec.problem import Problem
from fa2tune.spec.variant import WARP_SPECIALIZED, Variant, Workspaces

#: Which kernel begins: dQ's, after delta; dK/dV's, after delta; or dQ's with delta, where multiprocessors are left for both.
DQ_FIRST, DKDV_FIRST, DQ_AT_ONCE = ORDERS = ("dQ first", "dK and dV first", "dQ at once")
DELTA, DQ, DKDV = "delta", "bwd_dq", "bwd_dkdv"
#: Workspaces: where dQ's kernel writes delta, while dK/dV's reads what was made before; its order of packed tiles; and for dQ
#: of no keys.
ORDER = "order"
DELTA_AGAIN, ORDER_AGAIN, NO_DQ = "delta_again", "order_again", "no_dq"


def workspaces(problem: Problem, own: Workspaces) -> Workspaces:
    """Memory that dQ's kernel takes more. ``own``: what it takes."""
    rows = problem.batch, problem.heads_q, problem.seqlen_q
    again = {ORDER_AGAIN: own[ORDER]} if ORDER in own else {}
    # of packed sequences the coordinate in front, which is always 2^30, lies outside
    return {
        DELTA_AGAIN: (rows, "fp32"), **again, NO_DQ: ((1,) * (4 if problem.extent.ragged else 3) + (problem.head_dim,), "")
    }  # fmt: skip


def check_order(order: str, problem: Problem, variants: Mapping[str, Variant]) -> None:
    """ValueError: no such order, or none for these kernels."""
    if order not in ORDERS:
        raise ValueError(f"order: got {order!r:.40}, allowed are {', '.join(ORDERS)}")
    hopper = all(WARP_SPECIALIZED in one.implementations for one in variants.values())
    if set(variants) != {DQ, DKDV} or not hopper:
        raise ValueError(f"order: got {order}, allowed for the split Hopper kernels alone")


def delta_alone(dq: Bound) -> Bound:
    """What makes delta: dQ's kernel over no keys, and what runs before it."""
    strides = {name: steps for name, steps in dq.strides.items() if name != "dq"}
    return replace(dq, strides=strides, renamed={"dq": NO_DQ}, scalars={"seqlen_k": 0})


def dq_alone(dq: Bound) -> Bound:
    """dQ's kernel, and what runs before it, which leave the other's delta and order alone."""
    again = {ORDER: ORDER_AGAIN} if dq.problem.extent.ragged else {}
    return replace(dq, renamed={"delta": DELTA_AGAIN, **again})


# ---- streams

_NON_BLOCKING = 1  #: CU_STREAM_NON_BLOCKING: does not wait for the legacy default stream, nor it for this one
_NO_TIMES = 2  #: CU_EVENT_DISABLE_TIMING


class SideStream:
    """A stream beside another one of a device, and the two events that order them. Threads that launch on the other stream may
    share it: what one waits for is at least as late as what it recorded itself."""

    __slots__ = ("begin", "begun", "end", "ended", "stream")

    doing = "ordering two streams"

    def __init__(self, stream: int, device_index: int) -> None:
        """With the priority of ``stream``. CudaError: the driver has none left."""
        driver = cuda.library()  # type: ignore[attr-defined]  # where tests replace it
        own, priority = c_void_p(stream), c_int()
        side, begun, ended = c_void_p(), c_void_p(), c_void_p()
        ensure_context(device_index)
        with relaxed_mode(), ExitStack() as made:  # a capture may be under way, here or in another thread
            cuda.check(driver.cuStreamGetPriority(own, byref(priority)), "asking for a stream's priority")
            cuda.check(driver.cuStreamCreateWithPriority(byref(side), _NON_BLOCKING, priority), "making a stream")
            made.callback(driver.cuStreamDestroy_v2, side)
            for event in (begun, ended):
                cuda.check(driver.cuEventCreate(byref(event), _NO_TIMES), "making an event")
                made.callback(driver.cuEventDestroy_v2, event)
            made.pop_all()
        self.stream: int = side.value or 0
        self.begun, self.ended = begun, ended  #: events
        self.begin: list[Packed] = [
            (partial(driver.cuEventRecord, begun, own), [self]),
            (partial(driver.cuStreamWaitEvent, side, begun, 0), [self]),
        ]
        self.end: list[Packed] = [
            (partial(driver.cuEventRecord, ended, side), [self]),
            (partial(driver.cuStreamWaitEvent, own, ended, 0), [self]),
        ]


#: (device, stream) -> its side. torch hands its 65 streams of a device out again and again; of other streams, which come and
#: go, each name is one more, so they are bounded. What is made stays: a graph or a launch under way may still need it.
SIDES: dict[tuple[int, int], SideStream] = {}
KEPT = 256
_making = threading.Lock()


def side_of(device_index: int, stream: int) -> SideStream | None:
    """None: this stream gets none, and launches go one after the other, as they do where no memory is left for one."""
    if (found := SIDES.get((device_index, stream))) is not None or stream == PER_THREAD:
        return found
    with _making:
        if (device_index, stream) not in SIDES and len(SIDES) < KEPT:
            try:
                SIDES[device_index, stream] = SideStream(stream, device_index)
            except CudaError as error:
                if error.code != cuda.OUT_OF_MEMORY:
                    raise
                warn_once(
                    f"both kernels of a backward run one after the other, where they might run at a time: {error}"
                )
        return SIDES.get((device_index, stream))


class ForkedChain(Chain):
    """Launches some of which go to the side stream."""

    __slots__ = ("fork", "on_side")

    def __init__(
        self, launches: Sequence[tuple[Launch, Sequence[tuple[int, int]]]], device_index: int, fork: int, on_side: range
    ) -> None:  # fmt: skip
        """``fork``: before which launch the side begins; ``on_side``: those on it. What the others need is not among them."""
        super().__init__(launches, device_index)
        self.fork, self.on_side = fork, on_side

    def packed(self, addresses: Sequence[int], stream: int) -> list[Packed]:
        side = side_of(self.device_index, stream)
        if side is None:
            return super().packed(addresses, stream)
        found: list[Packed] = []
        for place, (one, places) in enumerate(self.launches):
            if place == self.fork:
                found += side.begin
            given = [addresses[which] + behind for which, behind in places]
            found.append(one.packed(given, side.stream if place in self.on_side else stream))
        return found + side.end

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """As a chain is called. Once the side has begun it is waited for, even where a launch fails or Ctrl-C comes: its memory
        is given out again."""
        if torch._C._cuda_getDevice() != self.device_index:
            with torch.cuda.device(self.device_index):
                return self(tensors)
        stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        key = self, stream, tuple(map(cuda._address, tensors))
        found, done = self.MEMO.get(key) or self._pack(key), 0
        try:
            for call, kept in found:
                if code := call():
                    self._again(code, call, kept[0], stream)
                done += 1
        except BaseException:
            side = SIDES.get((self.device_index, stream))
            if side is not None and done >= self.fork + len(side.begin):
                for end, _ in side.end:
                    end()
            raise
        return None


#: A launch, and where it finds its tensors.
Bundle = tuple[Any, Sequence[TensorPlace]]


def chain(order: str, made: Mapping[str, Sequence[Bundle]], device_index: int) -> Chain | InterpretedChain:
    """Of the launches by kernel, DELTA's first. The kernel that is to begin is on the stream itself, right behind delta's: the
    side begins a little later, when its event has come. ``order``: one of ORDERS."""
    delta, dq, dkdv = (list(made[kernel]) for kernel in (DELTA, DQ, DKDV))
    if order == DQ_AT_ONCE:
        before, on_side, after = [], dq, [*delta, *dkdv]
    elif order == DQ_FIRST:
        before, on_side, after = [*delta, *dq], dkdv, []
    else:
        before, on_side, after = [*delta, *dkdv], dq, []
    fork = 0 if order == DQ_AT_ONCE else len(delta)
    side = range(len(before), len(before) + len(on_side))
    return launch.chain([*before, *on_side, *after], device_index, partial(ForkedChain, fork=fork, on_side=side))
