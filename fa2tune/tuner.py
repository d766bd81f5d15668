"""The tuner: asks studies for configs, has them compiled ahead in parallel, times or predicts them, crowns the winners.

Child processes do the work (``worker.py``): one crew compiles and judges, another launches, on the GPU (``measured.py``)
or, for a GPU that is not there, in Triton's interpreter (``predicted.py``). This process only keeps the books.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from fa2tune import compiler, crown, fingerprint, ledger, reader, worker
from fa2tune.books import Books, Hands, Report, Watcher, describe, fate_of
from fa2tune.family import Family
from fa2tune.judge import Verdict
from fa2tune.measured import HEAT, Measured, Task
from fa2tune.plan import Plan, TuneRequest, make_plan
from fa2tune.predicted import Predicted
from fa2tune.problem import Config, Specialization
from fa2tune.row import PREDICTED
from fa2tune.search import winners
from fa2tune.store import Store
from fa2tune.study import Shelf
from fa2tune.variant import Variant
from fa2tune.worker import Crew, Job

#: Seconds; a compile that takes longer costs its candidate: so many times the slowest that came to an end in this run, within
#: bounds, for all depends on the host and on what else it does.
COMPILE_PATIENCE, COMPILE_AT_LEAST, COMPILE_AT_FIRST, COMPILE_AT_MOST = 6.0, 20.0, 40.0, 120.0
COMPILE_MEMORY = 4 << 30  #: bytes that a compile may hold
LOOKAHEAD = 1  #: configs under way per compiling core: more waste cores less, but know less when they are proposed
#: What predictions come from, and what is compiled at all on their word.
MODEL_FILES = ("model.py", "prior.py", "limits.py", "tiles.py", "sass.py", "gpus.py")
LEADERS_SHARE = 0.75  #: of a time budget, when other dtypes wait for the winners


def tune(request: TuneRequest, watcher: Watcher | None = None, hands: Hands | None = None) -> Report:
    """Tune what ``request`` asks and put the rows into its cache file. Ctrl-C ends early and keeps what was done.

    ValueError: a bad request, before anything is compiled."""
    return Run(make_plan(request), watcher or Watcher(), hands or Hands()).go()


def _model_hash() -> str:
    """Of what predictions come from: they are worth nothing when it changes."""
    folder = Path(__file__).parent
    text = b"".join((folder / name).read_bytes() for name in MODEL_FILES)
    return hashlib.sha256(text).hexdigest()[:16]


class Run:
    """One run of the tuner."""

    def __init__(self, plan: Plan, watcher: Watcher, hands: Hands) -> None:
        self.plan = plan
        self.begun = time.monotonic()
        obtained = plan.target.obtained
        toolchain = crown.Toolchain(obtained)
        if obtained != PREDICTED:
            import torch

            toolchain = crown.Toolchain(obtained, torch.cuda.get_device_name(), fingerprint.driver_version())
        self.books = Books(plan, watcher, hands, Store(plan.cache), toolchain, Report(plan))
        self.shelf = Shelf(plan.studies)
        triton = toolchain.stamp()["triton"]
        self.ledger = ledger.Ledger(plan.ledger, ledger.Toolchain(triton, toolchain.obtained_on, toolchain.driver))
        self.families = self._families()
        self.compilers = Crew(plan.workers, {"OMP_NUM_THREADS": "1"}, memory=COMPILE_MEMORY)
        self.slowest_compile = 0.0
        self.way = Predicted(self.books) if obtained == PREDICTED else Measured(self.books)
        self.tasks: list[Task] = []
        self.whole_begun: set[Specialization] = set()
        self.now = ""

    def _families(self) -> list[Family]:
        toolchain = self.books.toolchain
        stamp = f"{toolchain.obtained} triton={toolchain.stamp()['triton']}"
        if toolchain.obtained == PREDICTED:
            stamp += f" model={_model_hash()}"
        else:  # times, and rows kept with them, are of this GPU under this driver
            stamp += f" on={toolchain.obtained_on.replace(' ', '_')} driver={toolchain.driver}"
        known = [row for layer in reader.layers() for row in layer.rows]
        families = []
        gpu = self.plan.target.gpu
        for spec in self.plan.specializations():
            for variant in self._variants():
                family = Family(variant, spec, self.plan, self.shelf, stamp, self.ledger)
                own = [row for row in known if row.variant in variant.ways]
                family.search.seeds.extend(winners(own, family.kernel, spec, gpu.arch))
                if family.legal.configs:
                    families.append(family)
                elif not variant.serves:  # another way of a kernel need not have one
                    reasons = ", ".join(f"{rule} {n}" for rule, n in family.pruned(family.keys[0]).items())
                    self.books.watcher.line(f"{family.title}: no legal config ({reasons})")
        for family in families:
            spec = family.spec
            alike = [f for f in families if f.variant is family.variant and f.spec.head_dim == spec.head_dim]
            # the other mask, or the other dtype; not both
            family.neighbours = [f for f in alike if (f.spec.dtype != spec.dtype) != (f.spec.causal != spec.causal)]
            leader = self.plan.leader_of(spec)
            family.leader = next((f for f in alike if f.spec.dtype == leader and f.spec.causal == spec.causal), None)
        return families

    def _variants(self) -> list[Variant]:
        """What is searched: every variant of every kernel, of which only the portable ones can be predicted."""
        predicted = self.books.toolchain.obtained == PREDICTED
        return [
            variant for kernel in self.plan.kernels for variant in compiler.variants_of(kernel)
            if not variant.serves or (not predicted and variant.min_arch <= self.plan.target.gpu.arch <= variant.max_arch)
        ]  # fmt: skip

    def go(self) -> Report:
        """Until everything is crowned, or Ctrl-C."""
        report = self.books.report
        self.books.watcher.planned(self.plan, self.families)
        self._tell_left_out()
        try:
            while self._busy():
                for job in worker.wait([self.compilers, self.way.crew], 0.5):
                    job.tag(job)
                self._progress()
        except KeyboardInterrupt:
            report.interrupted = True
        finally:
            self.compilers.close()
            self.way.crew.close()
            self.shelf.close()
        for family in self.families:
            report.fates.update(family.fates())
        report.seconds = time.monotonic() - self.begun
        return report

    def _tell_left_out(self) -> None:
        left_out = Counter[str]()
        for family in self.families:
            left_out.update(family.left_out(family.tried()))
        if left_out:
            reasons = ", ".join(f"{reason} {count}" for reason, count in left_out.items())
            self.books.watcher.line(
                f"left out, since they failed under this toolchain: {reasons} (--retry-failed tries them again)"
            )

    def _busy(self) -> bool:
        self._propose()
        while len(self.tasks) < self.way.tasks_at_once and (task := self._next_task()) is not None:
            self.tasks.append(task)
            self._advance(task, None)
        return bool(self.compilers.load or self.tasks)

    def _progress(self) -> None:
        done = sum(len(family.tried()) for family in self.families)
        total = sum(len(f.tried()) + f.search.goal - f.search.binaries for f in self.families)
        fates = Counter[str]()
        for family in self.families:
            fates.update(family.fates())
        self.books.watcher.progress(done, total, self.now, fates)

    # ---- proposing and compiling

    def _time_is_up(self, family: Family) -> bool:
        """Whether the time budget leaves no room for another candidate of this family."""
        budget = self.plan.time_budget_s
        if budget is None:
            return False
        # the variants of a kernel share their finals
        reserve = self.way.reserve(len({(f.kernel, f.spec) for f in self.families if not f.crowned}))
        leads = any(f.leader is family for f in self.families)
        return time.monotonic() - self.begun > max(0.0, budget - reserve) * (LEADERS_SHARE if leads else 1.0)

    def _propose(self) -> None:
        """Keep the compilers busy: the families furthest from their number of trials first."""
        open_ = [f for f in self.families if not f.crowning and not self._time_is_up(f)]
        # no further ahead of what is timed than that: a proposal should know how the others went
        ahead = HEAT + -(-self.plan.workers // max(1, len(open_)))
        while open_ and self.compilers.load < LOOKAHEAD * self.plan.workers:
            family = min(open_, key=lambda f: f.search.binaries / f.trials)
            config = family.propose() if len(family.search.in_flight) < ahead else None
            if config is None:
                open_.remove(family)
                continue
            failure = family.failures.of(config)
            if failure is not None:  # in this run, for another config of the same binary
                family.refuse(config, failure.fate, failure.why, {})
                continue
            problems = self.way.problems(family)
            if not problems and family.shares(config):
                self._share(family, config)
                continue
            arguments = (family.kernel, family.spec, config, self.plan.target.gpu, problems)
            tag = partial(self._judged, family, config)
            self.compilers.submit(Job(self.books.hands.judge, arguments, self._compile_seconds(), tag=tag))

    def _compile_seconds(self) -> float:
        """The deadline of a compile."""
        if not self.slowest_compile:
            return COMPILE_AT_FIRST
        return min(COMPILE_AT_MOST, max(COMPILE_AT_LEAST, COMPILE_PATIENCE * self.slowest_compile))

    def _judged(self, family: Family, config: Config, job: Job) -> None:
        report = self.books.report
        report.compiled += 1
        report.compile_seconds = time.monotonic() - self.begun
        if job.failure is not None:
            self.books.lost(job, f"compiling {family.title} {describe(config)}")
            verdict = Verdict(fate_of(job), job.failure)
        else:
            self.slowest_compile = max(self.slowest_compile, job.took)
            verdict = job.result
        if verdict.fate:
            family.failures.add(ledger.COMPILE, config, verdict.fate, verdict.why)
        for launch in [config, *family.compiled(config, verdict)]:
            self._take(family, launch, verdict)

    def _share(self, family: Family, config: Config) -> None:
        """Another launch of a binary that is here, or will be."""
        verdict = family.verdicts[family.binary(config)]
        if verdict is not None:
            self._take(family, config, verdict)

    def _take(self, family: Family, config: Config, verdict: Verdict) -> None:
        if verdict.fate:
            family.refuse(config, verdict.fate, verdict.why, verdict.binary)
        else:
            self.way.judged(family, config, verdict)

    # ---- launching

    def _next_task(self) -> Task | None:
        for family in self.families:
            # the variants of a kernel are crowned together, in one race
            rivals = [f for f in self.families if (f.kernel, f.spec) == (family.kernel, family.spec)]
            if not family.crowning and all(map(self._done, rivals)):
                for rival in rivals:
                    rival.crowning = True
                return self.way.crown(rivals)
        for members in self._whole_backwards():
            self.whole_begun.add(members[0].spec)
            return self.way.whole(members)
        return self.way.search(self.families)

    def _done(self, family: Family) -> bool:
        """Whether nothing more will be timed for it."""
        done = family.exhausted or (self._time_is_up(family) and not family.search.in_flight)
        return done and (family.leader is None or family.leader.crowned)

    def _whole_backwards(self) -> list[list[Family]]:
        """Specializations whose backward kernels are all crowned, and not yet put together."""
        kernels = {kernel for road in crown.ROADS.values() for kernel in road}
        by_spec: dict[Specialization, list[Family]] = {}
        for family in self.families:
            if family.kernel in kernels and family.crowned and family.spec not in self.whole_begun:
                by_spec.setdefault(family.spec, []).append(family)
        return [members for members in by_spec.values() if {family.kernel for family in members} == kernels]

    def _advance(self, task: Task, job: Job | None) -> None:
        """Run a task up to its next job, or to its end."""
        try:
            following: Any = next(task) if job is None else task.send(job)
        except StopIteration:
            self.tasks.remove(task)
            self._hear()
            return
        following.tag = partial(self._advance, task)
        self.way.crew.submit(following)

    def _hear(self) -> None:
        """What the progress line says: the last row."""
        if self.books.report.rows:
            row = self.books.report.rows[-1]
            self.now = f"{row.key.kernel} {row.key.bucket}: {row.tflops:.0f} TFLOP/s"
