"""Which tuned config, in which tile order, suits a call's own batch, heads and lengths: arithmetic on the host, no GPU.

A row is tuned on one workload of its length bucket. Another batch x heads, or a length next to a bucket's border, has another
number of tiles, and the tile order that balanced the tuned workload can leave one multiprocessor with twice the mean. Here the
order is played through (``tile_order``) for each tuned config of the same head dim and mask and for each tile order. Times a
block come from each row's own measurement. For calls of few tiles there are other forms of tile (``few_tiles``).

Checked against ``benchmarks/launch_choices.py``: docs/experiments/schedule.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from fa2tune.calling.schedules import few_tiles
from fa2tune.calling.schedules.tile_order import TILE_ORDERS, busiest, columns_of_parts
from fa2tune.rows.row import Row
from fa2tune.search_spaces.sm90.fwd import SPACE, suited, without_norms
from fa2tune.spec import visits
from fa2tune.spec.maskfile import mask_named
from fa2tune.spec.problem import Config, Problem, padded_head_dim
from fa2tune.spec.score import NONE
from fa2tune.spec.variant import Variant

#: Start and end of a tile (Q in, O out, divisions), in key blocks, by Q_STAGES: with two the next tile's Q is there already.
START = {1: 2.0, 2: 1.0}
#: Microseconds of a launch.
LAUNCH_US = 4.0
#: Share of a block's time that grows with the columns of K and V; the rest is exponentials, and waits between its steps.
#: Fitted to the forwards of seed 53c19ef in benchmarks/calls/random_calls.json.gz that rows of other columns served.
COLUMN_SHARE = 0.7
#: Another order, and another row, must be predicted to be faster by this share: a measured choice stands against a guess, and
#: times of rows were taken at clocks that differ.
MARGIN, ROW_MARGIN = 0.02, 0.03
#: Predictions this near to the least count as equal: of these order 0 is taken, which loses least on other workloads.
TIE = 0.01
#: Dense calls of up to so many microseconds have DIVISORS, whose gain does not grow with the call
#: (docs/experiments/divisors.md).
DIVISORS_US = 100.0


def covers(variant: Variant) -> bool:
    """Whether the tile order of a variant is the one that is played through here."""
    return variant.space is SPACE


def _busiest(problem: Problem, config: Config, sm_count: int) -> float:
    return busiest(problem, config, sm_count, START[config["Q_STAGES"]])


def _fixed_us(problem: Problem, config: Config) -> float:
    """What does not depend on the schedule."""
    if config["RESCALE"] != "never":
        return LAUNCH_US
    return LAUNCH_US + few_tiles.norms_us(problem)


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
        _BLOCK_US[known] = rest / _busiest(tuned, row.config, row.key.sm_count) if rest > 0 else None
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
    share *= few_tiles.sector_cost(problem, config) / few_tiles.sector_cost(row.key.workload(), row.config)
    return _fixed_us(problem, config), block * share


def predicted_us(problem: Problem, row: Row, config: Config, sm_count: int) -> float | None:
    """Microseconds that ``config``, the row's or one that differs in the tile order alone, is expected to take."""
    if (known := _launch_and_block_us(problem, row, config)) is None:
        return None
    fixed, block = known
    return fixed + block * _busiest(problem, config, sm_count)


def _tuned_on(row: Row, problem: Problem) -> bool:
    """Whether the problem is the very workload that the row was measured on, its mask by whichever name."""
    tuned = row.key.workload()
    sizes = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k")
    same = all(getattr(problem, name) == getattr(tuned, name) for name in sizes)
    return same and problem.keys_seen == tuned.keys_seen


def of_like_work(problem: Problem, served: Row, others: Iterable[Row]) -> Row:
    """The row for a mask that no row was measured with: of ``served`` and ``others``, the same key at other lengths, the one
    whose queries saw on average as many keys as this problem's do, nearest by ratio; ``served`` where it is as near.

    What suits a window of 1024 keys at any length is what suits a causal mask of 2048: tiles of as many blocks."""

    def distance(row: Row) -> float:
        return abs(math.log(max(1.0, row.key.workload().keys_seen) / max(1.0, problem.keys_seen)))

    return min((served, *others), key=distance)


