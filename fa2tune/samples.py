"""Samples of timings: how many to take, what a race brings back, and their statistics. Pure Python, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class Effort:
    """How long to look at each contender."""

    seconds: float  #: of kernel time per contender, as far as rounds allow
    least_rounds: int
    most_rounds: int
    hopeless: float  #: dropped when slower than the best by this factor

    def rounds(self, launch_seconds: float) -> int:
        return max(self.least_rounds, min(self.most_rounds, int(self.seconds / launch_seconds)))


EFFORTS = {"screen": Effort(0.010, 5, 20, 1.3), "final": Effort(0.080, 21, 101, 1.3)}


@dataclass(frozen=True)
class Race:
    """Microseconds by contender and round; a contender that was dropped, or failed, has fewer, or none."""

    times: list[list[float]]
    failures: dict[int, str] = field(default_factory=dict)  #: contender -> why it could not be launched
    clock_mhz: int | None = None  #: SM clock at the end
    power_limit_w: int | None = None
    throttled: int = 0  #: times the race was run again because the card was throttled


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics. ``share`` in [0, 1]."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The order statistics between which the median lies with at least ``confidence``, whatever the distribution: how many
    of n samples fall below it is binomial (n, 1/2). With fewer than 6 samples (at 95 %) the extremes, which promise less."""
    ordered = sorted(values)
    n = len(ordered)
    tail, rank = 0.0, 0
    while rank < n // 2:  # rank: how many order statistics may be cut off each end
        tail += math.comb(n, rank) / 2.0**n
        if 2 * tail > 1 - confidence:
            break
        rank += 1
    cut = max(0, rank - 1)
    return ordered[cut], ordered[n - 1 - cut]


@dataclass(frozen=True)
class Gain:
    """How much faster than the default: the median over interleaved pairs of default time / this time, and its interval."""

    median: float
    low: float
    high: float


def gain_over(default: Sequence[float], this: Sequence[float]) -> Gain:
    """``default[i]`` and ``this[i]`` were measured in the same round; the longer list is cut."""
    ratios = [d / t for d, t in zip(default, this, strict=False)]
    if not ratios:
        raise ValueError("samples: no pair to compare")
    return Gain(median(ratios), *median_interval(ratios))
