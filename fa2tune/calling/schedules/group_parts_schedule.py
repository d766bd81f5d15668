"""Into how many parts a backward's query groups are split, for a call's own batch, heads and lengths: arithmetic on the host.

A program of the kernels that make dK and dV has the keys of one tile and walks all query heads of its key head. With few key
heads there are fewer programs than multiprocessors, or as many and one waits for the longest. A part of a group is a key head
of its own (``launching/group_parts.py``), at the price of K, V, dK and dV that are written and read once per part. Here the
tiles are given out as the kernels do, each to the multiprocessor that is free first, for each divisor of the group. Times of
the fused Hopper backward are those of ``fused_schedule``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fa2tune.calling.schedules import ampere_turns, fused_schedule, packed_lengths, query_parts_schedule
from fa2tune.compiling.choice import Choice, Chosen, choice_of
from fa2tune.compiling.registry import in_any_order
from fa2tune.gpus import Gpu
from fa2tune.launching import group_parts
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import ITEMSIZE, PRODUCTS, Config, Problem, padded_head_dim
from fa2tune.spec.variant import WARP_SPECIALIZED

#: Start and end of a tile (K and V in, dK and dV out), in query rows.
START_ROWS = 128
#: Keys of a tile where the config does not say: of the fused Hopper kernel.
TILE_KEYS = 128
#: Share of the peak rate that the kernels reach, and of the memory's bandwidth that copies do. Rough: they are only to say
#: what a byte costs in query rows.
HOPPER_RATE, PORTABLE_RATE, COPY_RATE = 0.6, 0.35, 0.85
#: Microseconds of each launch that a split adds.
LAUNCH_US = 2.0
#: A split must be predicted to be faster by this share.
MARGIN = 0.03
#: Predictions this near to the least count as equal: of these the most parts, as shorter tiles even out what is not counted.
TIE = 0.01


@lru_cache(maxsize=4096)
def rows_of_tiles(seqlen_q: int, seqlen_k: int, keys: int, mask: Mask) -> tuple[int, ...]:
    """Query rows of one head that each key tile of it meets."""
    tiles = -(-seqlen_k // keys)
    if mask == CAUSAL:
        offset = seqlen_k - seqlen_q
        return tuple(seqlen_q - min(max(nth * keys - offset, 0), seqlen_q) for nth in range(tiles))
    # of another mask each tile has the mean, and half a tile at either end of what its keys are seen by
    seen = seqlen_q if mask == FULL else min(seqlen_q, mask.pairs(seqlen_q, seqlen_k) // seqlen_k + keys)
    return (seen,) * tiles


@lru_cache(maxsize=256)  # asked for each number of parts
def rows_of_call(problem: Problem, keys: int) -> tuple[int, ...]:
    """The same of a problem, for tiles of so many keys. Of packed sequences one head has the tiles of all, one sequence after
    the other, and the lengths are those of ``packed_lengths``."""
    if not problem.extent.ragged:
        return rows_of_tiles(problem.seqlen_q, problem.seqlen_k, keys, problem.mask)
    every = packed_lengths.each(problem)
    found = {lengths: rows_of_tiles(*lengths, keys, problem.mask) for lengths in set(every)}
    return tuple([rows for lengths in every for rows in found[lengths]])


@lru_cache(maxsize=4096)
def busiest(rows: tuple[int, ...], heads: int, group: int, band: int, programs: int, exact: bool = True) -> float:
    """Query rows, START_ROWS included, of the program that ends last. ``rows``: as ``rows_of_tiles`` has them; ``heads``: key
    heads of the whole batch, ``band`` of which are given out together, tile after tile; ``programs``: that run at once.
    ``exact``: else no more than it, without giving the tiles out one by one, which takes up to a millisecond."""
    costs = tuple([group * own + START_ROWS for own in rows])
    total, longest = heads * sum(costs), max(costs)
    if len(costs) * heads > fused_schedule.MOST_TILES:
        return total / programs + costs[-1] / 2
    if longest == min(costs):
        return float(-(-len(costs) * heads // programs) * longest)
    if not exact:
        return max(total / programs, longest)
    return fused_schedule.last_done([0.0] * programs, costs, heads, band)


def predicted_us(
    problem: Problem, kernel: str, given: Config | Choice, gpu: Gpu, parts: int, exact: bool = True
) -> float:
    """Microseconds that a kernel which makes dK and dV is expected to take with query groups in so many parts. ``exact``: as
    ``busiest`` has it."""
    choice, ours = choice_of(kernel, given), group_parts.split(problem, parts)
    variant, config = choice.variant, choice.config
    hopper = WARP_SPECIALIZED in variant.implementations
    keys = config.get("BLOCK_N", TILE_KEYS)
    rows = rows_of_call(problem, keys)
    heads = ours.batch * ours.heads_kv
    programs = min(gpu.sm_count, variant.programs(ours, config, gpu.sm_count))
    longest = busiest(rows, heads, ours.group, min(config["HEADS_PER_WAVE"], heads), programs, exact)
    columns = padded_head_dim(problem.head_dim) + padded_head_dim(problem.head_dim_v)
    products = sum(PRODUCTS[kernel])
    operations = longest * keys * products * columns  # of one multiprocessor
    rate = gpu.peak(problem.dtype, problem.precision) * (HOPPER_RATE if hopper else PORTABLE_RATE)
    time = operations / (rate * 1e6 / gpu.sm_count)
    if parts == 1:
        return time
    # K and V, where they are copied, are written before and read by the kernel beside its products; it so writes dK and dV,
    # which are read after
    copied = group_parts.copies(problem)
    dims = problem.head_dim + problem.head_dim_v
    size = heads * problem.seqlen_k * dims * ITEMSIZE[problem.dtype]
    moved = (3 if copied else 1.5) * size
    return time + (2 if copied else 1) * LAUNCH_US + moved / (gpu.hbm_gbs * 1e3 * COPY_RATE)


def in_turns(problem: Problem, config: Config, gpu: Gpu, parts: int) -> tuple[int, float]:
    """Of the fused backward by mma.sync with dQ in turns: heads of a band, and its share of the speed without
    (``ampere_turns``)."""
    ours = group_parts.split(problem, parts)
    programs = ampere_turns.programs_at_once(config, problem.specialization, gpu) * gpu.sm_count
    rows = rows_of_tiles(ours.seqlen_q, ours.seqlen_k, config["BLOCK_N"], ours.mask)
    return ampere_turns.band_of(rows, ours.batch * ours.heads_kv, ours.group, config["BLOCK_M"], programs)


def parts_of(problem: Problem, kernel: str, given: Config | Choice, gpu: Gpu) -> int:
    """Into how many parts this kernel's query groups, or query blocks, are best split; 1: they are not."""
    config = choice_of(kernel, given).config
    if group_parts.of_queries(config):
        return query_parts_schedule.counted(problem, config, gpu)[1]
    if problem.is_empty or problem.group == 1 or kernel not in group_parts.MAKE_DK_DV:
        return 1
    choice = choice_of(kernel, given)
    choice = replace(choice, variant=in_any_order(choice.variant))
    if fused_schedule.times(choice.variant, problem):
        return _parts_of_form(problem, tuple(choice.config.items()), gpu)

    def time(parts: int, exact: bool = True) -> float:
        expected = predicted_us(problem, kernel, choice, gpu, parts, exact)
        return expected / in_turns(problem, choice.config, gpu, parts)[1] if choice.config.get("IN_ORDER") else expected

    return _fastest(problem, gpu, time, False)


