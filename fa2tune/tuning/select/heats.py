"""Heats: the races of the search on a GPU that is present. Candidates of one search task run against its default.

Times are multiples of what the first candidate took where it was timed first, so it does not matter which of several equal GPUs
times the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from statistics import median

from fa2tune.measuring.samples import gain_over
from fa2tune.measuring.worker import Job
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import Config
from fa2tune.tuning.search.candidates import Point, point
from fa2tune.tuning.search.compile_check import CompileResult
from fa2tune.tuning.search.failures import LAUNCH
from fa2tune.tuning.search.status import launch_status, refusal_status
from fa2tune.tuning.search.study import KeyStudy, TrialOutcome
from fa2tune.tuning.search.task import SearchTask
from fa2tune.tuning.select import gpu_jobs
from fa2tune.tuning.select.gpu_jobs import Steps
from fa2tune.tuning.select.log import Log

HEAT = 8  #: candidates timed against each other at a time


class Heats:
    """The heats of all search tasks: which is next, and what came of it."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.anchors: dict[SearchTask, Config] = {}
        self.under_way = Counter[SearchTask]()

    def next(self, tasks: Sequence[SearchTask], idle: int) -> tuple[SearchTask, Steps] | None:
        """The next heat: of the task with most candidates waiting, once it is known whether its default can run, and how
        long that takes. ``idle``: GPUs that have nothing to do."""
        waiting = [f for f in tasks if f.ready and self._may_race(f)]
        if not waiting:
            return None
        task = max(waiting, key=lambda f: len(f.ready))
        # no more than its part, where other GPUs have nothing to do
        size = min(HEAT, -(-sum(len(f.ready) for f in waiting) // max(1, idle)))
        task.ready.sort(key=lambda entry: entry[0] != task.default)  # the first heat must hold the default
        batch, task.ready = task.ready[:size], task.ready[size:]
        self.under_way[task] += 1
        return task, self._heat(task, batch)

    def _may_race(self, task: SearchTask) -> bool:
        """Beside another heat only where the anchor has a time at every length: all others are multiples of that."""
        if self.under_way[task]:
            anchor = self.anchors.get(task)
            return anchor is not None and all(
                (o := study.outcomes.get(point(anchor))) and o.time_us for study in task.studies.values()
            )
        if task in self.anchors or point(task.default) not in task.search.in_flight:
            return True
        return any(config == task.default for config, _ in task.ready)

    # ---- one heat

    def _anchor(self, task: SearchTask, batch: Sequence[Config]) -> Config:
        """What every candidate races against: the default, or where that cannot run the best known."""
        if task not in self.anchors:
            runs = any(config == task.default for config in batch) or all(
                (o := study.outcomes.get(point(task.default))) and o.time_us for study in task.studies.values()
            )
            self.anchors[task] = task.default if runs else next(iter(task.search.best()), batch[0])
        return self.anchors[task]

    def _heat(self, task: SearchTask, entries: Sequence[tuple[Config, CompileResult]]) -> Steps:
        """Race a batch of candidates at every length, then file what came of them."""
        batch = {point(config): (config, result) for config, result in entries}
        configs = [config for config, _ in batch.values()]
        dead: dict[Point, tuple[str, str]] = {}
        times: dict[tuple[TuningKey, Point], float] = {}
        for key, study in task.studies.items():
            todo = [c for c in configs if point(c) not in study.outcomes and point(c) not in dead]
            if todo:
                found = yield from self._timed(task, key, study, todo, dead)
                times |= {(key, where): time_us for where, time_us in found.items()}
        for where, (config, result) in batch.items():
            if where in dead:
                task.failures.add(LAUNCH, config, *dead[where])
                task.refuse(config, *dead[where], result.binary)
                continue
            outcomes = [(key, TrialOutcome(config, times[key, where], binary=result.binary)) for key in task.keys
                        if (key, where) in times]  # fmt: skip
            task.file(config, outcomes)
            self.log.record(outcomes, "screen")
        self.under_way[task] -= 1

    def _timed(
        self, task: SearchTask, key: TuningKey, study: KeyStudy, todo: Sequence[Config], dead: dict[Point, tuple[str, str]]
    ) -> Generator[Job, Job, dict[Point, float]]:  # fmt: skip
        """Microseconds of each candidate at one length, as a multiple of the anchor's first time: clocks drift, ratios
        between neighbours do not. What cannot run goes to ``dead``."""
        found: dict[Point, float] = {}
        groups = [list(todo)]
        while groups:
            group = [config for config in groups.pop(0) if point(config) not in dead]
            anchor = self._anchor(task, group or todo)
            if point(anchor) in dead:
                anchor = self.anchors[task] = next((c for c in group), anchor)
            if not group:
                continue
            contenders = [anchor, *(config for config in group if config != anchor)]
            known = study.outcomes.get(point(anchor))
            reference = (known.time_us if known else None) or found.get(point(anchor))
            ranks = {name: study.ranked(name) for name in task.space.implementations()}
            best = {name: (r[0].time_us or 0.0) / reference for name, r in ranks.items() if r} if reference else {}
            job = yield from gpu_jobs.run(self.log.functions.race, (key, contenders, "screen", best))
            if job.failure is not None:
                groups = self._after_failure(task, key, job, contenders, group, dead) + groups
                continue
            race = job.result
            reference = reference or median(race.times[0])
            found[point(anchor)] = reference
            for config, samples, index in zip(contenders, race.times, range(len(contenders)), strict=True):
                if index in race.failures:
                    dead[point(config)] = refusal_status(race.failures[index]), race.failures[index]
                elif index:
                    found[point(config)] = reference / gain_over(race.times[0], samples).median
        return {where: time_us for where, time_us in found.items() if any(point(c) == where for c in todo)}

    def _after_failure(
        self, task: SearchTask, key: TuningKey, job: Job, contenders: Sequence[Config], group: Sequence[Config],
        dead: dict[Point, tuple[str, str]],
    ) -> list[list[Config]]:  # fmt: skip
        """A race failed as a whole. The groups to race again: without the culprit if it is known, else one by one."""
        self.log.lost(job, f"racing {task.title} {key.bucket}")
        last = job.notes[-1] if job.notes else -1
        # an anchor that cannot be launched: perhaps it is not its own doing
        reason = launch_status(job) if job.died or last > 0 else "failed", job.failure or ""
        if last >= 0:
            dead[point(contenders[last])] = reason
        elif len(group) == 1:
            dead[point(group[0])] = reason
        else:
            return [[config] for config in group]
        rest = [config for config in group if point(config) not in dead]
        return [rest] if rest else []
