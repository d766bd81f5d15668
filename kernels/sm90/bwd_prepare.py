"""Before the fused Hopper backward: lse and delta of every row as its products want them, and the dQ workspace zeroed.

Bound by memory, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import LOG2E, delta_of_rows, head_base, load_tile
from fa2tune.kernels.lib.division import divided
from fa2tune.kernels.lib.extent import place
from fa2tune.kernels.lib.packed_order import write_longer_first
from fa2tune.search_spaces.sm90 import bwd_fused as space
from fa2tune.search_spaces.sm90.bwd_prepare import SPACE
from fa2tune.spec.variant import Variant

#: Columns of terms in memory: 16 bytes a row, the least that TMA moves.
TERMS = tl.constexpr(space.TERMS)
#: Rows of a block of the workspaces, of packed sequences.
CHUNK = tl.constexpr(space.CHUNK)
#: Keys of a tile of the main kernel.
BLOCK_N = tl.constexpr(space.GROUPS * space.KEYS)

_START_MAIN = tl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")


@triton.jit
def _as_terms(x):
    """x [R] as bfloat16 numbers of which it is the sum [R, TERMS]: three hold a float32, the rest are zeros."""
    column = tl.arange(0, TERMS)[None, :]
    high = x.to(tl.bfloat16).to(tl.float32)
    rest = tl.where(high == x, 0.0, x - high)  # of an infinite x: not NaN
    middle = rest.to(tl.bfloat16).to(tl.float32)
    low = rest - middle
    terms = tl.where(column == 0, high[:, None], tl.where(column == 1, middle[:, None], low[:, None]))
    return tl.where(column < 3, terms, 0.0).to(tl.bfloat16)


@triton.jit
def _clear(words, first, start_m, BLOCK_R: tl.constexpr, SUM_COLUMNS: tl.constexpr, USED_COLUMNS: tl.constexpr):
    """Zeros in the workspace, of BLOCK_R rows from ``first`` on."""
    zeros = tl.zeros([BLOCK_R * SUM_COLUMNS], tl.float32)
    at = tl.arange(0, BLOCK_R * SUM_COLUMNS)
    if USED_COLUMNS == SUM_COLUMNS:
        tl.store(words + first * SUM_COLUMNS + at, zeros)
    else:
        used = start_m % 64 * SUM_COLUMNS + at < 64 * USED_COLUMNS
        tl.store(words + first * SUM_COLUMNS + at, zeros, mask=used)


@triton.jit
def bwd_prepare_hopper_kernel(
    o, do, lse, dlse, terms, words, stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom,
    stride_dlseb, stride_dlseh, stride_dlsem, batch, heads_q, seqlen_q, seqlen_k, rows_padded, has_dlse, counter, counts,
    qk_scale, window_left, window_right, cu_seqlens_q, cu_seqlens_k, by_prepared, by_query_heads,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    SEES: tl.constexpr, LEFT_BOUNDED: tl.constexpr, RIGHT_BOUNDED: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_R: tl.constexpr, SUM_COLUMNS: tl.constexpr, USED_COLUMNS: tl.constexpr, EARLY_START: tl.constexpr,
    IN_ORDER: tl.constexpr, LONGER_FIRST: tl.constexpr,
):  # fmt: skip
    """o, do [B, Hq, Sq, DV], lse [B, Hq, Sq], dlse [B, Hq, Sq] (read only if has_dlse) -> terms [2 B, Hq, rows_padded, TERMS]
    bfloat16: of -lse / softmax_scale, and B entries later of dlse - rowsum(dO * O), which scores and dP are to be increased by.
    Where p is to be zero (rows past the end, rows that see no key) lse counts as +inf. words [B, Hq,
    rows_padded, SUM_COLUMNS] float32: zeros, but for the last words of each 64 rows, those of columns from USED_COLUMNS on;
    counter [counts] int32: 0; without IN_ORDER counts is 1 at most. rows_padded is a multiple of BLOCK_R, and 64 is.
    RAGGED: as sm90/bwd_fused.py has it. LONGER_FIRST: behind counter[0] the order of its tiles (``write_longer_first``).
    EARLY_START: the next kernel may start once all programs of this one have, and itself waits for their end; of dense calls
    by_prepared and by_query_heads are the divisors of a head's blocks and of heads_q."""
    if EARLY_START:
        tl.inline_asm_elementwise(_START_MAIN, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
    tiles = rows_padded // BLOCK_R
    if EARLY_START and not RAGGED:
        head = divided(tl.program_id(0), by_prepared)
        start_m = (tl.program_id(0) - head * tiles) * BLOCK_R
        b = divided(head, by_query_heads)
        h = head - b * heads_q
    else:
        head = tl.program_id(0) // tiles
        start_m = tl.program_id(0) % tiles * BLOCK_R
        b = head // heads_q
        h = head % heads_q
    if IN_ORDER:
        for one in range(tl.program_id(0), counts, tl.num_programs(0)):
            tl.store(counter + one, 0)
    else:
        tl.store(counter, 0, mask=(tl.program_id(0) == 0) & (counts != 0))
    if LONGER_FIRST:
        if tl.program_id(0) <= batch:  # each sequence has more blocks of the workspaces than one
            write_longer_first(
                cu_seqlens_q,
                cu_seqlens_k,
                counter + 1,
                tl.program_id(0),
                batch,
                seqlen_q,
                seqlen_k,
                BLOCK_N,
                RIGHT_BOUNDED,
            )
    padded = start_m
    if RAGGED:
        lse += head.to(tl.int64) * seqlen_q
        block, first_q, seqlen_q, _first_k, seqlen_k = place(
            cu_seqlens_q, cu_seqlens_k, batch, seqlen_q, seqlen_k, start_m // CHUNK, CHUNK
        )
        if block * CHUNK >= seqlen_q:  # no row of any sequence
            return
        start_m = block * CHUNK + padded % CHUNK
        o += first_q.to(tl.int64) * stride_om
        do += first_q.to(tl.int64) * stride_dom
        lse += first_q
        dlse += first_q.to(tl.int64) * stride_dlsem
    rows = start_m + tl.arange(0, BLOCK_R)
    inside = rows < seqlen_q
    first = head.to(tl.int64) * rows_padded + padded
    if not EARLY_START:
        _clear(words, first, start_m, BLOCK_R, SUM_COLUMNS, USED_COLUMNS)
    o = head_base(o, b, h, stride_ob, stride_oh, "pointer")
    do = head_base(do, b, h, stride_dob, stride_doh, "pointer")
    dlse = head_base(dlse, b, h, stride_dlseb, stride_dlseh, "pointer")
    o_tile = load_tile(o, b, h, start_m, stride_om, seqlen_q, BLOCK_R, HEAD_DIM_V, BLOCK_DV, True, "pointer")  # [R, DV]
    do_tile = load_tile(do, b, h, start_m, stride_dom, seqlen_q, BLOCK_R, HEAD_DIM_V, BLOCK_DV, True, "pointer")
    if EARLY_START:  # while the loads run, which take longer in a short call
        _clear(words, first, start_m, BLOCK_R, SUM_COLUMNS, USED_COLUMNS)
    delta = delta_of_rows(
        o_tile, do_tile, dlse, rows, stride_dlsem, inside & (tl.zeros_like(rows) + has_dlse != 0)
    )  # [R]
    if not RAGGED:
        lse += head.to(tl.int64) * seqlen_q
    row_lse = tl.load(lse + rows, mask=inside, other=float("inf"))
    if LEFT_BOUNDED or RIGHT_BOUNDED:
        seen = SEES(rows, seqlen_k - seqlen_q, seqlen_k, (window_left, window_right))
        row_lse = tl.where(~seen, float("inf"), row_lse)
    own = (first + tl.arange(0, BLOCK_R)[:, None]) * TERMS + tl.arange(0, TERMS)[None, :]
    entries = 1 if RAGGED else batch
    every = tl.cast(entries * heads_q, tl.int64) * rows_padded * TERMS
    tl.store(terms + own, _as_terms(tl.div_rn(row_lse * -LOG2E, qk_scale)))
    tl.store(terms + every + own, _as_terms(-delta))


VARIANT = Variant(
    kernel=bwd_prepare_hopper_kernel,
    space=SPACE,
    tensors={
        "o": "",
        "do": "",
        "lse": "fp32",
        "dlse": "fp32",
        "terms": "bf16",
        "words": "fp32",
        "counter": "i32",
        "cu_seqlens_q": "i32",
        "cu_seqlens_k": "i32",
    },
    descriptors={},
    constants=lambda spec, config: {
        "USED_COLUMNS": config.get("USED_COLUMNS", config["SUM_COLUMNS"]),
        "EARLY_START": config.get("EARLY_START", False),
        "IN_ORDER": config.get("IN_ORDER", False),
        "LONGER_FIRST": config.get("LONGER_FIRST", False),
    },
    grid=lambda problem, config, _sm_count, _early: (
        space.padded_rows(problem) // config["BLOCK_R"] * problem.batch * problem.heads_q
    ),
)
