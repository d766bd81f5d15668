"""What the kernels of kernels/sm80/ share: layouts of mma.sync, asynchronous copies, tile order. Device side."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from fa2tune.kernels.lib.warps import WARP
from fa2tune.spec.variant import WARP_THREADS

LN2 = gl.constexpr(0.6931471805599453)
#: async_load(shared, pointers, mask): global to shared memory, 16 bytes a thread. 3.9 renamed it.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
#: block_barrier(): of all threads of a program
block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
#: Start of the running row maximum, as in kernels/lib/common.py.
LOWEST = gl.constexpr(-3.0e38)
#: Bits of float32 numbers, as PTX writes them.
ZERO, MINUS_INFINITY = gl.constexpr("0f00000000"), gl.constexpr("0fFF800000")
#: 8 powers of two, so written.
MARGIN = gl.constexpr("0f41000000")


class Source(NamedTuple):
    """Rows of a head in global memory."""

    base: gl.tensor
    stride: gl.tensor
    end: gl.tensor  #: how many rows there are


@gluon.constexpr_function
def mma_layout(down, across):
    """Accumulator of mma.sync: warps ``down`` the rows, 16 each, and ``across`` the columns, 8 each."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[down, across], instr_shape=[16, 8])


@gluon.constexpr_function
def operand_a(mma):
    return gl.DotOperandLayout(0, mma, 2)


@gluon.constexpr_function
def operand_b(mma):
    return gl.DotOperandLayout(1, mma, 2)


