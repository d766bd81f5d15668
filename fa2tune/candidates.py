"""Which configs there are to try: the legal points of a space, and samplers that propose only points not tried yet."""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, TPESampler

from fa2tune import limits
from fa2tune.gpus import Gpu
from fa2tune.problem import Config, Specialization
from fa2tune.variant import SearchSpace, Variant

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

SAMPLERS = ("tpe", "random", "grid", "gp", "cmaes")
STARTUP_TRIALS_AT_MOST = 8  #: random ones, before a sampler with a model of the space trusts it

#: A config that can be a dictionary key or a member of a set.
Point = tuple[tuple[str, Any], ...]


def point(config: Config) -> Point:
    return tuple(sorted(config.items()))


@dataclass(frozen=True)
class Legal:
    """The points of a space that may be compiled for one specialization and GPU, and how many others fell to which rule."""

    configs: tuple[dict[str, Any], ...]
    refused: Mapping[str, int]  #: rule -> number of points


def legal(variant: Variant, spec: Specialization, gpu: Gpu) -> Legal:
    """Arithmetic only: nothing is compiled."""
    configs, refused = [], Counter[str]()
    for config in variant.space.points():
        refusal = limits.before_compile(variant, spec, config, gpu)
        if refusal is None:
            configs.append(config)
        else:
            refused[refusal.name] += 1
    return Legal(tuple(configs), dict(refused))


def distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    """Optuna's view: sizes are integers on a logarithmic scale, whatever has no order (a bool, a word, a register cap, whose 0
    means none) a choice. A sampler may propose integers in between; they are moved to the nearest legal point."""
    found: dict[str, BaseDistribution] = {}
    for name, values in space.dimensions.items():
        ordered = all(type(value) is int and value > 0 for value in values)
        if ordered and len(values) > 1:
            found[name] = IntDistribution(min(values), max(values), log=True)
        else:
            found[name] = CategoricalDistribution(values)
    return found


class Field:
    """The legal points of a space, as dictionary keys, and as vectors, so that the nearest one can be found."""

    def __init__(self, space: SearchSpace, configs: Sequence[Config]) -> None:
        self.configs = configs
        self.points = [point(config) for config in configs]
        self.distributions = distributions(space)
        #: dimension -> value -> its coordinates: on a logarithmic scale of length 1, or any two values 1 apart
        self._coordinates: dict[str, dict[Any, list[float]]] = {}
        for name, distribution in self.distributions.items():
            if isinstance(distribution, CategoricalDistribution):
                values = {
                    value: [0.5 * (value == other) for other in distribution.choices] for value in distribution.choices
                }
            else:
                assert isinstance(distribution, IntDistribution)
                low, high = math.log2(distribution.low), math.log2(distribution.high)
                numbers = range(distribution.low, distribution.high + 1)
                values = {value: [(math.log2(value) - low) / (high - low)] for value in numbers}
            self._coordinates[name] = values
        self.vectors = np.array([self._vector(config) for config in configs])

    def _vector(self, config: Config) -> list[float]:
        return [place for name, values in self._coordinates.items() for place in values[config[name]]]

    def nearest(self, wanted: Config, allowed: Sequence[int], rng: random.Random) -> Config:
        """Of the points with these indices; among equally near ones, any."""
        distances = np.abs(self.vectors[allowed] - self._vector(wanted)).sum(axis=1)
        closest = np.flatnonzero(distances <= distances.min() + 1e-9)
        return self.configs[allowed[rng.choice(list(closest))]]


def _inner(name: str, seed: int, trials: int) -> BaseSampler | None:
    """Optuna's sampler of that name; None where the unseen points themselves are drawn from."""
    startup = max(2, min(STARTUP_TRIALS_AT_MOST, trials // 3))
    if name == "tpe":
        return TPESampler(multivariate=True, constant_liar=True, n_startup_trials=startup, seed=seed)
    if name == "gp":
        return GPSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)
    if name == "cmaes":
        return CmaEsSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)
    return None


class UnseenSampler(BaseSampler):
    """Proposes legal points that are not in ``seen``, each at most once: what the inner sampler wants, moved to the nearest of
    them. (Asked alone, TPE repeats itself and none of Optuna's samplers knows constraints between dimensions.)"""

    def __init__(self, name: str, field: Field, seed: int, trials: int) -> None:
        """``trials``: about how many will be asked for."""
        if name not in SAMPLERS:
            raise ValueError(f"sampler: got {name!r}, allowed are {', '.join(SAMPLERS)}")
        self.name = name
        self.field = field
        self.rng = random.Random(seed)
        self.seen: Collection[Point] = ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # multivariate TPE, CMA-ES and GP, by Optuna's version
            self.inner = _inner(name, seed, trials)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.field.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        unseen = [index for index, candidate in enumerate(self.field.points) if candidate not in self.seen]
        if not unseen:
            raise LookupError("every legal point has been proposed")
        if self.name == "grid":
            return dict(self.field.configs[unseen[0]])
        if self.inner is None:
            return dict(self.field.configs[self.rng.choice(unseen)])
        wanted = self.inner.sample_relative(study, trial, self.inner.infer_relative_search_space(study, trial))
        for name, distribution in self.field.distributions.items():
            if name not in wanted:
                wanted[name] = self.inner.sample_independent(study, trial, name, distribution)
        return dict(self.field.nearest(wanted, unseen, self.rng))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError(f"{param_name} is always sampled relative")

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        if self.inner is not None:
            self.inner.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: Any, values: Sequence[float] | None) -> None:
        if self.inner is not None:
            self.inner.after_trial(study, trial, state, values)
