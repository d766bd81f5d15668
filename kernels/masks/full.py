"""No mask but the ends of the sequences: every query sees every key."""

import triton
import triton.language as tl  # noqa: F401  # Triton's interpreter wants it beside every jit function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.spec.maskfile import MaskHooks


@triton.jit
def key_range(start, size, offset, seqlen_k, window, step):
    """Keys that queries [start, start + size) see, as (begin, full_begin, full_end, end): all of these queries see the keys
    [full_begin, full_end), in whole steps; some see those of [begin, full_begin) and of [full_end, end)."""
    return 0, 0, seqlen_k // step * step, seqlen_k


@triton.jit
def query_range(start, size, offset, seqlen_q, window, step):
    """Queries that see keys [start, start + size), as (begin, full_begin, full_end, end), begin in whole steps."""
    return 0, 0, seqlen_q, seqlen_q


@triton.jit
def keep(rows, columns, offset, seqlen_k, window):
    """Which keys (columns) each query (rows) sees, the two broadcast against each other."""
    return columns < seqlen_k


@triton.jit
def sees(rows, offset, seqlen_k, window):
    """Whether a query sees any key; every one does."""
    return rows >= 0


# ---- for kernels in Gluon: in whole key blocks, and with Gluon's layouts


@gluon.jit
def blocks_below(rows_end, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    """Key blocks, counted from the first key, up to the last that the rows below rows_end (1 or more) see; at least one. Of a
    mask that is bounded on the right alone the compiler must not know that it is (``q_again`` of lib/hopper_forward.py)."""
    return gl.cdiv(seqlen_k, BLOCK_N)


@gluon.jit
def first_block(row, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    """The first key block that any row from ``row`` on sees."""
    return 0


@gluon.jit
def clear_blocks(row, rows_end, seqlen_q, seqlen_k, window, BLOCK_N: gl.constexpr):
    """(begin, end) of the key blocks that all rows [row, rows_end) see whole; end is asked of masks bounded on the right, begin
    of those bounded on the left."""
    return 0, seqlen_k // BLOCK_N


@gluon.jit
def hide(s, rows, column, offset, seqlen_k, window, layout: gl.constexpr):
    """Scores s [ROWS, BLOCK_N] of keys from column on, -inf where a row does not see the key."""
    columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
    # bits 1 and 2 of a column tell the threads of a row apart, the others are constants: one comparison with one a score
    mine = (columns & 6)[None, :]
    constant = (columns & -7)[None, :]
    return gl.where(constant < seqlen_k - column - mine, s, float("-inf"))


@gluon.jit
def sees_a_key(rows, offset, seqlen_k, window):
    return rows >= 0


@gluon.jit
def query_blocks(key, keys_end, seqlen_q, seqlen_k, window, BLOCK_M: gl.constexpr):
    """Query blocks that see any of the keys [key, keys_end), as (first, full_begin, full_end, end), none below the one before:
    those of [full_begin, full_end) see them all, in so far as there are such keys. full_end is asked of masks bounded on the
    left."""
    end = gl.cdiv(seqlen_q, BLOCK_M)
    return 0, 0, end, end


@gluon.jit
def hide_queries(p, keys, row, offset, seqlen_k, window, layout: gl.constexpr):
    """Weights p [KEYS, BLOCK_M] of queries from row on, 0 where a query does not see the key."""
    seen_from = gl.where(keys < seqlen_k, 0, p.shape[1])
    rows = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, layout))
    return gl.where(seen_from[:, None] <= rows[None, :], p, 0.0)


# ---- for the host


def visible(rows, columns, lengths, values):
    return (rows >= 0) & (columns >= 0)


def pairs(lengths, values):
    seqlen_q, seqlen_k = lengths
    return seqlen_q * seqlen_k


MASK = MaskHooks("full", left=False, right=False, row_mask="full", visible=visible, pairs=pairs, even=True)
