"""Tiles of the Hopper forward that may serve in place of a row's: arithmetic on the host, no GPU.

Rows are tuned on 16k tokens of a few head dims, where the tile of the best rate wins. In other calls what counts is how evenly
tiles fill the multiprocessors, how much of a tile lies beside the call, a tile's start and end, and what columns of padding
cost. So each form of tile has constants here: a launch, a key block, and a tile's start and end, in microseconds, fitted to
what ``benchmarks/launch_choices.py`` and ``dense_forwards.py`` recorded in benchmarks/calls/: docs/experiments/few-tiles.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fa2tune.calling.schedules.tile_order import busiest, columns_of_parts, evenly, rates_of
from fa2tune.rows.row import Row
from fa2tune.search_spaces.lib.hopper import SECTOR
from fa2tune.search_spaces.sm90.fwd import NARROW, SPACE, in_v_halves, of_tiles, programs, suited, third_stage
from fa2tune.spec import visits
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import WARP_SPECIALIZED, implementation_of

#: (BLOCK_M, BLOCK_N, maxnreg)
TileForm = tuple[int, int, int]


@dataclass(frozen=True)
class TilePace:
    """Of tiles of one form, in microseconds of an H200, at 128, 256 and 384 columns of K and V together, linear between these
    and beyond."""

    block: tuple[float, float, float]  #: a key block, where all programs of a multiprocessor run
    start: tuple[float, float]  #: start and end of a tile, at 128 and 384


@dataclass(frozen=True)
class DenseShares:
    """What dense calls take over what a TilePace says. Of two numbers the first is without a mask, the second under one."""

    block: tuple[float, float]
    start: tuple[float, float]
    never: tuple[float, float]  #: a block with RESCALE "never", once more
    wider: float  #: what that takes more for 128 columns above 256
    apart: float  #: a block where the head dims of Q and V differ, once more


PACES: dict[TileForm, TilePace] = {
    (64, 64, 80): TilePace((0.93, 1.26, 1.65), (1.39, 4.35)),
    (64, 64, 128): TilePace((0.65, 0.86, 1.2), (1.1, 2.87)),
    (64, 128, 128): TilePace((1.23, 1.78, 2.13), (1.15, 2.58)),
    (128, 64, 80): TilePace((1.07, 1.44, 1.81), (1.43, 2.29)),
    (128, 64, 0): TilePace((0.64, 0.83, 1.11), (1.15, 2.26)),
    (128, 128, 0): TilePace((1.12, 1.53, 2.5), (1.48, 2.47)),
    (192, 64, 0): TilePace((0.765, 1.005, 1.74), (2.29, 3.92)),
    (192, 128, 0): TilePace((1.46, 2.0, 2.3), (2.58, 3.5)),
}
#: Fitted by benchmarks/few_tiles_fit.py to races of drawn calls, where forms are close. Packed calls have none of it, nor do
#: splits and what is scaled from rows.
DENSE_SHARES: dict[TileForm, DenseShares] = {
    (64, 64, 80): DenseShares((0.98, 1.019), (0.991, 0.991), (1.013, 1.047), 0.0, 0.928),
    (64, 64, 128): DenseShares((0.97, 1.0), (0.97, 0.901), (0.999, 1.024), -0.009, 0.946),
    (64, 128, 128): DenseShares((0.945, 0.98), (1.01, 1.0), (1.017, 1.055), 0.0, 0.946),
    (128, 64, 80): DenseShares((1.0, 1.02), (1.0, 1.0), (0.975, 0.935), 0.0, 1.0),
    (128, 64, 0): DenseShares((1.002, 1.001), (0.965, 1.006), (0.941, 0.909), -0.008, 1.006),
    (128, 128, 0): DenseShares((0.964, 0.973), (0.947, 1.064), (0.984, 1.018), -0.011, 1.02),
    (192, 64, 0): DenseShares((1.004, 1.023), (0.885, 0.962), (0.977, 1.021), 0.204, 0.945),
    (192, 128, 0): DenseShares((0.96, 0.988), (0.983, 1.008), (1.032, 1.031), 0.0, 0.99),
}
#: What a dense call's block with RESCALE "never" takes more where a multiprocessor has one tile of FULL_TILE rows: at 128
#: columns, and more for 128 columns more, without a mask with two stages, with three, and under a mask. Of FEW_TURNS_END tiles
#: nothing, in between by the logarithm of tiles.
FEW_TURNS, FEW_TURNS_END = ((0.032, 0.028), (0.002, 0.088), (-0.018, 0.084)), 8
#: What a dense call's block takes more where K and V are released at named barriers, without a mask and under one. Forms that
#: may serve in place of a row's have none, but above the first and up to the second of these head dims: tiles of 128 x 64
#: without a mask, where they gain 0 to 1 %, and of 64 x 64, 2 to 12 % (docs/experiments/few-tiles.md).
NUMBERED = (1.009, 1.018)
NUMBERED_DIMS: dict[TileForm, tuple[int, int]] = {(128, 64, 0): (128, 192), (64, 64, 128): (128, 160)}
#: Head dims of Q and V of latent attention (DeepSeek-V3's prefill). A dense call's block takes so many times what the rest
#: says; and tiles of 128 x 128 have named barriers, which gained 4 to 8 % there and lost 1 % at 176 and 120
#: (forward_apart.json.gz).
LATENT_DIMS = (192, 128)
LATENT: dict[TileForm, float] = {(64, 64, 128): 1.15, (128, 64, 0): 1.05, (128, 128, 0): 0.94, (192, 64, 0): 1.1}
#: Of dense calls whose Q has up to WHOLE_DIM columns, and V more: a block takes so many times what the rest says; from
#: MANY_COLUMNS of V on, and once more with RESCALE "never". Fitted to 20 raced calls (docs/experiments/narrow-forwards.md).
NARROW_Q: dict[TileForm, float] = {(128, 64, 0): 1.06, (192, 64, 0): 1.12}
MANY_COLUMNS, NARROW_Q_WIDE_V, NARROW_Q_WIDE_V_NEVER = 200, 0.93, 0.94
LEAST_COLUMNS = 64  #: fewer were not timed
#: Up to this head dim parts take as long as columns of padding: of what 128 columns are estimated at 125 times in parts and
#: 101 padded are 0.98, at 48.
WHOLE_DIM = 64
#: Programs that a multiprocessor holds at once -> microseconds of a launch; of dense calls; and what a second Q adds.
LAUNCH_US, DENSE_LAUNCH_US, SECOND_Q_US = {1: 3.41, 2: 2.97, 3: 3.01}, {1: 3.56, 2: 2.9, 3: 2.9}, 0.48
#: RESCALE "never": a block's time over that of "lazy", at the columns of TilePace.block, of up to the last; what a tile's start
#: takes more at 128 columns, and more for 128 columns more; microseconds of the pass over K that comes before, and bytes of K a
#: microsecond. Where times come from rows, whose blocks have all of it but the pass, that takes what NORMS_US says.
#: NEVER_UNMASKED: of packed calls without a mask, where a block at 256 columns gains more: fitted to 13 calls of
#: launch_choices_fwd.json.gz, as near in 13 held out (docs/experiments/packed-tiles.md). Dense ones: NEVER_THREE_STAGES.
NEVER, NEVER_UNMASKED, NEVER_START, NEVER_START_WIDER = (0.85, 0.93, 1.05), (0.85, 0.85, 1.05), 0.72, 0.36
NEVER_US, NEVER_BYTES_PER_US = 2.5, 2.47e6
NORMS_US, NORMS_BYTES_PER_US = 4.0, 3.0e6
#: NEVER of dense calls without a mask, with three stages of 64 keys, and with the third in O's memory, which hides part of the
#: same: fitted to 88 pairs of benchmarks/calls/dense_forwards*. By either half of 36 of them, the error in the other fell from
#: 0.16 and 0.09 to 0.09 and 0.05. Not of RACED head dims: at 128 the one raced call took as long by two stages of 128 keys.
NEVER_THREE_STAGES, NEVER_THIRD_STAGE = (0.85, 0.87, 0.88), (0.85, 0.87, 0.93)
#: With a third stage in O's memory, where rows begin in the midst of a sector: a block's time, and microseconds more a tile,
#: whose end waits for O. Fitted to seven calls at 168 and 184 (dense_forwards_wide.json); at 176 and 192 tiles of few blocks
#: lost 12 %, and long ones gained 0 to 5.
THIRD_STAGE, THIRD_STAGE_START = 0.92, 1.0
#: Of head dims above the first and up to the second the second part has 16 or 32 columns: where multiprocessors have several
#: tiles of 64 rows a block took so many times as long, as two programs gain less by each other; of larger tiles 1.00 to 1.15
#: (dense_forwards_never.json.gz).
NARROW_PART_DIMS, NARROW_PART = (128, 160), 1.2
#: Of dense calls of so many keys or more whose head dims differ, that of Q above WHOLE_DIM: a block of 128 rows and 64 keys
#: where products read Q from shared memory, over one where registers hold it, with maxima; and with norms, where groups take no
#: turns. With turns and norms both are level. 18 raced pairs: 1.04 to 1.20, 1.01 to 1.14, 0.98 to 1.02; of 289 and 314 keys
#: 1.12 and 1.08, of 80 0.93; of Q up to WHOLE_DIM 0.96 to 1.04. And a block of 128 keys with maxima where groups take no turns,
#: as a row has it, and O has room of its own: one pair, 192 / 64. With O in halves it takes 0.79 at 176 / 120, and as long at
#: 192 / 128 (docs/experiments/few-tiles.md).
KEPT_KEYS, Q_READ, Q_READ_NORMS, Q_READ_128 = 256, 1.12, 1.07, 1.22
#: Of dense calls of one head dim above the first and up to the second, by whether groups take turns and whether Q is kept in
#: registers: a block of 128 rows and 64 keys over one with both, without a mask and under one. And with V in halves: a block of
#: 128 keys, whatever a row's sectors, and a tile's start and end. Fitted to 50 calls (dense_forwards_halves.json.gz,
#: docs/experiments/head-dims.md).
TURNS_DIMS = (160, 192)
TURNS_AND_KEPT = {(True, True): (1.0, 1.0), (True, False): (0.98, 1.06), (False, True): (1.06, 1.06),
                  (False, False): (1.05, 1.13)}  # fmt: skip
IN_HALVES = (2.12, 3.0), (2.02, 4.0)
#: Above this head dim V in halves is offered, and Q in shared memory without a mask: at 168, where exact products and a
#: third stage gain the most, V in halves took 0.99 to 1.06 of the time, and Q in shared memory 1.00 to 1.01.
MORE_FORMS_ABOVE = 168
#: Rows that begin in the midst of a sector of 32 bytes, those of head dims that are no multiples of 16, are slow to load, the
#: more so the more often tiles load K and V: rows of a tile -> head dim -> so many times as long a block took; 0: of others
#: (docs/experiments/few-tiles.md).
SECTOR_COSTS: dict[int, dict[int, float]] = {
    64: {24: 1.45, 40: 1.7, 56: 1.23, 72: 1.98, 88: 1.65, 104: 1.5, 120: 1.5, 0: 1.3},
    128: {24: 1.0, 40: 1.1, 56: 0.95, 72: 1.13, 88: 1.08, 104: 1.1, 0: 1.04},
    192: {24: 1.0, 40: 0.98, 56: 0.95, 72: 1.07, 88: 1.07, 0: 1.1},
}
#: Of dense calls, fitted with DENSE_SHARES.
DENSE_SECTOR_COSTS: dict[int, dict[int, float]] = {
    64: {24: 1.394, 40: 1.636, 56: 1.217, 72: 1.928, 88: 1.648, 104: 1.754, 120: 1.506, 0: 1.308},
    128: {24: 1.049, 40: 1.051, 56: 0.97, 72: 1.121, 88: 1.086, 104: 1.104, 0: 1.058},
    192: {24: 1.005, 40: 0.975, 56: 0.946, 72: 1.079, 88: 1.068, 0: 1.063},
}
#: Forms that may serve in place of a row's; and with RESCALE "never", from LONG_KEYS keys on. 192 x 128 leaves no more, but for
#: one call of head dim 48 that took 0.91 and 0.94 of the time in two races: offered up to WHOLE_DIM.
OFFERED: tuple[TileForm, ...] = (
    (64, 64, 80), (64, 64, 128), (64, 128, 128), (128, 64, 0), (128, 128, 0), (192, 64, 0)
)  # fmt: skip
NARROW_OFFERED: tuple[TileForm, ...] = (*OFFERED, (192, 128, 0), (128, 64, 80))
NEVER_OFFERED: tuple[TileForm, ...] = ((64, 64, 80), (128, 64, 0), (192, 64, 0), (128, 64, 80))
APART_NEVER_OFFERED: tuple[TileForm, ...] = (*NEVER_OFFERED, (128, 128, 0))  #: where NARROW_Q counts
LONG_KEYS = 1024
#: Up to this head dim exponentials take most of the time, and maxima the most of the rest: from so many keys on.
NARROWEST, LONG_KEYS_NARROWEST = 32, 512
#: Heads of a band that are tried under a mask in place of as many as the L2 holds, of forms that take up to BANDS_NEAR times
#: the fastest's time. Their estimate counts so many times: of the raced calls that are taken then none lost, and one of those
#: with less to gain lost 13 % (docs/experiments/few-tiles.md).
OTHER_BANDS, OTHER_BANDS_COST, BANDS_NEAR = (4, 22, 64), 1.06, 1.35
#: A form must be predicted to be faster than the row's config, by the same constants, by the first share; by the others where
#: tiles of FULL_TILE rows are more than MOST_TILES a multiprocessor, the last one where the row was tuned at the call's own
#: head dim, one of RACED. Such a row stays where calls have more keys than FEW_KEYS and so many tiles, or more than MOST_KEYS;
#: and with RESCALE "never" and WIDE_COLUMNS of K and V one of any head dim, where calls have so many tiles and more keys than
#: MOST_KEYS: it took 0.92 to 0.97 of the time of "lazy" in three of three. NEVER, fitted to smaller calls, says 1.05.
#: Not where there is a third stage: that took 0.89 and 0.93 of the time of "never" in two of two. Nor where a call of few
#: queries has the row's config without norms (``suited``).
#: TURNS_MARGIN: of TURNS_DIMS, whose rows were raced next to these forms.
MARGIN, MANY_MARGIN, OWN_MARGIN, TURNS_MARGIN, WIDE_COLUMNS = 0.03, 0.05, 0.1, 0.01, 384
RACED = (64, 128, 256)  #: head dims whose rows stand on hundreds of trials, at each length
MOST_TILES, FULL_TILE, FEW_KEYS, MOST_KEYS = 8, 128, 1024, 4096


def covers_mask(problem: Problem) -> bool:
    """Whether the mask is none, or one that is bounded on the right alone, as causal is."""
    return visits.longest_last(problem.mask) or not visits.bounded(problem.mask)


def covers(problem: Problem) -> bool:
    """Whether a call is dense, under such a mask."""
    return covers_mask(problem) and not problem.extent.ragged


def sector_cost(problem: Problem, config: Config, costs: Mapping[int, Mapping[int, float]] = SECTOR_COSTS) -> float:
    """How many times as long key blocks take for rows that begin inside a sector."""
    known, most = costs[config["BLOCK_M"]], 0.0  # a loop, for each new length asks this of many forms
    for dim in (problem.head_dim, problem.head_dim_v):
        if dim % SECTOR:
            most = max(most, known.get(dim, known[0]))
    return most or 1.0


def _at(values: Sequence[float], columns: float, between: int = 128) -> float:
    """Of values at 128 columns, ``between`` more, and so on: linear between these and beyond."""
    place = columns / between - 128 / between
    first = max(0, min(int(place), len(values) - 2))
    return values[first] + (values[first + 1] - values[first]) * (place - first)


def q_read_cost(problem: Problem, config: Config) -> float:
    """How many times as long key blocks take where products of Q and K read Q from shared memory, not from registers."""
    apart = WHOLE_DIM < problem.head_dim != problem.head_dim_v and not problem.extent.ragged
    if not apart or problem.seqlen_k < KEPT_KEYS:
        return 1.0
    tiles = config["BLOCK_M"], config["BLOCK_N"], programs(config)
    if config["Q_IN_REGISTERS"]:
        return 1.0
    if tiles == (128, 128, 1):
        known = not config["PINGPONG"] and config["O_THROUGH"] == "own" and config["RESCALE"] != "never"
        return Q_READ_128 if known else 1.0
    if tiles != (128, 64, 1):
        return 1.0
    if config["RESCALE"] == "never":
        return 1.0 if config["PINGPONG"] else Q_READ_NORMS
    return Q_READ


def narrow_q_cost(problem: Problem, form: TileForm, never: bool) -> float:
    """How many times as long key blocks take where Q has few columns and V more: NARROW_Q."""
    if form == (128, 64, 0) and problem.head_dim_v >= MANY_COLUMNS:
        return NARROW_Q_WIDE_V * (NARROW_Q_WIDE_V_NEVER if never else 1.0)
    return NARROW_Q.get(form, 1.0)


def takes_turns(problem: Problem | Specialization) -> bool:
    """Whether the head dim is one of TURNS_DIMS, for Q, K and V."""
    above, up_to = TURNS_DIMS
    return above < problem.head_dim <= up_to and problem.head_dim == problem.head_dim_v


def turns_cost(problem: Problem, config: Config) -> float:
    """How many times as long key blocks take as where groups of a program take turns and keep Q in registers."""
    tiles = config["BLOCK_M"], config["BLOCK_N"], config["maxnreg"]
    if problem.extent.ragged or tiles != (128, 64, 0) or not takes_turns(problem):
        return 1.0
    return TURNS_AND_KEPT[config["PINGPONG"], config["Q_IN_REGISTERS"]][problem.mask != FULL]


def columns(problem: Problem, config: Config) -> int:
    """Columns of K and V together, of all parts, at least those that were timed."""
    in_parts = SPACE.completed(config)["IN_PARTS"]
    if max(problem.head_dim, problem.head_dim_v) <= WHOLE_DIM:
        in_parts = "none"
    return max(LEAST_COLUMNS, columns_of_parts(problem.specialization, in_parts))


def paces_us(problem: Problem, config: Config) -> tuple[float, float, float] | None:
    """Microseconds of a launch, of a key block, and of a tile's start and end, with a config of the Hopper forward; None: of
    its form nothing was measured, or the config is of another kernel, whose tiles may have the same sizes."""
    form = config["BLOCK_M"], config["BLOCK_N"], config["maxnreg"]
    pace = PACES.get(form)
    if pace is None or implementation_of(config) != WARP_SPECIALIZED:
        return None
    wide, dense, masked = columns(problem, config), not problem.extent.ragged, problem.mask != FULL
    block, start = _at(pace.block, wide), _at(pace.start, wide, 256)
    launch = (DENSE_LAUNCH_US if dense else LAUNCH_US)[len(rates_of(config["BLOCK_M"], config["maxnreg"]))]
    launch += SECOND_Q_US if config["Q_STAGES"] == 2 else 0.0
    if dense:
        shares = DENSE_SHARES[form]
        block *= shares.block[masked] * (shares.apart if problem.head_dim != problem.head_dim_v else 1.0)
        if (problem.head_dim, problem.head_dim_v) == LATENT_DIMS:
            block *= LATENT.get(form, 1.0)
        if config["RESCALE"] == "never":
            block *= shares.never[masked] * (1 + shares.wider * max(0.0, wide / 128 - 2))
        if config.get("NUMBERED") and not named_barriers_suit(problem.specialization, form):
            block *= NUMBERED[masked]
        start *= shares.start[masked]
        if problem.head_dim <= WHOLE_DIM < problem.head_dim_v:
            block *= narrow_q_cost(problem, form, config["RESCALE"] == "never")
    if config.get("V_HALVES"):
        return launch, *IN_HALVES[masked]
    if config["RESCALE"] == "never":
        block *= _at(_never(problem, config), min(max(wide, 128), 384))
        start += NEVER_START + NEVER_START_WIDER * (wide / 128 - 1)
        launch += NEVER_US + _bytes_of_k(problem) / NEVER_BYTES_PER_US
    if config == third_stage(problem.specialization, config):
        block *= THIRD_STAGE
        start += THIRD_STAGE_START
    block *= q_read_cost(problem, config) * turns_cost(problem, config)
    block *= sector_cost(problem, config, DENSE_SECTOR_COSTS if dense else SECTOR_COSTS)
    return launch, block, start


def _never(problem: Problem, config: Config) -> tuple[float, float, float]:
    """A block's time with RESCALE "never" over that with "lazy", at the columns of TilePace.block."""
    if problem.mask != FULL:
        return NEVER
    if problem.extent.ragged:
        return NEVER_UNMASKED
    own = problem.head_dim == problem.head_dim_v in RACED  # rows of these stand on races of all forms
    if own or config["BLOCK_M"] == 64 or config["BLOCK_N"] != 64 or config["STAGES"] != 3:
        return NEVER
    return NEVER_THIRD_STAGE if config["O_THROUGH"] == "q" else NEVER_THREE_STAGES


