"""Which tuned config suits a call of packed sequences: arithmetic on the host, which does not know the lengths.

Rows are measured without packing, at lengths that are multiples of every tile. Packed tiles come from a queue, the longest
first, so the time of a forward is that of all tiles over all programs, or of the longest tile: what a tile is larger than its
sequence, and how many tiles there are, decide between rows. The backward takes tiles in the order of ``cu_seqlens``, in bands
of heads, and may leave multiprocessors to what runs overlapped with it.

Against what was measured: docs/experiments/few-heads-packed.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

from fa2tune.calling.schedules import (
    few_tiles,
    forward_schedule,
    fused_schedule,
    group_parts_schedule,
    tile_order,
    window_schedule,
)
from fa2tune.calling.schedules.fused_schedule import apart
from fa2tune.calling.schedules.packed_lengths import unlike
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import group_parts
from fa2tune.rows.row import Row
from fa2tune.search_spaces.lib.hopper import block_dims
from fa2tune.search_spaces.sm90 import bwd_fused, fwd
from fa2tune.spec.mask import FULL, Mask
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, Specialization
from fa2tune.spec.variant import Variant

#: Start and end of a packed tile, in key blocks, by Q_STAGES; and microseconds of the launches: the order of the tiles, and the
#: kernel. Fitted to benchmarks/calls/random_packings.json.
START = {1: 1.2, 2: 1.0}
LAUNCHES_US = 7.0
#: Time of a block with RESCALE "lazy" over that with "never", by columns of the wider of Q and V: what packed calls with "lazy"
#: took beside dense ones with "never" (docs/experiments/varlen.md, benchmarks/calls/random_packings.json).
NEVER_GAIN = {64: 1.13, 128: 1.06}
#: Key blocks of a tile that have maxima in any case: the first one, and those under the mask.
WITH_MAXIMA = 1.5
#: The same of tiles of 64 rows, two programs a multiprocessor (``for_few_tiles``), over tiles of two groups, for as many pairs
#: of a query and a key: the model without it is better than what was measured (docs/experiments/forward.md) by 1.03 to 1.18.
FEW_COST = 1.2
#: Narrower head dims keep their rows' configs: at 64 those have tiles of 64 rows where they were measured to be faster.
FEW_TILES_ABOVE = 64
#: Tiles of another form than the row's must be predicted to be faster by this share: rows were not timed with packed calls.
MARGIN = 0.06
#: Wider bands of heads in the backward must be by this share: with 16 heads they cost up to 13 % (docs/experiments/varlen.md),
#: as they keep more of Q, dO and dQ in use at once; or by the other one, where all of that stays in the L2.
BAND_MARGIN, NEAR_BAND_MARGIN = 0.15, 0.04
#: Queries a sequence has on average, or keys that a query sees, below which the backward runs alone on the GPU: what would run
#: overlapped takes a share of the multiprocessors that such sequences do not give back (docs/experiments/varlen.md).
SHORT, FEW_KEYS = 1024, 512
#: Share of the GPU's memory that float32 sums of dQ may take where most of their rows are padding.
MOST_MEMORY = 1 / 32


def covers(variant: Variant) -> bool:
    return variant.space is fwd.SPACE or covers_backward(variant)


def covers_backward(variant: Variant) -> bool:
    return variant.space is bwd_fused.SPACE


def sums_too_large(problem: Problem, gpu: Gpu) -> bool:
    """Whether the fused backward's float32 sums of dQ are too large, by the padding of many short sequences: each has whole
    blocks of 128 rows. 10,000 sequences of 10 tokens, 32 heads of 128, take 22.6 GB. The split kernels have no sums."""
    if not problem.extent.ragged:
        return False
    spec, rows = problem.specialization, bwd_fused.padded_rows(problem)
    held = 4 * problem.heads_q * rows * bwd_fused.columns(spec, {"NARROW": bwd_fused.is_narrow(spec)})
    return rows > 2 * problem.seqlen_q and held > gpu.hbm_bytes * MOST_MEMORY


def forms(problem: Problem, choice: Choice) -> list[Config]:
    """Configs of other machine code that other lengths of a packed call may have in place of a choice's, but for
    ``for_few_tiles``."""
    if not problem.extent.ragged:
        return []
    if choice.variant.space is fwd.SPACE and problem.mask.measured and choice.row is not None:
        return [{**choice.config, "RESCALE": how} for how in ("lazy", choice.row.config["RESCALE"])]
    return [apart(choice.config)] if covers_backward(choice.variant) and choice.config["BESIDE"] else []


# ---- the forward


@lru_cache(maxsize=4096)
def _tiles(queries: int, keys: int, mask: Mask, rows: int, columns: int) -> tuple[int, int, int]:
    """Of one head of one sequence: (tiles, their key blocks, those of the longest)."""
    most = max(1, -(-keys // columns))
    tiles = -(-queries // rows)
    if mask == FULL:
        return tiles, tiles * most, most
    ends = (min(max(1, keys - queries + (nth + 1) * rows), max(1, keys)) for nth in range(tiles))
    blocks = [-(-end // columns) for end in ends]
    return tiles, sum(blocks), max(blocks, default=0)


def busiest(problem: Problem, config: Config, sm_count: int, more: float = 0.0) -> float:
    """Key blocks that the busiest multiprocessor works through, START and ``more`` a tile included, over the programs that it
    holds at once."""
    each, kinds = unlike(problem)
    found = [_tiles(*kind, problem.mask, config["BLOCK_M"], config["BLOCK_N"]) for kind in kinds]
    visited = each * sum(one[0] for one in found), each * sum(one[1] for one in found), max(one[2] for one in found)
    start = START[config["Q_STAGES"]] + more
    return shared_out(visited, problem.batch * problem.heads_q, start, sm_count, fwd.programs(config))


def shared_out(visited: tuple[float, float, int], heads: int, start: float, sm_count: int, held: int) -> float:
    """The same of tiles that ``held`` programs a multiprocessor take from a queue. ``visited``: of a head (tiles, their key
    blocks, those of the longest tile); ``start``: start and end of a tile, in key blocks."""
    tiles, work, longest = heads * visited[0], heads * (visited[1] + start * visited[0]), visited[2] + start
    programs = min(tiles, sm_count * held)
    if programs <= 0:
        return 0.0
    # the last tiles are the shortest: what they leave uneven is about half of one, and less of more of them
    alone = longest / (tile_order.RATES[held][0] * held)
    return float(max(work / programs + work / tiles * programs / tiles / 2, alone))


#: As ``busiest``.
Busiest = Callable[[Problem, Config, int, float], float]


def predicted_us(problem: Problem, row: Row, config: Config, sm_count: int, busiest: Busiest = busiest) -> float | None:
    """Microseconds that a row's config for packed calls is expected to take; None: the row has no time. ``busiest``: by other
    lengths."""
    block = forward_schedule.block_us(row)
    if block is None:
        return None
    gain = NEVER_GAIN.get(tile_order.widest(problem), 1.0) if row.config["RESCALE"] == "never" else 1.0
    if config["RESCALE"] == "never":
        blocks = busiest(problem, config, sm_count, (gain - 1) * WITH_MAXIMA)
        return LAUNCHES_US + few_tiles.norms_us(problem) + block * blocks
    return LAUNCHES_US + gain * block * busiest(problem, config, sm_count, 0.0)


def with_or_without_maxima(problem: Problem, row: Row, config: Config, sm_count: int) -> tuple[float | None, Config]:
    """(``predicted_us``, config), of a row's config or of the same with maxima, whichever is predicted to be faster."""
    times = [(predicted_us(problem, row, one, sm_count), one) for one in (fwd.without_norms(config), config)]
    return min(times, key=lambda one: math.inf if one[0] is None else one[0])


