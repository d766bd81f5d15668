"""Tiles of the Hopper forward for calls of few of them: arithmetic on the host, no GPU.

Rows are tuned on 16k tokens, where the tile of the best rate wins. With few tiles a multiprocessor what counts is how evenly
they fill it, how much of a tile lies beside the call, and a tile's start and end. So each form of tile has constants here: a
launch, a key block, and a tile's start and end, in microseconds, fitted to what ``benchmarks/launch_choices.py --few`` and
``--small`` recorded in benchmarks/calls/: docs/experiments/few-tiles.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fa2tune.calling.schedules.tile_order import busiest, columns_of_parts
from fa2tune.search_spaces.sm90.fwd import PROGRAMS, ROWS, SPACE, of_tiles
from fa2tune.spec.problem import Config, Problem, Specialization

#: (BLOCK_M, BLOCK_N, maxnreg)
TileForm = tuple[int, int, int]


@dataclass(frozen=True)
class TilePace:
    """Of tiles of one form, in microseconds of an H200: at 128 columns of K and V together, and for 128 columns more."""

    block: float  #: a key block, where all programs of a multiprocessor run
    block_wider: float
    start: float  #: start and end of a tile
    start_wider: float


PACES: dict[TileForm, TilePace] = {
    (64, 64, 80): TilePace(0.93, 0.36, 1.46, 1.26),
    (64, 64, 128): TilePace(0.67, 0.20, 1.10, 0.75),
    (64, 128, 128): TilePace(1.21, 0.46, 1.26, 1.02),
    (128, 64, 0): TilePace(0.66, 0.18, 1.12, 0.67),
    (128, 128, 0): TilePace(1.12, 0.32, 1.47, 0.89),
    (192, 64, 0): TilePace(0.78, 0.28, 2.29, 0.44),
    (192, 128, 0): TilePace(1.41, 0.41, 2.68, 0.89),
}
LEAST_COLUMNS = 64  #: fewer were not timed
#: Programs that a multiprocessor holds at once -> microseconds of a launch; and what a second Q adds.
LAUNCH_US, SECOND_Q_US = {1: 3.43, 2: 2.96, 3: 3.06}, 0.48
#: Rows that begin in the midst of a sector of 32 bytes, those of head dims that are no multiples of 16, are slow to load, and
#: tiles of 64 rows load K and V the most often: so many times as long they took, by head dim, and at others
#: (docs/experiments/few-tiles.md).
SECTOR_COSTS, SECTOR_COST = {24: 1.25, 40: 1.5, 56: 1.0, 72: 1.35}, 1.2
#: Forms that may serve in place of a row's: of the recorded calls these four leave what all leave.
OFFERED: tuple[TileForm, ...] = ((64, 64, 80), (64, 64, 128), (64, 128, 128), (192, 64, 0))
#: These constants are for calls of up to so many keys, and of up to MOST_KEYS where tiles of 128 rows are up to MOST_TILES a
#: multiprocessor. Of drawn calls (docs/experiments/few-tiles.md) they are 0.05 to 0.09 off with up to 1024 keys, however many
#: tiles there are, and rows' times 0.10 to 0.20; with many keys, or more keys and many tiles, rows' times are nearer.
FEW_KEYS, MOST_KEYS, MOST_TILES, FULL_TILE = 1024, 4096, 8, 128
#: Microseconds of the pass over K that RESCALE "never" begins with, and bytes of K a microsecond. What it saves with so few
#: keys was not measured.
NORMS_US, NORMS_BYTES_PER_US = 4.0, 3.0e6
#: It must be predicted to be faster than the row's config, by the same constants, by this share; of more tiles by the second
#: one, as only configs that served were timed there.
MARGIN, MANY_MARGIN = 0.03, 0.1


def _few(problem: Problem, sm_count: int) -> bool:
    return problem.query_tiles(FULL_TILE) * problem.heads_q <= MOST_TILES * sm_count


def covers(problem: Problem, sm_count: int) -> bool:
    """Whether a call has few keys, or few tiles, under a mask that was measured."""
    few = _few(problem, sm_count)
    short = problem.seqlen_k <= (MOST_KEYS if few else FEW_KEYS)
    return short and problem.mask.measured and not problem.extent.ragged


def sector_cost(problem: Problem, config: Config) -> float:
    """How many times as long tiles take for rows that begin inside a sector."""
    if config["BLOCK_M"] != ROWS:
        return 1.0
    dims = {dim for dim in (problem.head_dim, problem.head_dim_v) if dim % 16}  # V apart was not timed
    return max((SECTOR_COSTS.get(dim, SECTOR_COST) for dim in dims), default=1.0)


def expected_us(problem: Problem, config: Config, sm_count: int) -> float | None:
    """Microseconds that a config of the Hopper forward is expected to take for a call of few tiles; None: of its form nothing
    was measured."""
    pace = PACES.get((config["BLOCK_M"], config["BLOCK_N"], config["maxnreg"]))
    if pace is None or not covers(problem, sm_count):
        return None
    columns = columns_of_parts(problem.specialization, SPACE.completed(config)["IN_PARTS"])
    wider = max(LEAST_COLUMNS, columns) / 128 - 1
    block, start = pace.block + pace.block_wider * wider, pace.start + pace.start_wider * wider
    cost = sector_cost(problem, config)
    launch = LAUNCH_US[PROGRAMS[config["maxnreg"]]] + (SECOND_Q_US if config["Q_STAGES"] == 2 else 0.0)
    if config["RESCALE"] == "never":
        launch += norms_us(problem)
    return launch + cost * block * busiest(problem, config, sm_count, start / block)


def norms_us(problem: Problem) -> float:
    """Microseconds of the pass over K."""
    keys = 2 * problem.batch * problem.heads_kv * problem.seqlen_k * problem.head_dim  # bytes
    return NORMS_US + keys / NORMS_BYTES_PER_US


@lru_cache(maxsize=1024)
def configs(spec: Specialization, arch: int) -> tuple[Config, ...]:
    """Those of OFFERED that these head dims leave room for."""
    found = (of_tiles(spec, *form) for form in OFFERED)
    return tuple(config for config in found if SPACE.broken(config, spec, arch) is None)


def margin(problem: Problem, sm_count: int) -> float:
    return MARGIN if _few(problem, sm_count) else MANY_MARGIN


def best(problem: Problem, arch: int, sm_count: int) -> tuple[float, Config] | None:
    """(expected microseconds, config) of the fastest of ``configs``; None: there is none."""
    times = [(expected_us(problem, config, sm_count), config) for config in configs(problem.specialization, arch)]
    found = [(time, config) for time, config in times if time is not None]
    if not found:
        return None
    return min(found, key=lambda one: one[0])


def is_offered(spec: Specialization, config: Config, arch: int) -> bool:
    """Whether a config is one of ``configs``."""
    return config in configs(spec, arch)
