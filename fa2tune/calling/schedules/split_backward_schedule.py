"""Whether the kernels of a split Hopper backward run at a time, which of them begins, and into how many parts keys of dQ are
split: arithmetic on the host, no GPU.

dQ's kernel has a program for 128 queries of a head, dK/dV's one for 64 keys, and a multiprocessor has room for one. Here the
tiles of both are given out to the multiprocessor that is free first: of one kernel after the other, as rows are tuned, and of
both at a time (``launching/overlapped.py``). Times are of 256 columns on an H200: docs/experiments/dense-backward.md has how
they are fitted, and how far off they are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from fa2tune.calling.schedules import fused_schedule, group_parts_schedule, packed_lengths
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import dq_parts, group_parts
from fa2tune.launching.overlapped import DKDV, DKDV_FIRST, DQ, DQ_AT_ONCE, DQ_FIRST
from fa2tune.search_spaces.lib.hopper import block_dims, columns
from fa2tune.search_spaces.sm90 import bwd_dkdv, bwd_dq
from fa2tune.spec.mask import CAUSAL, STACKED, Mask, heads_stacked
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant

#: Microseconds of a block (64 keys of 128 queries, 64 queries of 64 keys) and of a tile's start and end, of dQ's kernel and of
#: dK/dV's; launches are among the ends. And how much of the share of columns that are not computed a block saves, and the ends.
BLOCK_US, ENDS_US = {DQ: 1.70, DKDV: 1.68}, {DQ: 8.35, DKDV: 6.16}
BLOCKS_SAVE, ENDS_SAVE = 0.73, 0.59
#: Dense calls of up to so many microseconds have DIVISORS, and where it can be EARLY_START.
#: Those that take more than so many times as long, one kernel after the other, are not asked what both take at a time.
SHORT_US, MOST_SAVED = 100.0, 3.0
COLUMNS = 512  #: of Q and V together, where none is saved
CALL_US = 0.2
ORDER_US = 3.0  #: of the launch that puts packed tiles in their order, before each of dQ's kernel and delta's
#: Bytes a microsecond of what delta's rows move; and the share of a tile's ends that one of dQ's takes over no keys. No record
#: has the latter.
BYTES_PER_US, NO_KEYS = 3.5e6, 0.6
#: Both at a time must be predicted to be faster by this share and this time. Where dK/dV's kernel begins, which gained 1.6 % at
#: most over that in six recorded calls, by that share, and by MARGIN than where dQ's does.
MARGIN, DKDV_MARGIN, LEAST_US = 0.05, 0.1, 1.5
#: Of a call that takes so many microseconds: of twelve, timed in both forms, none gained less than predicted by more than 2 %
#: (tests/calling/test_split_backward_schedule.py).
LONG_US, LONG_MARGIN = 100.0, 0.025
#: Where dQ's longest tile decides, both kernels at once take this times that tile's estimate: ten of the eleven such calls of
#: benchmarks/calls/dq_parts.json, all with keys of more than 1024.
LONGEST = 1.06
BLOCK = 64  #: rows of a block, and keys of one
#: Microseconds of the launch that adds the parts up, those of the forward (``key_splits_schedule``), to which its bytes come.
#: Parts must be predicted to be faster by this share; of predictions this near to the least the one of the fewest parts is
#: taken.
COMBINE_US, KEYS_MARGIN, KEYS_TIE = 4.6, 0.15, 0.025
#: Programs that there are of dQ, in turns of as many as there are multiprocessors; and bytes of the parts' sums at most.
TURNS, MOST_BYTES = (0.25, 0.5, 1, 2), 64 << 20


class Tiles(NamedTuple):
    """Of a kernel."""

    costs: tuple[float, ...]  #: microseconds of each of a head, in the order in which they are given out
    heads: int
    band: int  #: heads that are given out together, tile after tile

    @property
    def number(self) -> int:
        return len(self.costs) * self.heads


def of_hopper(problem: Problem, choices: Mapping[str, Choice]) -> bool:
    """Whether choices are the split Hopper kernels, of a mask that was recorded."""
    if set(choices) != {DQ, DKDV} or not fused_schedule.recorded(problem.mask) or problem.is_empty:
        return False
    return (choices[DQ].variant.space, choices[DKDV].variant.space) == (bwd_dq.SPACE, bwd_dkdv.SPACE)


def covers(problem: Problem, choices: Mapping[str, Choice]) -> bool:
    """Whether a backward is like those that were recorded: the split Hopper kernels of head dims above 128."""
    return of_hopper(problem, choices) and max(block_dims(problem.specialization)) > 128


def in_short_form(problem: Problem, choices: dict[str, Choice], gpu: Gpu) -> dict[str, Choice]:
    """Those of a backward, of a short dense one with DIVISORS, and with dK/dV's kernel started before dQ's ends. Not where
    copies of K and V for parts of groups come between both, which it would read too early; nor where it is alone on a side
    stream, whose events it waits for in any case. Of head dims up to 128 the time is a rough one."""
    if problem.extent.ragged or not of_hopper(problem, choices):
        return choices
    parts = group_parts_schedule.parts_of(problem, DKDV, choices[DKDV], gpu)
    if predicted_us(problem, choices, parts, gpu) > MOST_SAVED * SHORT_US:
        return choices
    splits = key_parts(problem, choices, {DKDV: parts}, gpu)
    order = order_of(problem, choices, {DKDV: parts, DQ: splits}, gpu)
    if predicted_us(problem, choices, parts, gpu, order, splits=splits) > SHORT_US:
        return choices
    copied = parts > 1 and group_parts.copies(problem)
    early = fused_schedule.EARLY_START and not copied and order != DQ_FIRST
    return {
        kernel: replace(one, config=_short(one.config, early), otherwise=one.otherwise or one.config)
        for kernel, one in choices.items()
    }


def _short(config: Config, early: bool) -> Config:
    config = {**config, "DIVISORS": True}
    return fused_schedule.started_early(config) if early else config


def forms(problem: Problem, choice: Choice) -> Iterator[Config]:
    """Every config of other machine code that some dense call may have in place of a row's."""
    dense = not problem.extent.ragged and fused_schedule.recorded(problem.mask)
    if dense and choice.variant.space in (bwd_dq.SPACE, bwd_dkdv.SPACE):
        yield from (_short(choice.config, early) for early in {False, fused_schedule.EARLY_START})


