"""FlashAttention-2 backward over key tiles for Hopper: dK and dV, half of the deterministic strategy. A warp feeds Q and dO by
TMA to two groups of four warps. Either each owns 64 keys; or one owns dV and the other dK, so that 64 keys of head dim 256 fit:
the first makes P and hands it on."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import (
    fence_async_shared,
    mbarrier,
    opaque,
    thread_barrier,
    tma_store_wait,
    warpgroup_mma_wait,
)
from fa2tune.kernels.lib.hopper_blocks import block_at, query_blocks
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    alike,
    descriptors_of,
    expect_tiles,
    load_parts,
    product_layout,
    product_of_rows,
    products_done_with,
    put_parts,
    scaled,
    shared_for,
    tiles_in,
    zeros_for,
)
from fa2tune.search_spaces.lib.hopper import part_dims
from fa2tune.search_spaces.sm90.bwd_dkdv import REGISTERS, SPACE, fitted
from fa2tune.spec.variant import Variant

LOG2E = gl.constexpr(1.4426950408889634)
#: Keys of a group that owns keys: the rows of one wgmma.
KEYS = gl.constexpr(64)


@gluon.jit
def _tile(tiles, heads, heads_per_wave):
    """(key tile, head) of this program; as tile_and_head of kernels/lib/common.py. Causal: the first tiles are the longest."""
    pid = gl.program_id(0)
    band = pid // (tiles * heads_per_wave)
    first = band * heads_per_wave
    width = gl.minimum(heads - first, heads_per_wave)  # the last band may be narrower
    inside = pid - band * (tiles * heads_per_wave)
    return inside // width, first + inside % width


@gluon.jit
def _produce(
    q, k, v, do, q_smem, k_smem, v_smem, do_smem, k_ready, v_ready, q_ready, q_empty, do_ready, do_empty,
    b, h_kv, group, start_n, first, end, rotation,
    LEFT_BOUNDED: gl.constexpr, BLOCK_M: gl.constexpr, ROWS_N: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: K and V once, then Q and dO through a ring, for every query head of the group."""
    n_blocks = end - first
    for turn in range(group * n_blocks):
        h = h_kv * group + turn // n_blocks
        row = block_at(first + turn % n_blocks, first, end, rotation, LEFT_BOUNDED) * BLOCK_M
        stage = turn % STAGES
        phase = (turn // STAGES) & 1
        if turn == 0:
            expect_tiles(k, k_ready, TILES)
            for c in gl.static_range(TILES):
                load_parts(k, b, h_kv, start_n + c * ROWS_N, k_ready, k_smem, c)
        mbarrier.wait(q_empty.index(stage), phase ^ 1)
        expect_tiles(q, q_ready.index(stage), 1)
        load_parts(q, b, h, row, q_ready.index(stage), q_smem, stage)
        if turn == 0:
            expect_tiles(v, v_ready, TILES)
            for c in gl.static_range(TILES):
                load_parts(v, b, h_kv, start_n + c * ROWS_N, v_ready, v_smem, c)
        mbarrier.wait(do_empty.index(stage), phase ^ 1)
        expect_tiles(do, do_ready.index(stage), 1)
        load_parts(do, b, h, row, do_ready.index(stage), do_smem, stage)


@gluon.jit
def _row_words(
    words, j, first, end, rotation, alive, seqlen_q,
    other: gl.constexpr, LEFT_BOUNDED: gl.constexpr, BLOCK_M: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """lse or delta of the query block at place j of a head (block_at), [M]; of j = end: at ``first`` of the next head. words:
    of the head. One value a thread, which then goes through shared memory: loaded as the scores want them, 16 a thread and
    block, these words took 7 % of the time."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    wraps = j == end
    block = block_at(gl.where(wraps, first, j), first, end, rotation, LEFT_BOUNDED)
    rows = block * BLOCK_M + gl.arange(0, BLOCK_M, layout=layout)
    words += gl.where(wraps, seqlen_q, 0)
    return gl.load(words + rows, mask=(rows < seqlen_q) & alive, other=other)


@gluon.jit
def _dv_over_queries(
    acc, s, lse_words, begin, end, done, total, first, head_end, rotation, lse, k_smem, q_smem, do_smem, p_smem, q_ready,
    q_empty, do_ready, do_empty, p_ready, p_empty, key, offset, seqlen_q, seqlen_k, window, qk_scale,
    HIDE_QUERIES: gl.constexpr, LEFT_BOUNDED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, P_STAGES: gl.constexpr, MASK: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Query blocks at places [begin, end) of one head into dV. s and lse_words: S^T and lse of the first; lse is +inf past the
    end, so that p = exp2(s - inf) = 0. done: turns of the ring before place 0."""
    dtype: gl.constexpr = q_smem[0].dtype
    s_layout: gl.constexpr = product_layout(BLOCK_M)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(do_smem[0].shape[-1]), 2)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, s_layout)
    for j in range(begin, end):
        turn = done + j
        later = turn + 1
        k_tile = tiles_in(k_smem, opaque(j * 0))
        shift = gl.convert_layout(lse_words * -LOG2E, gl.SliceLayout(0, s_layout))
        lse_words = _row_words(
            lse, j + 1, first, head_end, rotation, later < total, seqlen_q, float("inf"), LEFT_BOUNDED, BLOCK_M, num_warps,
        )  # fmt: skip
        p = gl.exp2(gl.fma(s, qk_scale, shift[None, :]))
        if MASK:
            row = block_at(j, first, head_end, rotation, LEFT_BOUNDED) * BLOCK_M
            keys = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, s_layout))
            p = HIDE_QUERIES(p, keys, row, offset, seqlen_k, window, s_layout)
        buffer = turn % P_STAGES
        mbarrier.wait(p_empty.index(buffer), ((turn // P_STAGES) & 1) ^ 1)
        p_smem.index(buffer).store(p.to(dtype))
        thread_barrier()
        mbarrier.arrive(p_ready.index(buffer), count=1)
        operand = gl.convert_layout(p.to(dtype), a_layout)
        stage = turn % STAGES
        mbarrier.wait(do_ready.index(stage), (turn // STAGES) & 1)
        acc_next = add_products(operand, tiles_in(do_smem, stage), acc)
        # S^T of the next block; the last one multiplies whatever lies in the ring, a product that is not read
        ahead = later % STAGES
        q_tile = tiles_in(q_smem, ahead)
        mbarrier.wait(q_ready.index(ahead), (later // STAGES) & 1, pred=later < total)
        s_next = product_of_rows(k_tile, q_tile, zero)
        acc, operand = products_done_with(acc_next, operand, len(k_smem))
        mbarrier.arrive(do_empty.index(stage), count=1)
        s = warpgroup_mma_wait(0, deps=[s_next])
        mbarrier.arrive(q_empty.index(ahead), count=1)
    return acc, s, lse_words


@gluon.jit
def _consume_dv(
    dv, lse, k_smem, v_smem, q_smem, do_smem, p_smem, k_ready, v_ready, q_ready, q_empty, do_ready, do_empty,
    p_ready, p_empty, done, b, h_kv, heads_q, group, start_n, first, full, end, rotation, seqlen_q, seqlen_k, window, qk_scale,
    HIDE_QUERIES: gl.constexpr, LEFT_BOUNDED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, P_STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Four warps: S^T = K Q^T, P^T, and dV += P^T dO."""
    s_layout: gl.constexpr = product_layout(BLOCK_M)
    offset = seqlen_k - seqlen_q
    n_blocks = end - first
    total = group * n_blocks
    acc = zeros_for(v_smem, BLOCK_N)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, s_layout)
    lse += (b.to(gl.int64) * heads_q + h_kv * group) * seqlen_q
    lse_words = _row_words(
        lse, first, first, end, rotation, total > 0, seqlen_q, float("inf"), LEFT_BOUNDED, BLOCK_M, num_warps
    )
    mbarrier.wait(k_ready, 0, pred=total > 0)
    k_tile = tiles_in(k_smem, 0)
    # the first S^T; with no block at all, of whatever lies there, and not read
    q_tile = tiles_in(q_smem, 0)
    mbarrier.wait(q_ready.index(0), 0, pred=total > 0)
    s_next = product_of_rows(k_tile, q_tile, zero)
    s = warpgroup_mma_wait(0, deps=[s_next])
    mbarrier.arrive(q_empty.index(0), count=1)
    for g in range(group):  # every query head that reads this key head
        turns = g * n_blocks - first
        acc, s, lse_words = _dv_over_queries(
            acc, s, lse_words, first, full, turns, total, first, end, rotation, lse, k_smem, q_smem, do_smem, p_smem, q_ready,
            q_empty, do_ready, do_empty, p_ready, p_empty, start_n, offset, seqlen_q, seqlen_k, window, qk_scale,
            HIDE_QUERIES, LEFT_BOUNDED, BLOCK_M, BLOCK_N, STAGES, P_STAGES, True, num_warps,
        )  # fmt: skip
        acc, s, lse_words = _dv_over_queries(
            acc, s, lse_words, full, end, turns, total, first, end, rotation, lse, k_smem, q_smem, do_smem, p_smem, q_ready,
            q_empty, do_ready, do_empty, p_ready, p_empty, start_n, offset, seqlen_q, seqlen_k, window, qk_scale,
            HIDE_QUERIES, LEFT_BOUNDED, BLOCK_M, BLOCK_N, STAGES, P_STAGES, False, num_warps,
        )  # fmt: skip
        lse += seqlen_q
    # K's shared memory is read by this group alone; where dV is not as wide, V's, once the other group is done with it
    slot = k_smem
    if not alike(k_smem, v_smem):
        mbarrier.arrive(done, count=1)
        mbarrier.wait(done, 0)
        slot = v_smem
    put_parts(acc, dv, b, h_kv, start_n, slot, 0)
    tma_store_wait(0)


@gluon.jit
def _dk_over_queries(
    acc, dp, delta_words, first, end, rotation, done, total, delta, v_smem, q_smem, do_smem, p_smem, q_ready, q_empty, do_ready,
    do_empty, p_ready, p_empty, seqlen_q,
    LEFT_BOUNDED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, P_STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Query blocks at places [first, end) of one head into dK. dp and delta_words: dP^T and delta of the first. done: turns of
    the ring before place 0."""
    dtype: gl.constexpr = q_smem[0].dtype
    s_layout: gl.constexpr = product_layout(BLOCK_M)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(q_smem[0].shape[-1]), 2)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, s_layout)
    for j in range(first, end):
        turn = done + j
        later = turn + 1
        v_tile = tiles_in(v_smem, opaque(j * 0))
        shift = gl.convert_layout(delta_words, gl.SliceLayout(0, s_layout))
        delta_words = _row_words(
            delta, j + 1, first, end, rotation, later < total, seqlen_q, 0.0, LEFT_BOUNDED, BLOCK_M, num_warps
        )
        buffer = turn % P_STAGES
        mbarrier.wait(p_ready.index(buffer), (turn // P_STAGES) & 1)
        p = p_smem.index(buffer).load(s_layout).to(gl.float32)
        ds = gl.convert_layout((p * (dp - shift[None, :])).to(dtype), a_layout)
        thread_barrier()
        mbarrier.arrive(p_empty.index(buffer), count=1)
        stage = turn % STAGES
        mbarrier.wait(q_ready.index(stage), (turn // STAGES) & 1)  # over already: P was made of it
        acc_next = add_products(ds, tiles_in(q_smem, stage), acc)
        # dP^T of the next block; the last one multiplies whatever lies in the ring, a product that is not read
        ahead = later % STAGES
        do_tile = tiles_in(do_smem, ahead)
        mbarrier.wait(do_ready.index(ahead), (later // STAGES) & 1, pred=later < total)
        dp_next = product_of_rows(v_tile, do_tile, zero)
        acc, ds = products_done_with(acc_next, ds, len(v_smem))
        mbarrier.arrive(q_empty.index(stage), count=1)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        mbarrier.arrive(do_empty.index(ahead), count=1)
    return acc, dp, delta_words


@gluon.jit
def _consume_dk(
    dk, delta, k_smem, v_smem, q_smem, do_smem, p_smem, k_ready, v_ready, q_ready, q_empty, do_ready, do_empty,
    p_ready, p_empty, done, b, h_kv, heads_q, group, start_n, first, full, end, rotation, seqlen_q, softmax_scale,
    LEFT_BOUNDED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, P_STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Four warps: dP^T = V dO^T, dS^T = P^T (dP^T - delta), and dK += dS^T Q."""
    s_layout: gl.constexpr = product_layout(BLOCK_M)
    n_blocks = end - first
    total = group * n_blocks
    acc = zeros_for(k_smem, BLOCK_N)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, s_layout)
    delta += (b.to(gl.int64) * heads_q + h_kv * group) * seqlen_q
    delta_words = _row_words(
        delta, first, first, end, rotation, total > 0, seqlen_q, 0.0, LEFT_BOUNDED, BLOCK_M, num_warps
    )
    mbarrier.wait(v_ready, 0, pred=total > 0)
    v_tile = tiles_in(v_smem, 0)
    do_tile = tiles_in(do_smem, 0)
    mbarrier.wait(do_ready.index(0), 0, pred=total > 0)
    dp_next = product_of_rows(v_tile, do_tile, zero)
    dp = warpgroup_mma_wait(0, deps=[dp_next])
    mbarrier.arrive(do_empty.index(0), count=1)
    for g in range(group):  # every query head that reads this key head
        acc, dp, delta_words = _dk_over_queries(
            acc, dp, delta_words, first, end, rotation, g * n_blocks - first, total, delta, v_smem, q_smem, do_smem, p_smem,
            q_ready, q_empty, do_ready, do_empty, p_ready, p_empty, seqlen_q,
            LEFT_BOUNDED, BLOCK_M, BLOCK_N, STAGES, P_STAGES, num_warps,
        )  # fmt: skip
        delta += seqlen_q
    slot = v_smem
    if not alike(k_smem, v_smem):
        mbarrier.arrive(done, count=1)
        mbarrier.wait(done, 0)
        slot = k_smem
    put_parts(scaled(acc, softmax_scale), dk, b, h_kv, start_n, slot, 0)
    tma_store_wait(0)


@gluon.jit
def _keys_over_queries(
    dk_acc, dv_acc, lse_words, delta_words, begin, end, done, total, first, head_end, rotation, lse, delta, k_smem, v_smem,
    q_smem, do_smem, q_ready, q_empty, do_ready, do_empty, key, offset, seqlen_q, seqlen_k, window, qk_scale,
    CONSUMER: gl.constexpr, HIDE_QUERIES: gl.constexpr, LEFT_BOUNDED: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, MASK: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Query blocks at places [begin, end) of one head into dK and dV of this group's keys. lse_words and delta_words: of the
    first; done: turns of the ring before place 0."""
    dtype: gl.constexpr = q_smem[0].dtype
    s_layout: gl.constexpr = product_layout(BLOCK_M)
    k_layout: gl.constexpr = product_layout(k_smem[0].shape[-1])
    v_layout: gl.constexpr = product_layout(v_smem[0].shape[-1])
    zero = gl.zeros([KEYS, BLOCK_M], gl.float32, s_layout)
    for j in range(begin, end):
        turn = done + j
        later = turn + 1
        stage = turn % STAGES
        mine = opaque(j * 0 + CONSUMER)
        k_tile, v_tile = tiles_in(k_smem, mine), tiles_in(v_smem, mine)
        q_tile, do_tile = tiles_in(q_smem, stage), tiles_in(do_smem, stage)
        shift = gl.convert_layout(lse_words * -LOG2E, gl.SliceLayout(0, s_layout))
        lse_words = _row_words(
            lse, j + 1, first, head_end, rotation, later < total, seqlen_q, float("inf"), LEFT_BOUNDED, BLOCK_M, num_warps,
        )  # fmt: skip
        mbarrier.wait(q_ready.index(stage), (turn // STAGES) & 1)
        s_next = product_of_rows(k_tile, q_tile, zero)
        mbarrier.wait(do_ready.index(stage), (turn // STAGES) & 1)
        dp_next = product_of_rows(v_tile, do_tile, zero)
        s = warpgroup_mma_wait(len(v_smem), deps=[s_next])
        p = gl.exp2(gl.fma(s, qk_scale, shift[None, :]))
        if MASK:
            row = block_at(j, first, head_end, rotation, LEFT_BOUNDED) * BLOCK_M
            keys = key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, s_layout))
            p = HIDE_QUERIES(p, keys, row, offset, seqlen_k, window, s_layout)
        operand = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, v_layout, 2))
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        dv_next = add_products(operand, do_tile, dv_acc)
        delta_row = gl.convert_layout(delta_words, gl.SliceLayout(0, s_layout))
        delta_words = _row_words(
            delta, j + 1, first, head_end, rotation, later < total, seqlen_q, 0.0, LEFT_BOUNDED, BLOCK_M, num_warps
        )
        ds = gl.convert_layout((p * (dp - delta_row[None, :])).to(dtype), gl.DotOperandLayout(0, k_layout, 2))
        dk_next = add_products(ds, q_tile, dk_acc)
        dv_acc, operand = products_done_with(dv_next, operand, len(k_smem))
        mbarrier.arrive(do_empty.index(stage), count=1)
        dk_acc, ds = products_done_with(dk_next, ds, 0)
        mbarrier.arrive(q_empty.index(stage), count=1)
    return dk_acc, dv_acc, lse_words, delta_words


@gluon.jit
def _consume_keys(
    dk, dv, lse, delta, k_smem, v_smem, q_smem, do_smem, k_ready, v_ready, q_ready, q_empty, do_ready, do_empty,
    b, h_kv, heads_q, group, start_n, first, full, end, rotation, seqlen_q, seqlen_k, window, qk_scale, softmax_scale,
    CONSUMER: gl.constexpr, HIDE_QUERIES: gl.constexpr, LEFT_BOUNDED: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Four warps: dK and dV of KEYS keys."""
    key = start_n + CONSUMER * KEYS
    offset = seqlen_k - seqlen_q
    n_blocks = end - first
    total = group * n_blocks
    dk_acc = zeros_for(k_smem, KEYS)
    dv_acc = zeros_for(v_smem, KEYS)
    lse += (b.to(gl.int64) * heads_q + h_kv * group) * seqlen_q
    delta += (b.to(gl.int64) * heads_q + h_kv * group) * seqlen_q
    lse_words = _row_words(
        lse, first, first, end, rotation, total > 0, seqlen_q, float("inf"), LEFT_BOUNDED, BLOCK_M, num_warps
    )
    delta_words = _row_words(
        delta, first, first, end, rotation, total > 0, seqlen_q, 0.0, LEFT_BOUNDED, BLOCK_M, num_warps
    )
    mbarrier.wait(k_ready, 0, pred=total > 0)
    mbarrier.wait(v_ready, 0, pred=total > 0)
    for g in range(group):  # every query head that reads this key head
        turns = g * n_blocks - first
        dk_acc, dv_acc, lse_words, delta_words = _keys_over_queries(
            dk_acc, dv_acc, lse_words, delta_words, first, full, turns, total, first, end, rotation, lse, delta, k_smem,
            v_smem, q_smem, do_smem, q_ready, q_empty, do_ready, do_empty, key, offset, seqlen_q, seqlen_k, window, qk_scale,
            CONSUMER, HIDE_QUERIES, LEFT_BOUNDED, BLOCK_M, STAGES, True, num_warps,
        )  # fmt: skip
        dk_acc, dv_acc, lse_words, delta_words = _keys_over_queries(
            dk_acc, dv_acc, lse_words, delta_words, full, end, turns, total, first, end, rotation, lse, delta, k_smem,
            v_smem, q_smem, do_smem, q_ready, q_empty, do_ready, do_empty, key, offset, seqlen_q, seqlen_k, window, qk_scale,
            CONSUMER, HIDE_QUERIES, LEFT_BOUNDED, BLOCK_M, STAGES, False, num_warps,
        )  # fmt: skip
        lse += seqlen_q
        delta += seqlen_q
    put_parts(scaled(dk_acc, softmax_scale), dk, b, h_kv, key, k_smem, CONSUMER)  # this group alone reads its keys
    put_parts(dv_acc, dv, b, h_kv, key, v_smem, CONSUMER)
    tma_store_wait(0)


@gluon.jit
def bwd_dkdv_hopper_kernel(
    q, k, v, do, lse, delta, dk, dv, qk_scale, softmax_scale, batch, heads_q, group, seqlen_q, seqlen_k, HEADS_PER_WAVE,
    window_left, window_right, q_rest, k_rest, v_rest, do_rest, dk_rest, dv_rest,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, REST_D: gl.constexpr, REST_DV: gl.constexpr,
    QUERY_BLOCKS: gl.constexpr, HIDE_QUERIES: gl.constexpr, LEFT_BOUNDED: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, P_STAGES: gl.constexpr, OWN: gl.constexpr,
    ROWS_N: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """q, do [B, Hq, Sq, D / DV], k, v [B, Hkv, Sk, D / DV] by descriptors, lse and delta [B, Hq, Sq] float32 -> dk, dv. Columns
    behind BLOCK_D or BLOCK_DV, where REST_D or REST_DV is not 0, by descriptors of their own, q_rest, ..., dv_rest."""
    dtype: gl.constexpr = q.dtype
    heads_kv = heads_q // group
    tile, head = _tile(gl.cdiv(seqlen_k, BLOCK_N), batch * heads_kv, HEADS_PER_WAVE)
    b = head // heads_kv
    h_kv = head % heads_kv
    start_n = tile * BLOCK_N
    window = (window_left, window_right)
    first, full, end, rotation = query_blocks(
        start_n, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N, QUERY_BLOCKS, LEFT_BOUNDED
    )

    TILES: gl.constexpr = BLOCK_N // ROWS_N
    q, do = descriptors_of(q, q_rest), descriptors_of(do, do_rest)
    k, v = descriptors_of(k, k_rest), descriptors_of(v, v_rest)
    dk, dv = descriptors_of(dk, dk_rest), descriptors_of(dv, dv_rest)
    q_smem = shared_for(q, STAGES, BLOCK_M, BLOCK_D, REST_D)
    do_smem = shared_for(do, STAGES, BLOCK_M, BLOCK_DV, REST_DV)
    k_smem = shared_for(k, TILES, ROWS_N, BLOCK_D, REST_D)
    v_smem = shared_for(v, TILES, ROWS_N, BLOCK_DV, REST_DV)
    once = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_ready = once.index(0)
    v_ready = once.index(1)
    done = once.index(2)
    mbarrier.init(k_ready, count=1)
    mbarrier.init(v_ready, count=1)
    mbarrier.init(done, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(do_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_empty.index(i), count=2)
    if OWN == "keys":
        fence_async_shared()
        gl.warp_specialize([
            (_consume_keys, (
                dk, dv, lse, delta, k_smem, v_smem, q_smem, do_smem, k_ready, v_ready, q_ready, q_empty, do_ready, do_empty,
                b, h_kv, heads_q, group, start_n, first, full, end, rotation, seqlen_q, seqlen_k, window, qk_scale,
                softmax_scale, 0, HIDE_QUERIES, LEFT_BOUNDED, BLOCK_M, STAGES, num_warps)),
            (_consume_keys, (
                dk, dv, lse, delta, k_smem, v_smem, q_smem, do_smem, k_ready, v_ready, q_ready, q_empty, do_ready, do_empty,
                b, h_kv, heads_q, group, start_n, first, full, end, rotation, seqlen_q, seqlen_k, window, qk_scale,
                softmax_scale, 1, HIDE_QUERIES, LEFT_BOUNDED, BLOCK_M, STAGES, num_warps)),
            (_produce, (
                q, k, v, do, q_smem, k_smem, v_smem, do_smem, k_ready, v_ready, q_ready, q_empty, do_ready, do_empty,
                b, h_kv, group, start_n, first, end, rotation, LEFT_BOUNDED, BLOCK_M, ROWS_N, TILES, STAGES)),
        ], [4, 1], [CONSUMER_REGISTERS, 24])  # fmt: skip
    else:
        p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
        p_smem = gl.allocate_shared_memory(dtype, [P_STAGES, BLOCK_N, BLOCK_M], p_layout)
        p_ready = gl.allocate_shared_memory(gl.int64, [P_STAGES, 1], mbarrier.MBarrierLayout())
        p_empty = gl.allocate_shared_memory(gl.int64, [P_STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(P_STAGES):
            mbarrier.init(p_ready.index(i), count=1)
            mbarrier.init(p_empty.index(i), count=1)
        fence_async_shared()
        gl.warp_specialize([
            (_consume_dv, (
                dv, lse, k_smem, v_smem, q_smem, do_smem, p_smem, k_ready, v_ready, q_ready, q_empty, do_ready, do_empty,
                p_ready, p_empty, done, b, h_kv, heads_q, group, start_n, first, full, end, rotation, seqlen_q, seqlen_k,
                window, qk_scale,
                HIDE_QUERIES, LEFT_BOUNDED, BLOCK_M, BLOCK_N, STAGES, P_STAGES, num_warps)),
            (_consume_dk, (
                dk, delta, k_smem, v_smem, q_smem, do_smem, p_smem, k_ready, v_ready, q_ready, q_empty, do_ready, do_empty,
                p_ready, p_empty, done, b, h_kv, heads_q, group, start_n, first, full, end, rotation, seqlen_q, softmax_scale,
                LEFT_BOUNDED, BLOCK_M, BLOCK_N, STAGES, P_STAGES, num_warps)),
            (_produce, (
                q, k, v, do, q_smem, k_smem, v_smem, do_smem, k_ready, v_ready, q_ready, q_empty, do_ready, do_empty,
                b, h_kv, group, start_n, first, end, rotation, LEFT_BOUNDED, BLOCK_M, ROWS_N, TILES, STAGES)),
        ], [4, 1], [CONSUMER_REGISTERS, 24])  # fmt: skip


VARIANT = Variant(
    serves="bwd_dkdv",
    kernel=bwd_dkdv_hopper_kernel,
    space=SPACE,
    tensors={"q": "", "k": "", "v": "", "do": "", "lse": "fp32", "delta": "fp32", "dk": "", "dv": "",
             "q_rest": "", "k_rest": "", "v_rest": "", "do_rest": "", "dk_rest": "", "dv_rest": ""},
    descriptors={"q": ("BLOCK_M", "BLOCK_D"), "do": ("BLOCK_M", "BLOCK_DV"), "k": ("ROWS_N", "BLOCK_D"),
                 "v": ("ROWS_N", "BLOCK_DV"), "dk": ("ROWS_N", "BLOCK_D"), "dv": ("ROWS_N", "BLOCK_DV"),
                 "q_rest": ("BLOCK_M", "REST_D"), "do_rest": ("BLOCK_M", "REST_DV"), "k_rest": ("ROWS_N", "REST_D"),
                 "v_rest": ("ROWS_N", "REST_DV"), "dk_rest": ("ROWS_N", "REST_D"), "dv_rest": ("ROWS_N", "REST_DV")},
    rest_of={"q_rest": "q", "k_rest": "k", "v_rest": "v", "do_rest": "do", "dk_rest": "dk", "dv_rest": "dv"},
    grid=lambda problem, config, _sm_count, _early: (
        triton.cdiv(problem.seqlen_k, config["BLOCK_N"]) * problem.batch * problem.heads_kv
    ),
    constants=lambda spec, config: {
        **part_dims(spec, config),
        "ROWS_N": 64 if config["OWN"] == "keys" else config["BLOCK_N"],
        "CONSUMER_REGISTERS": REGISTERS,
    },
    min_arch=90,
    max_arch=90,
    fitted=fitted,
)  # fmt: skip
