"""Which tuned config suits the forward of a window that is bounded on both sides, or of chunks: arithmetic on the host, no GPU.

Rows are measured without a window, where a tile of a long sequence visits many key blocks, and its start and end count for
little. In a narrow window they are most of its time, and the size of a tile decides how much is computed beside the window:
where a query sees 128 keys, a tile of 192 rows visits 3 blocks of 128, so 384, and one of 64 rows 3 blocks of 64, so 192. So a
time here is a fixed cost a tile and a cost a visited block; the latter is from each row's own measurement.

Against what was measured of windows: docs/experiments/windows.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from fa2tune.calling.schedules import forward_schedule
from fa2tune.rows.row import Row
from fa2tune.search_spaces.sm90.fwd import ROWS, programs, suited
from fa2tune.spec import visits
from fa2tune.spec.mask import Mask
from fa2tune.spec.maskfile import mask_named
from fa2tune.spec.problem import Config, Problem

#: Start and end of a tile under a window: in key blocks, and of three groups (BLOCK_M 192) in keys. Three groups at head dim 64
#: took 6 and 7 blocks of 128 in the two windows that were timed, two groups at 128 took 2 in three of them; of one group there
#: are short causal calls alone, which took 1.5 blocks (docs/experiments/windows.md).
START, START_KEYS_OF_THREE = 2.0, 768
#: A row of another form must be predicted to be faster by this share: times of such rows under a window are not measured.
MARGIN = 0.15


def is_window(problem: Problem) -> bool:
    """Whether the mask is a window bounded on both sides."""
    window = problem.mask.window
    return window is not None and None not in window


def covers(problem: Problem) -> bool:
    """Whether the mask is bounded on both sides."""
    if problem.mask.window is not None:
        return is_window(problem)
    return all(mask_named(problem.mask.name).bounded.values())


@lru_cache(maxsize=4096)
def visited(mask: Mask, seqlen_q: int, seqlen_k: int, rows: int, columns: int) -> float:
    """Key blocks of ``columns`` that a tile of ``rows`` queries visits, on average over the tiles of a head."""
    first, end = visits.key_blocks(mask, seqlen_q, seqlen_k, rows, columns)
    return float((end - first).clip(0).mean())


def _tiles(problem: Problem, config: Config) -> int:
    return problem.query_tiles(config["BLOCK_M"]) * problem.heads_q


def predicted_us(problem: Problem, row: Row, sm_count: int) -> float | None:
    """Microseconds that the row's config is expected to take; None: the row has no measured time."""
    block = forward_schedule.block_us(row)
    if block is None:
        return None
    rows, columns = row.config["BLOCK_M"], row.config["BLOCK_N"]
    blocks = visited(problem.mask, problem.seqlen_q, problem.seqlen_k, rows, columns)
    start = START_KEYS_OF_THREE / columns if rows == 3 * ROWS else START
    turns = -(-_tiles(problem, row.config) // sm_count) / programs(row.config)
    return forward_schedule.LAUNCH_US + block * (start + blocks) * turns


def form(config: Config) -> tuple[int, ...]:
    """What decides the tiles and how they overlap. Rows of one form differ in their measured times by the clocks and the
    lengths that they were measured at, which are no reason to take one for the other."""
    return config["BLOCK_M"], config["BLOCK_N"], config["Q_STAGES"], config["maxnreg"]


def best(problem: Problem, served: Row, others: Iterable[Row], sm_count: int) -> tuple[Row, Config]:
    """As ``forward_schedule.best``: ``served``, unless a row of another form is predicted to be faster by more than MARGIN. Of
    fewer tiles than multiprocessors nothing is predicted."""
    now = None if _tiles(problem, served.config) < sm_count else predicted_us(problem, served, sm_count)
    if now is not None:
        differ = [row for row in others if form(row.config) != form(served.config)]
        times = [(time, row) for row in differ if (time := predicted_us(problem, row, sm_count)) is not None]
        least, row = min(times, key=lambda one: one[0], default=(now, served))
        if least < (1 - MARGIN) * now:
            return row, suited(problem, row.config)
    return served, suited(problem, served.config)
