"""FlashAttention-2 backward over query tiles for Hopper: dQ without atomics, half of the deterministic strategy. One warp
feeds Q, dO, K and V by TMA; each group of four warps owns 64 query rows. It also makes delta = rowsum(dO * O) - dlse, which
the other half reads."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import (
    fence_async_shared,
    mbarrier,
    opaque,
    tma_store_wait,
    warpgroup_mma_wait,
)
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    descriptors_of,
    expect_both,
    expect_parts,
    load_parts,
    product_layout,
    product_of_rows,
    products_done,
    put_parts,
    scaled,
    shared_for,
    tiles_in,
    zeros_for,
)
from fa2tune.search_spaces.lib.hopper import part_dims
from fa2tune.search_spaces.sm90.bwd_dq import REGISTERS, SPACE, fitted
from fa2tune.spec.variant import Variant

LOG2E = gl.constexpr(1.4426950408889634)
#: Query rows of a consumer group: the rows of one wgmma.
ROWS = gl.constexpr(64)


@gluon.jit
def _tile(tiles, heads, heads_per_wave, IS_CAUSAL: gl.constexpr):
    """(query tile, head) of this program; as tile_and_head of kernels/lib/common.py. Causal: the last tiles are the longest."""
    pid = gl.program_id(0)
    band = pid // (tiles * heads_per_wave)
    first = band * heads_per_wave
    width = gl.minimum(heads - first, heads_per_wave)  # the last band may be narrower
    inside = pid - band * (tiles * heads_per_wave)
    tile = inside // width
    if IS_CAUSAL:
        tile = tiles - 1 - tile
    return tile, first + inside % width


@gluon.jit
def _blocks(rows_end, offset, seqlen_k, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """How many key blocks the rows below rows_end see."""
    end = seqlen_k
    if IS_CAUSAL:
        end = gl.maximum(gl.minimum(rows_end + offset, seqlen_k), 0)
    return gl.cdiv(end, BLOCK_N)


@gluon.jit
def _produce(
    q, k, v, do, q_smem, k_smem, v_smem, do_smem, q_ready, k_ready, k_empty, v_ready, v_empty, b, h, h_kv, start_m, below,
    n_blocks, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: Q and dO once, K and V through a ring each: n_blocks counted back from block ``below`` - 1, the one under the
    mask."""
    expect_both(q, do, q_ready.index(0))
    load_parts(q, b, h, start_m, q_ready.index(0), q_smem, 0)
    load_parts(do, b, h, start_m, q_ready.index(0), do_smem, 0)
    for j in range(gl.maximum(n_blocks, 1)):
        if j < n_blocks:
            row = (below - 1 - j) * BLOCK_N
            stage = j % K_STAGES
            mbarrier.wait(k_empty.index(stage), ((j // K_STAGES) & 1) ^ 1)
            expect_parts(k, k_ready.index(stage))
            load_parts(k, b, h_kv, row, k_ready.index(stage), k_smem, stage)
            stage = j % V_STAGES
            mbarrier.wait(v_empty.index(stage), ((j // V_STAGES) & 1) ^ 1)
            expect_parts(v, v_ready.index(stage))
            load_parts(v, b, h_kv, row, v_ready.index(stage), v_smem, stage)
        if j == 0:  # what the first group waits for comes before the others' Q and dO
            for c in gl.static_range(1, GROUPS):
                expect_both(q, do, q_ready.index(c))
                load_parts(q, b, h, start_m + c * ROWS, q_ready.index(c), q_smem, c)
                load_parts(do, b, h, start_m + c * ROWS, q_ready.index(c), do_smem, c)


@gluon.jit
def _o_tile(
    o, rows, inside, stride_om, FIRST: gl.constexpr, COLUMNS: gl.constexpr, HEAD_DIM_V: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Columns [FIRST, FIRST + COLUMNS) of O's rows, zeros behind the head dim."""
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    mask = inside[:, None]
    if HEAD_DIM_V != FIRST + COLUMNS:
        mask = mask & (columns < HEAD_DIM_V - FIRST)[None, :]
    return gl.load(
        o + FIRST + (rows.to(gl.int64)[:, None] * stride_om + columns[None, :]), mask=mask, other=0.0
    )  # [ROWS, COLUMNS]


@gluon.jit
def _deltas(
    o, do_tile, ready, dlse, delta, first, stride_om, stride_dlsem, seqlen_q, has_dlse, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """rowsum(dO * O) - dlse of rows [first, first + ROWS): written to delta, and returned. Pointers of one head; do_tile in
    shared memory, from when ``ready`` completes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    inside = rows < seqlen_q
    BLOCK_DV: gl.constexpr = do_tile[0].shape[-1]
    o_tile = _o_tile(o, rows, inside, stride_om, 0, BLOCK_DV, HEAD_DIM_V, layout)
    if len(do_tile) > 1:
        o_rest = _o_tile(o, rows, inside, stride_om, BLOCK_DV, do_tile[1].shape[-1], HEAD_DIM_V, layout)
    mbarrier.wait(ready, 0)
    sums = gl.sum(o_tile.to(gl.float32) * do_tile[0].load(layout).to(gl.float32), 1)
    if len(do_tile) > 1:
        sums += gl.sum(o_rest.to(gl.float32) * do_tile[1].load(layout).to(gl.float32), 1)
    if has_dlse != 0:
        sums -= gl.load(dlse + rows.to(gl.int64) * stride_dlsem, mask=inside, other=0.0)
    gl.store(delta + rows, sums, mask=inside)
    return sums


@gluon.jit
def _over_keys(
    acc, begin, end, below, q_smem, do_smem, k_smem, v_smem, k_ready, k_empty, v_ready, v_empty, lse_row, delta_row,
    rows, offset, seqlen_k, window, qk_scale,
    CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
    BY_HOOKS: gl.constexpr, HIDE: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Key blocks [begin, end), counted back from block ``below`` - 1, into acc [ROWS, D]. While one group exponentiates, the
    other multiplies: products of its own beside them only cost registers."""
    dtype: gl.constexpr = k_smem[0].dtype
    s_layout: gl.constexpr = product_layout(BLOCK_N)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(k_smem[0].shape[-1]), 2)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    for j in range(begin, end):
        mine = opaque(j * 0 + CONSUMER)
        q_tile = tiles_in(q_smem, mine)
        do_tile = tiles_in(do_smem, mine)
        k_stage = j % K_STAGES
        k_tile = tiles_in(k_smem, k_stage)
        mbarrier.wait(k_ready.index(k_stage), (j // K_STAGES) & 1)
        s_next = product_of_rows(q_tile, k_tile, zero)
        v_stage = j % V_STAGES
        v_tile = tiles_in(v_smem, v_stage)
        mbarrier.wait(v_ready.index(v_stage), (j // V_STAGES) & 1)
        dp_next = product_of_rows(do_tile, v_tile, zero)
        s = warpgroup_mma_wait(len(v_smem), deps=[s_next])
        p = gl.exp2(gl.fma(s, qk_scale, -lse_row[:, None]))
        if MASK and BY_HOOKS:  # a score of 0 stays 0 where it is seen
            seen = HIDE(zero, rows, (below - 1 - j) * BLOCK_N, offset, seqlen_k, window, s_layout) == 0.0
            p = gl.where(seen, p, 0.0)
        elif MASK:
            columns = (below - 1 - j) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s_layout))
            if IS_CAUSAL:  # one comparison a score: the last key that a row sees
                last = gl.minimum(rows + offset, seqlen_k - 1)
                p = gl.where(columns[None, :] <= last[:, None], p, 0.0)
            else:
                p = gl.where((columns < seqlen_k)[None, :], p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        ds = gl.convert_layout((p * (dp - delta_row[:, None])).to(dtype), a_layout)
        acc = products_done(add_products(ds, k_tile, acc))
        mbarrier.arrive(k_empty.index(k_stage), count=1)
    return acc


@gluon.jit
def _consume(
    dq, o, dlse, lse, delta, q_smem, k_smem, v_smem, do_smem, q_ready, k_ready, k_empty, v_ready, v_empty,
    b, h, heads_q, start_m, below, n_all, stride_om, stride_dlsem, has_dlse, seqlen_q, seqlen_k, window, qk_scale,
    softmax_scale,
    CONSUMER: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr, BY_HOOKS: gl.constexpr,
    BLOCKS_BELOW: gl.constexpr, CLEAR_BLOCKS: gl.constexpr, HIDE: gl.constexpr, LEFT_BOUNDED: gl.constexpr,
    RIGHT_BOUNDED: gl.constexpr,
):  # fmt: skip
    """One group: rows [start_m + CONSUMER * ROWS, + ROWS) of one head."""
    s_layout: gl.constexpr = product_layout(BLOCK_N)
    offset = seqlen_k - seqlen_q  # bottom-right: row i sees keys up to i + offset
    first = start_m + CONSUMER * ROWS
    head_row = (b.to(gl.int64) * heads_q + h) * seqlen_q
    sums = _deltas(
        o, tiles_in(do_smem, CONSUMER), q_ready.index(CONSUMER), dlse, delta + head_row, first, stride_om, stride_dlsem,
        seqlen_q, has_dlse, HEAD_DIM_V,
    )  # fmt: skip
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    delta_row = gl.convert_layout(sums, gl.SliceLayout(1, s_layout))
    # past the end +inf, so that p = exp2(s - inf) = 0
    lse_row = gl.load(lse + head_row + rows, mask=rows < seqlen_q, other=float("inf")) * LOG2E
    n_blocks = n_all
    if BY_HOOKS:
        mine = BLOCKS_BELOW(first + ROWS, seqlen_q, seqlen_k, window, BLOCK_N)
        n_blocks = gl.maximum(n_all - (below - mine), 0)
        clear_begin, clear_end = CLEAR_BLOCKS(first, first + ROWS, seqlen_q, seqlen_k, window, BLOCK_N)
        n_full = seqlen_k // BLOCK_N
        if RIGHT_BOUNDED:
            n_full = gl.minimum(n_full, clear_end)
        n_full = gl.minimum(gl.maximum(n_full - (below - n_all), 0), n_blocks)
        full_end = n_all
        if LEFT_BOUNDED:
            full_end = gl.minimum(gl.maximum(below - clear_begin, n_all - n_full), n_all)
    elif IS_CAUSAL:
        n_blocks = _blocks(gl.minimum(first + ROWS, seqlen_q), offset, seqlen_k, BLOCK_N, IS_CAUSAL)
    if IS_CAUSAL or BY_HOOKS:
        for j in range(n_all - n_blocks):  # blocks that only later groups see
            stage = j % K_STAGES
            mbarrier.wait(k_ready.index(stage), (j // K_STAGES) & 1)
            mbarrier.arrive(k_empty.index(stage), count=1)
            stage = j % V_STAGES
            mbarrier.wait(v_ready.index(stage), (j // V_STAGES) & 1)
            mbarrier.arrive(v_empty.index(stage), count=1)
    if not BY_HOOKS:
        n_full = seqlen_k // BLOCK_N
        if IS_CAUSAL:
            n_full = gl.minimum(seqlen_k, gl.maximum(first + 1 + offset, 0)) // BLOCK_N
        n_full = gl.minimum(n_full, n_blocks)
        full_end = n_all
    masked_end = n_all - n_full
    acc = zeros_for(q_smem, ROWS)
    acc = _over_keys(
        acc, n_all - n_blocks, masked_end, below, q_smem, do_smem, k_smem, v_smem, k_ready, k_empty, v_ready, v_empty,
        lse_row, delta_row, rows, offset, seqlen_k, window, qk_scale,
        CONSUMER, BLOCK_N, K_STAGES, V_STAGES, IS_CAUSAL, BY_HOOKS, HIDE, True,
    )  # fmt: skip
    acc = _over_keys(
        acc, masked_end, full_end, below, q_smem, do_smem, k_smem, v_smem, k_ready, k_empty, v_ready, v_empty,
        lse_row, delta_row, rows, offset, seqlen_k, window, qk_scale,
        CONSUMER, BLOCK_N, K_STAGES, V_STAGES, IS_CAUSAL, BY_HOOKS, HIDE, False,
    )  # fmt: skip
    if BY_HOOKS and LEFT_BOUNDED:
        acc = _over_keys(
            acc, full_end, n_all, below, q_smem, do_smem, k_smem, v_smem, k_ready, k_empty, v_ready, v_empty,
            lse_row, delta_row, rows, offset, seqlen_k, window, qk_scale,
            CONSUMER, BLOCK_N, K_STAGES, V_STAGES, IS_CAUSAL, BY_HOOKS, HIDE, True,
        )  # fmt: skip
    put_parts(scaled(acc, softmax_scale), dq, b, h, first, q_smem, CONSUMER)  # this group alone reads its Q
    tma_store_wait(0)


@gluon.jit
def bwd_dq_hopper_kernel(
    q, k, v, o, do, dlse, lse, delta, dq, qk_scale, softmax_scale,
    stride_ob, stride_oh, stride_om, stride_dlseb, stride_dlseh, stride_dlsem,
    batch, heads_q, group, seqlen_q, seqlen_k, has_dlse, HEADS_PER_WAVE, window_left, window_right,
    q_rest, k_rest, v_rest, do_rest, dq_rest,
    HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, REST_D: gl.constexpr, REST_DV: gl.constexpr,
    IS_CAUSAL: gl.constexpr, BY_HOOKS: gl.constexpr,
    BLOCKS_BELOW: gl.constexpr, FIRST_BLOCK: gl.constexpr, CLEAR_BLOCKS: gl.constexpr, HIDE: gl.constexpr,
    LEFT_BOUNDED: gl.constexpr, RIGHT_BOUNDED: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q, do [B, Hq, Sq, D], k, v [B, Hkv, Sk, D] by descriptors, o by pointer; lse as the forward leaves it -> dq
    [B, Hq, Sq, D] by a descriptor, delta [B, Hq, Sq] float32. Sk >= 1. dlse is read only if has_dlse. Columns behind BLOCK_D or
    BLOCK_DV, where REST_D or REST_DV is not 0, by descriptors of their own, q_rest, ..., dq_rest. BY_HOOKS: the mask is
    neither causal nor none, whose code, which rows were measured with, is compiled in."""
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    tile, head = _tile(gl.cdiv(seqlen_q, BLOCK_M), batch * heads_q, HEADS_PER_WAVE, IS_CAUSAL)
    b = head // heads_q
    h = head % heads_q
    start_m = tile * BLOCK_M
    window = (window_left, window_right)
    if BY_HOOKS:
        below = BLOCKS_BELOW(start_m + BLOCK_M, seqlen_q, seqlen_k, window, BLOCK_N)
        n_all = below - FIRST_BLOCK(start_m, seqlen_q, seqlen_k, window, BLOCK_N)
    else:
        n_all = _blocks(gl.minimum(start_m + BLOCK_M, seqlen_q), seqlen_k - seqlen_q, seqlen_k, BLOCK_N, IS_CAUSAL)
        below = n_all
    o += b.to(gl.int64) * stride_ob + h.to(gl.int64) * stride_oh
    dlse += b.to(gl.int64) * stride_dlseb + h.to(gl.int64) * stride_dlseh

    q, do, dq = descriptors_of(q, q_rest), descriptors_of(do, do_rest), descriptors_of(dq, dq_rest)
    k, v = descriptors_of(k, k_rest), descriptors_of(v, v_rest)
    q_smem = shared_for(q, GROUPS, ROWS, BLOCK_D, REST_D)
    do_smem = shared_for(do, GROUPS, ROWS, BLOCK_DV, REST_DV)
    k_smem = shared_for(k, K_STAGES, BLOCK_N, BLOCK_D, REST_D)
    v_smem = shared_for(v, V_STAGES, BLOCK_N, BLOCK_DV, REST_DV)
    q_ready = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_ready.index(i), count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()
    # constants stay constants only in a literal tuple, so each group's is written out
    if GROUPS == 1:
        gl.warp_specialize([
            (_consume, (
                dq, o, dlse, lse, delta, q_smem, k_smem, v_smem, do_smem, q_ready, k_ready, k_empty, v_ready,
                v_empty, b, h, heads_q, start_m, below, n_all, stride_om, stride_dlsem, has_dlse, seqlen_q, seqlen_k,
                window, qk_scale, softmax_scale,
                0, HEAD_DIM_V, BLOCK_N, K_STAGES, V_STAGES, IS_CAUSAL, BY_HOOKS,
                BLOCKS_BELOW, CLEAR_BLOCKS, HIDE, LEFT_BOUNDED, RIGHT_BOUNDED)),
            (_produce, (
                q, k, v, do, q_smem, k_smem, v_smem, do_smem, q_ready, k_ready, k_empty, v_ready, v_empty, b, h, h // group,
                start_m, below, n_all, BLOCK_N, GROUPS, K_STAGES, V_STAGES)),
        ], [1], [24])  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize([
            (_consume, (
                dq, o, dlse, lse, delta, q_smem, k_smem, v_smem, do_smem, q_ready, k_ready, k_empty, v_ready,
                v_empty, b, h, heads_q, start_m, below, n_all, stride_om, stride_dlsem, has_dlse, seqlen_q, seqlen_k,
                window, qk_scale, softmax_scale,
                0, HEAD_DIM_V, BLOCK_N, K_STAGES, V_STAGES, IS_CAUSAL, BY_HOOKS,
                BLOCKS_BELOW, CLEAR_BLOCKS, HIDE, LEFT_BOUNDED, RIGHT_BOUNDED)),
            (_consume, (
                dq, o, dlse, lse, delta, q_smem, k_smem, v_smem, do_smem, q_ready, k_ready, k_empty, v_ready,
                v_empty, b, h, heads_q, start_m, below, n_all, stride_om, stride_dlsem, has_dlse, seqlen_q, seqlen_k,
                window, qk_scale, softmax_scale,
                1, HEAD_DIM_V, BLOCK_N, K_STAGES, V_STAGES, IS_CAUSAL, BY_HOOKS,
                BLOCKS_BELOW, CLEAR_BLOCKS, HIDE, LEFT_BOUNDED, RIGHT_BOUNDED)),
            (_produce, (
                q, k, v, do, q_smem, k_smem, v_smem, do_smem, q_ready, k_ready, k_empty, v_ready, v_empty, b, h, h // group,
                start_m, below, n_all, BLOCK_N, GROUPS, K_STAGES, V_STAGES)),
        ], [4, 1], [CONSUMER_REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (
                dq, o, dlse, lse, delta, q_smem, k_smem, v_smem, do_smem, q_ready, k_ready, k_empty, v_ready,
                v_empty, b, h, heads_q, start_m, below, n_all, stride_om, stride_dlsem, has_dlse, seqlen_q, seqlen_k,
                window, qk_scale, softmax_scale,
                0, HEAD_DIM_V, BLOCK_N, K_STAGES, V_STAGES, IS_CAUSAL, BY_HOOKS,
                BLOCKS_BELOW, CLEAR_BLOCKS, HIDE, LEFT_BOUNDED, RIGHT_BOUNDED)),
            (_consume, (
                dq, o, dlse, lse, delta, q_smem, k_smem, v_smem, do_smem, q_ready, k_ready, k_empty, v_ready,
                v_empty, b, h, heads_q, start_m, below, n_all, stride_om, stride_dlsem, has_dlse, seqlen_q, seqlen_k,
                window, qk_scale, softmax_scale,
                1, HEAD_DIM_V, BLOCK_N, K_STAGES, V_STAGES, IS_CAUSAL, BY_HOOKS,
                BLOCKS_BELOW, CLEAR_BLOCKS, HIDE, LEFT_BOUNDED, RIGHT_BOUNDED)),
            (_consume, (
                dq, o, dlse, lse, delta, q_smem, k_smem, v_smem, do_smem, q_ready, k_ready, k_empty, v_ready,
                v_empty, b, h, heads_q, start_m, below, n_all, stride_om, stride_dlsem, has_dlse, seqlen_q, seqlen_k,
                window, qk_scale, softmax_scale,
                2, HEAD_DIM_V, BLOCK_N, K_STAGES, V_STAGES, IS_CAUSAL, BY_HOOKS,
                BLOCKS_BELOW, CLEAR_BLOCKS, HIDE, LEFT_BOUNDED, RIGHT_BOUNDED)),
            (_produce, (
                q, k, v, do, q_smem, k_smem, v_smem, do_smem, q_ready, k_ready, k_empty, v_ready, v_empty, b, h, h // group,
                start_m, below, n_all, BLOCK_N, GROUPS, K_STAGES, V_STAGES)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, 24])  # fmt: skip


VARIANT = Variant(
    serves="bwd_dq",
    kernel=bwd_dq_hopper_kernel,
    space=SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "do": "", "dlse": "fp32", "lse": "fp32", "delta": "fp32", "dq": "",
             "q_rest": "", "k_rest": "", "v_rest": "", "do_rest": "", "dq_rest": ""},
    descriptors={"q": (64, "BLOCK_D"), "do": (64, "BLOCK_DV"), "k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV"),
                 "dq": (64, "BLOCK_D"),
                 "q_rest": (64, "REST_D"), "do_rest": (64, "REST_DV"), "k_rest": ("BLOCK_N", "REST_D"),
                 "v_rest": ("BLOCK_N", "REST_DV"), "dq_rest": (64, "REST_D")},
    rest_of={"q_rest": "q", "k_rest": "k", "v_rest": "v", "do_rest": "do", "dq_rest": "dq"},
    grid=lambda problem, config, _sm_count, _early: (
        triton.cdiv(problem.seqlen_q, 64 * config["GROUPS"]) * problem.batch * problem.heads_q
    ),
    constants=lambda spec, config: {
        **part_dims(spec, config),
        "CONSUMER_REGISTERS": REGISTERS[config["GROUPS"]], "BY_HOOKS": spec.mask not in ("full", "causal"),
    },
    min_arch=90,
    max_arch=90,
    fitted=fitted,
)  # fmt: skip
