"""What to try next, for one kernel, dtype, head dim and mask, at all its lengths at once.

In this order: points that an earlier run tried at some lengths only; other launches of a binary that turned out good, which
cost no compile; seeds (the default, what serves these keys, winners found elsewhere); now and then the best of a neighbour, or
the best so far of the other portable implementation; else what the sampler of one of the lengths wants, in turns.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Any

from fa2tune.rows.row import PREDICTED, Row
from fa2tune.spec.key import TuningKey, row_mask_of
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import implementation_of
from fa2tune.tuning.search.candidates import Field, Point, point
from fa2tune.tuning.search.study import KeyStudy, TrialOutcome

#: Every third proposal is a neighbour's winner, or the best so far with the other load variant, while there are any.
NEIGHBOUR_EVERY = 3
#: A binary this close to the best of its load variant at some length is tried with its other launches, too.
LAUNCHES_WITHIN = 1.08
WINNERS = 4  #: for other GPUs and lengths, out of cache files, that a search starts from


def incumbents(rows: Iterable[Row], keys: Collection[TuningKey]) -> Sequence[Config]:
    """What serves these very keys by now, out of cache files: raced with the others, so that a search ends with no less than it
    began with."""
    return list({point(row.config): row.config for row in rows if row.key in keys}.values())


def winners(rows: Iterable[Row], kernel: str, spec: Specialization, arch: int) -> Sequence[Config]:
    """What won elsewhere for this kernel, head dim and mask, out of cache files: on the most similar architecture first,
    measured before predicted, of the same dtype first, and of these what won at the most lengths."""
    wanted = (kernel, row_mask_of(spec), spec.head_dim, spec.head_dim_v)
    near: dict[tuple[Any, ...], Counter[Point]] = {}
    for row in rows:
        key = row.key
        if (key.kernel, key.mask, key.head_dim, key.head_dim_v) == wanted:
            rank = (abs(key.arch - arch), row.obtained == PREDICTED, key.dtype != spec.dtype)
            near.setdefault(rank, Counter())[point(row.config)] += 1
    found = [where for _, counted in sorted(near.items()) for where, _ in counted.most_common()]
    return [dict(where) for where in dict.fromkeys(found)][:WINNERS]


class Search:
    """Proposes points, each at most once, until so many binaries have been tried or none is left."""

    def __init__(
        self, field: Field, allowed: Collection[Point], studies: Sequence[KeyStudy], trials: int,
        seeds: Sequence[Config] = (), elsewhere: Callable[[], Iterable[Config]] = tuple,
    ) -> None:  # fmt: skip
        """``field``: what samplers choose from; ``allowed``: what a seed may be, hopeless or not;
        ``trials``: binaries; ``seeds``: to try first, the default before all; ``elsewhere``: what is best for others by now."""
        self.field, self.allowed, self.studies, self.trials = field, allowed, studies, trials
        self.seeds = deque(seeds)
        self.elsewhere = elsewhere
        self.alone = False  #: nothing but the seeds
        self.in_flight: set[Point] = set()  #: proposed, not yet filed
        self.launches: deque[Config] = deque()  #: of good binaries, not yet proposed
        self.siblings: dict[Point, list[Config]] = {}
        for index, binary in enumerate(field.binaries):
            self.siblings.setdefault(binary, []).append(field.configs[index])
        self._tried: set[Point] = set().union(*(study.outcomes.keys() for study in studies))
        self._binaries = set(map(field.binary, self._tried))
        tried = self.tried()
        self.proposed = len(tried)
        first = {point(config) for config in seeds[:1]}  # the default, against which the others race
        self.backfill = deque(
            dict(where)
            for where in sorted(tried, key=lambda where: (where not in first, repr(where)))
            if where in allowed and any(where not in study.outcomes for study in studies)
        )

    def start_from(self, winners: Sequence[Config]) -> None:
        """Try these right after the default, all of them however few trials there are; none, where only the seeds may be tried.
        Nothing has been proposed yet."""
        if self.alone:
            return
        first = self._put_first(winners)
        self.trials = max(self.trials, len(self._binaries | self._binaries_of(first)))

    def also(self, configs: Sequence[Config]) -> None:
        """Try these right after the default, beside so many trials. Nothing has been proposed yet."""
        self._put_first(configs)
        self.trials += len(self._binaries_of(configs) - self._binaries)

    def only(self, configs: Sequence[Config]) -> None:
        """Try these and no others. Nothing has been proposed yet."""
        self.seeds = deque(configs)
        self.trials = len(self._binaries_of(configs))
        self.alone = True

    def _put_first(self, configs: Sequence[Config]) -> list[Config]:
        """The default and these, which now come right behind it."""
        first = [*([self.seeds.popleft()] if self.seeds else []), *configs]
        self.seeds.extendleft(reversed(first))
        return first

    def _binaries_of(self, configs: Iterable[Config]) -> set[Point]:
        """Of those that may be seeds."""
        return {self.field.binary(point(config)) for config in configs if point(config) in self.allowed}

    def tried(self) -> Set[Point]:
        """What has been filed, for any length."""
        return self._tried

    @property
    def binaries(self) -> int:
        """Binaries tried or under way."""
        return len(self._binaries)

    @property
    def goal(self) -> int:
        """Binaries there will be at the end."""
        return max(self.binaries, min(self.trials, len(self.siblings)))

    @property
    def exhausted(self) -> bool:
        """Nothing is under way, and nothing more will be proposed."""
        if self.in_flight or self.backfill or self.launches:
            return False
        if self.alone:
            return not any(point(config) in self.allowed and point(config) not in self._tried for config in self.seeds)
        return self.binaries >= self.trials or self.field.index.keys() <= self.tried()

    def propose(self) -> Config | None:
        """The next config to compile and time, or None: the budget is spent, or every point has been proposed."""
        config = self._next()
        if config is not None:
            self.proposed += 1
            self.in_flight.add(point(config))
            self._binaries.add(self.field.binary(point(config)))
        return config

    def _next(self) -> Config | None:
        if self.backfill:
            return self.backfill.popleft()
        taken = self.tried() | self.in_flight
        config = self._first_new(self.launches, taken)
        if config is not None:
            return config
        if self.alone:
            return self._first_new(self.seeds, taken)
        if self.binaries >= self.trials:
            return None
        config = self._first_new(self.seeds, taken)
        if config is None and self.proposed % NEIGHBOUR_EVERY == 0:
            config = self._first_new(deque([*self.twins(self.best()), *self.elsewhere()]), taken)
        if config is None:
            config = self.studies[self.proposed % len(self.studies)].ask(taken)
        return config

    def _first_new(self, configs: deque[Config], taken: Set[Point]) -> Config | None:
        while configs:
            config = configs.popleft()
            if point(config) in self.allowed and point(config) not in taken:
                return config
        return None

    def best(self) -> list[Config]:
        """Every length's best so far, without repeats."""
        found = (ranked[0].config for study in self.studies if (ranked := study.ranked()))
        return list({point(config): config for config in found}.values())

    def twins(self, configs: Iterable[Config]) -> list[Config]:
        """The same configs, but of the kernel's other implementation: each has a row of its own."""
        names = sorted({implementation_of(config) for config in self.field.configs})
        return [{**config, "LOADS": name} for config in configs for name in names if name != implementation_of(config)]

    def filed(self, config: Config) -> None:
        """Its outcomes are in the studies. If it is good anywhere, the other launches of its binary come next."""
        where = point(config)
        self.in_flight.discard(where)
        self._tried.add(where)
        self._binaries.add(self.field.binary(where))
        if any(self._is_good(study, study.outcomes.get(where)) for study in self.studies):
            self.launches.extend(self.siblings.get(self.field.binary(where), ()))

    def _is_good(self, study: KeyStudy, outcome: TrialOutcome | None) -> bool:
        if outcome is None or outcome.time_us is None:
            return False
        return outcome.time_us <= LAUNCHES_WITHIN * study.best_us(outcome.implementation)
