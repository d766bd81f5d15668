"""The fused Hopper backward's dQ: from registers or shared memory into its sums, and which heads have all their tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import (
    await_kernel_before,
    fence_async_shared,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    thread_barrier,
    tma_reduce_add,
    tma_store_wait,
)
from fa2tune.kernels.lib.hopper_blocks import block_at, query_blocks
from fa2tune.kernels.lib.hopper_fused import (
    BLOCK_N,
    CHUNK,
    GROUP_AND_WARP,
    GROUPS,
    GROUPS_AND_WARP,
    PIECE_GONE,
    PIECE_READY,
    do_once,
)
from fa2tune.kernels.lib.hopper_tiles import (
    first_number,
    first_query_head,
    laps_behind,
    laps_of,
    next_tile,
    query_heads,
    received_number,
)
from fa2tune.kernels.lib.warps import WARP
from fa2tune.search_spaces.sm90 import bwd_fused as space

#: Tiles that may be done before they are counted, and one: taking is never more than two ahead of counting.
DONE = gl.constexpr(4)


@gluon.jit
def make_tiles_done(PARTS: gl.constexpr, SIGNALS: gl.constexpr):
    """How PARTS partitions say that they have added all of a tile's dQ: DONE mbarriers in turn; () without SIGNALS."""
    if SIGNALS:
        done = gl.allocate_shared_memory(gl.int64, [DONE, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(DONE):
            mbarrier.init(done.index(i), count=PARTS)
        return done
    else:
        return ()


@gluon.jit
def _quads(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A wgmma accumulator as four tensors: the four registers that a thread holds of each 8 columns. Moves nothing."""
    y0, y1 = gl.split(x.reshape([ROWS // 16, 2, 8, COLUMNS // 8, 4, 2]))
    a0, a2 = gl.split(y0.permute((0, 2, 3, 4, 1)))
    a1, a3 = gl.split(y1.permute((0, 2, 3, 4, 1)))
    return a0, a1, a2, a3


_VECTOR_REDUCTION = gl.constexpr("red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;")


@gluon.jit
def add_piece(sums, dq_smem, b, h, row, CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr):
    """A group's piece of dQ from shared memory to its sums: of as many words as half of the block's rows."""
    tma_reduce_add(sums, [b, h, row + CONSUMER * (BLOCK_M // 2), 0], dq_smem.index(CONSUMER))


#: Rows and columns of a piece of dQ whose sums lie together, in register order.
PIECE = gl.constexpr(space.PIECE)


@gluon.jit
def add_from_registers(words, first_word, dq, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    """dQ of a block, added to its sums in register order: a thread's four values of each 8 columns are 16 bytes, a warp's lie
    side by side."""
    r = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, dq.type.layout))
    c = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, dq.type.layout))
    of_rows = r // PIECE * (PIECE * BLOCK_D) + r % PIECE // 16 * 128 + r % 8 * 16 + r // 8 % 2 * 2
    of_columns = c // PIECE * (PIECE * PIECE) + c % PIECE // 8 * 512 + c % 8 // 2 * 4 + c % 2
    o0, _, _, _ = _quads(of_rows[:, None] + of_columns[None, :], BLOCK_M, BLOCK_D)
    v0, v1, v2, v3 = _quads(dq, BLOCK_M, BLOCK_D)
    gl.inline_asm_elementwise(
        _VECTOR_REDUCTION, "=r,l,f,f,f,f", [(words + first_word + o0).to(gl.int64), v0, v1, v2, v3], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def stage_dq(dq, dq_smem, number, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """dQ of a block, or a group's piece of it, to shared memory in the order of add_from_registers, where a warp stores 512
    bytes side by side. In row order two of its threads at a time would want the same bank."""
    WIDTH: gl.constexpr = COLUMNS if COLUMNS < PIECE else PIECE
    parts = dq.reshape([ROWS // PIECE, PIECE // 16, 2, 8, COLUMNS // WIDTH, WIDTH // 8, 4, 2])
    staged = parts.permute((0, 4, 5, 1, 3, 6, 2, 7)).reshape([dq_smem.shape[3], dq_smem.shape[4]])
    dq_smem.index(number).reshape([dq_smem.shape[3], dq_smem.shape[4]]).store(staged)
    fence_async_shared()


@gluon.jit
def reduce_dq(sums, words, pieces, smem, b, h, row, call, CONSUMER: gl.constexpr, form):
    """This group's pieces of dQ, added to their sums by the group itself. What lies beside a head dim in two parts stays 0."""
    COLUMNS: gl.constexpr = form.BLOCK_M * form.BLOCK_D // 128
    if form.REDUCE == "tma":
        tma_store_wait(0)
        stage_dq(pieces[0], smem.dq, CONSUMER, 64, COLUMNS)
        add_piece(sums, smem.dq, b, h, row, CONSUMER, form.BLOCK_M)
    else:
        first = ((b * call.heads_q + h).to(gl.int64) * call.rows_padded + row) * form.BLOCK_D + CONSUMER * (
            64 * COLUMNS
        )
        add_from_registers(words, first, pieces[0], 64, pieces[0].shape[1])
        if len(pieces) > 1:
            add_from_registers(words, first + 64 * pieces[0].shape[1], pieces[1], 64, pieces[1].shape[1])


@gluon.jit
def send_dq(tile, dq_smem, new_tile, number, ROWS: gl.constexpr, COLUMNS: gl.constexpr, THREADS: gl.constexpr):
    """dQ of a block, or a group's piece of it, to the warp that adds it. number: of its group's barriers. (Concatenated
    groups have waited for dV of the tile before at the tile's start.)"""
    if new_tile:  # dK of the tile before may still be on its way out of this memory
        tma_store_wait(0)
        thread_barrier()
    else:
        named_barrier_sync(PIECE_GONE + number, THREADS)
    stage_dq(tile, dq_smem, number, ROWS, COLUMNS)
    named_barrier_arrive(PIECE_READY + number, THREADS)


_START_FINISH = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")
#: This warp's stores and reductions by TMA are done, not only read.
_ALL_ADDED = gl.constexpr("cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.b32 $0, 0;")
#: Behind a fence: what this thread has seen done, by any thread, is visible to each that sees the count.
_COUNT = gl.constexpr(
    "{.reg .pred p; setp.ne.s32 p, $2, 0; @p fence.acq_rel.gpu; @p red.relaxed.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0;}"
)


@gluon.jit
def _count_tile(counts, first_head, group, step, RAGGED: gl.constexpr):
    """One warp, whose tile has added to dQ of a group's heads. RAGGED: their counts are ``step`` apart."""
    lane = gl.arange(0, WARP, layout=gl.BlockedLayout([1], [WARP], [1], [0]))
    for i in range(0, group, WARP):
        mine = gl.where(i + lane < group, 1, 0)
        at = counts + first_head + i + lane
        if RAGGED:
            at = counts + (first_head + i + lane) * step
        gl.inline_asm_elementwise(_COUNT, "=r,l,r", [at.to(gl.int64), mine], dtype=gl.int32, is_pure=False, pack=1)


#: All lanes go by what one of them has seen, so they stay together.
_TURN = gl.constexpr(
    "{.reg .b32 seen; ld.acquire.gpu.global.b32 seen, [$1]; shfl.sync.idx.b32 $0, seen, 0, 31, 0xffffffff;}"
)
#: One lane stores a turn: one that is late cannot store it after the tile below has stored its own.
_NEXT = gl.constexpr(
    "{.reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; @p st.release.gpu.global.b32 [$1], $2; "
    "mov.b32 $0, 0;}"
)
#: Once all lanes have seen it: what was seen added before this, adding follows.
_BEHIND = gl.constexpr("bar.warp.sync 0xffffffff; fence.proxy.async; mov.b32 $0, 0;")


@gluon.jit
def _turn_of(h, block, tile, call, form):
    """Which turn is that of a block's dQ."""
    rows: gl.constexpr = space.TURN_ROWS
    head = (tile.b * call.heads_kv * call.group + h) * (call.rows_padded // rows)
    return head + block * (form.BLOCK_M // rows)


@gluon.jit
def _first_of_above(tile, call, form):
    """The first query block that sees the key tile above this one. That tile adds to it, and to all behind it, first."""
    above = tile.start_n + BLOCK_N
    first, _full, _end, _rotation = query_blocks(
        above, call.seqlen_q, call.seqlen_k, call.window, form.BLOCK_M, BLOCK_N, form.QUERY_BLOCKS, form.LEFT_BOUNDED
    )
    return gl.where(above < call.seqlen_k, first, tile.end)


@gluon.jit
def _look(turns, turn):
    """What a turn is now."""
    return gl.inline_asm_elementwise(
        _TURN, "=r,l", [(turns + turn).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _look_at(i, total, n_blocks, first_of_above, due, turns, tile, call, form):
    """What the turn of a tile's i-th block is now: ``due``, if none has to add before."""
    seen = due
    if i < total:
        place = tile.first + i % n_blocks
        block = block_at(place, tile.first, tile.end, tile.rotation, form.LEFT_BOUNDED)
        if block >= first_of_above:
            h = tile.h_kv * call.group + i // n_blocks
            seen = _look(turns, _turn_of(h, block, tile, call, form))
    return seen


@gluon.jit
def _await_turn(seen, due, turns, turn):
    """Until the key tile above has added, whose number is one more: until what is seen of a turn is due."""
    while seen != due:
        seen = _look(turns, turn)
    do_once(_BEHIND)


@gluon.jit
def _signal_turn(turns, turn, number):
    """What this warp has added is there; the key tile below may add."""
    do_once(_ALL_ADDED)
    gl.inline_asm_elementwise(
        _NEXT, "=r,l,r", [(turns + turn).to(gl.int64), number + 1], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def add(sums, counts, smem, channel, tiles_done, call, form):
    """One warp. ADDS: dQ of each block (CONCATENATED), or each group's piece of it, from shared memory to its sums; without it
    others add, from registers. COUNTS: of every query head, counted over the batch, how many tiles have been added:
    sm90/bwd_finish may start, and waits until all are. EARLY_START: it may start, and waits for this kernel's end; without
    any of these there is nothing to do. IN_ORDER: counts are the turns of blocks (kernels/sm90/bwd_fused.py). RAGGED: counts
    [Hq, rows_padded / CHUNK], of each sequence that where its rows start; behind them how many programs are done, and 1 once
    all are.

    IN_ORDER: the next block's turn is looked at while TMA still reads this block's addition. No tile waits for ever: each waits
    for the one above only, which was taken before it and never waits for one below."""
    laps = laps_of(call, form)
    if form.COUNTS or form.EARLY_START:
        do_once(_START_FINISH)
    if form.EARLY_START and form.ADDS:
        await_kernel_before()
    if form.ADDS or form.COUNTS:
        taken = first_number(call, form)
        lap = 0
        while lap < laps:
            tile = next_tile(lap, taken, channel, call, 1, form)
            if form.RAGGED:
                laps = laps_behind(lap, tile)
            if form.ADDS:
                n_blocks = tile.end - tile.first
                total = gl.where(tile.alive, query_heads(call, form) * n_blocks, 0)
                number = tile.start_n // BLOCK_N
                if form.IN_ORDER:
                    first_of_above = _first_of_above(tile, call, form)
                    seen = _look_at(0, total, n_blocks, first_of_above, number + 2, counts, tile, call, form)
                for i in range(total):
                    h = first_query_head(tile.h_kv, call, form) + i // n_blocks
                    place = tile.first + i % n_blocks
                    block = block_at(place, tile.first, tile.end, tile.rotation, form.LEFT_BOUNDED)
                    row = block * form.BLOCK_M + tile.own_row
                    if form.IN_ORDER:
                        turn = _turn_of(h, block, tile, call, form)
                        _await_turn(seen, number + 2, counts, turn)
                    if form.CONCATENATED:
                        named_barrier_sync(PIECE_READY, GROUPS_AND_WARP)
                        tma_reduce_add(sums, [tile.b, h, row, 0], smem.dq.index(0))
                        if form.IN_ORDER:
                            seen = _look_at(
                                i + 1, total, n_blocks, first_of_above, number + 2, counts, tile, call, form
                            )
                        tma_store_wait(0)
                        named_barrier_arrive(PIECE_GONE, GROUPS_AND_WARP)
                    else:
                        for c in gl.static_range(GROUPS):
                            named_barrier_sync(PIECE_READY + c, GROUP_AND_WARP)
                            add_piece(sums, smem.dq, tile.b, h, row, c, form.BLOCK_M)
                            if form.IN_ORDER and c == GROUPS - 1:
                                seen = _look_at(
                                    i + 1, total, n_blocks, first_of_above, number + 2, counts, tile, call, form
                                )
                            tma_store_wait(0)
                            named_barrier_arrive(PIECE_GONE + c, GROUP_AND_WARP)
                    if form.IN_ORDER:
                        _signal_turn(counts, turn, number)
            if form.COUNTS:
                if tile.alive:
                    if form.ADDS:
                        do_once(_ALL_ADDED)
                    else:
                        mbarrier.wait(tiles_done.index(lap % DONE), (lap // DONE) & 1)
                    if form.RAGGED:
                        step = call.rows_padded // CHUNK
                        _count_tile(counts + tile.own_row // CHUNK, tile.h_kv * call.group, call.group, step, True)
                    else:
                        _count_tile(counts, (tile.b * call.heads_kv + tile.h_kv) * call.group, call.group, 0, False)
            if form.DYNAMIC and not form.RAGGED:
                taken, laps = received_number(lap, channel, call, 1)
            lap += 1
        if form.COUNTS and form.RAGGED:
            done = counts + call.heads_kv * call.group * (call.rows_padded // CHUNK)
            if gl.atomic_add(done, 1, sem="acq_rel") == gl.num_programs(0) - 1:
                gl.atomic_add(done + 1, 1, sem="release")