@lru_cache(maxsize=1024)
def for_few_tiles(spec: Specialization, arch: int) -> Config | None:
    """The config for calls of few tiles; None: these head dims have none, or are too narrow (FEW_TILES_ABOVE)."""
    few, wide = fwd.few_tiles(spec), min(spec.head_dim, spec.head_dim_v) > FEW_TILES_ABOVE
    return few if wide and fwd.SPACE.broken(few, spec, arch) is None else None


def is_for_few_tiles(problem: Problem, config: Config, row: Row, arch: int) -> bool:
    """Whether a config that ``best`` gives is that of ``for_few_tiles`` and not the row's."""
    return config == for_few_tiles(problem.specialization, arch) != fwd.suited(problem, row.config)


def few_tiles_us(problem: Problem, row: Row, config: Config, gpu: Gpu) -> tuple[float, Config] | None:
    """(expected microseconds, config) of ``for_few_tiles``; ``config``: of the row. Of head dims in parts nothing was
    measured."""
    few, block = for_few_tiles(problem.specialization, gpu.arch), forward_schedule.block_us(row)
    if few is None or few["IN_PARTS"] != "none" or block is None:
        return None
    size = few["BLOCK_M"] * few["BLOCK_N"] * fwd.programs(few) / (config["BLOCK_M"] * config["BLOCK_N"])
    return FEW_COST * block * size * busiest(problem, few, gpu.sm_count) + LAUNCHES_US, few


