"""How far a run is, for its watcher."""

from __future__ import annotations

import time
from collections import Counter

from fa2tune.tuning.run import open_jobs
from fa2tune.tuning.run.budget import Budget
from fa2tune.tuning.run.held_jobs import HeldJobs
from fa2tune.tuning.run.remaining import Remaining

PROGRESS_S = 0.5  #: between two looks at how far it is


class Progress:
    def __init__(self, held: HeldJobs, budget: Budget) -> None:
        self.held, self.budget = held, budget
        self.remaining = Remaining(budget.seconds)
        self.looked = -PROGRESS_S

    def tell(self) -> None:
        """Tell the watcher, if it was not told just now."""
        if time.monotonic() < self.looked + PROGRESS_S:
            return
        self.looked = time.monotonic()
        held, log = self.held, self.held.log
        done = sum(len(task.tried()) for task in held.tasks)
        todo, finals = open_jobs.ahead(held.tasks, [held.jobs[name] for name in held.unopened()], held.plan)
        here = done - sum(task.kept_trials for task in held.tasks)
        left_s = self.remaining.seconds(self.budget.spent_s(), here, todo, self.budget.reserve(finals))
        statuses = Counter[str]()
        for task in held.tasks:
            statuses.update(task.statuses())
        log.watcher.progress(done, done + todo, left_s, self._now(), statuses)

    def _now(self) -> str:
        """The last row."""
        rows = self.held.log.report.rows
        if not rows:
            return ""
        row = rows[-1]
        return f"last row: {row.key.kernel} {row.key.bucket}, {row.tflops:.0f} TFLOP/s"
