"""After the fused backward by mma.sync with dQ in a fixed order: dq = softmax_scale * what its float32 sums add up to, from the
first to the last, in dq's dtype and memory order.

Bound by memory, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.ampere_dq_accumulation import grid, in_rows, own_rows
from fa2tune.kernels.lib.common import store_tile
from fa2tune.search_spaces.sm80.bwd_ordered_finish import SPACE
from fa2tune.spec.variant import Variant


@triton.jit
def bwd_ordered_finish_sm80_kernel(
    sums, dq, softmax_scale, stride_dqb, stride_dqh, stride_dqm, batch, heads_q, seqlen_q, rows_padded, DQ_BUFFERS,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """sums [DQ_BUFFERS, B, Hq, rows_padded, BLOCK_D] float32, rows and columns in the order of kernels/sm80/bwd_fused.py -> dq
    [B, Hq, Sq, D]."""
    head, start_m, dq = own_rows(dq, stride_dqb, stride_dqh, heads_q, seqlen_q, BLOCK_R)
    own = (head.to(tl.int64) * rows_padded + start_m) * BLOCK_D + tl.arange(0, BLOCK_R * BLOCK_D)
    step = (batch * heads_q).to(tl.int64) * rows_padded * BLOCK_D
    words = tl.load(sums + own)
    for _buffer in range(1, DQ_BUFFERS):
        sums += step
        words += tl.load(sums + own)
    tile = in_rows(words * softmax_scale, BLOCK_R, BLOCK_D)
    store_tile(dq, tile, start_m, stride_dqm, seqlen_q, BLOCK_R, HEAD_DIM, BLOCK_D)


VARIANT = Variant(
    kernel=bwd_ordered_finish_sm80_kernel,
    space=SPACE,
    tensors={"sums": "fp32", "dq": ""},
    descriptors={},
    grid=grid,
)
