"""Before the fused Hopper backward: lse and delta of every row as its TMA loads want them, and the dQ workspace zeroed.

Bound by memory, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.kernels.common import LOG2E, delta_of_rows, head_base, load_tile
from fa2tune.search_spaces.bwd_fused_hopper import padded_rows
from fa2tune.search_spaces.bwd_prepare_hopper import SPACE
from fa2tune.variant import Variant


@triton.jit
def bwd_prepare_hopper_kernel(
    o, do, lse, dlse, stats, words, stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom,
    stride_dlseb, stride_dlseh, stride_dlsem, batch, heads_q, seqlen_q, seqlen_k, rows_padded, has_dlse, counter, counts,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, IS_CAUSAL: tl.constexpr, BLOCK_R: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
):  # fmt: skip
    """o, do [B, Hq, Sq, DV], lse [B, Hq, Sq], dlse [B, Hq, Sq] (read only if has_dlse) -> stats [2, B, Hq, rows_padded]:
    lse * log2(e), +inf where p is to be zero (rows past the end, rows that see no key), and rowsum(dO * O) - dlse; words
    [B, Hq, rows_padded, SUM_COLUMNS] float32: zeros; counter [1] int32, only if counts: 0. rows_padded is a multiple of
    BLOCK_R."""
    tiles = rows_padded // BLOCK_R
    head = tl.program_id(0) // tiles
    start_m = tl.program_id(0) % tiles * BLOCK_R
    tl.store(counter, 0, mask=(tl.program_id(0) == 0) & (counts != 0))
    b = head // heads_q
    h = head % heads_q
    rows = start_m + tl.arange(0, BLOCK_R)
    inside = rows < seqlen_q
    first = head.to(tl.int64) * rows_padded + start_m
    zeros = tl.zeros([BLOCK_R * SUM_COLUMNS], tl.float32)
    tl.store(words + first * SUM_COLUMNS + tl.arange(0, BLOCK_R * SUM_COLUMNS), zeros)
    o = head_base(o, b, h, stride_ob, stride_oh, "pointer")
    do = head_base(do, b, h, stride_dob, stride_doh, "pointer")
    dlse = head_base(dlse, b, h, stride_dlseb, stride_dlseh, "pointer")
    o_tile = load_tile(o, b, h, start_m, stride_om, seqlen_q, BLOCK_R, HEAD_DIM_V, BLOCK_DV, True, "pointer")  # [R, DV]
    do_tile = load_tile(do, b, h, start_m, stride_dom, seqlen_q, BLOCK_R, HEAD_DIM_V, BLOCK_DV, True, "pointer")
    sums = delta_of_rows(
        o_tile, do_tile, dlse, rows, stride_dlsem, inside & (tl.zeros_like(rows) + has_dlse != 0)
    )  # [R]
    word = tl.load(lse + head.to(tl.int64) * seqlen_q + rows, mask=inside, other=float("inf")) * LOG2E
    if IS_CAUSAL:
        word = tl.where(rows + seqlen_k - seqlen_q < 0, float("inf"), word)
    every = tl.cast(batch * heads_q, tl.int64) * rows_padded
    tl.store(stats + first + tl.arange(0, BLOCK_R), word)
    tl.store(stats + every + first + tl.arange(0, BLOCK_R), sums)


VARIANT = Variant(
    name="bwd_prepare_hopper",
    kernel=bwd_prepare_hopper_kernel,
    space=SPACE,
    tensors={"o": "", "do": "", "lse": "fp32", "dlse": "fp32", "stats": "fp32", "words": "fp32", "counter": "i32"},
    descriptors={},
    grid=lambda problem, config: padded_rows(problem) // config["BLOCK_R"] * problem.batch * problem.heads_q,
)
