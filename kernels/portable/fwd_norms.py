"""Before a forward that wants no maxima: how large the scores of a head can get, by the norms of its keys.

Bound by memory, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import head_base, load_tile
from fa2tune.search_spaces.portable import fwd_norms as space
from fa2tune.spec.variant import Variant

PARTS = tl.constexpr(space.PARTS)
SMALLEST = tl.constexpr(space.SMALLEST)


@triton.jit
def fwd_norms_kernel(
    k, norms, stride_kb, stride_kh, stride_kn, heads_q, group, seqlen_k,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """k [B, Hkv, Sk, D] -> norms [B, Hkv, PARTS] float32: the largest |k| of each part of a head's keys. A key that holds a NaN
    counts for nothing: a query that sees it gets NaN whatever the bound."""
    head = tl.program_id(0) // PARTS
    heads_kv = heads_q // group
    k = head_base(k, head // heads_kv, head % heads_kv, stride_kb, stride_kh, "pointer")
    rows = (
        tl.cdiv(tl.cdiv(seqlen_k, PARTS), BLOCK_R) * BLOCK_R
    )  # of a part: whole blocks, so the last parts may be empty
    first = tl.program_id(0) % PARTS * rows
    squares = tl.full([BLOCK_R], SMALLEST, tl.float32)
    for row in range(first, tl.minimum(first + rows, seqlen_k), BLOCK_R):
        tile = load_tile(k, 0, 0, row, stride_kn, seqlen_k, BLOCK_R, HEAD_DIM, BLOCK_D, True, "pointer").to(tl.float32)
        squares = tl.maximum(squares, tl.sum(tile * tile, 1))  # [R]
    tl.store(norms + tl.program_id(0), tl.sqrt(tl.max(squares, 0)))


VARIANT = Variant(
    kernel=fwd_norms_kernel,
    space=space.SPACE,
    tensors={"k": "", "norms": "fp32"},
    descriptors={},
    grid=lambda problem, config, _sm_count, _early: problem.batch * problem.heads_kv * space.PARTS,
)