@lru_cache(maxsize=1024)  # several schedules ask for the parts of a form
def _parts_of_form(problem: Problem, items: tuple[tuple[str, Any], ...], gpu: Gpu) -> int:
    """Of the fused Hopper kernel, by its config's items."""
    # more parts help whatever the lengths are, the order of tiles only if they are as assumed
    config = {**dict(items), "LONGER_FIRST": False}

    def time(parts: int, exact: bool = True) -> float:
        return fused_schedule.predicted_us(problem, config, gpu, parts, exact)

    return _fastest(problem, gpu, time, True)


def _fastest(problem: Problem, gpu: Gpu, time: Callable[..., float], by_form: bool) -> int:
    """The number of parts by its microseconds, ``time(parts, exact)``."""
    counts = group_parts.counts(problem, gpu.arch)
    if len(counts) == 1:
        return 1
    # of most numbers a bound says that they are not the best: tiles are given out one by one for few
    bounds = {parts: time(parts, False) for parts in counts}
    times = {1: time(1)}
    dense = by_form and not problem.extent.ragged
    wanted = (1 - (fused_schedule.PARTS_MARGIN if dense else MARGIN)) * times[1]
    if min(bounds.values()) >= wanted:
        return 1
    tie = 1 + (fused_schedule.PARTS_TIE if by_form else TIE)
    for parts in sorted(bounds, key=lambda parts: bounds[parts]):
        if parts > 1 and bounds[parts] <= tie * min(times.values()):
            times[parts] = time(parts)
    least = min(times.values())
    near = [parts for parts in times if times[parts] <= tie * least]
    return 1 if least >= wanted else min(near) if by_form else max(near)


def parts(problem: Problem, configs: Chosen, gpu: Gpu) -> dict[str, int]:
    """The same of every kernel of a backward that is split."""
    found = {kernel: parts_of(problem, kernel, config, gpu) for kernel, config in configs.items()}
    return {kernel: count for kernel, count in found.items() if count > 1}