def has_narrow_part(problem: Problem) -> bool:
    """Whether the wider head dim is one of NARROW_PART_DIMS."""
    above, up_to = NARROW_PART_DIMS
    return above < max(problem.head_dim, problem.head_dim_v) <= up_to


def narrow_part_cost(problem: Problem, config: Config, sm_count: int) -> float:
    """How many times as long a block takes where several tiles of 64 rows share a multiprocessor: NARROW_PART."""
    shared = config["BLOCK_M"] == 64 and problem.query_tiles(64) * problem.heads_q > sm_count
    return NARROW_PART if shared and has_narrow_part(problem) else 1.0


def few_turns_cost(problem: Problem, config: Config, sm_count: int) -> float:
    """How many times as long a block takes with RESCALE "never" where multiprocessors have few tiles: it pays where they are
    at the GPU's power limit."""
    if config["RESCALE"] != "never":
        return 1.0
    turns = problem.query_tiles(FULL_TILE) * problem.heads_q / sm_count
    few = max(0.0, 1 - math.log(max(turns, 1.0), FEW_TURNS_END))
    first, wider = FEW_TURNS[2 if problem.mask != FULL else config.get("STAGES") == 3]
    return 1 + few * (first + wider * (columns(problem, config) / 128 - 1))


def _paces_of_call(problem: Problem, config: Config, sm_count: int) -> tuple[float, float, float] | None:
    """``paces_us`` of a dense call on a GPU."""
    if not covers(problem) or (paces := paces_us(problem, config)) is None:
        return None
    launch, block, start = paces
    if config["RESCALE"] == "never":
        block *= few_turns_cost(problem, config, sm_count)
    if config["BLOCK_M"] == 64:
        block *= narrow_part_cost(problem, config, sm_count)
    return launch, block, start


