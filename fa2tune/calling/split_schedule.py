"""Whether a forward's keys are split among programs, into how many parts, and with which tiles: arithmetic on the host, by the
call's own batch, heads and lengths.

The tuned kernels have a program for each tile of queries of each query head. A call of few queries has few such tiles: most
multiprocessors are idle, each tile has more rows than queries, and the query heads of a group read the same keys one by one.
``launching/key_splits.py`` has a program for each part of the keys, and the queries of a whole group as rows of its tile. Both
are estimated here in the same way: what the busiest multiprocessor computes, loads and waits for, and what memory has to give.
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
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, padded_head_dim
from fa2tune.spec.variant import WARP_SPECIALIZED

#: Share of the peak rate that kernels reach inside a key block: warp-specialised, portable.
HOPPER_RATE, PORTABLE_RATE = 0.7, 0.45
#: Bytes a microsecond that one multiprocessor loads, and the share of the memory's bandwidth that all together reach.
LOADED_PER_US, MEMORY_RATE = 60e3, 0.88
#: Microseconds: of a launch, of the launch that puts parts together, of a program's start and end, and the least of a key
#: block, whose steps wait for one another.
LAUNCH_US, COMBINE_US, START_US, BLOCK_US = 3.0, 2.0, 1.5, 0.5
#: Rows of a tile -> programs of the kernel that splits keys that a multiprocessor holds at once, at head dim 128.
HELD = {16: 3, 32: 2, 64: 2, 128: 1}
#: Splitting must be predicted to be faster by this share, as the other configs were measured. Of predictions this near to the
#: least the one of the fewest parts is taken.
MARGIN, TIE = 0.1, 0.02


@dataclass(frozen=True)
class Work:
    """Programs of one kind, and what a multiprocessor does for them."""

    programs: int
    blocks: int  #: of keys, in one program
    rows: int  #: of a tile
    keys: int  #: of a block
    held: int  #: programs that a multiprocessor holds at once
    rate: float  #: share of the peak


def keys_of_tile(problem: Problem, queries: int) -> int:
    """Keys that a tile of so many queries visits, on average."""
    return min(problem.seqlen_k, int(problem.keys_seen) + queries)


def _columns(problem: Problem) -> int:
    return padded_head_dim(problem.head_dim) + padded_head_dim(problem.head_dim_v)


def _busy_us(problem: Problem, work: Work, gpu: Gpu) -> float:
    """Of the multiprocessor with the most programs, or of memory: whichever is longer."""
    size = ITEMSIZE[problem.dtype]
    most = -(-work.programs // gpu.sm_count)  # of one multiprocessor
    turns = -(-most // work.held)
    peak = gpu.peak(problem.dtype, problem.precision) * 1e6 * work.rate / gpu.sm_count  # operations a microsecond
    computed = 2 * work.rows * work.keys * _columns(problem) / peak
    loaded = work.keys * (problem.head_dim + problem.head_dim_v) * size / LOADED_PER_US
    busy = turns * START_US + work.blocks * max(most * computed, most * loaded, turns * BLOCK_US)
    seen = min(problem.seqlen_k, work.blocks * work.keys if work.programs else 0)
    whole = max(seen, keys_of_tile(problem, problem.seqlen_q))
    bytes_read = problem.batch * problem.heads_kv * whole * (problem.head_dim + problem.head_dim_v) * size
    return max(busy, bytes_read / (gpu.hbm_gbs * 1e3 * MEMORY_RATE))


def ordinary_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds of a tuned forward, estimated."""
    hopper = WARP_SPECIALIZED in variant_of("fwd", config).implementations
    rows, keys = config["BLOCK_M"], config["BLOCK_N"]
    held = PROGRAMS[config["maxnreg"]] if hopper else 1
    blocks = -(-keys_of_tile(problem, rows) // keys)
    tiles = problem.query_tiles(rows) * problem.heads_q
    work = Work(tiles, blocks, rows, keys, held, HOPPER_RATE if hopper else PORTABLE_RATE)
    return LAUNCH_US + _busy_us(problem, work, gpu)


def split_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds with keys split as a config of the kernel for that says, estimated."""
    rows, keys, splits = config["BLOCK_M"], config["BLOCK_N"], config["SPLITS"]
    blocks = -(-_blocks(problem, config) // splits)
    work = Work(fwd_split.programs(problem, config), blocks, rows, keys, _held(problem, rows), PORTABLE_RATE)
    time = LAUNCH_US + _busy_us(problem, work, gpu)
    if splits == 1:
        return time
    summed = 4 * splits * problem.batch * problem.heads_q * problem.seqlen_q * (problem.head_dim_v + 2)
    return time + COMBINE_US + 2 * summed / (gpu.hbm_gbs * 1e3 * MEMORY_RATE)


def _held(problem: Problem, rows: int) -> int:
    return max(1, HELD[rows] * 256 // max(256, _columns(problem)))


def _blocks(problem: Problem, config: Config) -> int:
    """Key blocks that a tile visits."""
    queries = -(-config["BLOCK_M"] // problem.group)
    return max(1, -(-keys_of_tile(problem, queries) // config["BLOCK_N"]))


def candidates(problem: Problem, arch: int) -> Iterator[Config]:
    """Configs that are worth an estimate: no tile of twice the rows that there are, and of the numbers of parts that leave the
    longest part as long the least."""
    spec, all_rows = problem.specialization, problem.seqlen_q * problem.group
    for rows in fwd_split.tiles(spec, arch):
        if rows > fwd_split.ROWS[0] and rows >= 2 * all_rows:
            continue
        one = fwd_split.config_of(spec, arch, problem.tma, rows, 1)
        blocks, longest = _blocks(problem, one), 0
        for splits in range(1, min(blocks, fwd_split.MOST_SPLITS) + 1):
            if -(-blocks // splits) != longest:
                longest = -(-blocks // splits)
                yield fwd_split.config_of(spec, arch, problem.tma, rows, splits)


@lru_cache(maxsize=1024)
def best(problem: Problem, gpu: Gpu) -> tuple[float, Config]:
    """(estimated microseconds, config) of the fastest split; fewer parts where two are as fast."""
    found = [(split_us(problem, config, gpu), config) for config in candidates(problem, gpu.arch)]
    least = min(time for time, _ in found)
    near = (one for one in found if one[0] <= (1 + TIE) * least)
    return min(near, key=lambda one: (one[1]["SPLITS"], one[0]))


def config_of(problem: Problem, config: Config, gpu: Gpu) -> Config | None:
    """How the keys of a forward are split that ``config`` would serve otherwise; None: they are not."""
    if is_empty(problem) or problem.extent.ragged:
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
