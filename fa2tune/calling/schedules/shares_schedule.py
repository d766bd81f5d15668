"""Forwards whose programs have equal shares of all key blocks (``kernels/sm90/fwd_shares.py``): which shares, and what they are
estimated to take. Arithmetic on the host, no GPU. Of benchmarks/calls/forward_shares_2.json.gz:
docs/experiments/equal-shares.md."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from math import inf
from operator import itemgetter
from types import ModuleType
from typing import NamedTuple

from fa2tune.calling.schedules import few_tiles, key_splits_schedule
from fa2tune.compiling.support import companion_space
from fa2tune.gpus import Gpu
from fa2tune.launching import key_splits
from fa2tune.search_spaces.sm90.fwd import SPACE, of_tiles
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, Specialization
from fa2tune.spec.roles import FWD_SHARES, FWD_SPLIT
from fa2tune.spec.variant import Variant

#: Microseconds of the launch that puts parts together, as that of keys in even parts has it.
PUT_TOGETHER_US = key_splits_schedule.HOPPER_PACES[128].combine_us
#: Under a mask tiles that run at once read different keys, so K and V of all heads may take this share of L2: 31 MB of an
#: H200's. With so many whole rounds of tiles, or more, tiles even out by themselves.
SHARE_OF_L2, MANY_ROUNDS = 0.5, 3
#: Fewer queries were not timed.
LEAST_QUERIES = 64
#: They must be predicted to be faster than what serves otherwise by this share.
MARGIN = 0.05


class _Form(NamedTuple):
    """Of calls of one specialization."""

    space: ModuleType  #: the file of the kernel's search space
    config: Config
    whole: Config  #: of the tuned kernel, with the same tiles


@cache
def _form(spec: Specialization, arch: int) -> _Form | None:
    """None: no kernel computes such calls."""
    if (space := companion_space(FWD_SHARES, spec, arch)) is None:
        return None
    config = space.config_of(spec, 1, 0)
    alike = {name: config[name] for name in ("PINGPONG", "Q_IN_REGISTERS", "NUMBERED")}
    tiles = of_tiles(spec, config["BLOCK_M"], config["BLOCK_N"], config["maxnreg"])
    return _Form(space, config, SPACE.completed({**tiles, **alike}))


def form_of(problem: Problem, arch: int) -> _Form | None:
    """None: no kernel computes the call, or it is empty or has few queries."""
    if not problem.tma or problem.is_empty or problem.seqlen_q < LEAST_QUERIES:
        return None
    return _form(problem.specialization, arch)


def expected_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds, by the constants of whole tiles of this form; inf: of those nothing was measured."""
    form = form_of(problem, gpu.arch)
    paces = few_tiles.paces_us(problem, form.whole) if form else None
    if form is None or paces is None:
        return inf
    return _estimated_us(problem, config, form.space.left_over(problem, config), paces, gpu)


def _estimated_us(problem: Problem, config: Config, left: int, paces: tuple[float, float, float], gpu: Gpu) -> float:
    """``left``: key blocks behind whole rounds; ``paces``: as ``few_tiles.paces_us`` has them."""
    launch, block, start = paces
    shares, rounds = config["SHARES"], config["ROUNDS"]
    tiles = problem.query_tiles(config["BLOCK_M"]) * problem.heads_q - rounds * shares
    busy = rounds * (start + block * -(-problem.seqlen_k // config["BLOCK_N"]))
    runs = tiles + shares - 1
    parts = min(runs, 2 * (shares - 1))  # of tiles that are not whole
    words = parts * config["BLOCK_M"] * problem.head_dim_v
    busy += start * runs / shares + block * -(-left // shares)
    return launch + busy + PUT_TOGETHER_US + 2 * 4 * words / (gpu.hbm_gbs * 1e3)


def candidates(problem: Problem, gpu: Gpu) -> list[tuple[Config, int]]:
    """Shares for all multiprocessors, and key blocks behind whole rounds. Without a mask each program first takes all whole
    rounds, or all but one; under a mask none. None of calls whose tiles are nearly whole rounds, or of few queries."""
    form = form_of(problem, gpu.arch)
    return [] if form is None else [*_offered(problem, form, gpu)]


def _offered(problem: Problem, form: _Form, gpu: Gpu) -> Iterator[tuple[Config, int]]:
    shares, unmasked = gpu.sm_count, problem.mask == FULL
    tiles = problem.query_tiles(form.config["BLOCK_M"]) * problem.heads_q
    rounds = tiles // shares
    if unmasked and tiles > (1 - MARGIN) * -(-tiles // shares) * shares:
        return
    if not unmasked:
        bytes_of_keys = problem.head_dim + problem.head_dim_v
        bytes_of_keys *= problem.batch * problem.heads_kv * problem.seqlen_k * ITEMSIZE[problem.dtype]
        if bytes_of_keys > SHARE_OF_L2 * gpu.l2_bytes or rounds >= MANY_ROUNDS:
            return
    for ahead in range(max(0, rounds - 1), rounds + 1) if unmasked else (0,):
        found = {**form.config, "SHARES": shares, "ROUNDS": ahead}
        if not form.space.refused(problem, found) and (left := form.space.left_over(problem, found)) > 0:
            yield found, left


@lru_cache(maxsize=1024)
def best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """(expected microseconds, config) of the fastest; None: there are none, or of their form nothing was measured."""
    form = form_of(problem, gpu.arch)
    if form is None or not (offered := [*_offered(problem, form, gpu)]):
        return None
    if (paces := few_tiles.paces_us(problem, form.whole)) is None:
        return None
    found = [(_estimated_us(problem, config, left, paces, gpu), config) for config, left in offered]
    return min(found, key=itemgetter(0))


def in_uneven_parts(problem: Problem, found: Config, gpu: Gpu) -> bool:
    """Whether a config has the keys of uneven tiles in parts, in more parts than multiprocessors. Parts of one tile are on the
    same multiprocessors as those of its neighbours, so it takes about as long as whole tiles: 182 us of 1 x 1 heads, 16384
    queries, 128, where whole tiles took 170, and ``key_splits_schedule.split_us`` says 116."""
    alike = problem.mask == FULL or problem.seqlen_k >= key_splits_schedule.HOPPER_KEYS * problem.seqlen_q
    if alike or key_splits.role_of(found) != FWD_SPLIT:
        return False
    tiles = problem.query_tiles(found["BLOCK_M"]) * problem.heads_q
    return key_splits.parts_of(found) * tiles > gpu.sm_count


def all_kernels(problem: Problem, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What ``key_splits.kernels`` gives, of a call of any heads and lengths."""
    if not problem.tma or (form := _form(problem.specialization, arch)) is None:
        return []
    return key_splits.kernels(problem, form.config, arch)
