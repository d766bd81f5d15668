"""Heads of a band of the fused Hopper backward, whose key tiles are given out together, for a dense call: arithmetic on the
host, by the times of ``fused_schedule``.

A row's number (HEADS_PER_WAVE) is of one workload. It is a launch argument: machine code is the same for all. Wide bands give
long tiles out first, so programs end together; of narrow ones the rows of queries stay in the L2 between two tiles that see
them. (docs/experiments/dense-backward.md)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fa2tune.calling.schedules import fused_schedule, group_parts_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import group_parts
from fa2tune.launching.passes import ACCUMULATES_DQ
from fa2tune.rows.row import WORKLOAD
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Config, Problem

#: Numbers that are tried beside the row's; the widest is not searched. Bands of one head are slower than their estimate: all
#: programs add to the same rows.
BANDS = (4, 16, 32, 64)
#: Narrower ones than the row's are tried only without a mask and where the row's fill so many L2s. Elsewhere they cannot be
#: predicted: one call of a model took 1.06 of the time.
OVERFULL = 2.0
#: Time grows by SPREAD for each L2 that a band's rows fill beyond a share of it. Another number than the row's must be
#: predicted to be faster by MARGIN. Fitted to 89 calls on an H200 that were timed in up to seven bands, held out 80.
SPREAD, FREE, MARGIN = 0.15, 0.25, 0.02


def _filled(problem: Problem, config: Config, gpu: Gpu, parts: int) -> Callable[[int], float]:
    """Heads of a band -> L2s that rows of q, do and sums of dQ fill: of its heads, or of all that programs run at once."""
    heads, tiles = problem.batch * problem.heads_kv * parts, -(-problem.seqlen_k // fused_schedule.TILE)
    rows = problem.group // parts * problem.seqlen_q  # of a head
    head = rows * fused_schedule.kept_bytes(problem, config) / gpu.l2_bytes
    at_once = gpu.sm_count / tiles
    return lambda band: min(heads, max(band, at_once)) * head


def in_bands(problem: Problem, choice: Choice, gpu: Gpu) -> Choice:
    """``choice``, or that in bands of another number of heads where it is expected to be faster."""
    own = choice.config
    if problem.is_empty or not fused_schedule.covers(choice.variant, problem):
        return choice
    if not own["DYNAMIC"] or own["PAIRS"] or own.get("IN_ORDER") or group_parts.of_queries(own):
        return choice
    if choice.row is not None and all(getattr(choice.row, name) == getattr(problem, name) for name in WORKLOAD):
        return choice  # the row's were searched there
    parts = group_parts_schedule.parts_of(problem, ACCUMULATES_DQ, choice, gpu)
    filled, row = _filled(problem, own, gpu, parts), own["HEADS_PER_WAVE"]
    now = fused_schedule.predicted_us(problem, own, gpu, parts)
    overfull = problem.mask == FULL and filled(row) > OVERFULL
    if not overfull and fused_schedule.predicted_us(problem, own, gpu, parts, exact=False) >= (1 - MARGIN) * now:
        return choice  # in other bands the mean of all programs takes about as long

    def spread(us: float, band: int) -> float:
        return us * (1 + SPREAD * max(0.0, filled(band) - FREE))

    heads = problem.batch * problem.heads_kv * parts
    # those of all heads are alike
    others = {min(band, heads): band for band in reversed(BANDS) if band > min(row, heads) or overfull}
    others.pop(min(row, heads), None)
    made = {band: {**own, "HEADS_PER_WAVE": band} for band in sorted(others.values())}
    times = {band: spread(fused_schedule.predicted_us(problem, made[band], gpu, parts), band) for band in made}
    best = min(times, key=times.__getitem__, default=row)
    if best == row or times[best] >= (1 - MARGIN) * spread(now, row):
        return choice
    found = replace(choice, config=made[best], otherwise=choice.of_row.config)
    # their estimate does not know what the L2 holds
    same = group_parts_schedule.parts_of(problem, ACCUMULATES_DQ, found, gpu) == parts
    return found if same else choice
