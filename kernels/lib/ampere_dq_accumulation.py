"""The sums of dQ that kernels/sm80/bwd_fused.py and bwd_ordered.py leave, in the order of ``_places`` in
lib/ampere_backward.py: what the kernels share that put them back. Device side, and their grid."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import head_base
from fa2tune.search_spaces.sm80 import bwd_fused as space


@triton.jit
def own_rows(dq, stride_dqb, stride_dqh, heads_q, seqlen_q, BLOCK_R: tl.constexpr):
    """(head of this program, counted over the batch; its first row; where dQ of that head starts)."""
    tiles = tl.cdiv(seqlen_q, BLOCK_R)
    head = tl.program_id(0) // tiles
    start_m = tl.program_id(0) % tiles * BLOCK_R
    return head, start_m, head_base(dq, head // heads_q, head % heads_q, stride_dqb, stride_dqh, "pointer")


@triton.jit
def in_rows(words, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """words [BLOCK_R * BLOCK_D] as [BLOCK_R, BLOCK_D]."""
    # row / 8, column / 8, column % 2, row % 8, column % 8 / 2
    tile = tl.reshape(words, [BLOCK_R // 8, BLOCK_D // 8, 2, 8, 4])
    return tl.reshape(tl.permute(tile, (0, 3, 1, 4, 2)), [BLOCK_R, BLOCK_D])


def grid(problem, config, _sm_count, _early):
    rows = space.padded_rows(problem) if problem.extent.ragged else problem.seqlen_q
    return triton.cdiv(rows, config["BLOCK_R"]) * problem.batch * problem.heads_q
