"""How long the fused Hopper backward of a dense call takes, and in which form it serves: arithmetic on the host, no GPU.

A row is tuned on one workload, where few multiprocessors prepare the rows of queries and finish dQ beside the others (BESIDE,
FINISH_BESIDE). Of another number of tiles these few can cost a whole round of tiles, or prepare too slowly, and then the kernel
alone on the GPU is faster. At 64 columns a block of 128 queries is padded by up to half where queries are few, so half blocks
are. Here a call is played through: rows prepared, key tiles given out to the program that is free first, dQ finished.

Microseconds are of an H200 and fitted to recorded times of whole backwards: docs/experiments/dense-backward.md.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from fa2tune.calling.schedules import packed_lengths
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import group_parts
from fa2tune.search_spaces.sm90 import bwd_dq, bwd_fused
from fa2tune.spec.mask import CAUSAL, FULL, STACKED, Mask, heads_stacked
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, Specialization, head_dim_parts
from fa2tune.spec.variant import Variant

TILE = bwd_fused.GROUPS * bwd_fused.KEYS  #: keys
#: Of a block of queries with a tile of keys, and of a tile's start and end, by (columns, BLOCK_M). Of 32 columns: blocks by a
#: race of long calls (benchmarks/calls/narrow_backward.json), ends as those of 64.
BLOCK_US = {(32, 64): 0.98, (32, 128): 1.55, (64, 64): 1.17, (64, 128): 2.11, (128, 64): 1.95}
TILE_US = {(32, 64): 2.1, (32, 128): 4.1, (64, 64): 2.1, (64, 128): 4.1, (128, 64): 3.55}
#: More of a tile: where a program has one tile and ends; of each of its query heads, whose rows it waits for, with BESIDE.
ENDS_US, AWAIT_US = 0.96, 0.76
#: Of a block in parts (IN_PARTS), how much of the share of columns that are not computed is saved: where Q and V have the same
#: parts, and where V has its own (V_APART), which is fitted to benchmarks/calls/v_apart.json.
PARTS_SAVE, APART_SAVE = 0.25, 0.6
#: A block takes longer by this share for each doubling of the query heads that a program walks, up to so many heads.
GROUP_COSTS, MOST_HEADS = 0.02, 16
#: Of a query row, by columns: of one multiprocessor that prepares it beside others, where rows of o and do are whole lines of
#: LINE bytes, and finishes its dQ beside others. A row that is no whole number of lines lies in one more on average. Of 32
#: columns by bytes, not timed.
OVERLAPPED_US = {32: 0.00435, 64: 0.0087, 128: 0.0160}
FINISH_OVERLAPPED_US = {32: 0.0036, 64: 0.0072, 128: 0.0171}
LINE, SUM_BYTES = 128, 4
#: Bytes a microsecond of the whole GPU where nothing else runs, which prepares rows and finishes them; and gigabytes a second
#: of the memory that these are of: of another they are slower in proportion, where rows do not stay in the L2.
PREPARE_RATE, FINISH_RATE, RATED_GBS = 3.6e6, 4.4e6, 4800
#: Share of the memory's bandwidth that the main kernel reaches, and what runs beside it, where rows do not stay in the L2. A
#: row is fetched in pieces of so many bytes. What programs take otherwise overlaps with it: times add up as such powers.
FETCH_RATE, PIECE, TOGETHER = 0.6, 64, 4
#: Of a call, of BESIDE, of each launch, and at least of what runs before and after the tiles.
CALL_US, OVERLAPPED_CALL_US, LAUNCH_US, END_US = 0.98, 1.15, 1.9, 0.96
#: Share of the memory's bandwidth that copies of K and V for parts of groups reach, and sums of dK and dV; and what the sum of
#: so many parts, which are loaded at once, waits for memory.
SPREAD_RATE, GATHER_RATE, GATHERED, GATHER_WAITS_US = 0.73, 0.43, 7, 0.6
#: Another form than the row's must be predicted to be faster by this share and so many microseconds, half blocks by that
#: share; by the other one where nothing else is: in six of six races half blocks that were predicted to be the fastest were,
#: by 1 to 37 %.
MARGIN, HALF_MARGIN, HALF_ALONE, LEAST_US = 0.04, 0.12, 0.06, 0.5
#: Where more bytes are prepared than in tuned workloads, whose rows were measured with BESIDE, the kernel alone on the GPU may
#: be predicted to be slower by so much: of four such calls it was faster in all, by 1 to 14 %, and the model knows only a part
#: of the reasons (docs/experiments/dense-backward.md).
LONG_BYTES, LONG_MARGIN = 400e6, -0.04
#: The same of head dims in parts whose rows begin inside a PIECE, without a mask, of up to so many queries. Of 20 such calls
#: that were predicted to take about as long in both forms 16 took 0.82 to 0.99 of the row's time alone, none over 1.03. Of more
#: queries seven of seven took 1.01 to 1.06, at 96 six of seven 1.02 to 1.09 (benchmarks/calls/alone_backwards.json).
PARTS_ALONE, PARTS_ROWS = -0.03, 4096
#: Alone on the GPU may be predicted to be slower by so much, less LEAST_US, where the row's form takes so many microseconds at
#: most and query heads have key tiles for half of the multiprocessors: of seven such calls, timed in both forms, it was faster
#: in all, by 1 to 28 %. Of fewer tiles the row's form is overestimated. With EARLY_START.
SHORT_US, SHORT_MARGIN = 45.0, -0.05
#: Parts of groups must be by this one; of predictions within PARTS_TIE of the least the fewest parts, which move the least.
PARTS_MARGIN, PARTS_TIE = 0.06, 0.008
#: Whether dense calls of up to so many microseconds start kernels before the one before ends; by how much that may be predicted
#: to be slower than a row with BESIDE, where such a row takes so many microseconds at most (docs/experiments/divisors.md).
EARLY_START, EARLY_START_US, EARLY_MARGIN, SLOWER_US = True, 400.0, -0.025, 120.0
#: What it saves with divisors from the host, and of packed calls, whose kernels divide.
EARLY_SAVES_US, PACKED_EARLY_SAVES_US = 3.0, 1.3
#: What the order of packed tiles by length costs (LONGER_FIRST): the kernel before writes it, and the first tile waits for it;
#: and for each 128 sequences more. In two raced calls of 171 and 201 sequences, which gain nothing else, it was about 3.
ORDER_US, ORDER_STEP_US = 1.5, 0.5
#: Tiles given out one by one at most; of more, all programs have the mean and half of the longest or last tile.
MOST_TILES = 4096


def covers(variant: Variant, problem: Problem) -> bool:
    """Whether another form than the row's may serve (``of_dense``)."""
    return times(variant, problem) and not problem.extent.ragged


