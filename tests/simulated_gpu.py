"""A GPU made of arithmetic, for tests of races: it starts cool and fast, every launch is a little off, some are far off, and
now and then it is throttled."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from fa2tune.measuring.clock_monitor import SOFTWARE_POWER_CAP, Reading

HARDWARE_SLOWDOWN = 0x08


class SimulatedGpu:
    """A ``racing.Track`` over contenders whose true times (microseconds, warm) are ``truth``.

    noise: relative, of one launch. outliers: share of launches that take up to twice as long. drift: how much faster a cool
    GPU is. warms_in: seconds of work until most of that is gone. throttled: [from, until) in seconds, during which launches
    take half as long again or more. watched: NVML answers. patience: rests it has time for."""

    FLUSH_US = 50.0

    def __init__(
        self, truth: Sequence[float] = (), seed: int = 0, noise: float = 0.004, drift: float = 0.08, warms_in: float = 0.5,
        outliers: float = 0.02, throttled: Sequence[tuple[float, float]] = (), watched: bool = True, patience: int = 10,
    ) -> None:  # fmt: skip
        self.truth, self.noise, self.drift, self.warms_in = truth, noise, drift, warms_in
        self.outliers, self.windows, self.watched, self.patience = outliers, throttled, watched, patience
        self.random = random.Random(seed)
        self.now = 0.0
        self.schedules: list[list[int]] = []
        self.bad: set[float] = set()  #: times taken while throttled

    def slow(self) -> float:
        return 1 - self.drift * math.exp(-self.now / self.warms_in)

    def is_throttled(self) -> bool:
        return any(begin <= self.now < end for begin, end in self.windows)

    def launch(self, schedule: Sequence[int]) -> list[float]:
        self.schedules.append(list(schedule))
        found = []
        for index in schedule:
            time_us = self.truth[index] * self.slow() * self.random.lognormvariate(0, self.noise)
            if self.random.random() < self.outliers:
                time_us *= 1 + self.random.random()
            if self.is_throttled():
                time_us *= 1.5 + self.random.random()
                self.bad.add(time_us)
            found.append(time_us)
            self.now += (time_us + self.FLUSH_US) * 1e-6
        return found

    def read(self) -> Reading:
        if not self.watched:
            return Reading()
        return Reading(round(1980 / self.slow()), HARDWARE_SLOWDOWN if self.is_throttled() else SOFTWARE_POWER_CAP)

    def rest(self) -> bool:
        self.patience -= 1
        self.now += 0.5
        return self.patience >= 0
