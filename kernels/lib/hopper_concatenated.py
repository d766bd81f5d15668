"""The fused Hopper backward's two groups as one partition of eight warps: concatenated form of kernels/sm90/bwd_fused.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import (
    await_kernel_before,
    fence_async_shared,
    mbarrier,
    named_barrier_arrive,
    named_barrier_arrive_if,
    named_barrier_sync,
    thread_barrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fa2tune.kernels.lib.hopper_blocks import block_at
from fa2tune.kernels.lib.hopper_dq_accumulation import DONE, add_from_registers, send_dq
from fa2tune.kernels.lib.hopper_fused import (
    BLOCK_N,
    EMPTY,
    GROUPS_AND_WARP,
    PIECE_GONE,
    V_EMPTY,
    Head,
    Turns,
    add_terms,
    as_block_of,
    probabilities,
    started_scores,
)
from fa2tune.kernels.lib.hopper_packed import store_packed
from fa2tune.kernels.lib.hopper_tiles import (
    first_number,
    first_query_head,
    laps_behind,
    laps_of,
    next_tile,
    query_heads,
    received_number,
)


@gluon.jit
def _over_queries(
    dk_acc, dv_acc, words, first_word, k_stage, tile, turns, tile_phase, smem, barriers, head, call, form,
    MASK: gl.constexpr,
):  # fmt: skip
    """The tile's query blocks of one head, see block_at, whose sums of dQ start at first_word: with MASK those under the mask,
    else those that see every key. k_stage: where this tile's K lies; tile_phase: of its v_ready."""
    dtype: gl.constexpr = smem.q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, form.BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, form.BLOCK_D, 16])
    # each group of four warps: half of the rows, or of 64 rows half of the columns
    dq_warps: gl.constexpr = [8, 1] if form.BLOCK_M == 128 else [4, 2]
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], dq_warps, [16, form.BLOCK_M * form.BLOCK_D // 128, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    zero_s = gl.zeros([BLOCK_N, form.BLOCK_M], gl.float32, s_layout)
    zero_dq = gl.zeros([form.BLOCK_M, form.BLOCK_D], gl.float32, dq_layout)
    k_tile = smem.k.index(k_stage).reshape([BLOCK_N, form.BLOCK_D])
    v_tile = smem.v.index(0).reshape([BLOCK_N, form.BLOCK_D])
    for j in range(tile.first if MASK else tile.full, tile.full if MASK else tile.end):
        turn = turns.done + j
        block = block_at(j, tile.first, tile.end, tile.rotation, form.LEFT_BOUNDED)
        stage = turn % form.STAGES
        phase = (turn // form.STAGES) & 1
        q_tile = smem.q.index(stage).reshape([form.BLOCK_M, form.BLOCK_D])
        do_tile = smem.do.index(stage).reshape([form.BLOCK_M, form.BLOCK_D])
        mbarrier.wait(barriers.q_ready.index(stage), phase)
        s_next = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        s_next = started_scores(s_next, smem.lse, stage, BLOCK_N, form.BLOCK_M, s_layout, form)
        if form.SCORED:  # as in bwd_fused.py
            s = warpgroup_mma_wait(0, deps=[s_next])
        else:
            mbarrier.wait(barriers.do_ready.index(stage), phase)
            dp_next = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            dp_next = add_terms(dp_next, smem.delta, stage, BLOCK_N, form.BLOCK_M, s_layout)
            s = warpgroup_mma_wait(2, deps=[s_next])  # dP and its terms
        p, slope = probabilities(
            s, block * form.BLOCK_M, head, smem.lse, stage, tile.sequence, call, BLOCK_N, MASK, s_layout, form
        )
        p_operand = gl.convert_layout(p.to(dtype), a_layout)
        if form.EXPONENTIALS_FIRST:
            # long since over: a branch that keeps ptxas from waiting for dP before the exponentials are computed
            mbarrier.wait(barriers.v_ready, tile_phase)
        if form.SCORED:
            mbarrier.wait(barriers.do_ready.index(stage), phase)
            dp_next = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            dp_next = add_terms(dp_next, smem.delta, stage, BLOCK_N, form.BLOCK_M, s_layout)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        if form.K_STAGES > 1:
            named_barrier_arrive_if(turn + 1 == turns.limit, V_EMPTY, GROUPS_AND_WARP)
        ds = (slope * dp).to(dtype)
        ds_operand = gl.convert_layout(ds, a_layout)
        # both groups read both halves; this buffer's last readers were done before the last barrier
        ds_tile = smem.ds.index(turn % 2)
        ds_tile.permute((1, 0)).store(ds)
        # issued here, not before dS: ptxas would pack P between the steps of dS, and the product wait for it
        dv_next = warpgroup_mma(p_operand, do_tile, dv_acc, is_async=True)
        fence_async_shared()
        thread_barrier()
        dq_next = warpgroup_mma(ds_tile, k_tile, zero_dq, use_acc=False, is_async=True)
        dk_next = warpgroup_mma(ds_operand, q_tile, dk_acc, is_async=True)
        dv_acc, p_operand, dq = warpgroup_mma_wait(1, deps=[dv_next, p_operand, dq_next])
        if form.REDUCE == "vector":
            add_from_registers(
                words, first_word + block * (form.BLOCK_M * form.BLOCK_D), dq, form.BLOCK_M, form.BLOCK_D
            )
        else:
            send_dq(dq, smem.dq, turn == turns.base, 0, form.BLOCK_M, form.BLOCK_D, GROUPS_AND_WARP)
        dk_acc, ds_operand = warpgroup_mma_wait(0, deps=[dk_next, ds_operand])
        named_barrier_arrive(EMPTY + stage, GROUPS_AND_WARP)
    return dk_acc, dv_acc


@gluon.jit
def consume_concatenated(words, dk, dv, smem, barriers, channel, tiles_done, call, form):
    """Both groups as one partition: dK and dV of each tile, and what it adds to every dQ. They synchronise twice a block."""
    seqlen_k = call.seqlen_k
    dtype: gl.constexpr = smem.q.dtype
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, form.BLOCK_D, 16])
    offset = seqlen_k - call.seqlen_q
    laps = laps_of(call, form)
    taken = first_number(call, form)
    lap = 0
    base = 0  # turns of the rings before this tile
    filled = 0  # tiles before this one that any query sees
    if form.EARLY_START:
        await_kernel_before()
    while lap < laps:
        tile = next_tile(lap, taken, channel, call, 8, form)
        if form.RAGGED:
            laps = laps_behind(lap, tile)
            seqlen_k = tile.keys
            offset = seqlen_k - tile.queries
        if tile.alive:
            n_blocks = tile.end - tile.first
            total = query_heads(call, form) * n_blocks
            dk_acc = gl.zeros([BLOCK_N, form.BLOCK_D], gl.float32, d_layout)
            dv_acc = gl.zeros([BLOCK_N, form.BLOCK_D], gl.float32, d_layout)
            k_stage = filled % form.K_STAGES
            mbarrier.wait(barriers.k_ready.index(k_stage), (filled // form.K_STAGES) & 1, pred=total > 0)
            mbarrier.wait(barriers.v_ready, filled & 1, pred=total > 0)
            # dK and dV of the tile before have left: what staged them is wanted again
            tma_store_wait(0)
            thread_barrier()
            for g in range(query_heads(call, form)):  # every query head that reads this key head
                turns = Turns(base + g * n_blocks - tile.first, base, base + total)
                head = Head(first_query_head(tile.h_kv, call, form) + g, tile.start_n, offset, seqlen_k)
                of_all = tile.b * call.heads_q + first_query_head(tile.h_kv, call, form) + g
                first_word = of_all.to(gl.int64) * call.rows_padded * form.BLOCK_D
                if form.RAGGED:
                    first_word += tile.own_row.to(gl.int64) * form.BLOCK_D
                for part in gl.static_range(2):  # queries under the mask, then those that see every key
                    dk_acc, dv_acc = _over_queries(
                        dk_acc, dv_acc, words, first_word, k_stage, tile, turns, filled & 1, smem, barriers, head, call, form,
                        part == 0,
                    )  # fmt: skip
            mbarrier.arrive(barriers.k_empty.index(k_stage), count=1, pred=total > 0)
            if form.SIGNALS:
                mbarrier.arrive(tiles_done.index(lap % DONE), count=1)
            stage = smem.out.index(0)
            if form.REDUCE == "tma" or form.RAGGED:  # what stages dQ is large enough
                stage = as_block_of(stage, dk)
            if form.REDUCE == "tma":
                if total > 0:  # the last piece has left it
                    named_barrier_sync(PIECE_GONE, GROUPS_AND_WARP)
            thread_barrier()  # both groups have read the last dS
            stage.reshape([BLOCK_N, form.BLOCK_D]).store(dv_acc.to(dtype))
            dk_stage = as_block_of(smem.ds, dk)
            dk_stage.reshape([BLOCK_N, form.BLOCK_D]).store((dk_acc * call.softmax_scale).to(dtype))
            fence_async_shared()
            if form.RAGGED:
                store_packed(dv, tile.first_k + seqlen_k, tile.h_kv, tile.start_n - seqlen_k, stage)
                store_packed(dk, tile.first_k + seqlen_k, tile.h_kv, tile.start_n - seqlen_k, dk_stage)
            else:
                tma_store(dv, [tile.b, tile.h_kv, tile.start_n, 0], stage)
                tma_store(dk, [tile.b, tile.h_kv, tile.start_n, 0], dk_stage)
            base += total
            filled += gl.where(total > 0, 1, 0)
        if form.DYNAMIC and not form.RAGGED:
            taken, laps = received_number(lap, channel, call, 8)
        lap += 1
    tma_store_wait(0)