def expected_us(problem: Problem, config: Config, sm_count: int) -> float | None:
    """Microseconds that a config of the Hopper forward is expected to take for a dense call; None: of its form nothing was
    measured."""
    if (paces := _paces_of_call(problem, config, sm_count)) is None:
        return None
    launch, block, start = paces
    return launch + block * busiest(problem, config, sm_count, start / block)


def _bytes_of_k(problem: Problem) -> int:
    return 2 * problem.batch * problem.heads_kv * problem.seqlen_k * problem.head_dim


def norms_us(problem: Problem) -> float:
    """Microseconds of the pass over K, next to times of rows."""
    return NORMS_US + _bytes_of_k(problem) / NORMS_BYTES_PER_US


def named_barriers_suit(spec: Specialization, form: TileForm) -> bool:
    """Whether a form is as fast or faster where K and V are released at named barriers: NUMBERED_DIMS and LATENT_DIMS."""
    if form == (128, 128, 0) and (spec.head_dim, spec.head_dim_v) == LATENT_DIMS:
        return not spec.ragged
    above, up_to = NUMBERED_DIMS.get(form, (0, 0))
    unmasked = form != (128, 64, 0) or spec.mask == FULL.name
    return unmasked and above < max(spec.head_dim, spec.head_dim_v) <= up_to


