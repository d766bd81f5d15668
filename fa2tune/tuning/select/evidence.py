"""From outcomes and samples to cache rows: the evidence, filled in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from fa2tune.compiling import fingerprint
from fa2tune.compiling.registry import variant_of
from fa2tune.gpus import Gpu
from fa2tune.measuring.samples import Race, gain_over, quantile
from fa2tune.rows.row import WORKLOAD, Row, backward_implementation, self_named
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import BACKWARD, FUSED, ITEMSIZE, STRATEGIES, Config, Problem
from fa2tune.tuning.request.provenance import Provenance
from fa2tune.tuning.search.study import TrialOutcome

#: what a row says of the binary that was timed
FACTS = ("registers", "spills", "shared_bytes", "binary_hash")
MEMORY_SHARE = 0.85  #: of the published bandwidth, for kernels that only stream


def _base(
    key: TuningKey, implementation: str, config: Config, provenance: Provenance, time_us: float, strategy: str
) -> Row:
    workload = key.workload()
    if key.kernel == BACKWARD:
        hashes: dict[str, Any] = {
            "kernel_hash": fingerprint.backward_hash(strategy, implementation, key.hooks, self_named(config.values()))
        }
    else:
        kernel = variant_of(key.kernel, config)
        hashes = {
            "kernel_hash": fingerprint.kernel_hash(kernel, key.hooks),
            "space_hash": fingerprint.space_hash(kernel),
        }
    return Row(
        key=key, implementation=implementation, strategy=strategy, config=dict(config), time_us=time_us,
        tflops=key.flops() / time_us * 1e-6, **{name: getattr(workload, name) for name in WORKLOAD}, **hashes,
        **provenance.stamp(),
    )  # fmt: skip


def predicted(key: TuningKey, implementation: str, config: Config, provenance: Provenance, time_us: float,
              default_us: float | None, strategy: str = "", **evidence: Any) -> Row:  # fmt: skip
    """A row without a measurement: times by the model, no interval. ``strategy``: of a whole backward."""
    row = _base(key, implementation, config, provenance, time_us, strategy)
    return replace(
        row, default_time_us=default_us, gain=None if default_us is None else default_us / time_us, **evidence
    )


def measured(key: TuningKey, implementation: str, config: Config, provenance: Provenance, times: Sequence[float],
             default_times: Sequence[float] | None, strategy: str = "", **evidence: Any) -> Row:  # fmt: skip
    """A row from interleaved samples; ``default_times`` None where the default config cannot be launched. ``strategy``: of a
    whole backward."""
    row = _base(key, implementation, config, provenance, median(times), strategy)
    row = replace(
        row, time_low_us=quantile(times, 0.1), time_high_us=quantile(times, 0.9), samples=len(times), **evidence
    )
    if default_times is None:
        return row
    gain = gain_over(default_times, times)
    return replace(row, default_time_us=median(default_times), gain=gain.median, gain_low=gain.low, gain_high=gain.high)


def watched(*races: Race) -> dict[str, Any]:
    """Clock, power limit and throttling of the last race's samples, and of what led to them."""
    throttled = [race.throttled for race in races if race.throttled is not None]
    last = races[-1]
    return {
        "clock_mhz": last.clock_mhz, "power_limit_w": last.power_limit_w,
        "throttled": sum(throttled) if throttled else None,
    }  # fmt: skip


def evidence_of(outcome: TrialOutcome) -> dict[str, Any]:
    """Registers, spills, shared memory and machine code of a row."""
    return {name: outcome.binary.get(name) for name in FACTS}


def backward_variants(rows: Iterable[Row], key: TuningKey) -> dict[tuple[str, str], dict[str, Row]]:
    """What a whole backward can be made of: (strategy, implementation) of its row -> kernel -> its row. Per strategy the
    fastest portable row of each kernel, and the fastest row of any implementation, where one of them is warp-specialised."""
    own = [row for row in rows if row.key == key.with_(kernel=row.key.kernel)]
    found = {}
    for strategy, kernels in STRATEGIES.items():
        for special in (False, True):
            able = {
                kernel: [row for row in own if row.key.kernel == kernel and (special or not row.warp_specialized)]
                for kernel in kernels
            }
            if not all(able.values()):
                continue
            best = {kernel: min(some, key=lambda row: row.rank_us) for kernel, some in able.items()}
            if any(row.warp_specialized for row in best.values()) == special:
                found[strategy, backward_implementation(special)] = best
    return found


def streaming_us(problem: Problem, strategy: str, gpu: Gpu) -> float:
    """Microseconds of what surrounds the tuned kernels of a backward, all of it bound by memory: o is read and delta
    written, a float32 a row; the fused strategy reads dO once more for that, clears float32 sums of dQ and casts them."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    size = ITEMSIZE[problem.dtype]
    moved = rows * (problem.head_dim_v * size + 4)
    if strategy == FUSED:
        moved += rows * (problem.head_dim_v * size + problem.head_dim * (4 + 4 + size))
    return moved / (gpu.hbm_gbs * MEMORY_SHARE) * 1e-3


def worst_errors(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per tensor, the entry nearest its bound."""
    worst: dict[str, Any] = {}
    for errors in found:
        for name, entry in errors.items():
            nearness = max(entry["max"] / entry["max_allowed"], entry["rms"] / entry["rms_allowed"])
            if name not in worst or nearness > worst[name][0]:
                worst[name] = nearness, entry
    return {name: entry for name, (_, entry) in worst.items()}
