"""After the fused backward by mma.sync: dq = softmax_scale * the float32 sums, in dq's dtype and memory order.

Bound by memory, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.ampere_dq_accumulation import grid, in_rows, own_rows
from fa2tune.kernels.lib.common import store_tile
from fa2tune.kernels.lib.extent import place
from fa2tune.search_spaces.sm80 import bwd_fused as space
from fa2tune.search_spaces.sm80.bwd_finish import SPACE
from fa2tune.spec.variant import Variant

#: Rows of a block of the workspaces, of packed sequences.
UNIT = tl.constexpr(space.ROW_UNIT)


@triton.jit
def bwd_finish_sm80_kernel(
    sums, dq, softmax_scale, stride_dqb, stride_dqh, stride_dqm, heads_q, seqlen_q, rows_padded, batch, cu_seqlens_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, RAGGED: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """sums [B, Hq, rows_padded, BLOCK_D] float32, in the order of kernels/sm80/bwd_fused.py -> dq [B, Hq, Sq, D]. RAGGED: as
    there; rows behind the last sequence: 0."""
    if RAGGED:
        head, start_m, dq = own_rows(dq, stride_dqb, stride_dqh, heads_q, rows_padded, BLOCK_R)
        sums += (head.to(tl.int64) * rows_padded + start_m) * BLOCK_D
        block, first_q, seqlen_q, _, _ = place(
            cu_seqlens_q, cu_seqlens_q, batch, seqlen_q, seqlen_q, start_m // UNIT, UNIT
        )
        start_m = block * UNIT + start_m % UNIT
        if start_m >= seqlen_q:  # no row of any sequence
            return
        dq += first_q.to(tl.int64) * stride_dqm
    else:
        head, start_m, dq = own_rows(dq, stride_dqb, stride_dqh, heads_q, seqlen_q, BLOCK_R)
        sums += (head.to(tl.int64) * rows_padded + start_m) * BLOCK_D
    words = tl.load(sums + tl.arange(0, BLOCK_R * BLOCK_D)) * softmax_scale
    tile = in_rows(words, BLOCK_R, BLOCK_D)
    store_tile(dq, tile, start_m, stride_dqm, seqlen_q, BLOCK_R, HEAD_DIM, BLOCK_D)


VARIANT = Variant(
    kernel=bwd_finish_sm80_kernel,
    space=SPACE,
    tensors={"sums": "fp32", "dq": "", "cu_seqlens_q": "i32"},
    descriptors={},
    grid=grid,
)
