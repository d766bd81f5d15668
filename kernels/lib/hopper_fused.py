"""What both forms of kernels/sm90/bwd_fused.py share: the warp that loads, barriers, P, dQ."""

from typing import NamedTuple

from triton import __version__
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor

from fa2tune.kernels.lib.hopper import (
    PACKED_ROWS,
    await_kernel_before,
    mbarrier,
    named_barrier_sync,
    tma_load,
    warpgroup_mma,
)
from fa2tune.kernels.lib.hopper_blocks import block_at, blocks_of_part, query_blocks
from fa2tune.kernels.lib.hopper_packed import send_place
from fa2tune.kernels.lib.hopper_parts import expect_both, expect_tiles, load_parts, product_layout
from fa2tune.kernels.lib.hopper_tiles import first_number, first_query_head, key_head, laps_of, query_heads, take, work
from fa2tune.kernels.lib.warps import WARP
from fa2tune.search_spaces.sm90 import bwd_fused as space
from fa2tune.spec.variant import WARP_THREADS, WARPGROUP_THREADS

GROUPS = gl.constexpr(space.GROUPS)
#: Keys of a consumer group: the rows of one wgmma.
KEYS = gl.constexpr(space.KEYS)
#: Query rows that sm90/bwd_prepare_overlapped prepares at once, and signals by one flag.
CHUNK = gl.constexpr(space.CHUNK)
#: Keys of a tile.
BLOCK_N = gl.constexpr(space.GROUPS * space.KEYS)
#: Columns of the terms of lse and delta in shared memory: one step of a wgmma.
TERM_COLUMNS = gl.constexpr(space.TERM_COLUMNS)

#: Named barriers, at which warps of several partitions wait; Triton takes the first ones, one a partition. A warp that
#: only arrives goes on at once, where an arrival at an mbarrier first waits for all warps of the partition.
PIECE_READY = gl.constexpr(8)  #: a block's dQ lies in shared memory: one barrier a group
PIECE_GONE = gl.constexpr(10)  #: and has left it: one a group
DS_READY = gl.constexpr(12)  #: both groups' dS lies in shared memory
EMPTY = gl.constexpr(13)  #: no warp reads the stage of Q and dO: one a stage
V_EMPTY = gl.constexpr(15)  #: no warp reads V any more (concatenated groups with K of two tiles)
#: Threads that arrive there.
ALL_GROUPS = gl.constexpr(space.GROUPS * WARPGROUP_THREADS)
GROUP_AND_WARP = gl.constexpr(WARPGROUP_THREADS + WARP_THREADS)
GROUPS_AND_WARP = gl.constexpr(space.GROUPS * WARPGROUP_THREADS + WARP_THREADS)


class Form(NamedTuple):
    """What is compiled in. Kept as gl.constexpr: assigned without, its fields would be values of the running program."""

    BLOCK_M: gl.constexpr
    BLOCK_D: gl.constexpr
    TILE_ROWS: gl.constexpr  #: keys that a TMA load brings
    PARTS: gl.constexpr  #: such loads of a tile, and partitions of consumers
    STAGES: gl.constexpr
    K_STAGES: gl.constexpr
    DS_STAGES: gl.constexpr
    OUT_STAGES: gl.constexpr
    REDUCE: gl.constexpr
    SCORES_AHEAD: gl.constexpr
    EXPONENTIALS_FIRST: gl.constexpr
    DQ_BEHIND: gl.constexpr
    PAIRS: gl.constexpr
    DYNAMIC: gl.constexpr
    BESIDE: gl.constexpr
    EARLY_START: gl.constexpr
    CONCATENATED: gl.constexpr
    ADDS: gl.constexpr  #: dQ is added by a warp of its own
    COUNTS: gl.constexpr  #: tiles are counted, for sm90/bwd_finish
    SIGNALS: gl.constexpr  #: consumers say when they have added all of a tile's dQ
    RAGGED: gl.constexpr
    IN_ORDER: gl.constexpr  #: key tiles add to a block's dQ in turns
    LONGER_FIRST: gl.constexpr  #: packed sequences of more queries come first
    QUERY_PARTS: gl.constexpr  #: a tile's query blocks are those of one of ``group`` parts of all
    QUERY_BLOCKS: gl.constexpr
    HIDE_QUERIES: gl.constexpr
    LEFT_BOUNDED: gl.constexpr
    RIGHT_BOUNDED: gl.constexpr
    SCORED: gl.constexpr  #: there is a score term
    APPLY: gl.constexpr
    GRAD: gl.constexpr


