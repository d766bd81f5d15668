"""Whether a forward's keys are split among programs, into how many parts, and with which tiles: arithmetic on the host, by the
call's own batch, heads and lengths.

The tuned kernels have a program for each tile of queries of each query head. A call of few queries has few such tiles: most
multiprocessors are idle, each tile has more rows than queries, and the query heads of a group read the same keys one by one.
``launching/key_splits.py`` has a program for each part of the keys, and the queries of a whole group as rows of its tile. Both
are estimated here in the same way, with constants fitted to benchmarks/calls/few_queries.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fa2tune.calling.empty import is_empty
from fa2tune.compiling.registry import variant_of
from fa2tune.gpus import Gpu
from fa2tune.search_spaces.portable import fwd_split
from fa2tune.search_spaces.sm90.fwd import PROGRAMS
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, Specialization, padded_head_dim
from fa2tune.spec.variant import WARP_SPECIALIZED

#: Warp-specialised, portable: share of the peak rate that kernels reach inside a key block, and bytes a microsecond that one
#: multiprocessor loads.
HOPPER_RATES, PORTABLE_RATES = (0.73, 70e3), (0.5, 46e3)
#: Share of the bandwidth of memory that all multiprocessors together reach, L2 included.
MEMORY_RATE = 1.0
#: Microseconds: of a launch, of the launch that puts parts together, and of a program's start and end.
LAUNCH_US, COMBINE_US, START_US = 1.9, 1.6, 1.6
#: Microseconds that a block of 64 keys takes at the least at head dim 128, since its steps wait for one another: of the tuned
#: kernel, and by the rows of a tile of the one that splits keys; programs of the latter that registers leave room for.
TUNED_BLOCK_US = 0.57
BLOCK_US = {16: 0.94, 32: 1.03, 64: 1.2, 128: 1.1}
HELD = {16: 4, 32: 3, 64: 3, 128: 1}
#: Of a turn, where there are several: programs do not end together, and the last ones are alone.
UNEVEN = 0.1
#: Splitting must be predicted to be faster by this share, as the other configs were measured. Of predictions this near to the
#: least the one of the fewest parts is taken.
MARGIN, AS_NEAR = 0.15, 0.01
#: Compute capabilities that the kernels and the constants were measured on.
MEASURED_ON = (90,)
#: Only calls of so few rows a key head, or of so few tiles of FULL_TILE rows a multiprocessor, are split: of others the tuned
#: kernel's tiles fill the GPU, whose own rows say more of it than the estimate here.
FEW_ROWS, IDLE_SHARE, FULL_TILE = 256, 0.5, 128


@dataclass(frozen=True)
class TileWork:
    """Programs of one kind."""

    programs: int
    blocks: int  #: of keys, in one program
    rows: int  #: of a tile
    keys: int  #: of a block
    held: int  #: programs that a multiprocessor holds at once
    sharing: int  #: programs that read the same keys at the same time
    rates: tuple[float, float]  #: HOPPER_RATES or PORTABLE_RATES
    least_us: float  #: a block
    start_us: float  #: a program


def keys_of_tile(problem: Problem, queries: int) -> int:
    """Keys that a tile of so many queries visits, on average."""
    return min(problem.seqlen_k, int(problem.keys_seen) + queries)


def _columns(problem: Problem) -> int:
    return padded_head_dim(problem.head_dim) + padded_head_dim(problem.head_dim_v)


def _busy_us(problem: Problem, work: TileWork, gpu: Gpu) -> float:
    """Programs take turns, as many at once as all multiprocessors hold. A block takes what is longest: the wait of its steps
    for one another, what the busiest multiprocessor computes or loads, or what all of them take from memory."""
    loaded = work.keys * (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]  # bytes a block
    peak = gpu.peak(problem.dtype, problem.precision) * 1e6 * work.rates[0] / gpu.sm_count  # operations a microsecond
    computed = 2 * work.rows * work.keys * _columns(problem) / peak
    shared = loaded / work.sharing / (gpu.hbm_gbs * 1e3 * MEMORY_RATE)

    def turn(programs: int) -> float:
        most = -(-programs // gpu.sm_count)  # of one multiprocessor
        block = max(work.least_us, most * computed, most * loaded / work.rates[1], programs * shared)
        return work.start_us + work.blocks * block

    whole, rest = divmod(work.programs, gpu.sm_count * work.held)
    full = turn(gpu.sm_count * work.held) if whole else 0.0
    late = UNEVEN * full if work.programs > gpu.sm_count * work.held else 0.0
    return whole * full + (turn(rest) if rest else 0.0) + late


def ordinary_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds of a tuned forward, estimated."""
    hopper = WARP_SPECIALIZED in variant_of("fwd", config).implementations
    rows, keys = config["BLOCK_M"], config["BLOCK_N"]
    work = TileWork(
        problem.query_tiles(rows) * problem.heads_q, -(-keys_of_tile(problem, rows) // keys), rows, keys,
        PROGRAMS[config["maxnreg"]] if hopper else 1, -(-problem.seqlen_q // rows) * problem.group,
        HOPPER_RATES if hopper else PORTABLE_RATES, TUNED_BLOCK_US * _part(problem, keys), 2 * START_US,
    )  # fmt: skip
    return LAUNCH_US + _busy_us(problem, work, gpu)


def split_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds with keys split as a config of the kernel for that says, estimated."""
    rows, keys, splits = config["BLOCK_M"], config["BLOCK_N"], config["SPLITS"]
    work = TileWork(
        fwd_split.programs(problem, config), -(-_blocks(problem, rows, keys) // splits), rows, keys,
        _held(problem.specialization, rows, gpu), -(-problem.seqlen_q * problem.group // rows), PORTABLE_RATES,
        BLOCK_US[rows] * _part(problem, keys), START_US,
    )  # fmt: skip
    time = LAUNCH_US + _busy_us(problem, work, gpu)
    if splits == 1:
        return time
    summed = 4 * splits * problem.batch * problem.heads_q * problem.seqlen_q * (problem.head_dim_v + 2)
    return time + COMBINE_US + 2 * summed / (gpu.hbm_gbs * 1e3)


def _part(problem: Problem, keys: int) -> float:
    """Of a block of 64 keys at head dim 128."""
    return keys * _columns(problem) / (64 * 256)


@lru_cache(maxsize=1024)
def _held(spec: Specialization, rows: int, gpu: Gpu) -> int:
    """Programs of so many rows a tile that a multiprocessor holds at once; the system takes 1 KiB of shared memory for each."""
    config = fwd_split.config_of(spec, gpu.arch, spec.aligned, rows, 1)
    return max(1, min(HELD[rows], gpu.shared_per_sm // (fwd_split.shared_bytes(spec, config) + 1024)))


@lru_cache(maxsize=1024)
def _blocks(problem: Problem, rows: int, keys: int) -> int:
    """Key blocks that a tile visits."""
    return max(1, -(-keys_of_tile(problem, -(-rows // problem.group)) // keys))


def candidates(problem: Problem, arch: int) -> Iterator[Config]:
    """Configs that are worth an estimate: no tile of twice the rows that there are, and of the numbers of parts that leave the
    longest part as long the least."""
    spec, all_rows = problem.specialization, problem.seqlen_q * problem.group
    for rows in fwd_split.tiles(spec, arch):
        if rows > fwd_split.ROWS[0] and rows >= 2 * all_rows:
            continue
        one = fwd_split.config_of(spec, arch, problem.tma, rows, 1)
        blocks, longest = _blocks(problem, rows, one["BLOCK_N"]), 0
        for splits in range(1, min(blocks, fwd_split.MOST_SPLITS) + 1):
            if -(-blocks // splits) != longest:
                longest = -(-blocks // splits)
                yield fwd_split.config_of(spec, arch, problem.tma, rows, splits)


@lru_cache(maxsize=1024)
def best(problem: Problem, gpu: Gpu) -> tuple[float, Config]:
    """(estimated microseconds, config) of the fastest split; fewer parts where two are as fast."""
    found = [(split_us(problem, config, gpu), config) for config in candidates(problem, gpu.arch)]
    least = min(time for time, _ in found)
    near = (one for one in found if one[0] <= (1 + AS_NEAR) * least)
    return min(near, key=lambda one: (one[1]["SPLITS"], one[0]))


def _few(problem: Problem, gpu: Gpu) -> bool:
    tiles = problem.query_tiles(FULL_TILE) * problem.heads_q
    return problem.seqlen_q * problem.group <= FEW_ROWS or tiles <= IDLE_SHARE * gpu.sm_count


def config_of(problem: Problem, config: Config, gpu: Gpu) -> Config | None:
    """How the keys of a forward are split that ``config`` would serve otherwise; None: they are not. Of tensors that are not
    aligned nothing was measured."""
    if gpu.arch not in MEASURED_ON or not problem.aligned or is_empty(problem) or problem.extent.ragged:
        return None
    if not _few(problem, gpu):
        return None
    time, split = best(problem, gpu)
    return split if time < (1 - MARGIN) * ordinary_us(problem, config, gpu) else None


def about(problem: Problem, split: Config) -> str:
    """In one sentence, what runs in place of a forward's row."""
    heads = f"the {problem.group} query heads of a key head" if problem.group > 1 else "a query head"
    why = "fwd: few tiles, so fwd_split runs instead, which is expected to be faster and has no row"
    rows = f"{why}: tiles have {heads} as rows"
    if split["SPLITS"] == 1:
        return f"{rows}."
    return f"{rows}, and keys are split into {split['SPLITS']} parts, which are put together after."
