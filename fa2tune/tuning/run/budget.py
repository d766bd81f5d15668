"""The time budget of a run, and what of it is kept for finals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fa2tune.tuning.search.task import SearchTask

LEADERS_SHARE = 0.75  #: of a time budget, when other dtypes wait for the winners


class Budget:
    """``seconds``: None is no limit; ``reserve``: seconds that so many finals will take."""

    def __init__(self, seconds: float | None, reserve: Callable[[int], float]) -> None:
        self.seconds, self.reserve = seconds, reserve
        self.begun = time.monotonic()

    def spent_s(self) -> float:
        return time.monotonic() - self.begun

    def is_over(self) -> bool:
        return self.seconds is not None and self.spent_s() > self.seconds

    def is_over_for(self, task: SearchTask, tasks: Sequence[SearchTask]) -> bool:
        """Whether it leaves no room for another candidate of ``task``. ``tasks``: all of the run."""
        if self.seconds is None:
            return False
        if not task.search.binaries:
            return self.is_over()
        # the variants of a kernel share their finals, which are left half of the budget at most
        reserve = self.reserve(len({(f.kernel, f.spec) for f in tasks if not f.selected}))
        finals = len({(f.kernel, f.spec) for f in tasks})
        share = min(1.0, self.seconds / 2 / max(self.reserve(finals), 1e-9))
        leads = any(f.leader is task for f in tasks)
        return self.spent_s() > (self.seconds - reserve * share) * (LEADERS_SHARE if leads else 1.0)