def times(variant: Variant, problem: Problem) -> bool:
    """Whether microseconds are known. Of packed sequences those of ``apart`` alone: what runs beside takes longer than here."""
    return variant.space is bwd_fused.SPACE and (problem.extent.ragged or recorded(problem.mask))


@lru_cache(maxsize=1024)
def recorded(mask: Mask) -> bool:
    """Whether estimates of dense backwards know a mask: none, causal, and that of rows of several heads, which is like it."""
    return mask in (CAUSAL, FULL) or mask.name == STACKED


@lru_cache(maxsize=4096)
def blocks_met(seqlen_q: int, seqlen_k: int, mask: Mask, rows: int, keys: int) -> tuple[int, ...]:
    """Blocks of so many rows of queries that each tile of so many keys of a head meets, under a mask that is ``recorded``."""
    tiles, blocks = -(-seqlen_k // keys), -(-seqlen_q // rows)
    if mask == FULL:
        return (blocks,) * tiles
    heads = heads_stacked(mask)
    hidden = -(-seqlen_q // heads) - seqlen_k  # first queries, which see no key
    return tuple([blocks - min(max(nth * keys + hidden, 0) * heads // rows, blocks) for nth in range(tiles)])


@lru_cache(maxsize=4096)
def _blocks(seqlen_q: int, seqlen_k: int, mask: Mask, rows: int) -> tuple[int, ...]:
    """Blocks of so many queries that each key tile of a head meets."""
    if recorded(mask):
        return blocks_met(seqlen_q, seqlen_k, mask, rows, TILE)
    tiles, blocks, hidden = -(-seqlen_k // TILE), -(-seqlen_q // rows), seqlen_q - seqlen_k
    if mask.window is None:  # the mean of all, and half a tile at either end
        return (min(blocks, -(-(mask.pairs(seqlen_q, seqlen_k) // max(1, seqlen_k) + TILE) // rows)),) * tiles
    left, right = (seqlen_k + seqlen_q if side is None else side for side in mask.window)
    firsts = [max(0, nth * TILE + hidden - right) // rows for nth in range(tiles)]
    ends = [min(seqlen_q, (nth + 1) * TILE + hidden + left) for nth in range(tiles)]
    return tuple([max(0, -(-end // rows) - first) for first, end in zip(firsts, ends, strict=True)])


def most_seeing(queries: int, keys: int, mask: Mask) -> int:
    """Queries of a sequence that see its key which the most see: what LONGER_FIRST orders sequences by."""
    return min(queries, keys) if mask == CAUSAL else queries


@lru_cache(maxsize=256)
def _blocks_of(problem: Problem, rows: int, longer_first: bool = False) -> tuple[int, ...]:
    """The same of a problem; of packed sequences one after the other, or those of more queries first."""
    if not problem.extent.ragged:
        return _blocks(problem.seqlen_q, problem.seqlen_k, problem.mask, rows)
    every = packed_lengths.each(problem)
    if longer_first:
        every = tuple(sorted(every, key=lambda one: most_seeing(one[0], one[1], problem.mask), reverse=True))
    found = {lengths: _blocks(*lengths, problem.mask, rows) for lengths in set(every)}
    return tuple([n for lengths in every for n in found[lengths]])


@lru_cache(maxsize=256)
def _chunks(problem: Problem) -> int:
    """Of a head's query rows, of CHUNK each."""
    lengths = packed_lengths.each(problem) if problem.extent.ragged else ((problem.seqlen_q, 0),)
    return sum(-(-queries // bwd_fused.CHUNK) for queries, _ in lengths)


def last_done(free: list[float], costs: tuple[float, ...], heads: int, band: int) -> float:
    """When the last program is done. ``free``: a heap of when each is free, which changes; ``costs``: of a head's tiles;
    ``heads``: key heads, ``band`` of which are given out together, tile after tile, to the program that is free first."""
    whole, rest = divmod(heads, band)
    for together, times in ((band, whole), (rest, 1)):
        for cost in [cost for cost in costs for _ in range(together)] * times:
            heapq.heapreplace(free, free[0] + cost)
    return max(free)


class Programs(NamedTuple):
    """That run at once: ``early`` of them from ``begun`` on, the others from ``late`` on."""

    early: int
    others: int
    begun: float
    late: float


@lru_cache(maxsize=256)  # a key has a number for each tile of a head
def _over(costs: tuple[float, ...], heads: int, band: int, programs: Programs, exact: bool) -> float:
    """``last_done``; not ``exact``: no later than that, without giving the tiles out one by one."""
    early, others, begun, late = programs
    longest = max(costs)
    mean = (heads * sum(costs) + early * begun + others * late) / (early + others)
    if not exact:
        return max(mean, begun + longest)
    if len(costs) * heads > MOST_TILES:
        return max(mean + longest / 2, begun + longest)
    free = [begun] * early + [late] * others
    heapq.heapify(free)
    return last_done(free, costs, heads, band)


class FusedForm(NamedTuple):
    """Of a config, what the times depend on."""

    rows: int
    overlapped: bool
    finish_overlapped: bool
    persistent: bool
    in_parts: bool
    v_apart: bool
    narrow: bool
    heads_per_wave: int
    early_start: bool
    longer_first: bool
    query_parts: bool


def _form(config: Config) -> FusedForm:
    return FusedForm(
        config["BLOCK_M"], config["BESIDE"], config["FINISH_BESIDE"], config["PERSISTENT"], bool(config.get("IN_PARTS")),
        bool(config.get("V_APART")), bool(config.get("NARROW")), config["HEADS_PER_WAVE"], bool(config.get("EARLY_START")),
        bool(config.get("LONGER_FIRST")), group_parts.of_queries(config),
    )  # fmt: skip


class RowCosts(NamedTuple):
    """Of a query row."""

    columns: int  #: of its sums
    prepared: int  #: bytes that preparing it moves: o and do are read, zeros are written
    finished: int  #: the same of finishing it
    loaded: int  #: of the tensors that the main kernel reads of it, in whole pieces
    prepare_us: float  #: of the whole GPU where nothing else runs
    finish_us: float
    prepare_overlapped_us: float  #: of one multiprocessor beside others
    finish_overlapped_us: float
    kept: int  #: bytes that stay in the L2 between two tiles that see it: q, do and sums of dQ


def _pieces(size: int) -> int:
    """Bytes of the memory's pieces that a row of so many lies in, rows one after the other, on average."""
    return size + PIECE - math.gcd(size, PIECE)


@lru_cache(maxsize=256)
def _row_costs(spec: Specialization, in_parts: bool, v_apart: bool, narrow: bool) -> RowCosts:
    columns, item = bwd_fused.columns(spec, {"NARROW": narrow, "V_APART": v_apart}), ITEMSIZE[spec.dtype]
    zeros, o = SUM_BYTES * columns, item * spec.head_dim_v
    prepared = zeros + 2 * o
    finished = SUM_BYTES * (sum(head_dim_parts(spec.head_dim)) if in_parts else columns) + item * spec.head_dim
    lines = o / LINE + (o % LINE > 0)
    loaded = _pieces(item * spec.head_dim) + _pieces(o)
    return RowCosts(
        columns, prepared, finished, loaded, prepared / PREPARE_RATE, finished / FINISH_RATE,
        OVERLAPPED_US[columns] * (zeros / LINE + 2 * lines) / (2 * zeros / LINE),
        FINISH_OVERLAPPED_US[columns] * finished / (1.5 * zeros), zeros + loaded,
    )  # fmt: skip


def kept_bytes(problem: Problem, config: Config) -> int:
    """``RowCosts.kept`` of a config."""
    form = _form(config)
    return _row_costs(problem.specialization, form.in_parts, form.v_apart, form.narrow).kept


def parts_us(problem: Problem, parts: int, gpu: Gpu, queries: bool = False) -> float:
    """Of what runs before and after, where groups are in so many parts. ``queries``: query blocks are."""
    if parts == 1:
        return 0.0
    dims = problem.head_dim + problem.head_dim_v
    size = problem.batch * problem.heads_kv * parts * problem.seqlen_k * dims * ITEMSIZE[problem.dtype]
    rate = gpu.hbm_gbs * 1e3
    copied = LAUNCH_US + size / (rate * SPREAD_RATE) if group_parts.copies(problem, queries) else 0.0
    return copied + LAUNCH_US + max(size / (rate * GATHER_RATE), -(-parts // GATHERED) * GATHER_WAITS_US)


@lru_cache(maxsize=256)
def _columns(spec: Specialization, narrow: bool) -> int:
    """Of the tiles that BLOCK_US and TILE_US know."""
    return bwd_fused.columns(spec, {"NARROW": narrow})


def _tile_us(problem: Problem, group: int, form: FusedForm, parts: int = 1) -> tuple[float, ...]:
    """Of each tile of a key head, of one of so many parts of its query blocks."""
    spec = problem.specialization
    columns = _columns(spec, form.narrow)
    block = BLOCK_US[columns, form.rows] * (1 + GROUP_COSTS * math.log2(min(group, MOST_HEADS)))
    if form.in_parts:
        saved = 1 - bwd_fused.computed(spec, form.v_apart) / columns
        block *= 1 - (APART_SAVE if form.v_apart else PARTS_SAVE) * saved
    awaited = group * AWAIT_US if form.overlapped else 0.0
    ends = awaited + TILE_US[columns, form.rows] + (0.0 if form.persistent else ENDS_US)
    blocks = _blocks_of(problem, form.rows, form.longer_first)
    return tuple([group * -(-count // parts) * block + ends for count in blocks])


def _missed(tiles: int, group: int, heads: int, kept: int, band: int, gpu: Gpu) -> float:
    """Share of a group's query heads whose rows, of ``kept`` bytes, have left the L2 when the next of so many key tiles comes
    to them. Under a causal mask a tile has 128 queries less of each head than the one before it, so from head to head programs
    that began together are further apart. Those of later rounds begin one after the other, which makes up for some heads."""
    programs = min(gpu.sm_count, tiles * heads)
    near = min(1.0, gpu.l2_bytes / (programs * TILE * kept * group))  # share of heads
    first, made_up = programs / (tiles * heads), min(band, heads) * tiles / (2 * programs)
    return first * (1 - near) + (1 - first) * max(0.0, 1 - near - min(made_up, near))


@lru_cache(maxsize=4096)
def _fetched(problem: Problem, group: int, heads: int, row: RowCosts, form: FusedForm, gpu: Gpu) -> float:
    """Bytes that the main kernel moves to and from memory: q, do and the sums of dQ; 0: all rows stay in the L2."""
    rows, kept = problem.batch * problem.heads_q * problem.seqlen_q, row.kept
    if rows * kept <= gpu.l2_bytes or problem.extent.ragged:  # of packed sequences no record has it
        return 0.0
    blocks = _blocks(problem.seqlen_q, problem.seqlen_k, problem.mask, form.rows)
    seen = sum(blocks) / -(-problem.seqlen_q // form.rows)  # tiles that a row is seen by
    apart = group * heads_stacked(problem.mask)  # from tile to tile there are 128 queries less of each of these heads
    missed = _missed(len(blocks), apart, heads, kept, form.heads_per_wave, gpu) if problem.mask != FULL else 0.0
    times = 1 + (seen - 1) * missed if seen > 1 else seen
    return rows * times * (kept + SUM_BYTES * row.columns)


def _with_memory(busy: float, moved: float, gpu: Gpu) -> float:
    """Microseconds of programs that take ``busy`` where nothing waits for memory, and move so many bytes."""
    waits = moved / (gpu.hbm_gbs * 1e3 * FETCH_RATE)
    return (busy**TOGETHER + waits**TOGETHER) ** (1 / TOGETHER)


@lru_cache(maxsize=256)
def _helpers(problem: Problem, parts: int, sm_count: int, finish: bool) -> tuple[int, int, int]:
    """Of BESIDE, the same in all bands: the share of multiprocessors that prepare, over the second number; and with
    FINISH_BESIDE how many have no tiles."""
    if not finish:
        return bwd_fused.ROWS_WORTH, max(1, round(problem.keys_seen)), 0
    ours = group_parts.split(problem, parts)
    return *bwd_fused.share_of_helpers(ours), bwd_fused.helpers(ours, {"FINISH_BESIDE": True}, sm_count)


@lru_cache(maxsize=4096)
def _whole_us(problem: Problem, form: FusedForm, gpu: Gpu, parts: int, exact: bool) -> float:
    """``predicted_us``."""
    sm_count, row = gpu.sm_count, _row_costs(problem.specialization, form.in_parts, form.v_apart, form.narrow)
    group, heads = max(1, problem.group // parts), problem.batch * problem.heads_kv * parts
    if len(_blocks_of(problem, form.rows)) * heads <= sm_count:  # no program has a second tile
        form = form._replace(persistent=True)
    costs = _tile_us(problem, group, form, parts if form.query_parts else 1)
    fetched = _fetched(problem, group, heads, row, form, gpu)
    band, tiles = min(form.heads_per_wave, heads), len(costs) * heads
    chunks_of_head, query_heads = _chunks(problem), problem.batch * problem.heads_q
    chunks = query_heads * chunks_of_head
    # packed: whole chunks of each sequence
    rows = chunks * bwd_fused.CHUNK if problem.extent.ragged else query_heads * problem.seqlen_q
    fixed = CALL_US + LAUNCH_US + END_US + parts_us(problem, parts, gpu, form.query_parts)
    others = 132 / sm_count  # what all multiprocessors do together, other GPUs do as much slower
    if rows * row.finished > gpu.l2_bytes:
        others = max(others, RATED_GBS / gpu.hbm_gbs)
    before, after = row.prepare_us * others, row.finish_us * others
    if not form.overlapped:
        prepared = max(END_US, chunks * bwd_fused.CHUNK * before)
        ended = _over(costs, heads, band, Programs(min(tiles, sm_count), 0, 0.0, 0.0), exact)
        ended = _with_memory(ended, fetched, gpu) if fetched else ended
        saved = (PACKED_EARLY_SAVES_US if problem.extent.ragged else EARLY_SAVES_US) if form.early_start else 0.0
        order = ORDER_US + problem.extent.sequences // 128 * ORDER_STEP_US if form.longer_first else 0.0
        return fixed + LAUNCH_US + prepared + ended + rows * after + order - saved
    # every program prepares a share of what the main kernel begins with, and some go on with the rest
    # (sm90/bwd_prepare_overlapped.py)
    share, whole, helpers = _helpers(problem, parts, sm_count, form.finish_overlapped)
    count = min(tiles, sm_count - helpers)
    workers = min(-(-sm_count * share // whole), sm_count)
    each = bwd_fused.CHUNK * row.prepare_overlapped_us
    bands = -(-sm_count // (len(costs) * form.heads_per_wave))
    first = min(bands * form.heads_per_wave * group * chunks_of_head, chunks)
    begun = END_US + -(-first // sm_count) * each
    late = begun + -(-(chunks - first) // workers) * each
    early = min(count, sm_count - workers)
    ended = _over(costs, heads, band, Programs(early, count - early, begun, late), exact)
    if chunks > first:
        ended = max(ended, late + max(costs))
    most = rows * max(0.0, 1 - count / tiles) if form.finish_overlapped else 0.0  # rows that are finished beside
    if fetched:
        there = SUM_BYTES * row.columns  # zeros, which the first tile that adds to them finds in the L2
        ended = _with_memory(ended, fetched + rows * (row.prepared - there) + most * row.finished, gpu)
    left = float(rows)
    if form.finish_overlapped:
        finished = (sm_count - count) * max(0.0, ended - late) / row.finish_overlapped_us
        left -= min(finished, most)
    return fixed + OVERLAPPED_CALL_US + ended + left * after


def predicted_us(problem: Problem, config: Config, gpu: Gpu, parts: int = 1, exact: bool = True) -> float:
    """Microseconds of a whole backward, query groups in so many parts; of packed sequences with nothing beside. ``exact``: as
    ``_over`` has it."""
    form = _form(apart(config) if problem.extent.ragged else config)
    return _whole_us(problem, form, gpu, parts, exact)


# ---- what serves


def apart(config: Config) -> Config:
    """With rows prepared before and dQ finished after the main kernel, which then has all multiprocessors."""
    return {**config, "BESIDE": False, "FINISH_BESIDE": False}


def halves(config: Config) -> Config:
    """Of 64 columns or 32: blocks of 64 queries, as rows of short causal lengths have them, the kernel alone on the GPU."""
    return {
        **apart(config), "BLOCK_M": 64, "REDUCE": "vector", "ORDER": "together", "EXPONENTIALS_FIRST": False,
        "PERSISTENT": True, "PAIRS": False, "DYNAMIC": True, "IN_PARTS": False, "num_warps": 8,
    }  # fmt: skip


@lru_cache(maxsize=256)
def _allowed(config: tuple[tuple[str, Any], ...], spec: Specialization, arch: int) -> bool:
    """Whether the search space has a config, given by its items; the same for all lengths."""
    return bwd_fused.SPACE.broken(dict(config), spec, arch) is None


def forms(problem: Problem, choice: Choice, arch: int) -> Iterator[tuple[Config, float]]:
    """Configs of other machine code that other batches, heads and lengths may have in place of a row's, each with the share by
    which it must be predicted to be faster."""
    config = choice.config
    if not covers(choice.variant, problem):
        return
    rows, narrow = problem.batch * problem.heads_q * problem.seqlen_q, bool(config.get("NARROW"))
    prepared = rows * _row_costs(problem.specialization, False, False, narrow).prepared
    inside = bool(config.get("IN_PARTS")) and ITEMSIZE[problem.dtype] * problem.head_dim % PIECE > 0
    near = inside and problem.mask == FULL and problem.seqlen_q <= PARTS_ROWS
    alone = LONG_MARGIN if prepared > LONG_BYTES else PARTS_ALONE if near else MARGIN
    found = [(apart(config), alone)] if config["BESIDE"] else []
    if bwd_fused.columns(problem.specialization, config) <= 64 and config["BLOCK_M"] == 128:
        found.append((halves(config), HALF_MARGIN))
    for other, margin in found:
        if _allowed(tuple(other.items()), problem.specialization, arch):
            yield other, margin


def started_early(config: Config) -> Config:
    """With kernels started before the one before them ends; dQ's where there is room for it."""
    return {**config, "EARLY_START": True}


def all_forms(problem: Problem, choice: Choice, arch: int) -> Iterator[Config]:
    """Every config of other machine code that some dense call may have by ``of_dense`` in place of a row's."""
    found = [form for form, _ in forms(problem, choice, arch)]
    early = [choice.config, *found] if EARLY_START and covers(choice.variant, problem) else []
    yield from [*found, *(started_early(form) for form in early if not form["BESIDE"])]


def least_us(problem: Problem, config: Config, gpu: Gpu, below: float = math.inf) -> float:
    """Microseconds with query groups in the number of parts that is expected to be the fastest; more than ``below``: no number
    of parts takes less than that."""
    form, least = _form(config), math.inf
    counts = group_parts.counts(problem, gpu.arch)
    for bound, parts in sorted([(_whole_us(problem, form, gpu, parts, False), parts) for parts in counts]):
        if bound < min(least, below):
            least = min(least, _whole_us(problem, form, gpu, parts, True))
    return least


def _early_if_short(problem: Problem, config: Config, gpu: Gpu, below: float = math.inf) -> tuple[Config, float]:
    """(config, ``least_us``), with EARLY_START where a call is short enough for it."""
    if EARLY_START and not config["BESIDE"]:
        early = started_early(config)
        if (time := least_us(problem, early, gpu, below)) <= EARLY_START_US:
            return early, time
    return config, least_us(problem, config, gpu, below)


def of_dense(problem: Problem, choice: Choice, gpu: Gpu) -> Choice:
    """The form for a dense call: the row's, or one of ``all_forms``."""
    if problem.is_empty or not covers(choice.variant, problem):
        return choice
    own, others = choice.config, list(forms(problem, choice, gpu.arch))
    if not others and (own["BESIDE"] or not EARLY_START):
        return choice
    (best, now), least = _early_if_short(problem, own, gpu), math.inf
    in_parts = problem.batch * problem.heads_q * -(-problem.seqlen_k // TILE)  # tiles, as far as groups can be split
    short = now <= SHORT_US and 2 * in_parts >= gpu.sm_count
    for other, margin in others:
        if other["BLOCK_M"] != own["BLOCK_M"]:
            margin = margin if least < (1 - MARGIN) * now - LEAST_US else HALF_ALONE
        elif own["BESIDE"] and EARLY_START and now <= SLOWER_US:
            margin = min(margin, SHORT_MARGIN if short else EARLY_MARGIN)
        wanted = min((1 - margin) * now - LEAST_US, least)
        config, time = _early_if_short(problem, other, gpu, wanted)
        if time < wanted:
            best, least = config, time
    return choice if best == own else replace(choice, config=best, otherwise=own)


#: That form, which deterministic calls have. Its row is of another one, and says nothing of its speed.
IN_ORDER_FORM = "dQ summed in a fixed order"


def about(choice: Choice) -> str:
    """In a few words, the form of a backward's kernel that runs in place of a row's; "": the row's."""
    config, own = choice.config, choice.otherwise
    if config.get("IN_ORDER"):
        return IN_ORDER_FORM
    if own is None or choice.few_tiles:
        return ""
    if choice.variant.space is not bwd_fused.SPACE:
        start = ("the next kernel " if choice.variant.space is bwd_dq.SPACE else "") + "started early"
        said = {start: config.get("EARLY_START"), "divisors from the host": config.get("DIVISORS")}
        return ", ".join(words for words, holds in said.items() if holds)
    halved, early = config["BLOCK_M"] != own["BLOCK_M"], bool(config.get("EARLY_START"))
    ordered, longer = config["ORDER"] != own["ORDER"], bool(config.get("LONGER_FIRST"))
    banded = config["HEADS_PER_WAVE"] != own["HEADS_PER_WAVE"] and not group_parts.of_queries(config)
    words = [f"in blocks of {config['BLOCK_M']} queries"] if halved else []
    words += [f"in the order {config['ORDER']}"] if ordered and not halved else []
    if not config["BESIDE"] and (halved or own["BESIDE"] or not (early or longer or ordered or banded)):
        words.append("alone on the GPU")
    words += [f"in bands of up to {config['HEADS_PER_WAVE']} heads"] if banded else []
    words += ["longer sequences first"] if longer else []
    words += ["kernels started early"] if early else []
    return ", ".join(words)
