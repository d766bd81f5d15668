"""Which tuned config, in which tile order, suits a call's own batch, heads and lengths: arithmetic on the host, no GPU.

A row is tuned on one workload of its length bucket. Another batch x heads, or a length next to a bucket's border, has another
number of tiles, and the tile order that balanced the tuned workload can leave one multiprocessor with twice the mean. Here the
static order of the persistent Hopper forward (``tile_of`` in kernels/lib/hopper_forward.py) is played through for each tuned
config of the same head dim and mask and for each tile order. Times a block come from each row's own measurement.

Checked against ``benchmarks/launch_choices.py``: docs/experiments/schedule.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np

from fa2tune.calling.empty import is_empty
from fa2tune.rows.row import Row
from fa2tune.search_spaces.sm90.fwd import PROGRAMS, SPACE, columns, few_tiles, suited
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import Variant

#: Heads a band: HEADS_PER_WAVE, a launch argument. 0: by what L2 holds, see ``_band``.
ORDERS = (0, 1, 4, 22, 64)
#: Bytes of K and V that ``heads_in_band`` in kernels/lib/hopper_forward.py lets a band have.
L2_BYTES = 32 << 20
#: Start and end of a tile (Q in, O out, divisions), in key blocks, by Q_STAGES: with two the next tile's Q is there already.
START = {1: 2.0, 2: 1.0}
#: Microseconds of a launch, and of one more where RESCALE is "never": fwd_norms then reads K, so many bytes a microsecond.
LAUNCH_US, NORMS_US, NORMS_BYTES_PER_US = 4.0, 4.0, 3.0e6
#: Share of the rate of two programs on a multiprocessor that one alone has: fitted to
#: benchmarks/calls/launch_choices_small.json, as is that a config of ``few_tiles`` takes as long for as many pairs of a query
#: and a key as a row's config.
ALONE = 1 / 1.4
#: Tiles for each multiprocessor up to which ``few_tiles`` was measured, and the head dim of Q, K and V.
FEW_TILES, FEW_TILES_DIM = 7, 128
#: Another order, and another row, must be predicted to be faster by this share: a measured choice stands against a guess, and
#: times of rows were taken at clocks that differ.
MARGIN, ROW_MARGIN = 0.02, 0.03
#: Predictions this near to the least count as equal: of these order 0 is taken, which loses least on other workloads.
TIE = 0.01
#: Tiles played through at most; of more heads than that a part stands for the whole.
MOST_TILES = 8192


def covers(variant: Variant) -> bool:
    """Whether the tile order of a variant is the one that is played through here."""
    return variant.space is SPACE


def _band(order: int, seqlen_k: int, columns: int, mask: str) -> int:
    """Heads a band. ``columns``: of K and V together, 2 bytes each."""
    if order or mask != "causal":
        return order or 1
    held, width = L2_BYTES // (2 * columns) // seqlen_k, 1
    while width < 64 and held >= 2 * width:
        width *= 2
    return width


@lru_cache(maxsize=4096)
def _busiest(
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    mask: str,
    rows: int,
    columns: int,
    band: int,
    sm_count: int,
    shared: int,
    start: float,
) -> float:
    """Key blocks that the busiest multiprocessor works through, over the programs that it holds at once.

    ``rows``, ``columns``: BLOCK_M and BLOCK_N. ``shared``: programs that one multiprocessor holds at once. ``start``: of a
    tile, one of START.
    """
    tiles = -(-seqlen_q // rows)
    played = min(heads, max(1, MOST_TILES // tiles))
    if mask != "causal" and shared == 1:
        return float(-(-tiles * heads // min(tiles * heads, sm_count)) * (-(-seqlen_k // columns) + start))
    count = tiles * played
    programs = min(count, sm_count * shared)
    index = np.arange(count)
    turn, place = np.divmod(index, programs)
    program = np.where(turn % 2 == 0, place, programs - 1 - place)
    ends = np.full(tiles, seqlen_k)  # [tiles]
    if mask == "causal":
        ends = (np.arange(tiles) + 1) * rows + (seqlen_k - seqlen_q)
    cost = -(-np.clip(ends, 1, seqlen_k) // columns) + start
    nth = index // (tiles * band)
    width = np.minimum(played - nth * band, band)
    tile = (index - nth * tiles * band) // width
    if mask == "causal":
        longest_first = (-(-played // band) - nth) % 2 == 1
        tile = np.where(longest_first, tiles - 1 - tile, tile)
    work = np.bincount(program, weights=cost[tile], minlength=programs)  # [programs]
    if shared == 1:
        return float(work.max()) * heads / played
    # Programs of one multiprocessor share its tensor cores. One alone leaves them idle while it exponentiates.
    together = np.bincount(np.arange(programs) % sm_count, weights=work)  # [multiprocessors]
    return float(max(together.max(), work.max() / ALONE)) / shared * heads / played


@cache
def _wide(spec: Specialization, in_parts: str) -> int:
    """Columns of K and V together, of all parts."""
    return sum(columns(spec, {"IN_PARTS": in_parts}))


def busiest(problem: Problem, config: Config, sm_count: int) -> float:
    """Key blocks that the busiest multiprocessor works through for a config of the Hopper forward."""
    heads, band = problem.batch * problem.heads_q, 1
    if problem.mask == CAUSAL:
        wide = _wide(problem.specialization, SPACE.completed(config)["IN_PARTS"])
        band = min(heads, _band(config["HEADS_PER_WAVE"], problem.seqlen_k, wide, problem.mask.name))
    return _busiest(
        heads, problem.seqlen_q, problem.seqlen_k, problem.mask.name, config["BLOCK_M"], config["BLOCK_N"], band, sm_count,
        PROGRAMS[config["maxnreg"]], START[config["Q_STAGES"]],
    )  # fmt: skip


def _fixed_us(problem: Problem, config: Config) -> float:
    """What does not depend on the schedule."""
    if config["RESCALE"] != "never":
        return LAUNCH_US
    keys = 2 * problem.batch * problem.heads_kv * problem.seqlen_k * problem.head_dim  # bytes
    return LAUNCH_US + NORMS_US + keys / NORMS_BYTES_PER_US


#: (key, time, config) of a row -> what ``block_us`` says of it.
_BLOCK_US: dict[tuple[object, ...], float | None] = {}


def block_us(row: Row) -> float | None:
    """Microseconds a key block, by the row's own measurement; None: it has none."""
    if not row.time_us:
        return None
    known = row.key, row.time_us, row.config_hash
    if known not in _BLOCK_US:
        tuned = row.key.workload()
        rest = row.time_us - _fixed_us(tuned, row.config)
        _BLOCK_US[known] = rest / busiest(tuned, row.config, row.key.sm_count) if rest > 0 else None
    return _BLOCK_US[known]


