"""The fused backward by mma.sync with dQ summed in a fixed order, so that equal calls have equal bits: a head has DQ_BUFFERS
programs, each of which walks several tiles of keys, one after the other, and adds dQ to sums that no other program touches.

A thread adds to the same numbers in every tile, and its adds to one address keep their order. bwd_ordered_finish.py beside this
file adds the sums up, in the order of programs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from fa2tune.kernels.lib.ampere import ask, in_place, mma_layout, none_yet, put, shared_layout
from fa2tune.kernels.lib.ampere_backward import _constants, _over_queries
from fa2tune.kernels.lib.common import tile_and_head
from fa2tune.search_spaces.sm80 import bwd_fused
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant, Workspaces


@gluon.jit
def bwd_ordered_sm80_kernel(
    q, k, v, do, peaks, deltas, sums, dk, dv, qk_scale, softmax_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    batch, heads_q, group, seqlen_q, seqlen_k, rows_padded, HEADS_PER_WAVE, DQ_BUFFERS, window_left, window_right,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    QUERY_BLOCKS: gl.constexpr, HIDE: gl.constexpr, HIDE_QUERIES: gl.constexpr, LEFT_BOUNDED: gl.constexpr,
    CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
    SCORE_WARPS: gl.constexpr, KEY_WARPS: gl.constexpr, QUERY_WARPS: gl.constexpr, P_THROUGH: gl.constexpr, EARLY: gl.constexpr,
    DK_FIRST: gl.constexpr, DK_OTHER: gl.constexpr, DV_FIRST: gl.constexpr,
    DV_OTHER: gl.constexpr, DQ_FIRST: gl.constexpr, DQ_OTHER: gl.constexpr,
):  # fmt: skip
    """As kernels/sm80/bwd_fused.py, but for sums [DQ_BUFFERS, B, Hq, rows_padded, BLOCK_D] float32, all zeros before. Where
    there are fewer tiles of keys than DQ_BUFFERS some programs have nothing to do."""
    TRANSPOSED: gl.constexpr = P_THROUGH == "registers"
    ONE: gl.constexpr = P_THROUGH == "one"
    SCORES: gl.constexpr = mma_layout(WARPS, 1) if TRANSPOSED else mma_layout(SCORE_WARPS, WARPS // SCORE_WARPS)
    KEYS: gl.constexpr = mma_layout(WARPS, 1) if TRANSPOSED else mma_layout(KEY_WARPS, WARPS // KEY_WARPS)
    ROW: gl.constexpr = gl.SliceLayout(0 if TRANSPOSED else 1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(1 if TRANSPOSED else 0, SCORES)
    dtype: gl.constexpr = k.dtype.element_ty
    heads_kv = heads_q // group
    place, head = tile_and_head(DQ_BUFFERS, batch * heads_kv, HEADS_PER_WAVE, False)
    offset = seqlen_k - seqlen_q
    window = (window_left, window_right)

    # turns go there and back over the programs, as later tiles have less to do under a causal mask
    tiles = gl.cdiv(seqlen_k, BLOCK_N)
    whole = tiles // DQ_BUFFERS
    last = gl.where(whole % 2 == 0, place, DQ_BUFFERS - 1 - place)
    turns = whole + (last < tiles - whole * DQ_BUFFERS).to(gl.int32)
    for turn in range(turns):
        # worked out anew in every turn: known to be the same, all addresses would be in registers during the products
        its_place = in_place(place)
        its_head = in_place(head)
        b = its_head // heads_kv
        h_kv = its_head % heads_kv
        first_row = (b.to(gl.int64) * heads_q + h_kv * group) * rows_padded
        its_q = q + b.to(gl.int64) * stride_qb + (h_kv * group).to(gl.int64) * stride_qh
        its_do = do + b.to(gl.int64) * stride_dob + (h_kv * group).to(gl.int64) * stride_doh
        its_k = k + b.to(gl.int64) * stride_kb + h_kv.to(gl.int64) * stride_kh
        its_v = v + b.to(gl.int64) * stride_vb + h_kv.to(gl.int64) * stride_vh
        its_peaks = peaks + first_row
        its_deltas = deltas + first_row
        its_sums = sums + (its_place.to(gl.int64) * batch * heads_q * rows_padded + first_row) * BLOCK_D
        tile = turn * DQ_BUFFERS + gl.where(turn % 2 == 0, its_place, DQ_BUFFERS - 1 - its_place)
        start_n = tile * BLOCK_N
        columns = start_n + gl.arange(0, BLOCK_N, layout=COLUMN)
        # allocated by the turn: what dK and dV go out through may then take the place of what is read no more
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
        blocks = QUERY_BLOCKS(start_n, start_n + BLOCK_N, seqlen_q, seqlen_k, window, BLOCK_M)
        begin = gl.to_tensor(blocks[0]) * BLOCK_M
        end = blocks[3] * BLOCK_M
        # the last, ragged tile: everything under the mask
        full = gl.where(start_n + BLOCK_N > seqlen_k, end, blocks[1] * BLOCK_M)
        full_end = end
        if LEFT_BOUNDED:
            full_end = gl.maximum(blocks[2] * BLOCK_M, full)

        ask(k_smem, its_k, in_place(stride_kn), start_n, seqlen_k, BLOCK_N, HEAD_DIM, BLOCK_D, WARPS, True)
        ask(v_smem, its_v, in_place(stride_vn), start_n, seqlen_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, WARPS, True)
        dk_acc = none_yet(BLOCK_N, DK_FIRST, KEYS)
        dk_more = none_yet(BLOCK_N, DK_OTHER, KEYS)
        dv_acc = none_yet(BLOCK_N, DV_FIRST, KEYS)
        dv_more = none_yet(BLOCK_N, DV_OTHER, KEYS)
        m = gl.maximum(gl.minimum(begin, end - BLOCK_M), 0)  # no query may see this tile
        for _g in range(group):  # every query head that reads this key head
            async_copy.wait_group(0)  # the copies of the head before, which are not read
            ask(q_smem, its_q, stride_qm, m, seqlen_q, BLOCK_M, HEAD_DIM, BLOCK_D, WARPS, True)
            ask(do_smem, its_do, stride_dom, m, seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, WARPS, True)
            async_copy.commit_group()
            peak = gl.load(its_peaks + m + gl.arange(0, BLOCK_M, layout=ROW))
            dk_acc, dk_more, dv_acc, dv_more, peak = _over_queries(
                dk_acc, dk_more, dv_acc, dv_more, peak, begin, full, end, its_q, its_do, its_peaks, its_deltas, its_sums,
                stride_qm, stride_dom, k_smem, v_smem, q_smem, do_smem, p_smem, ds_smem, start_n, columns, offset, seqlen_q,
                seqlen_k, window, qk_scale, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HEAD_DIM, HEAD_DIM_V, WARPS, SCORE_WARPS,
                KEY_WARPS, QUERY_WARPS, TRANSPOSED, HIDE, HIDE_QUERIES, CAUSAL, EARLY, ONE, DK_FIRST, DK_OTHER, DV_FIRST,
                DV_OTHER, DQ_FIRST, DQ_OTHER, True,
            )  # fmt: skip
            dk_acc, dk_more, dv_acc, dv_more, peak = _over_queries(
                dk_acc, dk_more, dv_acc, dv_more, peak, full, full_end, end, its_q, its_do, its_peaks, its_deltas, its_sums,
                stride_qm, stride_dom, k_smem, v_smem, q_smem, do_smem, p_smem, ds_smem, start_n, columns, offset, seqlen_q,
                seqlen_k, window, qk_scale, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HEAD_DIM, HEAD_DIM_V, WARPS, SCORE_WARPS,
                KEY_WARPS, QUERY_WARPS, TRANSPOSED, HIDE, HIDE_QUERIES, CAUSAL, EARLY, ONE, DK_FIRST, DK_OTHER, DV_FIRST,
                DV_OTHER, DQ_FIRST, DQ_OTHER, False,
            )  # fmt: skip
            if LEFT_BOUNDED:
                dk_acc, dk_more, dv_acc, dv_more, peak = _over_queries(
                    dk_acc, dk_more, dv_acc, dv_more, peak, full_end, end, end, its_q, its_do, its_peaks, its_deltas, its_sums,
                    stride_qm, stride_dom, k_smem, v_smem, q_smem, do_smem, p_smem, ds_smem, start_n, columns, offset,
                    seqlen_q, seqlen_k, window, qk_scale, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HEAD_DIM, HEAD_DIM_V, WARPS,
                    SCORE_WARPS, KEY_WARPS, QUERY_WARPS, TRANSPOSED, HIDE, HIDE_QUERIES, CAUSAL, EARLY, ONE, DK_FIRST,
                    DK_OTHER, DV_FIRST, DV_OTHER, DQ_FIRST, DQ_OTHER, True,
                )  # fmt: skip
            its_q += stride_qh
            its_do += stride_doh
            its_peaks += rows_padded
            its_deltas += rows_padded
            its_sums += rows_padded.to(gl.int64) * BLOCK_D
        async_copy.wait_group(0)  # nothing is on its way into shared memory that dK and dV go through, or the next tile
        its_head = in_place(head)
        b = its_head // heads_kv
        h_kv = its_head % heads_kv
        its_dk = dk + b.to(gl.int64) * stride_dkb + h_kv.to(gl.int64) * stride_dkh
        its_dv = dv + b.to(gl.int64) * stride_dvb + h_kv.to(gl.int64) * stride_dvh
        dk_step = in_place(stride_dkn)
        dv_step = in_place(stride_dvn)
        put(its_dk, dk_acc * softmax_scale, dk_step, start_n, seqlen_k, BLOCK_N, HEAD_DIM, DK_FIRST, WARPS)
        put(its_dv, dv_acc, dv_step, start_n, seqlen_k, BLOCK_N, HEAD_DIM_V, DV_FIRST, WARPS)
        if DK_OTHER > 0:
            put(
                its_dk,
                dk_more * softmax_scale,
                dk_step,
                start_n,
                seqlen_k,
                BLOCK_N,
                HEAD_DIM,
                DK_OTHER,
                WARPS,
                DK_FIRST,
            )
        if DV_OTHER > 0:
            put(its_dv, dv_more, dv_step, start_n, seqlen_k, BLOCK_N, HEAD_DIM_V, DV_OTHER, WARPS, DV_FIRST)


def _workspaces(problem: Problem, config: Config) -> Workspaces:
    rows = (problem.batch, problem.heads_q, bwd_fused.padded_rows(problem))
    columns = bwd_fused.block_dims(problem.specialization)[0]
    sums = (config["DQ_BUFFERS"], *rows, columns)
    return {"peaks": (rows, "fp32"), "deltas": (rows, "fp32"), "sums": (sums, "fp32")}


VARIANT = Variant(
    kernel=bwd_ordered_sm80_kernel,
    space=bwd_fused.IN_ORDER,
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
    grid=lambda problem, config, _sm_count, _early: config["DQ_BUFFERS"] * problem.batch * problem.heads_kv,
    constants=_constants,
    before=("sm80/bwd_prepare", "sm80/bwd_ordered_zero"),
    after=("sm80/bwd_ordered_finish",),
    surrounded=lambda config, name: name != "sm80/bwd_ordered_zero" or config["DQ_BUFFERS"] > 1,
    workspaces=_workspaces,
    scalars=lambda problem, config, _early: {
        "rows_padded": bwd_fused.padded_rows(problem),
        "DQ_BUFFERS": config["DQ_BUFFERS"],
    },
)
