"""Fits the constants of the model to tables: least squares on the logarithm of predicted / measured time.

Used by model_quality.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import rankdata

from fa2tune import gpus
from fa2tune.compiling import limits, registry
from fa2tune.compiling.compiler import Binary
from fa2tune.gpus import Gpu
from fa2tune.predicting import model, tiles
from fa2tune.spec.key import TuningKey
from fa2tune.tuning.search.candidates import point

Array = Any

#: Constants that are fitted -> (published or guessed, least, most, how far from the first counts as one deviation of the
#: logarithm). Published figures are held closer than guesses. What the tables cannot show (other chips, device memory) is not
#: here.
FITTED: dict[str, tuple[float, float, float, float]] = {
    "clock": (0.9, 0.5, 1.0, 0.3),
    "start": (10.0, 0.5, 100.0, 1.0),
    "drain": (40.0, 1.0, 200.0, 1.0),
    "serial": (0.5, 0.05, 1.0, 1.0),
    "mixed": (0.2, 0.02, 1.0, 1.0),
    "pace": (1.3, 1.0, 3.0, 0.5),
    "in_step": (0.7, 0.05, 1.0, 1.0),
    "copy": (5.0, 1.0, 16.0, 0.7),
    "spill": (2.0, 0.5, 12.0, 0.7),
    "barrier": (30.0, 2.0, 150.0, 1.0),
    "load": (700.0, 200.0, 1500.0, 0.4),
    "ahead": (0.3, 0.02, 0.9, 0.7),
    "block": (3000.0, 500.0, 20000.0, 0.7),
    "tail": (0.5, 0.1, 1.0, 0.5),
}
TOWARDS_BEST = 2.0  #: a config that takes t times the best's time counts t^-2
FLOOR = 0.05  #: but this at the least
LEVEL = 0.3  #: weight of a key's level, relative to that of its ranks
PRIOR = 0.05  #: weight of a deviation from the default
OUTLIER = 0.1  #: logarithmic error from which on it counts linearly only


@dataclass(frozen=True)
class Measured:
    """One key: its configs side by side, and their times."""

    key: TuningKey
    gpu: Gpu
    configs: tuple[dict[str, Any], ...]
    candidates: model.Candidates
    tilings: model.Tilings
    times_us: Array

    def predicted_us(self, calibration: model.Calibration) -> Array:
        problem = self.key.workload()
        found = model.of_tiles(self.candidates, self.key.kernel, self.tilings, problem, self.gpu, calibration)
        return found.seconds * 1e6


def measured(table: Any) -> Measured:
    """What the model needs of a table: every config that its limits let pass and that ran."""
    key = table.key
    gpu = gpus.named(key.gpu)
    variant = registry.portable_of(key.kernel)
    configs, warps, fit, loops, times = [], [], [], [], []
    for built in table.binaries.values():
        binary = Binary(
            variant.name, key.specialization(), built.config, key.arch, built.shared_bytes, built.num_warps, built.registers,
            4 * built.spills, "",
        )  # fmt: skip
        blocks = limits.blocks_per_sm(binary, gpu)
        if built.status or limits.after_compile(binary, gpu) is not None or not built.loops:
            continue
        for value in built.runs:
            config = table.config(built, value)
            if (time_us := table.times.get(point(config))) is not None:
                configs.append(config)
                warps.append(built.num_warps)
                fit.append(blocks)
                loops.append(built.loops)
                times.append(time_us)
    owns_queries = limits.owns_queries(variant, table.default)
    problem = key.workload()
    tilings = model.side_by_side([tiles.tiling(owns_queries, problem, c["BLOCK_M"], c["BLOCK_N"]) for c in configs])
    return Measured(key, gpu, tuple(configs), model.gather(configs, warps, fit, loops), tilings, np.array(times))


def spearman(a: Sequence[float] | Array, b: Sequence[float] | Array) -> float:
    """Rank correlation; NaN where one side is constant or fewer than three points are given."""
    if len(a) < 3 or len(set(a)) < 2 or len(set(b)) < 2:
        return float("nan")
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def quality(times: Sequence[float] | Array, predicted: Sequence[float] | Array) -> dict[str, float]:
    """Figures of one key: n, spearman, spearman_best (measured best quarter), regret_1 and regret_5 (of the model's first
    choice and of the best of its first five; 0.05: 5 % slower than the best), level (median of predicted / measured)."""
    t, p = np.asarray(times, dtype=float), np.asarray(predicted, dtype=float)
    best = np.argsort(t, kind="stable")[: max(3, len(t) // 4)]
    choice = np.argsort(p, kind="stable")
    return {
        "n": float(len(t)),
        "spearman": spearman(t, p),
        "spearman_best": spearman(t[best], p[best]),
        "regret_1": float(t[choice[0]] / t.min() - 1),
        "regret_5": float(t[choice[:5]].min() / t.min() - 1),
        "level": float(np.median(p / t)),
    }


def _residuals(data: Measured, calibration: model.Calibration) -> Array:
    error = np.log(data.predicted_us(calibration) / data.times_us)
    weight = np.maximum((data.times_us.min() / data.times_us) ** TOWARDS_BEST, FLOOR)
    weight = weight / weight.sum()
    level = (weight * error).sum()
    apart = error - level
    apart = (
        np.sign(apart) * OUTLIER * np.sqrt(2 * (np.sqrt(1 + (apart / OUTLIER) ** 2) - 1))
    )  # Charbonnier's, as a residual
    return np.append(np.sqrt(weight) * apart, LEVEL * level)


def fit(data: Sequence[Measured]) -> model.Calibration:
    """The constants that suit all of ``data``, near the published and the guessed ones. Those that are not fitted stay."""
    names = tuple(FITTED)
    middle, low, high, spread = (np.array([FITTED[name][i] for name in names]) for i in range(4))
    centre = np.log(middle)

    def calibration(logs: Array) -> model.Calibration:
        return replace(model.CALIBRATION, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def residuals(logs: Array) -> Array:
        constants = calibration(logs)
        parts = [_residuals(one, constants) / np.sqrt(len(data)) for one in data]
        return np.concatenate([*parts, PRIOR * (logs - centre) / spread / np.sqrt(len(names))])

    inside = np.clip(centre, np.log(low) + 1e-6, np.log(high) - 1e-6)
    found = least_squares(residuals, inside, bounds=(np.log(low), np.log(high)), diff_step=1e-3, xtol=1e-4, ftol=1e-5)
    return calibration(found.x)
