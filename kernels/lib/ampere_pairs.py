"""Two products of the same shape at the same time, each by half of the warps: Q K^T and dO V^T, or dS^T Q and P^T dO. A warp
has twice as much of a result so, and reads less of the operands for each number of it. What belongs to Q comes first, what
belongs to dO second. For the fused backwards of kernels/sm80/, device side."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from fa2tune.kernels.lib.ampere import ZERO, copy_layout, hidden_behind, operand_a, operand_b, put, shared_layout


@gluon.constexpr_function
def pair_layout(down, warps):
    """Accumulators [2, M, N] of two products: ``down`` of the warps along the rows of both, one below the other."""
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[2, down // 2, warps // down], instr_shape=[1, 16, 8]
    )


@gluon.constexpr_function
def pair_row(pair):
    """Numbers of rows [M]."""
    return gl.SliceLayout(0, gl.SliceLayout(2, pair))


@gluon.constexpr_function
def _pair_memory(columns):
    """shared_layout of each of two tiles, one after the other."""
    one = shared_layout(columns)
    return gl.SwizzledSharedLayout(one.vec, one.per_phase, one.max_phase, [2, 1, 0])


@gluon.jit
def pair_of_tiles(dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Two tiles as one, and each of them."""
    tiles = gl.allocate_shared_memory(dtype, [2, ROWS, COLUMNS], shared_layout(COLUMNS))
    both = tiles._reinterpret(dtype, [2, ROWS, COLUMNS], _pair_memory(COLUMNS))
    first = tiles.index(0)
    second = tiles.index(1)
    return both, first, second


@gluon.jit
def pair_none_yet(ROWS: gl.constexpr, COLUMNS: gl.constexpr, PAIR: gl.constexpr):
    """Zeros [2, ROWS, COLUMNS], or a number that is never read where there are no columns."""
    if COLUMNS > 0:  # noqa: SIM108
        zeros = gl.zeros([2, ROWS, COLUMNS], gl.float32, layout=PAIR)
    else:
        zeros = gl.to_tensor(0)
    return zeros


@gluon.jit
def _is_first(PAIR: gl.constexpr):
    return (gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, PAIR))) == 0)[:, None][:, :, None]


@gluon.jit
def pair_at_b(
    acc, more, a, b, ROWS: gl.constexpr, STEP: gl.constexpr, FIRST: gl.constexpr, OTHER: gl.constexpr, PAIR: gl.constexpr
):  # fmt: skip
    """acc [2, M, FIRST] and more [2, M, OTHER] + a^T b, of a [2, ROWS, M] and b [2, ROWS, N] in shared memory."""
    for c in gl.static_range(ROWS // STEP):
        x = a.slice(c * STEP, STEP, 1).permute([0, 2, 1]).load(operand_a(PAIR))
        rows = b.slice(c * STEP, STEP, 1)
        acc = mma_v2(x, rows.slice(0, FIRST, 2).load(operand_b(PAIR)), acc)
        if OTHER > 0:
            more = mma_v2(x, rows.slice(FIRST, OTHER, 2).load(operand_b(PAIR)), more)
    return acc, more


@gluon.jit
def put_pair(
    first, second, x, stride_first, stride_second, row, rows_end, scale, ROWS: gl.constexpr, DIM: gl.constexpr,
    COLUMNS: gl.constexpr, WARPS: gl.constexpr, FIRST: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """x [2, ROWS, COLUMNS]: the first times scale, and the second, as ``put`` has them."""
    both, of_first, of_second = pair_of_tiles(first.dtype.element_ty, ROWS, COLUMNS)
    both.store((x * gl.where(_is_first(PAIR), scale, 1.0)).to(first.dtype.element_ty))
    layout: gl.constexpr = copy_layout(COLUMNS, WARPS)
    put(first, of_first.load(layout), stride_first, row, rows_end, ROWS, DIM, COLUMNS, WARPS, FIRST)
    put(second, of_second.load(layout), stride_second, row, rows_end, ROWS, DIM, COLUMNS, WARPS, FIRST)


@gluon.jit
def _pair_scores(x, a, b, peak, delta, qk_scale, DIM: gl.constexpr, STEP: gl.constexpr, PAIR: gl.constexpr):
    """x, zeros [2, M, N], a [2, M, K] and b [2, N, K] in shared memory, peak and delta [M] -> [2, M, N]: the exponentials of
    the first product's scores, and the second product less delta. Columns from DIM on are zeros, and left out."""
    for c in gl.static_range((DIM + STEP - 1) // STEP):
        left = a.slice(c * STEP, STEP, 2).load(operand_a(PAIR))
        right = b.slice(c * STEP, STEP, 2).permute([0, 2, 1]).load(operand_b(PAIR))
        x = mma_v2(left, right, x)
    scores = _is_first(PAIR)
    added = gl.where(scores, peak[None, :][:, :, None], -delta[None, :][:, :, None])
    x = gl.fma(x, gl.where(scores, qk_scale, 1.0), added)
    return gl.where(scores, gl.exp2(x), x)


@gluon.jit
def ds_by_halves(smem, peak, delta, m, call, STEP: gl.constexpr, form, MASK: gl.constexpr):
    """P and dS of a block of queries to shared memory. P and dP less delta go there as half of the warps have them each, in 16
    bits; all warps make dS of both."""
    dtype: gl.constexpr = smem.k.dtype
    FLAT: gl.constexpr = copy_layout(form.BLOCK_N, form.WARPS)
    zeros = gl.zeros([2, form.BLOCK_M, form.BLOCK_N], gl.float32, layout=form.PAIR)
    x = _pair_scores(
        zeros, smem.pairs[0], smem.pairs[1], peak, delta, call.qk_scale, form.HEAD_DIM, STEP, form.PAIR
    )  # fmt: skip
    smem.pairs[2].store(x.to(dtype))
    p = smem.raw[0].load(FLAT).to(gl.float32)
    dp = smem.raw[1].load(FLAT).to(gl.float32)
    if MASK:
        rows = m + gl.arange(0, form.BLOCK_M, layout=gl.SliceLayout(1, FLAT))
        if form.LAST_KEY is not None:
            columns = call.start_n + gl.arange(0, form.BLOCK_N, layout=gl.SliceLayout(0, FLAT))
            seen = form.LAST_KEY(rows, call.offset, call.seqlen_k - 1)
            p = hidden_behind(p, columns[None, :], seen[:, None], ZERO)
        else:
            shown = form.HIDE(p, rows, call.start_n, call.offset, call.seqlen_k, call.window, FLAT)
            p = gl.where(shown < 0, 0.0, shown)  # hidden: minus infinity
    smem.p.store(p.to(dtype))
    smem.ds.store((p * dp).to(dtype))
