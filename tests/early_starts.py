"""What a kernel may touch that starts before the one before it has ended, as tests/kernels_in_python.py has it.

Nothing of what the kernels in flight touch, unless the thread that touches it knows that they have ended
(griddepcontrol.wait), or what it needs of them is done (an acquiring read of a flag): by itself, or by a barrier at which
another thread came that knows. What is written before a fence, and that before the next kernel may start, is seen by all."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
from kernel_values import Buffer, Fault

READ, WRITE = 0, 1


class Touch(NamedTuple):
    kind: int
    buffer: Buffer
    index: Any


class Flight:
    """Elements that were read and written by kernels that may not have ended."""

    def __init__(self) -> None:
        self.touched: dict[Buffer, Any] = {}
        self.lock = threading.Lock()

    def add(self, touch: Touch) -> None:
        with self.lock:
            seen = self.touched.setdefault(touch.buffer, np.zeros((2, len(touch.buffer.written)), bool))
            seen[touch.kind, touch.index] = True

    def meets(self, touch: Touch) -> bool:
        """Whether a touch is of what was written, or writes what was read."""
        if (seen := self.touched.get(touch.buffer)) is None:
            return False
        return bool(seen[WRITE, touch.index].any() or (touch.kind == WRITE and seen[READ, touch.index].any()))

    def with_those_of(self, other: Flight) -> Flight:
        for buffer, seen in other.touched.items():
            self.touched[buffer] = self.touched[buffer] | seen if buffer in self.touched else seen
        return self


class Overlap:
    """Of one program: kernels that are in flight when it starts, and what the next one may find in flight."""

    def __init__(self, before: Flight | None, after: Flight | None) -> None:
        """``before``: None: none is; ``after``: takes what this kernel touches, None: the next one starts when it has ended."""
        self.before, self.after = before, after
        self.waited = self.started_next = False
        self.unfenced: list[Touch] = []
        self.lock = threading.Lock()

    def touch(self, knows: bool, touch: Touch) -> None:
        """Fault: it is in flight, and the thread does not know better."""
        if self.before is not None and not knows and self.before.meets(touch):
            doing = ("reads", "writes")[touch.kind]
            raise Fault(f"{doing} {touch.buffer.name}, which a kernel touches that may not have ended")
        if self.after is not None:
            with self.lock:
                if not self.started_next:
                    self.unfenced.append(touch)
                    return
            self.after.add(touch)

    def fence(self) -> None:
        with self.lock:
            if not self.started_next:
                self.unfenced.clear()

    def start_next(self) -> None:
        with self.lock:
            self.started_next = True
            touched, self.unfenced = self.unfenced, []
        if self.after is not None:
            for one in touched:
                self.after.add(one)
