"""A family: one kernel for one dtype, head dim and mask. One binary of a config serves all its length buckets, so candidates
are proposed and compiled once per family, and timed and filed once per bucket."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fa2tune import compiler, fingerprint
from fa2tune.candidates import Field, Point, UnseenSampler, legal, point
from fa2tune.judge import Verdict
from fa2tune.problem import Config, Specialization, TuningKey
from fa2tune.row import Row
from fa2tune.study import KeyStudy, Outcome, Shelf
from fa2tune.variant import DESCRIPTOR

if TYPE_CHECKING:
    from fa2tune.plan import Plan

#: Every third proposal is a neighbour's winner, or the best so far with the other load variant, while there are any.
NEIGHBOUR_EVERY = 3


@dataclass(eq=False)
class Family:
    kernel: str
    spec: Specialization
    plan: Plan
    shelf: Shelf
    stamp: str  #: see KeyStudy; kernel and space hashes are added here
    seeds: deque[Config] = field(default_factory=deque)  #: to try first
    neighbours: list[Family] = field(default_factory=list)  #: same kernel, other mask or other 16-bit dtype
    leader: Family | None = None  #: waits for it, and starts from its winners
    in_flight: set[Point] = field(default_factory=set)  #: proposed, not yet filed
    ready: list[tuple[Config, Verdict]] = field(default_factory=list)  #: of these, compiled and waiting to be timed
    crowned: bool = False
    crowning: bool = False

    def __post_init__(self) -> None:
        self.variant = compiler.variant_named(self.kernel)
        gpu = self.plan.target.gpu
        self.legal = legal(self.variant, self.spec, gpu)
        self.legal_points = {point(config) for config in self.legal.configs}
        self.default = dict(self.variant.space.default(self.spec, gpu.arch))
        self.trials = self.plan.trials_of(self.spec)
        stamp = (
            f"{self.stamp} kernel={fingerprint.kernel_hash(self.variant)} space={fingerprint.space_hash(self.variant)}"
        )
        self.keys = [
            TuningKey(gpu.name, gpu.sm_count, gpu.arch, self.kernel, self.spec.dtype, self.spec.precision,
                      self.spec.head_dim, self.spec.head_dim_v, self.spec.causal, bucket)
            for bucket in self.plan.request.buckets
        ]  # fmt: skip
        request = self.plan.request
        seed = zlib.crc32(
            f"{request.seed} {self.title}".encode()
        )  # families explore different points, and share winners
        points = Field(self.variant.space, self.legal.configs)
        self.studies = {
            key: KeyStudy(
                key, stamp, UnseenSampler(request.sampler, points, (seed + number) % (1 << 31), self.trials), self.shelf
            )
            for number, key in enumerate(self.keys)
        }  # fmt: skip
        by_pointer = dict(self.variant.space.default(replace(self.spec, aligned=False), gpu.arch))
        self.seeds.extendleft([*self._twins([self.default]), by_pointer, self.default])
        self.proposed = len(self.tried())
        #: tried by an earlier run at some lengths only: costs no trial
        self.backfill = deque(
            dict(where)
            for where in sorted(self.tried(), key=repr)
            if not self._filed(dict(where)) and where in self.legal_points
        )

    def _filed(self, config: Config) -> bool:
        return all(point(config) in study.outcomes for study in self.studies.values())

    def tried(self) -> set[Point]:
        """What has been compiled, for any length."""
        return set().union(*(study.outcomes.keys() for study in self.studies.values()))

    @property
    def short(self) -> str:
        """What it is about, without the kernel: "bf16 128 causal"."""
        dims = f"{self.spec.head_dim}" + (
            f"/{self.spec.head_dim_v}" if self.spec.head_dim_v != self.spec.head_dim else ""
        )
        return f"{self.spec.dtype} {dims} {'causal' if self.spec.causal else 'full'}"

    @property
    def title(self) -> str:
        return f"{self.kernel} {self.short}"

    def pruned(self, key: TuningKey) -> dict[str, int]:
        """Reason -> points of the space that fell to it: by arithmetic, when compiled, or when launched."""
        return {**self.legal.refused, **self.studies[key].fates()}

    def fates(self) -> dict[str, int]:
        """Reason -> candidates without a time at some length."""
        found = {where: o.fate for study in self.studies.values() for where, o in study.outcomes.items() if o.fate}
        wrong = set().union(*(study.disqualified for study in self.studies.values()))
        return dict(Counter([*found.values(), *("wrong_result" for _ in wrong)]))

    def kept(self) -> list[tuple[TuningKey, list[Row]]] | None:
        """The rows of every length, where an earlier run crowned these very trials."""
        found = [(key, study.kept("crowned", str(len(study.outcomes)))) for key, study in self.studies.items()]
        return None if any(rows is None for _, rows in found) else [(key, rows or []) for key, rows in found]

    def best_row(self, rows: Iterable[Row], key: TuningKey) -> Row | None:
        """The fastest of ``rows`` for this kernel at the length of ``key``."""
        own = [row for row in rows if row.key == key.with_(kernel=self.kernel)]
        return min(own, key=lambda row: row.time_us or 0.0, default=None)

    def best_configs(self) -> list[Config]:
        """Every bucket's best so far, without repeats."""
        best = {point(ranked[0].config): ranked[0].config for s in self.studies.values() if (ranked := s.ranked())}
        return list(best.values())

    def propose(self) -> Config | None:
        """The next config to compile, or None: the budget is spent, every legal point has been proposed, or the leader is
        still at work."""
        if self.leader is not None:
            if not self.leader.crowned:
                return None
            self.seeds.extend(self.leader.best_configs())
            self.leader = None
        config = self._next()
        if config is not None:
            self.proposed += 1
            self.in_flight.add(point(config))
        return config

    def _next(self) -> Config | None:
        if self.backfill:
            return self.backfill.popleft()
        taken = self.tried() | self.in_flight
        if len(taken) >= self.trials:
            return None
        config = self._first_new(self.seeds, taken)
        if config is None and self.proposed % NEIGHBOUR_EVERY == 0:
            elsewhere = [config for family in self.neighbours for config in family.best_configs()]
            config = self._first_new(deque([*self._twins(self.best_configs()), *elsewhere]), taken)
        if config is None:
            config = self.studies[self.keys[self.proposed % len(self.keys)]].ask(taken)
        return config

    def _twins(self, configs: Iterable[Config]) -> list[Config]:
        """The same configs with the other way of loading: each way has a row of its own."""
        return [{**c, "LOADS": loads} for c in configs for loads in self.loads_variants() if loads != c["LOADS"]]

    def _first_new(self, configs: deque[Config], taken: set[Point]) -> Config | None:
        while configs:
            config = configs.popleft()
            if point(config) in self.legal_points and point(config) not in taken:
                return config
        return None

    @property
    def exhausted(self) -> bool:
        """Nothing is under way, and nothing more will be proposed."""
        if self.in_flight or self.backfill or self.leader is not None:
            return False
        return len(self.tried()) >= min(self.trials, len(self.legal.configs))

    def file(self, config: Config, outcomes: Iterable[tuple[TuningKey, Outcome]]) -> None:
        """File what became of a config, at every length."""
        for key, outcome in outcomes:
            self.studies[key].tell(outcome)
        self.in_flight.discard(point(config))

    def refuse(self, config: Config, fate: str, why: str, binary: dict[str, int]) -> None:
        """The same end at every length."""
        self.file(config, ((key, Outcome(config, None, fate, why, binary)) for key in self.keys))

    def star(self) -> list[Config]:
        """The legal configs one step from the default: each other value of each dimension, the rest as in the default."""
        steps = (
            {**self.default, name: value}
            for name, values in self.variant.space.dimensions.items()
            for value in values
            if value != self.default[name]
        )
        return [config for config in steps if point(config) in self.legal_points]

    def forward_default(self) -> Config:
        """The default forward config of this specialization: what a backward is checked behind."""
        return compiler.variant_named("fwd").space.default(self.spec, self.plan.target.gpu.arch)

    def loads_variants(self) -> list[str]:
        """The load variants of this family's legal points."""
        return sorted({config["LOADS"] for config in self.legal.configs}, key=lambda loads: loads == DESCRIPTOR)