@gluon.constexpr_function
def copy_layout(columns, warps):
    """Tiles from and to global memory: 16 bytes a thread, next to each other along a row."""
    return gl.BlockedLayout([1, 8], [WARP_THREADS * 8 // columns, columns // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def shared_layout(columns):
    """Tiles of 2-byte elements, swizzled so that ldmatrix meets no bank twice, whichever way it reads."""
    return gl.SwizzledSharedLayout(8, max(1, 64 // columns), min(8, columns // 8), [1, 0])


@gluon.constexpr_function
def rows_at_once(rows, columns, warps):
    """Rows of a tile that all warps copy at once, 16 bytes a thread."""
    return min(rows, warps * WARP_THREADS * 8 // columns)


@gluon.constexpr_function
def parts_layout(columns, warps):
    """copy_layout of a tile as [parts, rows at once, columns]."""
    return gl.BlockedLayout([1, 1, 8], [1, WARP_THREADS * 8 // columns, columns // 8], [1, warps, 1], [2, 1, 0])


@gluon.jit
def in_place(stride):
    """stride, which the compiler takes for another number every time: what follows from it is computed where it is used, an
    instruction each. Known to be the same in every trip, addresses of all parts would be kept in registers, and spilled."""
    if stride.dtype == gl.int32:
        stride = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [stride], dtype=gl.int32, is_pure=False, pack=1)
    return stride


@gluon.jit
def ask(
    smem, source, row, ROWS: gl.constexpr, DIM: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr,
    MASK_ROWS: gl.constexpr,
):  # fmt: skip
    """Starts copying rows [row, row + ROWS) of a head to shared memory [ROWS, COLUMNS]: 16 bytes at a time, past L1. Columns
    from DIM on and, with MASK_ROWS, rows behind the last become zero."""
    base, stride, rows_end = source
    layout: gl.constexpr = copy_layout(COLUMNS, WARPS)
    PART: gl.constexpr = rows_at_once(ROWS, COLUMNS, WARPS)
    parts: gl.constexpr = parts_layout(COLUMNS, WARPS)
    of_rows: gl.constexpr = gl.SliceLayout(0, parts)
    r = gl.arange(0, PART, layout=gl.SliceLayout(1, of_rows))
    d = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, of_rows))
    part = gl.arange(0, ROWS // PART, layout=gl.SliceLayout(1, gl.SliceLayout(2, parts)))
    # 64-bit for where the tile starts, 32-bit inside it (the host passes 64-bit strides where that would overflow)
    start = base + row.to(gl.int64) * stride
    own = r[:, None] * stride + d[None, :]
    pointers = (start + own)[None, :, :] + ((part * PART).to(gl.int64) * in_place(stride).to(gl.int64))[:, None, None]
    pointers = gl.convert_layout(pointers.reshape([ROWS, COLUMNS]), layout, assert_trivial=True)
    pointers = gl.multiple_of(gl.max_contiguous(pointers, [1, 8]), [16, 16])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    if MASK_ROWS and DIM != COLUMNS:
        mask = (row + rows < rows_end)[:, None] & (columns < DIM)[None, :]
        async_load(smem, pointers, mask)
    elif MASK_ROWS:
        async_load(smem, pointers, (row + rows < rows_end)[:, None])
    elif DIM != COLUMNS:
        async_load(smem, pointers, (columns < DIM)[None, :])
    else:
        async_load(smem, pointers)


@gluon.jit
def put(
    base, tile, stride, row, rows_end, ROWS: gl.constexpr, DIM: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr,
    FIRST: gl.constexpr = 0,
):  # fmt: skip
    """tile [ROWS, COLUMNS] to rows [row, row + ROWS) below rows_end of the head at ``base``, columns from FIRST to DIM."""
    layout: gl.constexpr = copy_layout(COLUMNS, WARPS)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    d = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    pointers = base + row.to(gl.int64) * stride + (r[:, None] * stride + d[None, :])
    mask = (row + r < rows_end)[:, None]
    if DIM < FIRST + COLUMNS:
        mask = mask & (d < DIM)[None, :]
    gl.store(pointers, gl.convert_layout(tile.to(base.dtype.element_ty), layout), mask=mask)


@gluon.jit
def a_bt(acc, a, b, DIM: gl.constexpr, STEP: gl.constexpr, MMA: gl.constexpr, BEGIN: gl.constexpr = 0):
    """acc [M, N] + a [M, K] b^T of b [N, K], both in shared memory, of which columns from DIM on are zeros: these products are
    left out. So are those of the first BEGIN steps."""
    for c in gl.static_range(BEGIN, (DIM + STEP - 1) // STEP):
        x = a.slice(c * STEP, STEP, 1).load(operand_a(MMA))
        y = b.slice(c * STEP, STEP, 1).permute([1, 0]).load(operand_b(MMA))
        acc = mma_v2(x, y, acc)
    return acc


@gluon.jit
def add_columns(acc, more, x, b, at, STEP: gl.constexpr, FIRST: gl.constexpr, OTHER: gl.constexpr, MMA: gl.constexpr):
    """acc [M, FIRST] and more [M, OTHER] + x [M, STEP] times rows [at, at + STEP) of b [R, N] in shared memory: its first FIRST
    columns, and the next OTHER. With OTHER 0 ``more`` is left as it is."""
    rows = b.slice(at, STEP, 0)
    if OTHER > 0:
        acc = mma_v2(x, rows.slice(0, FIRST, 1).load(operand_b(MMA)), acc)
        more = mma_v2(x, rows.slice(FIRST, OTHER, 1).load(operand_b(MMA)), more)
    else:
        acc = mma_v2(x, rows.load(operand_b(MMA)), acc)
    return acc, more


@gluon.jit
def at_b(
    acc, more, a, b, ROWS: gl.constexpr, STEP: gl.constexpr, FIRST: gl.constexpr, OTHER: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """add_columns of a^T b, of a [ROWS, M] and b [ROWS, N] in shared memory."""
    for c in gl.static_range(ROWS // STEP):
        x = a.slice(c * STEP, STEP, 0).permute([1, 0]).load(operand_a(MMA))
        acc, more = add_columns(acc, more, x, b, c * STEP, STEP, FIRST, OTHER, MMA)
    return acc, more


@gluon.jit
def a_b(
    acc, more, a, b, ROWS: gl.constexpr, STEP: gl.constexpr, FIRST: gl.constexpr, OTHER: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """add_columns of a b, of a [M, ROWS] and b [ROWS, N] in shared memory."""
    for c in gl.static_range(ROWS // STEP):
        x = a.slice(c * STEP, STEP, 1).load(operand_a(MMA))
        acc, more = add_columns(acc, more, x, b, c * STEP, STEP, FIRST, OTHER, MMA)
    return acc, more


@gluon.jit
def none_yet(ROWS: gl.constexpr, COLUMNS: gl.constexpr, MMA: gl.constexpr):
    """Zeros, or a number that is never read where there are no columns."""
    if COLUMNS > 0:  # noqa: SIM108
        zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout=MMA)
    else:
        zeros = gl.to_tensor(0)
    return zeros


@gluon.constexpr_function
def _hiding(bits):
    """PTX for a number where one integer is not above another, else that of these bits."""
    return f"{{ .reg .pred p; setp.le.s32 p, $2, $3; selp.f32 $0, $1, {bits}, p; }}"


@gluon.jit
def hidden_behind(x, columns, last, ELSE: gl.constexpr):
    """x where columns <= last, elsewhere the float32 whose bits ELSE has in PTX. Each comparison stands next to its choice: as
    gl.where has it, ptxas works out all comparisons ahead of the products, more than there are predicates, packs them into
    registers bit by bit and takes them apart again, five instructions a score."""
    return gl.inline_asm_elementwise(
        _hiding(ELSE), "=f,f,r,r", [x, columns, last], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def lanes(x):
    """x [R, N], the layout of an accumulator whose rows no two warps share, as [R, N / 8, 4, 2]: the third index says which of
    a row's four threads holds it."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def for_lanes(x, wanted):
    """x [R, 4], a number of each of a row's four threads, for arithmetic with ``wanted`` as ``lanes`` has it."""
    spread = x.expand_dims(1).expand_dims(3).broadcast_to(wanted.shape)
    return gl.convert_layout(spread, wanted.type.layout, assert_trivial=True)


@gluon.constexpr_function
def _raising(rows, margin):
    """PTX of raise_peak, for the rows of a thread. Outputs: references, factors, flags; inputs: references, weights."""
    peak, shrink, raised, _, top = ([f"${k * rows + i}" for i in range(rows)] for k in range(5))
    code = ["{ .reg .pred p, q; .reg .f32 x, y;"]
    for i in range(rows):
        code.append(f"add.f32 x, {peak[i]}, {margin};")
        code.append(f"setp.gt.or.f32 p, {top[i]}, x, p;" if i else f"setp.gt.f32 p, {top[i]}, x;")
    code.append("vote.sync.any.pred q, p, 0xffffffff;")
    for i in range(rows):
        code.append(f"selp.b32 {raised[i]}, 1, 0, q; mov.b32 {shrink[i]}, 0f3F800000;")  # 1.0
    code.append("@!q bra.uni DONE;")
    for i in range(rows):
        code.append(f"max.f32 x, {top[i]}, {peak[i]};")
        code += [f"shfl.sync.bfly.b32 y, x, {step}, 31, 0xffffffff; max.f32 x, x, y;" for step in (1, 2)]
        code.append(f"sub.f32 y, {peak[i]}, x; ex2.approx.ftz.f32 {shrink[i]}, y; mov.b32 {peak[i]}, x;")
    return "\n".join([*code, "DONE: }"])


@gluon.constexpr_function
def _raising_registers(rows):
    outputs = ["=f"] * (2 * rows) + ["=r"] * rows
    return ",".join([*outputs, *map(str, range(rows)), *(["f"] * rows)])


@gluon.constexpr_function
def _voting(rows):
    """PTX of raised_in, for the rows of a thread."""
    code = ["{ .reg .pred p, q;"]
    for i in range(rows):
        one = f"${rows + i}, 0f3F800000"  # 1.0
        code.append(f"setp.ne.or.f32 p, {one}, p;" if i else f"setp.ne.f32 p, {one};")
    code.append("vote.sync.any.pred q, p, 0xffffffff;")
    return "\n".join([*code, *(f"selp.b32 ${i}, 1, 0, q;" for i in range(rows)), "}"])


@gluon.constexpr_function
def _voting_registers(rows):
    return ",".join([*(["=r"] * rows), *(["f"] * rows)])


@gluon.constexpr_function
def _scaling(count):
    """PTX of scaled_if, for the numbers of a thread."""
    code = [f"{{ .reg .pred p; setp.eq.s32 p, ${3 * count}, 0; @p bra.uni DONE;"]
    code += [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    return "\n".join([*code, "DONE: }"])


@gluon.constexpr_function
def _scaling_registers(count):
    return ",".join([*(["=f"] * count), *map(str, range(count)), *(["f"] * count), *(["r"] * count)])


@gluon.jit
def raise_peak(peak, top, WARPS: gl.constexpr):
    """The references of the exponentials, in powers of two: peak [R, 4], the same for a row's four threads, and ``top`` [R, 4],
    the greatest weight that each of these holds. Rounding is relative, so a reference need not be the row's greatest weight, as
    long as that is no more than MARGIN above it. Where it is not, in any row of the warp, all of the warp's rows take their
    greatest weight so far. Elsewhere nothing is done, nor passed from thread to thread.

    -> (references, what sums taken from the ones before are to be multiplied by, and whether they were raised: not 0)."""
    ROWS: gl.constexpr = peak.shape[0] // (8 * WARPS)
    return gl.inline_asm_elementwise(
        _raising(ROWS, MARGIN), _raising_registers(ROWS), [peak, top], dtype=(gl.float32, gl.float32, gl.int32), is_pure=True,
        pack=ROWS,
    )  # fmt: skip


@gluon.jit
def raised_in(shrink, DOWN: gl.constexpr):
    """Whether a factor [R, 4] of any of a warp's rows is not 1: 1 or 0, for ``scaled_if``. DOWN: warps along the rows."""
    ROWS: gl.constexpr = shrink.shape[0] // (8 * DOWN)
    return gl.inline_asm_elementwise(
        _voting(ROWS), _voting_registers(ROWS), [shrink], dtype=gl.int32, is_pure=True, pack=ROWS
    )


@gluon.jit
def scaled_if(raised, x, shrink, WARPS: gl.constexpr):
    """x [R, N] times shrink [R, 4], jumped over unless raised [R, 4] is not 0, which is the same in a warp."""
    COUNT: gl.constexpr = x.shape[0] * x.shape[1] // (WARP * WARPS)
    parts = lanes(x)
    done = gl.inline_asm_elementwise(
        _scaling(COUNT), _scaling_registers(COUNT), [parts, for_lanes(shrink, parts), for_lanes(raised, parts)],
        dtype=gl.float32, is_pure=True, pack=COUNT,
    )  # fmt: skip
    return gl.convert_layout(done.reshape(x.shape), x.type.layout, assert_trivial=True)
