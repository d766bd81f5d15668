"""Which tuned config, in which tile order, suits a call's own batch, heads and lengths: arithmetic on the host, no GPU.

A row is tuned on one workload of its length bucket. Another batch x heads, or a length next to a bucket's border, has another
number of tiles, and the tile order that balanced the tuned workload can leave one multiprocessor with twice the mean. Here the
static order of the persistent Hopper forward (``tile_of`` in kernels/lib/hopper_forward.py) is played through for each tuned
config of the same head dim and mask and for each tile order. Times a block come from each row's own measurement.

Checked against ``benchmarks/launch_choices.py``: docs/experiments/schedule.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np

from fa2tune.calling.empty import is_empty
from fa2tune.rows.row import Row
from fa2tune.search_spaces.sm90.fwd import PROGRAMS, SPACE, columns, few_tiles, suited
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import Config, Problem, Specialization, padded_head_dim
from fa2tune.spec.variant import Variant

#: Heads a band: HEADS_PER_WAVE, a launch argument. 0: by what L2 holds, see ``_band``.
ORDERS = (0, 1, 4, 22, 64)
#: Bytes of K and V that ``heads_in_band`` in kernels/lib/hopper_forward.py lets a band have.
L2_BYTES = 32 << 20
#: Start and end of a tile (Q in, O out, divisions), in key blocks, by Q_STAGES: with two the next tile's Q is there already.
START = {1: 2.0, 2: 1.0}
#: Microseconds of a launch, and of one more where RESCALE is "never": fwd_norms then reads K, so many bytes a microsecond.
LAUNCH_US, NORMS_US, NORMS_BYTES_PER_US = 4.0, 4.0, 3.0e6
#: Share of a block's time that grows with the columns of K and V; the rest is exponentials, and waits between its steps.
#: Fitted to the forwards of seed 53c19ef in benchmarks/calls/random_calls.json.gz that rows of other columns served.
COLUMN_SHARE = 0.7
#: Share of the rate of two programs on a multiprocessor that one alone has.
ALONE = 1 / 1.5
#: The config of ``few_tiles`` on an H200: microseconds of a launch, key blocks that a tile's start and end are worth, and
#: microseconds a block of two programs on a multiprocessor, with at most 256 columns of K and V. Fitted, as is ALONE, to the
#: 30 times of that config in benchmarks/calls/: launch_choices_small.json.gz, few_queries.json, few_queries_hopper.json. More
#: columns are taken to cost what they cost tiles of 128 rows.
FEW_LAUNCH_US, FEW_START, FEW_BLOCK_US = 2.4, 3.0, 0.4
#: Tiles for each multiprocessor up to which ``few_tiles`` was measured.
FEW_TILES = 7
#: Narrower head dims keep their rows' configs: at 64 those have tiles of 64 rows where they were measured to be faster.
FEW_TILES_ABOVE = 64
#: It must be predicted to be faster than a row's config by this share; by the second one where the head dims have parts, as one
#: such call was timed (docs/experiments/head-dims.md: 160, 0.78 of the time of tiles of 128 rows).
FEW_MARGIN, FEW_MARGIN_IN_PARTS = 0.04, 0.1
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
    ends = np.full(tiles, seqlen_k)  # [tiles]
    if mask == "causal":
        ends = (np.arange(tiles) + 1) * rows + (seqlen_k - seqlen_q)
    cost = -(-np.clip(ends, 1, seqlen_k) // columns) + start  # [tiles]
    work = np.zeros((-(-count // programs), programs))  # [turns, programs], in the order in which tiles are given out
    if mask == "causal":  # band after band, in the last one and in every second before it the longest tiles first
        bands = -(-played // band)
        last = played - (bands - 1) * band  # its heads
        shorter_first, longer_first = (np.repeat(costs, band) for costs in (cost, cost[::-1]))
        parts = [longer_first if (bands - nth) % 2 else shorter_first for nth in range(bands - 1)]
        work.reshape(-1)[:count] = np.concatenate([*parts, np.repeat(cost[::-1], last)])
    else:
        work.reshape(-1)[:count] = np.tile(cost, played)
    work[1::2] = work[1::2, ::-1]  # every second turn begins with the program that was the last
    work = work.sum(0)  # [programs]
    if shared == 1:
        return float(work.max()) * heads / played
    # Programs of one multiprocessor share its tensor cores. One alone leaves them idle while it exponentiates.
    together = np.bincount(np.arange(programs) % sm_count, weights=work)  # [multiprocessors]
    return float(max(together.max(), work.max() / ALONE)) / shared * heads / played


def widest(problem: Problem) -> int:
    """Columns of the wider of Q and V, padded, at least the 64 of a tile."""
    return max(64, padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))


@cache
def columns_of_parts(spec: Specialization, in_parts: str) -> int:
    """Columns of K and V together, of all parts."""
    return sum(columns(spec, {"IN_PARTS": in_parts}))


def busiest(problem: Problem, config: Config, sm_count: int, start: float | None = None) -> float:
    """Key blocks that the busiest multiprocessor works through for a config of the Hopper forward. ``start``: of a tile, None
    for START."""
    heads, band = problem.batch * problem.heads_q, 1
    if problem.mask == CAUSAL:
        wide = columns_of_parts(problem.specialization, SPACE.completed(config)["IN_PARTS"])
        band = min(heads, _band(config["HEADS_PER_WAVE"], problem.seqlen_k, wide, problem.mask.name))
    return _busiest(
        heads, problem.seqlen_q, problem.seqlen_k, problem.mask.name, config["BLOCK_M"], config["BLOCK_N"], band, sm_count,
        PROGRAMS[config["maxnreg"]], START[config["Q_STAGES"]] if start is None else start,
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


def _of_columns(now: int, measured: int) -> float:
    """Time of a block over that of one of as many columns as were measured."""
    return 1 + COLUMN_SHARE * (now / measured - 1)


def _launch_and_block_us(problem: Problem, row: Row, config: Config) -> tuple[float, float] | None:
    """Microseconds that do not depend on the tile order, and of a key block, with ``config``, which is the row's in any order;
    None: the row has no time."""
    block = block_us(row)
    if block is None:
        return None
    in_parts, tuned = SPACE.completed(config)["IN_PARTS"], row.key.workload().specialization
    share = _of_columns(columns_of_parts(problem.specialization, in_parts), columns_of_parts(tuned, in_parts))
    return _fixed_us(problem, config), block * share


def predicted_us(problem: Problem, row: Row, config: Config, sm_count: int) -> float | None:
    """Microseconds that ``config``, the row's or one that differs in the tile order alone, is expected to take."""
    if (known := _launch_and_block_us(problem, row, config)) is None:
        return None
    fixed, block = known
    return fixed + block * busiest(problem, config, sm_count)


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
        fitted = suited(problem, row.config)
        if (known := _launch_and_block_us(problem, row, fitted)) is None:
            continue
        for order in ORDERS if problem.mask == CAUSAL else (own["HEADS_PER_WAVE"],):
            ordered = {**fitted, "HEADS_PER_WAVE": order}
            time = known[0] + known[1] * busiest(problem, ordered, sm_count)
            if time < most:
                faster.append((time, row, ordered))
    least, row, config = _fastest(faster) if faster else (now * (1 - MARGIN), served, own)
    few = for_few_tiles(problem.specialization, row.key.arch)
    if few is None or (few_us := few_tiles_us(problem, few, sm_count)) is None:
        return row, config
    margin = FEW_MARGIN if few["IN_PARTS"] == "none" else FEW_MARGIN_IN_PARTS
    return row, few if few_us < (1 - margin) * least else config


