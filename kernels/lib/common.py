"""What the kernels share: products, tile loads and stores, tile scheduling. Device side."""

import os
from typing import NamedTuple

import triton
import triton.language as tl

#: The interpreter's bfloat16 tl.dot is wrong (numpy has no bfloat16): there, operands go through float32, which is exact.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: The same with 12 bits, so that a product with another 12-bit number is exact, and what is missing (positive: a product with
#: an infinity then keeps its sign).
LOG2E_HIGH, LOG2E_LOW = tl.constexpr(1.4423828125), tl.constexpr(1.4426950408889634 - 1.4423828125)
LN2_HIGH, LN2_LOW = tl.constexpr(0.693115234375), tl.constexpr(0.6931471805599453 - 0.693115234375)
#: Start of the running row maximum. Finite, so that neither a masked block nor a -inf score makes -inf - (-inf) = NaN.
LOWEST = tl.constexpr(-3.0e38)


class Head(NamedTuple):
    """Rows of a tensor's head (b, h). What travels together from function to function is a named tuple."""

    src: tl.tensor  #: as load_tile has it
    b: tl.tensor
    h: tl.tensor
    stride: tl.tensor  #: of rows
    end: tl.tensor  #: how many rows there are


class Call(NamedTuple):
    """What decides which pairs of a tile are visible, and what becomes of their scores."""

    offset: tl.tensor  #: seqlen_k - seqlen_q
    seqlen_k: tl.tensor
    window: tuple
    full: tuple  #: first and end of the keys (or queries) whose tiles are seen whole
    score: tuple
    qk_scale: tl.tensor
    batch: tl.tensor  #: number of the sequence
    head: tl.tensor  #: of the query head


class Form(NamedTuple):
    """What is compiled into a loop over tiles of keys, or of queries. Kept as tl.constexpr: assigned without, its fields would
    be values of the running program."""

    HEAD_DIM: tl.constexpr
    HEAD_DIM_V: tl.constexpr
    BLOCK: tl.constexpr  #: rows of such a tile
    BLOCK_D: tl.constexpr
    BLOCK_DV: tl.constexpr
    KEEP: tl.constexpr
    LEFT_BOUNDED: tl.constexpr
    APPLY: tl.constexpr
    LOADS: tl.constexpr
    PRECISION: tl.constexpr
    #: of the forward, of the backward, and of that over keys
    NEGATE: tl.constexpr = None
    GRAD: tl.constexpr = None
    WITH_DQ: tl.constexpr = None