def tiles_of(spec: Specialization, form: TileForm) -> Config:
    """The config of a form, with named barriers where they suit."""
    return {**of_tiles(spec, *form), "NUMBERED": named_barriers_suit(spec, form)}


@lru_cache(maxsize=1024)
def configs(spec: Specialization, arch: int) -> tuple[Config, ...]:
    """Those of OFFERED and NEVER_OFFERED that these head dims leave room for, and with a third stage; of TURNS_DIMS above
    MORE_FORMS_ABOVE also with Q in shared memory, without a mask, and with V in halves."""

    def of(forms: Sequence[TileForm]) -> list[Config]:
        found = [tiles_of(spec, form) for form in forms]
        return found + [third for config in found if (third := third_stage(spec, config)) is not None]

    narrow = max(spec.head_dim, spec.head_dim_v) <= WHOLE_DIM
    found = of(NARROW_OFFERED if narrow else OFFERED)
    apart = spec.head_dim <= WHOLE_DIM < spec.head_dim_v
    found += [{**config, "RESCALE": "never"} for config in of(APART_NEVER_OFFERED if apart else NEVER_OFFERED)]
    if takes_turns(spec) and spec.head_dim > MORE_FORMS_ABOVE:
        if spec.mask == FULL.name:
            found.append({**tiles_of(spec, (128, 64, 0)), "Q_IN_REGISTERS": False})
        if (halves := in_v_halves(spec)) is not None:
            found.append(halves)
    # completed, as a row may have the same config
    return tuple(SPACE.completed(config) for config in found if SPACE.broken(config, spec, arch) is None)


