"""From outcomes and samples to cache rows: the evidence, filled in."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

from fa2tune.compiling import fingerprint
from fa2tune.compiling.compiler import variant_of
from fa2tune.gpus import Gpu
from fa2tune.measuring.samples import Race, gain_over, quantile, ratios
from fa2tune.problem import BACKWARD, FUSED, ITEMSIZE, ROADS, Config, Problem, Specialization, TuningKey
from fa2tune.rows.row import MEASURED, PREDICTED, SIBLING, Row, backward_way
from fa2tune.tuning.study import Outcome
from fa2tune.variant import POINTER, SearchSpace

PROOF = {MEASURED: "target", SIBLING: "sibling", PREDICTED: "interpreter"}
MEMORY_SHARE = 0.85  #: of the published bandwidth, for kernels that only stream
NEAR = 0.04  #: no further behind the fastest is who may yet turn out to be it
FINALISTS = 8  #: of those whom a screening, which cannot tell them apart, leaves near: at most so many
SUSTAINED = 5  #: of those whom the final leaves near, where energy may put others first: so many have turns alone
CLEARLY_SLOWER = 1.015  #: alone; two turns cannot resolve less


@dataclass(frozen=True)
class Toolchain:
    """What every row of a run has in common."""

    obtained: str
    obtained_on: str = ""
    driver: str = ""

    def stamp(self) -> dict[str, Any]:
        return {
            "obtained": self.obtained, "proof": PROOF[self.obtained], "obtained_on": self.obtained_on, "driver": self.driver,
            "triton": fingerprint.triton_version(), "torch": importlib.metadata.version("torch"),
            "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }  # fmt: skip


def _base(key: TuningKey, variant: str, config: Config, toolchain: Toolchain, time_us: float) -> Row:
    workload = key.workload()
    if key.kernel == BACKWARD:
        hashes: dict[str, Any] = {"kernel_hash": fingerprint.backward_hash(variant)}
    else:
        kernel = variant_of(key.kernel, config)
        hashes = {"kernel_hash": fingerprint.kernel_hash(kernel), "space_hash": fingerprint.space_hash(kernel)}
    return Row(
        key=key, variant=variant, config=dict(config), time_us=time_us, batch=workload.batch, heads_q=workload.heads_q,
        heads_kv=workload.heads_kv, tflops=workload.flops(key.kernel) / time_us * 1e-6, **hashes, **toolchain.stamp(),
    )  # fmt: skip


def predicted(key: TuningKey, variant: str, config: Config, toolchain: Toolchain, time_us: float, default_us: float | None,
              **evidence: Any) -> Row:  # fmt: skip
    """A row without a measurement: times by the model, no interval."""
    row = _base(key, variant, config, toolchain, time_us)
    return replace(
        row, default_time_us=default_us, gain=None if default_us is None else default_us / time_us, **evidence
    )


def measured(key: TuningKey, variant: str, config: Config, toolchain: Toolchain, times: Sequence[float],
             default_times: Sequence[float] | None, **evidence: Any) -> Row:  # fmt: skip
    """A row from interleaved samples; ``default_times`` None where the default config cannot be launched."""
    row = _base(key, variant, config, toolchain, median(times))
    row = replace(
        row, time_low_us=quantile(times, 0.1), time_high_us=quantile(times, 0.9), samples=len(times), **evidence
    )
    if default_times is None:
        return row
    gain = gain_over(default_times, times)
    return replace(row, default_time_us=median(default_times), gain=gain.median, gain_low=gain.low, gain_high=gain.high)


def rival(space: SearchSpace, spec: Specialization, arch: int, way: str) -> Config:
    """The default that a config of this way has to beat: what would serve in its place. ``space``: the portable variant's. For
    pointer loads that is the default for tensors that no descriptor can address, as the others have a row for descriptors."""
    default = space.default(spec, arch)
    if way != POINTER or default["LOADS"] == POINTER:
        return default
    return space.default(replace(spec, aligned=False), arch)


def finalists(ranked: Sequence[Outcome]) -> list[Outcome]:
    """Of candidates ranked by their screening: the fastest, and those it may have mistaken for slower."""
    best = ranked[0].time_us or 0.0 if ranked else 0.0
    return [outcome for outcome in ranked[:FINALISTS] if (outcome.time_us or 0.0) <= best * (1 + NEAR)]


def leader(race: Race, among: Sequence[int]) -> int:
    """Of these contenders the fastest, by the median ratio to the anchor, of those that ran to the end."""
    ran = [index for index in among if len(race.times[index]) == len(race.times[0])]
    return min(ran, key=lambda index: median(ratios(race.times[index], race.times[0])))


def contested(race: Race, leading: Mapping[str, int], rivals: Mapping[str, Sequence[int]]) -> list[int]:
    """Of a final's contenders those that lead their way, are near the fastest of all, and have rivals of their way there; then
    these rivals, the fastest first. ``rivals``: the contenders for each way."""
    placed = {i: median(ratios(samples, race.times[0])) for i, samples in enumerate(race.times) if samples}
    behind = min(placed.values()) * (1 + NEAR)
    near = [i for i in sorted(placed, key=lambda i: placed[i]) if placed[i] <= behind]
    ways = [way for way, first in leading.items() if first in near and len({*near} & {*rivals[way]}) > 1]
    found = [i for i in near if any(i in rivals[way] for way in ways)]
    return sorted(found, key=lambda i: i not in leading.values())[:SUSTAINED]


def overruled(
    turns: Race, alone: Sequence[int], leading: Mapping[str, int], rivals: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Who leads each way, once contenders ``alone`` of a final have had turns: whoever is fastest there, where the final's
    leader is clearly slower in both. Turns on a throttled card prove nothing. ``rivals``: as ``contested`` has them."""
    found = dict(leading)
    if turns.tainted:
        return found
    for way, first in leading.items():
        if first in alone:
            best = leader(turns, [place for place, index in enumerate(alone) if index in rivals[way]])
            pairs = ratios(turns.times[alone.index(first)], turns.times[best])
            if median(pairs) >= CLEARLY_SLOWER and min(pairs) > 1.0:
                found[way] = alone[best]
    return found


