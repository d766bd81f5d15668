"""Samples of timings: how many to take, what a race brings back, and their statistics. Pure Python, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class Effort:
    """How closely to look. ``racing.py`` says what comes of it."""

    #: of kernel time per contender, as far as the numbers of rounds allow; 0: as few rounds as are enough
    seconds: float
    fewest: int  #: rounds that are enough for the slowest kernels
    most: int  #: rounds
    #: a race is over when picking its leader can cost no more than this share of the time; None: every round is run, and
    #: no contender is dropped, so that the intervals are those of a number of samples fixed beforehand
    tie: float | None
    #: that a contender runs alone, over and over, for one sample; 0: a sample is one launch, out of a cold L2
    turn_seconds: float = 0.0

    def rounds(self, launch_seconds: float) -> int:
        """At most this many, of launches that take so long."""
        return max(self.fewest, min(self.most, int(self.seconds / launch_seconds)))


#: How the reason begins of a contender that is not raced because it is too slow: no failure, so nothing for the failure record.
CRAWLING = "crawling"

EFFORTS = {
    #: every candidate, once: which of them are worth a final
    "screen": Effort(0.020, 6, 20, tie=0.01),
    #: the fastest of the screening: which one leads
    "final": Effort(0.100, 20, 100, tie=0.003),
    #: those that the final leaves close, each alone, until power and clock have settled. In a race launch by launch, a GPU at
    #: its power limit runs at a clock set by the average power of all contenders, so one that needs less energy has no
    #: advantage there.
    "sustained": Effort(0.0, 2, 2, tie=None, turn_seconds=0.4),
    #: leader against default on samples of its own. Those of the final chose it, so they flatter it: of twenty equal
    #: candidates the luckiest looks faster than the default, often beyond its interval.
    "proof": Effort(0.060, 22, 60, tie=None),
}


@dataclass(frozen=True)
class Race:
    """Microseconds by contender and round; a contender that was dropped, or failed, has fewer, or none."""

    times: list[list[float]]
    failures: dict[int, str] = field(default_factory=dict)  #: contender -> why it could not be launched
    clock_mhz: int | None = None  #: SM clock, the median over the race
    power_limit_w: int | None = None
    #: launches timed while the GPU was throttled, which were rejected and taken again; None: not monitored
    throttled: int | None = None
    tainted: int = 0  #: launches timed while the GPU was throttled and kept, as it did not recover in time
    #: share of the looks at which the GPU was at its power limit, as it normally is under full load; None: not monitored
    power_capped: float | None = None


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics. ``share`` in [0, 1]."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The order statistics between which the median lies with a confidence of at least 95 %, whatever the distribution: how
    many of n samples fall below it is binomial (n, 1/2). With fewer than 6 samples the extremes, which promise less."""
    ordered = sorted(values)
    n = len(ordered)
    tail, rank = 0.0, 0
    while rank < n // 2:  # rank: how many order statistics may be cut off each end
        tail += math.comb(n, rank) / 2.0**n
        if 2 * tail > 0.05:
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


def ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    """These times over those, pair by pair: ``these[i]`` and ``those[i]`` were measured in the same round; the longer list
    is cut."""
    return [this / that for this, that in zip(these, those, strict=False)]


def gain_over(default: Sequence[float], this: Sequence[float]) -> Gain:
    """Of two lists of times measured in the same rounds."""
    pairs = ratios(default, this)
    if not pairs:
        raise ValueError("samples: no pair to compare")
    return Gain(median(pairs), *median_interval(pairs))