def margin(problem: Problem, row: Row, sm_count: int) -> float | None:
    """By how much a form must be faster than a row's config; None: these constants do not decide."""
    if not covers(problem):
        return None
    own = problem.head_dim in RACED and problem.head_dim == problem.head_dim_v == row.key.head_dim
    few = problem.query_tiles(FULL_TILE) * problem.heads_q <= MOST_TILES * sm_count
    if own and problem.seqlen_k > (MOST_KEYS if few else FEW_KEYS):
        return None
    wide = columns(problem, row.config) >= WIDE_COLUMNS
    never = suited(problem, row.config)["RESCALE"] == "never"
    timed = never and wide and not few and problem.seqlen_k > MOST_KEYS
    if timed and third_stage(problem.specialization, SPACE.completed(row.config)) is None:
        return None
    if takes_turns(problem):
        return TURNS_MARGIN
    narrow = max(problem.head_dim, problem.head_dim_v) <= NARROW  # rows are those of 64
    return MARGIN if few or narrow else OWN_MARGIN if own else MANY_MARGIN


def is_alone(problem: Problem, sm_count: int) -> bool:
    """Whether no multiprocessor has more than one tile of FULL_TILE rows."""
    return problem.query_tiles(FULL_TILE) * problem.heads_q <= sm_count


