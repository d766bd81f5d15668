"""A sliding window, aligned at the bottom right: query i sees keys i + offset - left to i + offset + right, both inclusive.

window = (left, right): run-time integers; one that is larger than the sequences does not bound its side.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.spec.maskfile import LARGEST, MaskHooks, pairs_below


@triton.jit
def key_range(start, size, offset, seqlen_k, window, step):
    """As kernels/masks/full.py has it."""
    left, right = window
    first = start + offset  # where the window of the first query is centred
    begin = tl.minimum(tl.maximum(first - left, 0), seqlen_k) // step * step
    end = tl.maximum(tl.minimum(first + size + right, seqlen_k), begin)
    full_begin = tl.cdiv(tl.maximum(first + size - 1 - left, 0), step) * step
    full_end = tl.minimum(tl.maximum(first + 1 + right, 0), seqlen_k) // step * step
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.cdiv(end - begin, step) * step + begin)
    return begin, full_begin, tl.maximum(full_end, full_begin), end


@triton.jit
def query_range(start, size, offset, seqlen_q, window, step):
    left, right = window
    last = tl.cdiv(seqlen_q, step) * step
    first = start - offset  # the query whose window is centred at the first key
    begin = tl.minimum(tl.maximum(first - right, 0) // step * step, last)
    end = tl.maximum(tl.minimum(first + size + left, seqlen_q), begin)
    full_begin = tl.cdiv(tl.maximum(first + size - 1 - right, 0), step) * step
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.cdiv(end - begin, step) * step + begin)
    full_end = tl.minimum(tl.maximum(first + left + 1, 0), seqlen_q) // step * step
    return begin, full_begin, tl.maximum(full_end, full_begin), end


@triton.jit
def keep(rows, columns, offset, seqlen_k, window):
    left, right = window
    seen = (columns < seqlen_k) & (columns <= rows + offset + right)
    return seen & (columns >= rows + offset - left)


@triton.jit
def sees(rows, offset, seqlen_k, window):
    left, right = window
    return (rows + offset + right >= 0) & (rows + offset - left < seqlen_k)


# ---- for kernels in Gluon: as kernels/masks/full.py has them


@gluon.jit
def blocks_below(rows_end, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    return gl.cdiv(gl.maximum(gl.minimum(rows_end + seqlen_k - seqlen_q + window[1], seqlen_k), 1), BLOCK_N)


@gluon.jit
def first_block(row, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    return gl.maximum(row + seqlen_k - seqlen_q - window[0], 0) // BLOCK_N


@gluon.jit
def clear_blocks(row, rows_end, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    offset = seqlen_k - seqlen_q
    begin = gl.cdiv(gl.maximum(rows_end - 1 + offset - window[0], 0), BLOCK_N)
    return begin, gl.minimum(seqlen_k, gl.maximum(row + 1 + offset + window[1], 0)) // BLOCK_N


@gluon.jit
def hide(s, rows, column, offset, seqlen_k, window, layout: gl.constexpr):
    columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
    mine = (columns & 6)[None, :]
    constant = (columns & -7)[None, :]
    last = gl.minimum(rows + offset + window[1], seqlen_k - 1) - column
    first = rows + offset - window[0] - column
    seen = (constant <= last[:, None] - mine) & (constant >= first[:, None] - mine)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def sees_a_key(rows, offset, seqlen_k, window):
    return (rows + offset + window[1] >= 0) & (rows + offset - window[0] < seqlen_k)


@gluon.jit
def query_blocks(key, keys_end, seqlen_q, seqlen_k, window, BLOCK_M: gl.constexpr):
    blocks = gl.cdiv(seqlen_q, BLOCK_M)
    first_key = key - (seqlen_k - seqlen_q)  # counted as queries are
    keys = keys_end - key
    first = gl.minimum(gl.maximum(first_key - window[1], 0) // BLOCK_M, blocks)
    end = gl.cdiv(gl.maximum(gl.minimum(first_key + keys, seqlen_q) + window[0], 0), BLOCK_M)
    end = gl.maximum(gl.minimum(end, blocks), first)
    full_begin = gl.cdiv(gl.maximum(first_key + keys - 1 - window[1], 0), BLOCK_M)
    full_begin = gl.minimum(gl.maximum(full_begin, first), end)
    full_end = gl.maximum(first_key + 1 + window[0], 0) // BLOCK_M
    return first, full_begin, gl.minimum(gl.maximum(full_end, full_begin), end), end


@gluon.jit
def hide_queries(p, keys, row, offset, seqlen_k, window, layout: gl.constexpr):
    rows = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, layout))
    mine = (rows & 6)[None, :]
    constant = (rows & -7)[None, :]
    first = gl.where(keys < seqlen_k, keys - offset - window[1] - row, p.shape[1])
    last = keys - offset + window[0] - row
    seen = (constant >= first[:, None] - mine) & (constant <= last[:, None] - mine)
    return gl.where(seen, p, 0.0)


# ---- for the host; -1 is an unbounded side


def visible(rows, columns, lengths, values):
    (left, right), diagonal = values, rows + (lengths[1] - lengths[0])
    seen = columns >= 0 if right < 0 else columns <= diagonal + right
    return seen if left < 0 else seen & (columns >= diagonal - left)


def arguments(lengths, values):
    """An unbounded side reaches the last key from every query."""
    (seqlen_q, seqlen_k), (left, right) = lengths, values
    return min(seqlen_k if left < 0 else left, seqlen_k), min(seqlen_q if right < 0 else right, seqlen_q)


def pairs(lengths, values):
    (seqlen_q, seqlen_k), (left, right) = lengths, arguments(lengths, values)
    offset = seqlen_k - seqlen_q
    return pairs_below(seqlen_q, seqlen_k, offset + right + 1) - pairs_below(seqlen_q, seqlen_k, offset - left)


def fitted(lengths, values):
    """A side that reaches the end of the keys from every query is unbounded."""
    (seqlen_q, seqlen_k), (left, right) = lengths, values
    left = -1 if left >= seqlen_k - 1 else left
    right = -1 if right >= seqlen_q - 1 and right > 0 else right
    if left < 0 and right <= 0:
        return ("full",) if right < 0 else ("causal",)
    return "band", left, right


def text(name, values):
    return "window " + ", ".join("unbounded" if side < 0 else str(side) for side in values)


MASK = MaskHooks(
    "band", left=True, right=True, row_mask=lambda values: "causal" if values[1] == 0 else "full", visible=visible,
    values={"left": (-1, LARGEST), "right": (-1, LARGEST)}, pairs=pairs, fitted=fitted, arguments=arguments, text=text,
    even=True, diagonal=True,
)  # fmt: skip
