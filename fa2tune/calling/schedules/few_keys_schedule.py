"""Whether a forward's tiles have all keys of a key head, and which tiles: arithmetic on the host, no GPU.

The tuned kernels start a warp that loads, and go through keys in blocks, with a running maximum. Of at most 256 keys
``kernels/sm90/fwd_one_tile.py`` does without both: it is faster where multiprocessors have a tile or two each, and slower where
they have many, since nothing of a tile overlaps the next one. Its time is estimated by turns of as many programs as
multiprocessors hold at once, with constants fitted to benchmarks/calls/one_tile_forwards.json."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fa2tune.calling.schedules import forward_schedule, key_splits_schedule
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import kernels, space_of
from fa2tune.search_spaces.lib.hopper import begins_within_sectors
from fa2tune.spec.mask import STACKED
from fa2tune.spec.problem import ITEMSIZE, Config, Problem
from fa2tune.spec.roles import FWD_ONE_TILE
from fa2tune.spec.score import NONE
from fa2tune.spec.variant import Variant

#: Microseconds of a launch, and of a turn's start and end; of a turn's products, a million multiplications and additions, and
#: once more for each program of the busiest multiprocessor; of 10,000 scores, for each of these; and bytes a microsecond that
#: all programs load and store, where rows begin with a sector of 32 bytes and where they do not. Fitted to 187 times of 96
#: calls on an H200: 8 % off, root mean square (docs/experiments/few-keys.md). Of other GPUs nothing was timed: products are
#: slower by what their multiprocessors multiply less than PEAK, in TFLOP/s each.
LAUNCH_US, TURN_US, PRODUCTS_US, MORE_PRODUCTS_US, SCORES_US = 1.9, 0.843, 0.395, 0.2, 0.273
MOVED_PER_US, INSIDE_SECTORS_PER_US = 17.4e6, 8.85e6
PEAK = 989 / 132
#: What was timed: so many queries and keys at least, so many keys at most, and tiles of as many rows as the fewest queries a
#: multiprocessor. Decoding is left to kernels whose tiles share K and V among query heads.
LEAST_ROWS, MOST_KEYS, MOST_TURNS = 64, 256, 8
#: It must be predicted to be faster than what serves otherwise by this share.
MARGIN = 0.05


def one_tile_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds by tiles that have all keys, estimated."""
    rows, keys, spec = config["BLOCK_M"], config["KEYS"], problem.specialization
    space = space_of(problem, gpu.arch, FWD_ONE_TILE)
    assert space is not None  # of whose configs one is estimated
    programs = problem.query_tiles(rows) * problem.heads_q
    busiest = -(-programs // gpu.sm_count)
    turns = -(-busiest // space.held(spec, rows, keys))
    products = rows * keys * sum(-(-dim // 16) * 16 for dim in (problem.head_dim, problem.head_dim_v)) / 1e6
    products *= max(1.0, PEAK * gpu.sm_count / gpu.peak(problem.dtype, problem.precision))
    time = LAUNCH_US + turns * (TURN_US + PRODUCTS_US * products)
    time += busiest * (MORE_PRODUCTS_US * products + SCORES_US * rows * keys / 1e4)
    read = min(rows, problem.seqlen_q) + min(keys, problem.seqlen_k)  # O as many as Q
    moved = programs * read * (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]
    return time + moved / (INSIDE_SECTORS_PER_US if begins_within_sectors(spec) else MOVED_PER_US)


def candidates(problem: Problem, arch: int) -> Iterator[Config]:
    """Tiles of the fewest keys that hold the call's; of more than LEAST_ROWS rows, where there are more."""
    if (space := space_of(problem, arch, FWD_ONE_TILE)) is None:
        return
    sizes = [size for size in space.tiles(problem.specialization, arch) if size[1] >= problem.seqlen_k]
    least = min((keys for _, keys in sizes), default=0)
    for rows, keys in sizes:
        if keys == least and (rows == LEAST_ROWS or problem.seqlen_q > LEAST_ROWS):
            yield space.config_of(problem.specialization, rows, keys)


def plain(problem: Problem, arch: int) -> bool:
    """Whether a call is dense, has no score term and is of an architecture on which such kernels were timed."""
    return arch in key_splits_schedule.MEASURED_ON and problem.score == NONE and not problem.extent.ragged


def short(problem: Problem, gpu: Gpu, most_keys: int, most_tiles: int) -> bool:
    """Whether a call has LEAST_ROWS queries and keys or more, so many keys and tiles of LEAST_ROWS rows a multiprocessor at
    most, and no portable kernel that is faster."""
    return (
        LEAST_ROWS <= problem.seqlen_k <= most_keys
        and problem.seqlen_q >= LEAST_ROWS
        and not problem.is_empty
        and problem.query_tiles(LEAST_ROWS) * problem.heads_q <= most_tiles * gpu.sm_count
        and not forward_schedule.portable_is_faster("fwd", problem)
    )


def _computes(problem: Problem, arch: int) -> bool:
    """Whether calls of this kind were timed: no mask or a causal one, that of rows of several heads included."""
    return plain(problem, arch) and (problem.mask.measured or problem.mask.name == STACKED)


def asked(problem: Problem, gpu: Gpu) -> bool:
    """Whether the kernel is asked for such a call at all."""
    return _computes(problem, gpu.arch) and short(problem, gpu, MOST_KEYS, MOST_TURNS)


@lru_cache(maxsize=1024)
def best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """(estimated microseconds, config) of the fastest tiles; None: the kernel is not asked, or cannot compute this call."""
    if not asked(problem, gpu):
        return None
    found = [(one_tile_us(problem, config, gpu), config) for config in candidates(problem, gpu.arch)]
    return min(found, key=lambda one: one[0], default=None)


def all_kernels(problem: Problem, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What ``key_splits.kernels`` gives, of every tile that a call of any heads and lengths may have."""
    space = space_of(problem, arch, FWD_ONE_TILE)
    if space is None or not _computes(problem, arch):
        return []
    spec = problem.specialization
    return [one for size in space.tiles(spec, arch) for one in kernels(problem, space.config_of(spec, *size), arch)]