@triton.jit
def round_to_tf32(x):
    """float32 rounded to TF32's 10 bits of fraction. The tensor core cuts the other 13 off, which costs 2.4 times the error."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # a NaN stays one


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    if PRECISION == "tf32":
        a = round_to_tf32(a)
        b = round_to_tf32(b)
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def dot_add(a, b, acc, PRECISION: tl.constexpr):
    if PRECISION == "tf32":
        a = round_to_tf32(a)
        b = round_to_tf32(b)
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def head_base(src, b, h, stride_b, stride_h, LOADS: tl.constexpr):
    """Where head (b, h) of a tensor starts. A descriptor addresses the whole tensor: it is passed through."""
    if LOADS == "descriptor":
        return src
    else:
        return src + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h


@triton.jit
def load_tile(
    src, b, h, row, stride_row, rows_end,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MASK_ROWS: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + ROWS) of a head as [ROWS, BLOCK_DIM]; columns from DIM on, and rows from rows_end on, are zero.

    src: a descriptor over (batch, heads, rows, DIM), or the head's base pointer. Without MASK_ROWS the caller vouches that
    row + ROWS <= rows_end (a descriptor fills with zeros in any case).
    """
    if LOADS == "descriptor":
        return src.load([b, h, row, 0]).reshape([ROWS, BLOCK_DIM])
    else:
        r = tl.arange(0, ROWS)
        d = tl.arange(0, BLOCK_DIM)
        # 64-bit for where the tile starts, 32-bit inside it (the host passes 64-bit strides where that would overflow)
        start = src + tl.cast(row, tl.int64) * stride_row
        pointers = start + (r[:, None] * stride_row + d[None, :])
        if MASK_ROWS and DIM != BLOCK_DIM:
            return tl.load(pointers, mask=(row + r < rows_end)[:, None] & (d < DIM)[None, :], other=0.0)
        elif MASK_ROWS:
            return tl.load(pointers, mask=(row + r < rows_end)[:, None], other=0.0)
        elif DIM != BLOCK_DIM:
            return tl.load(pointers, mask=(d < DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def rows_of(head, row, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MASK_ROWS: tl.constexpr, form):
    """load_tile of a head's rows [row, row + BLOCK)."""
    return load_tile(
        head.src, head.b, head.h, row, head.stride, head.end, form.BLOCK, DIM, BLOCK_DIM, MASK_ROWS, form.LOADS
    )  # fmt: skip


@triton.jit
def store_tile(base, tile, row, stride_row, rows_end, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """tile [ROWS, BLOCK_DIM] to rows [row, row + ROWS) below rows_end of the head at ``base``, columns below DIM."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_DIM)
    pointers = base + tl.cast(row, tl.int64) * stride_row + (r[:, None] * stride_row + d[None, :])
    mask = (row + r < rows_end)[:, None]
    if DIM != BLOCK_DIM:
        mask = mask & (d < DIM)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def split_bits(x):
    """float32 x = high + low, high of 12 bits; low of an infinity is 0."""
    high = (x.to(tl.int32, bitcast=True) & -0x1000).to(tl.float32, bitcast=True)
    return high, tl.where(tl.abs(x) == float("inf"), 0.0, x - high)


@triton.jit
def store_lse(lse, rows, peak, total, sees_a_key, inside, size, TWO_WORDS: tl.constexpr):
    """lse[rows] = the natural log of 2^peak * total, -inf where a row sees no key. TWO_WORDS: and at lse + size what float32
    rounded off. P = exp(s - lse) is as exact as lse, not as its rounding: for a score of 300 that is 2e-5."""
    if TWO_WORDS:
        high, low = split_bits(peak)
        exact = high * LN2_HIGH
        rest = high * LN2_LOW + (low + tl.math.log2(total)) * LN2
        word = exact + rest
        part = word - exact
        low_word = (exact - (word - part)) + (rest - part)  # Knuth's two-sum
        low_word = tl.where(sees_a_key & (tl.abs(word) < float("inf")), low_word, 0.0)
        tl.store(lse + size + rows, low_word, mask=inside)
    else:
        word = (peak + tl.math.log2(total)) * LN2
    tl.store(lse + rows, tl.where(sees_a_key, word, float("-inf")), mask=inside)


@triton.jit
def load_lse(lse, rows, inside, size, TWO_WORDS: tl.constexpr):
    """lse[rows] * log2(e) as the sum of two vectors; past the end +inf, so that p = exp2(s - inf) = 0."""
    word = tl.load(lse + rows, mask=inside, other=float("inf"))
    if TWO_WORDS:
        low_word = tl.load(lse + size + rows, mask=inside, other=0.0)
        high, low = split_bits(word)
        return high * LOG2E_HIGH, high * LOG2E_LOW + (low + low_word) * LOG2E
    else:
        return word * LOG2E, tl.zeros_like(word)


@triton.jit
def delta_of_rows(o_tile, do_tile, dlse, rows, stride_dlsem, has_dlse):
    """rowsum(dO * O) - dlse of the rows [M], dlse where has_dlse [M]. The gradient of lse enters here: d lse / d s = p, so
    dS = P * (dP - (rowsum(dO * O) - dlse))."""
    sums = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    return sums - tl.load(dlse + rows.to(tl.int64) * stride_dlsem, mask=has_dlse, other=0.0)


@triton.jit
def tile_and_head(tiles, heads, heads_per_wave, LAST_FIRST: tl.constexpr):
    """(tile, head) of this program, from a one-dimensional grid of tiles * heads.

    Programs walk bands of heads_per_wave heads: inside a band heads run fastest, so that with LAST_FIRST all the longest
    tiles of a causal band start first, while the band's K and V stay in L2.
    """
    pid = tl.program_id(0)
    band = pid // (tiles * heads_per_wave)
    first = band * heads_per_wave
    width = tl.minimum(heads - first, heads_per_wave)  # the last band may be narrower
    inside = pid - band * (tiles * heads_per_wave)
    tile = inside // width
    head = first + inside % width
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, head
