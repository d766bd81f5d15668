"""Whether a forward without a mask has blocks of 80 keys (``kernels/sm90/fwd_80_keys.py``): arithmetic on the host, no GPU.

It is estimated next to the same tiles in blocks of 64 keys, by the constants of ``few_tiles``, so that their error is left out.
Fitted to benchmarks/calls/dense_forwards_80.json.gz: docs/experiments/head-dims.md."""

from __future__ import annotations

from functools import lru_cache

from fa2tune.calling.schedules import few_tiles, key_splits_schedule
from fa2tune.calling.schedules.tile_order import busiest
from fa2tune.compiling.fingerprint import triton_version
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import MAIN_KEYS, kernels, keys_of_block, space_of
from fa2tune.search_spaces.sm90.fwd import of_tiles
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.roles import FWD_80_KEYS
from fa2tune.spec.variant import Variant

#: A block's time over that of as many keys in blocks of 64; and microseconds of a tile's start and end.
PACE_OF_64, START_US = 0.965, 3.5
#: Head dims above the first and up to the second, in calls of so many keys or more whose groups are no larger, were faster:
#: 0.91 to 1.03 of the time, 0.970 in the mean of 15 raced calls. In others both were level, at 256 blocks of 64 keys
#: were faster. Query heads that are taken as one (``merging``) are no group: such a call was level.
DIMS, LEAST_KEYS, MOST_GROUP = (192, 248), 1900, 3
#: Of such head dims also calls whose keys are one block, or two of 64 keys, where multiprocessors have up to so many tiles. In
#: turn two of two raced calls took 0.90 of the time, two of many tiles 1.02 and 1.03 (forward_one_block.json.gz).
ONE_BLOCK, MOST_TILES_OF_ONE = (64, 80), 2
#: Versions of Triton that compile the kernel (kernels/lib/hopper_units.py).
COMPILED_BY = "3.6."
#: It must be predicted to be faster by this share.
MARGIN = 0.01


def _computes(problem: Problem) -> bool:
    """Whether both head dims are among DIMS, and the Triton that is here, if any, compiles the kernel."""
    (above, up_to), version = DIMS, triton_version()
    dims = problem.head_dim, problem.head_dim_v
    return all(above < dim <= up_to for dim in dims) and (not version or version.startswith(COMPILED_BY))


def _is_one_block(problem: Problem, gpu: Gpu) -> bool:
    """Whether keys are one block where they would be two, and tiles are few."""
    above, up_to = ONE_BLOCK
    tiles = problem.query_tiles(few_tiles.FULL_TILE) * problem.heads_q
    return above < problem.seqlen_k <= up_to and tiles <= MOST_TILES_OF_ONE * gpu.sm_count


@lru_cache(maxsize=1024)
def config_of(problem: Problem, gpu: Gpu) -> Config | None:
    """The config of such a forward; None: it is not expected to be faster than blocks of 64 keys, or there is none."""
    if gpu.arch not in key_splits_schedule.MEASURED_ON or problem.is_empty:
        return None
    if problem.seqlen_k < LEAST_KEYS and not _is_one_block(problem, gpu):
        return None
    if problem.group > MOST_GROUP:
        return None
    if not _computes(problem) or (space := space_of(problem, gpu.arch, FWD_80_KEYS)) is None:
        return None
    config: Config = {**space.config_of(problem.specialization), "PINGPONG": problem.seqlen_k < LEAST_KEYS}
    return config if share(problem, config, gpu) < 1 - MARGIN else None


def share(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The time that it is expected to take, over that of the same tiles in blocks of 64 keys."""
    usual = of_tiles(problem.specialization, config["BLOCK_M"], MAIN_KEYS, 0)
    keys, paces = keys_of_block(config), few_tiles.paces_us(problem, usual)
    assert paces is not None  # of such tiles
    launch, block, start = paces
    ours = PACE_OF_64 * block * keys / usual["BLOCK_N"]
    time = launch + ours * busiest(problem, {**usual, "BLOCK_N": keys}, gpu.sm_count, START_US / ours)
    return time / (launch + block * busiest(problem, usual, gpu.sm_count, start / block))


def all_kernels(problem: Problem, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What ``key_splits.kernels`` gives, of a call of any heads and lengths."""
    space = space_of(problem, arch, FWD_80_KEYS)
    if space is None or not _computes(problem):
        return []
    forms = ({**space.config_of(problem.specialization), "PINGPONG": turns} for turns in (False, True))
    return [one for config in forms for one in kernels(problem, config, arch)]
