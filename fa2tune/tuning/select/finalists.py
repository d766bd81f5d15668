"""Which candidates run in a final, which leads, and what it has to beat. Pure functions of times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from fa2tune.measuring.samples import Race, gain_over, ratios
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import POINTER, SearchSpace
from fa2tune.tuning.search.study import TrialOutcome

NEAR = 0.04  #: a candidate no further behind the fastest may still turn out to be faster
FINALISTS = 8  #: at most so many of the near ones, which the screening cannot tell apart, run in the final race
SUSTAINED = 5  #: at most so many that the final race leaves near run alone, where energy may change the order
CLEARLY_SLOWER = 1.015  #: alone; two turns cannot resolve less


def rival(space: SearchSpace, spec: Specialization, arch: int, implementation: str) -> Config:
    """The default that a config of this implementation has to beat: what would serve in its place. ``space``: the
    portable variant's. For pointer loads that is the default for tensors that no descriptor can address, as the others have a
    row for descriptors."""
    default = space.default(replace(spec, aligned=False) if spec.ragged else spec, arch)
    if implementation != POINTER or default["LOADS"] == POINTER:
        return default
    return space.default(replace(spec, aligned=False), arch)


def finalists(ranked: Sequence[TrialOutcome]) -> list[TrialOutcome]:
    """Of candidates ranked by their screening: the fastest, and those it may have mistaken for slower."""
    best = ranked[0].time_us or 0.0 if ranked else 0.0
    return [outcome for outcome in ranked[:FINALISTS] if (outcome.time_us or 0.0) <= best * (1 + NEAR)]


def leader(race: Race, among: Sequence[int]) -> int:
    """Of these contenders the fastest, by the median ratio to the anchor, of those that ran to the end."""
    ran = [index for index in among if len(race.times[index]) == len(race.times[0])]
    return min(ran, key=lambda index: median(ratios(race.times[index], race.times[0])))


def contested(race: Race, leading: Mapping[str, int], rivals: Mapping[str, Sequence[int]]) -> list[int]:
    """Of a final's contenders those that lead their implementation, are near the fastest of all, and have rivals of it there;
    then these rivals, the fastest first. ``rivals``: the contenders for each implementation."""
    placed = {i: median(ratios(samples, race.times[0])) for i, samples in enumerate(race.times) if samples}
    behind = min(placed.values()) * (1 + NEAR)
    near = [i for i in sorted(placed, key=lambda i: placed[i]) if placed[i] <= behind]
    shared = [name for name, first in leading.items() if first in near and len({*near} & {*rivals[name]}) > 1]
    found = [i for i in near if any(i in rivals[name] for name in shared)]
    return sorted(found, key=lambda i: i not in leading.values())[:SUSTAINED]


def overruled(
    turns: Race, alone: Sequence[int], leading: Mapping[str, int], rivals: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """The leader of each implementation after contenders ``alone`` of a final race have run alone: the fastest of these, if the
    leader of the final race is clearly slower in both turns. Turns on a throttled GPU prove nothing. ``rivals``: as for
    ``contested``."""
    found = dict(leading)
    if turns.tainted:
        return found
    for implementation, first in leading.items():
        if first in alone:
            best = leader(turns, [place for place, index in enumerate(alone) if index in rivals[implementation]])
            pairs = ratios(turns.times[alone.index(first)], turns.times[best])
            if median(pairs) >= CLEARLY_SLOWER and min(pairs) > 1.0:
                found[implementation] = alone[best]
    return found


def replaces(default: Sequence[float], this: Sequence[float], tainted: int = 0) -> bool:
    """Whether a config takes the default's place: it is faster beyond the interval, in rounds that did not choose it.
    ``tainted``: launches of those rounds on a throttled GPU, which prove nothing."""
    return not tainted and gain_over(default, this).low > 1.0
