"""Checks whether the rows of a cache file still hold: what a row claims is reproduced, as far as this machine can.

Every row is compiled and checked against the limits of its GPU. Numerics are checked on a GPU of its architecture; without
one, those of a predicted row in Triton's interpreter. Its time is measured on the GPU that measured it, in rounds interleaved
with the default config; a predicted row is predicted again. Child processes do the work, so a crash or a hang affects one row
only.

Nothing is written here; ``repair.py`` acts on the findings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fa2tune.compiling.compiler import is_gluon
from fa2tune.compiling.registry import portable_config, portable_of
from fa2tune.fleet.finding import (
    FAILS,
    HOLDS,
    LOST,
    MOST_LOSS,
    UNTIMED,
    UNTOLD,
    Finding,
    PresentGpu,
    gpu_of_key,
    odd_key,
    parts_of,
    row_misfit,
    toolchain_here,
    variant_of_row,
)
from fa2tune.measuring import worker
from fa2tune.measuring.samples import Race, gain_over
from fa2tune.measuring.worker import Crew, Job
from fa2tune.rows.row import MEASURED, PORTED, PREDICTED, PROOFS, Row
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import BACKWARD, SPLIT, STRATEGIES, Config
from fa2tune.spec.variant import OPTIONS, implementation_of
from fa2tune.tuning.request.provenance import Provenance
from fa2tune.tuning.request.watcher import WorkerFunctions
from fa2tune.tuning.search.candidates import point
from fa2tune.tuning.search.compile_check import CompileResult
from fa2tune.tuning.search.failures import BLAMELESS
from fa2tune.tuning.search.status import status_of, word_for
from fa2tune.tuning.select import evidence, finalists
from fa2tune.tuning.select.gpu_jobs import GpuLost

COMPILE_SECONDS, CHECK_SECONDS, RACE_SECONDS = 180.0, 180.0, 60.0
COMPILE_MEMORY = 4 << 30  #: bytes that a compile may hold
#: How much lower the clock may be than it was, for a longer time to be put down to it. Two runs on one H200, quiet and busy,
#: read clocks up to 1.3 apart, and times do not follow them that far.
CLOCKS = 1.1
ATTEMPTS = 3  #: times that a job which fails before its first launch is given to the GPU: that is no row's fault
#: What Triton says of a kernel that compiles for an architecture and that this GPU does not take.
BINARY_REFUSED = re.compile(r"\b(OutOfResources|CompileError)\b")


@dataclass(frozen=True)
class _Said:
    """What became of a job: its result, or why there is none."""

    result: Any = None
    status: str = ""
    why: str = ""

    @property
    def state(self) -> str:
        return UNTOLD if self.status in BLAMELESS else FAILS


def _said(job: Job) -> _Said:
    if job.failure is None:
        return _Said(job.result)
    status = status_of(job)
    if (
        status == "out_of_memory" and not job.died
    ):  # of the GPU, which another process may hold; kernels allocate nothing
        status = "failed"
    return _Said(None, status, f"{status}: {job.failure}")


@dataclass
class Verification:
    """One look at rows. ``among``: the rows from which the whole backward takes its kernels, as a rule those of the file."""

    rows: Sequence[Row]
    among: Sequence[Row]
    present: PresentGpu | None = None
    functions: WorkerFunctions = field(default_factory=WorkerFunctions)
    workers: int | None = None  #: compiling, or checking in the interpreter, at a time; None: one per core
    progress: Callable[[str, int, int], None] = lambda what, done, total: None
    #: called with each finding as it is made
    found: Callable[[Finding], None] = lambda finding: None

    def __post_init__(self) -> None:
        self.size = self.workers or len(os.sched_getaffinity(0))
        self.toolchain = toolchain_here(self.present)
        self.findings: dict[int, Finding] = {}  #: by id of the row
        self._results: dict[Any, _Said] = {}
        self._checked: dict[Any, _Said] = {}

    def go(self) -> list[Finding]:
        """Every row's finding, in the order of the rows."""
        single = [row for row in self.rows if row.key.kernel != BACKWARD]
        fit = []
        for row in single:
            why = row_misfit(row, gpu_of_key(row.key, self.present))
            if why is None:
                fit.append(row)
            else:
                self._file(row, FAILS, f"refused: {why}")
        self._compile(fit)
        compiled = [row for row in fit if not self._of_compile(row)]
        self._check_interpreted([row for row in compiled if self._place(row) == "cpu"])
        crew = Crew(1, spare=self.functions.race.partition(":")[0]) if self.present else None
        try:
            for number, row in enumerate(compiled):
                if self._place(row) == "cuda":
                    self.progress("rows on the GPU", number, len(compiled))
                self._conclude(row, crew)
            whole = [row for row in self.rows if row.key.kernel == BACKWARD]
            for number, row in enumerate(whole):
                self.progress("whole backwards", number, len(whole))
                self._whole(row, crew)
        finally:
            if crew:
                crew.close()
        return [self.findings[id(row)] for row in self.rows]

    def _file(self, row: Row, state: str, why: str = "", **more: Any) -> Finding:
        finding = Finding(row, state, why, self.toolchain.stale(row), self.toolchain.other_driver(row), **more)
        self.findings[id(row)] = finding
        self.found(finding)
        return finding

    # ---- compiling

    def _binary(self, row: Row, config: Config) -> Any:
        return row.key.kernel, row.key.specialization(), point(config), gpu_of_key(row.key, self.present)

    def _rival(self, row: Row) -> Config:
        """The default that would serve in its place."""
        portable = portable_of(row.key.kernel).space
        return dict(finalists.rival(portable, row.key.specialization(), row.key.arch, implementation_of(row.config)))

    def _compile(self, rows: Sequence[Row]) -> None:
        """Each config once, and beside a predicted row its default, for all the lengths that predictions are wanted of."""
        asked: dict[Any, set[TuningKey]] = {}
        for row in rows:
            for config in [row.config, *([self._rival(row)] if row.obtained == PREDICTED else [])]:
                lengths = asked.setdefault(self._binary(row, config), set())
                if row.obtained == PREDICTED:
                    lengths.add(row.key)
        jobs = {}
        for what, keys in asked.items():
            kernel, spec, where, gpu = what
            lengths_in_order = sorted(keys)
            problems = [key.workload() for key in lengths_in_order]
            arguments = (kernel, spec, dict(where), gpu, problems)
            jobs[what] = Job(self.functions.compile_check, arguments, COMPILE_SECONDS, tag=(what, lengths_in_order))

        def take(job: Job) -> None:
            what, keys = job.tag
            said = _said(job)
            if said.result is not None:
                result: CompileResult = said.result
                times = dict(zip(keys, result.predicted_us, strict=bool(result.predicted_us)))
                why = f"{result.status}: {result.why}" if result.status else ""
                said = _Said((result, times), result.status, why)
            self._results[what] = said

        with Crew(self.size, {"OMP_NUM_THREADS": "1"}, memory=COMPILE_MEMORY) as crew:
            self._run(crew, jobs.values(), take, "configs compiled")

    def _of_compile(self, row: Row) -> Finding | None:
        """A finding where the compile, or what the binary takes, settles the matter."""
        said = self._results[self._binary(row, row.config)]
        return self._file(row, said.state, said.why) if said.status else None

    def _run(self, crew: Crew, jobs: Iterable[Job], take: Callable[[Job], None], what: str) -> None:
        jobs = list(jobs)
        for job in jobs:
            crew.submit(job)
        done = 0
        while crew.load:
            for job in worker.wait([crew], 0.5):
                take(job)
                done += 1
            self.progress(what, done, len(jobs))

    # ---- numerics

    def _place(self, row: Row) -> str:
        """Where its numerics can be shown: "cuda", "cpu" (the interpreter), or "" nowhere."""
        if self.present and self.present.gpu.arch == row.key.arch:
            return "cuda"
        interpreted = row.obtained == PREDICTED and not is_gluon(variant_of_row(row))
        return "cpu" if interpreted else ""

    def _numerics(self, row: Row, place: str) -> Any:
        """What a check depends on; compile options mean nothing in the interpreter."""
        config = row.config
        if place == "cpu":
            config = {name: value for name, value in config.items() if name not in OPTIONS}
        return row.key.kernel, row.key.specialization(), point(config), place

    def _check_interpreted(self, rows: Sequence[Row]) -> None:
        jobs = {}
        for row in rows:
            what = self._numerics(row, "cpu")
            arguments = (row.key.kernel, dict(row.config), row.key.specialization(), row.key.arch, "cpu", True)
            jobs[what] = Job(self.functions.check, arguments, CHECK_SECONDS, tag=what)

        def take(job: Job) -> None:
            self._checked[job.tag] = _said(job)

        interpreter = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with Crew(self.size, interpreter) as crew:
            self._run(crew, jobs.values(), take, "configs checked in the interpreter")

    def _on_gpu(self, crew: Crew, function: str, arguments: tuple[Any, ...], seconds: float) -> Job:
        for _ in range(ATTEMPTS):
            job = Job(function, arguments, seconds)
            crew.submit(job)
            while crew.load:
                worker.wait([crew], 1.0)
            if job.stuck:
                raise GpuLost(f"{function}: {job.failure}; its process cannot be killed and may still use the GPU")
            if job.failure is None or job.notes:
                break
        return job

    def _check_on_gpu(self, row: Row, crew: Crew) -> _Said:
        what = self._numerics(row, "cuda")
        if what not in self._checked:
            arguments = (row.key.kernel, dict(row.config), row.key.specialization(), row.key.arch, "cuda")
            self._checked[what] = _launched(self._on_gpu(crew, self.functions.check, arguments, CHECK_SECONDS))
        return self._checked[what]

    # ---- time

    def _conclude(self, row: Row, crew: Crew | None) -> None:
        """Numerics and time of a row that compiles."""
        place = self._place(row)
        if not place:
            self._file(row, UNTIMED, f"compiles within the limits; {self._no_time(row)}")
            return
        checked = (
            self._check_on_gpu(row, crew) if crew and place == "cuda" else self._checked[self._numerics(row, place)]
        )
        if checked.status:
            self._file(row, checked.state, checked.why, dangerous=checked.state == FAILS)
        elif row.obtained == PREDICTED:
            self._predict(row, checked.result, "interpreter" if place == "cpu" else self._proof(row))
        elif crew and self._measures(row):
            self._time(row, checked.result, crew)
        else:
            self._file(row, UNTIMED, f"compiles within the limits, correct on {self._here}; {self._no_time(row)}")

    def _proof(self, row: Row) -> str:
        """What a check on the GPU here proves."""
        exact = self.present and (row.key.gpu, row.key.sm_count) == (self.present.gpu.name, self.present.gpu.sm_count)
        return "target" if exact else "sibling"

    @property
    def _here(self) -> str:
        return self.present.name if self.present else "this machine"

    def _no_time(self, row: Row) -> str:
        if row.obtained == PORTED:
            return f"it was timed as ported code: `fa2tune tune --gpu {row.key.gpu}` on a Hopper GPU does that again"
        return f"{row.obtained_on or row.key.gpu} is not here to time it"

    def _measures(self, row: Row) -> bool:
        """Whether the GPU here is the one that measured it."""
        if self.present is None or row.obtained in (PREDICTED, PORTED):
            return False
        if row.obtained == MEASURED:
            return (row.key.gpu, row.key.sm_count) == (self.present.gpu.name, self.present.gpu.sm_count)
        return row.obtained_on == self.present.name

    def _evidence(self, row: Row) -> dict[str, Any]:
        """Of the binary, today; of the search, as it was."""
        result, _ = self._results[self._binary(row, row.config)].result
        binary = {name: result.binary.get(name) for name in evidence.FACTS}
        return {**binary, "tried": row.tried, "pruned": dict(row.pruned)}

    def _stamp(self, row: Row) -> Provenance:
        if row.obtained == PREDICTED:
            return Provenance(PREDICTED)
        assert self.present is not None
        return Provenance(row.obtained, self.present.name, self.present.driver)

    def _predict(self, row: Row, errors: Mapping[str, Any], proof: str) -> None:
        _, times = self._results[self._binary(row, row.config)].result
        rival = self._results[self._binary(row, self._rival(row))]
        time_us = times[row.key]
        default_us = rival.result[1][row.key] if not rival.status else None
        fresh = evidence.predicted(
            row.key, row.implementation, row.config, self._stamp(row), time_us, default_us, errors=errors,
            **self._evidence(row),
        )  # fmt: skip
        self._weigh(row, replace(fresh, proof=proof), None)

    def _time(self, row: Row, errors: Mapping[str, Any], crew: Crew) -> None:
        rival = self._rival(row)
        contenders = [rival, dict(row.config)] if rival != dict(row.config) else [rival]
        race, said = self._race(row.key, contenders, crew)
        if race is None:
            self._file(row, said.state, said.why, dangerous=said.state == FAILS)
            return
        known = {"errors": errors, **self._evidence(row)}
        self._timed(row, race, known, lambda: self._race(row.key, contenders, crew)[0])

    def _race(self, key: TuningKey, contenders: Sequence[Any], crew: Crew) -> tuple[Race | None, _Said]:
        """The race of the last contender against the first; alone where the first does not run."""
        job = self._on_gpu(crew, self.functions.race, (key, list(contenders), "proof"), RACE_SECONDS)
        last = len(contenders) - 1
        if job.failure is None:
            race: Race = job.result
            if last not in race.failures:
                return race, _Said()
            why = race.failures[last]
            status = word_for(why)
            return None, _Said(None, "failed" if status == "out_of_memory" else status, why)
        if last and (not job.notes or job.notes[-1] != last):
            return self._race(key, contenders[last:], crew)
        return None, _launched(job)

    def _timed(self, row: Row, race: Race, known: Mapping[str, Any], again: Callable[[], Race | None]) -> None:
        """File a finding by what a race says, or by two, where the first says that the row has lost."""
        if race.tainted:
            self._file(row, UNTOLD, "the GPU stayed throttled while it was timed")
            return
        fresh = self._fresh(row, race, known)
        if self._lost(row, fresh, race):
            second = again()
            if second is not None and not second.tainted:
                other = self._fresh(row, second, known)
                if (other.time_us or 0.0) < (fresh.time_us or 0.0):
                    fresh, race = other, second
        if _slower_clock(row, fresh) > CLOCKS and (fresh.time_us or 0.0) > (row.time_us or 0.0) * (1 + MOST_LOSS):
            clocks = f"the GPU ran at {fresh.clock_mhz} MHz, and at {row.clock_mhz} MHz when the row was timed"
            if self._keeps_its_lead(row, fresh, race):  # its time is another GPU's still, so nothing is filed
                self._file(
                    row, HOLDS, f"{fresh.gain:.2f} x the default config, as before; {clocks}", time_us=fresh.time_us
                )
            else:
                self._file(row, UNTOLD, clocks)
            return
        self._weigh(row, fresh, race)

    def _keeps_its_lead(self, row: Row, fresh: Row, race: Race) -> bool:
        """Whether it is as far ahead of the default config as it says. Of a stale row that says little: the default may have
        lost as much as it."""
        if self.toolchain.stale(row) or len(race.times) < 2 or not row.gain or not fresh.gain:
            return False
        return fresh.gain >= row.gain / (1 + MOST_LOSS)

    def _fresh(self, row: Row, race: Race, known: Mapping[str, Any]) -> Row:
        alone = len(race.times) == 1
        is_default = alone and row.key.kernel != BACKWARD and row.config == self._rival(row)
        default_times = None if alone and not is_default else race.times[0]
        return evidence.measured(
            row.key, row.implementation, row.config, self._stamp(row), race.times[-1], default_times, row.strategy,
            **known, **evidence.watched(race),
        )  # fmt: skip

    def _lost(self, row: Row, fresh: Row, race: Race | None) -> str:
        """In what a row has lost, or ""."""
        loss = self._loss(row, fresh)
        if loss is not None and loss > MOST_LOSS:
            return f"{100 * loss:.1f} % slower than recorded" + (", by the model" if row.obtained == PREDICTED else "")
        if race is not None and len(race.times) > 1 and row.key.kernel != BACKWARD:
            gain = gain_over(race.times[0], race.times[-1])
            if gain.high < 1 / (1 + MOST_LOSS):
                return f"the default config is now faster, {1 / gain.median:.2f} x"
        return ""

    def _loss(self, row: Row, fresh: Row) -> float | None:
        """Share of its time that a row lost. What a lower clock than then explains is no loss; a higher one makes none."""
        if not row.time_us or fresh.time_us is None:
            return None
        raw = fresh.time_us / row.time_us - 1.0
        return raw if raw <= MOST_LOSS else min(raw, (1.0 + raw) / max(1.0, _slower_clock(row, fresh)) - 1.0)

    def _weigh(self, row: Row, fresh: Row, race: Race | None) -> None:
        lost = self._lost(row, fresh, race)
        loss = self._loss(row, fresh)
        self._file(row, LOST if lost else HOLDS, lost, time_us=fresh.time_us, loss=loss, fresh=fresh)

    # ---- the whole backward

    def _whole(self, row: Row, crew: Crew | None) -> None:
        """A whole backward holds as its kernels do, and is checked and timed as a whole where it can be launched."""
        if (odd := odd_key(row.key)) is not None:
            self._file(row, FAILS, f"refused: {odd}")
            return
        parts = {name: part for name, part in parts_of(row, self.among).items() if part}
        missing = set(STRATEGIES.get(row.strategy, (row.strategy,))) - parts.keys()
        if missing:
            self._file(row, UNTOLD, f"no {row.obtained} row for its {', '.join(sorted(missing))}")
            return
        for name, part in parts.items():
            of_part = self.findings.get(id(part))
            if of_part and of_part.state in (FAILS, UNTOLD):
                self._file(row, of_part.state, f"its {name}: {of_part.why}")
                return
        if row.obtained == PREDICTED:
            self._whole_predicted(row, parts)
        elif crew and self._measures(row):
            self._whole_timed(row, {name: part.config for name, part in parts.items()}, crew)
        else:
            self._file(row, UNTIMED, self._no_time(row))

    def _whole_predicted(self, row: Row, parts: Mapping[str, Row]) -> None:
        fresh = [found.fresh for part in parts.values() if (found := self.findings.get(id(part))) and found.fresh]
        if len(fresh) < len(parts):
            self._file(row, UNTIMED, "its kernels were not checked")
            return
        gpu = gpu_of_key(row.key, self.present)
        around = evidence.streaming_us(row.key.workload(), row.strategy, gpu)
        errors = evidence.worst_errors([part.errors for part in fresh])
        time_us = sum(part.time_us or 0.0 for part in fresh) + around
        whole = evidence.predicted(
            row.key, row.implementation, row.config, self._stamp(row), time_us, None, row.strategy, errors=errors
        )
        proof = max((part.proof for part in fresh), key=PROOFS.index)  # the weakest
        if row.default_time_us is not None:  # the split strategy of default configs: what it was compared with, then
            whole = replace(whole, default_time_us=row.default_time_us, gain=row.default_time_us / time_us)
        self._weigh(row, replace(whole, proof=proof), None)

    def _whole_timed(self, row: Row, configs: Mapping[str, Config], crew: Crew) -> None:
        spec, arch = row.key.specialization(), row.key.arch
        defaults = {name: dict(portable_config(name, spec, arch)) for name in ("fwd", *STRATEGIES[SPLIT])}
        mine = {name: dict(config) for name, config in configs.items()}
        what = (row.strategy, spec, *(point(config) for config in mine.values()))
        if what not in self._checked:
            arguments = ({"fwd": defaults["fwd"], **mine}, spec, row.strategy, "cuda")
            self._checked[what] = _launched(self._on_gpu(crew, self.functions.check_backward, arguments, CHECK_SECONDS))
        checked = self._checked[what]
        if checked.status:
            self._file(row, checked.state, checked.why, dangerous=checked.state == FAILS)
            return
        split = {name: defaults[name] for name in STRATEGIES[SPLIT]}
        contenders = [{"strategy": SPLIT, "configs": split}, {"strategy": row.strategy, "configs": mine}]
        race, said = self._race(row.key, contenders, crew)
        if race is None:
            self._file(row, said.state, said.why, dangerous=said.state == FAILS)
            return
        self._timed(row, race, {"errors": checked.result}, lambda: self._race(row.key, contenders, crew)[0])


def _slower_clock(row: Row, fresh: Row) -> float:
    """How many times the clock of today the one was that a row was timed at; 1 where one is not known."""
    return row.clock_mhz / fresh.clock_mhz if row.clock_mhz and fresh.clock_mhz else 1.0


def _launched(job: Job) -> _Said:
    """The result of a job that launches. A failure before its first launch is not the row's, unless the launch was refused."""
    said = _said(job)
    if said.status in BLAMELESS and not job.died and BINARY_REFUSED.search(said.why):
        return replace(said, status="launch_error")
    if said.status and not job.notes:
        return replace(said, status="failed")
    return said
