"""FlashAttention backward for Hopper, all five products in one kernel: a warp feeds Q and dO by TMA, two groups of four warps
own 64 keys each, apart (num_warps 4: a partition each, here) or concatenated (8: one, hopper_concatenated.py). dK and dV stay
in registers; dQ is summed over the key blocks by reductions into a float32 workspace."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.division import BY, Divisors, divisors, of_bands
from fa2tune.kernels.lib.hopper import (
    PACKED_ROWS,
    await_kernel_before,
    fence_async_shared,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    opaque,
    tma_store_wait,
    warpgroup_mma_wait,
)
from fa2tune.kernels.lib.hopper_blocks import block_at
from fa2tune.kernels.lib.hopper_concatenated import consume_concatenated
from fa2tune.kernels.lib.hopper_dq_accumulation import DONE, add, make_tiles_done, reduce_dq, send_dq
from fa2tune.kernels.lib.hopper_fused import (
    ALL_GROUPS,
    BLOCK_N,
    CHUNK,
    DS_READY,
    EMPTY,
    GROUP_AND_WARP,
    GROUPS,
    GROUPS_AND_WARP,
    KEYS,
    PIECE_GONE,
    TERM_COLUMNS,
    Call,
    Form,
    Head,
    Shared,
    Turns,
    add_terms,
    as_block_of,
    issue_dq,
    make_barriers,
    probabilities,
    produce,
    started_scores,
    zero_pieces,
)
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    alike,
    descriptors_of,
    product_layout,
    product_of_rows,
    products_and_pieces_done,
    products_done,
    products_done_with,
    put_in,
    put_parts,
    scaled,
    shared_for,
    tiles_in,
    zeros_for,
)
from fa2tune.kernels.lib.hopper_tiles import (
    first_number,
    first_query_head,
    laps_behind,
    laps_of,
    make_tile_channel,
    next_tile,
    query_heads,
    received_number,
)
from fa2tune.search_spaces.sm90 import bwd_finish, bwd_prepare
from fa2tune.search_spaces.sm90 import bwd_fused as space
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant, Workspaces

#: Of the warps that load and add.
WARP_REGISTERS = gl.constexpr(24)


@gluon.jit
def _over_queries(
    dk_acc, dv_acc, s, h_dq, row_dq, tile, turns, head, sums, words, smem, barriers, call, CONSUMER: gl.constexpr, form,
    MASK: gl.constexpr,
):  # fmt: skip
    """The tile's query blocks of one head, see block_at: with MASK those under the mask, else those that see every key.
    SCORES_AHEAD: s holds S^T of the first, terms added, and that of the next is computed beside this block's reduction."""
    dtype: gl.constexpr = smem.q[0].dtype
    s_layout: gl.constexpr = product_layout(form.BLOCK_M)
    DQ_COLUMNS: gl.constexpr = form.BLOCK_M * form.BLOCK_D // 128
    k_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(smem.q[0].shape[-1]), 2)
    v_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(smem.do[0].shape[-1]), 2)
    OF_ROWS: gl.constexpr = len(smem.q)  # products that make S^T or dK
    AHEAD: gl.constexpr = OF_ROWS if form.SCORED else OF_ROWS + 1  # with the terms of S^T
    zero_s = gl.zeros([KEYS, form.BLOCK_M], gl.float32, s_layout)
    zero_dq = zero_pieces(smem.k, CONSUMER, form)
    for j in range(tile.first if MASK else tile.full, tile.full if MASK else tile.end):
        turn = turns.done + j
        block = block_at(j, tile.first, tile.end, tile.rotation, form.LEFT_BOUNDED)
        # LLVM would keep the descriptors of all operands in registers through the loop, and ptxas spill them
        mine = opaque(turn * 0 + CONSUMER)
        k_tile = tiles_in(smem.k, mine)
        v_tile = tiles_in(smem.v, mine)
        stage = turn % form.STAGES
        phase = (turn // form.STAGES) & 1
        buffer = turn % form.DS_STAGES
        q_tile = tiles_in(smem.q, stage)
        do_tile = tiles_in(smem.do, stage)
        if not form.SCORES_AHEAD:
            mbarrier.wait(barriers.q_ready.index(stage), phase)
            s_next = product_of_rows(k_tile, q_tile, zero_s)
            s_next = started_scores(s_next, smem.lse, stage, KEYS, form.BLOCK_M, s_layout, form)
        if form.SCORED:  # with dP in flight beside what a term computes of S, ptxas would spill
            if not form.SCORES_AHEAD:
                s = warpgroup_mma_wait(0, deps=[s_next])
        else:
            mbarrier.wait(barriers.do_ready.index(stage), phase)
            dp_next = product_of_rows(v_tile, do_tile, zero_s)
            dp_next = add_terms(dp_next, smem.delta, stage, KEYS, form.BLOCK_M, s_layout)
            if not form.SCORES_AHEAD:
                s = warpgroup_mma_wait(len(smem.do) + 1, deps=[s_next])  # dP and its terms
        p, slope = probabilities(
            s, block * form.BLOCK_M, head, smem.lse, stage, tile.sequence, call, KEYS, MASK, s_layout, form
        )
        p_operand = gl.convert_layout(p.to(dtype), v_layout)
        if form.EXPONENTIALS_FIRST:
            # long since over: a branch that keeps ptxas from waiting for dP before the exponentials are computed
            mbarrier.wait(barriers.do_ready.index(stage), phase)
        if form.SCORED:
            mbarrier.wait(barriers.do_ready.index(stage), phase)
            dp_next = product_of_rows(v_tile, do_tile, zero_s)
            dp_next = add_terms(dp_next, smem.delta, stage, KEYS, form.BLOCK_M, s_layout)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        if form.DQ_BEHIND:
            dv_next = add_products(p_operand, do_tile, dv_acc)
        ds = (slope * dp).to(dtype)
        ds_operand = gl.convert_layout(ds, k_layout)
        if form.SCORES_AHEAD:
            dk_next = add_products(ds_operand, q_tile, dk_acc)
        if form.DQ_BEHIND:
            # the buffer held dS of three blocks ago, which both groups read two blocks ago
            before = gl.maximum(turn - 2, 0)
            mbarrier.wait(barriers.empty.index(before % form.STAGES), (before // form.STAGES) & 1, pred=turn >= 2)
        smem.ds.index(buffer * GROUPS + CONSUMER).store(ds)
        if not form.DQ_BEHIND:
            # not before dS: ptxas would pack P between the steps of dS, and the product wait for it
            dv_next = add_products(p_operand, do_tile, dv_acc)
        fence_async_shared()
        if form.DQ_BEHIND:
            mbarrier.arrive(barriers.ds_ready.index(buffer), count=1)
            # the first block multiplies whatever lies in the buffer; its reduction is aimed past the end
            before = gl.maximum(turn - 1, 0)
            mbarrier.wait(
                barriers.ds_ready.index(before % form.DS_STAGES), (before // form.DS_STAGES) & 1, pred=turn >= 1
            )
            dq_next = issue_dq(smem, (turn + form.DS_STAGES - 1) % form.DS_STAGES, zero_dq, CONSUMER, form)
        else:
            named_barrier_sync(DS_READY, ALL_GROUPS)
            dq_next = issue_dq(smem, buffer, zero_dq, CONSUMER, form)
            h_dq = head.h
            row_dq = block * form.BLOCK_M + tile.own_row
        if form.SCORES_AHEAD:
            # with dV still in flight ptxas would serialise every product (C7512)
            dv_acc, p_operand = products_done_with(dv_next, p_operand, OF_ROWS + GROUPS * len(zero_dq))
            # the last block multiplies whatever lies in the ring, a product that is not read
            following = turn + 1
            mbarrier.wait(
                barriers.q_ready.index(following % form.STAGES),
                (following // form.STAGES) & 1,
                pred=following < turns.limit,
            )
            ahead = tiles_in(smem.q, following % form.STAGES)
            s_next = product_of_rows(k_tile, ahead, zero_s)
            s_next = started_scores(s_next, smem.lse, following % form.STAGES, KEYS, form.BLOCK_M, s_layout, form)
            dk_acc, ds_operand, pieces = products_and_pieces_done(dk_next, ds_operand, dq_next, AHEAD)
            mbarrier.arrive(barriers.empty.index(stage), count=1)
        else:
            dk_next = add_products(ds_operand, q_tile, dk_acc)
            dv_acc, p_operand, pieces = products_and_pieces_done(dv_next, p_operand, dq_next, OF_ROWS)
        if form.REDUCE == "tma" and not form.DQ_BEHIND:
            send_dq(pieces[0], smem.dq, turn == turns.base, CONSUMER, 64, DQ_COLUMNS, GROUP_AND_WARP)
        elif form.DQ_BEHIND and form.REDUCE != "tma":
            if turn > turns.base:
                reduce_dq(sums, words, pieces, smem, tile.b, h_dq, row_dq, call, CONSUMER, form)
        else:
            reduce_dq(sums, words, pieces, smem, tile.b, h_dq, row_dq, call, CONSUMER, form)
        h_dq = head.h
        row_dq = block * form.BLOCK_M + tile.own_row
        if form.SCORES_AHEAD:
            s = warpgroup_mma_wait(0, deps=[s_next])
        else:
            dk_acc, ds_operand = products_done_with(dk_next, ds_operand, 0)
            if form.DQ_BEHIND:
                mbarrier.arrive(barriers.empty.index(stage), count=1)
            else:
                named_barrier_arrive(EMPTY + stage, GROUPS_AND_WARP)
    return dk_acc, dv_acc, s, h_dq, row_dq


@gluon.jit
def _consume(sums, words, dk, dv, smem, barriers, channel, tiles_done, call, CONSUMER: gl.constexpr, form):
    """Four warps: dK and dV of KEYS keys of each tile, and their piece of every dQ."""
    seqlen_k = call.seqlen_k
    s_layout: gl.constexpr = product_layout(form.BLOCK_M)
    offset = seqlen_k - call.seqlen_q
    laps = laps_of(call, form)
    k_tile = tiles_in(smem.k, CONSUMER)
    taken = first_number(call, form)
    lap = 0
    base = 0  # turns of the rings before this tile
    filled = 0  # tiles before this one that any query sees
    if form.EARLY_START:
        await_kernel_before()
    while lap < laps:
        tile = next_tile(lap, taken, channel, call, 4, form)
        if form.RAGGED:
            laps = laps_behind(lap, tile)
            seqlen_k = tile.keys
            offset = seqlen_k - tile.queries
        if tile.alive:
            key = tile.start_n + CONSUMER * KEYS
            n_blocks = tile.end - tile.first
            total = query_heads(call, form) * n_blocks
            dk_acc = zeros_for(smem.k, KEYS)
            dv_acc = zeros_for(smem.v, KEYS)
            s = gl.zeros([KEYS, form.BLOCK_M], gl.float32, s_layout)
            mbarrier.wait(barriers.k_ready.index(0), filled & 1, pred=total > 0)
            if form.SCORES_AHEAD:
                mbarrier.wait(barriers.q_ready.index(base % form.STAGES), (base // form.STAGES) & 1, pred=total > 0)
                s_next = product_of_rows(k_tile, tiles_in(smem.q, base % form.STAGES), s)
                s_next = started_scores(s_next, smem.lse, base % form.STAGES, KEYS, form.BLOCK_M, s_layout, form)
                s = warpgroup_mma_wait(0, deps=[s_next])
            mbarrier.wait(barriers.v_ready, filled & 1, pred=total > 0)
            h_dq = first_query_head(tile.h_kv, call, form)
            row_dq = call.rows_padded
            for g in range(query_heads(call, form)):  # every query head that reads this key head
                head = Head(first_query_head(tile.h_kv, call, form) + g, key, offset, seqlen_k)
                turns = Turns(base + g * n_blocks - tile.first, base, base + total)
                for part in gl.static_range(2):  # queries under the mask, then those that see every key
                    dk_acc, dv_acc, s, h_dq, row_dq = _over_queries(
                        dk_acc, dv_acc, s, h_dq, row_dq, tile, turns, head, sums, words, smem, barriers, call, CONSUMER, form,
                        part == 0,
                    )  # fmt: skip
            if form.DQ_BEHIND:
                final = gl.maximum(base + total - 1, 0)
                ready = barriers.ds_ready.index(final % form.DS_STAGES)
                mbarrier.wait(ready, (final // form.DS_STAGES) & 1, pred=total > 0)
                zero_dq = zero_pieces(smem.k, CONSUMER, form)
                pieces = products_done(issue_dq(smem, final % form.DS_STAGES, zero_dq, CONSUMER, form))
                if total > 0:
                    reduce_dq(sums, words, pieces, smem, tile.b, h_dq, row_dq, call, CONSUMER, form)
            mbarrier.arrive(barriers.k_empty.index(0), count=1, pred=total > 0)
            if form.SIGNALS:
                mbarrier.arrive(tiles_done.index(lap % DONE), count=1)
            if form.REDUCE == "tma" and not form.DQ_BEHIND:
                if total > 0:  # the last piece has left this memory
                    named_barrier_sync(PIECE_GONE + CONSUMER, GROUP_AND_WARP)
            tma_store_wait(0)
            entry = tile.b
            if form.RAGGED:  # as hopper_packed.py has it
                entry = tile.first_k + seqlen_k
                key = PACKED_ROWS + (key - seqlen_k)
            if form.REDUCE == "tma":  # what stages dQ is large enough
                stage = (as_block_of(smem.out[0].index(CONSUMER), dk[0]),)
                put_in(dv_acc, dv, entry, tile.h_kv, key, stage)
                tma_store_wait(0)
                put_in(scaled(dk_acc, call.softmax_scale), dk, entry, tile.h_kv, key, stage)
            elif not alike(smem.k, smem.v):
                put_parts(dv_acc, dv, entry, tile.h_kv, key, smem.out_v, CONSUMER)
                put_parts(scaled(dk_acc, call.softmax_scale), dk, entry, tile.h_kv, key, smem.out, CONSUMER)
            else:
                put_parts(dv_acc, dv, entry, tile.h_kv, key, smem.out, CONSUMER * form.OUT_STAGES)
                if form.OUT_STAGES == 1:
                    tma_store_wait(0)
                last = CONSUMER * form.OUT_STAGES + (form.OUT_STAGES - 1)
                put_parts(scaled(dk_acc, call.softmax_scale), dk, entry, tile.h_kv, key, smem.out, last)
            base += total
            filled += gl.where(total > 0, 1, 0)
        if form.DYNAMIC and not form.RAGGED:
            taken, laps = received_number(lap, channel, call, 4)
        lap += 1
    tma_store_wait(0)


@gluon.jit
def bwd_fused_hopper_kernel(
    q, k, v, do, terms, sums, words, dk, dv, qk_scale, softmax_scale, batch, heads_q, group, seqlen_q, seqlen_k,
    rows_padded, HEADS_PER_WAVE, counter, flags, window_left, window_right, cu_seqlens_q, cu_seqlens_k,
    q_rest, k_rest, v_rest, do_rest, dk_rest, dv_rest, score_first, score_second,
    key_heads, by_band, by_width, by_rest, by_heads, by_group,
    QUERY_BLOCKS: gl.constexpr, HIDE_QUERIES: gl.constexpr, LEFT_BOUNDED: gl.constexpr, RIGHT_BOUNDED: gl.constexpr,
    SCORED: gl.constexpr, APPLY: gl.constexpr, GRAD: gl.constexpr,
    RAGGED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, PART_D: gl.constexpr, REST_D: gl.constexpr,
    PART_DV: gl.constexpr, REST_DV: gl.constexpr,
    STAGES: gl.constexpr, REDUCE: gl.constexpr, SCORES_AHEAD: gl.constexpr, EXPONENTIALS_FIRST: gl.constexpr,
    DQ_BEHIND: gl.constexpr, PAIRS: gl.constexpr, DYNAMIC: gl.constexpr, BESIDE: gl.constexpr,
    FINISH_BESIDE: gl.constexpr, EARLY_START: gl.constexpr, IN_ORDER: gl.constexpr, LONGER_FIRST: gl.constexpr,
    QUERY_PARTS: gl.constexpr, K_STAGES: gl.constexpr, TILE_ROWS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q, do [B, Hq, Sq, D or DV], k, v [B, Hkv, Sk, D or DV] by descriptors, D <= BLOCK_D; columns behind PART_D or
    PART_DV, where REST_D or REST_DV is not 0, by descriptors of their own, q_rest, ..., dv_rest; terms [2 B, Hq,
    rows_padded, TERMS] bfloat16 by one: of lse, and B entries later of delta, as sm90/bwd_prepare.py leaves them -> dk, dv,
    and dS K added to a float32 workspace [B, Hq, rows_padded, BLOCK_D] of zeros: by the descriptor sums (REDUCE "tma"), or
    by the pointer words ("vector"), both in register order. counter [1] int32, only if DYNAMIC: 0, and then how many tiles
    were taken after each program's first. flags [B, Hq, rows_padded / CHUNK] int32, only if BESIDE: 1 once terms and zeros
    of these rows are there (sm90/bwd_prepare_overlapped.py); it may then start as soon as the kernel before it has set them
    to 0.
    Behind them, only if FINISH_BESIDE, [B, Hq]: 0, and in the end how many tiles have added to dQ of a head
    (sm90/bwd_finish.py). EARLY_START: it may start once all programs of the kernel before have, and so may the kernel
    behind it; before a thread reads terms or the counter, or adds to the workspace, it waits for the end of the kernel
    before. Of dense calls key_heads is then how many a batch entry has (QUERY_PARTS: parts of all of them), and by_band, ...,
    by_group those of ``Divisors``.
    IN_ORDER: the key tiles of a head add to a block of dQ one after the other, the last keys first, so sums have the same bits
    on every run. Behind counter[0] lies a turn for each 64 rows, [B, Hq, rows_padded / 64] int32: 0, then one more than the
    number of the key tile that has added last. QUERY_PARTS: each key head has one query head, whose blocks are in ``group``
    parts; dk, dv [B, Hkv * group, Sk, D or DV] are those of each part, which are to be added up.

    RAGGED: B is 1, batch the number of sequences, which lie one after the other from cu_seqlens_q[s] and cu_seqlens_k[s] on;
    rows of terms and sums are those of kernels/lib/hopper_packed.py. Keys behind the last sequence: dk = dv = 0.
    LONGER_FIRST: behind counter[0] lies the order of a head's tiles, as kernels/lib/packed_order.py has it; a thread that takes
    tiles waits for the kernel before, which writes it."""
    dtype: gl.constexpr = q.dtype
    DIVISORS: gl.constexpr = EARLY_START and not RAGGED
    if DIVISORS:
        heads_kv = key_heads
        by = Divisors((by_band,), (by_width,), (by_rest,), (by_heads,), (by_group,))
    else:
        heads_kv = heads_q // group
        if QUERY_PARTS:
            heads_kv = heads_q * group
        by = Divisors((), (), (), (), ())
    window = (window_left, window_right)
    CONCATENATED: gl.constexpr = TILE_ROWS == BLOCK_N
    PARTS: gl.constexpr = BLOCK_N // TILE_ROWS
    q, do = descriptors_of(q, q_rest), descriptors_of(do, do_rest)
    k, v = descriptors_of(k, k_rest), descriptors_of(v, v_rest)
    dk, dv = descriptors_of(dk, dk_rest), descriptors_of(dv, dv_rest)
    q_smem = shared_for(q, STAGES, BLOCK_M, PART_D, REST_D)
    do_smem = shared_for(do, STAGES, BLOCK_M, PART_DV, REST_DV)
    k_smem = shared_for(k, K_STAGES * PARTS, TILE_ROWS, PART_D, REST_D)
    v_smem = shared_for(v, PARTS, TILE_ROWS, PART_DV, REST_DV)
    # the columns that memory lacks TMA fills with zeros
    lse_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BLOCK_M, TERM_COLUMNS], terms.layout)
    delta_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BLOCK_M, TERM_COLUMNS], terms.layout)
    DS_STAGES: gl.constexpr = 3 if DQ_BEHIND else 2
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if CONCATENATED:
        ds_smem = gl.allocate_shared_memory(dtype, [DS_STAGES, BLOCK_M, BLOCK_N], ds_layout)
    else:
        ds_smem = gl.allocate_shared_memory(dtype, [DS_STAGES * GROUPS, KEYS, BLOCK_M], ds_layout)
    V_APART: gl.constexpr = PART_DV != PART_D or REST_DV != REST_D
    OUT_STAGES: gl.constexpr = 1 if REDUCE == "tma" or DQ_BEHIND or CONCATENATED or V_APART else 2
    out_v = ()
    if REDUCE == "tma":
        piece: gl.constexpr = [PARTS, 1, 1, sums.block_shape[2], sums.block_shape[3]]
        dq_smem = gl.allocate_shared_memory(gl.float32, piece, sums.layout)
        out_smem = (dq_smem,)
    else:
        dq_smem = lse_smem  # there is none
        out_smem = shared_for(k, PARTS * OUT_STAGES, TILE_ROWS, PART_D, REST_D)
        if V_APART:
            out_v = shared_for(v, PARTS, TILE_ROWS, PART_DV, REST_DV)
    ADDS: gl.constexpr = REDUCE == "tma" and not DQ_BEHIND
    barriers = make_barriers(STAGES, DS_STAGES, PARTS, K_STAGES, DQ_BEHIND)
    channel = make_tile_channel(PARTS + 1 if ADDS or FINISH_BESIDE else PARTS, DYNAMIC)
    SIGNALS: gl.constexpr = FINISH_BESIDE and not ADDS
    tiles_done = make_tiles_done(PARTS, SIGNALS)
    heads = heads_q if RAGGED else batch * heads_q
    counts = flags + heads * (rows_padded // CHUNK)
    if IN_ORDER:
        counts = counter + 1
    fence_async_shared()
    smem = Shared(q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, out_smem, out_v)
    call = Call(
        batch, heads_q, heads_kv, group, seqlen_q, seqlen_k, rows_padded, HEADS_PER_WAVE, window,
        (score_first, score_second), qk_scale, softmax_scale, by,
    )  # fmt: skip
    offsets = (cu_seqlens_q, cu_seqlens_k)
    form: gl.constexpr = Form(
        BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D, TILE_ROWS=TILE_ROWS, PARTS=PARTS, STAGES=STAGES, K_STAGES=K_STAGES,
        DS_STAGES=DS_STAGES, OUT_STAGES=OUT_STAGES, REDUCE=REDUCE, SCORES_AHEAD=SCORES_AHEAD,
        EXPONENTIALS_FIRST=EXPONENTIALS_FIRST, DQ_BEHIND=DQ_BEHIND, PAIRS=PAIRS, DYNAMIC=DYNAMIC, BESIDE=BESIDE,
        EARLY_START=EARLY_START, CONCATENATED=CONCATENATED, ADDS=ADDS, COUNTS=FINISH_BESIDE, SIGNALS=SIGNALS, RAGGED=RAGGED,
        IN_ORDER=IN_ORDER, LONGER_FIRST=LONGER_FIRST, QUERY_PARTS=QUERY_PARTS,
        QUERY_BLOCKS=QUERY_BLOCKS, HIDE_QUERIES=HIDE_QUERIES, LEFT_BOUNDED=LEFT_BOUNDED, RIGHT_BOUNDED=RIGHT_BOUNDED,
        SCORED=SCORED, APPLY=APPLY, GRAD=GRAD,
    )  # fmt: skip
    # constants stay constants only in a literal tuple, so each group's is written out
    if CONCATENATED:  # in one part
        whole = Shared(
            q_smem[0], k_smem[0], v_smem[0], do_smem[0], lse_smem, delta_smem, ds_smem, dq_smem, out_smem[0], ()
        )
        gl.warp_specialize([
            (consume_concatenated, (words, dk[0], dv[0], whole, barriers, channel, tiles_done, call, form)),
            (produce, (q, k, v, do, terms, flags, counter, smem, barriers, channel, call, offsets, form)),
            (add, (sums, counts, smem, channel, tiles_done, call, form)),
        ], [1, 1], [WARP_REGISTERS, WARP_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (sums, words, dk, dv, smem, barriers, channel, tiles_done, call, 0, form)),
            (_consume, (sums, words, dk, dv, smem, barriers, channel, tiles_done, call, 1, form)),
            (produce, (q, k, v, do, terms, flags, counter, smem, barriers, channel, call, offsets, form)),
            (add, (sums, counts, smem, channel, tiles_done, call, form)),
        ], [4, 1, 1], [CONSUMER_REGISTERS, WARP_REGISTERS, WARP_REGISTERS])  # fmt: skip


def _grid(problem: Problem, config: Config, sm_count: int, early: bool) -> int:
    tiles = problem.extent.tiles(1, problem.seqlen_k, space.GROUPS * space.KEYS)
    shares = triton.cdiv(tiles, 2 if config["PAIRS"] else 1) * problem.batch * problem.heads_kv
    own = sm_count - (space.helpers(problem, config, sm_count) if early else 0)
    return min(shares, own) if config["PERSISTENT"] else shares


def _counts(problem: Problem, config: Config) -> int:
    """Numbers that are 0 at first: tiles taken, and turns."""
    turns = problem.batch * problem.heads_q * (space.padded_rows(problem) // space.TURN_ROWS)
    return int(config["DYNAMIC"]) + (turns if config.get("IN_ORDER") else 0)


def _workspaces(problem: Problem, config: Config) -> Workspaces:
    rows = (problem.batch, problem.heads_q, space.padded_rows(problem))
    terms = ((2 * problem.batch, *rows[1:], space.TERMS), "bf16")
    words = ((*rows, space.columns(problem.specialization, config)), "fp32")
    order = problem.extent.tiles(1, problem.seqlen_k, space.GROUPS * space.KEYS) if config.get("LONGER_FIRST") else 0
    counter = (
        ((_counts(problem, config) + order,), "i32") if config["DYNAMIC"] else "words"
    )  # no allocation where nothing counts
    chunks = rows[2] // space.CHUNK
    counts = (chunks + 2 if problem.extent.ragged else 1) if config["FINISH_BESIDE"] else 0
    flags = ((*rows[:2], chunks + counts), "i32") if config["BESIDE"] else "words"
    return {"terms": terms, "words": words, "sums": "words", "counter": counter, "flags": flags}


def _scalars(problem: Problem, config: Config, early: bool) -> dict[str, int]:
    if config["FINISH_BESIDE"]:
        part, whole = space.share_of_helpers(problem)
    else:
        seen = problem.keys_seen if problem.mask.measured else space.keys_worked(problem)
        part, whole = space.ROWS_WORTH, round(seen)
    return {
        "rows_padded": space.padded_rows(problem), "counts": _counts(problem, config), "rows_worth": part,
        "keys_seen": max(1, whole) if early else 1,  # beside nothing, all multiprocessors prepare
        "heads_at_once": config["HEADS_PER_WAVE"], **_divisors(problem, config),
    }  # fmt: skip


def _divisors(problem: Problem, config: Config) -> dict[str, int]:
    """Of this kernel and of those around it. QUERY_PARTS: the problem has a key head for each part of every query head."""
    if not config.get("EARLY_START") or problem.extent.ragged:
        return dict.fromkeys(("key_heads", *BY, *bwd_prepare.BY, *bwd_finish.BY), 0)
    tiles = triton.cdiv(problem.seqlen_k, space.GROUPS * space.KEYS)
    shares = triton.cdiv(tiles, 2 if config["PAIRS"] else 1)
    group = problem.heads_kv // problem.heads_q if config.get("QUERY_PARTS") else problem.group
    prepared, finished = space.padded_rows(problem) // bwd_prepare.ROWS, triton.cdiv(problem.seqlen_q, bwd_finish.ROWS)
    return {
        "key_heads": problem.heads_kv,
        **of_bands(shares, config["HEADS_PER_WAVE"], problem.batch, problem.heads_kv, group),
        **divisors(bwd_prepare.BY, prepared, problem.heads_q),
        **divisors(bwd_finish.BY, finished, problem.heads_q),
    }


VARIANT = Variant(
    serves="bwd_fused",
    kernel=bwd_fused_hopper_kernel,
    space=space.SPACE,
    tensors={"q": "", "k": "", "v": "", "do": "", "terms": "bf16", "sums": "fp32", "words": "fp32", "dk": "", "dv": "",
             "counter": "i32", "flags": "i32", "cu_seqlens_q": "i32", "cu_seqlens_k": "i32",
             "q_rest": "", "k_rest": "", "v_rest": "", "do_rest": "", "dk_rest": "", "dv_rest": ""},
    descriptors={"q": ("BLOCK_M", "PART_D"), "do": ("BLOCK_M", "PART_DV"), "k": ("TILE_ROWS", "PART_D"),
                 "v": ("TILE_ROWS", "PART_DV"), "dk": ("TILE_ROWS", "PART_D"), "dv": ("TILE_ROWS", "PART_DV"),
                 "terms": ("BLOCK_M", space.TERM_COLUMNS), "sums": ("PIECE_ROWS", "BLOCK_D"),
                 "q_rest": ("BLOCK_M", "REST_D"), "do_rest": ("BLOCK_M", "REST_DV"), "k_rest": ("TILE_ROWS", "REST_D"),
                 "v_rest": ("TILE_ROWS", "REST_DV"), "dk_rest": ("TILE_ROWS", "REST_D"), "dv_rest": ("TILE_ROWS", "REST_DV")},
    rest_of={"q_rest": "q", "k_rest": "k", "v_rest": "v", "do_rest": "do", "dk_rest": "dk", "dv_rest": "dv"},
    grid=_grid,
    grid_dimensions=("PERSISTENT",),
    constants=space.derived,
    used=space.used,
    min_arch=90, max_arch=90,
    before=("sm90/bwd_prepare", "sm90/bwd_prepare_overlapped"),
    after=("sm90/bwd_finish",),
    surrounded=lambda config, name: name != ("sm90/bwd_prepare" if config["BESIDE"] else "sm90/bwd_prepare_overlapped"),
    early=lambda _problem, config, _sm_count: bool(config["BESIDE"] or config.get("EARLY_START")),
    passes_on=lambda spec, config: {
        "SUM_COLUMNS": space.columns(spec, config), "PERMUTED_COLUMNS": space.permuted_columns(spec, config),
        "FINISH_BESIDE": config["FINISH_BESIDE"],
        **({"USED_COLUMNS": sum(space.parts(spec, config))} if config.get("IN_PARTS") else {}),
        **({"EARLY_START": True} if config.get("EARLY_START") else {})},
    passes_before=lambda spec, config: {name: True for name in ("IN_ORDER", "LONGER_FIRST") if config.get(name)},
    workspaces=_workspaces,
    scalars=_scalars,
    fitted=space.fitted,
    suited=space.suited,
)  # fmt: skip
