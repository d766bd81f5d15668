"""The fused backward by mma.sync with dQ summed in a fixed order, for deterministic calls: whether it serves, and in which
form. Arithmetic on the host.

Key tiles add to one sum in turns (``ampere_turns``). Where most would wait, with few key heads, a head has
DQ_BUFFERS programs, each with float32 sums of dQ of its own, and tiles of keys that it walks one after the other
(kernels/sm80/bwd_ordered.py). More programs fill more multiprocessors; each costs memory for its sums, which are zeroed before
and added up after. The other kernel has a program for each tile, and one sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from fa2tune.calling.schedules import ampere_turns, group_parts_schedule
from fa2tune.compiling import registry
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import group_parts
from fa2tune.search_spaces.sm80 import bwd_fused
from fa2tune.spec import visits
from fa2tune.spec.mask import Mask
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, padded_head_dim

KERNEL = "bwd_fused"
#: Share of the GPU's memory that the sums may take.
MOST_MEMORY = 1 / 32
#: Share of the peak rate that the kernel reaches. Rough: it is only to say what a byte costs in query rows.
RATE = 0.5
#: Of times this near to the least the one of the fewest buffers is taken.
AS_NEAR = 0.05
#: Where tiles are expected to be walked at less than this share of the speed that they have as programs of their own, with
#: one sum that stays in L2, the split kernels serve (docs/experiments/ported.md: they have half of it or less).
LEAST_SPEED = 0.5
#: Share of their expected speed that programs with sums of their own reached on an H200: 0.64 to 0.98, with as many
#: multiprocessors as they were meant for (benchmarks/calls/sm80_calls_shipped.json, docs/experiments/mma-sync.md).
BUFFERS_REACH = 0.85


def longest(costs: Sequence[float], programs: int) -> float:
    """Of the sums over what each of ``programs`` walks of these tiles, turns going there and back, the largest. The first
    program has the most where tiles get shorter, or the last one, where the turn back is the last."""
    there, back = 2 * programs, 2 * programs - 1
    first = sum(costs[0::there]) + sum(costs[back::there])
    last = sum(costs[programs - 1 :: there]) + sum(costs[programs::there])
    return max(first, last)


def buffer_bytes(problem: Problem) -> int:
    """Of one sum."""
    rows = problem.batch * problem.heads_q * bwd_fused.padded_rows(problem)
    return 4 * rows * padded_head_dim(problem.head_dim)


def _memory_us(problem: Problem, walked: float, programs: int, buffers: int, gpu: Gpu) -> float:
    """Microseconds for what goes to and from memory: zeros and sums, and where L2 does not hold the sums of all ``programs``
    that run at once, what a program adds to, there and back, and Q and dO, once for the programs of a head. ``walked``: query
    rows of all programs."""
    rate, one = gpu.hbm_gbs * 1e3 * group_parts_schedule.COPY_RATE, buffer_bytes(problem)
    held_rows = programs * one // (problem.batch * problem.heads_q)
    read = ITEMSIZE[problem.dtype] * (problem.head_dim + problem.head_dim_v) / buffers
    row = 2 * 4 * padded_head_dim(problem.head_dim) + read if held_rows > gpu.l2_bytes else 0.0
    return (2 * buffers * one + walked * row) / rate


@lru_cache(maxsize=1024)
def _buffers(problem: Problem, keys: int, programs: int, gpu: Gpu) -> tuple[int, float]:
    """``buffers_of``. ``keys``: of a tile; ``programs``: that the GPU runs at once."""
    columns = padded_head_dim(problem.head_dim) + padded_head_dim(problem.head_dim_v)
    peak = gpu.peak(problem.dtype, problem.precision) * 1e6 * RATE  # operations a microsecond
    rate = peak / programs / (5 * keys * columns)  # query rows a microsecond of a program
    rows = group_parts_schedule.rows_of_tiles(problem.seqlen_q, problem.seqlen_k, keys, problem.mask)
    costs = [problem.group * own + float(group_parts_schedule.START_ROWS) for own in rows]
    heads, walked = problem.batch * problem.heads_kv, problem.batch * problem.heads_q * sum(rows)
    least, times = max(max(costs), heads * sum(costs) / programs) / rate, {}
    most = max(1, int(gpu.hbm_bytes * MOST_MEMORY) // buffer_bytes(problem))
    for buffers in range(1, min(len(costs), most, bwd_fused.MOST_BUFFERS) + 1):
        # programs are nearly alike: the GPU takes them in rounds
        worked = -(-heads * buffers // programs) * longest(costs, buffers) / rate
        moved = _memory_us(problem, walked, min(programs, heads * buffers), buffers, gpu)
        times[buffers] = max(worked, moved)
    wanted = (1 + AS_NEAR) * min(times.values())
    found = next(buffers for buffers, time in times.items() if time <= wanted)
    return found, least / times[found]


def buffers_of(problem: Problem, config: Config, gpu: Gpu) -> tuple[int, float]:
    """(DQ_BUFFERS, by the least expected time, the share of the speed that tiles would have as programs of their own)."""
    programs = ampere_turns.programs_at_once(config, problem.specialization, gpu) * gpu.sm_count
    return _buffers(problem, config["BLOCK_N"], programs, gpu)


def in_turns(problem: Problem, config: Config, gpu: Gpu) -> tuple[Config, float]:
    """(a row's config with key tiles that add to dQ in turns, the share of its speed in any order that is expected)."""
    asked = {**config, "IN_ORDER": True}
    choice = Choice(registry.variant_of(KERNEL, config), asked)
    parts = group_parts_schedule.parts_of(problem, KERNEL, choice, gpu)
    band, speed = group_parts_schedule.in_turns(problem, asked, gpu, parts)
    return {**asked, "HEADS_PER_WAVE": band}, speed


@lru_cache(maxsize=1024)
def _tiles_follow(mask: Mask, seqlen_q: int, seqlen_k: int, keys: int, step: int) -> bool:
    """Whether key tiles begin and end at queries in ascending order. Otherwise a tile may wait for an addition that the tile
    before it never makes."""
    seen = visits.queries_of_tiles(mask, seqlen_q, seqlen_k, keys, step)
    return all((side[1:] >= side[:-1]).all() for side in (seen.begin, seen.end))


def other_form(choice: Choice) -> Choice | None:
    """Of one of both forms the other, which serves calls of another batch, heads and lengths; None: it is neither."""
    free = registry.in_any_order(choice.variant)
    if choice.variant is not free:
        config = {name: value for name, value in choice.config.items() if name in free.space.dimensions}
        return replace(choice, variant=free, config={**config, "IN_ORDER": True})
    form = registry.ordered_form(free)
    if form is None or not choice.config.get("IN_ORDER"):
        return None
    config = {**choice.config, "IN_ORDER": False, "DQ_BUFFERS": 2}
    return replace(choice, variant=form, config=config)


def instead_of(problem: Problem, free: Choice, gpu: Gpu) -> Choice | None:
    """What serves a deterministic call in place of ``free``, the choice of the fused kernel that serves others; None: that has
    no such form, or the split kernels are expected to be faster."""
    form = None if problem.is_empty or problem.extent.ragged else registry.ordered_form(free.variant)
    if form is None:
        return None
    config, speed = in_turns(problem, free.config, gpu)
    tiles = config["BLOCK_N"], config["BLOCK_M"]
    if not _tiles_follow(problem.mask, problem.seqlen_q, problem.seqlen_k, *tiles):
        speed = 0.0
    parts = group_parts_schedule.parts_of(problem, KERNEL, free, gpu)
    buffers, by_buffers = buffers_of(group_parts.split(problem, parts), free.config, gpu)
    if speed >= BUFFERS_REACH * by_buffers:
        return replace(free.of_row, config=config) if speed >= LEAST_SPEED else None
    if by_buffers < LEAST_SPEED:
        return None
    return replace(free, variant=form, config={**free.config, "DQ_BUFFERS": buffers})
