"""Causal for rows of several query heads, all heads of a query one after the other: row i is of query i // heads, and sees keys
up to i // heads + shift, shift = seqlen_k - seqlen_q / heads, rounded up.

window = (heads, shift): run-time integers, the second of the call's lengths, so packed sequences cannot have it.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.spec.maskfile import LARGEST, MaskHooks, pairs_below


@triton.jit
def key_range(start, size, offset, seqlen_k, window, step):
    """As kernels/masks/full.py has it."""
    heads, shift = window
    first, last = tl.maximum(start, 0) // heads, tl.maximum(start + size - 1, 0) // heads
    end = tl.minimum(seqlen_k, tl.maximum(last + 1 + shift, 0))
    full_end = tl.minimum(seqlen_k, tl.maximum(first + 1 + shift, 0)) // step * step
    return 0, 0, full_end, end


@triton.jit
def query_range(start, size, offset, seqlen_q, window, step):
    heads, shift = window
    last = tl.cdiv(seqlen_q, step) * step
    first_row = tl.maximum(start - shift, 0) * heads
    first_full = tl.maximum(start + size - 1 - shift, 0) * heads
    begin = tl.minimum(first_row // step * step, last)
    full_begin = tl.minimum(tl.cdiv(first_full, step) * step, last)
    return begin, full_begin, seqlen_q, seqlen_q


@triton.jit
def keep(rows, columns, offset, seqlen_k, window):
    seen = columns < seqlen_k
    return seen & (columns <= rows // window[0] + window[1])


@triton.jit
def sees(rows, offset, seqlen_k, window):
    return rows // window[0] + window[1] >= 0


# ---- for kernels in Gluon: as kernels/masks/full.py has them


@gluon.jit
def blocks_below(rows_end, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    end = (rows_end - 1) // window[0] + 1 + window[1]
    return gl.cdiv(gl.maximum(gl.minimum(end, seqlen_k), 1), BLOCK_N)


@gluon.jit
def first_block(row, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    return 0


@gluon.jit
def clear_blocks(row, rows_end, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    end = row // window[0] + 1 + window[1]
    return 0, gl.minimum(seqlen_k, gl.maximum(end, 0)) // BLOCK_N


@gluon.jit
def hide(s, rows, column, offset, seqlen_k, window, layout: gl.constexpr):
    columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
    mine = (columns & 6)[None, :]
    constant = (columns & -7)[None, :]
    last = gl.minimum(rows // window[0] + window[1], seqlen_k - 1) - column  # the last key that a row sees
    return gl.where(constant <= last[:, None] - mine, s, float("-inf"))


@gluon.jit
def sees_a_key(rows, offset, seqlen_k, window):
    return rows // window[0] + window[1] >= 0


@gluon.jit
def query_blocks(key, keys_end, seqlen_q, seqlen_k, window, BLOCK_M: gl.constexpr):
    heads, shift = window
    end = gl.cdiv(seqlen_q, BLOCK_M)
    first = gl.minimum(gl.maximum(key - shift, 0) * heads // BLOCK_M, end)
    full_begin = gl.minimum(gl.cdiv(gl.maximum(keys_end - 1 - shift, 0) * heads, BLOCK_M), end)
    return first, full_begin, end, end


@gluon.jit
def hide_queries(p, keys, row, offset, seqlen_k, window, layout: gl.constexpr):
    # how far into the block the first row lies that sees the key: two numbers a thread
    seen_from = (keys - window[1]) * window[0] - row
    seen_from = gl.where(keys < seqlen_k, seen_from, p.shape[1])
    rows = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, layout))
    return gl.where(seen_from[:, None] <= rows[None, :], p, 0.0)


# ---- for the host


def _shift(lengths, heads):
    seqlen_q, seqlen_k = lengths
    return seqlen_k + -seqlen_q // heads


def visible(rows, columns, lengths, values):
    (heads,) = values
    return columns <= rows // heads + _shift(lengths, heads)


def arguments(lengths, values):
    heads = min(values[0], max(1, lengths[0]))
    return heads, _shift(lengths, heads)


def pairs(lengths, values):
    (seqlen_q, seqlen_k), (heads,) = lengths, values
    whole, rest = divmod(seqlen_q, heads)
    shift = _shift(lengths, heads)
    last = min(seqlen_k, max(0, whole + shift + 1))  # keys of the last query, if not all heads of it are rows
    return heads * pairs_below(whole, seqlen_k, shift + 1) + rest * last


def fitted(lengths, values):
    return ("causal",) if values[0] == 1 else ("causal_stacked", *values)


MASK = MaskHooks(
    "causal_stacked", left=False, right=True, row_mask="causal", visible=visible, values={"heads": (1, LARGEST)}, pairs=pairs,
    fitted=fitted, arguments=arguments, diagonal=True,
    offered=False,
)  # fmt: skip
