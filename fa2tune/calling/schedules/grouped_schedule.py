"""Whether a forward's tiles have the query heads of a key head as rows, and which tiles: arithmetic on the host, by the call's
batch, heads and lengths.

The tuned kernels have tiles of each query head. Of 131 queries and four heads a group, tiles of 128 rows are eight, where the
524 rows of a key head fill 4.1. ``kernels/sm90/fwd_grouped.py`` has tiles of several heads. Its time is estimated by what the
busiest multiprocessor works through (``tile_order.busiest``), with constants fitted to benchmarks/calls/grouped_heads.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from fa2tune.calling.schedules import few_tiles, forward_schedule, key_splits_schedule, tile_order, window_schedule
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import grouped_tiles, kernels, space_of, splitting
from fa2tune.rows.row import Row
from fa2tune.search_spaces.sm90.fwd import in_parts
from fa2tune.spec import visits
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, head_dim_parts
from fa2tune.spec.roles import FWD_GROUPED
from fa2tune.spec.variant import Variant

#: Microseconds of a launch, and of a block of 64 keys and 64 rows at 256 columns of K and V, by the rows of a tile: of two
#: programs on a multiprocessor, or of one whose groups take turns. A block has, whatever its keys, waits that last as long as
#: 64 keys do (WAITS). A tile's start and end are worth so many blocks (START). COLUMN_SHARE: of a block, that grows with
#: columns. Fitted to 40 forms of seven calls: 4 % off, root mean square (docs/experiments/few-queries.md).
LAUNCH_US, BLOCK_US, WAITS, START, COLUMN_SHARE = {64: 3.3, 128: 4.0}, {64: 0.506, 128: 0.238}, 1.0, 1.54, 0.615
#: It must be predicted to be faster by this share than what serves otherwise: of 50 raced calls the choice loses as much with
#: any share from 0.02 to 0.08 (docs/experiments/few-queries.md). The second one: from WIDE_COLUMNS of K and V on, where tiles
#: of one head take 8 % longer than estimated. The third one: of more columns, where causal calls of up to 224 queries took 1.2
#: to 1.3 of the estimate; of more keys, where two causal calls at head dim 24 that were predicted to gain 5 % lost more; and
#: where no such call was timed, with fewer queries or in a window.
MARGIN, WIDE_MARGIN, UNTIMED_MARGIN = 0.05, 0.03, 0.15
TIMED_COLUMNS, TIMED_QUERIES, TIMED_KEYS = 448, 64, 512
#: Rows that begin inside a sector: rows of a tile -> head dim -> so many times as long a block took; 0: of others.
SECTOR_COSTS: dict[int, dict[int, float]] = {
    64: {24: 1.25, 40: 1.5, 56: 1.0, 72: 1.35, 0: 1.2},
    128: {24: 1.0, 40: 1.2, 56: 1.0, 72: 1.13, 88: 1.1, 0: 1.05},
}
#: Calls of fewer queries are left to kernels that split keys, in whose estimate memory counts.
LEAST_QUERIES = 32
#: (rows, keys) of a tile, and heads, that serve: by this model 490 drawn calls lose 0.4 % to all tiles, which are twice as many
#: binaries. Blocks of 128 keys were the best in one of seven calls, by 5 %.
SIZES, MOST_MEMBERS = ((64, 64), (128, 64)), 32
#: Up to so many tiles of 128 rows a multiprocessor, of the rows that there are: of more, what tiles waste is a small share.
#: The second one: from WIDE_COLUMNS on, where a call of 104 gained 10 %.
MOST_TILES, MOST_WIDE_TILES = 64, 128


def query_heads(problem: Problem, config: Config) -> int:
    """Heads that tiles have, counted over a batch entry: of each key head so many query heads at once."""
    return problem.heads_kv * -(-problem.group // config["MEMBERS"])


def _programs(problem: Problem, config: Config) -> int:
    """Tiles."""
    return problem.query_tiles(config["BLOCK_M"] // config["MEMBERS"]) * query_heads(problem, config)


def _rows_of_heads(problem: Problem, config: Config) -> tuple[Problem, Config, int]:
    """The same tiles as those of a problem of ungrouped heads; and their queries. Tiles of a window or a chunk visit the blocks
    of as many keys, all of them whole."""
    heads, queries = query_heads(problem, config), config["BLOCK_M"] // config["MEMBERS"]
    posed = replace(problem, heads_q=heads, heads_kv=heads)
    if window_schedule.covers(problem):
        keys = config["BLOCK_N"]
        blocks = window_schedule.visited(problem.mask, problem.seqlen_q, problem.seqlen_k, queries, keys)
        posed = replace(posed, mask=FULL, seqlen_k=max(1, round(blocks * keys)))
    elif not visits.longest_last(problem.mask):
        posed = replace(posed, mask=FULL)
    tiles = {**config, "Q_STAGES": 1, "HEADS_PER_WAVE": 0, "IN_PARTS": in_parts(problem.specialization)}
    return posed, tiles, queries


def grouped_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds by tiles of several heads, estimated."""
    posed, tiles, queries = _rows_of_heads(problem, config)
    blocks = tile_order.busiest(posed, tiles, gpu.sm_count, START, queries)
    return LAUNCH_US[config["BLOCK_M"]] + max(block_us(problem, config) * blocks, memory_us(problem, gpu))


