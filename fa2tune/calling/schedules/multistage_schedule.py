"""Whether the warps of a short forward load for themselves, and with which tiles: arithmetic on the host, no GPU.

The tuned kernels start a warp that loads, and have no tiles of 64 rows above 192 columns. ``kernels/sm90/fwd_multistage.py``
has a shorter launch and such tiles: it is faster where multiprocessors have a tile or two each. Its time is estimated by the
key blocks of the multiprocessor that has the longest tile, with constants fitted to
benchmarks/calls/multistage_forwards.json.gz (docs/experiments/multistage.md)."""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np

from fa2tune.calling.schedules import few_keys_schedule
from fa2tune.compiling.support import companion_space
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import kernels
from fa2tune.search_spaces.lib.hopper import begins_within_sectors
from fa2tune.spec import visits
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, Specialization
from fa2tune.spec.roles import FWD_MULTISTAGE
from fa2tune.spec.variant import Variant

#: Microseconds of a launch with a tile's start and end, and what COLUMNS of K and V together add; of the steps of 64 keys and
#: of 128 without their products, and of products of 64 keys and COLUMNS; of a block of 64 keys of another program of the same
#: multiprocessor, and what COLUMNS add; how many times as long blocks take where rows begin in the midst of a sector; and bytes
#: a microsecond that all programs load and store. Fitted to 159 times of 80 calls on an H200: 9 % off, root mean square. Of
#: other GPUs nothing was timed: products are slower by what their multiprocessors multiply less (few_keys_schedule.PEAK).
LAUNCH_US, LAUNCH_WIDER_US, COLUMNS = 2.0, 0.9, 256
STEP_US, PRODUCTS_US = {64: 0.405, 128: 0.704}, 0.28
OTHER_US, OTHER_WIDER_US = 0.165, 0.213
INSIDE_SECTORS, MOVED_PER_US = 1.165, 41e6
#: What was timed: so many keys at most, and so many tiles a multiprocessor, which it must hold at once.
MOST_KEYS, MOST_TILES = 2048, 2
#: It must be predicted to be faster than what serves otherwise by this share.
MARGIN = 0.1


@cache  # of calls of many lengths
def _held(spec: Specialization, arch: int, rows: int, keys: int) -> int:
    """Programs that a multiprocessor holds at once."""
    space = companion_space(FWD_MULTISTAGE, spec, arch)
    assert space is not None  # of whose configs one is estimated
    return int(space.held(spec, rows, keys))


def multistage_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds by tiles whose warps load for themselves, estimated; inf: more programs than run at once."""
    rows, keys, spec = config["BLOCK_M"], config["STAGE_KEYS"], problem.specialization
    heads = problem.batch * problem.heads_q
    first, end = visits.key_blocks(problem.mask, problem.seqlen_q, problem.seqlen_k, rows, keys)
    blocks = np.sort(end - first)[::-1]  # of a head's tiles, the longest first, as programs take them
    if len(blocks) * heads > gpu.sm_count * min(MOST_TILES, _held(spec, gpu.arch, rows, keys)):
        return float("inf")
    of_all = np.repeat(blocks, heads)
    longest, others = int(of_all[0]), int(of_all[gpu.sm_count :: gpu.sm_count].sum())
    wide = sum(-(-dim // 16) * 16 for dim in (problem.head_dim, problem.head_dim_v)) / COLUMNS
    slower = max(1.0, few_keys_schedule.PEAK * gpu.sm_count / gpu.peak(problem.dtype, problem.precision))
    busy = longest * (STEP_US[keys] + PRODUCTS_US * slower * wide * keys / 64)
    busy += others * (OTHER_US + OTHER_WIDER_US * slower * wide) * keys / 64
    read = 2 * min(rows, problem.seqlen_q) + problem.seqlen_k  # MOVED_PER_US is fitted to Q and O counted twice
    moved = len(blocks) * heads * read * (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]
    busy *= INSIDE_SECTORS if begins_within_sectors(spec) else 1.0
    return LAUNCH_US + LAUNCH_WIDER_US * wide + busy + moved / MOVED_PER_US


@cache
def _configs(spec: Specialization, arch: int) -> tuple[Config, ...]:
    """Tiles of all sizes; none, where the kernel cannot compute such a call."""
    if (space := companion_space(FWD_MULTISTAGE, spec, arch)) is None:
        return ()
    return tuple(space.config_of(spec, *size) for size in space.tiles(spec, arch))


def candidates(problem: Problem, arch: int) -> tuple[Config, ...]:
    """Tiles of all sizes."""
    return _configs(problem.specialization, arch) if problem.tma else ()


def _computes(problem: Problem, arch: int) -> bool:
    """Whether calls of this kind were timed: no mask or a causal one."""
    return few_keys_schedule.plain(problem, arch) and problem.mask.measured


def asked(problem: Problem, gpu: Gpu) -> bool:
    """Whether the kernel is asked for such a call at all."""
    return _computes(problem, gpu.arch) and few_keys_schedule.short(problem, gpu, MOST_KEYS, MOST_TILES)


@lru_cache(maxsize=1024)
def best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """(estimated microseconds, config) of the fastest tiles; None: the kernel is not asked, or cannot compute this call."""
    if not asked(problem, gpu):
        return None
    found = [(multistage_us(problem, config, gpu), config) for config in candidates(problem, gpu.arch)]
    return min(found, key=lambda one: one[0], default=None)


def all_kernels(problem: Problem, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What ``key_splits.kernels`` gives, of every tile that a call of any heads and lengths may have."""
    if not _computes(problem, arch):
        return []
    return [one for config in candidates(problem, arch) for one in kernels(problem, config, arch)]
