"""FlashAttention forward by mma.sync and cp.async, for GPUs without wgmma: one program per query tile, its key blocks from the
last to the first, copies of K and V under way during products and exponentials."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from fa2tune.kernels.lib.ampere import (
    LN2,
    LOWEST,
    MINUS_INFINITY,
    a_bt,
    ask,
    for_lanes,
    hidden_behind,
    lanes,
    mma_layout,
    none_yet,
    operand_a,
    operand_b,
    put,
    raise_peak,
    scaled_if,
    shared_layout,
)
from fa2tune.kernels.lib.common import tile_and_head
from fa2tune.search_spaces.sm80.fwd import SPACE, STEP
from fa2tune.spec.problem import head_dim_parts
from fa2tune.spec.variant import Variant

#: Columns of Q and K that one step of Q K^T takes where Q is read from shared memory.
STEP_COLUMNS = gl.constexpr(STEP)


@gluon.jit
def _scores(
    q_smem, q_tile, k_smem, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, NEGATE: gl.constexpr,
):  # fmt: skip
    """Q K^T [BLOCK_M, BLOCK_N]."""
    MMA: gl.constexpr = mma_layout(WARPS, 1)
    s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=MMA)
    if Q_IN_REGISTERS:
        s = mma_v2(q_tile, k_smem.permute([1, 0]).load(operand_b(MMA)), s)
    else:
        s = a_bt(s, q_smem, k_smem, HEAD_DIM, STEP_COLUMNS, MMA)
    if NEGATE:
        s = -s
    return s


@gluon.jit
def _add_rows(total, p_tile, shrink, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MMA: gl.constexpr):
    """total [BLOCK_M, 8], eight times the sum of a row, times shrink [BLOCK_M, 4], plus the products of P with ones."""
    eight = lanes(total)
    eight = eight * for_lanes(shrink, eight)
    eight = gl.convert_layout(eight.reshape([BLOCK_M, 8]), MMA, assert_trivial=True)
    return mma_v2(p_tile, gl.full([BLOCK_N, 8], 1.0, p_tile.dtype, layout=operand_b(MMA)), eight)


@gluon.jit
def _trip(
    acc, more, total, peak, block, first, k, v, stride_kn, stride_vn, q_smem, q_tile, k_now, k_other, v_now, v_other, rows,
    offset, seqlen_k, window, qk_scale, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, WARPS: gl.constexpr, SCHEDULE: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, NEGATE: gl.constexpr, HIDE: gl.constexpr, CAUSAL: gl.constexpr, SUMS: gl.constexpr,
    FIRST: gl.constexpr, OTHER: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Key block ``block``, down to ``first``. "fa2": k_now and v_now are all there is. What is asked for beyond the first block
    is that block once more, which is never read."""
    MMA: gl.constexpr = mma_layout(WARPS, 1)
    before = gl.maximum(block - 1, first) * BLOCK_N
    async_copy.wait_group(0)
    if SCHEDULE == "fa2":
        # V of the last block may have fewer rows; of every other block all rows are there
        ask(v_now, v, stride_vn, block * BLOCK_N, seqlen_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, WARPS, MASK)
        async_copy.commit_group()
        scores = _scores(q_smem, q_tile, k_now, BLOCK_M, BLOCK_N, HEAD_DIM, WARPS, Q_IN_REGISTERS, NEGATE)
        async_copy.wait_group(0)
        ask(k_now, k, stride_kn, before, seqlen_k, BLOCK_N, HEAD_DIM, BLOCK_D, WARPS, MASK)
        async_copy.commit_group()
    else:
        ask(k_other, k, stride_kn, before, seqlen_k, BLOCK_N, HEAD_DIM, BLOCK_D, WARPS, MASK)
        ask(v_other, v, stride_vn, before, seqlen_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, WARPS, MASK)
        async_copy.commit_group()
        scores = _scores(q_smem, q_tile, k_now, BLOCK_M, BLOCK_N, HEAD_DIM, WARPS, Q_IN_REGISTERS, NEGATE)
    if MASK:
        if CAUSAL:
            columns = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, MMA))
            seen = gl.minimum(rows + offset, seqlen_k - 1)
            scores = hidden_behind(scores, columns[None, :], seen[:, None], MINUS_INFINITY)
        else:
            scores = HIDE(scores, rows, block * BLOCK_N, offset, seqlen_k, window, MMA)
    parts = lanes(scores)
    top = gl.convert_layout(gl.max(gl.max(parts, 3), 1) * qk_scale, peak.type.layout, assert_trivial=True)
    peak, shrink, raised = raise_peak(peak, top, WARPS)
    p = gl.exp2(gl.fma(parts, qk_scale, for_lanes(-peak, parts)))
    acc = scaled_if(raised, acc, shrink, WARPS)
    if OTHER > 0:
        more = scaled_if(raised, more, shrink, WARPS)
    p = gl.convert_layout(p.reshape([BLOCK_M, BLOCK_N]), MMA, assert_trivial=True)
    p_tile = gl.convert_layout(p.to(v_now.dtype), operand_a(MMA))
    if SUMS == "first":
        total = _add_rows(total, p_tile, shrink, BLOCK_M, BLOCK_N, MMA)
    acc = mma_v2(p_tile, v_now.slice(0, FIRST, 1).load(operand_b(MMA)), acc)
    if OTHER > 0:
        more = mma_v2(p_tile, v_now.slice(FIRST, OTHER, 1).load(operand_b(MMA)), more)
    if SUMS == "mma":
        total = _add_rows(total, p_tile, shrink, BLOCK_M, BLOCK_N, MMA)
    elif SUMS == "add":
        parts = lanes(p)
        total = total * shrink + gl.convert_layout(gl.sum(gl.sum(parts, 3), 1), total.type.layout, assert_trivial=True)
    return acc, more, total, peak


