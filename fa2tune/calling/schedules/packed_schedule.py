"""Which tuned config suits a call of packed sequences: arithmetic on the host, which does not know the lengths.

Rows are measured without packing, at lengths that are multiples of every tile. A packed tile takes as long as a dense one of
its form (``few_tiles``), and tiles come from a queue, the longest first, so the time of a forward is that of all tiles over all
programs, or of the longest tile: what a tile is larger than its sequence, and how many tiles there are, decide. The backward
takes tiles in the order of ``cu_seqlens``, in bands of heads, and may leave multiprocessors to what runs overlapped with it.

Against what was measured: docs/experiments/packed-tiles.md, few-heads-packed.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fa2tune.calling.schedules import (
    few_tiles,
    fused_schedule,
    group_parts_schedule,
    grouped_schedule,
    packed_lengths,
    tile_order,
    window_schedule,
)
from fa2tune.calling.schedules.fused_schedule import apart
from fa2tune.calling.schedules.packed_lengths import LengthKinds
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import group_parts
from fa2tune.rows.row import Row
from fa2tune.search_spaces.lib.hopper import block_dims
from fa2tune.search_spaces.sm90 import bwd_fused, fwd
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, Specialization, bucket_of
from fa2tune.spec.score import NONE
from fa2tune.spec.variant import Variant

#: Microseconds that a packed forward takes besides a dense one: the kernel that orders the tiles, and the queue. Fitted, as the
#: next three, to benchmarks/calls/random_packings_2.json and _3.json, packed_choices.json and _3.json.
ORDER_US = 1.9
#: What a packed tile takes longer with two Q tiles, in microseconds: perhaps as the queue tells late which one is next.
SECOND_Q_US = 0.4
#: A block of which a window hides keys takes longer by this share: in tiles of one group, and of several, which wait for each
#: other.
HIDDEN = {1: 0.24, 2: 0.4}
#: Share of the memory's rate at which Q, K, V and O are moved.
MEMORY_RATE = 0.75
#: What is left uneven at the end, in mean tiles, where every program has one tile.
UNEVEN = 0.75
#: Narrower head dims keep their rows' configs under a mask: at 64 those have tiles of 64 rows where they were measured to be
#: faster. Without a mask no row has such tiles.
FEW_TILES_ABOVE = 64
#: Tiles of another form than the row's must be predicted to be faster by this share.
MARGIN = 0.05
#: Wider bands of heads in the backward must be by this share, and by the other one for each doubling of what they have in use
#: of Q, dO, dQ, K and V beyond what the L2 holds (docs/experiments/packed-backward.md).
BAND_MARGIN, BEYOND_L2 = 0.04, 0.015
#: Whether the backward's key tiles come from longer sequences first, where that is predicted to save this share: of 140 calls,
#: simulated, one lost 2 % by it; 28 raced calls took 0.90 of the time (docs/experiments/packed-backward.md).
LONGER_FIRST, LONGER_MARGIN = True, 0.03
#: Not where the longest sequence is of this bucket or a lower one: most have a tile or two, whose lengths are rounded up to the
#: same. Of eleven such calls, simulated, eight lost.
ALIKE = 512
#: The backward runs alone on the GPU, but for causal sequences of one length of up to so many tokens, at least so many on
#: average, with so many key tiles a multiprocessor and so many query heads a key head. There what runs overlapped saves up to
#: 7 %; elsewhere tiles wait for rows that the few programs beside them have not prepared. 62 raced calls that are alone now
#: take 0.95 of the time in the mean; of those with whole query blocks five lose 2 to 4 %
#: (docs/experiments/packed-backward.md).
LONGEST_ALIKE, SHORT, MANY_TILES, FEW_HEADS = 2048, 1024, 8, 2
#: Calls of up to so many microseconds have each kernel started early. Longer ones gain nothing at 64 columns; at 128, causal,
#: three of three took 1.06 to 1.16 of the time, for a reason that is not known, as dense ones gain
#: (docs/experiments/packed-backward.md).
EARLY_START_US = 45.0
#: Share of the GPU's memory that float32 sums of dQ may take where most of their rows are padding.
MOST_MEMORY = 1 / 32
#: Compute capabilities where dense calls of short sequences have a kernel without these sums (sm90/bwd_one_tile.py).
SHORT_WITHOUT_SUMS = (90,)


def covers_backward(variant: Variant) -> bool:
    return variant.space is bwd_fused.SPACE


def sums_too_large(problem: Problem, gpu: Gpu) -> bool:
    """Whether the fused backward's float32 sums of dQ are too large, by the padding of many short sequences: each has whole
    blocks of 128 rows. 10,000 sequences of 10 tokens, 32 heads of 128, take 22.6 GB. The split kernels have no sums."""
    if not problem.extent.ragged and gpu.arch in SHORT_WITHOUT_SUMS:
        return False
    spec, rows = problem.specialization, problem.batch * bwd_fused.padded_rows(problem)
    held = 4 * problem.heads_q * rows * bwd_fused.columns(spec, {"NARROW": bwd_fused.is_narrow(spec)})
    return rows > 2 * problem.batch * problem.seqlen_q and held > gpu.hbm_bytes * MOST_MEMORY


def forms(problem: Problem, choice: Choice) -> list[Config]:
    """Configs of other machine code that other lengths of a packed call may have in place of a choice's, but for
    ``for_few_tiles``."""
    if not problem.extent.ragged:
        return []
    if choice.variant.space is fwd.SPACE and problem.mask.measured and choice.row is not None:
        return [{**choice.config, "RESCALE": how} for how in ("lazy", choice.row.config["RESCALE"])]
    if not covers_backward(choice.variant):
        return []
    alone = apart(choice.config)
    found = [fused_schedule.started_early(alone)] if fused_schedule.EARLY_START else []
    found += [longer_first(one) for one in (alone, *found)] if LONGER_FIRST else []
    return [alone, *found] if choice.config["BESIDE"] else found


# ---- the forward


def covers_mask(problem: Problem) -> bool:
    """Whether the tiles of a forward are chosen for."""
    return problem.mask.measured or window_schedule.is_window(problem)


class Visited(NamedTuple):
    """Of one head of all sequences."""

    tiles: float
    blocks: float  #: of keys, of all tiles
    longest: int  #: blocks of the longest tile
    hidden: float  #: of ``blocks``, those of which a window hides keys


@lru_cache(maxsize=4096)
def visited(problem: Problem, rows: int, columns: int) -> Visited:
    """What tiles of so many queries visit, by the lengths of ``packed_lengths.kinds``."""
    return visited_by(problem, packed_lengths.kinds(problem), rows, columns)


def visited_by(problem: Problem, lengths: LengthKinds, rows: int, columns: int, parts: int = 1) -> Visited:
    """The same by other lengths, of tiles in so many parts, each of a block at least."""
    queries, keys, counts = lengths
    tiles = -(-queries // rows)
    kind = np.repeat(np.arange(len(tiles)), tiles)  # [tiles]
    first = (np.arange(len(kind)) - np.repeat(tiles.cumsum() - tiles, tiles)) * rows
    first_key, most, times = first + (keys - queries)[kind], np.maximum(keys, 1)[kind], counts[kind]
    if len(kind) == 0:
        return Visited(0.0, 0.0, 0, 0.0)
    left, right = problem.mask.arguments(problem.seqlen_q, problem.seqlen_k)
    end = most if problem.mask == FULL else np.minimum(np.maximum(first_key + rows + right, 1), most)
    begin = 0 * first if problem.mask.window is None else np.maximum(first_key - left, 0)
    blocks, hidden = np.maximum(-(-end // columns) - begin // columns, 1), 0.0
    if window_schedule.is_window(problem):
        # whole blocks that all queries of a tile see
        clear = np.minimum(first_key + right + 1, most) // columns
        clear = clear - np.maximum(-(-(first_key + rows - 1 - left) // columns), begin // columns)
        hidden = float((times * (blocks - np.maximum(clear, 0))).sum())
    every = float((times * np.maximum(blocks, parts)).sum())
    return Visited(parts * float(times.sum()), every, -(-int(blocks.max()) // parts), hidden)


def shared_out(found: Visited, heads: int, start: float, sm_count: int, held: int) -> float:
    """Key blocks that the busiest multiprocessor works through, over the ``held`` programs that it holds at once, which take
    tiles from a queue. ``found``: of a head; ``start``: start and end of a tile, in key blocks."""
    if found.tiles <= 0:
        return 0.0
    tiles = heads * found.tiles
    mean, longest = found.blocks / found.tiles + start, found.longest + start
    # time of a block where so many programs of a multiprocessor run, over that where all do
    paces = [count / (rate * held) for count, rate in enumerate(tile_order.RATES[held], 1)]
    if (programs := sm_count * held) < tiles:
        even = tiles * mean / programs
        return even + max(UNEVEN * mean * programs / tiles, (longest - even) * paces[0])
    # the multiprocessor of the longest tile: of tiles at even distances it has every sm_count-th, until one is left
    rounds = max(1, math.ceil(tiles / sm_count))
    own = [max(0.0, longest - 2 * (longest - mean) * nth * sm_count / tiles) for nth in range(rounds)]
    return sum((more - less) * pace for more, less, pace in zip(own, [*own[1:], 0.0], paces, strict=False))


def hidden_cost(found: Visited, config: Config) -> float:
    """How many times as long a block takes on average, as a window hides keys of some (HIDDEN)."""
    return 1 + HIDDEN[min(2, config["BLOCK_M"] // fwd.ROWS)] * found.hidden / max(1.0, found.blocks)


def memory_us(problem: Problem, gpu: Gpu) -> float:
    """Of reading Q, K and V and of writing O once."""
    return grouped_schedule.memory_us(problem, gpu) / MEMORY_RATE


def expected_us(
    problem: Problem, config: Config, gpu: Gpu, lengths: LengthKinds | None = None, parts: int = 1
) -> float | None:
    """Microseconds that a config of the Hopper forward is expected to take for a packed call; None: of its form nothing was
    measured. ``lengths``: None for those of ``packed_lengths.kinds``; ``parts``: of a tile's keys, each a program's."""
    if (paces := few_tiles.paces_us(problem, config)) is None:
        return None
    launch, block, start = paces
    start += SECOND_Q_US if config["Q_STAGES"] == 2 else 0.0
    tile = config["BLOCK_M"], config["BLOCK_N"]
    found = visited(problem, *tile) if lengths is None else visited_by(problem, lengths, *tile, parts)
    slower = hidden_cost(found, config)
    blocks = shared_out(found, problem.heads_q, start / (block * slower), gpu.sm_count, fwd.programs(config))
    return ORDER_US + launch + max(block * slower * blocks, memory_us(problem, gpu))


@lru_cache(maxsize=1024)
def for_few_tiles(spec: Specialization, arch: int) -> Config | None:
    """The config for calls of few tiles; None: these head dims have none, or rows have such tiles (FEW_TILES_ABOVE)."""
    few, wide = fwd.few_tiles(spec), min(spec.head_dim, spec.head_dim_v) > FEW_TILES_ABOVE
    asked = wide or spec.mask == FULL.name
    return few if asked and fwd.SPACE.broken(few, spec, arch) is None else None


def is_for_few_tiles(problem: Problem, config: Config, row: Row, arch: int) -> bool:
    """Whether a config that ``best`` gives is that of ``for_few_tiles`` and not the row's."""
    few = for_few_tiles(problem.specialization, arch)
    return {**config, "HEADS_PER_WAVE": 0} == few != fwd.suited(problem, row.config)