def shares(problem: Problem, config: Config) -> tuple[float, float]:
    """Of a block's and of the ends' time with all columns."""
    saved = 1 - sum(columns(problem.specialization, config)) / COLUMNS
    return 1 - BLOCKS_SAVE * saved, 1 - ENDS_SAVE * saved


def _lengths(problem: Problem) -> tuple[tuple[int, int], ...]:
    """(queries, keys) of every sequence of a head."""
    return packed_lengths.each(problem) if problem.extent.ragged else ((problem.seqlen_q, problem.seqlen_k),)


@lru_cache(maxsize=512)  # lengths of packed sequences repeat
def keys_seen(seqlen_q: int, seqlen_k: int, rows: int, mask: Mask) -> tuple[int, ...]:
    """Keys that each tile of so many rows of a sequence sees; causal: the last ones, which are given out first, first."""
    tiles = -(-seqlen_q // rows)
    if mask != CAUSAL and mask.name != STACKED:
        return (seqlen_k,) * tiles
    heads = heads_stacked(mask)
    behind = seqlen_k - -(-seqlen_q // heads)
    ends = [-(-min((nth + 1) * rows, seqlen_q) // heads) + behind for nth in range(tiles)]
    return tuple([min(seqlen_k, max(0, end)) for end in reversed(ends)])


def _dq_tiles(problem: Problem, choice: Choice, splits: int = 1) -> Tiles:
    """``splits``: parts of the keys, each a program's."""
    rows, keys = bwd_dq.rows(choice.config), choice.config["BLOCK_N"]
    lengths = sorted(_lengths(problem), key=lambda one: -one[1])  # sequences of more keys first
    seen = [count for one in lengths for count in keys_seen(*one, rows, problem.mask)]
    block, ends_share = shares(problem, choice.config)
    block *= BLOCK_US[DQ] * rows / (2 * BLOCK) * keys / BLOCK
    costs = tuple([-(-count // (keys * splits)) * block + ENDS_US[DQ] * ends_share for count in seen])
    heads, band = problem.batch * problem.heads_q, choice.config["HEADS_PER_WAVE"]
    return Tiles(costs, heads * splits, band if splits == 1 else 1)


def _dkdv_tiles(problem: Problem, choice: Choice, parts: int) -> Tiles:
    ours, keys = group_parts.split(problem, parts), choice.config["BLOCK_N"]
    lengths = _lengths(problem)
    met = [count for one in lengths for count in fused_schedule.blocks_met(*one, problem.mask, BLOCK, keys)]
    block, ends_share = shares(problem, choice.config)
    block *= ours.group * BLOCK_US[DKDV] * keys / BLOCK
    costs = tuple([count * block + ENDS_US[DKDV] * ends_share for count in met])
    return Tiles(costs, ours.batch * ours.heads_kv, choice.config["HEADS_PER_WAVE"])


def _given_out(free: list[float], tiles: Tiles) -> list[float]:
    """When each multiprocessor is free again, of when it is free; both in any order."""
    if tiles.number > fused_schedule.MOST_TILES:  # those that are free before the mean end get tiles until then
        free, work, taken = sorted(free), tiles.heads * sum(tiles.costs), 0.0
        for count, one in enumerate(free, 1):
            taken += one
            mean = (work + taken) / count
            if count == len(free) or mean <= free[count]:
                break
        longest = max(tiles.costs)
        return [mean + longest * ((nth + 0.5) / count - 0.5) for nth in range(count)] + free[count:]
    free = list(free)
    heapq.heapify(free)
    whole, rest = divmod(tiles.heads, min(tiles.band, tiles.heads))
    for together, times in ((min(tiles.band, tiles.heads), whole), (rest, 1)):
        for cost in [cost for cost in tiles.costs for _ in range(together)] * times:
            heapq.heapreplace(free, free[0] + cost)
    return free


def last(tiles: Tiles, sm_count: int) -> float:
    """When a kernel alone is done."""
    if min(tiles.costs) == max(tiles.costs):
        return -(-tiles.number // sm_count) * tiles.costs[0]
    return max(_given_out([0.0] * sm_count, tiles))


def delta_us(problem: Problem, choice: Choice, gpu: Gpu) -> float:
    """Of dQ's kernel over no keys."""
    rows_of_tile = bwd_dq.rows(choice.config)
    tiles = problem.batch * problem.heads_q * sum(-(-queries // rows_of_tile) for queries, _ in _lengths(problem))
    ends = NO_KEYS * ENDS_US[DQ] * shares(problem, choice.config)[1]
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    moved = rows * (problem.head_dim + 2 * problem.head_dim_v) * 2 / BYTES_PER_US
    made = max(-(-tiles // gpu.sm_count) * ends, moved)
    return made + (ORDER_US if problem.extent.ragged else 0.0)


def at_a_time(dq: Tiles, dkdv: Tiles, order: str, delta: float, sm_count: int) -> float:
    """When both kernels are done that run in this order, delta's time included."""
    free = [delta] * sm_count
    if order == DQ_AT_ONCE:  # beside delta, which as many multiprocessors make
        costs = dq.costs * dq.heads
        free[: len(costs)] = [max(cost, delta) for cost in costs]
        return max(LONGEST * max(costs), *_given_out(free, dkdv))
    first, second = (dkdv, dq) if order == DKDV_FIRST else (dq, dkdv)
    return max(_given_out(_given_out(free, first), second))


def _fit_at_once(dq: Tiles, sm_count: int) -> bool:
    """Whether multiprocessors are left for delta beside all of dQ's tiles."""
    return 2 * dq.number <= sm_count


def at_once(problem: Problem, choice: Choice, gpu: Gpu) -> bool:
    """The same of a choice for dQ's kernel."""
    return _fit_at_once(_dq_tiles(problem, choice), gpu.sm_count)


def orders(dq: Tiles, dkdv: Tiles, sm_count: int) -> tuple[str, ...]:
    """Those that a call may have, a measured one first."""
    measured = DQ_AT_ONCE if _fit_at_once(dq, sm_count) else DQ_FIRST
    return (measured, DKDV_FIRST) if dq.number + dkdv.number > sm_count else (measured,)


def _fixed_us(problem: Problem, parts: int, splits: int, gpu: Gpu) -> float:
    """Of what runs around both kernels."""
    fixed = CALL_US + (ORDER_US if problem.extent.ragged else 0.0) + fused_schedule.parts_us(problem, parts, gpu)
    if splits == 1:
        return fixed
    return fixed + COMBINE_US + 2 * sum_bytes(problem, splits) / (gpu.hbm_gbs * 1e3)


def sum_bytes(problem: Problem, splits: int) -> int:
    """Of the float32 sums of all parts of dQ."""
    return 4 * splits * problem.batch * problem.heads_q * problem.seqlen_q * problem.head_dim


def predicted_us(
    problem: Problem, choices: Mapping[str, Choice], parts: int, gpu: Gpu, order: str = "", delta: float | None = None,
    splits: int = 1,
) -> float:  # fmt: skip
    """Microseconds of a whole backward: ``order``: "" for one kernel after the other; ``delta``: what its launch takes;
    ``splits``: parts of the keys of dQ."""
    dq, dkdv = _dq_tiles(problem, choices[DQ], splits), _dkdv_tiles(problem, choices[DKDV], parts)
    fixed = _fixed_us(problem, parts, splits, gpu)
    if not order:
        return fixed + last(dq, gpu.sm_count) + last(dkdv, gpu.sm_count)
    made = delta_us(problem, choices[DQ], gpu) if delta is None else delta
    return fixed + at_a_time(dq, dkdv, order, made, gpu.sm_count)


@lru_cache(maxsize=256)  # a key has a number for each tile of a head
def _order(dq: Tiles, dkdv: Tiles, fixed: float, delta: float, sm_count: int) -> str:
    longest, means = [max(dq.costs), max(dkdv.costs)], [one.heads * sum(one.costs) / sm_count for one in (dq, dkdv)]
    least = fixed + max(*longest, sum(means))  # that any order takes, and more than that
    share = LONG_MARGIN if fixed + sum(means) >= LONG_US else MARGIN
    if least >= (1 - share) * (fixed + sum(means) + sum(longest)):  # one after the other takes no more
        return ""
    now = fixed + last(dq, sm_count) + last(dkdv, sm_count)
    best, found = "", now
    for order in orders(dq, dkdv, sm_count):
        margin = DKDV_MARGIN if order == DKDV_FIRST else share
        wanted = min((1 - MARGIN) * found if best else now, (1 - margin) * now, now - LEAST_US)
        if least < wanted:
            time = fixed + at_a_time(dq, dkdv, order, delta, sm_count)
            best, found = (order, time) if time < wanted else (best, found)
    return best


def order_of(problem: Problem, choices: Mapping[str, Choice], parts: Mapping[str, int], gpu: Gpu) -> str:
    """Of ``overlapped.ORDERS``, in which both kernels of a backward run at a time; "": one after the other. ``choices``: by
    kernel; ``parts``: of query groups, by kernel, and of dQ's keys."""
    if not covers(problem, choices):
        return ""
    count, splits = parts.get(DKDV, 1), parts.get(DQ, 1)
    dq, dkdv = _dq_tiles(problem, choices[DQ], splits), _dkdv_tiles(problem, choices[DKDV], count)
    fixed = _fixed_us(problem, count, splits, gpu)
    return _order(dq, dkdv, fixed, delta_us(problem, choices[DQ], gpu), gpu.sm_count)


def key_parts(problem: Problem, choices: Mapping[str, Choice], parts: Mapping[str, int], gpu: Gpu) -> int:
    """Into how many parts the keys of dQ are split; 1: that is not expected to be faster. ``choices``, ``parts``: as
    ``order_of`` has them, with no part of dQ."""
    if problem.extent.ragged or not covers(problem, choices):
        return 1
    if (most := dq_parts.most_parts(problem, choices[DQ].variant, gpu.arch)) == 1:
        return 1
    keys = dq_parts.kernels(problem, most, gpu.arch)[0][1]["BLOCK_N"]
    tiles, blocks = _dq_tiles(problem, choices[DQ]), -(-problem.seqlen_k // keys)
    most = min(blocks, most, MOST_BYTES // sum_bytes(problem, 1))
    counts = {min(int(turns * gpu.sm_count) // tiles.number, most) for turns in TURNS} - {0, 1}

    def time(splits: int) -> float:
        order = order_of(problem, choices, {**parts, DQ: splits}, gpu)
        return predicted_us(problem, choices, parts.get(DKDV, 1), gpu, order, splits=splits)

    times = {splits: time(splits) for splits in counts}
    if not times or (least := min(times.values())) >= (1 - KEYS_MARGIN) * time(1):
        return 1
    return min(splits for splits, its in times.items() if its <= (1 + KEYS_TIE) * least)


def all_kernels(problem: Problem, choice: Choice, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What may run in place of dQ's kernel, whatever a call's batch, heads and lengths are."""
    wide = max(block_dims(problem.specialization)) > 128 and fused_schedule.recorded(problem.mask)
    most = dq_parts.most_parts(problem, choice.variant, arch) if wide else 1
    return dq_parts.kernels(problem, most, arch) if most > 1 else []


def about(order: str) -> str:
    """In a sentence's end."""
    begins = {DQ_AT_ONCE: "dQ with delta", DQ_FIRST: "dQ begins", DKDV_FIRST: "dK and dV begin"}
    return f"both kernels run at a time ({begins[order]})" if order else ""


def about_keys(problem: Problem, split: Config, arch: int) -> str:
    """In one sentence, what runs in place of dQ's kernel."""
    name = dq_parts.splitting(problem, arch).short_name
    return (
        f"{DQ}: few tiles, so {name} runs instead, which is expected to be faster and has no row: keys are "
        f"split into {split['SPLITS']} parts, which are added up after."
    )