def best(
    problem: Problem, served: tuple[Row, Config], others: Iterable[tuple[Row, Config]], gpu: Gpu
) -> tuple[Row, Config]:
    """The row and config of a forward: ``served``, unless tiles of another form, of another row or of ``for_few_tiles``, are
    predicted to be faster. Pairs of a row and its config for packed calls."""

    now, own = with_or_without_maxima(problem, *served, gpu.sm_count)
    served = served[0], own
    if now is None:
        return served
    form = window_schedule.form(own)
    differ = ((row, config) for row, config in others if window_schedule.form(config) != form)
    known = ((row, *with_or_without_maxima(problem, row, config, gpu.sm_count)) for row, config in differ)
    found = [(time, row, config) for row, time, config in known if time is not None]
    if (few := few_tiles_us(problem, *served, gpu)) is not None:
        found.append((few[0], served[0], few[1]))
    least = min(found, key=lambda one: one[0], default=None)
    return least[1:] if least is not None and least[0] < (1 - MARGIN) * now else served


# ---- the backward


def alone(problem: Problem, config: Config) -> bool:
    """Whether the backward runs alone on the GPU: sequences have few queries on average, or see few keys, or head dims are in
    parts (two such calls took 0.93 and 0.95 of the time, whatever the lengths)."""
    few = problem.seqlen_q < SHORT * problem.extent.given or problem.keys_seen < FEW_KEYS
    return few or bool(config["IN_PARTS"])


def _in_use(problem: Problem, heads: int, parts: int) -> int:
    """Bytes of q, do, the sums of dQ, k and v that a band of so many key heads, of groups in so many parts, has in use."""
    spec = problem.specialization
    rows, sums = ITEMSIZE[problem.dtype] * (problem.head_dim + problem.head_dim_v), 4 * max(block_dims(spec))
    heads = min(heads, problem.heads_kv * parts)
    return heads * (problem.seqlen_q * problem.group // parts * (rows + sums) + problem.seqlen_k * rows)


def of_backward(problem: Problem, kernel: str, choice: Choice, gpu: Gpu) -> Choice:
    """The fused Hopper backward for this call: as ``choice`` has it, or with the kernel alone on the GPU, or in wider bands."""
    if choice.config["BESIDE"] and alone(problem, choice.config):
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
    bound = min(time(choice.config, parts, False) for parts in group_parts.allowed(problem))
    if bound >= (1 - NEAR_BAND_MARGIN) * now:
        return choice
    found: list[tuple[float, Config]] = []
    for heads in choice.variant.space.dimensions["HEADS_PER_WAVE"]:
        if heads <= own:
            continue
        config = {**choice.config, "HEADS_PER_WAVE": heads}
        us, parts = least(config)
        margin = NEAR_BAND_MARGIN if _in_use(problem, heads, parts) <= gpu.l2_bytes else BAND_MARGIN
        if us < (1 - margin) * now:
            found.append((us, config))
    if not found:
        return choice
    most = (1 + group_parts_schedule.TIE) * min(us for us, _ in found)
    return replace(choice, config=next(config for us, config in found if us <= most))
