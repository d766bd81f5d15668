"""The default search: a Gaussian process over the legal points of a space, which starts from the model's estimates.

What is modelled is the logarithm of a time, relative to the model's estimate of it:

    log t(x) = b + beta * log estimate(x) + f(x) + noise,   f ~ GP(0, s^2 exp(-sum over dimensions of w_d * |x_d - x'_d|))

so that before the first measurement the ranking is the model's, and every measurement corrects it for the configs that share
dimensions with it, most for those one step away. How far a step goes (w_d), how wrong the model is (beta, s) and how noisy the
times are is found by maximum likelihood as measurements come in, from priors that hold where there are few. The next config
is the one with the largest expected improvement over the best so far (Jones, Schonlau and Welch 1998); configs under way
count as if they had been measured at their expected time, so that cores that compile ahead do not all compile neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from scipy.special import ndtr

FloatArray = NDArray[np.float64]

#: Times beyond this factor of the best are as good as each other: the process need not tell the slow from the slower.
CLIP = 2.0
#: A config whose estimate is more than this many times the lowest of its load variant, at every length, is never compiled.
#: On the recorded tables (docs/search.md, benchmarks/pruning.py) no config within 10 % of a key's best is pruned.
#: The best pointer config of the forward at head dim 128 is; the best one that is compiled there takes 1 % longer.
PRUNED_BEYOND = 2.0
REFIT_EVERY = 8  #: measurements between two fits of the hyperparameters
FIT_AT_MOST = 160  #: measurements a fit looks at: the fastest half of them, and of the others the latest
FIRST_FIT = 6
CONSTANT = 1.0  #: prior deviation of b, after the first guess


@dataclass(frozen=True)
class Prior:
    """Hyperparameters before anything is measured (medians of log-normal priors), and how far from there a fit may go."""

    scale: float = 0.20  #: s: how far the model may be off, in log time
    rate: float = 0.35  #: w_d
    noise: float = 0.01  #: of one median, in log time
    trust: float = 0.5  #: deviation of beta around 1
    spread: float = 1.0  #: of the logarithms of the above in their priors


PRIOR = Prior()


class Process:
    """The posterior over all points of a field, given times of some. ``vectors``: their coordinates, whose city-block distance
    is the sum over dimensions of |x_d - x'_d|; ``columns``: dimension -> its columns; ``estimates``: the model's, or None."""

    def __init__(
        self, vectors: FloatArray, columns: Sequence[slice], estimates: Sequence[float] | None, prior: Prior = PRIOR
    ) -> None:
        self.vectors, self.columns, self.prior = vectors, list(columns), prior
        logs = np.zeros(len(vectors)) if estimates is None else np.log(np.asarray(estimates, dtype=float))
        self.logs: FloatArray = logs - logs.min(initial=np.inf)
        start = [prior.scale, prior.noise, prior.trust, *[prior.rate] * len(self.columns)]
        self.start: FloatArray = np.log(start)
        self.theta: FloatArray = self.start.copy()
        self.fitted_at = 0

    # ---- the kernel

    def _scaled(self, indices: Sequence[int] | FloatArray, theta: FloatArray) -> FloatArray:
        weights = np.empty(self.vectors.shape[1])
        for columns, rate in zip(self.columns, np.exp(theta[3:]), strict=True):
            weights[columns] = rate
        return self.vectors[indices] * weights

    def _covariance(self, a: Sequence[int], b: Sequence[int]) -> FloatArray:
        scale, _, trust = np.exp(self.theta[:3])
        near = np.exp(-cdist(self._scaled(a, self.theta), self._scaled(b, self.theta), "cityblock"))
        return scale**2 * near + trust**2 * np.outer(self.logs[a], self.logs[b]) + CONSTANT**2

    # ---- hyperparameters

    def _fit(self, indices: Sequence[int], residuals: FloatArray) -> None:
        order = np.argsort(residuals + self.logs[indices], kind="stable")
        if len(indices) > FIT_AT_MOST:
            fast = set(order[: FIT_AT_MOST // 2].tolist())
            late = [place for place in range(len(indices)) if place not in fast][-(FIT_AT_MOST - len(fast)) :]
            chosen = sorted([*fast, *late])
        else:
            chosen = list(range(len(indices)))
        here = np.asarray(indices)[chosen]
        residuals = residuals[chosen]
        distances = np.array([cdist(self.vectors[here, c], self.vectors[here, c], "cityblock") for c in self.columns])
        linear = np.outer(self.logs[here], self.logs[here])
        identity = np.eye(len(here))

        def loss(theta: FloatArray) -> tuple[float, FloatArray]:
            scale2, noise2, trust2 = np.exp(2 * theta[:3])
            rates = np.exp(theta[3:])
            near = scale2 * np.exp(-np.tensordot(rates, distances, 1))
            k = near + trust2 * linear + CONSTANT**2 + (noise2 + 1e-8) * identity
            factor = cho_factor(k, lower=True)
            alpha = cho_solve(factor, residuals)
            off = (theta - self.start) / self.prior.spread
            value = 0.5 * residuals @ alpha + np.log(np.diag(factor[0])).sum() + 0.5 * off @ off
            inner = cho_solve(factor, identity) - np.outer(alpha, alpha)
            product = inner * near
            gradient = np.concatenate(
                [
                    [product.sum(), noise2 * np.trace(inner), trust2 * (inner * linear).sum()],
                    -0.5 * rates * np.tensordot(distances, product, 2),
                ]
            )
            return float(value), gradient + off / self.prior.spread

        bounds = [(t - 3 * self.prior.spread, t + 3 * self.prior.spread) for t in self.start]
        found = minimize(loss, self.theta, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 20})
        if np.isfinite(found.fun):
            self.theta = found.x

    # ---- the posterior

    def posterior(
        self, times: Mapping[int, float], refused: Sequence[int], under_way: Sequence[int], wanted: Sequence[int]
    ) -> tuple[FloatArray, FloatArray]:
        """(mean, deviation) of the log time of the ``wanted`` points.

        ``times``: point -> time; ``refused``: points that cannot run, taken for slow ones; ``under_way``: points whose time is
        not known yet, but will be."""
        indices = [*times, *refused]
        logs = np.empty(0)
        if times:
            measured = np.log(np.fromiter(times.values(), float))
            worst = measured.min() + np.log(CLIP)
            logs = np.concatenate([np.minimum(measured, worst), np.full(len(refused), worst)])
        else:
            indices = []
        residuals = logs - self.logs[indices] if indices else logs
        middle = float(np.median(residuals)) if indices else 0.0
        residuals = residuals - middle
        if len(indices) >= max(FIRST_FIT, self.fitted_at + REFIT_EVERY):
            self._fit(indices, residuals)
            self.fitted_at = len(indices)
        known = [*indices, *under_way]
        prior_mean = self.logs[list(wanted)] + middle
        scale, noise, trust = np.exp(self.theta[:3])
        variance = scale**2 + trust**2 * self.logs[list(wanted)] ** 2 + CONSTANT**2
        if not known:
            return prior_mean, np.sqrt(variance)
        factor = self._factor(known, noise)
        values = residuals
        if under_way:
            believed = np.zeros(len(under_way))
            if indices:  # the factor's upper left is the factor of what is measured
                weights = cho_solve((factor[: len(indices), : len(indices)], True), residuals)
                believed = self._covariance(under_way, indices) @ weights
            values = np.concatenate([residuals, believed])
        across = solve_triangular(factor, self._covariance(known, wanted), lower=True)
        mean = prior_mean + across.T @ solve_triangular(factor, values, lower=True)
        variance = variance - (across**2).sum(axis=0)
        return mean, np.sqrt(np.maximum(variance, 1e-10))

    def _factor(self, indices: Sequence[int], noise: float) -> FloatArray:
        k = self._covariance(indices, indices)
        k[np.diag_indices_from(k)] += noise**2 + 1e-8
        return cholesky(k, lower=True)


def hopeful(estimates: Sequence[Sequence[float]], implementations: Sequence[str]) -> list[int]:
    """Which points the model does not call hopeless. ``estimates``: per length, of every point; ``implementations``: of
    every point, its implementation: each is to have a winner."""
    table, names = np.asarray(estimates, dtype=float), np.asarray(implementations)
    kept = np.zeros(len(names), dtype=bool)
    for name in set(implementations):
        own = names == name
        best = table[:, own].min(axis=1, keepdims=True)
        kept[own] = (table[:, own] <= PRUNED_BEYOND * best).any(axis=0)
    return np.flatnonzero(kept).tolist()


def improvement(mean: FloatArray, deviation: FloatArray, best: float) -> FloatArray:
    """Expected improvement over ``best``, in log time."""
    z = (best - mean) / deviation
    density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
    gain: FloatArray = (best - mean) * ndtr(z) + deviation * density
    return gain
