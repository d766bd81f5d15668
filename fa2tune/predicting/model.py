"""Analytic time of a kernel on a GPU that need not be there. What it knows and how it reckons: docs/model.md.

It ranks configs of one kernel and problem; its absolute times are rough. Everything is reckoned for many candidates side by
side: an array holds one value a candidate, or (unmasked, masked) pairs of one trip of its loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fa2tune.catalogue import SCHEDULERS
from fa2tune.compiling import limits, sass
from fa2tune.compiling.compiler import Binary
from fa2tune.compiling.registry import variant_named
from fa2tune.gpus import Gpu
from fa2tune.predicting import by_mma_sync, by_wgmma, tiles
from fa2tune.predicting.tiles import Tiling
from fa2tune.spec import visits
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, padded_head_dim
from fa2tune.spec.variant import DESCRIPTOR, WARP_GROUP, WARP_THREADS, Variant, implementation_of

Array = Any  #: a numpy array of floats

# Throughput of an SM per clock: CUDA C++ Programming Guide, "Arithmetic Instructions"; the same from 8.0 to 12.0.
MUFU_LANES = 16
ALU_LANES = 64
SHARED_BYTES = 128  #: also what L1 gives to spills
PHASE_FIELDS = (*sass.PHASE, "waits")
EARLY = 0.67  #: mean tiles that a band begins early by: of simulated schedules (docs/model.md)
BETWEEN_SERIAL = 24  #: instructions that may stand between two products waited for one by one


@dataclass(frozen=True)
class Calibration:
    """What no data sheet says. One set for all GPUs, kernels and dtypes; where from: docs/model.md."""

    #: clock held under load / boost clock
    clock: float = 0.837
    #: share of the published rate for mma.sync on chips whose full rate needs wgmma (H100: 62 %, Luo et al. 2024,
    #: arXiv 2402.13499) or tcgen05 (a guess)
    mma_sync_on_hopper: float = 0.62
    mma_sync_on_blackwell: float = 0.25
    #: clocks tensor cores lose between one batch of products and the next
    start: float = 13.5
    #: clocks from a product's end until its result can be used
    drain: float = 30.1
    #: share of the shorter of products and other instructions of a trip with mma.sync that does not run beside the longer
    serial: float = 0.565
    #: share of a stretch's instructions beside its busiest pipe that costs time, however many warps there are
    mixed: float = 0.244
    #: clocks between two instructions of a lone warp
    pace: float = 1.32
    #: share of the other warps' work in the same quarter that a warp of a block waits for, since they go in step
    in_step: float = 0.734
    #: clocks a load or asynchronous copy of a warp takes its scheduler (TMA takes none)
    copy: float = 5.44
    #: cost of a spilled byte in shared-memory bytes
    spill: float = 2.92
    #: clocks a block loses where its warps meet
    barrier: float = 29.2
    #: clocks from asking for a tile to its being there
    load: float = 603.0
    #: share of that which is over before a trip needs the tiles that the trip before asked for
    ahead: float = 0.397
    #: clocks a block spends starting, filling its pipeline and draining it
    block: float = 3600.0
    #: bytes a clock of what a block owns and makes, while no products run; without a producer that is part of ``block``
    own_bytes: float = math.inf
    #: blocks on an SM while the longest of the last run out, as a share of those before
    tail: float = 0.563
    #: bytes a clock and SM from L2: data-centre chips, others (half: a guess)
    l2_bytes: float = 60.0
    l2_bytes_small: float = 30.0
    #: float32 atomic adds in L2, bytes a clock and SM
    atomic_bytes: float = 12.0
    #: share of L2 that keeps what the resident blocks stream (a guess: nothing measured so far was bound by device memory)
    l2_share: float = 0.6
    #: share of the published memory bandwidth a kernel reaches (4.29 of 4.8 TB/s in a copy on an H200)
    hbm: float = 0.89


CALIBRATION = Calibration()
#: Of kernels/sm80: the level alone is fitted, to the times in benchmarks/calls/sm80_counts.json.gz; ranks are CALIBRATION's.
WRITTEN_OUT = replace(CALIBRATION, clock=0.942)
#: Of warp-specialised kernels, fitted to the times of rows of an H200 (benchmarks/sm90_model.py): those with a program a tile,
#: and those whose programs take one tile after the other.
WITH_PRODUCER = replace(CALIBRATION, clock=0.927, mixed=0.189, own_bytes=42.1, block=6130.0)
PERSISTENT = replace(WITH_PRODUCER, block=1840.0)


@dataclass(frozen=True)
class Prediction:
    """The predicted time and what made it, for one trip of the unmasked loop on a full SM."""

    seconds: float
    resident: int  #: blocks per SM
    pipes: dict[str, float]  #: pipe -> cycles a trip of all resident blocks keeps it busy
    trip_cycles: float  #: cycles of that trip, waits included
    hbm_seconds: float  #: lower bound by device memory alone


@dataclass(frozen=True)
class Candidates:
    """Configs of one kernel side by side, compiled or guessed at: one row each, two columns (unmasked, masked) of a trip."""

    block_m: Array  #: [n, 1]
    block_n: Array  #: [n, 1]
    warps: Array  #: [n, 1]
    stages: Array  #: [n, 1]
    described: Array  #: [n, 1] whether tiles are read by descriptor
    heads_per_wave: Array  #: [n]
    fit: Array  #: [n] blocks an SM holds at a time
    mma: Array  #: [n, 2] 1 for HGMMA, 0 for HMMA, 2 for tcgen05, -1 without tensor cores
    counts: Mapping[str, Array]  #: numbers of sass.Loop by name, [n, 2]: of a warp
    phases: Array  #: [phases, len(PHASE_FIELDS), n, 2]; phases that are not there wait for nothing and hold nothing
    groups: Array  #: [n] groups of ``warps`` warps that a block has, each with a loop of its own


MMA = {"HGMMA": 1.0, "HMMA": 0.0, "UTCHMMA": 2.0, "": -1.0}
COUNTS = (
    "tensor_flops", "mufu", "fp32", "alu", "issue", "shared_bytes", "local_bytes", "copies", "atomics",
    "product_bytes", "meetings",
)  # fmt: skip


def plain_and_masked(loops: Sequence[sass.Loop]) -> tuple[sass.Loop, sass.Loop]:
    """The unmasked and the masked loop: the mask is compares."""
    by_compares = sorted(loops, key=lambda loop: loop.compares)
    return by_compares[0], by_compares[-1]


def _merged(phases: Sequence[Sequence[float]]) -> list[list[float]]:
    """Products that are waited for one by one (ptxas does that where it cannot keep them apart) as one: a phase more says
    "waits", how many."""
    found: list[list[float]] = []
    pending, flops, issue = (sass.PHASE.index(name) for name in ("pending", "tensor_flops", "issue"))
    for number, phase in enumerate(phases):
        follows = (
            number >= 2 and phase[flops] > 0 and phases[number - 1][pending] == 0 and phases[number - 2][flops] > 0
        )
        if follows and phases[number - 1][issue] <= BETWEEN_SERIAL:
            between = found.pop()
            found[-1] = [a + b + c for a, b, c in zip(found[-1], between, [*phase, 1.0], strict=True)]
            found[-1][pending] = -1.0
        else:
            found.append([*phase, 0.0])
    return found


def _column(values: Sequence[float]) -> Array:
    return np.array(values, dtype=float)[:, None]


def gather(
    configs: Sequence[Config], warps: Sequence[int], fit: Sequence[int], loops: Sequence[Sequence[sass.Loop]],
    groups: Sequence[int] | None = None,
) -> Candidates:  # fmt: skip
    """Candidates from what compilers and disassemblers say of each. ``groups``: None for one each."""
    groups = groups or [1] * len(configs)
    sides = [by_wgmma.tile(config, count) for config, count in zip(configs, groups, strict=True)]
    pairs = [plain_and_masked(found) for found in loops]
    merged = [[_merged(loop.phases) for loop in pair] for pair in pairs]
    longest = max((len(found) for pair in merged for found in pair), default=0)
    phases = np.zeros((longest, len(PHASE_FIELDS), len(configs), 2))
    phases[:, PHASE_FIELDS.index("pending")] = -1.0
    for row, pair in enumerate(merged):
        for column, found in enumerate(pair):
            if found:
                phases[: len(found), :, row, column] = found
    return Candidates(
        block_m=_column([m for m, _ in sides]),
        block_n=_column([n for _, n in sides]),
        warps=_column(warps),
        stages=_column([config.get("num_stages") or by_wgmma.stages(config, by_mma_sync.STAGES) for config in configs]),
        described=np.array([[implementation_of(config) == DESCRIPTOR] for config in configs]),
        heads_per_wave=np.array(
            [config.get("HEADS_PER_WAVE", 1) or by_wgmma.HEADS_PER_BAND for config in configs], dtype=float
        ),
        fit=np.array(fit, dtype=float),
        mma=np.array([[MMA[loop.mma] for loop in pair] for pair in pairs]),
        counts={name: np.array([[float(getattr(loop, name)) for loop in pair] for pair in pairs]) for name in COUNTS},
        phases=phases,
        groups=np.array(groups, dtype=float),
    )


def _published(gpu: Gpu, problem: Problem) -> float:
    """FLOPs an SM's tensor cores do per boost clock."""
    return gpu.peak(problem.dtype, problem.precision) * 1e12 / (gpu.sm_count * gpu.clock_mhz * 1e6)


