"""Tuning on a GPU that is present: candidates race the default on it; finalists pass a numerics check and race again.

A child process owns each GPU. If a candidate kills it, the others go on in a fresh one.
"""

from __future__ import annotations

from collections.abc import Sequence

from fa2tune.measuring.worker import Crew
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import Config, Problem
from fa2tune.tuning.search.compile_check import CompileResult
from fa2tune.tuning.search.study import SELECTED
from fa2tune.tuning.search.task import SearchTask
from fa2tune.tuning.select.final import Final
from fa2tune.tuning.select.gpu_jobs import Steps
from fa2tune.tuning.select.heats import Heats
from fa2tune.tuning.select.log import NONE_RIGHT, Log
from fa2tune.tuning.select.whole import WholeBackward

FINAL_SECONDS = 6.0  #: of one length, most of it for turns alone


class Measured:
    """What a run does with candidates that compiled: measured times are filed, final races select. A GPU does one thing at a
    time."""

    steps_at_once = 1  #: of a crew

    def __init__(self, log: Log) -> None:
        self.log = log
        module = log.functions.race.partition(":")[0]
        self.crews = [  #: one a GPU
            Crew(1, {"CUDA_VISIBLE_DEVICES": device} if device else None, spare=module) for device in log.plan.devices
        ]
        self.working = [*self.crews]  #: those whose GPU works
        self.heats = Heats(log)

    def reserve(self, finals: int) -> float:
        """Seconds to leave for the final races of so many kernels and specializations."""
        return FINAL_SECONDS * finals * len(self.log.plan.request.buckets) / max(1, len(self.working))

    def problems(self, task: SearchTask) -> list[Problem]:
        """Nothing is predicted."""
        return []

    def compiled(self, task: SearchTask, config: Config, result: CompileResult) -> None:
        """A config compiled, and its limits hold: it may race."""
        task.ready.append((config, result))

    def search(self, tasks: Sequence[SearchTask]) -> tuple[SearchTask, Steps] | None:
        """The next heat, if one can be run."""
        return self.heats.next(tasks, sum(not crew.load for crew in self.working))

    def select(self, tasks: Sequence[SearchTask]) -> list[Steps]:
        """Of all variants of a kernel, the steps of each length's final. The portable variant comes first."""
        left = {*tasks[0].keys}
        return [self._select(tasks, key, left) for key in tasks[0].keys]

    def _select(self, tasks: Sequence[SearchTask], key: TuningKey, left: set[TuningKey]) -> Steps:
        """``left``: lengths whose rows are not selected yet."""
        token = " | ".join(task.studies[key].token for task in tasks)
        rows = tasks[0].studies[key].kept(SELECTED, token)
        if rows is None:
            rows, sound = yield from Final(tasks, key, self.log).rows()
            if sound:
                token = " | ".join(task.studies[key].token for task in tasks)
                tasks[0].studies[key].keep(SELECTED, token, rows)
        self.log.put(key, rows, f"{tasks[0].of_kernel} {key.bucket}", NONE_RIGHT)
        left.discard(key)
        for task in tasks:
            task.selected = not left

    def whole(self, members: Sequence[SearchTask]) -> Steps:
        """The steps of a whole backward, whose kernels are all selected."""
        return WholeBackward(members, self.log).steps()
