"""Whether a packed call's forward has tiles of several query heads, and which: arithmetic on the host, which does not know the
lengths.

The tuned kernel has tiles of each query head: a sequence of 40 tokens fills a third of 128 rows, and a tile of 128 queries in a
window of 7 keys computes two or three blocks that are mostly hidden. A tile of four heads has 32 queries, and wastes less of
both. Both are estimated over the same lengths, by the block costs of ``grouped_schedule`` and by ``packed_schedule``. Against
what was recorded: docs/experiments/packed-tiles.md, few-heads-packed.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fa2tune.calling.schedules import (
    few_tiles,
    grouped_schedule,
    key_splits_schedule,
    packed_schedule,
    window_schedule,
)
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import grouped_tiles
from fa2tune.rows.row import Row
from fa2tune.search_spaces.sm90.fwd import programs
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import WARP_SPECIALIZED, Variant, implementation_of

#: Whether packed calls are served by such tiles at all (benchmarks/calls/packed_choices_3.json).
SERVES = True
#: They must be predicted to be faster by the first share than what serves otherwise, and by the second than tiles of one head
#: by the same model: what those gain is for the tuned kernel to gain.
MARGIN, SHARING_MARGIN = 0.08, 0.03
#: Queries a sequence has on average, up to which such tiles are asked for without a window: of more little is wasted.
MOST_QUERIES = 512


def grouped_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds by tiles of several heads, estimated."""
    rows, queries = config["BLOCK_M"], config["BLOCK_M"] // config["MEMBERS"]
    found, held = packed_schedule.visited(problem, queries, config["BLOCK_N"]), programs(config)
    heads = grouped_schedule.query_heads(problem, config)
    slower = packed_schedule.hidden_cost(found, config)
    blocks = packed_schedule.shared_out(found, heads, grouped_schedule.START / slower, gpu.sm_count, held)
    spent = grouped_schedule.block_us(problem, config) * slower * blocks
    launch = grouped_schedule.LAUNCH_US[rows] + packed_schedule.ORDER_US
    return launch + max(spent, packed_schedule.memory_us(problem, gpu))


def candidates(problem: Problem, arch: int) -> Iterator[Config]:
    """Those of ``grouped_schedule.candidates`` that have most of a group: fewer heads are more queries, for short sequences and
    narrow windows to waste."""
    for config in grouped_schedule.candidates(problem, arch):
        if 2 * config["MEMBERS"] > problem.group:
            yield config


@lru_cache(maxsize=1024)
def best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """(estimated microseconds, config) of the fastest tiles of several heads; None: the kernel cannot compute this call."""
    found = [(grouped_us(problem, config, gpu), config) for config in candidates(problem, gpu.arch)]
    return min(found, key=lambda one: one[0], default=None)


@lru_cache(maxsize=1024)
def _ungrouped_us(problem: Problem, gpu: Gpu) -> float:
    """The same of tiles of one head."""
    sizes = (size for size in grouped_tiles(problem, gpu.arch) if size in grouped_schedule.SIZES)
    alone = (grouped_schedule.tiles_of(problem, gpu.arch, size, 1) for size in sizes)
    return min(grouped_us(problem, config, gpu) for config in alone)


def asked(problem: Problem, gpu: Gpu) -> bool:
    """Whether the kernel is asked for such a call at all."""
    window = window_schedule.is_window(problem)
    rows = problem.heads_q * problem.seqlen_q
    return (
        gpu.arch in key_splits_schedule.MEASURED_ON
        and problem.extent.ragged
        and not problem.is_empty
        and problem.group > 1
        and (problem.mask.measured or window)
        and (window or problem.seqlen_q <= MOST_QUERIES * problem.extent.given)
        and rows <= grouped_schedule.MOST_TILES * few_tiles.FULL_TILE * gpu.sm_count
    )


def config_of(problem: Problem, config: Config, gpu: Gpu, row: Row | None) -> Config | None:
    """The tiles of several heads of a packed forward that ``config``, by ``row``, would serve otherwise; None: they are not
    expected to be faster, or serve nothing (SERVES)."""
    if not SERVES or row is None or implementation_of(config) != WARP_SPECIALIZED or not asked(problem, gpu):
        return None
    otherwise, found = packed_schedule.expected_us(problem, config, gpu), best(problem, gpu)
    if otherwise is None or found is None or found[0] >= (1 - MARGIN) * otherwise:
        return None
    return found[1] if found[0] < (1 - SHARING_MARGIN) * _ungrouped_us(problem, gpu) else None


def all_kernels(problem: Problem, arch: int) -> Iterator[tuple[Variant, Config, Problem]]:
    """What ``key_splits.kernels`` gives, of every tile that a packed call may have."""
    if SERVES:
        yield from grouped_schedule.all_kernels(problem, arch)