def replaces(default: Sequence[float], this: Sequence[float], tainted: int = 0) -> bool:
    """Whether a config takes the default's place: it is faster beyond the interval, in rounds that did not choose it.
    ``tainted``: launches of those rounds on a throttled card, which prove nothing."""
    return not tainted and gain_over(default, this).low > 1.0


def watched(*races: Race) -> dict[str, Any]:
    """Clock, power limit and throttling of the last race's samples, and of what led to them."""
    throttled = [race.throttled for race in races if race.throttled is not None]
    last = races[-1]
    return {
        "clock_mhz": last.clock_mhz, "power_limit_w": last.power_limit_w,
        "throttled": sum(throttled) if throttled else None,
    }  # fmt: skip


def evidence_of(outcome: Outcome) -> dict[str, Any]:
    """Registers, spills and shared memory of a row."""
    return {name: outcome.binary.get(name) for name in ("registers", "spills", "shared_bytes")}


def backward_ways(rows: Iterable[Row], key: TuningKey) -> dict[str, tuple[str, dict[str, Row]]]:
    """What a whole backward can be made of: variant of its row -> (road, kernel -> its row). Per road the fastest portable row
    of each kernel, and the fastest row of any way, where one of them is warp-specialised."""
    own = [row for row in rows if row.key == key.with_(kernel=row.key.kernel)]
    found = {}
    for road, kernels in ROADS.items():
        for special in (False, True):
            able = {
                kernel: [row for row in own if row.key.kernel == kernel and (special or not row.specialized)]
                for kernel in kernels
            }
            if not all(able.values()):
                continue
            best = {kernel: min(some, key=lambda row: row.rank_us) for kernel, some in able.items()}
            if any(row.specialized for row in best.values()) == special:
                found[backward_way(road, special)] = road, best
    return found


def streaming_us(problem: Problem, road: str, gpu: Gpu) -> float:
    """Microseconds of what surrounds the tuned kernels of a backward, all of it bound by memory: o is read and delta
    written, a float32 a row; the fused road reads dO once more for that, clears float32 sums of dQ and casts them."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    size = ITEMSIZE[problem.dtype]
    moved = rows * (problem.head_dim_v * size + 4)
    if road == FUSED:
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
