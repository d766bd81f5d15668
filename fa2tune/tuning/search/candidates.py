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
from optuna.trial import TrialState

from fa2tune.compiling import limits, support
from fa2tune.gpus import Gpu
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import SearchSpace, Variant, implementation_of
from fa2tune.tuning.request.plan import SAMPLERS
from fa2tune.tuning.search import guided

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

OTHER_IMPLEMENTATION_EVERY = 5  #: proposals: one is of an implementation that the best so far is not of
GLOBAL_EVERY = 2  #: proposals: one looks at the whole space, the others one step around the best so far
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
    unsupported = support.unsupported(variant, spec, gpu)
    for config in variant.space.points():
        refusal = unsupported or limits.refused_config(variant, spec, config, gpu)
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
    """The legal points of a space, as dictionary keys, and as vectors, so that the nearest one can be found. ``runtime``:
    dimensions that a launch chooses; points that differ there alone share a binary."""

    def __init__(self, space: SearchSpace, configs: Sequence[Config], runtime: Collection[str] = ()) -> None:
        self.configs = configs
        self.points = [point(config) for config in configs]
        self.index = {where: index for index, where in enumerate(self.points)}
        self.runtime = frozenset(runtime)
        self.binaries = [self.binary(where) for where in self.points]  #: per point, the part that its binary depends on
        #: per point, the rest
        self.launches = [tuple(part for part in where if part[0] in self.runtime) for where in self.points]
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
        widths = [len(next(iter(values.values()))) for values in self._coordinates.values()]
        ends = np.cumsum(widths)
        #: the same as numbers that only tell whether values of the dimensions a binary depends on are equal
        self.codes = np.array(
            [[values.index(config[name]) for name, values in space.dimensions.items() if name not in runtime]
             for config in configs]
        )  # fmt: skip
        #: per dimension, its columns of ``vectors``
        self.columns = [slice(int(end) - width, int(end)) for end, width in zip(ends, widths, strict=True)]

    def binary(self, where: Point) -> Point:
        """The part of a point that its binary depends on."""
        return tuple(part for part in where if part[0] not in self.runtime)

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
    """Proposes legal points that are not in ``seen``, each at most once: what ``guided`` chooses among them, or what one of
    Optuna's samplers wants, moved to the nearest of them. (Asked alone, TPE repeats itself and none of Optuna's samplers knows
    constraints between dimensions.)"""

    def __init__(
        self, name: str, field: Field, seed: int, trials: int, estimates: Sequence[float] | None = None,
        start: Config | None = None,
    ) -> None:  # fmt: skip
        """``trials``: about how many will be asked for; ``estimates``: the model's times of the field's points; ``start``: a
        config known to be good."""
        if name not in SAMPLERS:
            raise ValueError(f"sampler: got {name!r}, allowed are {', '.join(SAMPLERS)}")
        self.name = name
        self.field = field
        self.start = field.index.get(point(start)) if start is not None else None
        self.rng = random.Random(seed)
        self.seen: Collection[Point] = ()
        self.process = guided.Process(field.vectors, field.columns, estimates) if name == "guided" else None
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
        if self.process is not None:
            return dict(self.field.configs[self._most_promising(study, unseen, self.process)])
        if self.name == "grid":
            return dict(self.field.configs[unseen[0]])
        if self.inner is None:
            return dict(self.field.configs[self.rng.choice(unseen)])
        wanted = self.inner.sample_relative(study, trial, self.inner.infer_relative_search_space(study, trial))
        for name, distribution in self.field.distributions.items():
            if name not in wanted:
                wanted[name] = self.inner.sample_independent(study, trial, name, distribution)
        return dict(self.field.nearest(wanted, unseen, self.rng))

    def _most_promising(self, study: Study, unseen: Sequence[int], process: guided.Process) -> int:
        """The unseen point to try next. Of a binary not compiled yet one launch is looked at, the best one's: the task asks
        for the others where they may matter. Once every binary is compiled, the rest."""
        field = self.field
        times: dict[int, float] = {}
        refused = []
        for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
            index = field.index.get(point(trial.params))
            if index is None:
                continue
            if trial.value is not None:
                times[index] = trial.value
            else:
                refused.append(index)
        touched = {field.index[where] for where in self.seen if where in field.index}
        under_way = sorted(touched - times.keys() - set(refused))
        compiled = {field.binaries[index] for index in touched}
        wanted = [index for index in unseen if field.binaries[index] not in compiled] or list(unseen)
        start = min(times, key=times.__getitem__) if times else self.start
        if len(touched) % OTHER_IMPLEMENTATION_EVERY == 0 and start is not None:
            implementation = implementation_of(field.configs[start])
            others = [index for index in wanted if implementation_of(field.configs[index]) != implementation]
            if others:
                wanted = others
                times_there = [index for index in times if implementation_of(field.configs[index]) != implementation]
                start = min(times_there, key=times.__getitem__, default=None)
        if start is not None:
            launch = field.launches[start]
            wanted = [index for index in wanted if field.launches[index] == launch] or wanted
            if len(touched) % GLOBAL_EVERY:
                wanted = self._steps_from(start, wanted) or wanted
        mean, deviation = process.posterior(times, refused, under_way, wanted)
        best = math.log(times[start]) if start in times else float(mean.min())
        gain = guided.improvement(mean, deviation, best)
        highest = np.flatnonzero(gain >= gain.max() - 1e-12)
        return wanted[self.rng.choice(list(highest))]

    def _steps_from(self, center: int, among: Sequence[int]) -> list[int]:
        """Those of ``among`` whose binary differs from that of ``center`` in one dimension."""
        differ = self.field.codes[list(among)] != self.field.codes[center]
        return [index for index, count in zip(among, differ.sum(axis=1), strict=True) if count == 1]

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