@gluon.jit
def _over_keys(
    acc, more, total, peak, begin, end, below, first, k, v, stride_kn, stride_vn, q_smem, q_tile, k0, k1, v0, v1, rows,
    offset, seqlen_k, window, qk_scale, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, WARPS: gl.constexpr, SCHEDULE: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, NEGATE: gl.constexpr, HIDE: gl.constexpr, CAUSAL: gl.constexpr, SUMS: gl.constexpr,
    FIRST: gl.constexpr, OTHER: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Key blocks [begin, end), counted back from block ``below`` - 1. Two buffers change places with every block: by a branch,
    not by turning the loop out for two blocks, whose instructions ptxas would mix, and then find too few registers."""
    for j in range(begin, end):
        if SCHEDULE == "fa2" or j % 2 == 0:
            acc, more, total, peak = _trip(
                acc, more, total, peak, below - 1 - j, first, k, v, stride_kn, stride_vn, q_smem, q_tile, k0, k1, v0, v1,
                rows, offset, seqlen_k, window, qk_scale, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HEAD_DIM, HEAD_DIM_V, WARPS,
                SCHEDULE, Q_IN_REGISTERS, NEGATE, HIDE, CAUSAL, SUMS, FIRST, OTHER, MASK,
            )  # fmt: skip
        else:
            acc, more, total, peak = _trip(
                acc, more, total, peak, below - 1 - j, first, k, v, stride_kn, stride_vn, q_smem, q_tile, k1, k0, v1, v0,
                rows, offset, seqlen_k, window, qk_scale, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HEAD_DIM, HEAD_DIM_V, WARPS,
                SCHEDULE, Q_IN_REGISTERS, NEGATE, HIDE, CAUSAL, SUMS, FIRST, OTHER, MASK,
            )  # fmt: skip
    return acc, more, total, peak


@gluon.jit
def fwd_sm80_kernel(
    q, k, v, o, lse, qk_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, batch, heads_q, group, seqlen_q, seqlen_k, HEADS_PER_WAVE, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BLOCKS_BELOW: gl.constexpr, FIRST_BLOCK: gl.constexpr, CLEAR_BLOCKS: gl.constexpr, HIDE: gl.constexpr,
    SEES_A_KEY: gl.constexpr, LEFT_BOUNDED: gl.constexpr, RIGHT_BOUNDED: gl.constexpr, NEGATE: gl.constexpr,
    CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, SCHEDULE: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, SUMS: gl.constexpr, FIRST: gl.constexpr, OTHER: gl.constexpr,
):  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o [B, Hq, Sq, DV], lse [B, Hq, Sq] float32, natural log.

    bf16 or fp16; bases and strides are multiples of 16 bytes. qk_scale is |softmax_scale| * log2(e), and not 0. Sk >= 1. Rows
    that see no key: o = 0, lse = -inf.
    SCHEDULE "fa2": one buffer of K and of V; V of a block is asked for before its Q K^T, K of the next one before the softmax
    (two barriers a block). "double": two of each, both asked for a block ahead (one barrier). FIRST and OTHER: columns of O in
    one accumulator and in a second, as ``head_dim_parts`` has them. SUMS of rows: "add"; or by
    products with ones, "mma" after P V, "first" before it, which hides their latency. CAUSAL: the mask is that one, which HIDE
    does not compute, but ``hidden_behind``.
    """
    MMA: gl.constexpr = mma_layout(WARPS, 1)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    DOUBLE: gl.constexpr = SCHEDULE == "double"
    dtype: gl.constexpr = q.dtype.element_ty
    tile, head = tile_and_head(
        gl.cdiv(seqlen_q, BLOCK_M), batch * heads_q, HEADS_PER_WAVE, RIGHT_BOUNDED and not LEFT_BOUNDED
    )
    b = head // heads_q
    h = head % heads_q
    h_kv = h // group
    start_m = tile * BLOCK_M
    rows = start_m + gl.arange(0, BLOCK_M, layout=ROW)
    offset = seqlen_k - seqlen_q  # bottom-right: row i sees keys up to i + offset
    window = (window_left, window_right)
    q += b.to(gl.int64) * stride_qb + h.to(gl.int64) * stride_qh
    k += b.to(gl.int64) * stride_kb + h_kv.to(gl.int64) * stride_kh
    v += b.to(gl.int64) * stride_vb + h_kv.to(gl.int64) * stride_vh

    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], shared_layout(BLOCK_D))
    # buffers of their own, not slices of one: the compiler sees that copies into one and reads of another do not meet
    k0 = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_D], shared_layout(BLOCK_D))
    v0 = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_DV], shared_layout(BLOCK_DV))
    k1 = k0
    v1 = v0
    if DOUBLE:
        k1 = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_D], shared_layout(BLOCK_D))
        v1 = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_DV], shared_layout(BLOCK_DV))

    # key blocks from the last to the first: some under the mask, which may be ragged; clear ones; some under its left side
    below = BLOCKS_BELOW(start_m + BLOCK_M, seqlen_q, seqlen_k, window, BLOCK_N)
    first = gl.to_tensor(FIRST_BLOCK(start_m, seqlen_q, seqlen_k, window, BLOCK_N))
    clear_begin, clear_end = CLEAR_BLOCKS(start_m, start_m + BLOCK_M, seqlen_q, seqlen_k, window, BLOCK_N)
    n_blocks = below - first
    n_masked = gl.minimum(gl.maximum(below - clear_end, 0), n_blocks)
    n_clear = n_blocks
    if LEFT_BOUNDED:
        n_clear = gl.maximum(gl.minimum(below - clear_begin, n_blocks), n_masked)

    last = (below - 1) * BLOCK_N
    ask(q_smem, q, stride_qm, start_m, seqlen_q, BLOCK_M, HEAD_DIM, BLOCK_D, WARPS, True)
    if Q_IN_REGISTERS:
        async_copy.commit_group()
    ask(k0, k, stride_kn, last, seqlen_k, BLOCK_N, HEAD_DIM, BLOCK_D, WARPS, True)
    if DOUBLE:
        ask(v0, v, stride_vn, last, seqlen_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, WARPS, True)
    async_copy.commit_group()
    q_tile = q_smem
    if Q_IN_REGISTERS:
        async_copy.wait_group(1)
        q_tile = q_smem.load(operand_a(MMA))

    acc = gl.zeros([BLOCK_M, FIRST], gl.float32, layout=MMA)
    more = none_yet(BLOCK_M, OTHER, MMA)
    by_thread = gl.sum(gl.sum(lanes(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=MMA)), 3), 1)
    if SUMS != "add":  # noqa: SIM108
        total = gl.zeros([BLOCK_M, 8], gl.float32, layout=MMA)
    else:
        total = by_thread
    peak = gl.full([BLOCK_M, 4], LOWEST, gl.float32, layout=by_thread.type.layout)
    acc, more, total, peak = _over_keys(
        acc, more, total, peak, 0, n_masked, below, first, k, v, stride_kn, stride_vn, q_smem, q_tile, k0, k1, v0, v1, rows,
        offset, seqlen_k, window, qk_scale, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HEAD_DIM, HEAD_DIM_V, WARPS, SCHEDULE,
        Q_IN_REGISTERS, NEGATE, HIDE, CAUSAL, SUMS, FIRST, OTHER, True,
    )  # fmt: skip
    acc, more, total, peak = _over_keys(
        acc, more, total, peak, n_masked, n_clear, below, first, k, v, stride_kn, stride_vn, q_smem, q_tile, k0, k1, v0, v1,
        rows, offset, seqlen_k, window, qk_scale, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HEAD_DIM, HEAD_DIM_V, WARPS, SCHEDULE,
        Q_IN_REGISTERS, NEGATE, HIDE, CAUSAL, SUMS, FIRST, OTHER, False,
    )  # fmt: skip
    if LEFT_BOUNDED:
        acc, more, total, peak = _over_keys(
            acc, more, total, peak, n_clear, n_blocks, below, first, k, v, stride_kn, stride_vn, q_smem, q_tile, k0, k1, v0,
            v1, rows, offset, seqlen_k, window, qk_scale, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HEAD_DIM, HEAD_DIM_V, WARPS,
            SCHEDULE, Q_IN_REGISTERS, NEGATE, HIDE, CAUSAL, SUMS, FIRST, OTHER, True,
        )  # fmt: skip
    async_copy.wait_group(0)

    # a row whose scores are all -inf has total 0: 0 / 0 = NaN, as softmax has it; a row with no key at all is 0
    if SUMS != "add":  # noqa: SIM108
        row_total = gl.max(total, 1)
    else:
        row_total = gl.convert_layout(gl.sum(total, 1), ROW)
    scale = 1.0 / row_total
    out = acc * scale[:, None]
    rest = more
    if OTHER > 0:
        rest = more * scale[:, None]
    word = (gl.convert_layout(gl.max(peak, 1), ROW) + gl.log2(row_total)) * LN2
    if LEFT_BOUNDED or RIGHT_BOUNDED:
        sees_a_key = SEES_A_KEY(rows, offset, seqlen_k, window)
        out = gl.where(sees_a_key[:, None], out, 0.0)
        if OTHER > 0:
            rest = gl.where(sees_a_key[:, None], rest, 0.0)
        word = gl.where(sees_a_key, word, float("-inf"))
    gl.store(lse + (b.to(gl.int64) * heads_q + h) * seqlen_q + rows, word, mask=rows < seqlen_q)
    o += b.to(gl.int64) * stride_ob + h.to(gl.int64) * stride_oh
    if OTHER > 0:
        put(o, out, stride_om, start_m, seqlen_q, BLOCK_M, FIRST, FIRST, WARPS)
        put(o, rest, stride_om, start_m, seqlen_q, BLOCK_M, HEAD_DIM_V, OTHER, WARPS, FIRST)
    else:
        put(o, out, stride_om, start_m, seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, WARPS)


VARIANT = Variant(
    serves="fwd",
    kernel=fwd_sm80_kernel,
    space=SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "lse": "fp32"},
    descriptors={},
    grid=lambda problem, config, _sm_count, _early: (
        triton.cdiv(problem.seqlen_q, config["BLOCK_M"]) * problem.batch * problem.heads_q
    ),
    constants=lambda spec, config: {
        "NEGATE": spec.negate,
        "CAUSAL": spec.mask == "causal",
        "WARPS": config["num_warps"],
        **dict(zip(("FIRST", "OTHER"), head_dim_parts(spec.head_dim_v), strict=True)),
    },
)
