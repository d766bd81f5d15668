"""Before the fused backward by mma.sync: lse and delta of every row in rows padded to whole blocks, and the sums of dQ zeroed.

Bound by memory, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import LOG2E, delta_of_rows, head_base, load_tile
from fa2tune.kernels.lib.extent import place
from fa2tune.search_spaces.sm80 import bwd_fused as space
from fa2tune.search_spaces.sm80.bwd_prepare import SPACE
from fa2tune.spec.variant import Variant

#: Rows of a block of the workspaces, of packed sequences.
UNIT = tl.constexpr(space.ROW_UNIT)
TURN_ROWS = tl.constexpr(space.TURN_ROWS)


@triton.jit
def bwd_prepare_sm80_kernel(
    o, do, lse, dlse, peaks, deltas, sums, stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom,
    stride_dlseb, stride_dlseh, stride_dlsem, heads_q, seqlen_q, rows_padded, has_dlse, batch, cu_seqlens_q,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, RAGGED: tl.constexpr, BLOCK_R: tl.constexpr,
    IN_ORDER: tl.constexpr,
):  # fmt: skip
    """o, do [B, Hq, Sq, DV], lse [B, Hq, Sq], dlse [B, Hq, Sq] (read only if has_dlse) -> float32, each [B, Hq, rows_padded]:
    peaks = -lse * log2(e), deltas = rowsum(dO * O) - dlse; sums [B, Hq, rows_padded, BLOCK_D]: zeros. Where p is to be zero
    (rows past the end, rows that see no key) peaks are -inf and deltas 0. rows_padded is a multiple of BLOCK_R. RAGGED,
    IN_ORDER: as sm80/bwd_fused.py has them; turns: 0."""
    tiles = rows_padded // BLOCK_R
    head = tl.program_id(0) // tiles
    start_m = tl.program_id(0) % tiles * BLOCK_R
    b = head // heads_q
    h = head % heads_q
    padded = start_m
    if RAGGED:
        lse += head.to(tl.int64) * seqlen_q
        block, first_q, seqlen_q, _, _ = place(
            cu_seqlens_q, cu_seqlens_q, batch, seqlen_q, seqlen_q, start_m // UNIT, UNIT
        )
        if block * UNIT >= seqlen_q:  # of no sequence; of one, rows past its end are read by whole blocks
            return
        start_m = block * UNIT + start_m % UNIT
        o += first_q.to(tl.int64) * stride_om
        do += first_q.to(tl.int64) * stride_dom
        lse += first_q
        dlse += first_q.to(tl.int64) * stride_dlsem
    rows = start_m + tl.arange(0, BLOCK_R)
    inside = rows < seqlen_q
    first = head.to(tl.int64) * rows_padded + padded
    zeros = tl.zeros([BLOCK_R * BLOCK_D], tl.float32)
    tl.store(sums + first * BLOCK_D + tl.arange(0, BLOCK_R * BLOCK_D), zeros)
    if IN_ORDER:
        turns = deltas + tl.cast((1 if RAGGED else batch) * heads_q, tl.int64) * rows_padded + first // TURN_ROWS
        tl.store(turns + tl.arange(0, BLOCK_R // TURN_ROWS), tl.zeros([BLOCK_R // TURN_ROWS], tl.float32))
    o = head_base(o, b, h, stride_ob, stride_oh, "pointer")
    do = head_base(do, b, h, stride_dob, stride_doh, "pointer")
    dlse = head_base(dlse, b, h, stride_dlseb, stride_dlseh, "pointer")
    o_tile = load_tile(o, b, h, start_m, stride_om, seqlen_q, BLOCK_R, HEAD_DIM_V, BLOCK_DV, True, "pointer")  # [R, DV]
    do_tile = load_tile(do, b, h, start_m, stride_dom, seqlen_q, BLOCK_R, HEAD_DIM_V, BLOCK_DV, True, "pointer")
    delta = delta_of_rows(
        o_tile, do_tile, dlse, rows, stride_dlsem, inside & (tl.zeros_like(rows) + has_dlse != 0)
    )  # [R]
    if not RAGGED:
        lse += head.to(tl.int64) * seqlen_q
    row_lse = tl.load(lse + rows, mask=inside, other=float("inf"))
    no_key = row_lse == float("-inf")
    tl.store(peaks + first + tl.arange(0, BLOCK_R), tl.where(no_key, float("-inf"), row_lse * -LOG2E))
    tl.store(deltas + first + tl.arange(0, BLOCK_R), tl.where(no_key, 0.0, delta))


VARIANT = Variant(
    kernel=bwd_prepare_sm80_kernel,
    space=SPACE,
    tensors={
        "o": "",
        "do": "",
        "lse": "fp32",
        "dlse": "fp32",
        "peaks": "fp32",
        "deltas": "fp32",
        "sums": "fp32",
        "cu_seqlens_q": "i32",
    },
    descriptors={},
    constants=lambda _spec, config: {"IN_ORDER": config.get("IN_ORDER", False)},
    grid=lambda problem, config, _sm_count, _early: (
        space.padded_rows(problem) // config["BLOCK_R"] * problem.batch * problem.heads_q
    ),
)