def best(
    problem: Problem, served: tuple[Row, Config], others: Iterable[tuple[Row, Config]], gpu: Gpu
) -> tuple[Row, Config]:
    """The row and config of a forward: ``served``, unless tiles of another form, of another row or of ``for_few_tiles``, are
    predicted to be faster, of calls without a score term. Pairs of a row and its config for packed calls."""
    if problem.score != NONE:
        return served

    def fastest(row: Row, config: Config) -> tuple[float, Row, Config]:
        """With maxima or without, as the config has it."""
        found = [config] if config["RESCALE"] != "never" else [config, fwd.without_norms(config)]
        times = ((expected_us(problem, one, gpu), one) for one in found)
        return min(((math.inf if us is None else us, row, one) for us, one in times), key=lambda one: one[0])

    now, row, own = fastest(*served)
    form = window_schedule.form(own)
    able = {window_schedule.form(config): (one, config) for one, config in reversed([*others])}
    if (few := for_few_tiles(problem.specialization, gpu.arch)) is not None:
        able.setdefault(window_schedule.form(few), (row, few))
    least = min((fastest(*able[one]) for one in able if one != form), key=lambda one: one[0], default=(now, row, own))
    us, row, config = least if least[0] < (1 - MARGIN) * now else (now, row, own)
    return row, {**config, "HEADS_PER_WAVE": band(problem, config, gpu, us)}


