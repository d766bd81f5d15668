"""Whether the query blocks of a key tile are in parts, each a program's, in the fused Hopper backward of ungrouped heads:
arithmetic on the host, by the times of ``fused_schedule``.

Of few key tiles the longest is all that counts, and of some more the last ones run alone. A part's dK and dV are written in the
call's dtype and added up after (``launching/group_parts.py``)."""

from __future__ import annotations

import math
from dataclasses import replace

from fa2tune.calling.schedules import fused_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import group_parts
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.problem import Config, Problem

#: Parts must be predicted to be faster by this share and so many microseconds, by more of packed sequences, whose lengths are
#: not known; of predictions within TIE of the least the fewest are taken. (docs/experiments/query-parts.md)
MARGIN, LEAST_US, PACKED_LEAST_US, TIE = 0.08, 2.0, 4.0, 0.02
#: Of more key tiles a multiprocessor the last ones are less than MARGIN of the time.
MOST_TILES = 12
#: Heads of a band, as many as are searched.
MOST_HEADS = max(bwd_fused.SPACE.dimensions["HEADS_PER_WAVE"])


def form(choice: Choice) -> Config:
    """The row's config with QUERY_PARTS: the kernel alone on the GPU, started early. Of few tiles of a dense call
    the longest come first if a band has the parts of all heads."""
    apart = {**fused_schedule.apart(choice.of_row.config), "PAIRS": False, "LONGER_FIRST": False}
    return {**apart, "EARLY_START": fused_schedule.EARLY_START, "QUERY_PARTS": True, "HEADS_PER_WAVE": MOST_HEADS}


def forms(problem: Problem, choice: Choice, arch: int) -> list[Config]:
    """Those of ``form`` that some call of ungrouped heads may have, whatever its batch, heads and lengths are."""
    if not fused_schedule.recorded(problem.mask) or not fused_schedule.times(choice.variant, problem):
        return []
    found = form(choice)
    return [found] if bwd_fused.SPACE.broken(found, problem.specialization, arch) is None else []


def counted(problem: Problem, config: Config, gpu: Gpu, below: float = math.inf) -> tuple[float, int]:
    """(expected microseconds, parts) of a config with QUERY_PARTS; infinite: no number of parts takes less than ``below``, or
    there is nothing to add parts up with."""

    def time(parts: int, exact: bool) -> float:
        return fused_schedule.predicted_us(problem, config, gpu, parts, exact)

    found: dict[int, float] = {}
    for bound, parts in sorted((time(parts, False), parts) for parts in group_parts.query_counts(problem, gpu.arch)):
        if bound > (1 + TIE) * min(found.values(), default=below):
            break
        found[parts] = time(parts, True)
    least = min(found.values(), default=math.inf)
    return least, min((parts for parts, us in found.items() if us <= (1 + TIE) * least), default=1)


def with_parts(problem: Problem, choice: Choice, gpu: Gpu) -> Choice:
    """``choice``, or that with query blocks in parts where it is expected to be faster."""
    if problem.is_empty or problem.group != 1 or _tiles(problem) > MOST_TILES * gpu.sm_count:
        return choice
    if not (found := forms(problem, choice, gpu.arch)):
        return choice
    now = fused_schedule.predicted_us(problem, choice.config, gpu)
    wanted = min((1 - MARGIN) * now, now - (PACKED_LEAST_US if problem.extent.ragged else LEAST_US))
    if counted(problem, found[0], gpu, wanted)[0] >= wanted:
        return choice
    return replace(choice, config=found[0], otherwise=choice.of_row.config)


def _tiles(problem: Problem) -> int:
    return problem.batch * problem.heads_kv * problem.extent.tiles(1, problem.seqlen_k, fused_schedule.TILE)
