"""FlashAttention backward by mma.sync and cp.async, for GPUs without wgmma, all five products in one kernel: a program owns a
tile of keys, whose dK and dV stay in registers; dQ is summed over the programs by atomic adds into float32 sums."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from fa2tune.kernels.lib.ampere import ask, mma_layout, none_yet, put, shared_layout
from fa2tune.kernels.lib.ampere_backward import _constants, _over_queries
from fa2tune.kernels.lib.common import tile_and_head
from fa2tune.search_spaces.sm80 import bwd_fused as space
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant, Workspaces


@gluon.jit
def bwd_fused_sm80_kernel(
    q, k, v, do, peaks, deltas, sums, dk, dv, qk_scale, softmax_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    batch, heads_q, group, seqlen_q, seqlen_k, rows_padded, HEADS_PER_WAVE, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    QUERY_BLOCKS: gl.constexpr, HIDE: gl.constexpr, HIDE_QUERIES: gl.constexpr, LEFT_BOUNDED: gl.constexpr,
    CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
    SCORE_WARPS: gl.constexpr, KEY_WARPS: gl.constexpr, QUERY_WARPS: gl.constexpr, P_THROUGH: gl.constexpr, EARLY: gl.constexpr,
    DK_FIRST: gl.constexpr, DK_OTHER: gl.constexpr, DV_FIRST: gl.constexpr,
    DV_OTHER: gl.constexpr, DQ_FIRST: gl.constexpr, DQ_OTHER: gl.constexpr,
):  # fmt: skip
    """q, do [B, Hq, Sq, D or DV], k, v [B, Hkv, Sk, D or DV]; peaks, deltas [B, Hq, rows_padded] float32 and sums [B, Hq,
    rows_padded, BLOCK_D] float32, as kernels/sm80/bwd_prepare.py leaves them -> dk [B, Hkv, Sk, D], dv [B, Hkv, Sk, DV], and
    dS K added to the sums, in the order of ``_places``, still to be multiplied by softmax_scale; the order of these sums is not
    fixed.

    bf16 or fp16; bases and strides are multiples of 16 bytes.
    P_THROUGH "shared": scores [queries, keys]; P and dS go to the products of dK and dV through shared memory. "one": through
    the same buffer, one after the other, so that a block may have more queries. "registers": scores [keys, queries]; P and dS
    are operands where they are, and dS goes through shared memory for dQ alone. EARLY: dP comes before the exponentials.
    Q and dO of the next block are asked for when dK is done, so that they come during dQ and its sums.
    """
    TRANSPOSED: gl.constexpr = P_THROUGH == "registers"
    ONE: gl.constexpr = P_THROUGH == "one"
    SCORES: gl.constexpr = mma_layout(WARPS, 1) if TRANSPOSED else mma_layout(SCORE_WARPS, WARPS // SCORE_WARPS)
    KEYS: gl.constexpr = mma_layout(WARPS, 1) if TRANSPOSED else mma_layout(KEY_WARPS, WARPS // KEY_WARPS)
    ROW: gl.constexpr = gl.SliceLayout(0 if TRANSPOSED else 1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(1 if TRANSPOSED else 0, SCORES)
    dtype: gl.constexpr = k.dtype.element_ty
    heads_kv = heads_q // group
    # causal: the first key tiles are seen by most queries, so tiles run upwards, longest first
    tile, head = tile_and_head(gl.cdiv(seqlen_k, BLOCK_N), batch * heads_kv, HEADS_PER_WAVE, False)
    b = head // heads_kv
    h_kv = head % heads_kv
    start_n = tile * BLOCK_N
    columns = start_n + gl.arange(0, BLOCK_N, layout=COLUMN)
    offset = seqlen_k - seqlen_q
    first_row = (b.to(gl.int64) * heads_q + h_kv * group) * rows_padded
    q += b.to(gl.int64) * stride_qb + (h_kv * group).to(gl.int64) * stride_qh
    do += b.to(gl.int64) * stride_dob + (h_kv * group).to(gl.int64) * stride_doh
    k += b.to(gl.int64) * stride_kb + h_kv.to(gl.int64) * stride_kh
    v += b.to(gl.int64) * stride_vb + h_kv.to(gl.int64) * stride_vh
    peaks += first_row
    deltas += first_row
    sums += first_row * BLOCK_D

    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], shared_layout(BLOCK_D))
    do_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_DV], shared_layout(BLOCK_DV))
    k_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_D], shared_layout(BLOCK_D))
    v_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_DV], shared_layout(BLOCK_DV))
    if TRANSPOSED:
        ds_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], shared_layout(BLOCK_M))
        p_smem = ds_smem
    else:
        ds_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], shared_layout(BLOCK_N))
        p_smem = ds_smem
        if not ONE:
            p_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], shared_layout(BLOCK_N))

    # queries in whole blocks: [begin, full) under the mask, [full, full_end) see every key of the tile, then its left side
    window = (window_left, window_right)
    blocks = QUERY_BLOCKS(start_n, start_n + BLOCK_N, seqlen_q, seqlen_k, window, BLOCK_M)
    begin = gl.to_tensor(blocks[0]) * BLOCK_M
    end = blocks[3] * BLOCK_M
    full = gl.where(
        start_n + BLOCK_N > seqlen_k, end, blocks[1] * BLOCK_M
    )  # the last, ragged tile: everything under the mask
    full_end = end
    if LEFT_BOUNDED:
        full_end = gl.maximum(blocks[2] * BLOCK_M, full)

    ask(k_smem, k, stride_kn, start_n, seqlen_k, BLOCK_N, HEAD_DIM, BLOCK_D, WARPS, True)
    ask(v_smem, v, stride_vn, start_n, seqlen_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, WARPS, True)
    dk_acc = none_yet(BLOCK_N, DK_FIRST, KEYS)
    dk_more = none_yet(BLOCK_N, DK_OTHER, KEYS)
    dv_acc = none_yet(BLOCK_N, DV_FIRST, KEYS)
    dv_more = none_yet(BLOCK_N, DV_OTHER, KEYS)
    m = gl.maximum(gl.minimum(begin, end - BLOCK_M), 0)  # no query may see this tile
    for _g in range(group):  # every query head that reads this key head
        async_copy.wait_group(0)  # the copies of the head before, which are not read
        ask(q_smem, q, stride_qm, m, seqlen_q, BLOCK_M, HEAD_DIM, BLOCK_D, WARPS, True)
        ask(do_smem, do, stride_dom, m, seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, WARPS, True)
        async_copy.commit_group()
        peak = gl.load(peaks + m + gl.arange(0, BLOCK_M, layout=ROW))
        dk_acc, dk_more, dv_acc, dv_more, peak = _over_queries(
            dk_acc, dk_more, dv_acc, dv_more, peak, begin, full, end, q, do, peaks, deltas, sums, stride_qm, stride_dom,
            k_smem, v_smem, q_smem, do_smem, p_smem, ds_smem, start_n, columns, offset, seqlen_q, seqlen_k, window, qk_scale,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HEAD_DIM, HEAD_DIM_V, WARPS, SCORE_WARPS, KEY_WARPS, QUERY_WARPS, TRANSPOSED,
            HIDE, HIDE_QUERIES, CAUSAL, EARLY, ONE, DK_FIRST, DK_OTHER, DV_FIRST, DV_OTHER, DQ_FIRST, DQ_OTHER, True,
        )  # fmt: skip
        dk_acc, dk_more, dv_acc, dv_more, peak = _over_queries(
            dk_acc, dk_more, dv_acc, dv_more, peak, full, full_end, end, q, do, peaks, deltas, sums, stride_qm, stride_dom,
            k_smem, v_smem, q_smem, do_smem, p_smem, ds_smem, start_n, columns, offset, seqlen_q, seqlen_k, window, qk_scale,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HEAD_DIM, HEAD_DIM_V, WARPS, SCORE_WARPS, KEY_WARPS, QUERY_WARPS, TRANSPOSED,
            HIDE, HIDE_QUERIES, CAUSAL, EARLY, ONE, DK_FIRST, DK_OTHER, DV_FIRST, DV_OTHER, DQ_FIRST, DQ_OTHER, False,
        )  # fmt: skip
        if LEFT_BOUNDED:
            dk_acc, dk_more, dv_acc, dv_more, peak = _over_queries(
                dk_acc, dk_more, dv_acc, dv_more, peak, full_end, end, end, q, do, peaks, deltas, sums, stride_qm, stride_dom,
                k_smem, v_smem, q_smem, do_smem, p_smem, ds_smem, start_n, columns, offset, seqlen_q, seqlen_k, window,
                qk_scale, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HEAD_DIM, HEAD_DIM_V, WARPS, SCORE_WARPS, KEY_WARPS,
                QUERY_WARPS, TRANSPOSED, HIDE, HIDE_QUERIES, CAUSAL, EARLY, ONE, DK_FIRST, DK_OTHER, DV_FIRST, DV_OTHER,
                DQ_FIRST, DQ_OTHER, True,
            )  # fmt: skip
        q += stride_qh
        do += stride_doh
        peaks += rows_padded
        deltas += rows_padded
        sums += rows_padded.to(gl.int64) * BLOCK_D
    async_copy.wait_group(0)
    dk += b.to(gl.int64) * stride_dkb + h_kv.to(gl.int64) * stride_dkh
    dv += b.to(gl.int64) * stride_dvb + h_kv.to(gl.int64) * stride_dvh
    put(dk, dk_acc * softmax_scale, stride_dkn, start_n, seqlen_k, BLOCK_N, HEAD_DIM, DK_FIRST, WARPS)
    put(dv, dv_acc, stride_dvn, start_n, seqlen_k, BLOCK_N, HEAD_DIM_V, DV_FIRST, WARPS)
    if DK_OTHER > 0:
        put(dk, dk_more * softmax_scale, stride_dkn, start_n, seqlen_k, BLOCK_N, HEAD_DIM, DK_OTHER, WARPS, DK_FIRST)
    if DV_OTHER > 0:
        put(dv, dv_more, stride_dvn, start_n, seqlen_k, BLOCK_N, HEAD_DIM_V, DV_OTHER, WARPS, DV_FIRST)


def _workspaces(problem: Problem, _config: Config) -> Workspaces:
    rows = (problem.batch, problem.heads_q, space.padded_rows(problem))
    columns = space.block_dims(problem.specialization)[0]
    return {"peaks": (rows, "fp32"), "deltas": (rows, "fp32"), "sums": ((*rows, columns), "fp32")}


VARIANT = Variant(
    serves="bwd_fused",
    kernel=bwd_fused_sm80_kernel,
    space=space.SPACE,
    tensors={
        "q": "",
        "k": "",
        "v": "",
        "do": "",
        "peaks": "fp32",
        "deltas": "fp32",
        "sums": "fp32",
        "dk": "",
        "dv": "",
    },
    descriptors={},
    grid=lambda problem, config, _sm_count, _early: (
        triton.cdiv(problem.seqlen_k, config["BLOCK_N"]) * problem.batch * problem.heads_kv
    ),
    constants=_constants,
    before=("sm80/bwd_prepare",),
    after=("sm80/bwd_finish",),
    workspaces=_workspaces,
    scalars=lambda problem, _config, _early: {"rows_padded": space.padded_rows(problem)},
)
