"""dK and dV of a tile of keys, from the accumulators of the fused backwards of kernels/sm80/ to memory. Device side."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.ampere import put
from fa2tune.kernels.lib.ampere_pairs import put_pair


@gluon.jit
def put_keys(
    dk, dv, dk_acc, dk_more, dv_acc, dv_more, stride_dkn, stride_dvn, start_n, seqlen_k, softmax_scale, form
):  # fmt: skip
    """dK and dV of a tile to the heads at ``dk`` and ``dv``."""
    ROWS: gl.constexpr = form.BLOCK_N
    WARPS: gl.constexpr = form.WARPS
    if form.KEYS_APART:
        put_pair(
            dk, dv, dk_acc, stride_dkn, stride_dvn, start_n, seqlen_k, softmax_scale, ROWS, form.HEAD_DIM, form.DK_FIRST,
            WARPS, 0, form.KEYS,
        )  # fmt: skip
        if form.DK_OTHER > 0:
            put_pair(
                dk, dv, dk_more, stride_dkn, stride_dvn, start_n, seqlen_k, softmax_scale, ROWS, form.HEAD_DIM,
                form.DK_OTHER, WARPS, form.DK_FIRST, form.KEYS,
            )  # fmt: skip
    else:
        put(dk, dk_acc * softmax_scale, stride_dkn, start_n, seqlen_k, ROWS, form.HEAD_DIM, form.DK_FIRST, WARPS)
        put(dv, dv_acc, stride_dvn, start_n, seqlen_k, ROWS, form.HEAD_DIM_V, form.DV_FIRST, WARPS)
        if form.DK_OTHER > 0:
            put(
                dk, dk_more * softmax_scale, stride_dkn, start_n, seqlen_k, ROWS, form.HEAD_DIM, form.DK_OTHER, WARPS,
                form.DK_FIRST,
            )  # fmt: skip
        if form.DV_OTHER > 0:
            put(dv, dv_more, stride_dvn, start_n, seqlen_k, ROWS, form.HEAD_DIM_V, form.DV_OTHER, WARPS, form.DV_FIRST)