def block_us(problem: Problem, config: Config) -> float:
    """Microseconds of a block of keys, over the programs that a multiprocessor holds at once."""
    rows, keys = config["BLOCK_M"], config["BLOCK_N"]
    wide = _columns(problem)
    block = BLOCK_US[rows] * (rows // 64) * (WAITS + keys // 64) * (1 + COLUMN_SHARE * (wide / 256 - 1))
    return block * few_tiles.sector_cost(problem, config, SECTOR_COSTS)


def memory_us(problem: Problem, gpu: Gpu) -> float:
    """Of reading Q, K and V and of writing O once, at the rate of memory."""
    rows = problem.heads_q * problem.seqlen_q + problem.heads_kv * problem.seqlen_k
    moved = problem.batch * rows * (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]
    return moved / (gpu.hbm_gbs * 1e3 * key_splits_schedule.MEMORY_RATE)


def candidates(problem: Problem, arch: int) -> Iterator[Config]:
    """Tiles of SIZES, of as many heads as there are or fewer."""
    if (space := space_of(problem, arch, FWD_GROUPED)) is None:
        return
    for size in (one for one in grouped_tiles(problem, arch) if one in SIZES):
        for members in space.SPACE.dimensions["MEMBERS"]:
            if members <= MOST_MEMBERS and members < 2 * problem.group:
                yield tiles_of(problem, arch, size, members)


def tiles_of(problem: Problem, arch: int, size: tuple[int, int], members: int) -> Config:
    """``size``: one of ``key_splits.grouped_tiles``."""
    space = space_of(problem, arch, FWD_GROUPED)
    assert space is not None  # which has such tiles
    found: Config = space.config_of(problem.specialization, *size, members)
    return found


@lru_cache(maxsize=1024)
def best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """(estimated microseconds, config) of the fastest tiles of several heads, of those as near the ones of more rows, then of
    larger blocks of keys, then the fewest; None: the kernel cannot compute this call."""
    found = [(grouped_us(problem, config, gpu), config) for config in candidates(problem, gpu.arch)]
    if not found:
        return None
    least = min(time for time, _ in found)
    near = (one for one in found if one[0] <= (1 + key_splits_schedule.AS_NEAR) * least)
    return max(near, key=lambda one: (one[1]["BLOCK_M"], one[1]["BLOCK_N"], -_programs(problem, one[1])))


def _columns(problem: Problem) -> int:
    """Columns of K and V, of all parts."""
    return sum(head_dim_parts(problem.head_dim)) + sum(head_dim_parts(problem.head_dim_v))


def asked(problem: Problem, gpu: Gpu) -> bool:
    """Whether the kernel is asked for such a call at all."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    most = MOST_WIDE_TILES if _columns(problem) >= few_tiles.WIDE_COLUMNS else MOST_TILES
    return (
        gpu.arch in key_splits_schedule.MEASURED_ON
        and not problem.is_empty
        and problem.group > 1
        and not problem.extent.ragged
        and not forward_schedule.portable_is_faster("fwd", problem)
        and problem.seqlen_q >= LEAST_QUERIES
        and rows <= most * few_tiles.FULL_TILE * gpu.sm_count
    )


def _margin(problem: Problem) -> float:
    columns, lengths = _columns(problem), problem.seqlen_q >= TIMED_QUERIES and problem.seqlen_k <= TIMED_KEYS
    if not (problem.mask.measured and lengths and columns <= TIMED_COLUMNS):
        return UNTIMED_MARGIN
    return WIDE_MARGIN if columns >= few_tiles.WIDE_COLUMNS else MARGIN


def _filled(problem: Problem) -> float:
    """Share of the rows of full tiles of one head that are queries: no more than the rest is to be gained."""
    return problem.seqlen_q / (-(-problem.seqlen_q // few_tiles.FULL_TILE) * few_tiles.FULL_TILE)


def config_of(
    problem: Problem, config: Config, gpu: Gpu, row: Row | None = None, split: Config | None = None
) -> Config | None:
    """The tiles of several heads of a forward that ``config``, by ``row``, or the kernel of ``split`` in its place, would serve
    otherwise; None: they are not expected to be faster."""
    margin = _margin(problem)
    if not asked(problem, gpu) or _filled(problem) > 1 - margin or (found := best(problem, gpu)) is None:
        return None
    if split is not None:
        otherwise = key_splits_schedule.split_us(problem, split, gpu)
    else:
        own = few_tiles.expected_us(problem, config, gpu.sm_count)  # by constants that are fitted to the same races
        otherwise = key_splits_schedule.ordinary_us(problem, config, gpu, row) if own is None else own
    return found[1] if found[0] < (1 - margin) * otherwise else None


def all_kernels(problem: Problem, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What ``key_splits.kernels`` gives, of every tile that a call of any heads and lengths may have."""
    if arch not in key_splits_schedule.MEASURED_ON:
        return []
    posed = replace(problem, heads_q=problem.heads_kv * MOST_MEMBERS)
    return [one for config in candidates(posed, arch) for one in kernels(problem, config, arch)]


def about(problem: Problem, found: Config) -> str:
    """In one sentence, what runs in place of a forward's row."""
    heads = min(found["MEMBERS"], problem.group)
    why = "short sequences or a narrow window" if problem.extent.ragged else "few queries"
    return (
        f"fwd: {why}, so {splitting(found).short_name} runs instead, which is expected to be faster and has no row: "
        f"tiles have {heads} of the {problem.group} query heads of a key head as rows."
    )
