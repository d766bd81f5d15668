"""The way for a GPU that is there: candidates race the default on it, finalists prove their numerics and race again.

A child process owns each GPU. Whatever kills it costs one candidate; the others go on in a fresh one. Times are multiples of
what the first candidate took where it was timed first, so it does not matter which of several equal GPUs times the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any

from fa2tune.compiling import fingerprint
from fa2tune.measuring.samples import CRAWLING, Race, gain_over
from fa2tune.measuring.worker import Crew, Job
from fa2tune.problem import BACKWARD, ROADS, SPLIT, Config, Problem, TuningKey
from fa2tune.rows.row import Row
from fa2tune.tuning import crown
from fa2tune.tuning.books import Books, describe, fate_of, word_for
from fa2tune.tuning.candidates import Point, point
from fa2tune.tuning.family import Family
from fa2tune.tuning.judge import Verdict
from fa2tune.tuning.ledger import BLAMELESS, LAUNCH
from fa2tune.tuning.study import KeyStudy, Outcome
from fa2tune.variant import way_of

Task = Generator[Job, Job, Any]

HEAT = 8  #: candidates timed against each other at a time
DEADLINE = 60.0  #: seconds without a word from the GPU's process, before it counts as hung
FINAL_SECONDS = 6.0  #: of one length, most of it for turns alone
STARTS = 3  #: failures before the first candidate, in a row, until the GPU is given up


class GpuLost(RuntimeError):
    """The GPU's process fails before it comes to a candidate: nothing can be said of any candidate."""


