"""A search task: one variant of a kernel for one dtype, head dim and mask. One binary of a config serves all its length
buckets, so candidates are proposed and compiled once per task, and timed and filed once per bucket."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from fa2tune.compiling import compiler, fingerprint, registry
from fa2tune.rows.row import PREDICTED, Row
from fa2tune.sharing.study_writer import StudyWriter
from fa2tune.spec.key import DENSE_FAMILY, TuningKey
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import Variant
from fa2tune.tuning.request.plan import TuningPlan
from fa2tune.tuning.search.binaries import Binaries
from fa2tune.tuning.search.candidates import Point, UnseenSampler, point
from fa2tune.tuning.search.compile_check import CompileResult
from fa2tune.tuning.search.failures import FailureRecord
from fa2tune.tuning.search.proposals import Search
from fa2tune.tuning.search.space import Space
from fa2tune.tuning.search.study import SELECTED, KeyStudy, TrialOutcome


@dataclass(eq=False)
class SearchTask:
    """What may be tried is in ``space``, what was compiled in ``binaries``, what became of it in ``studies``, what comes next
    in ``search``. ``selecting``, ``selected``: whether its rows are being chosen, or are."""

    variant: Variant
    spec: Specialization
    plan: TuningPlan
    writer: StudyWriter
    stamp: str  #: see KeyStudy; kernel and space hashes are added here
    failure_record: FailureRecord
    retry: bool = False  #: strike out what failed before
    neighbours: list[SearchTask] = field(default_factory=list)  #: same variant, other mask or other 16-bit dtype
    leader: SearchTask | None = None  #: waits for it, and starts from its winners
    ready: list[tuple[Config, CompileResult]] = field(default_factory=list)  #: compiled and waiting to be timed
    selected: bool = False
    selecting: bool = False
    dropped: bool = False  #: another worker's by now
    #: config -> errors of its results, where only these may be tried (``proven.py``)
    proven: Mapping[Point, Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.kernel = self.variant.serves
        gpu = self.plan.target.gpu
        self.keys = self.plan.keys(self.spec, self.kernel)
        self.trials = self.plan.trials_of(self.spec, self.variant)
        self.default = self._suited(self.variant.space.default(self._addressed, gpu.arch))
        self.failures = self.failure_record.of_kernel(self.variant, self.spec, gpu.arch)
        if self.retry:
            self.failures.forget()
        # where nothing is launched, each point has a prediction of its own: none comes for nothing
        free = compiler.runtime_names(self.variant) if self.plan.target.obtained != PREDICTED else ()
        self.space = Space(self.variant, self.spec, gpu, self.keys, self.failures, free)
        self.binaries = Binaries(self.variant)
        self.studies = self._studies()
        by_pointer = self._suited(self.variant.space.default(replace(self.spec, aligned=False), gpu.arch))
        self.search = Search(
            self.space.field, self.space.points, list(self.studies.values()), self.trials, [self.default, by_pointer],
            self._elsewhere,
        )  # fmt: skip
        self.search.seeds.extend(self.search.twins([self.default]))
        self.kept_trials = len(self.tried())  #: those of earlier runs

    def keep_to(self, proven: Mapping[Point, Mapping[str, Any]] | None) -> None:
        """Try only these configs, whose numerics are known; None: any."""
        self.proven = proven
        if proven is not None:
            self.search.only([dict(where) for where in proven])
            self.trials = max(1, self.search.trials)

    @property
    def _addressed(self) -> Specialization:
        """By which tensors a default is chosen: no descriptor has packed sequences."""
        return replace(self.spec, aligned=False) if self.variant.portable and self.spec.ragged else self.spec

    def _suited(self, config: Config) -> dict[str, Any]:
        """As a call of this family has it."""
        return dict(config if self.plan.request.family == DENSE_FAMILY else self.variant.suited(self.workload, config))

    @property
    def workload(self) -> Problem:
        """Of the first length: what a config has to leave out hangs on the family alone."""
        return self.keys[0].workload()

    def seed(self, configs: Sequence[Config]) -> None:
        """Try these early."""
        self.search.seeds.extend(map(self._suited, configs))

    def _studies(self) -> dict[TuningKey, KeyStudy]:
        """A study per length, with a sampler of its own."""
        stamp = f"{self.stamp} kernel={fingerprint.kernel_hash(self.variant, self.spec.mask)}"
        stamp += f" space={fingerprint.space_hash(self.variant)}"
        if not self.variant.portable:
            stamp += f" variant={self.variant.short_name}"
        request = self.plan.request
        about = f"{request.seed} {self.variant.short_name} {self.short}"  # tasks explore different points, and share winners
        seed = zlib.crc32(about.encode())
        studies = {}
        for number, (key, estimates) in enumerate(zip(self.keys, self.space.field_estimates, strict=True)):
            sampler = UnseenSampler(
                request.sampler, self.space.field, (seed + number) % (1 << 31), self.trials, estimates, self.default
            )
            studies[key] = KeyStudy(key, stamp, sampler, self.writer, self.failures.forgotten)
        return studies

    def _elsewhere(self) -> list[Config]:
        """What is best in neighbouring tasks by now."""
        return [config for task in self.neighbours for config in task.search.best()]

    def tried(self) -> Set[Point]:
        """What has been compiled, for any length."""
        return self.search.tried()

    @property
    def short(self) -> str:
        """What it is about, without the kernel: "bf16 128 causal"."""
        dims = f"{self.spec.head_dim}" + (
            f"/{self.spec.head_dim_v}" if self.spec.head_dim_v != self.spec.head_dim else ""
        )
        return f"{self.spec.dtype} {dims} {self.keys[0].kind}"

    @property
    def title(self) -> str:
        """With its implementation's path: "portable/fwd bf16 128 causal"."""
        return f"{self.variant.name} {self.short}"

    @property
    def of_kernel(self) -> str:
        """With the kernel, which all its implementations have: "fwd bf16 128 causal"."""
        return f"{self.kernel} {self.short}"

    def pruned(self, key: TuningKey) -> dict[str, int]:
        """Reason -> points of the space that fell to it: by arithmetic, in an earlier run, when compiled, or when launched."""
        study = self.studies[key]
        return {**self.space.refused(study.outcomes), **study.statuses()}

    def statuses(self) -> dict[str, int]:
        """Reason -> candidates without a time at some length."""
        found = {where: o.status for study in self.studies.values() for where, o in study.outcomes.items() if o.status}
        wrong = set().union(*(study.disqualified for study in self.studies.values()))
        return dict(Counter([*found.values(), *("wrong_result" for _ in wrong)]))

    def kept(self) -> list[tuple[TuningKey, list[Row]]] | None:
        """The rows of every length, where an earlier run selected them from these very trials."""
        found = [(key, study.kept(SELECTED, study.token)) for key, study in self.studies.items()]
        return None if any(rows is None for _, rows in found) else [(key, rows or []) for key, rows in found]

    def propose(self, rows: Iterable[Row]) -> Config | None:
        """The next config to compile and time, or None: the budget is spent, every point has been proposed, or the leader is
        still at work. ``rows``: of this run, the leader's among them when it is done."""
        if self.leader is not None:
            if not self.leader.selected:
                return None
            theirs = {*self.leader.keys}
            won = Counter(
                point(row.config)
                for row in rows
                if row.key in theirs and row.implementation in self.variant.implementations
            )
            self.search.start_from([dict(where) for where, _ in won.most_common()])
            self.leader = None
        return self.search.propose()

    @property
    def exhausted(self) -> bool:
        """Nothing is under way, and nothing more will be proposed."""
        return self.leader is None and self.search.exhausted

    def file(self, config: Config, outcomes: Iterable[tuple[TuningKey, TrialOutcome]]) -> None:
        """File what became of a config, at every length."""
        for key, outcome in outcomes:
            self.studies[key].tell(replace(outcome, predicted_us=self.space.estimate_us(key, config)))
        self.search.filed(config)

    def refuse(self, config: Config, status: str, why: str, binary: dict[str, int | str]) -> None:
        """The same end at every length."""
        self.file(config, ((key, TrialOutcome(config, None, status, why, binary)) for key in self.keys))

    def forward_default(self) -> Config:
        """The default forward config of this specialization: what a backward is checked behind."""
        return registry.portable_config("fwd", self.spec, self.plan.target.gpu.arch)
