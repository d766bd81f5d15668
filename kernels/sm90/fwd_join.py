"""After kernels/sm90/fwd_shares.py: O and lse of tiles that are in parts, out of their sums. A program has a few rows of the
tile that one of its programs begins and does not end.

Bound by memory, so it has no search space: one fixed tile."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper_forward import Call
from fa2tune.kernels.lib.hopper_key_parts import PartDivisors
from fa2tune.kernels.lib.hopper_shares import Blocks, last_of, share_of, slot_of, tile_at
from fa2tune.kernels.lib.warps import WARP
from fa2tune.search_spaces.sm90 import fwd_join as space
from fa2tune.search_spaces.sm90 import fwd_shares
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant

WARPS = gl.constexpr(space.WARPS)
WORDS = gl.constexpr(4)  #: that a thread loads at once
LN2 = gl.constexpr(0.6931471805599453)
_SUMS_ARE_WRITTEN = gl.constexpr("griddepcontrol.wait; mov.b32 $0, 0;")


@gluon.jit
def _loaded(number, begins, rows, d, sums, BLOCK_M: gl.constexpr, HEAD_DIM_V: gl.constexpr):
    """What a program summed of these rows of its tile [R]: P V [R, COLUMNS], maxima and sums of P [R]."""
    o_parts, stats = sums
    slot = slot_of(number, begins)
    stats += slot * (2 * BLOCK_M) + rows
    o_parts += (slot * BLOCK_M).to(gl.int64) * HEAD_DIM_V
    part = gl.load(o_parts + (rows * HEAD_DIM_V)[:, None] + d[None, :], mask=(d < HEAD_DIM_V)[None, :], other=0.0)
    return part, gl.load(stats), gl.load(stats + BLOCK_M)


@gluon.jit
def _merged(one, other):
    """Sums of two parts as those of one, relative to the larger maximum."""
    acc, peak, total = one
    part, part_peak, part_total = other
    new_peak = gl.maximum(peak, part_peak)
    shrink, weight = gl.exp2(peak - new_peak), gl.exp2(part_peak - new_peak)
    return acc * shrink[:, None] + part * weight[:, None], new_peak, total * shrink + part_total * weight


@gluon.jit
def fwd_hopper_join_kernel(
    o_parts, stats, o, lse, stride_ob, stride_oh, stride_om, batch, heads_q, group, seqlen_q, seqlen_k, SHARES, ROUNDS,
    blocks_of_head, blocks_of_first, blocks_more, window_left, window_right,
    HEAD_DIM_V: gl.constexpr, COLUMNS: gl.constexpr, SEES_A_KEY: gl.constexpr, RIGHT_BOUNDED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_R: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """o_parts, stats and Blocks as kernels/sm90/fwd_shares.py has them -> o [B, Hq, Sq, DV], lse [B, Hq, Sq] float32, natural
    log. EARLY: it may have started before the sums are written."""
    if EARLY:
        gl.inline_asm_elementwise(_SUMS_ARE_WRITTEN, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)
    THREADS: gl.constexpr = COLUMNS // WORDS if COLUMNS // WORDS < WARP else WARP
    layout: gl.constexpr = gl.BlockedLayout([1, WORDS], [WARP // THREADS, THREADS], [WARPS, 1], [1, 0])
    PIECES: gl.constexpr = BLOCK_M // BLOCK_R
    number = gl.program_id(0) // PIECES
    by = PartDivisors((), (), (), ())
    call = Call(batch, heads_q, group, seqlen_q, seqlen_k, 0, (window_left, window_right), (0.0, 0.0), by)
    blocks = Blocks(blocks_of_head, blocks_of_first, blocks_more)
    share = share_of(number, SHARES, call, ROUNDS, blocks)
    tile = tile_at(gl.maximum(share.end - 1, 0), blocks, call, BLOCK_M)
    if (tile.begin < share.begin) | (tile.begin + tile.visited <= share.end):
        return  # another program begins it, or it is whole
    rows = (gl.program_id(0) - number * PIECES) * BLOCK_R + gl.arange(0, BLOCK_R, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    sums = (o_parts, stats)
    first_part = _loaded(number, 1, rows, d, sums, BLOCK_M, HEAD_DIM_V)
    found = _merged(first_part, _loaded(number + 1, 0, rows, d, sums, BLOCK_M, HEAD_DIM_V))
    for later in range(number + 2, last_of(tile, share) + 1):
        found = _merged(found, _loaded(later, 0, rows, d, sums, BLOCK_M, HEAD_DIM_V))
    acc, peak, total = found
    out = acc * (1.0 / total)[:, None]
    word = (peak + gl.log2(total)) * LN2
    if RIGHT_BOUNDED:
        seen = SEES_A_KEY(tile.row + rows, seqlen_k - seqlen_q, seqlen_k, call.window)
        word = gl.where(seen, word, float("-inf"))
        out = gl.where(seen[:, None], out, 0.0)
    queries = tile.row + rows
    inside = queries < seqlen_q
    gl.store(lse + (tile.b * heads_q + tile.h).to(gl.int64) * seqlen_q + queries, word, mask=inside)
    o += tile.b.to(gl.int64) * stride_ob + tile.h.to(gl.int64) * stride_oh + tile.row.to(gl.int64) * stride_om
    mask = inside[:, None] & (d < HEAD_DIM_V)[None, :]
    gl.store(o + (rows * stride_om)[:, None] + d[None, :], out.to(o.dtype.element_ty), mask=mask)


def _scalars(problem: Problem, config: Config, _early: bool) -> dict[str, int]:
    return fwd_shares.scalars(problem, config)


VARIANT = Variant(
    kernel=fwd_hopper_join_kernel,
    space=space.SPACE,
    tensors={"o_parts": "fp32", "stats": "fp32", "o": "", "lse": "fp32"},
    descriptors={},
    grid=lambda _problem, config, _sm_count, _early: config["SHARES"] * config["BLOCK_M"] // config["BLOCK_R"],
    grid_dimensions=("BLOCK_N",),
    constants=lambda spec, _config: {"COLUMNS": triton.next_power_of_2(spec.head_dim_v)},
    min_arch=90,
    max_arch=90,
    early=lambda _problem, config, _sm_count: bool(config["EARLY"]),
    scalars=_scalars,
)
