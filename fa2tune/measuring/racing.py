"""A race: the order of launches, when a contender is dropped, and when enough is known. Pure Python: the GPU is behind
``Track``.

In every round each contender still in the race is launched once (or has a turn alone), in a random order, and every second
round runs the order of the one before backwards: what drifts evenly (the clocks of a GPU that was cool at first) cancels
within such a block of two rounds, and no contender always follows the same one. Contenders are compared by ratios of
launches of one round only; a time by itself says as much about the clocks as about the kernel.

After each block, contenders are dropped: those far behind after a few launches, then those behind beyond the interval of the
median ratio. Samples go to the close ones, until the leader is known to be as good as the best (within ``Effort.tie``) or the
rounds are used up. Looking at an interval more than once weakens it: one of several equal contenders may be dropped, which
costs nothing, and the winner is raced again on samples of its own.

The GPU's clocks are read before and after each block. A block in which it was throttled is rejected and run again; if the GPU
does not recover, the block is kept and marked as tainted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Protocol

from fa2tune.measuring.clock_monitor import Reading
from fa2tune.measuring.samples import Effort, Race, median_interval, ratios

FIRST_LOOK = 6  #: rounds, from which on a 95 % interval of the median exists
#: rounds -> a contender slower than the best by this factor in each of them is dropped, before there are intervals
DROPPED_BEYOND = {2: 1.3, 4: 1.1}


class Track(Protocol):
    """Where contenders run."""

    def launch(self, schedule: Sequence[int]) -> Sequence[float]:
        """Launch contenders in this order, each once out of a cold L2, or for a turn of its own: microseconds a launch."""

    def read(self) -> Reading:
        """How the GPU is."""

    def rest(self) -> bool:
        """Wait for a throttled GPU to recover; False: it has had time enough, take it as it is."""


class _Field:
    """The contenders still in the race."""

    def __init__(
        self, groups: Sequence[Hashable], alive: Sequence[int], effort: Effort, best_ratios: Mapping[Hashable, float]
    ) -> None:  # fmt: skip
        self.groups = groups
        self.alive = list(alive)
        self.tie = effort.tie or 0.0
        # they are not paired with what runs here
        self.elsewhere = {group: ratio * (1 + self.tie) for group, ratio in best_ratios.items()}
        self.times: list[list[float]] = [[] for _ in groups]
        self.done = 0  #: rounds

    def add(self, schedule: Sequence[int], found: Sequence[float]) -> None:
        for index, time_us in zip(schedule, found, strict=True):
            self.times[index].append(time_us)
        self.done = len(self.times[0])

    def _over(self, these: int, those: int) -> list[float]:
        return ratios(self.times[these], self.times[those])

    def _leaders(self) -> dict[Hashable, int]:
        """Group -> its fastest, by the median ratio to the anchor."""
        places = {index: median(self._over(index, 0)) for index in self.alive}
        return {
            group: min((i for i in self.alive if self.groups[i] == group), key=lambda i: places[i])
            for group in dict.fromkeys(self.groups[index] for index in self.alive)
        }

    def drop(self) -> None:
        """Drop contenders behind the leader of their group, or behind the best of that group known from elsewhere."""
        leaders = self._leaders()
        self.alive = [
            index for index in self.alive
            if index == 0 or not (self._behind(self._over(index, leaders[self.groups[index]]))
                                  or self._behind([ratio / self.elsewhere.get(self.groups[index], math.inf)
                                                   for ratio in self._over(index, 0)]))
        ]  # fmt: skip

    def _behind(self, pairs: Sequence[float]) -> bool:
        """Whether these ratios to a rival's times say that it is lost."""
        if self.done >= FIRST_LOOK:
            return median_interval(pairs)[0] > 1.0
        return self.done in DROPPED_BEYOND and min(pairs) > DROPPED_BEYOND[self.done]

    def over(self) -> bool:
        """Only the anchor is left; or each leader is known, and no contender can be faster by much."""
        if self.alive == [0]:
            return True
        if self.done < FIRST_LOOK:
            return False
        leaders = self._leaders()
        for leader in leaders.values():
            low, high = median_interval(self._over(leader, 0))
            if high - low > 2 * self.tie * low:
                return False
        # the anchor itself may be behind its leader, and is still there
        pairs = [self._over(leaders[self.groups[i]], i) for i in self.alive if i not in leaders.values()]
        return all(median_interval(pair)[1] <= 1 + self.tie for pair in pairs)


def run(
    track: Track, groups: Sequence[Hashable], runnable: Sequence[int], effort: Effort,
    best_ratios: Mapping[Hashable, float] = MappingProxyType({}),
) -> Race:  # fmt: skip
    """Race the contenders ``runnable`` among ``range(len(groups))``. Contender 0 is the anchor of every comparison and is
    never dropped. ``groups``: what each belongs to; it is held against its own group only. ``best_ratios``: group -> the best
    time known from elsewhere, over the anchor's.

    The race's failures and power limit are the caller's to add."""
    field = _Field(groups, runnable, effort, best_ratios)
    shuffled = random.Random(0)
    clocks: list[int] = []
    looks = capped = throttled = tainted = 0
    patient = True
    before = track.read()
    watched = before.reasons is not None
    rounds = effort.fewest
    while field.done < rounds:
        order = shuffled.sample(field.alive, len(field.alive))
        schedule = [*order, *reversed(order)]
        found = track.launch(schedule)
        after = track.read()
        if before.throttled or after.throttled:
            patient = patient and track.rest()
            if patient:
                throttled += len(schedule)
                before = track.read()
                continue
            tainted += len(schedule)
        before = after
        looks += 1
        capped += after.power_capped
        clocks += [after.clock_mhz] if after.clock_mhz is not None else []
        field.add(schedule, found)
        if field.done == 2:  # the first block
            rounds = effort.rounds(median(field.times[0]) * 1e-6)
        if effort.tie is not None:
            field.drop()
            if field.over():
                break
    return Race(
        field.times, clock_mhz=round(median(clocks)) if clocks else None, throttled=throttled if watched else None,
        tainted=tainted, power_capped=capped / looks if watched else None,
    )  # fmt: skip
