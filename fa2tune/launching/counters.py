"""Counters of the tiles that a packed forward's programs have taken, where it does not make the order of its tiles.

A kernel finds its counter at 0 and leaves it at 0, so launches may share one, but not two that run at a time. Launches on a
stream run one after the other (the forward never starts early): a stream has one. A graph may be replayed on any stream, at any
time: each launch that is captured has one for itself, for good, 32 bytes.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from fa2tune.launching.cuda import PER_THREAD, relaxed_mode
from fa2tune.search_spaces.portable.packed_order import WORDS

#: (device, stream) -> its counter. A stream that was destroyed is given back by the driver when its work is done, so whichever
#: has its name next finds 0.
_BY_STREAM: dict[tuple[int, int], torch.Tensor] = {}
#: Device -> counters that nothing has had. There are always enough for a capture of so many launches, as none is made in one.
_SPARE: dict[int, list[torch.Tensor]] = {}
LEAST, MADE_AT_ONCE = 8192, 16384
_making = threading.Lock()


def counter_for(order: torch.Tensor) -> torch.Tensor | None:
    """The counter of the next launch on the current stream of the order's device; None: there is none for it, and the launch
    has to make an order, which brings one."""
    index = order.get_device()
    if index < 0:  # the interpreter
        return order.new_zeros(WORDS)
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            return counter_for(order)
    stream, spare = torch._C._cuda_getCurrentRawStream(index), _SPARE.setdefault(index, [])
    if stream == PER_THREAD:
        return None
    if torch.cuda.is_current_stream_capturing():
        return _taken(spare)
    if len(spare) < LEAST:
        _make(order, spare)
    if (found := _BY_STREAM.get((index, stream))) is None:
        with _making:
            found = _BY_STREAM.get((index, stream)) or _taken(spare)
            if found is not None:
                _BY_STREAM[index, stream] = found
    return found


def _taken(spare: list[torch.Tensor]) -> torch.Tensor | None:
    try:
        return spare.pop()
    except IndexError:  # another thread was faster, or a capture takes more than there are
        return None


def _make(order: torch.Tensor, spare: list[torch.Tensor]) -> None:
    """More counters. They are 0 when this returns, whichever stream has one first: once in many thousand captured launches. In
    a thread of its own: memory that this one asks for may be a graph's, which takes it back (torch.compile's mode
    "reduce-overhead" warms up so)."""
    stream = torch.cuda.current_stream(order.device) if order.is_cuda else None

    def zeros() -> torch.Tensor:
        if stream is None:
            return order.new_zeros(MADE_AT_ONCE, WORDS)
        with torch.cuda.stream(stream), relaxed_mode():  # another thread may be capturing a graph
            made = order.new_zeros(MADE_AT_ONCE, WORDS)
            stream.synchronize()
        return made

    with _making:
        if len(spare) < LEAST:
            with ThreadPoolExecutor(1) as other:
                spare.extend(other.submit(zeros).result().unbind())