def band(problem: Problem, config: Config, gpu: Gpu, us: float) -> int:
    """Heads a band, HEADS_PER_WAVE, of a forward that is expected to take ``us``; 0: the kernel's. Sequences of as many keys
    take turns, so L2 has to hold K and V of all of them for the heads of a band. The kernel counts those of the longest alone.
    If 15077 tokens are two sequences of 604 and 23 of 603, it takes all heads, and each tile waits for memory."""
    count, keys = problem.extent.given, problem.seqlen_k
    mean = -(-keys // max(1, count))
    if not _of_one_length(problem):
        return 0
    columns, wide, longer = config["BLOCK_N"], few_tiles.columns(problem, config), keys % count
    heads = fwd.band_within_l2(mean * (longer or count), wide)
    block = ITEMSIZE[problem.dtype] * wide * columns  # bytes
    if min(heads, problem.heads_kv) * (count - longer) * -(-mean // columns) * block <= gpu.l2_bytes:
        return 0
    loaded = problem.heads_kv * visited(problem, config["BLOCK_M"], columns).blocks * block
    moved = ITEMSIZE[problem.dtype] * wide * problem.heads_q * problem.seqlen_q  # Q and O
    if us >= (1 - MARGIN) * (loaded + moved) / (gpu.hbm_gbs * 1e3 * MEMORY_RATE):
        return 0
    return problem.group * fwd.band_within_l2(keys, wide)


# ---- the backward


def _of_one_length(problem: Problem) -> bool:
    """Whether sequences are of one length, as far as the host knows."""
    count = problem.extent.given
    return count > 1 and problem.extent.longest == bucket_of(
        *(-(-n // count) for n in (problem.seqlen_q, problem.seqlen_k))
    )


def alone(problem: Problem, config: Config, gpu: Gpu) -> bool:
    """Whether the backward runs alone on the GPU, whatever the row has."""
    if bool(config["IN_PARTS"]) or problem.mask != CAUSAL or problem.group > FEW_HEADS or not _of_one_length(problem):
        return True
    if problem.seqlen_q < SHORT * problem.extent.given or problem.extent.longest > LONGEST_ALIKE:
        return True
    return problem.heads_kv * problem.seqlen_k < MANY_TILES * gpu.sm_count * fused_schedule.TILE


def _in_use(problem: Problem, heads: int, parts: int) -> int:
    """Bytes of q, do, the sums of dQ, k and v that a band of so many key heads, of groups in so many parts, has in use."""
    spec = problem.specialization
    rows, sums = ITEMSIZE[problem.dtype] * (problem.head_dim + problem.head_dim_v), 4 * max(block_dims(spec))
    heads = min(heads, problem.heads_kv * parts)
    return heads * (problem.seqlen_q * problem.group // parts * (rows + sums) + problem.seqlen_k * rows)


def longer_first(config: Config) -> Config:
    """With tiles of longer sequences first."""
    return {**config, "LONGER_FIRST": True}


def of_backward(problem: Problem, kernel: str, choice: Choice, gpu: Gpu) -> Choice:
    """The fused Hopper backward for this call: as ``choice`` has it, or with the kernel alone on the GPU, or in wider bands, or
    with longer sequences first; a short one with each kernel started early."""
    found = _by_length(problem, kernel, _in_bands(problem, kernel, choice, gpu), gpu)
    if not fused_schedule.EARLY_START or found.config["BESIDE"] or problem.is_empty:
        return found
    early = replace(found, config=fused_schedule.started_early(found.config), otherwise=found.otherwise or found.config)
    parts = group_parts_schedule.parts_of(problem, kernel, early, gpu)
    short = fused_schedule.predicted_us(problem, early.config, gpu, parts) <= EARLY_START_US
    return early if short else found


def _by_length(problem: Problem, kernel: str, choice: Choice, gpu: Gpu) -> Choice:
    """As ``choice`` has it, or with longer sequences first."""
    extent = problem.extent
    if not LONGER_FIRST or choice.config["BESIDE"] or extent.given < 2 or problem.is_empty:
        return choice
    if 0 < extent.longest <= ALIKE:
        return choice
    longer = replace(choice, config=longer_first(choice.config), otherwise=choice.otherwise or choice.config)
    parts = group_parts_schedule.parts_of(problem, kernel, choice, gpu)
    wanted = (1 - LONGER_MARGIN) * fused_schedule.predicted_us(problem, choice.config, gpu, parts)
    # in whatever order, the mean of all programs takes as long: many calls are done by the first of these
    able = all(
        fused_schedule.predicted_us(problem, longer.config, gpu, parts, exact) < wanted for exact in (False, True)
    )
    return longer if able else choice


def _in_bands(problem: Problem, kernel: str, choice: Choice, gpu: Gpu) -> Choice:
    """As ``choice`` has it, or alone, or in wider bands."""
    if choice.config["BESIDE"] and alone(problem, choice.config, gpu):
        choice = replace(choice, config=apart(choice.config), otherwise=choice.config)
    if (problem.mask == FULL and problem.extent.given == 1) or problem.is_empty:  # all tiles are alike
        return choice

    def time(config: Config, parts: int, exact: bool = True) -> float:
        return fused_schedule.predicted_us(problem, config, gpu, parts, exact)

    def least(config: Config) -> tuple[float, int]:
        parts = group_parts_schedule.parts_of(problem, kernel, replace(choice, config=config), gpu)
        return time(config, parts), parts

    own, (now, _) = choice.config["HEADS_PER_WAVE"], least(choice.config)
    # in whatever bands, the mean of all programs takes as long: many calls are done here
    bound = min(time(choice.config, parts, False) for parts in group_parts.counts(problem, gpu.arch))
    if bound >= (1 - BAND_MARGIN) * now:
        return choice
    found: list[tuple[float, Config]] = []
    for heads in choice.variant.space.dimensions["HEADS_PER_WAVE"]:
        if heads <= own:
            continue
        config = {**choice.config, "HEADS_PER_WAVE": heads}
        us, parts = least(config)
        doublings = math.log2(max(1.0, _in_use(problem, heads, parts) / gpu.l2_bytes))
        margin = BAND_MARGIN + BEYOND_L2 * doublings
        if us < (1 - margin) * now:
            found.append((us, config))
    if not found:
        return choice
    most = (1 + group_parts_schedule.TIE) * min(us for us, _ in found)
    return replace(choice, config=next(config for us, config in found if us <= most))
