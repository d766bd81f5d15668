"""Tiles whose rows are (query, query head) pairs of one key head, so that its keys are read once for all of them. Device side.

Row r of a key head is query r // group of its query head r % group: rows that follow one another see nearly the same keys.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import store_lse


class QueryHeads(NamedTuple):
    """Of a call."""

    batch: tl.tensor
    heads_q: tl.tensor
    group: tl.tensor
    seqlen_q: tl.tensor


@triton.jit
def queries_of(start, group, seqlen_q, ROWS: tl.constexpr):
    """(first query, number of queries) of the rows [start, start + ROWS) of a key head."""
    first = start // group
    last = tl.minimum((start + ROWS - 1) // group, seqlen_q - 1)
    return first, last - first + 1


@triton.jit
def load_queries(
    q, b, h_kv, rows, group, seqlen_q, stride_b, stride_h, stride_m, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """The rows [M] of a key head as [M, D]; rows behind the last one, and columns from HEAD_DIM on, are zero."""
    query = rows // group
    head = h_kv * group + rows - query * group
    start = head.to(tl.int64) * stride_h + query.to(tl.int64) * stride_m  # [M]
    d = tl.arange(0, BLOCK_D)
    inside = (query < seqlen_q)[:, None]
    if HEAD_DIM != BLOCK_D:
        inside = inside & (d < HEAD_DIM)[None, :]
    base = q + b.to(tl.int64) * stride_b
    return tl.load(base + start[:, None] + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_output(
    o, lse, out, peak, total, sees_a_key, b, h_kv, rows, inside, heads, strides,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, TWO_WORDS: tl.constexpr,
):  # fmt: skip
    """out [M, DV] to o [B, Hq, Sq, DV], and lse of 2^peak * total, of the rows [M] of key heads (b, h_kv), each a number or
    [M], where ``inside`` says so. ``strides``: of o, by batch, head and query."""
    query = rows // heads.group
    head = h_kv * heads.group + rows - query * heads.group
    start = b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + query.to(tl.int64) * strides[2]  # [M]
    d = tl.arange(0, BLOCK_DV)
    mask = inside[:, None]
    if HEAD_DIM_V != BLOCK_DV:
        mask = mask & (d < HEAD_DIM_V)[None, :]
    tl.store(o + (start[:, None] + d[None, :]), out.to(o.dtype.element_ty), mask=mask)
    places = (b.to(tl.int64) * heads.heads_q + head) * heads.seqlen_q + query
    all_rows = (heads.batch * heads.heads_q).to(tl.int64) * heads.seqlen_q
    store_lse(lse, places, peak, total, sees_a_key, inside, all_rows, TWO_WORDS)
