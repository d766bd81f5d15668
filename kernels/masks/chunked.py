"""Causal inside chunks, as Llama 4's local layers have it: query i sees the keys up to i + offset that lie in the same chunk of
``chunk`` keys, counted from the first key. offset = seqlen_k - seqlen_q.

window = (chunk, 0): run-time integers.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.spec.maskfile import LARGEST, MaskHooks


@triton.jit
def key_range(start, size, offset, seqlen_k, window, step):
    """As kernels/masks/full.py has it. Queries of two chunks have no key in common."""
    chunk, _ = window
    first = tl.maximum(start + offset, 0)  # the last key of the first query
    last = tl.maximum(start + size - 1 + offset, 0)
    begin = tl.minimum(first // chunk * chunk, seqlen_k) // step * step
    end = tl.maximum(tl.minimum(start + size + offset, seqlen_k), begin)
    full_begin = tl.cdiv(last // chunk * chunk, step) * step
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.cdiv(end - begin, step) * step + begin)
    full_end = tl.minimum(seqlen_k, tl.maximum(start + 1 + offset, 0)) // step * step
    return begin, full_begin, tl.maximum(full_end, full_begin), end


@triton.jit
def query_range(start, size, offset, seqlen_q, window, step):
    chunk, _ = window
    last = tl.cdiv(seqlen_q, step) * step
    begin = tl.minimum(tl.maximum(start - offset, 0) // step * step, last)
    end = (start + size - 1) // chunk * chunk + chunk - offset  # of the last key's chunk
    end = tl.maximum(tl.minimum(end, seqlen_q), begin)
    full_begin = tl.cdiv(tl.maximum(start + size - 1 - offset, 0), step) * step
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.cdiv(end - begin, step) * step + begin)
    full_end = tl.minimum(tl.maximum(start // chunk * chunk + chunk - offset, 0), seqlen_q) // step * step
    return begin, full_begin, tl.maximum(full_end, full_begin), end


@triton.jit
def keep(rows, columns, offset, seqlen_k, window):
    last = rows + offset
    seen = (columns < seqlen_k) & (columns <= last)
    return seen & (columns >= tl.maximum(last, 0) // window[0] * window[0])


@triton.jit
def sees(rows, offset, seqlen_k, window):
    return rows + offset >= 0


# ---- for kernels in Gluon: as kernels/masks/full.py has them


@gluon.jit
def blocks_below(rows_end, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    return gl.cdiv(gl.maximum(gl.minimum(rows_end + seqlen_k - seqlen_q, seqlen_k), 1), BLOCK_N)


@gluon.jit
def first_block(row, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    return gl.maximum(row + seqlen_k - seqlen_q, 0) // window[0] * window[0] // BLOCK_N


@gluon.jit
def clear_blocks(row, rows_end, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    offset = seqlen_k - seqlen_q
    begin = gl.cdiv(gl.maximum(rows_end - 1 + offset, 0) // window[0] * window[0], BLOCK_N)
    return begin, gl.minimum(seqlen_k, gl.maximum(row + 1 + offset, 0)) // BLOCK_N


@gluon.jit
def hide(s, rows, column, offset, seqlen_k, window, layout: gl.constexpr):
    columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
    mine = (columns & 6)[None, :]
    constant = (columns & -7)[None, :]
    last = gl.minimum(rows + offset, seqlen_k - 1) - column
    first = gl.maximum(rows + offset, 0) // window[0] * window[0] - column
    seen = (constant <= last[:, None] - mine) & (constant >= first[:, None] - mine)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def sees_a_key(rows, offset, seqlen_k, window):
    return rows + offset >= 0


@gluon.jit
def query_blocks(key, keys_end, seqlen_q, seqlen_k, window, BLOCK_M: gl.constexpr):
    blocks = gl.cdiv(seqlen_q, BLOCK_M)
    offset = seqlen_k - seqlen_q
    last_key = gl.minimum(keys_end, seqlen_k) - 1
    first = gl.minimum(gl.maximum(key - offset, 0) // BLOCK_M, blocks)
    end = gl.cdiv(gl.maximum(last_key // window[0] * window[0] + window[0] - offset, 0), BLOCK_M)
    end = gl.maximum(gl.minimum(end, blocks), first)
    full_begin = gl.cdiv(gl.maximum(keys_end - 1 - offset, 0), BLOCK_M)
    full_begin = gl.minimum(gl.maximum(full_begin, first), end)
    full_end = gl.maximum(key // window[0] * window[0] + window[0] - offset, 0) // BLOCK_M
    return first, full_begin, gl.minimum(gl.maximum(full_end, full_begin), end), end


@gluon.jit
def hide_queries(p, keys, row, offset, seqlen_k, window, layout: gl.constexpr):
    rows = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, layout))
    mine = (rows & 6)[None, :]
    constant = (rows & -7)[None, :]
    first = gl.where(keys < seqlen_k, keys - offset - row, p.shape[1])
    end = keys // window[0] * window[0] + window[0] - offset - row  # of the key's chunk
    seen = (constant >= first[:, None] - mine) & (constant < end[:, None] - mine)
    return gl.where(seen, p, 0.0)


# ---- for the host


def visible(rows, columns, lengths, values):
    (chunk,), last = values, rows + (lengths[1] - lengths[0])
    return (columns <= last) & (columns // chunk == last // chunk)


def pairs(lengths, values):
    (seqlen_q, seqlen_k), (chunk,) = lengths, values

    def before(last):
        """Of the queries whose last key is one of the first ``last``."""
        whole, rest = divmod(last, chunk)
        return (whole * chunk * (chunk + 1) + rest * (rest + 1)) // 2

    return before(seqlen_k) - before(max(seqlen_k - seqlen_q, 0))


def fitted(lengths, values):
    return ("causal",) if values[0] >= lengths[1] else ("chunked", *values)


MASK = MaskHooks(
    "chunked", left=True, right=True, row_mask="causal", visible=visible, values={"chunk": (1, LARGEST)}, pairs=pairs,
    fitted=fitted, diagonal=True,
)  # fmt: skip
