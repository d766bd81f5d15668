"""Forwards whose programs have equal shares of all key blocks (``kernels/sm90/fwd_shares.py``): which shares, and what they are
estimated to take. Arithmetic on the host, no GPU. No call takes them yet: they were not timed
(docs/experiments/equal-shares.md)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import inf
from types import ModuleType

from fa2tune.calling.schedules import few_tiles
from fa2tune.compiling.registry import space_file
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import combining, kernels, space_of, splitting
from fa2tune.search_spaces.sm90.fwd import SPACE, of_tiles
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import ITEMSIZE, Config, Problem
from fa2tune.spec.roles import FWD_SHARES
from fa2tune.spec.variant import Variant

#: Microseconds of the launch that puts parts together, as that of splits has it.
PUT_TOGETHER_US = 4.6
#: And of each of its programs that finds nothing to put together: a guess.
NOTHING_US = 0.0005
#: Under a mask tiles that run at once read different keys, so K and V of all heads may take so many bytes, which L2 holds. With
#: so many whole rounds of tiles, or more, tiles even out by themselves.
L2_BYTES, MANY_ROUNDS = 30e6, 3


def expected_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds, by the constants of whole tiles of this form; inf: of those nothing was measured."""
    form = config["BLOCK_M"], config["BLOCK_N"], config["maxnreg"]
    alike = {name: config[name] for name in ("PINGPONG", "Q_IN_REGISTERS", "NUMBERED")}
    whole = SPACE.completed({**of_tiles(problem.specialization, *form), **alike})
    if (paces := few_tiles.paces_us(problem, whole)) is None:
        return inf
    launch, block, start = paces
    shares, rounds = config["SHARES"], config["ROUNDS"]
    left = space_file(splitting(config).name).left_over(problem, config)
    tiles = problem.query_tiles(config["BLOCK_M"]) * problem.heads_q - rounds * shares
    busy = rounds * (start + block * -(-problem.seqlen_k // config["BLOCK_N"]))
    runs = tiles + shares - 1
    parts = min(runs, 2 * (shares - 1))  # of tiles that are not whole
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    words = parts * config["BLOCK_M"] * problem.head_dim_v + 2 * config["SPLITS"] * rows
    busy += start * runs / shares + block * -(-left // shares)
    _, put_together, _ = kernels(problem, config, gpu.arch)[-1]
    programs = -(-rows // put_together["BLOCK_R"])
    return launch + busy + PUT_TOGETHER_US + NOTHING_US * programs + 2 * 4 * words / (gpu.hbm_gbs * 1e3)


def candidates(problem: Problem, gpu: Gpu) -> Iterator[Config]:
    """Shares for all multiprocessors. Without a mask each program first takes all whole rounds, or all but one; under a mask
    none. None of calls whose tiles are whole rounds."""
    if (space := space_of(problem, gpu.arch, FWD_SHARES)) is None:
        return
    spec, shares = problem.specialization, gpu.sm_count
    config = space.config_of(spec, shares, 0, 2)
    rounds = problem.query_tiles(config["BLOCK_M"]) * problem.heads_q // shares
    if problem.mask != FULL:
        bytes_of_keys = problem.head_dim + problem.head_dim_v
        bytes_of_keys *= problem.batch * problem.heads_kv * problem.seqlen_k * ITEMSIZE[problem.dtype]
        if bytes_of_keys > L2_BYTES or rounds >= MANY_ROUNDS:
            return
    for ahead in (0,) if problem.mask != FULL else range(max(0, rounds - 1), rounds + 1):
        found = {**config, "ROUNDS": ahead, "SPLITS": _most_parts(space)}
        if space.SPACE.broken(found, spec, gpu.arch) is not None or space.refused(problem, found):
            continue
        if space.left_over(problem, found) > 0:
            yield {**found, "SPLITS": space.parts_of_longest(problem, found)}


def _most_parts(space: ModuleType) -> int:
    return int(max(space.SPACE.dimensions["SPLITS"]))


@lru_cache(maxsize=1024)
def best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """(expected microseconds, config) of the fastest; None: there are none."""
    found = [(expected_us(problem, config, gpu), config) for config in candidates(problem, gpu)]
    return min(found, key=lambda one: one[0]) if found else None


def all_kernels(problem: Problem, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What ``key_splits.kernels`` gives, of a call of any heads and lengths."""
    if (space := space_of(problem, arch, FWD_SHARES)) is None:
        return []
    (shares, *_) = kernels(problem, space.config_of(problem.specialization, 1, 0, 2), arch)
    return [shares, *combining(problem, arch, _most_parts(space), uneven=True)]
