"""The points that one search task may try: legal ones, without those that failed before, and what the model makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from fa2tune.gpus import Gpu
from fa2tune.predicting import prior
from fa2tune.rows.pruned import BEFORE
from fa2tune.spec.key import DENSE_FAMILY, TuningKey
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import Variant, implementation_of, in_order
from fa2tune.tuning.search import guided
from fa2tune.tuning.search.candidates import Field, Legal, Point, legal, point
from fa2tune.tuning.search.failures import Failure, KernelFailures

#: The stored reason of what calls of a family leave out, such as bounds by the norms of all keys under a window.
OTHER_FORM = "not_of_the_family"
PRUNED = "hopeless"  #: the stored reason of what the model's estimate keeps from being compiled


class Space:
    """``runtime``: dimensions that a launch chooses, see ``Field``."""

    def __init__(
        self, variant: Variant, spec: Specialization, gpu: Gpu, keys: Sequence[TuningKey], failures: KernelFailures,
        runtime: Collection[str],
    ) -> None:  # fmt: skip
        allowed = legal(variant, spec, gpu)
        self.failed_before: dict[Point, Failure] = {point(c): f for c, f in failures.failing(allowed.configs)}
        configs = tuple(c for c in allowed.configs if point(c) not in self.failed_before)
        refused, family = dict(allowed.refused), keys[0].family
        if family != DENSE_FAMILY:  # what calls of this family leave out of a config is not searched
            suited = tuple(c for c in configs if variant.suited(keys[0].workload(), c) == c)
            refused |= {OTHER_FORM: len(configs) - len(suited)} if len(suited) < len(configs) else {}
            configs = suited
        self.legal = Legal(configs, refused)
        self.points = {point(config) for config in configs}
        estimates = [
            prior.estimates(variant, spec, configs, gpu, key.with_(family=DENSE_FAMILY).workload()) for key in keys
        ]
        #: nothing is known before a measurement (prior.py): all estimates are the same
        self._flat = not variant.modelled
        self._estimates = {
            key: dict(zip(map(point, configs), map(float, guesses), strict=True))
            for key, guesses in zip(keys, estimates, strict=True)
        }
        hopeful = guided.hopeful(estimates, [implementation_of(config) for config in configs])
        self.hopeful = {point(configs[index]) for index in hopeful}
        self.field = Field(variant.space, [configs[index] for index in hopeful], runtime)  #: what samplers choose from
        #: per key, the model's estimates of the field's points
        self.field_estimates = [[guesses[index] for index in hopeful] for guesses in estimates]

    def estimate_us(self, key: TuningKey, config: Config) -> float | None:
        """The model's estimate before the compile, if it has one."""
        return None if self._flat else self._estimates[key].get(point(config))

    def implementations(self) -> list[str]:
        """The implementations that the legal points are of."""
        return in_order(implementation_of(config) for config in self.legal.configs)

    def refused(self, known: Collection[Point]) -> dict[str, int]:
        """Reason -> points never compiled: by arithmetic, by the model's estimate, or as they failed in an earlier run.
        ``known``: points whose end is counted elsewhere."""
        slow = len(self.points - self.hopeful - set(known))
        return {**self.legal.refused, **({PRUNED: slow} if slow else {}), **self.left_out(known)}

    def left_out(self, known: Collection[Point]) -> dict[str, int]:
        """Points out of the search because they failed in an earlier run, but for those whose end is ``known``."""
        return dict(Counter(f"{f.status}{BEFORE}" for where, f in self.failed_before.items() if where not in known))
