"""After the fused backward by mma.sync with dQ in a fixed order: dq = softmax_scale * what its float32 sums add up to, from the
first to the last, in dq's dtype and memory order.

Bound by memory, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import head_base, store_tile
from fa2tune.search_spaces.sm80.bwd_ordered_finish import SPACE
from fa2tune.spec.variant import Variant


@triton.jit
def bwd_ordered_finish_sm80_kernel(
    sums, dq, softmax_scale, stride_dqb, stride_dqh, stride_dqm, batch, heads_q, seqlen_q, rows_padded, DQ_BUFFERS,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """sums [DQ_BUFFERS, B, Hq, rows_padded, BLOCK_D] float32, rows and columns in the order of kernels/sm80/bwd_fused.py -> dq
    [B, Hq, Sq, D]."""
    tiles = tl.cdiv(seqlen_q, BLOCK_R)
    head = tl.program_id(0) // tiles
    start_m = tl.program_id(0) % tiles * BLOCK_R
    dq = head_base(dq, head // heads_q, head % heads_q, stride_dqb, stride_dqh, "pointer")
    own = (head.to(tl.int64) * rows_padded + start_m) * BLOCK_D + tl.arange(0, BLOCK_R * BLOCK_D)
    step = (batch * heads_q).to(tl.int64) * rows_padded * BLOCK_D
    words = tl.load(sums + own)
    for _buffer in range(1, DQ_BUFFERS):
        sums += step
        words += tl.load(sums + own)
    # row / 8, column / 8, column % 2, row % 8, column % 8 / 2
    tile = tl.reshape(words * softmax_scale, [BLOCK_R // 8, BLOCK_D // 8, 2, 8, 4])
    tile = tl.reshape(tl.permute(tile, (0, 3, 1, 4, 2)), [BLOCK_R, BLOCK_D])
    store_tile(dq, tile, start_m, stride_dqm, seqlen_q, BLOCK_R, HEAD_DIM, BLOCK_D)


VARIANT = Variant(
    kernel=bwd_ordered_finish_sm80_kernel,
    space=SPACE,
    tensors={"sums": "fp32", "dq": ""},
    descriptors={},
    grid=lambda problem, config, _sm_count, _early: (
        triton.cdiv(problem.seqlen_q, config["BLOCK_R"]) * problem.batch * problem.heads_q
    ),
)