def norms_lose(problem: Problem, sm_count: int) -> bool:
    """Whether bounds by norms took longer in all raced calls: of few keys, or of head dims above 128 with at most one tile of
    FULL_TILE rows a multiprocessor, where they took 1.0 to 1.3 of the time of maxima."""
    wide = max(problem.head_dim, problem.head_dim_v)
    return problem.seqlen_k < (LONG_KEYS if wide > NARROWEST else LONG_KEYS_NARROWEST) or (
        wide > 128 and is_alone(problem, sm_count)
    )


#: Expected microseconds, config, and ``_paces_of_call``.
_TimedForm = tuple[float, Config, tuple[float, float, float]]


def _in_other_bands(problem: Problem, found: Sequence[_TimedForm], sm_count: int) -> Iterator[_TimedForm]:
    """Forms that may be faster than all of ``found`` in other bands of heads."""
    if not visits.longest_last(problem.mask) or problem.seqlen_q > problem.seqlen_k:
        return
    heads, least = problem.batch * problem.heads_q, min((one[0] for one in found), default=0.0)
    bands = {min(band, heads): band for band in reversed(OTHER_BANDS)}
    for time, config, (launch, block, start) in found:
        if time > BANDS_NEAR * least:
            continue
        if OTHER_BANDS_COST * (launch + block * evenly(problem, config, sm_count, start / block)) < least:
            for band in bands.values():
                banded = {**config, "HEADS_PER_WAVE": band}
                expected = launch + block * busiest(problem, banded, sm_count, start / block)
                yield OTHER_BANDS_COST * expected, banded, (launch, block, start)


def best(problem: Problem, arch: int, sm_count: int) -> tuple[float, Config] | None:
    """(expected microseconds, config) of the fastest of ``configs``, in any band of heads; None: there is none."""
    found, lose = list[_TimedForm](), norms_lose(problem, sm_count)
    alone = is_alone(problem, sm_count)
    for config in configs(problem.specialization, arch):
        if config["RESCALE"] == "never" and (lose or suited(problem, config) != config):
            continue
        if alone and config["maxnreg"] and config["BLOCK_M"] == FULL_TILE:
            continue  # without another program fewer registers cost, by 9 to 70 % of the best in 15 calls
        if (paces := _paces_of_call(problem, config, sm_count)) is not None:
            launch, block, start = paces
            found.append((launch + block * busiest(problem, config, sm_count, start / block), config, paces))
    found += [*_in_other_bands(problem, found, sm_count)]
    return min(found, key=lambda one: one[0])[:2] if found else None


def is_offered(spec: Specialization, config: Config, arch: int) -> bool:
    """Whether a config is one of ``configs``, in any band of heads."""
    return {**config, "HEADS_PER_WAVE": 0} in configs(spec, arch)
