"""Causal, aligned at the top left, as SDPA's is_causal: query i sees the keys 0 to i, however many there are."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.spec.maskfile import MaskHooks, pairs_below


@triton.jit
def key_range(start, size, offset, seqlen_k, window, step):
    """As kernels/masks/full.py has it."""
    # start is below 0 where cu_seqlens are wrong
    end = tl.minimum(seqlen_k, tl.maximum(start + size, 0))
    full_end = tl.minimum(seqlen_k, tl.maximum(start + 1, 0)) // step * step
    return 0, 0, full_end, end


@triton.jit
def query_range(start, size, offset, seqlen_q, window, step):
    last = tl.cdiv(seqlen_q, step) * step
    begin = tl.minimum(tl.maximum(start, 0) // step * step, last)
    full_begin = tl.minimum(tl.cdiv(tl.maximum(start + size - 1, 0), step) * step, last)
    return begin, full_begin, seqlen_q, seqlen_q


@triton.jit
def keep(rows, columns, offset, seqlen_k, window):
    seen = columns < seqlen_k
    return seen & (columns <= rows)


@triton.jit
def sees(rows, offset, seqlen_k, window):
    return rows >= 0


# ---- for kernels in Gluon: as kernels/masks/full.py has them


@gluon.jit
def blocks_below(rows_end, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    # With maximum(minimum(rows_end, seqlen_k), 1) LLVM knows the result to be 1 or more: rows_end is a multiple of 128, so that
    # cdiv cannot overflow. q_again of kernels/lib/hopper_forward.py is then for nothing.
    return gl.cdiv(gl.minimum(rows_end, gl.maximum(seqlen_k, 1)), BLOCK_N)


@gluon.jit
def first_block(row, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    return 0


@gluon.jit
def clear_blocks(row, rows_end, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    return 0, gl.minimum(seqlen_k, gl.maximum(row + 1, 0)) // BLOCK_N


@gluon.jit
def hide(s, rows, column, offset, seqlen_k, window, layout: gl.constexpr):
    columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
    mine = (columns & 6)[None, :]
    constant = (columns & -7)[None, :]
    last = gl.minimum(rows, seqlen_k - 1) - column  # the last key that a row sees
    return gl.where(constant <= last[:, None] - mine, s, float("-inf"))


@gluon.jit
def sees_a_key(rows, offset, seqlen_k, window):
    return rows >= 0


@gluon.jit
def query_blocks(key, keys_end, seqlen_q, seqlen_k, window, BLOCK_M: gl.constexpr):
    end = gl.cdiv(seqlen_q, BLOCK_M)
    first = gl.minimum(gl.maximum(key, 0) // BLOCK_M, end)
    full_begin = gl.minimum(gl.cdiv(gl.maximum(keys_end - 1, 0), BLOCK_M), end)
    return first, full_begin, end, end


@gluon.jit
def hide_queries(p, keys, row, offset, seqlen_k, window, layout: gl.constexpr):
    # how far into the block the first query lies that sees the key: two numbers a thread
    seen_from = keys - row
    seen_from = gl.where(keys < seqlen_k, seen_from, p.shape[1])
    rows = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, layout))
    return gl.where(seen_from[:, None] <= rows[None, :], p, 0.0)


# ---- for the host


def visible(rows, columns, lengths, values):
    return columns <= rows


def pairs(lengths, values):
    return pairs_below(*lengths, 1)


MASK = MaskHooks(
    "causal_top_left", left=False, right=True, row_mask="causal", visible=visible, pairs=pairs, diagonal=True
)
