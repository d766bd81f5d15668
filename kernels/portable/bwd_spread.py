"""Before a backward whose query groups are split into parts: K and V once per part, so that the kernels that make dK and dV
take a part for a key head of its own.

Bound by memory, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import head_base, load_tile, store_tile
from fa2tune.search_spaces.portable.bwd_spread import SPACE
from fa2tune.spec.variant import Variant


@triton.jit
def _copy(
    source, target, b, h, part, start_n, stride_b, stride_h, stride_n, seqlen_k,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows of head (b, h) to the same rows of the part of that number, counted over the batch."""
    source = head_base(source, b, h, stride_b, stride_h, "pointer")
    tile = load_tile(source, b, h, start_n, stride_n, seqlen_k, BLOCK_N, DIM, BLOCK_DIM, True, "pointer")
    store_tile(target + part.to(tl.int64) * seqlen_k * DIM, tile, start_n, DIM, seqlen_k, BLOCK_N, DIM, BLOCK_DIM)


@triton.jit
def bwd_spread_kernel(
    k, v, k_parts, v_parts, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, heads_kv, parts, seqlen_k,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """k, v [B, Hkv, Sk, D / DV] -> k_parts, v_parts [B, Hkv * parts, Sk, D / DV], contiguous: head h is head h // parts."""
    tiles = tl.cdiv(seqlen_k, BLOCK_N)
    part = tl.program_id(0) // tiles
    start_n = tl.program_id(0) % tiles * BLOCK_N
    b = part // (heads_kv * parts)
    h = part // parts - b * heads_kv
    _copy(
        k, k_parts, b, h, part, start_n, stride_kb, stride_kh, stride_kn, seqlen_k, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    _copy(
        v, v_parts, b, h, part, start_n, stride_vb, stride_vh, stride_vn, seqlen_k, HEAD_DIM_V, BLOCK_DV, BLOCK_N,
    )  # fmt: skip


VARIANT = Variant(
    role="bwd_spread",
    kernel=bwd_spread_kernel,
    space=SPACE,
    tensors={"k": "", "v": "", "k_parts": "", "v_parts": ""},
    descriptors={},
    grid=lambda problem, config, _sm_count, _early: (
        triton.cdiv(problem.seqlen_k, config["BLOCK_N"]) * problem.batch * problem.heads_kv
    ),
)