# Partitions get the fields of these in their order; another one is other machine code.
class Call(NamedTuple):
    """What a launch is given. RAGGED: batch is the number of sequences, the lengths are those of all together."""

    batch: gl.tensor
    heads_q: gl.tensor
    heads_kv: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    rows_padded: gl.tensor
    heads_per_wave: gl.tensor
    window: tuple
    score: tuple
    qk_scale: gl.tensor
    softmax_scale: gl.tensor
    by: tuple  #: Divisors


class Shared(NamedTuple):
    """Shared memory: of q, k, v, do and out the parts, [slots, 1, 1, rows, columns] each."""

    q: tuple
    k: tuple
    v: tuple
    do: tuple
    lse: gl.shared_memory_descriptor  #: terms
    delta: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    out: tuple
    out_v: tuple  #: of V's shape; (): dV leaves through out, too


class Turns(NamedTuple):
    """Of the rings of Q and dO."""

    done: gl.tensor  #: before place 0 of a head
    base: gl.tensor  #: before the tile
    limit: gl.tensor  #: with the tile


class Head(NamedTuple):
    """A query head, and the keys that a group of consumers has of the tile."""

    h: gl.tensor
    key: gl.tensor  #: first one
    offset: gl.tensor  #: query i is at place i + offset of the keys
    seqlen_k: gl.tensor


class Barriers(NamedTuple):
    """mbarriers: one of V, of the others one a slot. empty: of Q and dO."""

    k_ready: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    q_ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    do_ready: gl.shared_memory_descriptor
    ds_ready: gl.shared_memory_descriptor


@gluon.jit
def make_barriers(
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr, PARTS: gl.constexpr, K_STAGES: gl.constexpr, DQ_BEHIND: gl.constexpr
):
    """mbarriers, initialised. None that no warp waits on: its memory would be given to what the partitions capture
    (docs/hopper.md)."""
    v_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(v_ready.index(0), count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=PARTS)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(do_ready.index(i), count=1)
    empty = q_ready  # never used: barriers by number
    ds_ready = q_ready
    if DQ_BEHIND:
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        ds_ready = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(empty.index(i), count=GROUPS)
        for i in gl.static_range(DS_STAGES):
            mbarrier.init(ds_ready.index(i), count=GROUPS)
    return Barriers(k_ready, v_ready.index(0), k_empty, q_ready, empty, do_ready, ds_ready)


#: Triton 3.9 has it in public.
_PUBLIC = gl.constexpr(hasattr(shared_memory_descriptor, "reinterpret"))
#: Between 3.6 and 3.9 what is made of a tile has to be as large as the tile: a row of blocks, of which the first is taken.
_AS_LARGE = gl.constexpr(not _PUBLIC.value and not __version__.startswith("3.6."))


@gluon.jit
def as_block_of(stage, descriptor):
    """The start of a shared tile, as a block of the tensor behind the descriptor."""
    if _PUBLIC:
        return stage.reinterpret(descriptor.dtype, descriptor.block_shape, descriptor.layout)
    elif _AS_LARGE:
        bits: gl.constexpr = stage.numel * stage.dtype.primitive_bitwidth
        blocks: gl.constexpr = bits // (descriptor.block_type.numel * descriptor.dtype.primitive_bitwidth)
        row: gl.constexpr = [blocks] + descriptor.block_shape  # noqa: RUF005  # Gluon has no stars
        return stage._reinterpret(descriptor.dtype, row, descriptor.layout).index(0)
    else:
        return stage._reinterpret(descriptor.dtype, descriptor.block_shape, descriptor.layout)


_SEEN = gl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")
_SEEN_BY_TMA = gl.constexpr("fence.proxy.async; mov.b32 $0, 0;")
_ALL_PREPARED = gl.constexpr("griddepcontrol.wait; mov.b32 $0, 0;")