def predicted_us(problem: Problem, row: Row, config: Mapping[str, Any], sm_count: int) -> float | None:
    """Microseconds that ``config``, the row's or one that differs in the tile order alone, is expected to take."""
    block = block_us(row)
    return None if block is None else _fixed_us(problem, config) + block * busiest(problem, config, sm_count)


def _tuned_on(row: Row, problem: Problem) -> bool:
    """Whether the problem is the very workload that the row was measured on."""
    tuned = row.key.workload()
    sizes = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k")
    return all(getattr(problem, name) == getattr(tuned, name) for name in sizes)


def of_like_work(problem: Problem, served: Row, others: Iterable[Row]) -> Row:
    """The row for a mask that no row was measured with: of ``served`` and ``others``, the same key at other lengths, the one
    whose queries saw on average as many keys as this problem's do, nearest by ratio; ``served`` where it is as near.

    What suits a window of 1024 keys at any length is what suits a causal mask of 2048: tiles of as many blocks."""

    def distance(row: Row) -> float:
        return abs(math.log(max(1.0, row.key.workload().keys_seen) / max(1.0, problem.keys_seen)))

    return min((served, *others), key=distance)


def best(problem: Problem, served: Row, others: Iterable[Row], sm_count: int) -> tuple[Row, Config]:
    """The row and config for a problem: those of ``served``, the row that the ladder names, unless another tile order, or
    another of the rows, is predicted to be faster by more than MARGIN or ROW_MARGIN.

    ``others``: rows of the same kernel, head dims, dtype and mask as ``served`` that could serve. Nothing is predicted of rows
    without a measured time; where ``served`` has none it stays.
    """
    own = suited(problem, served.config)
    if is_empty(problem) or not problem.mask.measured:  # windows: window_schedule.py; no model of other masks
        return served, own
    if sm_count == served.key.sm_count and _tuned_on(served, problem):
        return served, own
    now = predicted_us(problem, served, own, sm_count)
    if now is None:
        return served, own
    faster: list[tuple[float, Row, Config]] = []
    for row in (served, *others):
        most = now * (1 - (MARGIN if row is served else ROW_MARGIN))
        for order in ORDERS if problem.mask == CAUSAL else (own["HEADS_PER_WAVE"],):
            ordered = {**suited(problem, row.config), "HEADS_PER_WAVE": order}
            time = predicted_us(problem, row, ordered, sm_count)
            if time is not None and time < most:
                faster.append((time, row, ordered))
    least, row, config = _fastest(faster) if faster else (now * (1 - MARGIN), served, own)
    few = few_tiles_us(problem, row, config, sm_count)
    return row, config if few is None or few[0] >= least else few[1]


def _fastest(found: Iterable[tuple[float, Row, Config]]) -> tuple[float, Row, Config]:
    found = list(found)
    most = (1 + TIE) * min(time for time, _, _ in found)
    return min((one for one in found if one[0] <= most), key=lambda one: (one[2]["HEADS_PER_WAVE"] != 0, one[0]))


def for_few_tiles(spec: Specialization, arch: int) -> Config | None:
    """The config for calls of few tiles; None: these head dims have none, or it was not measured with them."""
    few, measured = few_tiles(spec), spec.head_dim == spec.head_dim_v == FEW_TILES_DIM
    return few if measured and SPACE.broken(few, spec, arch) is None else None


def is_for_few_tiles(problem: Problem, config: Config, row: Row, arch: int) -> bool:
    """Whether a config that ``best`` gives is that of ``for_few_tiles`` and not the row's."""
    return config == for_few_tiles(problem.specialization, arch) != suited(problem, row.config)


def few_tiles_us(problem: Problem, row: Row, config: Config, sm_count: int) -> tuple[float, Config] | None:
    """Microseconds that the config for calls of few tiles is expected to take, and it itself; None: there is none. ``row``,
    ``config``: that would serve otherwise, whose measured time a block gives that of the other."""
    few, block = for_few_tiles(problem.specialization, row.key.arch), block_us(row)
    if few is None or block is None or problem.query_tiles(few["BLOCK_M"]) * problem.heads_q > FEW_TILES * sm_count:
        return None
    size = few["BLOCK_M"] * few["BLOCK_N"] * PROGRAMS[few["maxnreg"]] / (config["BLOCK_M"] * config["BLOCK_N"])
    return _fixed_us(problem, few) + block * size * busiest(problem, few, sm_count), few
