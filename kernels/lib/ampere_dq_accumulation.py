"""The sums of dQ of kernels/sm80/bwd_fused.py and bwd_ordered.py: how they are added to, in the order of ``_places``, and what
the kernels share that put them back. Device side, and the grid of these."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.ampere import block_barrier, in_place
from fa2tune.kernels.lib.common import head_base
from fa2tune.search_spaces.sm80 import bwd_fused as space

TURN_ROWS = gl.constexpr(space.TURN_ROWS)


@gluon.jit
def _places(
    sums, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Where dQ of each row and of columns [FIRST, FIRST + COLUMNS) of a block goes, whose sums are at ``sums``. Sums of 8 rows
    and 8 columns lie together: 64 numbers, half of which the 32 threads of a warp hold one each of and add to 128 bytes in a
    row. ``in_rows`` puts them back."""
    r = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    c = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    # columns are constants in the addresses; known to be the same in every trip, all addresses would be kept in registers
    of_row = in_place((r // 8) * (8 * BLOCK_D) + (r % 8) * 4)
    of_column = (c // 8) * 64 + (c % 2) * 32 + (c % 8) // 2
    return (sums + of_row)[:, None] + of_column[None, :]


@gluon.jit
def add_to_sums(
    sums, dq, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Adds dq [BLOCK_M, COLUMNS] to the sums, columns below HEAD_DIM."""
    targets = _places(sums, BLOCK_M, BLOCK_D, FIRST, COLUMNS, layout)
    if HEAD_DIM < FIRST + COLUMNS:
        d = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        gl.atomic_add(targets, dq, mask=(d < HEAD_DIM)[None, :], sem="relaxed")
    else:
        gl.atomic_add(targets, dq, sem="relaxed")


#: One thread passes a block's turn on, if $4, and waits for another's to be $3. The fence is behind what all threads added
#: before the last barrier, and before what they add behind the next one.
_AWAIT = gl.constexpr(
    "{.reg .pred p; .reg .b32 seen; mov.u32 seen, %tid.x; setp.ne.u32 p, seen, 0; @p bra DONE; "
    "ld.relaxed.gpu.global.b32 seen, [$1]; fence.acq_rel.gpu; "
    "setp.ne.s32 p, $4, 0; @p st.relaxed.gpu.global.b32 [$2], $5; "
    "LOOK: setp.ge.s32 p, seen, $3; @p bra DONE; ld.acquire.gpu.global.b32 seen, [$1]; bra LOOK; DONE: mov.b32 $0, 0;}"
)
_PASS = gl.constexpr(
    "{.reg .pred p; .reg .b32 id; mov.u32 id, %tid.x; setp.eq.u32 p, id, 0; @p st.release.gpu.global.b32 [$1], $2; "
    "mov.b32 $0, 0;}"
)


@gluon.jit
def await_turn(turn, due, step: gl.constexpr, passes, number):
    """Until a block's turn is ``due``, which one thread looks at: a barrier is to follow. Before, if ``passes``, ``number``
    becomes the turn of the block that lies ``step`` behind it, which this program added to ahead of the last barrier."""
    gl.inline_asm_elementwise(
        _AWAIT, "=r,l,l,r,r,r", [turn.to(gl.int64), (turn + step).to(gl.int64), due, passes.to(gl.int32), number],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def signal_turn(turn, number):
    """What all threads added ahead of the last barrier is there."""
    gl.inline_asm_elementwise(_PASS, "=r,l,r", [turn.to(gl.int64), number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_turn_of(m, end, head, call, form):
    """IN_ORDER: passes on the turn of the block before, whose additions are behind the barrier with which a trip begins, and
    waits for this one's. One thread does, while all others go on to the products of dK and dV."""
    if form.IN_ORDER:
        if not form.TRANSPOSED:
            block_barrier()  # the one that is needed behind dS, but ahead of what one thread waits for
        tile = call.start_n // form.BLOCK_N
        due = gl.where(m < head.shared_end, tile, 0)
        await_turn(head.turns + m // TURN_ROWS, due, form.BLOCK_M // TURN_ROWS, m + form.BLOCK_M < end, tile + 1)


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
