"""Before a forward that wants no maxima: how large the scores of a head can get, by the norms of its keys; of packed sequences
by those of each one, so that what it is packed with changes no bit of its result.

Bound by memory, so it has no search space: one fixed config."""

import math

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import head_base, load_tile
from fa2tune.search_spaces.portable import fwd_norms as space
from fa2tune.spec.variant import Variant

PARTS = tl.constexpr(space.PARTS)
SMALLEST = tl.constexpr(space.SMALLEST)


@triton.jit
def _keys_of(cu_seqlens, sequence, sequences, total):
    """(first key, number of keys) of a sequence, none behind the last one. Whatever cu_seqlens holds, no row outside the tensor
    is meant."""
    start = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1, mask=sequence < sequences, other=0)
    start = tl.minimum(tl.maximum(start, 0), total)
    return start, tl.maximum(tl.minimum(end, total) - start, 0)


@triton.jit
def fwd_norms_kernel(
    k, norms, cu_seqlens_k, stride_kb, stride_kh, stride_kn, heads_q, group, seqlen_k,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """k [B, Hkv, Sk, D] -> norms [B, Hkv, PARTS] float32: the largest |k| of each part of a head's keys. A key that holds a NaN
    counts for nothing: a query that sees it gets NaN whatever the bound. RAGGED: B is 1 -> norms [Hkv, sequences + 1, PARTS],
    of each sequence, and of none."""
    head = tl.program_id(0) // PARTS
    heads_kv = heads_q // group
    if RAGGED:
        each = tl.num_programs(0) // (heads_kv * PARTS)  # sequences, and one
        first_k, seqlen_k = _keys_of(cu_seqlens_k, head % each, each - 1, seqlen_k)
        k = head_base(k, head * 0, head // each, stride_kb, stride_kh, "pointer") + first_k.to(tl.int64) * stride_kn
    else:
        k = head_base(k, head // heads_kv, head % heads_kv, stride_kb, stride_kh, "pointer")
    rows = (
        tl.cdiv(tl.cdiv(seqlen_k, PARTS), BLOCK_R) * BLOCK_R
    )  # of a part: whole blocks, so the last parts may be empty
    first = tl.program_id(0) % PARTS * rows
    squares = tl.full([BLOCK_R], SMALLEST, tl.float32)
    # not unrolled: with an end before its start, which the last parts have, an unrolled loop runs (docs/experiments/defects.md)
    for row in range(first, tl.minimum(first + rows, seqlen_k), BLOCK_R):
        tile = load_tile(k, 0, 0, row, stride_kn, seqlen_k, BLOCK_R, HEAD_DIM, BLOCK_D, True, "pointer").to(tl.float32)
        squares = tl.maximum(squares, tl.sum(tile * tile, 1))  # [R]
    tl.store(norms + tl.program_id(0), tl.sqrt(tl.max(squares, 0)))


VARIANT = Variant(
    kernel=fwd_norms_kernel,
    space=space.SPACE,
    tensors={"k": "", "norms": "fp32", "cu_seqlens_k": "i32"},
    descriptors={},
    grid=lambda problem, _config, _sm_count, _early: math.prod(space.norms_shape(problem)),
)
