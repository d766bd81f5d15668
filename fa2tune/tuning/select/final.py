"""The final of one kernel at one length, on a GPU that is present: finalists race at leisure, prove their numerics, and the
best of each implementation is selected."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any

from fa2tune.measuring.samples import Race
from fa2tune.measuring.worker import Job
from fa2tune.rows.describe import describe
from fa2tune.rows.row import Row
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import Config
from fa2tune.spec.variant import implementation_of
from fa2tune.tuning.search.candidates import point
from fa2tune.tuning.search.failures import BLAMELESS, LAUNCH
from fa2tune.tuning.search.status import launch_status, refusal_status
from fa2tune.tuning.search.study import KeyStudy, TrialOutcome
from fa2tune.tuning.search.task import SearchTask
from fa2tune.tuning.select import evidence, finalists, gpu_jobs
from fa2tune.tuning.select.log import Log


class Final:
    """All variants of a kernel at one length, which compete there."""

    def __init__(self, tasks: Sequence[SearchTask], key: TuningKey, log: Log) -> None:
        self.tasks, self.key, self.log = tasks, key, log
        self._of = {name: task for task in tasks for name in task.space.implementations()}
        self.implementations = list(self._of)
        #: whose defaults are the ones to beat; None: it has no legal config here
        self.portable = next((task for task in tasks if task.variant.portable), None)
        self.default = (self.portable or tasks[0]).default
        self.title = f"{tasks[0].of_kernel} {key.bucket}"

    def task(self, implementation: str) -> SearchTask:
        return self._of[implementation]

    def study(self, implementation: str) -> KeyStudy:
        return self._of[implementation].studies[self.key]

    def disqualify(self, config: Config, status: str, why: str) -> None:
        implementation = implementation_of(config)
        self.task(implementation).failures.add(LAUNCH, config, status, why)
        self.study(implementation).disqualify(config, f"{status}: {why}")

    def rows(self) -> Generator[Job, Job, tuple[list[Row], bool]]:
        """The rows, and whether they are worth keeping. The leader of each implementation (``_leaders``) must pass a numerics
        check and a last race against its default: samples that chose a winner flatter it. A failed round disqualifies a
        config, and the next round does without it."""
        while True:
            ranked = {name: self.study(name).ranked(name) for name in self.implementations}
            near = {name: found for name, some in ranked.items() if (found := finalists.finalists(some))}
            if not near:
                self.log.watcher.line(f"{self.title}: no candidate ran and gave right results")
                return [], True
            timed = {point(outcome.config): outcome for outcome in chain(*ranked.values())}
            default = timed.get(point(self.default), next(iter(near.values()))[0])
            rivals = {name: self._rival_of(name) for name in near}
            races: list[Race] = []
            leaders = yield from self._leaders(near, default, races)
            if leaders is None:
                continue
            timed_rivals = (o for o in rivals.values() if isinstance(o, TrialOutcome))
            contenders = _distinct([default, *timed_rivals, *chain(*leaders.values())])
            errors = yield from self._all_proved(contenders)
            if errors is None:
                continue
            race = yield from self._raced(contenders, "proof")
            if race is not None:
                for name in self.implementations:
                    if name not in near and (why := self.study(name).last_failure(name)):
                        self.log.watcher.line(f"{self.title}: no row by {name}: {why}")
                rows = self._rows(leaders, rivals, contenders, errors, [*races, race])
                return rows, not race.tainted

    def _leaders(
        self, near: Mapping[str, Sequence[TrialOutcome]], default: TrialOutcome, races: list[Race]
    ) -> Generator[Job, Job, dict[str, Sequence[TrialOutcome]] | None]:
        """Of each implementation the leader: of a race and, if the GPU is at its power limit (or that is not known), of turns
        in which those near the fastest run alone. Where the turns name another one, the race's leader comes second. None: a
        race failed. ``races``: takes what was run."""
        if all(len(found) == 1 for found in near.values()):
            return {name: found[:1] for name, found in near.items()}
        contenders = _distinct([default, *(outcome for found in near.values() for outcome in found)])
        race = yield from self._raced(contenders, "final")
        if race is None:
            return None
        races.append(race)
        of = {name: [contenders.index(outcome) for outcome in found] for name, found in near.items()}
        first = leading = {name: finalists.leader(race, found) for name, found in of.items()}
        alone = finalists.contested(race, leading, of) if race.power_capped != 0 and not race.tainted else []
        if alone:
            race = yield from self._raced([contenders[index] for index in alone], "sustained")
            if race is None:
                return None
            races.append(race)
            first = finalists.overruled(race, alone, leading, of)
        return {one: [contenders[i] for i in dict.fromkeys((first[one], i))] for one, i in leading.items()}

    def _rival_of(self, implementation: str) -> TrialOutcome | str:
        """The portable default that this implementation has to beat, timed or not; or why it cannot run."""
        task = self.portable
        if task is None:
            return "the portable kernel has no legal config"
        study = task.studies[self.key]
        config = finalists.rival(task.variant.space, task.spec, task.plan.target.gpu.arch, implementation)
        where = point(config)
        if where in study.disqualified:
            return study.disqualified[where]
        known = study.outcomes.get(where)
        if known is not None and known.status not in BLAMELESS:
            return known if known.time_us is not None else f"{known.status}: {known.why}"
        if (failure := task.failures.of(config)) is not None:
            return f"{failure.status}: {failure.why}"
        if where not in task.space.points:
            return f"not legal on {task.plan.target.gpu.name}"
        result = task.binaries.result(config)
        return TrialOutcome(config, binary=result.binary if result else {})

    def _raced(
        self, contenders: Sequence[TrialOutcome], effort: str, retry: bool = True
    ) -> Generator[Job, Job, Race | None]:
        """The race, recorded; None if it failed, and the configs that caused it are disqualified. ``retry``: it may run once
        more if none of them fails alone."""
        key, configs = self.key, [outcome.config for outcome in contenders]
        job = yield from gpu_jobs.run(self.log.functions.race, (key, configs, effort))
        if job.failure is None and not job.result.failures:
            for outcome, samples in zip(contenders, job.result.times, strict=True):
                again = replace(outcome, time_us=median(samples))
                more = {"samples_us": [round(s, 2) for s in samples], "power_capped": job.result.power_capped}
                more |= {"tainted": job.result.tainted}
                self.log.record([(key, again)], effort, **more, **evidence.watched(job.result))
            return job.result
        self.log.lost(job, f"running the {effort} race of {self.title}")
        culprits = list(job.result.failures) if job.failure is None else [job.notes[-1] if job.notes else -1]
        if culprits == [-1]:  # while they ran in turns
            culprits = yield from self._failing_alone(key, configs, effort)
            if not culprits and retry:
                return (yield from self._raced(contenders, effort, retry=False))
            if not culprits:  # it cannot be attributed
                for config in configs:
                    self.study(implementation_of(config)).disqualify(config, f"failed: {job.failure}")
                return None
        for index in culprits:
            why = job.failure or job.result.failures[index]
            status = launch_status(job) if job.failure else refusal_status(why)
            self.disqualify(configs[index], status, why)
        return None

    def _failing_alone(self, key: TuningKey, configs: Sequence[Config], effort: str) -> Generator[Job, Job, list[int]]:
        """Which of the configs fail when they run alone."""
        failing = []
        for index, config in enumerate(configs):
            job = yield from gpu_jobs.run(self.log.functions.race, (key, [config], effort))
            if job.failure is not None or job.result.failures:
                failing.append(index)
        return failing

    def _all_proved(self, contenders: Sequence[TrialOutcome]) -> Generator[Job, Job, list[Mapping[str, Any]] | None]:
        """The errors of each; None if one is wrong, and disqualified."""
        found = []
        for outcome in contenders:
            errors = yield from self._proved(self.task(outcome.implementation), outcome.config)
            if isinstance(errors, str):
                self.disqualify(outcome.config, *errors.split(": ", 1))
            else:
                found.append(errors)
        return found if len(found) == len(contenders) else None

    def _proved(self, task: SearchTask, config: Config) -> Generator[Job, Job, Mapping[str, Any] | str]:
        """Errors of a config on the target, or why it failed; once per task."""
        arguments = (task.kernel, config, task.spec, task.plan.target.gpu.arch, "cuda")
        what = f"checking {task.title} {describe(config)}"
        return (
            yield from gpu_jobs.check(
                self.log, self.log.functions.check, arguments, (task.kernel, task.spec, point(config)), what
            )
        )

    def _rows(
        self, leaders: Mapping[str, Sequence[TrialOutcome]], rivals: Mapping[str, TrialOutcome | str],
        contenders: Sequence[TrialOutcome], errors: Sequence[Mapping[str, Any]], races: Sequence[Race],
    ) -> list[Row]:  # fmt: skip
        """Per implementation the first of its leaders that beats the default, or that."""
        times, tainted = races[-1].times, races[-1].tainted
        rows = []
        if tainted:
            self.log.watcher.line(
                f"{self.title}: the GPU stayed throttled in the last race ({tainted} launches): the default config is kept"
            )
        for name, able in leaders.items():
            rival, best = rivals[name], contenders.index(able[0])
            default_times = None
            if isinstance(rival, str):
                self.log.watcher.line(
                    f"{self.title}: the {name} row has no gain, as the default config cannot run ({rival})"
                )
            else:
                default_times = times[contenders.index(rival)]
                faster = [o for o in able if finalists.replaces(default_times, times[contenders.index(o)], tainted)]
                best = contenders.index((*faster, rival)[0])
            outcome = contenders[best]
            if outcome.implementation != name:
                continue  # the default, of another implementation, serves every problem that this one could
            task = self.task(name)
            rows.append(
                evidence.measured(
                    self.key, name, outcome.config, self.log.provenance, times[best], default_times, errors=errors[best],
                    tried=len(self.study(name).outcomes), pruned=task.pruned(self.key), **evidence.watched(*races),
                    **evidence.evidence_of(outcome),
                )
            )  # fmt: skip
        return rows


def _distinct(outcomes: Sequence[TrialOutcome]) -> list[TrialOutcome]:
    """Each config once, in order."""
    return list({point(outcome.config): outcome for outcome in outcomes}.values())
