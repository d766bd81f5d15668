"""Whether one kernel by tiles of queries makes the whole backward of a call, and into how many parts its keys are split:
arithmetic on the host, no GPU.

``launching/query_tiles.py`` has five products a block where split kernels have seven. Its launch is followed by up to two that
add up what tiles and parts have made. Constants are fitted to times of calls on an H200 (docs/experiments/query-tiles.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from fa2tune.calling.schedules import fused_schedule, one_tile_schedule, split_backward_schedule, stored_ds_schedule
from fa2tune.calling.schedules.few_tiles import FULL_TILE
from fa2tune.calling.schedules.key_splits_schedule import MEASURED_ON
from fa2tune.calling.schedules.split_backward_schedule import Tiles, keys_seen
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import query_tiles
from fa2tune.search_spaces.lib.hopper import begins_within_sectors, columns
from fa2tune.spec.problem import ITEMSIZE, Config, Problem
from fa2tune.spec.variant import Variant

#: Whether any call takes it.
QUERY_TILES = True


class QueryTilesPace(NamedTuple):
    """Microseconds of a program that has a multiprocessor for itself: what no column takes, and 128 of Q and V together."""

    block: tuple[float, float]  #: of 64 keys
    ends: tuple[float, float]  #: a tile's start and end


#: By rows of a tile. Fitted with what follows to 374 times of 97 calls, 11 % off, root mean square.
PACES_OF_ROWS = {64: QueryTilesPace((0.51, 0.42), (1.27, 0.51)), 128: QueryTilesPace((0.59, 1.05), (2.58, 0.52))}
#: How many times as long a block takes where so many programs share a multiprocessor; ends take the root of it.
SHARED = {1: 1.0, 2: 1.69, 3: 2.81}
#: A block more with head dims in parts, and where shared memory holds one block's keys at a time; and how many times as long
#: where rows begin inside a sector.
IN_PARTS_US, ONE_STAGE_US, SECTOR_COST = 0.4, 0.78, 1.15
#: Of a call; of the launch that adds up parts of dQ; of the one that adds up the tiles' dK and dV, and of GATHERED more.
CALL_US, COMBINE_US, GATHER_US, GATHERED_US = 0.7, 3.4, 0.96, 0.54
#: Share of the memory's bandwidth at which all of them move what they read and write, but for a whole dQ: with it the fit is as
#: near, and short calls are left that gained a fifth.
MEMORY_RATE = 0.55
#: It must be predicted to be faster than what serves otherwise by this share; of ungrouped heads with several tiles, whose dK
#: and dV are rounded twice, by the second, as ``one_tile_schedule`` has it.
MARGIN, ROUNDED_TWICE = 0.1, one_tile_schedule.ROUNDED_TWICE
#: The share above head dim 128, where the strategy's kernels are the split ones. Short calls of these take 0.9 of what is
#: estimated in the mean, and down to 0.74: by a tenth, three of 12 raced calls lost 1 to 15 %.
SPLIT_MARGIN = 0.22
#: The share next to dS in memory, whose estimate is nearer.
STORED_MARGIN = 0.07
#: Programs that there are, in turns of as many as multiprocessors hold at once.
TURNS = (0.5, 1, 2)
#: Calls of more queries gained 7 % at most: 390 of five heads. They are not estimated.
MOST_QUERIES = 384
#: Bytes of the parts' sums and of the tiles' dK and dV at most.
MOST_BYTES = 256 << 20


def _tiles(problem: Problem, config: Config, gpu: Gpu) -> tuple[Tiles, int]:
    """Programs, parts of tiles, as ``split_backward_schedule`` gives them out, and how many run at once."""
    spec, splits, pace = problem.specialization, config["SPLITS"], PACES_OF_ROWS[config["BLOCK_M"]]
    held = query_tiles.space_of(problem, gpu.arch).at_once(spec, config)
    wide = sum(columns(spec, config)) / 128
    seen = keys_seen(problem.seqlen_q, problem.seqlen_k, config["BLOCK_M"], problem.mask)
    programs = len(seen) * problem.batch * problem.heads_q * splits
    together = min(held, -(-programs // gpu.sm_count))
    block = (
        pace.block[0] + pace.block[1] * wide + IN_PARTS_US * config["IN_PARTS"] + ONE_STAGE_US * (config["STAGES"] == 1)
    )
    block *= SHARED[together] * (SECTOR_COST if begins_within_sectors(spec) else 1.0)
    ends = (pace.ends[0] + pace.ends[1] * wide) * math.sqrt(SHARED[together])
    blocks = [-(-keys // config["BLOCK_N"]) for keys in reversed(seen)]
    costs = tuple([-(-count // splits) * block + ends for count in blocks])
    return Tiles(costs, problem.batch * problem.heads_q * splits, 1), together * gpu.sm_count


def _summed_bytes(problem: Problem, config: Config) -> tuple[int, int]:
    """(Of the parts' dQ, of the tiles' dK and dV), 0 where there are none."""
    count, splits = query_tiles.tiles(problem, config), config["SPLITS"]
    rows, keys = (
        problem.batch * heads * length
        for heads, length in ((problem.heads_q, problem.seqlen_q), (problem.heads_kv, problem.seqlen_k))
    )
    dq = 4 * splits * rows * problem.head_dim if splits > 1 else 0
    both = ITEMSIZE[problem.dtype] * count * keys * (problem.head_dim + problem.head_dim_v) if count > 1 else 0
    return dq, both


def query_tiles_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds of a whole backward, estimated."""
    rate = gpu.hbm_gbs * 1e3 * MEMORY_RATE
    dq, both = _summed_bytes(problem, config)
    rows = problem.batch * problem.heads_q * problem.seqlen_q * (2 * problem.head_dim_v + problem.head_dim)
    keys = problem.batch * problem.heads_kv * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    moved = ITEMSIZE[problem.dtype] * (rows + keys) + dq + (both or ITEMSIZE[problem.dtype] * keys)
    busy = max(split_backward_schedule.last(*_tiles(problem, config, gpu)), moved / rate)
    behind = COMBINE_US + dq / rate if dq else 0.0
    if both:
        count = query_tiles.tiles(problem, config)
        behind += GATHER_US + -(-count // fused_schedule.GATHERED) * GATHERED_US + both / rate
    return CALL_US + busy + behind


def candidates(problem: Problem, gpu: Gpu) -> Iterator[Config]:
    """Tiles of each size, in one part, and in as many as TURNS asks for."""
    spec, space = problem.specialization, query_tiles.space_of(problem, gpu.arch)
    for rows in space.rows_of(spec):
        whole = space.config_of(spec, rows, 1)
        programs = query_tiles.tiles(problem, whole) * problem.batch * problem.heads_kv
        most = query_tiles.most_splits(problem, whole, gpu.arch)
        held = gpu.sm_count * space.at_once(spec, whole)
        counts = {min(most, int(turns * held) // programs) for turns in TURNS}
        for splits in sorted({1} | {count for count in counts if count}):
            config = space.config_of(spec, rows, splits)
            if sum(_summed_bytes(problem, config)) <= MOST_BYTES and query_tiles.can(problem, config, gpu.arch):
                yield config


def _rounds_twice(problem: Problem, config: Config) -> bool:
    """Whether dK and dV are rounded once more than by what serves otherwise."""
    return problem.group == 1 and query_tiles.tiles(problem, config) > 1


@lru_cache(maxsize=1024)
def best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """(estimated microseconds, config) of the fastest, the fewest parts where two are as fast; None: all take too much
    memory."""
    found = [(query_tiles_us(problem, config, gpu), config) for config in candidates(problem, gpu)]

    def fastest(some: list[tuple[float, Config]]) -> tuple[float, Config] | None:
        return min(some, key=lambda one: (one[0], one[1]["SPLITS"]), default=None)

    once, any_tiles = fastest([one for one in found if not _rounds_twice(problem, one[1])]), fastest(found)
    if once is None or any_tiles is None:
        return any_tiles
    return once if any_tiles[0] > (1 - ROUNDED_TWICE) * once[0] else any_tiles


def asked(problem: Problem, gpu: Gpu) -> bool:
    """Whether the kernel is asked for such a call at all."""
    if not QUERY_TILES or gpu.arch not in MEASURED_ON or problem.is_empty or problem.extent.ragged:
        return False
    if problem.seqlen_q > MOST_QUERIES:
        return False
    return fused_schedule.recorded(problem.mask) and query_tiles.able(problem, gpu.arch)


def otherwise(
    problem: Problem, choices: Mapping[str, Choice], parts: Mapping[str, int], order: str, gpu: Gpu
) -> tuple[float, float] | None:  # fmt: skip
    """(Microseconds of what serves without it, estimated, the share by which it must be faster), as
    ``one_tile_schedule.otherwise_us``: also by the other kernels that make all of a backward."""
    given = problem, choices, parts, order, gpu
    share = SPLIT_MARGIN if split_backward_schedule.covers(problem, choices) else MARGIN
    if (one := one_tile_schedule.config_of(*given)) is not None:
        return one_tile_schedule.one_tile_us(problem, one, gpu), share
    if (stored := stored_ds_schedule.config_of(*given)) is not None:
        return stored_ds_schedule.stored_us(problem, stored, gpu), STORED_MARGIN
    time = one_tile_schedule.otherwise_us(*given)
    return None if time is None else (time, share)


def config_of(
    problem: Problem, choices: Mapping[str, Choice], parts: Mapping[str, int], order: str, gpu: Gpu
) -> Config | None:  # fmt: skip
    """Of the kernel that makes the whole backward in place of ``choices``; None: that is not expected to be faster. ``parts``,
    ``order``: as ``otherwise`` has them."""
    if not asked(problem, gpu) or (found := best(problem, gpu)) is None:
        return None
    if (known := otherwise(problem, choices, parts, order, gpu)) is None:
        return None
    (time, config), (other, share) = found, known
    share = max(share, ROUNDED_TWICE) if _rounds_twice(problem, config) else share
    return config if time < (1 - share) * other else None


def all_kernels(problem: Problem, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What may run in place of a backward's kernels, whatever a call's batch, heads and lengths are."""
    if not QUERY_TILES or arch not in MEASURED_ON or not fused_schedule.recorded(problem.mask):
        return []
    if problem.extent.ragged or not query_tiles.able(problem, arch):
        return []
    spec, space = problem.specialization, query_tiles.space_of(problem, arch)
    one_tile, several = (replace(problem, heads_q=problem.heads_kv, seqlen_q=queries) for queries in (1, 2 * FULL_TILE))
    found = []
    for rows, splits, posed in product(space.rows_of(spec), (1, 2), (one_tile, several)):
        config = space.config_of(spec, rows, splits)
        if query_tiles.can(posed, config, arch):
            found += query_tiles.kernels(posed, config, arch)
    return [
        (variant, config, replace(its, heads_q=problem.heads_q, seqlen_q=problem.seqlen_q))
        for variant, config, its in found
    ]


def about(problem: Problem, config: Config, arch: int) -> str:
    """In one sentence, what runs in place of a backward's kernels."""
    splits, count = config["SPLITS"], query_tiles.tiles(problem, config)
    name = query_tiles.kernels(problem, config, arch)[0][0].short_name
    said = f"bwd: few queries, so {name} makes dQ, dK and dV, which is expected to be faster and has no row"
    more = [f"keys are split into {splits} parts, whose dQ is summed after"] if splits > 1 else []
    more += [f"{count} tiles of a key head have dK and dV of their own, which are summed after"] if count > 1 else []
    return f"{said}{': ' if more else ''}{'; '.join(more)}."
