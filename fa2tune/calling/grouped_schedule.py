"""Whether a forward's tiles have the query heads of a key head as rows, and which tiles: arithmetic on the host, by the call's
batch, heads and lengths.

The tuned kernels have tiles of each query head. Of 131 queries and four heads a group, tiles of 128 rows are eight, where the
524 rows of a key head fill 4.1. ``kernels/sm90/fwd_grouped.py`` has tiles of several heads. Both are estimated with what
``schedule`` has: tiles of 64 rows, two programs a multiprocessor, were fitted to records in benchmarks/calls/; those of 128
rows are taken to cost as much a row and key, as rows of 16k tokens do (1.6 us for a block of 128 x 128)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from fa2tune.calling import schedule, split_schedule, window_schedule
from fa2tune.calling.empty import is_empty
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import grouped_tiles, is_grouped, kernels, splitting
from fa2tune.rows.row import Row
from fa2tune.search_spaces.sm90 import fwd_grouped
from fa2tune.search_spaces.sm90.fwd import in_parts
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant

#: Whether the kernel serves. Right when computed by Python (tests/launching/test_grouped_in_python.py), and no GPU has run it
#: yet: on once tests/gpu/test_grouped_heads.py passes and benchmarks/few_queries.py --grouped has shown a gain.
GROUPED_TILES = False
#: It must be predicted to be faster by this share than what serves otherwise, and no slower than its own tiles of one head.
MARGIN = 0.06
#: Up to so many tiles of 128 rows a multiprocessor, of the rows that there are: of more, what tiles waste is a small share.
MOST_TILES = 64


def _rows_of_heads(problem: Problem, config: Config) -> tuple[Problem, Config]:
    """The same tiles as those of a problem of ungrouped heads, whose tiles have as many queries. A window's tiles visit the
    blocks of as many keys, all of them whole."""
    heads, queries = fwd_grouped.query_heads(problem, config), config["BLOCK_M"] // config["MEMBERS"]
    posed = replace(problem, heads_q=heads, heads_kv=heads)
    if window_schedule.covers(problem):
        left, right = problem.mask.arguments(problem.seqlen_q, problem.seqlen_k)
        keys = config["BLOCK_N"]
        blocks = window_schedule.visited(problem.seqlen_q, problem.seqlen_k, left, right, queries, keys)
        posed = replace(posed, mask=FULL, seqlen_k=max(1, round(blocks * keys)))
    elif problem.mask != CAUSAL:
        posed = replace(posed, mask=FULL)
    return posed, {
        **config,
        "BLOCK_M": queries,
        "Q_STAGES": 1,
        "HEADS_PER_WAVE": 0,
        "IN_PARTS": in_parts(problem.specialization),
    }


def grouped_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds by tiles of several heads, estimated."""
    posed, tiles = _rows_of_heads(problem, config)
    rows, keys = config["BLOCK_M"], config["BLOCK_N"]
    wide = sum(fwd_grouped.columns(problem.specialization))
    block = schedule.FEW_BLOCK_US * (rows // 64) * (keys // 64) * (1 + schedule.COLUMN_SHARE * (wide / 256 - 1))
    held = fwd_grouped.HELD[rows][0]
    if held > 1:
        start = schedule.FEW_START * 64 / keys
        return schedule.FEW_LAUNCH_US + block * held * schedule.busiest(posed, tiles, gpu.sm_count, start)
    return schedule.LAUNCH_US + block * schedule.busiest(posed, tiles, gpu.sm_count, schedule.START[1] * 64 / keys)


def candidates(problem: Problem, arch: int) -> Iterator[Config]:
    """Every tile, of as many heads as there are or fewer."""
    for rows, keys in grouped_tiles(problem, arch):
        for members in fwd_grouped.MEMBERS:
            if members < 2 * problem.group:
                yield fwd_grouped.config_of(problem.specialization, rows, keys, members)


@lru_cache(maxsize=1024)
def best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """(estimated microseconds, config) of the fastest tiles of several heads, of those as near the ones of larger blocks of
    keys, then of more rows, then the fewest; None: the kernel cannot compute this call."""
    found = [(grouped_us(problem, config, gpu), config) for config in candidates(problem, gpu.arch)]
    if not found:
        return None
    least = min(time for time, _ in found)
    near = (one for one in found if one[0] <= (1 + split_schedule.AS_NEAR) * least)
    return max(near, key=lambda one: (one[1]["BLOCK_N"], one[1]["BLOCK_M"], -fwd_grouped.programs(problem, one[1])))


@lru_cache(maxsize=1024)
def _ungrouped_us(problem: Problem, gpu: Gpu) -> float:
    """The same of tiles of one head."""
    spec = problem.specialization
    sizes = grouped_tiles(problem, gpu.arch)
    return min(grouped_us(problem, fwd_grouped.config_of(spec, *size, 1), gpu) for size in sizes)


def asked(problem: Problem, gpu: Gpu) -> bool:
    """Whether the kernel is asked for such a call at all."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    return (
        GROUPED_TILES
        and gpu.arch in split_schedule.MEASURED_ON
        and problem.group > 1
        and not is_empty(problem)
        and not problem.extent.ragged
        and (problem.mask.measured or problem.mask.window is not None)
        and rows <= MOST_TILES * split_schedule.FULL_TILE * gpu.sm_count
    )


def config_of(
    problem: Problem, config: Config, gpu: Gpu, row: Row | None = None, split: Config | None = None
) -> Config | None:
    """The tiles of several heads of a forward that ``config``, by ``row``, or the kernel of ``split`` in its place, would serve
    otherwise; None: they are not expected to be faster."""
    if not asked(problem, gpu) or (found := best(problem, gpu)) is None:
        return None
    if split is not None:
        otherwise = split_schedule.split_us(problem, split, gpu)
    else:
        otherwise = split_schedule.ordinary_us(problem, config, gpu, row)
    pays = found[0] < (1 - MARGIN) * otherwise and found[0] <= _ungrouped_us(problem, gpu)
    return found[1] if pays else None


def instead_of(problem: Problem, config: Config, gpu: Gpu, row: Row | None = None) -> Config | None:
    """What runs in place of the kernel that ``config``, by ``row``, is of: a config of one that splits keys, or of tiles of
    several heads; None: nothing does."""
    split = split_schedule.config_of(problem, config, gpu, row)
    return config_of(problem, config, gpu, row, split) or split


def all_kernels(problem: Problem, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What ``key_splits.kernels`` gives, of every tile that a call of any heads and lengths may have; none without
    GROUPED_TILES."""
    if not GROUPED_TILES or arch not in split_schedule.MEASURED_ON:
        return []
    posed = replace(problem, heads_q=problem.heads_kv * fwd_grouped.MEMBERS[-1])
    return [one for config in candidates(posed, arch) for one in kernels(problem, config, arch)]


def about(problem: Problem, found: Config) -> str:
    """In one sentence, what runs in place of a forward's row; ``found``: as ``instead_of`` gives it."""
    if not is_grouped(found):
        return split_schedule.about(problem, found)
    heads = min(found["MEMBERS"], problem.group)
    return (
        f"fwd: few queries, so {splitting(found).short_name} runs instead, which is expected to be faster and has no row: "
        f"tiles have {heads} of the {problem.group} query heads of a key head as rows."
    )
