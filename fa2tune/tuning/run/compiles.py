"""Candidates are proposed, and compiled ahead in parallel."""

from __future__ import annotations

import time
from functools import partial

from fa2tune.measuring.worker import Crew, Job
from fa2tune.rows.describe import describe_config
from fa2tune.spec.problem import Config
from fa2tune.tuning.run.budget import Budget
from fa2tune.tuning.run.held_jobs import HeldJobs
from fa2tune.tuning.search import failures
from fa2tune.tuning.search.compile_check import CompileResult
from fa2tune.tuning.search.status import status_of
from fa2tune.tuning.search.task import SearchTask
from fa2tune.tuning.select.heats import HEAT
from fa2tune.tuning.select.measured import Measured
from fa2tune.tuning.select.predicted import Predicted

#: Seconds; a compile that takes longer costs its candidate: so many times the slowest that came to an end in this run, within
#: bounds, for all depends on the host and on what else it does.
PATIENCE, AT_LEAST, AT_FIRST, AT_MOST = 6.0, 20.0, 40.0, 120.0
MEMORY = 4 << 30  #: bytes that a compile may hold
LOOKAHEAD = 1  #: configs under way per compiling core: more waste cores less, but know less when they are proposed


class Compiles:
    """The processes that compile, and what they are given."""

    def __init__(self, method: Measured | Predicted, held: HeldJobs, budget: Budget) -> None:
        self.method, self.held, self.budget, self.log = method, held, budget, held.log
        self.workers = held.plan.workers
        self.crew = Crew(self.workers, {"OMP_NUM_THREADS": "1"}, memory=MEMORY)
        self.slowest_s = 0.0

    def propose(self) -> None:
        """Keep the processes busy: the tasks furthest from their number of trials first."""
        tasks = self.held.tasks
        open_ = [f for f in self.held.open_tasks() if not f.selecting and not self.budget.is_over_for(f, tasks)]
        # no further ahead of what is timed than that: a proposal should know how the others went
        ahead = HEAT + -(-self.workers // max(1, len(open_)))
        while open_ and self.crew.load < LOOKAHEAD * self.workers:
            task = min(open_, key=lambda f: f.search.binaries / f.trials)
            config = task.propose(self.log.report.rows) if len(task.search.in_flight) < ahead else None
            if config is None:
                open_.remove(task)
                continue
            failure = task.failures.of(config)
            if failure is not None:  # in this run, for another config of the same binary
                task.refuse(config, failure.status, failure.why, {})
                continue
            problems = self.method.problems(task)
            if not problems and task.binaries.shares(config):
                self._share(task, config)
                continue
            arguments = (task.kernel, task.spec, config, self.held.plan.target.gpu, problems)
            tag = partial(self._compiled, task, config)
            self.crew.submit(Job(self.log.functions.compile_check, arguments, self._deadline_s(), tag=tag))

    def _deadline_s(self) -> float:
        if not self.slowest_s:
            return AT_FIRST
        return min(AT_MOST, max(AT_LEAST, PATIENCE * self.slowest_s))

    def _compiled(self, task: SearchTask, config: Config, job: Job) -> None:
        if task.dropped:
            return
        report = self.log.report
        report.compiled += 1
        report.compile_seconds = time.monotonic() - self.budget.begun
        if job.failure is not None:
            self.log.lost(job, f"compiling {task.title} {describe_config(config)}")
            result = CompileResult(status_of(job), job.failure)
        else:
            self.slowest_s = max(self.slowest_s, job.took)
            result = job.result
        if result.status:
            task.failures.add(failures.COMPILE, config, result.status, result.why)
        for launch in [config, *task.binaries.compiled(config, result)]:
            self._take(task, launch, result)

    def _share(self, task: SearchTask, config: Config) -> None:
        """Another launch of a binary that is here, or will be."""
        result = task.binaries.result(config)
        if result is not None:
            self._take(task, config, result)

    def _take(self, task: SearchTask, config: Config, result: CompileResult) -> None:
        if result.status:
            task.refuse(config, result.status, result.why, result.binary)
        else:
            self.method.compiled(task, config, result)
