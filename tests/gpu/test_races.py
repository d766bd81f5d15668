"""Races on the GPU that is there: the anchor against itself, and what NVML says meanwhile."""

from __future__ import annotations

import pytest
import torch

from fa2tune import gpus
from fa2tune.compiling.registry import portable_of
from fa2tune.measuring import clock_monitor, measure
from fa2tune.measuring.samples import EFFORTS, gain_over
from fa2tune.spec.key import TuningKey


def key_of(kernel: str, length: int) -> TuningKey:
    gpu = gpus.present()
    assert gpu is not None
    return TuningKey(gpu.name, gpu.sm_count, gpu.arch, kernel, "bf16", "ieee", 64, 64, "causal", length)


@pytest.mark.parametrize("kernel", ["fwd", "bwd_dkdv", "bwd_dq", "bwd_fused"])
def test_a_config_is_as_fast_as_itself(kernel: str) -> None:
    key = key_of(kernel, 1024)
    default = portable_of(kernel).space.default(key.specialization(), key.arch)
    race = measure.race(key, [default, dict(default)], "proof")
    gain = gain_over(*race.times)
    assert not race.failures and len(race.times[0]) == len(race.times[1]) >= EFFORTS["proof"].fewest
    assert gain.median == pytest.approx(1.0, abs=0.01) and gain.high - gain.low < 0.03


def test_a_config_alone_is_as_fast_as_itself_alone() -> None:
    key = key_of("fwd", 4096)
    default = portable_of("fwd").space.default(key.specialization(), key.arch)
    race = measure.race(key, [default, dict(default)], "sustained")
    assert not race.failures and [len(times) for times in race.times] == [2, 2]
    assert gain_over(*race.times).median == pytest.approx(1.0, abs=0.02)


def test_a_whole_backward_races_too() -> None:
    key = key_of("bwd", 512)
    spec = key.specialization()
    configs = {name: portable_of(name).space.default(spec, key.arch) for name in ("bwd_dq", "bwd_dkdv", "bwd_fused")}
    strategies = [
        {"strategy": "split", "configs": {name: configs[name] for name in ("bwd_dq", "bwd_dkdv")}},
        {"strategy": "fused", "configs": {"bwd_fused": configs["bwd_fused"]}},
    ]
    race = measure.race(key, strategies, "proof")
    assert len(race.times[0]) == len(race.times[1]) >= EFFORTS["proof"].fewest


def test_the_gpu_is_watched_and_says_its_clock() -> None:
    seen = clock_monitor.of_device(torch.cuda.current_device())
    if seen.why:
        pytest.skip(seen.why)
    key = key_of("fwd", 1024)
    default = portable_of("fwd").space.default(key.specialization(), key.arch)
    race = measure.race(key, [default], "proof")
    assert race.clock_mhz is not None and 300 < race.clock_mhz < 4000
    assert race.throttled is None or race.throttled % 2 == 0
