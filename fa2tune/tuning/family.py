"""A family: one variant of a kernel for one dtype, head dim and mask. One binary of a config serves all its length buckets, so
candidates are proposed and compiled once per family, and timed and filed once per bucket."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fa2tune.compiling import compiler, fingerprint
from fa2tune.predicting import prior
from fa2tune.problem import Config, Specialization, TuningKey
from fa2tune.rows.row import PREDICTED, Row
from fa2tune.sharing.shelf import Shelf
from fa2tune.tuning import guided
from fa2tune.tuning.candidates import Field, Legal, Point, UnseenSampler, legal, point
from fa2tune.tuning.judge import Verdict
from fa2tune.tuning.ledger import Failure, Ledger
from fa2tune.tuning.search import Search
from fa2tune.tuning.study import KeyStudy, Outcome
from fa2tune.variant import WARP_SPECIALIZED, WAYS, Variant, way_of

if TYPE_CHECKING:
    from fa2tune.tuning.plan import Plan

HOPELESS = "hopeless"  #: the reason of what the model's estimate keeps from being compiled


@dataclass(eq=False)
class Family:
    variant: Variant
    spec: Specialization
    plan: Plan
    shelf: Shelf
    stamp: str  #: see KeyStudy; kernel and space hashes are added here
    ledger: Ledger
    retry: bool = False  #: strike out what failed before
    neighbours: list[Family] = field(default_factory=list)  #: same variant, other mask or other 16-bit dtype
    leader: Family | None = None  #: waits for it, and starts from its winners
    ready: list[tuple[Config, Verdict]] = field(default_factory=list)  #: compiled and waiting to be timed
    crowned: bool = False
    crowning: bool = False
    dropped: bool = False  #: another worker's by now

    def __post_init__(self) -> None:
        self.kernel = self.variant.filed_under
        gpu = self.plan.target.gpu
        self.failures = self.ledger.page(self.variant, self.spec, gpu.arch)
        if self.retry:
            self.failures.forget()
        allowed = legal(self.variant, self.spec, gpu)
        self.failed_before: dict[Point, Failure] = {point(c): f for c, f in self.failures.failing(allowed.configs)}
        self.legal = Legal(tuple(c for c in allowed.configs if point(c) not in self.failed_before), allowed.refused)
        self.legal_points = {point(config) for config in self.legal.configs}
        self.default = dict(self.variant.space.default(self.spec, gpu.arch))
        self.trials = self.plan.trials_of(self.spec, self.variant)
        stamp = (
            f"{self.stamp} kernel={fingerprint.kernel_hash(self.variant)} space={fingerprint.space_hash(self.variant)}"
        )
        if self.variant.name != self.kernel:
            stamp += f" variant={self.variant.name}"
        self.keys = [
            TuningKey(gpu.name, gpu.sm_count, gpu.arch, self.kernel, self.spec.dtype, self.spec.precision,
                      self.spec.head_dim, self.spec.head_dim_v, self.spec.causal, bucket)
            for bucket in self.plan.request.buckets
        ]  # fmt: skip
        request = self.plan.request
        seed = zlib.crc32(
            f"{request.seed} {self.title}".encode()
        )  # families explore different points, and share winners
        #: nothing is known before a measurement (prior.py): all estimates are the same
        self.flat = WARP_SPECIALIZED in self.variant.ways
        estimates = [
            prior.estimates(self.variant, self.spec, self.legal.configs, gpu, key.workload()) for key in self.keys
        ]
        self.estimates = {
            key: dict(zip(map(point, self.legal.configs), map(float, guesses), strict=True))
            for key, guesses in zip(self.keys, estimates, strict=True)
        }
        hopeful = guided.hopeful(estimates, [way_of(config) for config in self.legal.configs])
        self.hopeful = {point(self.legal.configs[index]) for index in hopeful}
        # where nothing is launched, each point has a prediction of its own: none comes for nothing
        free = compiler.runtime_names(self.variant) if self.plan.target.obtained != PREDICTED else ()
        points = Field(self.variant.space, [self.legal.configs[index] for index in hopeful], free)
        self.studies = {}
        for number, (key, guesses) in enumerate(zip(self.keys, estimates, strict=True)):
            own = [guesses[index] for index in hopeful]
            sampler = UnseenSampler(
                request.sampler, points, (seed + number) % (1 << 31), self.trials, own, self.default
            )
            self.studies[key] = KeyStudy(key, stamp, sampler, self.shelf, self.failures.forgotten)
        by_pointer = dict(self.variant.space.default(replace(self.spec, aligned=False), gpu.arch))
        self.search = Search(
            points, self.legal_points, list(self.studies.values()), self.trials, [self.default, by_pointer],
            self._elsewhere,
        )  # fmt: skip
        self.search.seeds.extend(self.search.twins([self.default]))
        self.verdicts: dict[Point, Verdict | None] = {}  #: by binary; None while it compiles
        self.waiting: dict[Point, list[Config]] = {}  #: by binary that compiles, its other launches

    def _elsewhere(self) -> list[Config]:
        """What is best in neighbouring families by now."""
        return [config for family in self.neighbours for config in family.search.best()]

    def tried(self) -> Set[Point]:
        """What has been compiled, for any length."""
        return self.search.tried()

    def binary(self, config: Config) -> Point:
        """What its binary depends on."""
        return point(compiler.binary_config(self.variant, config))

    def shares(self, config: Config) -> bool:
        """Whether its binary is known or under way; if not, it is from now on."""
        binary = self.binary(config)
        known = binary in self.verdicts
        if known and self.verdicts[binary] is None:
            self.waiting.setdefault(binary, []).append(config)
        self.verdicts.setdefault(binary, None)
        return known

    def compiled(self, config: Config, verdict: Verdict) -> list[Config]:
        """The other launches that waited for this one's binary."""
        binary = self.binary(config)
        if binary in self.verdicts:
            self.verdicts[binary] = verdict
        return self.waiting.pop(binary, [])

    @property
    def short(self) -> str:
        """What it is about, without the kernel: "bf16 128 causal"."""
        dims = f"{self.spec.head_dim}" + (
            f"/{self.spec.head_dim_v}" if self.spec.head_dim_v != self.spec.head_dim else ""
        )
        return f"{self.spec.dtype} {dims} {'causal' if self.spec.causal else 'full'}"

    @property
    def title(self) -> str:
        return f"{self.variant.name} {self.short}"

    def pruned(self, key: TuningKey) -> dict[str, int]:
        """Reason -> points of the space that fell to it: by arithmetic, in an earlier run, when compiled, or when launched."""
        hopeless = len(self.legal_points - self.hopeful - self.studies[key].outcomes.keys())
        refused = {**self.legal.refused, **({HOPELESS: hopeless} if hopeless else {})}
        return {**refused, **self.left_out(self.studies[key].outcomes), **self.studies[key].fates()}

    def left_out(self, told: Collection[Point]) -> dict[str, int]:
        """Points out of the search because they failed in an earlier run, but for those whose end ``told`` tells."""
        return dict(Counter(f"{f.fate}_before" for where, f in self.failed_before.items() if where not in told))

    def fates(self) -> dict[str, int]:
        """Reason -> candidates without a time at some length."""
        found = {where: o.fate for study in self.studies.values() for where, o in study.outcomes.items() if o.fate}
        wrong = set().union(*(study.disqualified for study in self.studies.values()))
        return dict(Counter([*found.values(), *("wrong_result" for _ in wrong)]))

    def kept(self) -> list[tuple[TuningKey, list[Row]]] | None:
        """The rows of every length, where an earlier run crowned these very trials."""
        found = [(key, study.kept("crowned", study.token)) for key, study in self.studies.items()]
        return None if any(rows is None for _, rows in found) else [(key, rows or []) for key, rows in found]

    def best_row(self, rows: Iterable[Row], key: TuningKey) -> Row | None:
        """The fastest of ``rows`` of this variant at the length of ``key``."""
        own = [row for row in rows if row.key == key.with_(kernel=self.kernel) and row.variant in self.variant.ways]
        return min(own, key=lambda row: row.rank_us, default=None)

    def propose(self, crowned: Iterable[Row]) -> Config | None:
        """The next config to compile and time, or None: the budget is spent, every point has been proposed, or the leader is
        still at work. ``crowned``: the rows of this run, the leader's among them when it is done."""
        if self.leader is not None:
            if not self.leader.crowned:
                return None
            theirs = {*self.leader.keys}
            won = Counter(
                point(row.config) for row in crowned if row.key in theirs and row.variant in self.variant.ways
            )
            self.search.start_from([dict(where) for where, _ in won.most_common()])
            self.leader = None
        return self.search.propose()

    @property
    def exhausted(self) -> bool:
        """Nothing is under way, and nothing more will be proposed."""
        return self.leader is None and self.search.exhausted

    def file(self, config: Config, outcomes: Iterable[tuple[TuningKey, Outcome]]) -> None:
        """File what became of a config, at every length."""
        for key, outcome in outcomes:
            guess = None if self.flat else self.estimates[key].get(point(config))
            self.studies[key].tell(replace(outcome, predicted_us=guess))
        self.search.filed(config)

    def refuse(self, config: Config, fate: str, why: str, binary: dict[str, int]) -> None:
        """The same end at every length."""
        self.file(config, ((key, Outcome(config, None, fate, why, binary)) for key in self.keys))

    def forward_default(self) -> Config:
        """The default forward config of this specialization: what a backward is checked behind."""
        return compiler.variant_named("fwd").space.default(self.spec, self.plan.target.gpu.arch)

    def ways(self) -> list[str]:
        """The ways of this family's legal points."""
        return sorted({way_of(config) for config in self.legal.configs}, key=WAYS.index)
