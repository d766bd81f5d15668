"""One tile of keys' way over the queries of a head, by mma.sync and cp.async, with all five products of the backward: dK and dV
stay in registers, dQ is added to float32 sums. Shared by the fused backwards of kernels/sm80/."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from fa2tune.kernels.lib.ampere import (
    MINUS_INFINITY,
    ZERO,
    a_b,
    a_bt,
    add_columns,
    ask,
    at_b,
    hidden_behind,
    in_place,
    mma_layout,
    none_yet,
    operand_a,
)
from fa2tune.search_spaces.sm80 import bwd_fused as space
from fa2tune.spec.problem import Config, Specialization, head_dim_parts, padded_head_dim

STEP = gl.constexpr(space.STEP)


@gluon.jit
def _places(
    sums, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Where dQ of each row and of columns [FIRST, FIRST + COLUMNS) of a block goes, whose sums are at ``sums``. Sums of 8 rows
    and 8 columns lie together: 64 numbers, half of which the 32 threads of a warp hold one each of and add to 128 bytes in a
    row. kernels/sm80/bwd_finish.py puts them back."""
    r = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    c = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    # columns are constants in the addresses; known to be the same in every trip, all addresses would be kept in registers
    of_row = in_place((r // 8) * (8 * BLOCK_D) + (r % 8) * 4)
    of_column = (c // 8) * 64 + (c % 2) * 32 + (c % 8) // 2
    return (sums + of_row)[:, None] + of_column[None, :]


@gluon.jit
def _add(
    sums, dq, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Adds dq [BLOCK_M, COLUMNS] to the sums, columns below HEAD_DIM."""
    targets = _places(sums, BLOCK_M, BLOCK_D, FIRST, COLUMNS, layout)
    if HEAD_DIM < FIRST + COLUMNS:
        d = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        gl.atomic_add(targets, dq, mask=(d < HEAD_DIM)[None, :], sem="relaxed")
    else:
        gl.atomic_add(targets, dq, sem="relaxed")


@gluon.jit
def _trip(
    dk_acc, dk_more, dv_acc, dv_more, peak, m, end, q, do, peaks, deltas, sums, stride_qm, stride_dom, k_smem, v_smem, q_smem,
    do_smem, p_smem, ds_smem, start_n, columns, offset, seqlen_q, seqlen_k, window, qk_scale, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    WARPS: gl.constexpr, SCORE_WARPS: gl.constexpr, KEY_WARPS: gl.constexpr, QUERY_WARPS: gl.constexpr,
    TRANSPOSED: gl.constexpr, HIDE: gl.constexpr, HIDE_QUERIES: gl.constexpr, CAUSAL: gl.constexpr, EARLY: gl.constexpr,
    ONE: gl.constexpr, DK_FIRST: gl.constexpr, DK_OTHER: gl.constexpr, DV_FIRST: gl.constexpr, DV_OTHER: gl.constexpr,
    DQ_FIRST: gl.constexpr, DQ_OTHER: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Queries [m, m + BLOCK_M) of a head, whose peaks are at hand. The last block asks for itself once more, which is never
    read."""
    SCORES: gl.constexpr = mma_layout(WARPS, 1) if TRANSPOSED else mma_layout(SCORE_WARPS, WARPS // SCORE_WARPS)
    KEYS: gl.constexpr = mma_layout(WARPS, 1) if TRANSPOSED else mma_layout(KEY_WARPS, WARPS // KEY_WARPS)
    QUERIES: gl.constexpr = mma_layout(QUERY_WARPS, WARPS // QUERY_WARPS)
    ROW: gl.constexpr = gl.SliceLayout(0 if TRANSPOSED else 1, SCORES)
    dtype: gl.constexpr = k_smem.dtype
    r = gl.arange(0, BLOCK_M, layout=ROW)
    rows = m + r
    after = gl.minimum(m + BLOCK_M, end - BLOCK_M)
    async_copy.wait_group(0)
    delta = gl.load(gl.multiple_of(deltas + rows, [8]))  # whole blocks of padded rows
    if TRANSPOSED:
        s = a_bt(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=SCORES), k_smem, q_smem, HEAD_DIM, STEP, SCORES)
        if EARLY:
            dp = a_bt(
                gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=SCORES), v_smem, do_smem, HEAD_DIM_V, STEP, SCORES
            )
        p = gl.exp2(gl.fma(s, qk_scale, peak[None, :]))
        if MASK:
            if CAUSAL:
                p = hidden_behind(p, columns[:, None], gl.minimum(rows + offset, seqlen_k - 1)[None, :], ZERO)
            else:
                p = HIDE_QUERIES(p, columns, m, offset, seqlen_k, window, SCORES)
        if not EARLY:
            dp = a_bt(
                gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=SCORES), v_smem, do_smem, HEAD_DIM_V, STEP, SCORES
            )
        ds = (p * (dp - delta[None, :])).to(dtype)
        ds_smem.store(ds)
        p_tile = gl.convert_layout(p.to(dtype), operand_a(KEYS))
        dv_acc, dv_more = add_columns(dv_acc, dv_more, p_tile, do_smem, 0, BLOCK_M, DV_FIRST, DV_OTHER, KEYS)
        ds_tile = gl.convert_layout(ds, operand_a(KEYS))
        dk_acc, dk_more = add_columns(dk_acc, dk_more, ds_tile, q_smem, 0, BLOCK_M, DK_FIRST, DK_OTHER, KEYS)
    else:
        s = a_bt(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES), q_smem, k_smem, HEAD_DIM, STEP, SCORES)
        if EARLY:
            dp = a_bt(
                gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES), do_smem, v_smem, HEAD_DIM_V, STEP, SCORES
            )
        weight = gl.fma(s, qk_scale, peak[:, None])
        if MASK:
            if CAUSAL:
                seen = gl.minimum(rows + offset, seqlen_k - 1)
                weight = hidden_behind(weight, columns[None, :], seen[:, None], MINUS_INFINITY)
            else:
                weight = HIDE(weight, rows, start_n, offset, seqlen_k, window, SCORES)
        p = gl.exp2(weight)
        p_smem.store(p.to(dtype))
        if ONE:
            dv_acc, dv_more = at_b(dv_acc, dv_more, p_smem, do_smem, BLOCK_M, STEP, DV_FIRST, DV_OTHER, KEYS)
            dp = a_bt(
                gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES), do_smem, v_smem, HEAD_DIM_V, STEP, SCORES
            )
            p = p_smem.load(SCORES).to(gl.float32)
            p_smem.store((p * (dp - delta[:, None])).to(dtype))
            dk_acc, dk_more = at_b(dk_acc, dk_more, p_smem, q_smem, BLOCK_M, STEP, DK_FIRST, DK_OTHER, KEYS)
        else:
            if not EARLY:
                dp = a_bt(
                    gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES), do_smem, v_smem, HEAD_DIM_V, STEP, SCORES
                )
            ds_smem.store((p * (dp - delta[:, None])).to(dtype))
            dv_acc, dv_more = at_b(dv_acc, dv_more, p_smem, do_smem, BLOCK_M, STEP, DV_FIRST, DV_OTHER, KEYS)
            dk_acc, dk_more = at_b(dk_acc, dk_more, ds_smem, q_smem, BLOCK_M, STEP, DK_FIRST, DK_OTHER, KEYS)
    peak = gl.load(gl.multiple_of(peaks + (after + r), [8]))
    ask(q_smem, q, stride_qm, after, seqlen_q, BLOCK_M, HEAD_DIM, BLOCK_D, WARPS, True)
    ask(do_smem, do, stride_dom, after, seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, WARPS, True)
    async_copy.commit_group()
    dq = none_yet(BLOCK_M, DQ_FIRST, QUERIES)
    dq_more = none_yet(BLOCK_M, DQ_OTHER, QUERIES)
    if TRANSPOSED:
        dq, dq_more = at_b(dq, dq_more, ds_smem, k_smem, BLOCK_N, STEP, DQ_FIRST, DQ_OTHER, QUERIES)
    else:
        dq, dq_more = a_b(dq, dq_more, ds_smem, k_smem, BLOCK_N, STEP, DQ_FIRST, DQ_OTHER, QUERIES)
    block_sums = sums + m.to(gl.int64) * BLOCK_D
    _add(block_sums, dq, BLOCK_M, BLOCK_D, HEAD_DIM, 0, DQ_FIRST, QUERIES)
    if DQ_OTHER > 0:
        _add(block_sums, dq_more, BLOCK_M, BLOCK_D, HEAD_DIM, DQ_FIRST, DQ_OTHER, QUERIES)
    return dk_acc, dk_more, dv_acc, dv_more, peak


