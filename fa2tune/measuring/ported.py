"""Races and numerics checks of code for GPUs without wgmma, on a Hopper GPU (``launching/ported.py``): what a tuning run's
measuring processes call where they would call ``measure`` and ``verify`` for a GPU that is there. They run nothing else.

Importing this changes the process: its kernels are ported from here on. The first race says for which GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fa2tune import gpus
from fa2tune.launching import launch, ported
from fa2tune.measuring import measure, verify
from fa2tune.measuring.samples import Race
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import Config

ported.begin()

check = verify.check
check_backward = verify.check_backward


def race(
    key: TuningKey, contenders: Sequence[Config | Mapping[str, Any]], effort: str,
    best_ratios: Mapping[Any, float] = MappingProxyType({}),
) -> Race:  # fmt: skip
    """``measure.race``, with as many blocks on a multiprocessor as the GPU of the key holds."""
    gpu = gpus.named(key.gpu)
    if ported.running_for() != gpu:  # kernels that a check has loaded ask for less shared memory
        ported.begin(gpu)
        launch.load.cache_clear()
    return measure.race(key, contenders, effort, best_ratios)
