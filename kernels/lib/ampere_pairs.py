"""Q K^T and dO V^T at the same time, each by half of the warps. A warp of four has twice the scores of a warp of eight, and reads
less of the operands for each of them. For the fused backwards of kernels/sm80/, device side."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from fa2tune.kernels.lib.ampere import operand_a, operand_b, shared_layout


@gluon.constexpr_function
def pair_layout(down, across):
    """Accumulators [2, M, N] of two products, ``down`` times ``across`` warps each."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, down, across], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def pair_row(pair):
    """Numbers of rows [M]."""
    return gl.SliceLayout(0, gl.SliceLayout(2, pair))


@gluon.constexpr_function
def _pair_memory(columns):
    """shared_layout of two tiles of 64 columns or more."""
    one = shared_layout(columns)
    return gl.SwizzledSharedLayout(one.vec, one.per_phase, one.max_phase, [2, 1, 0])


@gluon.jit
def pair_of_tiles(dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Two tiles one after the other, and each of them."""
    both = gl.allocate_shared_memory(dtype, [2, ROWS, COLUMNS], _pair_memory(COLUMNS))
    first = both.slice(0, 1, 0)._reinterpret(dtype, [ROWS, COLUMNS], shared_layout(COLUMNS))
    second = both.slice(1, 1, 0)._reinterpret(dtype, [ROWS, COLUMNS], shared_layout(COLUMNS))
    return both, first, second


@gluon.jit
def pair_scores(x, a, b, peak, delta, qk_scale, DIM: gl.constexpr, STEP: gl.constexpr, PAIR: gl.constexpr):
    """x, zeros [2, M, N], a [2, M, K] and b [2, N, K] in shared memory, peak and delta [M] -> [2, M, N]: the exponentials of the
    first product's scores, and the second product less delta. Columns from DIM on are zeros, and left out."""
    for c in gl.static_range((DIM + STEP - 1) // STEP):
        left = a.slice(c * STEP, STEP, 2).load(operand_a(PAIR))
        right = b.slice(c * STEP, STEP, 2).permute([0, 2, 1]).load(operand_b(PAIR))
        x = mma_v2(left, right, x)
    scores = (gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, PAIR))) == 0)[:, None][:, :, None]
    added = gl.where(scores, peak[None, :][:, :, None], -delta[None, :][:, :, None])
    x = gl.fma(x, gl.where(scores, qk_scale, 1.0), added)
    return gl.where(scores, gl.exp2(x), x)