def _rate(x: Candidates, problem: Problem, gpu: Gpu, c: Calibration) -> Array:
    """FLOPs an SM's tensor cores do per boost clock, with the instructions at hand."""
    share = {9: c.mma_sync_on_hopper, 10: c.mma_sync_on_blackwell, 11: c.mma_sync_on_blackwell}.get(gpu.arch // 10, 1.0)
    return _published(gpu, problem) * np.where(x.mma == MMA["HMMA"], share, 1.0)


@dataclass(frozen=True)
class _Trip:
    """Clocks of one trip of one block that has the SM for itself, [n, 2]."""

    pipes: dict[str, Array]  #: pipe -> clocks it is busy
    tensor: Array  #: of those, what tensor cores work and read
    compute: Array  #: what the schedulers' other pipes are busy at the least
    chain: Array  #: from one trip to the next


def _fp32_lanes(gpu: Gpu) -> float:
    return gpu.fp32_tflops * 1e12 / (2 * gpu.sm_count * gpu.clock_mhz * 1e6)


def _tile_flops(kernel: str, problem: Problem, x: Candidates) -> Array:
    """Of one trip by the block sizes: what tcgen05 instructions, whose shape SASS does not show, have to do."""
    d, dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    unit = Problem(problem.dtype, 1, 1, 1, 1, 1, d, dv, FULL).flops(kernel)
    return x.block_m * x.block_n * unit


def _stretch(work: Mapping[str, Array], fp32_lanes: float, c: Calibration) -> tuple[Array, Array]:
    """(clocks its busiest pipe takes, clocks a lone warp takes) for instructions of one warp in each quarter of an SM."""
    threads = WARP_GROUP * WARP_THREADS
    parts = (
        work["mufu"] * threads / MUFU_LANES,
        work["fp32"] * threads / fp32_lanes,
        work["alu"] * threads / ALU_LANES,
        (work["shared_bytes"] + c.spill * work["local_bytes"]) * WARP_GROUP / SHARED_BYTES,
    )
    longest, together = np.maximum.reduce([*parts, work["issue"]]), sum(parts)
    busiest = longest + c.mixed * np.maximum(0.0, together - longest)
    return busiest, np.maximum(busiest, np.maximum(together, c.pace * work["issue"]))


def _trip(x: Candidates, kernel: str, problem: Problem, gpu: Gpu, tilings: Tilings, c: Calibration) -> _Trip:
    rate = _rate(x, problem, gpu, c)
    lanes = _fp32_lanes(gpu)
    counts = x.counts
    flops = np.where(x.mma == MMA["UTCHMMA"], _tile_flops(kernel, problem, x), counts["tensor_flops"] * x.warps)
    groups = x.groups[:, None]  # which share what a trip streams
    rows = x.block_m * padded_head_dim(problem.head_dim) * 4 / groups
    l2_rate = c.l2_bytes if gpu.arch in (80, 90, 100, 103) else c.l2_bytes_small
    threads = x.warps * WARP_THREADS
    pipes = {
        "tensor": flops / rate,
        "mufu": counts["mufu"] * threads / MUFU_LANES,
        "fp32": counts["fp32"] * threads / lanes,
        "alu": counts["alu"] * threads / ALU_LANES,
        "issue": (counts["issue"] + counts["copies"] * (c.copy - 1.0)) * x.warps / SCHEDULERS,
        "shared": (counts["shared_bytes"] + c.spill * counts["local_bytes"]) * x.warps / SHARED_BYTES,
        "l2": tilings.stream_bytes[:, None] / l2_rate / groups
        + np.where(counts["atomics"] > 0, rows, 0.0) / c.atomic_bytes,
    }  # fmt: skip

    # Without phases: one stretch, the products among its instructions.
    in_quarter = np.maximum(1.0, x.warps / SCHEDULERS)
    copying = counts["copies"] * (c.copy - 1.0)
    work = {**counts, "issue": counts["issue"] + copying}
    busiest, alone = _stretch(work, lanes, c)
    products = pipes["tensor"] / in_quarter
    chain = np.maximum(products, alone) + c.serial * np.minimum(products, alone)
    chain = np.maximum(chain + c.in_step * (in_quarter - 1.0) * np.maximum(busiest, products), in_quarter * busiest)
    chain = np.maximum(chain, pipes["tensor"])
    compute, tensor = in_quarter * busiest, pipes["tensor"]
    if len(x.phases):
        phased = _phased(x, rate, 1.0 + copying / np.maximum(1.0, counts["issue"]), lanes, in_quarter, c)
        has = x.mma == MMA["HGMMA"]
        tensor, compute, chain = (np.where(has, a, b) for a, b in zip(phased, (tensor, compute, chain), strict=True))
    return _Trip(pipes, tensor, compute, chain + counts["meetings"] * c.barrier)


def _phased(
    x: Candidates, rate: Array, slowed: Array, lanes: float, in_quarter: Array, c: Calibration
) -> tuple[Array, Array, Array]:
    """(tensor cores busy, other pipes busy, chain) of a trip whose products run beside what follows them, until a wait.
    ``slowed``: issue slots per instruction, copies taking more than one."""
    tensor = compute = np.zeros_like(slowed)
    plan = []
    for numbers in x.phases:
        work = dict(zip(PHASE_FIELDS, numbers, strict=True))
        busiest, alone = _stretch({**work, "issue": work["issue"] * slowed}, lanes, c)
        # warps of a quarter go in step, as far as the block's barriers and the tensor cores they share make them
        stretch = np.maximum(alone + c.in_step * (in_quarter - 1.0) * busiest, in_quarter * busiest)
        product = in_quarter * np.maximum(
            work["tensor_flops"] * WARP_GROUP / rate, work["product_bytes"] * WARP_GROUP / SHARED_BYTES
        )
        product = np.where(product > 0, product + c.start, 0.0)
        # those waited for one by one hold their warps until the last is through
        held = np.where(work["waits"] > 0, product + work["waits"] * c.drain, 0.0)
        plan.append((work["pending"], product, stretch, held))
        tensor, compute = tensor + product, compute + in_quarter * busiest
    # the clock; when the last product and the one before it are through
    now = done = before = start = np.zeros_like(slowed)
    for _ in range(2):  # the second trip starts as all later ones do
        start = now
        for pending, product, stretch, held in plan:
            through = np.where(pending == 0, done, before) + c.drain
            now = np.where(pending >= 0, np.maximum(now, through), now)
            has = product > 0
            begins = np.maximum(now, done)
            before, done = np.where(has, done, before), np.where(has, begins + np.maximum(product, held), done)
            now = np.maximum(now + stretch, np.where(has, begins + held, 0.0))
    return tensor, compute, np.maximum(now - start, tensor)


def _clocks(x: Candidates, trip: _Trip, resident: Array, c: Calibration) -> Array:
    """Clocks of one trip of ``resident`` blocks at once, waits for data included. A tile is asked for at the end of a trip,
    num_stages - 1 trips before its own: with two stages that is just before its own. Without a pipeline tiles are waited
    for: by pointer both at once, by descriptor one after the other."""
    busy = _together(trip, 0.0, resident, c)
    late = np.maximum(0.0, (1.0 - c.ahead) * c.load - (x.stages - 2.0) * busy)
    at_once = np.where(x.described, 2.0, 1.0) * c.load
    return _together(trip, np.where(x.stages > 1, late, at_once), resident, c)


def _together(trip: _Trip, waits: Array | float, resident: Array, c: Calibration) -> Array:
    """Clocks of one trip of ``resident`` blocks at once: mean-value analysis of a closed queueing network (Reiser and
    Lavenberg 1980) with two stations, tensor cores and schedulers, and the rest of a block's chain as time away from both."""
    stations = trip.tensor, trip.compute
    busy = trip.tensor + trip.compute
    away = np.maximum(0.0, trip.chain - busy) + waits
    # products that run beside their own block's instructions make the chain shorter than both together
    overlap = np.minimum(1.0, trip.chain / np.maximum(busy, 1e-9))
    resident = np.broadcast_to(resident[:, None], busy.shape)
    waiting = [np.zeros_like(busy) for _ in stations]  # blocks at each
    clocks = np.zeros_like(busy)
    for blocks in range(1, math.ceil(resident.max()) + 1):
        at = [own * overlap * (1.0 + queue) for own, queue in zip(stations, waiting, strict=True)]
        turn = away + at[0] + at[1]
        share = 1.0 if blocks == 1 else np.clip(resident - (blocks - 1), 0.0, 1.0)
        clocks = clocks + share * (turn - clocks)
        waiting = [blocks * time / turn for time in at]
    longest = np.maximum.reduce([*stations, *trip.pipes.values()])
    return np.maximum(clocks, resident * longest)


@dataclass(frozen=True)
class Tilings:
    """Tilings side by side: their numbers as arrays [n]."""

    heads: Array
    tiles: Array
    plain: Array
    masked: Array
    longest: Array  #: [n, 2]
    own_rows: Array
    stream_bytes: Array  #: of one trip
    streamed: Array
    shared_by: Array
    row_bytes: Array


def side_by_side(found: Sequence[Tiling]) -> Tilings:
    def numbers(name: str) -> Array:
        return np.array([getattr(tiling, name) for tiling in found], dtype=float)

    return Tilings(
        heads=numbers("heads"),
        tiles=numbers("tiles"),
        plain=numbers("plain"),
        masked=numbers("masked"),
        longest=numbers("longest"),
        own_rows=numbers("own_rows"),
        stream_bytes=numbers("stream_rows") * numbers("row_bytes"),
        streamed=numbers("streamed"),
        shared_by=numbers("shared_by"),
        row_bytes=numbers("row_bytes"),
    )


def _hbm_bytes(t: Tilings, slots: Array, heads_per_wave: Array, l2_bytes: float) -> Array:
    """Device-memory traffic: every tensor once, and again what L2 does not keep of the streams of running blocks."""
    own = 2.0 * t.tiles * t.own_rows * t.heads * t.row_bytes  # read once, and as much written
    once = t.streamed * t.heads / t.shared_by
    running = np.minimum(t.heads, np.maximum(heads_per_wave, np.ceil(slots / t.tiles)))
    kept = running / t.shared_by * t.streamed
    missing = np.maximum(0.0, 1.0 - l2_bytes / kept)
    rounds = np.maximum(1.0, t.tiles * running / slots)  # times a head is streamed if nothing is kept
    return own + once * (1.0 + missing * (rounds - 1.0))


def _ends(t: Tilings, c: Calibration) -> Array:
    """Clocks of a block beside its trips."""
    return c.block + 2.0 * t.own_rows * t.row_bytes / c.own_bytes


def _head(t: Tilings, clocks: Array, c: Calibration) -> Array:
    """Clocks of all tiles of a head."""
    return _ends(t, c) * t.tiles + t.plain * clocks[:, 0] + t.masked * clocks[:, 1]


@dataclass(frozen=True)
class Times:
    """Predictions side by side: [n]."""

    seconds: Array
    resident: Array
    trip: Array  #: clocks of an unmasked trip of all resident blocks
    pipes: dict[str, Array]  #: pipe -> clocks of that trip it is busy
    hbm_seconds: Array


def times(
    x: Candidates, kernel: str, owns_queries: bool, problem: Problem, gpu: Gpu, calibration: Calibration = CALIBRATION
) -> Times:
    """Of candidates for one kernel and problem. Their ``fit`` must be 1 or more, the problem not empty."""
    sides = zip(x.block_m[:, 0].astype(int).tolist(), x.block_n[:, 0].astype(int).tolist(), strict=True)
    tilings = side_by_side([tiles.tiling(owns_queries, problem, m, n) for m, n in sides])
    return of_tiles(x, kernel, tilings, problem, gpu, calibration)


def of_tiles(x: Candidates, kernel: str, t: Tilings, problem: Problem, gpu: Gpu, c: Calibration) -> Times:
    """``times``, the tilings known."""
    clock = gpu.clock_mhz * 1e6 * c.clock
    trip = _trip(x, kernel, problem, gpu, t, c)
    blocks = t.heads * t.tiles
    per_sm = np.ceil(blocks / gpu.sm_count)
    resident = np.minimum(x.fit, per_sm)
    clocks = _clocks(x, trip, resident * x.groups, c)
    longest = _ends(t, c) + (t.longest * clocks).sum(1)
    if not visits.longest_last(problem.mask):  # tiles in their order: whole rounds, then one with fewer blocks on an SM
        # under a mask rounds are as long as the mean tile, but for the last
        each = _head(t, clocks, c) / t.tiles if visits.bounded(problem.mask) else longest
        rounds, rest = np.divmod(per_sm, resident)
        last = _ends(t, c) + (t.longest * _clocks(x, trip, np.maximum(1.0, rest) * x.groups, c)).sum(1)
        cycles = rounds * each + np.where(rest > 0, last, longest - each)
    else:  # longest tiles first in each band of heads: of the last band's, some begin when all others are through
        even = _head(t, clocks, c) * t.heads / (gpu.sm_count * resident)
        bands = np.ceil(t.heads / x.heads_per_wave)
        alone = _clocks(x, trip, np.maximum(1.0, resident * c.tail) * x.groups, c)
        # while a band is shorter than the slots are many, its tiles begin before those of the band before end
        slots = np.minimum(1.0, gpu.sm_count * resident / (np.minimum(t.heads, x.heads_per_wave) * t.tiles))
        out = _ends(t, c) + (t.longest * alone).sum(1) - EARLY * slots * _head(t, alone, c) / t.tiles
        cycles = np.maximum(even, even * (bands - 1) / bands + out)
    traffic = _hbm_bytes(t, gpu.sm_count * resident, x.heads_per_wave, gpu.l2_bytes * c.l2_share)
    hbm_seconds = traffic / (gpu.hbm_gbs * 1e9 * c.hbm)
    busy = {name: resident * value[:, 0] for name, value in trip.pipes.items()}
    return Times(np.maximum(cycles / clock, hbm_seconds), resident, clocks[:, 0], busy, hbm_seconds)


def explain(
    binary: Binary,
    problem: Problem,
    gpu: Gpu,
    calibration: Calibration = CALIBRATION,
    loops: Sequence[sass.Loop] | None = None,
) -> Prediction:
    """The prediction with its parts. ``loops``: what was counted of the binary before; without, it is disassembled.
    ValueError if ``binary`` cannot launch on ``gpu``."""
    fit = limits.blocks_per_sm(binary, gpu)
    if fit < 1:
        raise ValueError(f"binary: {binary.kernel} {dict(binary.config)} does not fit on {gpu.name}")
    loops = sass.counts(binary.cubin_path) if loops is None else loops
    if not loops:  # bwd_delta: o and do in, delta out
        rows = problem.batch * problem.heads_q * problem.seqlen_q
        moved = rows * (2 * problem.head_dim_v * ITEMSIZE[problem.dtype] + 4)
        seconds = moved / (gpu.hbm_gbs * 1e9 * calibration.hbm)
        return Prediction(seconds, fit, {}, 0.0, seconds)
    variant, warps, groups = variant_named(binary.kernel), binary.num_warps, 1
    owns_queries = limits.owns_queries(variant, binary.config)
    if calibration is CALIBRATION:
        calibration = calibration_of(variant, binary.config)
    if by_wgmma.warp_specialized(variant):
        warps, groups = WARP_GROUP, by_wgmma.groups_of(binary.num_warps)
    tiling = tiles.tiling(owns_queries, problem, *by_wgmma.tile(binary.config, groups))
    if tiling.heads * tiling.tiles == 0:
        return Prediction(0.0, fit, {}, 0.0, 0.0)
    if by_mma_sync.written_out(variant):
        loops = by_mma_sync.per_block(loops, variant, binary.spec, binary.config, binary.num_warps)
    x = gather([binary.config], [warps], [fit], [loops], [groups])
    found = of_tiles(x, variant.serves, side_by_side([tiling]), problem, gpu, calibration)
    return Prediction(
        float(found.seconds[0]),
        int(found.resident[0]),
        {name: float(value[0]) for name, value in found.pipes.items()},
        float(found.trip[0]),
        float(found.hbm_seconds[0]),
    )


def calibration_of(variant: Variant, config: Config) -> Calibration:
    """The constants of a kernel's config."""
    if by_wgmma.warp_specialized(variant):
        return PERSISTENT if by_wgmma.persistent(variant, config) else WITH_PRODUCER
    return WRITTEN_OUT if by_mma_sync.written_out(variant) else CALIBRATION


def knows(variant: Variant) -> bool:
    """Whether it predicts the time of a kernel's binaries."""
    return variant.modelled or by_mma_sync.written_out(variant) or by_wgmma.warp_specialized(variant)


def predict(binary: Binary, problem: Problem, gpu: Gpu, loops: Sequence[sass.Loop] | None = None) -> float:
    """Seconds ``binary`` takes for ``problem`` on ``gpu``. ValueError if it cannot launch there."""
    return explain(binary, problem, gpu, loops=loops).seconds
