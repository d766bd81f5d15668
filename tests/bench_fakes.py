"""A GPU for fa2tune bench without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fa2tune.bench.peers import SUBJECT


class FakeGpu:
    """A CPU that takes 2 ms for the subject, 3 ms for everyone else."""

    device = "cpu"
    alive = True

    def environment(self) -> dict[str, Any]:
        return {"gpu": "fake", "sm_count": 1, "torch": "2", "triton": "3", "cudnn": None, "date": "2026-01-01T00:00:00"}

    def healthy(self) -> bool:
        return self.alive

    def free_bytes(self) -> int:
        return 7 << 30

    def release(self) -> None: ...

    def peak_bytes(self, call: Callable[[], object]) -> int:
        call()
        return 1 << 20

    def time(self, calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
        return {name: [2.0, 2.0, 2.2] if name == SUBJECT else [3.0, 3.0, 3.3] for name in calls}

    def sustain(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        return {name: [2.0, 2.2] if name == SUBJECT else [4.0, 4.4] for name in calls}
