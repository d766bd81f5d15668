"""After the fused Hopper backward: dq = softmax_scale * the float32 sums, in dq's dtype and memory order.

Bound by memory, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.kernels.common import head_base, store_tile
from fa2tune.search_spaces.bwd_finish_hopper import SPACE
from fa2tune.variant import Variant


@triton.jit
def dq_of(words, softmax_scale, BLOCK_R: tl.constexpr, SUM_COLUMNS: tl.constexpr, PERMUTED_COLUMNS: tl.constexpr):
    """dQ [BLOCK_R, SUM_COLUMNS], float32, of rows whose sums start at the pointer words, as bwd_fused_hopper.py left them."""
    sums = tl.load(words + tl.arange(0, BLOCK_R * SUM_COLUMNS)) * softmax_scale
    PIECES: tl.constexpr = SUM_COLUMNS // PERMUTED_COLUMNS
    # (64 rows, piece), column / 8, row / 16, row % 8, column % 8 / 2, row / 8 % 2, column % 2
    tile = tl.reshape(sums, [BLOCK_R // 64 * PIECES, PERMUTED_COLUMNS // 8, 4, 8, 4, 2, 2])
    tile = tl.permute(tile, (0, 2, 5, 3, 1, 4, 6))
    tile = tl.reshape(tile, [BLOCK_R // 64, PIECES, 64, PERMUTED_COLUMNS])
    return tl.reshape(tl.permute(tile, (0, 2, 1, 3)), [BLOCK_R, SUM_COLUMNS])


@triton.jit
def bwd_finish_hopper_kernel(
    words, dq, softmax_scale, stride_dqb, stride_dqh, stride_dqm, heads_q, seqlen_q, rows_padded,
    HEAD_DIM: tl.constexpr, SUM_COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, PERMUTED_COLUMNS: tl.constexpr,
):  # fmt: skip
    """words [B, Hq, rows_padded, SUM_COLUMNS] float32 -> dq [B, Hq, Sq, D]. The words of each 64 rows lie as pieces
    [64, PERMUTED_COLUMNS] in the register order of a wgmma accumulator (bwd_fused_hopper.py). BLOCK_R is a multiple of 64 that
    divides rows_padded."""
    tiles = tl.cdiv(seqlen_q, BLOCK_R)
    head = tl.program_id(0) // tiles
    start_m = tl.program_id(0) % tiles * BLOCK_R
    dq = head_base(dq, head // heads_q, head % heads_q, stride_dqb, stride_dqh, "pointer")
    words += (head.to(tl.int64) * rows_padded + start_m) * SUM_COLUMNS
    tile = dq_of(words, softmax_scale, BLOCK_R, SUM_COLUMNS, PERMUTED_COLUMNS)
    store_tile(dq, tile, start_m, stride_dqm, seqlen_q, BLOCK_R, HEAD_DIM, SUM_COLUMNS)


VARIANT = Variant(
    name="bwd_finish_hopper",
    kernel=bwd_finish_hopper_kernel,
    space=SPACE,
    tensors={"words": "fp32", "dq": ""},
    descriptors={},
    grid=lambda problem, config: triton.cdiv(problem.seqlen_q, config["BLOCK_R"]) * problem.batch * problem.heads_q,
)
