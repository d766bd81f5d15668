"""Analytic time of a binary on a GPU that need not be there. What it knows and how it reckons: docs/model.md.

It ranks configs of one kernel and problem; its absolute times are rough.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fa2tune import limits, sass
from fa2tune.compiler import Binary, variant_named
from fa2tune.gpus import Gpu
from fa2tune.problem import ITEMSIZE, Problem, padded_head_dim

WARP_THREADS = 32
# Throughput of an SM per clock: CUDA C++ Programming Guide, "Arithmetic Instructions"; the same from 8.0 to 12.0.
MUFU_LANES = 16
ALU_LANES = 64
SCHEDULERS = 4  #: one instruction each
SHARED_BYTES = 128  #: also what L1 gives to spills


@dataclass(frozen=True)
class Calibration:
    """What no data sheet says. One set for all GPUs, kernels and dtypes. Unless a source is named: fitted to 294 of 1879
    configs measured on an H200 (bf16, length 8192, four kernels, three head dims, both masks), rounded; docs/model.md."""

    #: clock held under load / boost clock
    clock: float = 0.95
    #: share of the published rate for mma.sync on chips whose full rate needs wgmma (H100: 62 %, Luo et al. 2024,
    #: arXiv 2402.13499) or tcgen05 (a guess)
    mma_sync_on_hopper: float = 0.62
    mma_sync_on_blackwell: float = 0.25
    #: share of a block's chain beside its busiest pipe that costs time
    serial: float = 0.8
    #: the same for mma.sync, which the compiler interleaves with other instructions of the same warp
    serial_mma_sync: float = 0.5
    #: n blocks on an SM leave n^this chains exposed: 0 hides all but one, 1 none
    unhidden: float = 0.6
    #: cycles a load or asynchronous copy of a warp takes (TMA takes none)
    copy: float = 5.0
    #: cost of a spilled byte in shared-memory bytes
    spill: float = 3.0
    #: bytes a clock and SM from L2: data-centre chips, others (half: a guess)
    l2_bytes: float = 60.0
    l2_bytes_small: float = 30.0
    #: float32 atomic adds in L2, bytes a clock and SM
    atomic_bytes: float = 12.0
    #: cycles a block loses at a barrier or a wait for TMA
    barrier: float = 8.0
    #: cycles from asking for a tile to its being there
    load: float = 850.0
    #: cycles a block spends starting, filling its pipeline and draining it (one length measured so far: hardly constrained)
    block: float = 5000.0
    #: share of L2 that keeps what the resident blocks stream (a guess: nothing measured so far was bound by device memory)
    l2_share: float = 0.6
    #: share of the published memory bandwidth a kernel reaches (4.29 of 4.8 TB/s in a copy on an H200)
    hbm: float = 0.89


CALIBRATION = Calibration()


@dataclass(frozen=True)
class Prediction:
    """The predicted time and what made it, for one trip of the unmasked loop on a full SM."""

    seconds: float
    resident: int  #: blocks per SM
    pipes: dict[str, float]  #: pipe -> cycles a trip of all resident blocks keeps it busy
    trip_cycles: float  #: cycles of that trip, waits included
    hbm_seconds: float  #: lower bound by device memory alone


@dataclass(frozen=True)
class _Geometry:
    """How a kernel cuts a problem up. Its programs own tiles of one side and stream the other."""

    heads: int  #: heads whose tiles programs own, batch included
    tiles: tuple[tuple[int, int], ...]  #: per tile of a head: unmasked trips, masked trips
    own_rows: int
    stream_rows: int
    streamed: int  #: bytes of one head's streamed tensors
    shared_by: int  #: owned heads that stream the same tensors
    row_bytes: int  #: of both tensors of a side


def _query_tiles(p: Problem, m: int, n: int) -> tuple[tuple[int, int], ...]:
    """Of kernels that own m queries and stream n keys at a time: trips of each tile, as the kernels have them."""
    tiles = []
    for start in range(0, p.seqlen_q, m):
        end, full = p.seqlen_k, p.seqlen_k // n * n
        if p.causal:
            offset = p.seqlen_k - p.seqlen_q
            end = min(p.seqlen_k, max(start + m + offset, 0))
            full = min(p.seqlen_k, max(start + 1 + offset, 0)) // n * n
        tiles.append((full // n, -(-(end - full) // n)))
    return tuple(tiles)


def _key_tiles(p: Problem, m: int, n: int) -> tuple[tuple[int, int], ...]:
    """Of kernels that own n keys and stream m queries at a time, for every query head of the group."""
    tiles = []
    last = -(-p.seqlen_q // m) * m
    for start in range(0, p.seqlen_k, n):
        begin = full = 0
        if p.causal:
            offset = p.seqlen_k - p.seqlen_q
            begin = min(max(start - offset, 0) // m * m, last)
            full = min(-(-max(start + n - 1 - offset, 0) // m) * m, last)
        if start + n > p.seqlen_k:
            full = last
        tiles.append(((last - full) // m * p.group, (full - begin) // m * p.group))
    return tuple(tiles)


@lru_cache(maxsize=1024)
def _geometry(owns_queries: bool, p: Problem, m: int, n: int) -> _Geometry:
    row_bytes = ITEMSIZE[p.dtype] * (p.head_dim + p.head_dim_v)
    if owns_queries:
        tiles = _query_tiles(p, m, n)
        return _Geometry(p.batch * p.heads_q, tiles, m, n, p.seqlen_k * row_bytes, p.group, row_bytes)
    tiles = _key_tiles(p, m, n)
    return _Geometry(p.batch * p.heads_kv, tiles, n, m, p.seqlen_q * p.group * row_bytes, 1, row_bytes)


def _mma_rate(loop: sass.Loop, problem: Problem, gpu: Gpu, c: Calibration) -> float:
    """FLOPs an SM's tensor cores do per boost clock."""
    published = gpu.peak(problem.dtype, problem.precision) * 1e12 / (gpu.sm_count * gpu.clock_mhz * 1e6)
    if loop.mma == "HMMA" and gpu.arch == 90:
        return published * c.mma_sync_on_hopper
    if loop.mma == "HMMA" and gpu.arch // 10 in (10, 11):
        return published * c.mma_sync_on_blackwell
    return published