@gluon.jit
def await_prepared(flags, head, rows_padded):
    """Until sm90/bwd_prepare_overlapped has signalled that all rows of a query head, counted over the batch, are prepared."""
    count = rows_padded // CHUNK
    flags += head * count
    for i in range(0, count, WARP):
        at = gl.minimum(i + gl.arange(0, WARP, layout=gl.BlockedLayout([1], [WARP], [1], [0])), count - 1)
        prepared = 0
        while prepared == 0:
            seen = gl.inline_asm_elementwise(
                _SEEN, "=r,l", [(flags + at).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
            )
            prepared = gl.min(seen, 0)
    do_once(_SEEN_BY_TMA)


@gluon.jit
def await_packed(flags, head, group, heads_kv, heads_per_wave, rows_padded, own_row, queries):
    """The same of a packed sequence's rows, which are ``queries`` from own_row on in the workspaces. Flags lie in the order in
    which rows are prepared: a band's heads fastest."""
    wide = heads_per_wave * group
    first_head = head // wide * wide
    width = gl.minimum(heads_kv * group - first_head, wide)
    flags += first_head * (rows_padded // CHUNK) + own_row // CHUNK * width + head - first_head
    count = gl.cdiv(queries, CHUNK)
    for i in range(0, count, WARP):
        at = gl.minimum(i + gl.arange(0, WARP, layout=gl.BlockedLayout([1], [WARP], [1], [0])), count - 1) * width
        prepared = 0
        while prepared == 0:
            seen = gl.inline_asm_elementwise(
                _SEEN, "=r,l", [(flags + at).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
            )
            prepared = gl.min(seen, 0)
    do_once(_SEEN_BY_TMA)


@gluon.jit
def produce(q, k, v, do, terms, flags, counter, smem, barriers, channel, call, offsets, form):
    """One warp: K and V of each tile, and for every query head of the group Q with the terms of lse and dO with those of delta
    through rings; BESIDE: once these are prepared, and so are the zeros that the other warps add to. EARLY_START: terms once
    the kernel before has ended, for which K and V of the first tile, and its first Q and dO, do not wait. RAGGED: as
    hopper_packed.py has it. LONGER_FIRST: the kernel before writes the order of tiles, so that even the first one waits."""
    if form.LONGER_FIRST:
        if form.EARLY_START:
            await_kernel_before()
    laps = laps_of(call, form)
    taken = first_number(call, form)
    lap = 0
    base = 0  # turns of the rings before this tile
    filled = 0  # tiles before this one that any query sees
    while lap < laps:
        if form.RAGGED:
            alive, h_kv, start_n, queries, keys, first_q, first_k, own_row = send_place(
                lap,
                counter,
                channel,
                offsets,
                call.batch,
                call.heads_kv,
                call.seqlen_q,
                call.seqlen_k,
                call.heads_per_wave,
                form.EARLY_START,
                form.LONGER_FIRST,
                form.SCORED,
            )
            laps = gl.where(alive, lap + 2, 0)
            first, _full, end, rotation = query_blocks(
                start_n, queries, keys, call.window, form.BLOCK_M, BLOCK_N, form.QUERY_BLOCKS, form.LEFT_BOUNDED
            )
            if form.QUERY_PARTS:
                first, _full, end = blocks_of_part(h_kv % call.group, call.group, (), first, _full, end)
            # coordinates of descriptors that end where the sequence ends; own_row: from those to rows of the terms
            b = first_q + queries
            k_entry = first_k + keys
            q_shift = PACKED_ROWS - queries
            own_row -= q_shift
            start_n += PACKED_ROWS - keys
            of_lse = 0
            entries = 1
        else:
            alive, b, h_kv, start_n, first, _full, end, rotation = work(lap, taken, call, form)
            k_entry = b
            q_shift = 0
            own_row = 0
            of_lse = b
            entries = call.batch
        n_blocks = end - first
        total = gl.where(alive, query_heads(call, form) * n_blocks, 0)
        first_head = first_query_head(h_kv, call, form)
        member = 0  # of the query heads that read this key head
        place = first
        for i in range(total):
            turn = base + i
            if len(call.by.heads) > 0:
                h = first_head + member
                row = block_at(place, first, end, rotation, form.LEFT_BOUNDED) * form.BLOCK_M + q_shift
                place += 1
                member += gl.where(place == end, 1, 0)
                place = gl.where(place == end, first, place)
            else:
                h = first_head + i // n_blocks
                row = block_at(first + i % n_blocks, first, end, rotation, form.LEFT_BOUNDED) * form.BLOCK_M + q_shift
            stage = turn % form.STAGES
            if form.BESIDE:
                if i % n_blocks == 0:
                    if form.RAGGED:
                        await_packed(
                            flags,
                            h,
                            call.group,
                            call.heads_kv,
                            call.heads_per_wave,
                            call.rows_padded,
                            own_row + q_shift,
                            queries,
                        )
                    else:
                        await_prepared(flags, (b * call.heads_kv + h_kv) * call.group + i // n_blocks, call.rows_padded)
            if form.DQ_BEHIND:
                mbarrier.wait(barriers.empty.index(stage), ((turn // form.STAGES) & 1) ^ 1)
            elif turn >= form.STAGES:
                named_barrier_sync(EMPTY + stage, GROUPS_AND_WARP)
            expect_both(q, (terms,), barriers.q_ready.index(stage))
            load_parts(q, b, h, row, barriers.q_ready.index(stage), smem.q, stage)
            if form.EARLY_START:
                if turn > 0:
                    tma_load(terms, [of_lse, h, row + own_row, 0], barriers.q_ready.index(stage), smem.lse.index(stage))
            else:
                tma_load(terms, [of_lse, h, row + own_row, 0], barriers.q_ready.index(stage), smem.lse.index(stage))
            if i == 0:
                k_stage = filled % form.K_STAGES
                ready = barriers.k_ready.index(k_stage)
                mbarrier.wait(barriers.k_empty.index(k_stage), ((filled // form.K_STAGES) & 1) ^ 1)
                expect_tiles(k, ready, form.PARTS)
                for c in gl.static_range(form.PARTS):
                    load_parts(
                        k,
                        k_entry,
                        key_head(h_kv, call, form),
                        start_n + c * form.TILE_ROWS,
                        ready,
                        smem.k,
                        k_stage * form.PARTS + c,
                    )
                if form.K_STAGES > 1:
                    if filled > 0:
                        named_barrier_sync(V_EMPTY, GROUPS_AND_WARP)
                expect_tiles(v, barriers.v_ready, form.PARTS)
                for c in gl.static_range(form.PARTS):
                    load_parts(
                        v,
                        k_entry,
                        key_head(h_kv, call, form),
                        start_n + c * form.TILE_ROWS,
                        barriers.v_ready,
                        smem.v,
                        c,
                    )
            expect_both(do, (terms,), barriers.do_ready.index(stage))
            load_parts(do, b, h, row, barriers.do_ready.index(stage), smem.do, stage)
            if form.EARLY_START:
                if turn == 0:
                    await_kernel_before()
                    tma_load(terms, [of_lse, h, row + own_row, 0], barriers.q_ready.index(stage), smem.lse.index(stage))
            tma_load(
                terms, [entries + of_lse, h, row + own_row, 0], barriers.do_ready.index(stage), smem.delta.index(stage)
            )
        base += total
        filled += gl.where(total > 0, 1, 0)
        if form.EARLY_START:  # of a first tile that no query sees; the kernel before sets the counter to 0
            await_kernel_before()
        if form.DYNAMIC and not form.RAGGED:
            taken, laps = take(lap, counter, channel, call, form)
        lap += 1
    if form.BESIDE:  # a kernel that follows this one follows the overlapped one too
        do_once(_ALL_PREPARED)
    if not form.DQ_BEHIND:  # no warp is left at a barrier
        for turn in range(gl.maximum(base, form.STAGES), base + form.STAGES):
            named_barrier_sync(EMPTY + turn % form.STAGES, GROUPS_AND_WARP)
        if form.K_STAGES > 1:
            if filled > 0:
                named_barrier_sync(V_EMPTY, GROUPS_AND_WARP)


@gluon.jit
def add_terms(product, terms_smem, stage, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """product [ROWS, M], under way, and one more step of it, which adds to each column the terms [M, TERM_COLUMNS] of a query.
    Loaded from shared memory by each thread, lse and delta were a tenth to a fifth of all traffic, and delayed the rest.
    The ones are constants, which ptxas leaves alone until the wait (tests/compiling/test_hopper.py)."""
    ones = gl.full([ROWS, TERM_COLUMNS], 1.0, gl.bfloat16, gl.DotOperandLayout(0, layout, 2))
    terms = terms_smem.index(stage).reshape([BLOCK_M, TERM_COLUMNS])
    return warpgroup_mma(ones, terms.permute((1, 0)), product, is_async=True)


@gluon.jit
def started_scores(product, terms_smem, stage, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, layout: gl.constexpr, form):
    """S^T, under way, less lse / softmax_scale; with a score term S^T itself, which the term takes."""
    if not form.SCORED:
        product = add_terms(product, terms_smem, stage, ROWS, BLOCK_M, layout)
    return product


@gluon.jit
def _lse_of(terms_smem, stage, WARPS: gl.constexpr, layout: gl.constexpr, form):
    """What ``add_terms`` adds, [M] in a slice of ``layout``. A row a thread sums it up, and shares it through shared memory."""
    of_rows: gl.constexpr = gl.BlockedLayout([1, TERM_COLUMNS], [WARP, 1], [WARPS, 1], [1, 0])
    terms = terms_smem.index(stage).reshape([form.BLOCK_M, TERM_COLUMNS]).load(of_rows)
    return gl.convert_layout(gl.sum(terms.to(gl.float32), 1), gl.SliceLayout(0, layout))


@gluon.jit
def probabilities(
    s, row, head, terms_smem, stage, sequence, call, ROWS: gl.constexpr, MASK: gl.constexpr, layout: gl.constexpr, form
):
    """P^T [ROWS, M], and what dS^T is dP^T times, of what ``started_scores`` began; the first row is of ``head.key``, the first
    column of ``row``."""
    if form.SCORED:
        places = row + gl.arange(0, form.BLOCK_M, layout=gl.SliceLayout(0, layout))
        keys = head.key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        lse = _lse_of(terms_smem, stage, ROWS // 16, layout, form)
        s = form.APPLY(s, call.score, places[None, :], keys[:, None], head.offset, sequence, head.h)
        p = gl.exp2((s + lse[None, :]) * call.qk_scale)
    else:
        p = gl.exp2(s * call.qk_scale)
    if MASK:
        keys = head.key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        p = form.HIDE_QUERIES(p, keys, row, head.offset, head.seqlen_k, call.window, layout)
    slope = p
    if form.SCORED:
        slope = form.GRAD(p, s, call.score, places[None, :], keys[:, None], head.offset, sequence, head.h)
    return p, slope


@gluon.jit
def do_once(PTX: gl.constexpr):
    """PTX that takes nothing and sets $0."""
    gl.inline_asm_elementwise(PTX, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def zero_pieces(k_smem, CONSUMER: gl.constexpr, form):
    """Where this group's pieces of a block's dQ start from."""
    COLUMNS: gl.constexpr = form.BLOCK_M * form.BLOCK_D // 128
    if len(k_smem) == 1:
        found = (gl.zeros([64, COLUMNS], gl.float32, product_layout(COLUMNS)),)
    elif form.BLOCK_M == 64:
        MINE: gl.constexpr = k_smem[CONSUMER].shape[-1]
        found = (gl.zeros([64, MINE], gl.float32, product_layout(MINE)),)
    else:
        FIRST: gl.constexpr = k_smem[0].shape[-1]
        REST: gl.constexpr = k_smem[1].shape[-1]
        first = gl.zeros([64, FIRST], gl.float32, product_layout(FIRST))
        found = (first, gl.zeros([64, REST], gl.float32, product_layout(REST)))
    return found


@gluon.jit
def _piece_of(ds_smem, k_smem, buffer, zero, FIRST_ROW: gl.constexpr, FIRST_COLUMN: gl.constexpr):
    """dS K of 64 query rows, over both groups' keys, in as many columns as ``zero`` has. GROUPS products are then under way."""
    COLUMNS: gl.constexpr = zero.shape[1]
    dq = zero
    for c in gl.static_range(GROUPS):
        ds = ds_smem.index(buffer * GROUPS + c)
        k = k_smem.index(c).reshape([KEYS, k_smem.shape[-1]])
        if k_smem.shape[-1] != COLUMNS:
            k = k.slice(FIRST_COLUMN, COLUMNS, dim=1)
        if ds_smem.shape[-1] != 64:
            ds = ds.slice(FIRST_ROW, 64, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def issue_dq(smem, buffer, zeros, CONSUMER: gl.constexpr, form):
    """This group's pieces of dS K, over both groups' keys: of 64 query rows [64, BLOCK_D / 2], its half of the columns, or of a
    head dim in two parts the first or the second of them; of 128 query rows its half of the rows [64, BLOCK_D], or those of
    either part."""
    HALF: gl.constexpr = form.BLOCK_D // 2
    if len(smem.k) == 1:
        found = (_piece_of(smem.ds, smem.k[0], buffer, zeros[0], CONSUMER * 64, CONSUMER * HALF),)
    elif form.BLOCK_M == 64:
        found = (_piece_of(smem.ds, smem.k[CONSUMER], buffer, zeros[0], 0, 0),)
    else:
        first = _piece_of(smem.ds, smem.k[0], buffer, zeros[0], CONSUMER * 64, 0)
        found = (first, _piece_of(smem.ds, smem.k[1], buffer, zeros[1], CONSUMER * 64, 0))
    return found