def _fastest(found: Iterable[tuple[float, Row, Config]]) -> tuple[float, Row, Config]:
    found = list(found)
    most = (1 + TIE) * min(time for time, _, _ in found)
    return min((one for one in found if one[0] <= most), key=lambda one: (one[2]["HEADS_PER_WAVE"] != 0, one[0]))


@lru_cache(maxsize=1024)
def for_few_tiles(spec: Specialization, arch: int) -> Config | None:
    """The config for calls of few tiles; None: these head dims have none, or are too narrow (FEW_TILES_ABOVE)."""
    few, wide = few_tiles(spec), min(spec.head_dim, spec.head_dim_v) > FEW_TILES_ABOVE
    return few if wide and SPACE.broken(few, spec, arch) is None else None


def is_for_few_tiles(problem: Problem, config: Config, row: Row, arch: int) -> bool:
    """Whether a config that ``best`` gives is that of ``for_few_tiles`` and not the row's."""
    return config == for_few_tiles(problem.specialization, arch) != suited(problem, row.config)


def few_tiles_us(problem: Problem, few: Config, sm_count: int) -> float | None:
    """Microseconds that the config for calls of few tiles is expected to take; None: there are too many tiles."""
    if problem.query_tiles(few["BLOCK_M"]) * problem.heads_q > FEW_TILES * sm_count:
        return None
    wide = columns_of_parts(problem.specialization, few["IN_PARTS"])
    block = FEW_BLOCK_US * PROGRAMS[few["maxnreg"]] * (2 * _of_columns(wide, 512) if wide > 256 else 1.0)
    return FEW_LAUNCH_US + block * busiest(problem, few, sm_count, FEW_START)


def expected_us(problem: Problem, row: Row, config: Config, sm_count: int) -> float | None:
    """Microseconds that a choice of ``best`` is expected to take; None: nothing is predicted of it."""
    if not problem.mask.measured:
        return None
    if is_for_few_tiles(problem, config, row, row.key.arch):
        return few_tiles_us(problem, config, sm_count)
    fitted = {**config, "HEADS_PER_WAVE": row.config["HEADS_PER_WAVE"]}  # as ``block_us`` has to know it
    return predicted_us(problem, replace(row, config=fitted), config, sm_count)
