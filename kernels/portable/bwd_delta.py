"""Before the fused backward: delta = rowsum(dO * O) - dlse (FlashAttention-2 paper, algorithm 2, line 4).

Bound by memory, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import delta_of_rows, head_base, load_tile
from fa2tune.search_spaces.portable.bwd_delta import SPACE
from fa2tune.spec.variant import Variant


@triton.jit
def bwd_delta_kernel(
    o, do, dlse, delta, stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom,
    stride_dlseb, stride_dlseh, stride_dlsem, batch, heads_q, seqlen_q, has_dlse,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """o, do [B, Hq, Sq, DV], dlse [B, Hq, Sq] (read only if has_dlse) -> delta [B, Hq, Sq] float32, contiguous."""
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    head = tl.program_id(0) // tiles
    start_m = tl.program_id(0) % tiles * BLOCK_M
    b = head // heads_q
    h = head % heads_q
    rows = start_m + tl.arange(0, BLOCK_M)
    inside = rows < seqlen_q
    o = head_base(o, b, h, stride_ob, stride_oh, "pointer")
    do = head_base(do, b, h, stride_dob, stride_doh, "pointer")
    dlse = head_base(dlse, b, h, stride_dlseb, stride_dlseh, "pointer")
    o_tile = load_tile(o, b, h, start_m, stride_om, seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True, "pointer")  # [M, DV]
    do_tile = load_tile(do, b, h, start_m, stride_dom, seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True, "pointer")
    sums = delta_of_rows(
        o_tile, do_tile, dlse, rows, stride_dlsem, inside & (tl.zeros_like(rows) + has_dlse != 0)
    )  # [M]
    tl.store(delta + head.to(tl.int64) * seqlen_q + rows, sums, mask=inside)


VARIANT = Variant(
    role="bwd_delta",
    kernel=bwd_delta_kernel,
    space=SPACE,
    tensors={"o": "", "do": "", "dlse": "fp32", "delta": "fp32"},
    descriptors={},
    grid=lambda problem, config, _sm_count, _early: (
        triton.cdiv(problem.seqlen_q, config["BLOCK_M"]) * problem.batch * problem.heads_q
    ),
)