def _tile_flops(binary: Binary, problem: Problem) -> float:
    """Of one trip by the block sizes: what tcgen05 instructions, whose shape SASS does not show, have to do."""
    d, dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    tile = Problem(problem.dtype, 1, 1, 1, binary.config["BLOCK_M"], binary.config["BLOCK_N"], d, dv, causal=False)
    return tile.flops(binary.kernel)


def _pipes(
    loop: sass.Loop, binary: Binary, problem: Problem, gpu: Gpu, geometry: _Geometry, c: Calibration
) -> dict[str, float]:
    """Pipe -> SM clocks that one trip of one block keeps it busy."""
    warps = binary.num_warps
    threads = warps * WARP_THREADS
    fp32_lanes = gpu.fp32_tflops * 1e12 / (2 * gpu.sm_count * gpu.clock_mhz * 1e6)
    flops = _tile_flops(binary, problem) if loop.mma == "UTCHMMA" else loop.tensor_flops * warps
    l2_rate = c.l2_bytes if gpu.arch in (80, 90, 100, 103) else c.l2_bytes_small
    atomics = binary.config["BLOCK_M"] * padded_head_dim(problem.head_dim) * 4 if loop.atomics else 0
    return {
        "tensor": flops / _mma_rate(loop, problem, gpu, c) if flops else 0.0,
        "mufu": loop.mufu * threads / MUFU_LANES,
        "fp32": loop.fp32 * threads / fp32_lanes,
        "alu": loop.alu * threads / ALU_LANES,
        "issue": loop.issue * warps / SCHEDULERS,
        "copy": loop.copies * warps * c.copy,
        "shared": (loop.shared_bytes + c.spill * loop.local_bytes) * warps / SHARED_BYTES,
        "l2": geometry.stream_rows * geometry.row_bytes / l2_rate + atomics / c.atomic_bytes,
    }


def _trip(pipes: dict[str, float], loop: sass.Loop, binary: Binary, resident: int, c: Calibration) -> float:
    """Clocks of one trip of ``resident`` blocks at once.

    The busiest pipe works for all of them. A block's own trip is a chain: products, special functions, arithmetic, copies, one
    after the other, its warps nearly in step; other blocks hide part of what the chain has beside the busiest pipe. A trip's
    data were asked for num_stages - 1 trips before; what is still missing is waited for.
    """
    products = max(pipes["tensor"], pipes["shared"])
    longest = max(products, *(pipes[name] for name in ("mufu", "fp32", "alu", "issue", "l2")))
    chain = products + pipes["mufu"] + pipes["fp32"] + pipes["alu"] + pipes["copy"]
    serial = c.serial_mma_sync if loop.mma == "HMMA" else c.serial
    work = resident * longest + serial * max(0.0, chain - longest) * resident**c.unhidden
    ahead = (binary.config["num_stages"] - 1) * work
    return work + max(0.0, c.load - ahead) + loop.barriers * c.barrier


