"""Steps (heats, finals, checks) are carried out by the processes that launch."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from functools import partial

from fa2tune.measuring.worker import Crew, Job
from fa2tune.tuning.run.budget import Budget
from fa2tune.tuning.run.held_jobs import HeldJobs
from fa2tune.tuning.run.open_jobs import OpenJob
from fa2tune.tuning.search.task import SearchTask
from fa2tune.tuning.select.gpu_jobs import STARTS, Steps
from fa2tune.tuning.select.measured import Measured
from fa2tune.tuning.select.predicted import Predicted


@dataclass(eq=False)
class CrewWork:
    """Steps under way, and where their jobs run."""

    steps: Steps
    of: OpenJob
    crew: Crew


class Launches:
    """The processes that launch, one crew a GPU, and what they do."""

    def __init__(self, method: Measured | Predicted, held: HeldJobs, budget: Budget) -> None:
        self.method, self.held, self.budget, self.log = method, held, budget, held.log
        self.crews = method.working
        self.failures = Counter[Crew]()  #: in a row, before anything was launched
        self.works: list[CrewWork] = []
        self.ended = 0  #: steps that came to their end
        self.ready: deque[tuple[OpenJob, Steps]] = deque()  #: finals that wait for a crew

    def prepare(self) -> None:
        """Let each crew import what it will need."""
        for crew in self.crews:
            crew.prepare()

    def hand_out(self) -> None:
        """Give every crew as much as it can do at a time."""
        for crew in self.crews:
            while sum(work.crew is crew for work in self.works) < self.method.steps_at_once and (found := self._next()):
                self.works.append(work := CrewWork(found[1], found[0], crew))
                self._advance(work, None)

    def _next(self) -> tuple[OpenJob, Steps] | None:
        """Finals first: what is selected is safe."""
        for opened in self.held.open.values():
            begun: list[Steps] = []
            for contest in opened.contests:
                if not contest[0].selecting and all(map(self._done, contest)):
                    for task in contest:
                        task.selecting = True
                    begun += self.method.select(contest)
            for members in opened.wholes():
                opened.whole_begun.add(members[0].spec)
                begun.append(self.method.whole(members))
            opened.under_way += len(begun)
            self.ready.extend((opened, steps) for steps in begun)
        while self.ready:
            opened, steps = self.ready.popleft()
            if not opened.dropped:
                return opened, steps
        found = self.method.search(self.held.open_tasks())
        if found is None:
            return None
        task, steps = found
        of = next(opened for opened in self.held.open.values() if task in opened.tasks)
        of.under_way += 1
        return of, steps

    def _done(self, task: SearchTask) -> bool:
        """Whether nothing more will be timed for it."""
        over = self.budget.is_over_for(task, self.held.tasks)
        done = task.exhausted or (over and not task.search.in_flight)
        return done and (task.leader is None or task.leader.selected)

    def _advance(self, work: CrewWork, job: Job | None) -> None:
        """Run steps up to their next job, or to their end."""
        if job is not None and self._again(work, job):
            return
        try:
            if work.of.dropped:
                work.steps.close()
            following: Job = next(work.steps) if job is None else work.steps.send(job)
        except StopIteration:
            self.works.remove(work)
            self.ended += 1
            work.of.under_way -= 1
            return
        following.tag = partial(self._advance, work)
        work.crew.submit(following)

    def _again(self, work: CrewWork, job: Job) -> bool:
        """With several GPUs: whether a job runs again, as it failed before its first launch. A GPU on which that happens
        ``STARTS`` times in a row is given up and the others go on; on the last one the steps decide."""
        broken = job.stuck or (job.failure is not None and not job.notes)
        self.failures[work.crew] = self.failures[work.crew] + 1 if broken else 0
        if not broken or len(self.crews) == 1:
            return False
        if job.stuck or self.failures[work.crew] >= STARTS:
            self.retire(work.crew, job)
        work.crew.submit(replace(job, began=False, notes=[], result=None, failure=None, died=False, stuck=False))
        return True

    def retire(self, crew: Crew, job: Job) -> None:
        """Give a GPU up, whose last job was ``job``; the others take over what it had to do."""
        device = self.held.plan.devices[self.method.crews.index(crew)]
        self.log.watcher.line(
            f"GPU {device} is given up: {job.function}: {job.failure}; {len(self.crews) - 1} GPUs go on"
        )
        self.crews.remove(crew)
        self.held.leases.gpus = len(self.crews)
        for work in self.works:
            if work.crew is crew:
                work.crew = min(self.crews, key=lambda other: other.load)
                for waiting in [each for each in crew.queue if each.tag.args[0] is work]:
                    crew.queue.remove(waiting)
                    work.crew.submit(waiting)
