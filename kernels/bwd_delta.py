"""Before the backward: delta = rowsum(dO * O) - dlse (FlashAttention-2 paper, algorithm 2, line 4).

Bound by memory, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.kernels.common import load_tile
from fa2tune.search_spaces.bwd_delta import SPACE
from fa2tune.variant import Variant


@triton.jit
def bwd_delta_kernel(
    o, do, dlse, delta, stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom,
    stride_dlseb, stride_dlseh, stride_dlsem, batch, heads_q, seqlen_q,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """o, do [B, Hq, Sq, DV], dlse [B, Hq, Sq] (read only if HAS_DLSE) -> delta [B, Hq, Sq] float32, contiguous.

    The gradient of lse enters here: d lse / d s = p, so dS = P * (dP - (rowsum(dO * O) - dlse)).
    """
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    head = tl.program_id(0) // tiles
    start_m = tl.program_id(0) % tiles * BLOCK_M
    b = (head // heads_q).to(tl.int64)
    h = (head % heads_q).to(tl.int64)
    rows = start_m + tl.arange(0, BLOCK_M)
    inside = rows < seqlen_q
    o_tile = load_tile(o + b * stride_ob + h * stride_oh, b, h, start_m, stride_om, seqlen_q,
                       BLOCK_M, HEAD_DIM_V, BLOCK_DV, True, "pointer").to(tl.float32)  # [M, DV]  # fmt: skip
    do_tile = load_tile(do + b * stride_dob + h * stride_doh, b, h, start_m, stride_dom, seqlen_q,
                        BLOCK_M, HEAD_DIM_V, BLOCK_DV, True, "pointer").to(tl.float32)  # [M, DV]  # fmt: skip
    sums = tl.sum(o_tile * do_tile, 1)  # [M]
    if HAS_DLSE:
        pointers = dlse + b * stride_dlseb + h * stride_dlseh + rows.to(tl.int64) * stride_dlsem
        sums -= tl.load(pointers, mask=inside, other=0.0)
    tl.store(delta + head.to(tl.int64) * seqlen_q + rows, sums, mask=inside)


VARIANT = Variant(
    name="bwd_delta",
    kernel=bwd_delta_kernel,
    space=SPACE,
    tensors={"o": "", "do": "", "dlse": "fp32", "delta": "fp32"},
    descriptors={},
    grid=lambda problem, config: triton.cdiv(problem.seqlen_q, config["BLOCK_M"]) * problem.batch * problem.heads_q,
)
