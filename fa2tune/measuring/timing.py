"""How calls are timed on the current CUDA device, in races and in ``fa2tune bench``: one launch each out of a cold L2, or
one call alone, over and over. Microseconds a launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Timed = Callable[[], object]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def submit(calls: Sequence[Timed], flush: Timed, lead: int) -> list[tuple[Any, Any]]:
    """Queue every call once, between two events and behind ``flush``, which overwrites the L2.

    Events see the kernels alone as long as the GPU is behind the host; ``lead`` overwrites at the start give the host its head
    start. So launch gaps do not count, not those between the kernels of a whole backward either, and a CUDA graph would cost a
    capture a candidate to show the same."""
    for _ in range(lead):
        flush()
    events = []
    for call in calls:
        start, end = _event(), _event()
        flush()
        start.record()
        call()
        end.record()
        events.append((start, end))
    return events


def finish(events: Sequence[tuple[Any, Any]]) -> list[float]:
    """Wait for what was submitted: microseconds of each call."""
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def settle(call: Timed, seconds: float, fewest: int) -> float:
    """Run a call alone for so long, until power and clock have settled, and at least ``fewest`` times: seconds a launch."""
    begun, count = time.monotonic(), fewest
    while True:
        start = time.monotonic()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        now = time.monotonic()
        each = (now - start) / count
        if now - begun >= seconds:
            return each
        count = max(fewest, int(0.2 * seconds / each))


def in_a_row(call: Timed, count: int) -> float:
    """Microseconds a launch of ``count`` launches in a row, nothing between them. Waits for them."""
    first, last = _event(), _event()
    first.record()
    for _ in range(count):
        call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) * 1e3 / count


def alone(call: Timed, settling: float, seconds: float, fewest: int, alive: Timed = lambda: None) -> float:
    """One turn of a call: ``settling`` seconds untimed, then about ``seconds`` timed, each at least ``fewest`` launches.
    Nothing else runs between launches, and the L2 is as the launch before left it; where the host takes longer for one than
    the GPU, it is the host that is timed. ``alive`` is called after either part."""
    each = settle(call, settling, fewest)
    alive()
    found = in_a_row(call, max(fewest, int(seconds / each)))
    alive()
    return found
