"""How much the busiest multiprocessor works in the static tile order of the persistent Hopper forward: arithmetic on the host.

The order (``tile_of`` in kernels/lib/hopper_forward.py) is played through for a call's own batch, heads and lengths. What that
takes in microseconds is said by ``forward_schedule``, from rows, and by ``few_tiles``, from constants.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np

from fa2tune.search_spaces.sm90.fwd import ROWS, SPACE, band_within_l2, columns, programs
from fa2tune.spec import visits
from fa2tune.spec.mask import Mask
from fa2tune.spec.problem import Config, Problem, Specialization, padded_head_dim

#: Heads a band: HEADS_PER_WAVE, a launch argument. 0: by what L2 holds, see ``band_within_l2``.
TILE_ORDERS = (0, 1, 4, 22, 64)
#: Programs that one multiprocessor can hold at once -> the share of their joint rate that one alone, two and so on reach: one
#: leaves the tensor cores idle while it exponentiates. Fitted with the constants of ``few_tiles``.
RATES = {1: (1.0,), 2: (0.71, 1.0), 3: (0.65, 0.93, 1.0)}
#: The same of programs of two groups, of narrow head dims.
RATES_OF_TWO_GROUPS = (0.8, 1.0)
#: Tiles played through at most; of more heads than that a part stands for the whole.
MOST_TILES = 8192


def in_turns(costs: np.ndarray, programs: int) -> np.ndarray:
    """Work of each program [programs, or as many as there are tiles] that takes tiles of such costs in turns; every second turn
    begins with the program that was the last."""
    programs = min(costs.size, programs)
    work = np.zeros((-(-costs.size // programs), programs))  # [turns, programs]
    work.reshape(-1)[: costs.size] = costs
    work[1::2] = work[1::2, ::-1]
    return work.sum(0)


def in_bands(costs: np.ndarray, heads: int, band: int, programs: int) -> np.ndarray:
    """The same of the tiles of so many heads, of which ``costs`` are those of one, the shortest first: band after band of
    heads, in the last one and in every second before it the longest tiles first."""
    bands = -(-heads // band)
    last = heads - (bands - 1) * band  # its heads
    shorter_first, longer_first = (np.repeat(one, band) for one in (costs, costs[::-1]))
    parts = [longer_first if (bands - nth) % 2 else shorter_first for nth in range(bands - 1)]
    return in_turns(np.concatenate([*parts, np.repeat(costs[::-1], last)]), programs)


def _costs(seqlen_q: int, seqlen_k: int, mask: Mask, rows: int, columns: int, start: float) -> np.ndarray:
    """Key blocks that each tile of a head takes [tiles]."""
    first, end = visits.key_blocks(mask, seqlen_q, seqlen_k, rows, columns)
    return end - first + start


@lru_cache(maxsize=4096)
def _busiest(
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    mask: Mask,
    rows: int,
    columns: int,
    band: int,
    sm_count: int,
    rates: tuple[float, ...],
    start: float,
) -> float:
    """Key blocks that the busiest multiprocessor works through, over the programs that it holds at once.

    ``rows``, ``columns``: queries and keys of a tile's blocks. ``rates``: one of RATES. ``start``: start and end of a tile, in
    key blocks.
    """
    shared = len(rates)
    tiles = -(-seqlen_q // rows)
    played = min(heads, max(1, MOST_TILES // tiles))
    if not visits.bounded(mask) and shared == 1:
        return float(-(-tiles * heads // min(tiles * heads, sm_count)) * (-(-seqlen_k // columns) + start))
    cost = _costs(seqlen_q, seqlen_k, mask, rows, columns, start)
    if visits.longest_last(mask):
        work = in_bands(cost, played, band, sm_count * shared)
    else:
        work = in_turns(np.tile(cost, played), sm_count * shared)
    if shared == 1:
        return float(work.max()) * heads / played
    return _together(work, sm_count, rates) * heads / played


def _together(work: np.ndarray, sm_count: int, rates: tuple[float, ...]) -> float:
    """The same of programs [programs] that share multiprocessors: they run at their joint rate until the one of the least work
    ends, and so on."""
    shared = len(rates)
    held = np.zeros((shared, sm_count))  # [programs of a multiprocessor, multiprocessors]
    held.reshape(-1)[: work.size] = work
    held = np.sort(held, axis=0)[::-1]  # of each multiprocessor the most work first
    longer = held - np.append(held[1:], np.zeros((1, sm_count)), axis=0)  # what each has more than the next
    paces = [count / (rate * shared) for count, rate in enumerate(rates, 1)]
    return float((np.array(paces) @ longer).max())


@cache
def rates_of(rows: int, maxnreg: int) -> tuple[float, ...]:
    """RATES of the programs of a Hopper forward, one for each that a multiprocessor holds at once."""
    held = programs({"BLOCK_M": rows, "maxnreg": maxnreg})
    return RATES_OF_TWO_GROUPS if held > 1 and rows > ROWS else RATES[held]


def widest(problem: Problem) -> int:
    """Columns of the wider of Q and V, padded, at least the 64 of a tile."""
    return max(64, padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))


@cache
def columns_of_parts(spec: Specialization, in_parts: str) -> int:
    """Columns of K and V together, of all parts."""
    return sum(columns(spec, {"IN_PARTS": in_parts}))


def busiest(problem: Problem, config: Config, sm_count: int, start: float, queries: int = 0) -> float:
    """Key blocks that the busiest multiprocessor works through for a config of the Hopper forward, over the programs that it
    holds at once. ``start``: start and end of a tile (Q in, O out, divisions), in key blocks. ``queries``: of a tile, where its
    rows are those of several heads."""
    heads, band = problem.batch * problem.heads_q, 1
    if visits.longest_last(problem.mask):
        band = config["HEADS_PER_WAVE"]
        if not band:
            wide = columns_of_parts(problem.specialization, SPACE.completed(config)["IN_PARTS"])
            band = band_within_l2(problem.seqlen_k, wide)
        band = min(heads, band)
    return _busiest(
        heads, problem.seqlen_q, problem.seqlen_k, problem.mask, queries or config["BLOCK_M"], config["BLOCK_N"], band,
        sm_count, rates_of(config["BLOCK_M"], config["maxnreg"]), start,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _of_head(seqlen_q: int, seqlen_k: int, mask: Mask, rows: int, columns: int, start: float) -> float:
    return float(_costs(seqlen_q, seqlen_k, mask, rows, columns, start).sum())


def evenly(problem: Problem, config: Config, sm_count: int, start: float) -> float:
    """What ``busiest`` gives where all programs have as much to do: no order of tiles takes less."""
    rows, keys = config["BLOCK_M"], config["BLOCK_N"]
    all_of_it = (
        problem.batch * problem.heads_q * _of_head(problem.seqlen_q, problem.seqlen_k, problem.mask, rows, keys, start)
    )
    return all_of_it / (sm_count * len(rates_of(rows, config["maxnreg"])))