@gluon.jit
def _over_queries(
    dk_acc, dk_more, dv_acc, dv_more, peak, first, stop, end, q, do, peaks, deltas, sums, stride_qm, stride_dom, k_smem,
    v_smem, q_smem, do_smem, p_smem, ds_smem, start_n, columns, offset, seqlen_q, seqlen_k, window, qk_scale,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, WARPS: gl.constexpr, SCORE_WARPS: gl.constexpr, KEY_WARPS: gl.constexpr,
    QUERY_WARPS: gl.constexpr, TRANSPOSED: gl.constexpr, HIDE: gl.constexpr, HIDE_QUERIES: gl.constexpr, CAUSAL: gl.constexpr,
    EARLY: gl.constexpr, ONE: gl.constexpr, DK_FIRST: gl.constexpr, DK_OTHER: gl.constexpr, DV_FIRST: gl.constexpr,
    DV_OTHER: gl.constexpr, DQ_FIRST: gl.constexpr, DQ_OTHER: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Queries [first, stop) of a head, in whole blocks; ``end``: of all of its queries."""
    for m in range(first, stop, BLOCK_M):
        dk_acc, dk_more, dv_acc, dv_more, peak = _trip(
            dk_acc, dk_more, dv_acc, dv_more, peak, m, end, q, do, peaks, deltas, sums, stride_qm, stride_dom, k_smem, v_smem,
            q_smem, do_smem, p_smem, ds_smem, start_n, columns, offset, seqlen_q, seqlen_k, window, qk_scale, BLOCK_M, BLOCK_N,
            BLOCK_D, BLOCK_DV, HEAD_DIM, HEAD_DIM_V, WARPS, SCORE_WARPS, KEY_WARPS, QUERY_WARPS, TRANSPOSED, HIDE,
            HIDE_QUERIES, CAUSAL, EARLY, ONE, DK_FIRST, DK_OTHER, DV_FIRST, DV_OTHER, DQ_FIRST, DQ_OTHER, MASK,
        )  # fmt: skip
    return dk_acc, dk_more, dv_acc, dv_more, peak


def _constants(spec: Specialization, config: Config) -> dict[str, Any]:
    """Among them: columns of each result in the first of its accumulators, and in the second. 96 are 64 and 32, so that none is
    computed for the padding; one holds them all where warps would find no column of their own in the second."""
    found: dict[str, Any] = {"CAUSAL": spec.mask == "causal", "WARPS": config["num_warps"]}
    for name, dim, down in (("DK", spec.head_dim, "KEY_WARPS"), ("DV", spec.head_dim_v, "KEY_WARPS"),
                            ("DQ", spec.head_dim, "QUERY_WARPS")):  # fmt: skip
        first, other = head_dim_parts(dim)
        if other < 8 * (config["num_warps"] // config[down]):
            first, other = padded_head_dim(dim), 0
        found |= {f"{name}_FIRST": first, f"{name}_OTHER": other}
    return found