def _hbm_bytes(problem: Problem, geometry: _Geometry, slots: int, heads_per_wave: int, l2_bytes: float) -> float:
    """Device-memory traffic: every tensor once, and again what L2 does not keep of the streams of running blocks."""
    own_rows = len(geometry.tiles) * geometry.own_rows * geometry.heads
    own = 2.0 * own_rows * geometry.row_bytes  # read once, and as much written
    once = geometry.streamed * geometry.heads / geometry.shared_by
    running_heads = min(geometry.heads, max(heads_per_wave, -(-slots // len(geometry.tiles))))
    kept = running_heads / geometry.shared_by * geometry.streamed
    missing = max(0.0, 1.0 - l2_bytes / kept) if kept else 0.0
    rounds = max(1.0, len(geometry.tiles) * running_heads / slots)  # times a head is streamed if nothing is kept
    return own + once * (1.0 + missing * (rounds - 1.0))


def explain(binary: Binary, problem: Problem, gpu: Gpu, calibration: Calibration = CALIBRATION) -> Prediction:
    """The prediction with its parts. ValueError if ``binary`` cannot launch on ``gpu``."""
    c = calibration
    clock = gpu.clock_mhz * 1e6 * c.clock
    fit = limits.blocks_per_sm(binary, gpu)
    if fit < 1:
        raise ValueError(f"binary: {binary.kernel} {dict(binary.config)} does not fit on {gpu.name}")
    bandwidth = gpu.hbm_gbs * 1e9 * c.hbm
    loops = sass.counts(binary.cubin_path)
    if not loops:  # bwd_delta: o and do in, delta out
        rows = problem.batch * problem.heads_q * problem.seqlen_q
        seconds = rows * (2 * problem.head_dim_v * ITEMSIZE[problem.dtype] + 4) / bandwidth
        return Prediction(seconds, fit, {}, 0.0, seconds)

    config = binary.config
    owns_queries = limits.owns_queries(variant_named(binary.kernel), config)
    geometry = _geometry(owns_queries, problem, config["BLOCK_M"], config["BLOCK_N"])
    blocks = geometry.heads * len(geometry.tiles)
    if blocks == 0:
        return Prediction(0.0, fit, {}, 0.0, 0.0)
    by_compares = sorted(loops, key=lambda loop: loop.compares)
    both = (by_compares[0], by_compares[-1])  # unmasked, masked: the mask is compares
    pipes = tuple(_pipes(loop, binary, problem, gpu, geometry, c) for loop in both)

    def trips(resident: int) -> tuple[float, ...]:
        return tuple(_trip(p, loop, binary, resident, c) for p, loop in zip(pipes, both, strict=True))

    per_sm = -(-blocks // gpu.sm_count)
    resident = min(fit, per_sm)
    plain, masked = trips(resident)
    longest = max(geometry.tiles, key=sum)
    slowest = c.block + longest[0] * plain + longest[1] * masked
    heads_per_wave = config.get("HEADS_PER_WAVE", 1)
    if not problem.causal:  # equal tiles: whole rounds, then a last one with fewer blocks on an SM
        rounds, rest = divmod(per_sm, resident)
        cycles = rounds * slowest
        if rest:
            last_plain, last_masked = trips(rest)
            cycles += c.block + longest[0] * last_plain + longest[1] * last_masked
    else:  # longest tiles first in each band of heads: only the last band's longest tile can stick out
        head = sum(c.block + tile[0] * plain + tile[1] * masked for tile in geometry.tiles)
        even = head * geometry.heads / (gpu.sm_count * resident)
        bands = -(-geometry.heads // heads_per_wave)
        cycles = max(even, even * (bands - 1) / bands + slowest)
    traffic = _hbm_bytes(problem, geometry, gpu.sm_count * resident, heads_per_wave, gpu.l2_bytes * c.l2_share)
    seconds = max(cycles / clock, traffic / bandwidth)
    busy = {name: resident * value for name, value in pipes[0].items()}
    return Prediction(seconds, resident, busy, plain, traffic / bandwidth)


def predict(binary: Binary, problem: Problem, gpu: Gpu) -> float:
    """Seconds ``binary`` takes for ``problem`` on ``gpu``. ValueError if it cannot launch there."""
    return explain(binary, problem, gpu).seconds