class Measured:
    """Files measured times, crowns by final races. A GPU does one thing at a time."""

    tasks_at_once = 1  #: of a crew

    def __init__(self, books: Books) -> None:
        self.books = books
        module = books.hands.race.partition(":")[0]
        #: one a GPU
        self.crews = [
            Crew(1, {"CUDA_VISIBLE_DEVICES": device} if device else None, spare=module) for device in books.plan.devices
        ]
        self.working = [*self.crews]  #: those whose GPU works
        self.anchors: dict[Family, Config] = {}
        self.heats = Counter[Family]()  #: under way

    def reserve(self, open_: Sequence[Family]) -> float:
        """Seconds to leave for their finals."""
        return FINAL_SECONDS * sum(len(family.keys) for family in open_) / max(1, len(self.working))

    def problems(self, family: Family) -> list[Problem]:
        """Nothing is predicted."""
        return []

    def judged(self, family: Family, config: Config, verdict: Verdict) -> None:
        """A config compiled, and its limits hold: it may race."""
        family.ready.append((config, verdict))

    def search(self, families: Sequence[Family]) -> tuple[Family, Task] | None:
        """The next heat: of the family with most candidates waiting, once it is known whether its default can run, and how
        long that takes."""
        waiting = [f for f in families if f.ready and self._may_race(f)]
        if not waiting:
            return None
        family = max(waiting, key=lambda f: len(f.ready))
        # no more than its part, where other GPUs have nothing to do
        idle = sum(not crew.load for crew in self.working)
        size = min(HEAT, -(-sum(len(f.ready) for f in waiting) // max(1, idle)))
        family.ready.sort(key=lambda entry: entry[0] != family.default)  # the first heat must hold the default
        batch, family.ready = family.ready[:size], family.ready[size:]
        self.heats[family] += 1
        return family, self._heat(family, batch)

    def _may_race(self, family: Family) -> bool:
        """Beside another heat only where the anchor has a time at every length: all others are multiples of that."""
        if self.heats[family]:
            anchor = self.anchors.get(family)
            return anchor is not None and all(
                (o := study.outcomes.get(point(anchor))) and o.time_us for study in family.studies.values()
            )
        if family in self.anchors or point(family.default) not in family.search.in_flight:
            return True
        return any(config == family.default for config, _ in family.ready)

    def _run(self, function: str, arguments: tuple[Any, ...]) -> Generator[Job, Job, Job]:
        """A job on the GPU; tried again where it failed before its first note, which is no candidate's fault."""
        for _ in range(STARTS):
            job = yield Job(function, arguments, DEADLINE)
            if job.stuck:
                raise GpuLost(f"{function}: {job.failure}; its process cannot be killed and may keep the GPU busy")
            if job.failure is None or job.notes:
                return job
        raise GpuLost(f"{function} failed {STARTS} times before it launched anything: {job.failure}")

    # ---- the search

    def _anchor(self, family: Family, batch: Sequence[Config]) -> Config:
        """What every candidate races against: the default, or where that cannot run the best known."""
        if family not in self.anchors:
            runs = any(config == family.default for config in batch) or all(
                (o := study.outcomes.get(point(family.default))) and o.time_us for study in family.studies.values()
            )
            self.anchors[family] = family.default if runs else next(iter(family.search.best()), batch[0])
        return self.anchors[family]

    def _heat(self, family: Family, entries: Sequence[tuple[Config, Verdict]]) -> Task:
        """Race a batch of candidates at every length, then file what came of them."""
        batch = {point(config): (config, verdict) for config, verdict in entries}
        configs = [config for config, _ in batch.values()]
        dead: dict[Point, tuple[str, str]] = {}
        times: dict[tuple[TuningKey, Point], float] = {}
        for key, study in family.studies.items():
            todo = [c for c in configs if point(c) not in study.outcomes and point(c) not in dead]
            if todo:
                found = yield from self._timed(family, key, study, todo, dead)
                times |= {(key, where): time_us for where, time_us in found.items()}
        for where, (config, verdict) in batch.items():
            if where in dead:
                family.failures.add(LAUNCH, config, *dead[where])
                family.refuse(config, *dead[where], verdict.binary)
                continue
            outcomes = [(key, Outcome(config, times[key, where], binary=verdict.binary)) for key in family.keys
                        if (key, where) in times]  # fmt: skip
            family.file(config, outcomes)
            self.books.record(outcomes, "screen")
        self.heats[family] -= 1

    def _timed(
        self, family: Family, key: TuningKey, study: KeyStudy, todo: Sequence[Config], dead: dict[Point, tuple[str, str]]
    ) -> Generator[Job, Job, dict[Point, float]]:  # fmt: skip
        """Microseconds of each candidate at one length, as a multiple of the anchor's first time: clocks drift, ratios
        between neighbours do not. Whoever cannot run goes to ``dead``."""
        found: dict[Point, float] = {}
        groups = [list(todo)]
        while groups:
            group = [config for config in groups.pop(0) if point(config) not in dead]
            anchor = self._anchor(family, group or todo)
            if point(anchor) in dead:
                anchor = self.anchors[family] = next((c for c in group), anchor)
            if not group:
                continue
            contenders = [anchor, *(config for config in group if config != anchor)]
            known = study.outcomes.get(point(anchor))
            reference = (known.time_us if known else None) or found.get(point(anchor))
            ranks = {way: study.ranked(way) for way in family.ways()}
            best = {way: (r[0].time_us or 0.0) / reference for way, r in ranks.items() if r} if reference else {}
            job = yield from self._run(self.books.hands.race, (key, contenders, "screen", best))
            if job.failure is not None:
                groups = self._after_failure(family, key, job, contenders, group, dead) + groups
                continue
            race = job.result
            reference = reference or median(race.times[0])
            found[point(anchor)] = reference
            for config, samples, index in zip(contenders, race.times, range(len(contenders)), strict=True):
                if index in race.failures:
                    dead[point(config)] = _refusal(race.failures[index]), race.failures[index]
                elif index:
                    found[point(config)] = reference / gain_over(race.times[0], samples).median
        return {where: time_us for where, time_us in found.items() if any(point(c) == where for c in todo)}

    def _after_failure(
        self, family: Family, key: TuningKey, job: Job, contenders: Sequence[Config], group: Sequence[Config],
        dead: dict[Point, tuple[str, str]],
    ) -> list[list[Config]]:  # fmt: skip
        """A race failed as a whole. The groups to race again: without the culprit if it is known, else one by one."""
        self.books.lost(job, f"racing {family.title} {key.bucket}")
        last = job.notes[-1] if job.notes else -1
        # an anchor that cannot be launched: perhaps it is not its own doing
        reason = _fate(job) if job.died or last > 0 else "failed", job.failure or ""
        if last >= 0:
            dead[point(contenders[last])] = reason
        elif len(group) == 1:
            dead[point(group[0])] = reason
        else:
            return [[config] for config in group]
        rest = [config for config in group if point(config) not in dead]
        return [rest] if rest else []

    # ---- the finals

    def crown(self, families: Sequence[Family]) -> list[Task]:
        """Of all variants of a kernel, a task per length: the finalists prove their numerics, race again at leisure, and the
        best of each way is crowned. The portable variant comes first."""
        left = {*families[0].keys}
        return [self._crown(families, key, left) for key in families[0].keys]

    def _crown(self, families: Sequence[Family], key: TuningKey, left: set[TuningKey]) -> Task:
        """``left``: lengths that are not crowned yet."""
        token = " | ".join(family.studies[key].token for family in families)
        rows = families[0].studies[key].kept("crowned", token)
        if rows is None:
            rows, sound = yield from self._final(_Finals(families, key))
            if sound:
                token = " | ".join(family.studies[key].token for family in families)
                families[0].studies[key].keep("crowned", token, rows)
        self.books.put(rows, f"{families[0].title} {key.bucket}")
        left.discard(key)
        for family in families:
            family.crowned = not left

    def _final(self, finals: _Finals) -> Generator[Job, Job, tuple[list[Row], bool]]:
        """The rows, and whether they are worth keeping. Each way's leader is found in a race and, where the card is at its
        power limit (or nobody can tell), by turns alone of those near the fastest; shown to be right; raced against its default
        once more, all ways in one race: samples that chose a winner flatter it. Ends, as each round disqualifies somebody."""
        while True:
            near = {way: found for way in finals.ways if (found := crown.finalists(finals.study(way).ranked(way)))}
            if not near:
                self.books.watcher.line(f"{finals.title}: no candidate ran and was right")
                return [], True
            timed = {point(outcome.config): outcome for way in finals.ways for outcome in finals.study(way).ranked()}
            default = timed.get(point(finals.default), next(iter(near.values()))[0])
            rivals = {way: self._rival_of(finals, way) for way in near}
            leaders = {way: found[:1] for way, found in near.items()}
            races = []
            if any(len(found) > 1 for found in near.values()):
                contenders = _distinct([default, *(outcome for found in near.values() for outcome in found)])
                race = yield from self._raced(finals, contenders, "final")
                if race is None:
                    continue
                races.append(race)
                of = {way: [contenders.index(outcome) for outcome in found] for way, found in near.items()}
                first = leading = {way: crown.leader(race, found) for way, found in of.items()}
                alone = crown.contested(race, leading, of) if race.power_capped != 0 and not race.tainted else []
                if alone:
                    race = yield from self._raced(finals, [contenders[index] for index in alone], "sustained")
                    if race is None:
                        continue
                    races.append(race)
                    first = crown.overruled(race, alone, leading, of)
                leaders = {way: [contenders[i] for i in dict.fromkeys((first[way], i))] for way, i in leading.items()}
            timed_rivals = (o for o in rivals.values() if isinstance(o, Outcome))
            contenders = _distinct([default, *timed_rivals, *chain(*leaders.values())])
            errors = yield from self._all_proved(finals, contenders)
            if errors is None:
                continue
            race = yield from self._raced(finals, contenders, "proof")
            if race is not None:
                rows = self._rows(finals, leaders, rivals, contenders, errors, [*races, race])
                return rows, not race.tainted

    def _rival_of(self, finals: _Finals, way: str) -> Outcome | str:
        """The portable default that this way has to beat, timed or not; or why it cannot run."""
        family = finals.portable
        if family is None:
            return "the portable kernel has no legal config"
        study = family.studies[finals.key]
        config = crown.rival(family.variant.space, family.spec, family.plan.target.gpu.arch, way)
        where = point(config)
        if where in study.disqualified:
            return study.disqualified[where]
        known = study.outcomes.get(where)
        if known is not None and known.fate not in BLAMELESS:
            return known if known.time_us is not None else f"{known.fate}: {known.why}"
        if (failure := family.failures.of(config)) is not None:
            return f"{failure.fate}: {failure.why}"
        if where not in family.legal_points:
            return f"not legal on {family.plan.target.gpu.name}"
        verdict = family.verdicts.get(family.binary(config))
        return Outcome(config, binary=verdict.binary if verdict else {})

    def _raced(
        self, finals: _Finals, contenders: Sequence[Outcome], effort: str, retry: bool = True
    ) -> Generator[Job, Job, Race | None]:
        """The race, written down; None if it failed, and whoever it was is disqualified. ``retry``: may be run once more where
        nobody is to blame."""
        key, configs = finals.key, [outcome.config for outcome in contenders]
        job = yield from self._run(self.books.hands.race, (key, configs, effort))
        if job.failure is None and not job.result.failures:
            for outcome, samples in zip(contenders, job.result.times, strict=True):
                again = replace(outcome, time_us=median(samples))
                more = {"samples_us": [round(s, 2) for s in samples], "power_capped": job.result.power_capped}
                more |= {"tainted": job.result.tainted}
                self.books.record([(key, again)], effort, **more, **crown.watched(job.result))
            return job.result
        self.books.lost(job, f"in the {effort} of {finals.title}")
        culprits = list(job.result.failures) if job.failure is None else [job.notes[-1] if job.notes else -1]
        if culprits == [-1]:  # while they ran in turns
            culprits = yield from self._failing_alone(key, configs, effort)
            if not culprits and retry:
                return (yield from self._raced(finals, contenders, effort, retry=False))
            if not culprits:  # nobody knows who it is
                for config in configs:
                    finals.study(way_of(config)).disqualify(config, f"failed: {job.failure}")
                return None
        for index in culprits:
            why = job.failure or job.result.failures[index]
            fate = _fate(job) if job.failure else _refusal(why)
            finals.disqualify(configs[index], fate, why)
        return None

    def _failing_alone(self, key: TuningKey, configs: Sequence[Config], effort: str) -> Generator[Job, Job, list[int]]:
        """Which of the configs fail with nobody beside them."""
        failing = []
        for index, config in enumerate(configs):
            job = yield from self._run(self.books.hands.race, (key, [config], effort))
            if job.failure is not None or job.result.failures:
                failing.append(index)
        return failing

    def _all_proved(
        self, finals: _Finals, contenders: Sequence[Outcome]
    ) -> Generator[Job, Job, list[Mapping[str, Any]] | None]:
        """The errors of each; None if one is wrong, and disqualified."""
        found = []
        for outcome in contenders:
            errors = yield from self._proved(finals.family(outcome.way), outcome.config)
            if isinstance(errors, str):
                finals.disqualify(outcome.config, *errors.split(": ", 1))
            else:
                found.append(errors)
        return found if len(found) == len(contenders) else None

    def _proved(self, family: Family, config: Config) -> Generator[Job, Job, Mapping[str, Any] | str]:
        """Errors of a config on the target, or why it failed; once per family."""
        arguments = (family.kernel, config, family.spec, family.plan.target.gpu.arch, "cuda")
        what = f"checking {family.title} {describe(config)}"
        return (
            yield from self._check(self.books.hands.check, arguments, (family.kernel, family.spec, point(config)), what)
        )

    def _check(
        self, function: str, arguments: tuple[Any, ...], key: Any, what: str
    ) -> Generator[Job, Job, Mapping[str, Any] | str]:
        if key not in self.books.checked:
            job = yield from self._run(function, arguments)
            if fate_of(job) == "timeout":  # perhaps the GPU was busy
                self.books.watcher.line(f"{what}: {job.failure}; checked once more")
                job = yield from self._run(function, arguments)
            self.books.report.checked += 1
            if job.failure:
                self.books.watcher.line(f"{what}: {job.failure}")
            self.books.checked[key] = f"{_fate(job)}: {job.failure}" if job.failure else job.result
        return self.books.checked[key]

    def _rows(
        self, finals: _Finals, leaders: Mapping[str, Sequence[Outcome]], rivals: Mapping[str, Outcome | str],
        contenders: Sequence[Outcome], errors: Sequence[Mapping[str, Any]], races: Sequence[Race],
    ) -> list[Row]:  # fmt: skip
        """Per way the first of its leaders that beats the default, or that."""
        times, tainted = races[-1].times, races[-1].tainted
        rows = []
        if tainted:
            self.books.watcher.line(
                f"{finals.title}: the card stayed throttled in the proof ({tainted} launches): the default stays"
            )
        for way, able in leaders.items():
            rival, best = rivals[way], contenders.index(able[0])
            default_times = None
            if isinstance(rival, str):
                self.books.watcher.line(
                    f"{finals.title}: no default beside the {way} winner, as it cannot run ({rival})"
                )
            else:
                default_times = times[contenders.index(rival)]
                faster = [o for o in able if crown.replaces(default_times, times[contenders.index(o)], tainted)]
                best = contenders.index((*faster, rival)[0])
            outcome = contenders[best]
            if outcome.way != way:
                continue  # the default, of another way, serves every problem that this one could
            family = finals.family(way)
            rows.append(
                crown.measured(
                    finals.key, way, outcome.config, self.books.toolchain, times[best], default_times, errors=errors[best],
                    tried=len(finals.study(way).outcomes), pruned=family.pruned(finals.key), **crown.watched(*races),
                    **crown.evidence_of(outcome),
                )
            )  # fmt: skip
        return rows

    # ---- the whole backward

    def whole(self, members: Sequence[Family]) -> Task:
        """Split against fused, each with its winners, with and without warp-specialised kernels, and the split road of default
        configs beside them."""
        spec = members[0].spec
        forward = members[0].forward_default()
        portable = {family.kernel: family for family in members if not family.variant.serves}
        if lacking := [name for name in ROADS[SPLIT] if name not in portable]:
            names = ", ".join(lacking)
            self.books.watcher.line(f"{BACKWARD} {members[0].short}: no row, as {names} has no legal portable config")
            return
        for key in members[0].keys:
            ways = crown.backward_ways(self.books.report.rows, key)
            defaults: dict[str, Config] = {name: portable[name].default for name in ROADS[SPLIT]}
            configs_of = {
                name: (road, {kernel: row.config for kernel, row in rows.items()})
                for name, (road, rows) in ways.items()
            }
            token = repr([
                (fingerprint.backward_hash(way), way, sorted(map(point, found.values())))
                for way, (_, found) in configs_of.items()
            ])  # fmt: skip
            study = portable["bwd_dq"].studies[key.with_(kernel="bwd_dq")]
            rows = study.kept("whole", token)
            if rows is None:
                proved, sound = [], True
                for name, (road, configs) in configs_of.items():
                    what = f"checking the {name} backward {members[0].short}"
                    arguments = ({"fwd": forward, **configs}, spec, road, "cuda")
                    memo = (road, spec, *(point(config) for config in configs.values()))
                    errors = yield from self._check(self.books.hands.check_backward, arguments, memo, what)
                    if isinstance(errors, str):
                        sound = sound and errors.partition(":")[0] not in BLAMELESS
                    else:
                        proved.append((name, road, configs, errors))
                rows, raced = yield from self._whole_rows(key.with_(kernel=BACKWARD), proved, defaults)
                if sound and raced:
                    study.keep("whole", token, rows)
            self.books.put(rows, f"{BACKWARD} {members[0].short} {key.bucket}")

    def _whole_rows(
        self, key: TuningKey, roads: Sequence[tuple[str, str, dict[str, Config], Any]], defaults: dict[str, Config]
    ) -> Generator[Job, Job, tuple[list[Row], bool]]:
        """The rows, and whether they are worth keeping. A road that fails does not cost the others their rows."""
        title = f"whole backward {key.dtype} {key.head_dim} {key.bucket}"
        roads, sound = list(roads), True
        while True:
            if not roads:
                return [], sound
            contenders = [{"road": SPLIT, "configs": defaults}]
            contenders += [{"road": road, "configs": configs} for _, road, configs, _ in roads]
            job = yield from self._run(self.books.hands.race, (key, contenders, "proof"))
            if job.failure is None:
                break
            self.books.watcher.line(f"{title}: {job.failure}")
            last = job.notes[-1]
            if last == 0 or (last < 0 and len(roads) == 1):
                return [], False
            # while they ran in turns: what comes last is no road's rival
            sound = sound and last > 0 and _fate(job) not in BLAMELESS
            roads.pop(last - 1 if last > 0 else -1)
        race = job.result
        if race.tainted:
            self.books.watcher.line(f"{title}: the card stayed throttled: nothing replaces the portable split road")
            sound = False
        for (name, *_), samples in zip(roads, race.times[1:], strict=True):
            if name == SPLIT and samples and crown.replaces(samples, race.times[0]):
                # each kernel's row was proved by itself; nothing chooses them together
                self.books.watcher.line(f"{title}: slower than by default")
        rows = [
            crown.measured(
                key, name, {kernel: way_of(config) for kernel, config in configs.items()}, self.books.toolchain, samples,
                race.times[0], errors=errors, **crown.watched(race),
            )
            for (name, _, configs, errors), samples in zip(roads, race.times[1:], strict=True)
            if samples and (name == SPLIT or not race.tainted)
        ]  # fmt: skip
        return rows, sound


class _Finals:
    """All variants of a kernel at one length: who competes there, and whose is what."""

    def __init__(self, families: Sequence[Family], key: TuningKey) -> None:
        self.families, self.key = families, key
        self._of = {way: family for family in families for way in family.ways()}
        self.ways = list(self._of)
        #: whose defaults are the ones to beat; None: it has no legal config here
        self.portable = next((family for family in families if not family.variant.serves), None)
        self.default = (self.portable or families[0]).default
        self.title = f"{families[0].title} {key.bucket}"

    def family(self, way: str) -> Family:
        return self._of[way]

    def study(self, way: str) -> KeyStudy:
        return self._of[way].studies[self.key]

    def disqualify(self, config: Config, fate: str, why: str) -> None:
        way = way_of(config)
        self.family(way).failures.add(LAUNCH, config, fate, why)
        self.study(way).disqualify(config, f"{fate}: {why}")


def _fate(job: Job) -> str:
    """The short word for a launch that failed. Kernels allocate nothing: memory that is missing is held by somebody else."""
    fate = fate_of(job)
    return "failed" if fate == "out_of_memory" and not job.died else fate


def _refusal(why: str) -> str:
    """The same for a contender that a race left out."""
    word = CRAWLING if why.startswith(CRAWLING) else word_for(why)
    return "failed" if word == "out_of_memory" else word


def _distinct(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Each config once, in order."""
    return list({point(outcome.config): outcome for outcome in outcomes}.values())