def portable_is_faster(kernel: str, problem: Problem) -> bool:
    """Whether the portable kernel was measured to be faster than a warp-specialised one that computes the call, too: forwards
    with a score term, whose instructions take longer than the products, of up to 64 columns, and in windows of wide heads
    (docs/experiments/forward.md)."""
    if kernel != "fwd" or problem.score == NONE:
        return False
    width = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    return width <= 64 or (width > 128 and mask_named(problem.mask.name).left)


def best(problem: Problem, served: Row, others: Iterable[Row], sm_count: int) -> tuple[Row, Config]:
    """The row and config for a problem: those of ``served``, the row that the ladder names, unless another tile order, or
    another of the rows, is predicted to be faster by more than MARGIN or ROW_MARGIN, of calls without a score term.

    ``others``: rows of the same kernel, head dims, dtype and mask as ``served`` that could serve. Nothing is predicted of rows
    without a measured time; where ``served`` has none it stays. Nor of windows and chunks: ``window_schedule``.
    """
    own = suited(problem, served.config)
    if problem.is_empty or problem.score != NONE or not few_tiles.covers_mask(problem):
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
        for order in TILE_ORDERS if visits.longest_last(problem.mask) else (own["HEADS_PER_WAVE"],):
            ordered = {**fitted, "HEADS_PER_WAVE": order}
            time = known[0] + known[1] * _busiest(problem, ordered, sm_count)
            if time < most:
                faster.append((time, row, ordered))
    least, row, config = _fastest(faster) if faster else (now * (1 - MARGIN), served, own)
    if (margin := few_tiles.margin(problem, row, sm_count)) is None:
        return row, config
    if (now := few_tiles.expected_us(problem, config, sm_count)) is not None:
        least = now  # by the constants that the other forms have
    forms = [few] if (few := few_tiles.best(problem, row.key.arch, sm_count)) is not None else []
    if config["RESCALE"] == "never":  # with maxima, which are faster where keys are few, or columns many
        maxima = without_norms(config)
        if (expected := few_tiles.expected_us(problem, maxima, sm_count)) is not None:
            forms.append((expected, maxima))
    time, other = min(forms, key=lambda one: one[0], default=(math.inf, config))
    return row, other if time < (1 - margin) * least else config


def with_divisors(problem: Problem, row: Row, config: Config, sm_count: int) -> Config:
    """A config that ``best`` gives, with DIVISORS where the call is short."""
    if problem.is_empty or problem.score != NONE or (sm_count == row.key.sm_count and _tuned_on(row, problem)):
        return config
    time = expected_us(problem, row, config, sm_count)
    return divided(config) if time is not None and time <= DIVISORS_US else config


def divided(config: Config) -> Config:
    return {**config, "DIVISORS": True}


def short_forms(problem: Problem, own: Config, few: Iterable[Config]) -> list[Config]:
    """What short calls may have in place of a row's config and of those for few tiles."""
    return [divided(one) for one in (own, without_norms(own), *few)] if few_tiles.covers(problem) else []


def _fastest(found: Iterable[tuple[float, Row, Config]]) -> tuple[float, Row, Config]:
    found = list(found)
    most = (1 + TIE) * min(time for time, _, _ in found)
    return min((one for one in found if one[0] <= most), key=lambda one: (one[2]["HEADS_PER_WAVE"] != 0, one[0]))


def is_for_few_tiles(problem: Problem, config: Config, row: Row) -> bool:
    """Whether a config that ``best`` gives is one of ``few_tiles.configs`` and not the row's in some band, or the row's with
    maxima."""
    own = {**suited(problem, row.config), "HEADS_PER_WAVE": config["HEADS_PER_WAVE"]}
    offered = few_tiles.is_offered(problem.specialization, config, row.key.arch)
    return config != own and (offered or config["RESCALE"] != own["RESCALE"])


def expected_us(problem: Problem, row: Row, config: Config, sm_count: int) -> float | None:
    """Microseconds that a choice of ``best`` is expected to take; None: nothing is predicted of it."""
    if not few_tiles.covers_mask(problem):
        return None
    few = few_tiles.expected_us(problem, config, sm_count)
    if few is not None and few_tiles.margin(problem, row, sm_count) is not None:
        return few
    fitted = {**config, "HEADS_PER_WAVE": row.config["HEADS_PER_WAVE"]}  # as ``block_us`` has to know it
    return predicted_us(problem, replace(row, config=fitted), config, sm_count)
