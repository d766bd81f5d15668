"""Before the fused backward by mma.sync with dQ in a fixed order: zeros in all sums of dQ but the first, which
kernels/sm80/bwd_prepare.py has set to zero. A tile of keys does not meet every query.

Bound by memory, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.search_spaces.sm80 import bwd_fused
from fa2tune.search_spaces.sm80.bwd_ordered_zero import SPACE
from fa2tune.spec.variant import Variant


@triton.jit
def bwd_ordered_zero_sm80_kernel(
    sums, batch, heads_q, rows_padded, DQ_BUFFERS, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """sums [DQ_BUFFERS, B, Hq, rows_padded, BLOCK_D] float32: zeros from the second on. rows_padded: multiples of BLOCK_R."""
    own = tl.program_id(0).to(tl.int64) * (BLOCK_R * BLOCK_D) + tl.arange(0, BLOCK_R * BLOCK_D)
    step = (batch * heads_q).to(tl.int64) * rows_padded * BLOCK_D
    for _buffer in range(1, DQ_BUFFERS):
        sums += step
        tl.store(sums + own, tl.zeros([BLOCK_R * BLOCK_D], tl.float32))


VARIANT = Variant(
    kernel=bwd_ordered_zero_sm80_kernel,
    space=SPACE,
    tensors={"sums": "fp32"},
    descriptors={},
    grid=lambda problem, config, _sm_count, _early: (
        bwd_fused.padded_rows(problem) // config["BLOCK_R"] * problem.batch * problem.heads_q
    ),
)
