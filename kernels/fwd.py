"""FlashAttention-2 forward (paper: algorithm 1): one program per query tile, online softmax over key tiles."""

import triton
import triton.language as tl

from fa2tune.kernels.common import (
    LOWEST,
    dot,
    dot_add,
    head_base,
    load_tile,
    store_lse,
    store_tile,
    tile_and_head,
    visible,
)
from fa2tune.search_spaces.fwd import SPACE
from fa2tune.variant import Variant


@triton.jit
def _over_keys(
    acc, total, peak, q_tile, k, v, b, h_kv, begin, end, full, rows, offset, qk_scale, stride_kn, stride_vn, seqlen_k,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, IS_CAUSAL: tl.constexpr, NEGATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, LOADS: tl.constexpr,
    PRECISION: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end) into acc [M, DV], total [M] and peak [M] (log2 domain). MASK: "never", "always", or "past_full": of
    tiles that are not below ``full``, decided at run time."""
    for n in tl.range(begin, end, BLOCK_N):
        k_tile = load_tile(
            k, b, h_kv, n, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, BLOCK_D, MASK != "never", LOADS
        )  # [N, D]
        scores = dot(q_tile, tl.trans(k_tile), PRECISION)  # [M, N]
        if NEGATE:
            scores = -scores
        columns = n + tl.arange(0, BLOCK_N)
        if MASK == "always":
            scores = tl.where(
                visible(rows[:, None], columns[None, :], offset, seqlen_k, IS_CAUSAL), scores, float("-inf")
            )
        elif MASK == "past_full":
            if n + BLOCK_N > full:
                scores = tl.where(
                    visible(rows[:, None], columns[None, :], offset, seqlen_k, IS_CAUSAL), scores, float("-inf")
                )
        new_peak = tl.maximum(peak, tl.max(scores, 1) * qk_scale)
        p = tl.math.exp2(tl.fma(scores, qk_scale, -new_peak[:, None]))
        shrink = tl.math.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v_tile = load_tile(
            v, b, h_kv, n, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, MASK != "never", LOADS
        )  # [N, DV]
        acc = dot_add(p.to(v_tile.dtype), v_tile, acc, PRECISION)
        peak = new_peak
    return acc, total, peak


@triton.jit
def fwd_kernel(
    q, k, v, o, lse, qk_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, batch, heads_q, group, seqlen_q, seqlen_k, HEADS_PER_WAVE,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    IS_CAUSAL: tl.constexpr, NEGATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOADS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o [B, Hq, Sq, DV], lse [B, Hq, Sq] float32, natural log;
    for float32 inputs lse [2, B, Hq, Sq], whose second plane is what the rounding of the first left out.

    qk_scale is |softmax_scale| * log2(e), and not 0: -inf * 0 would be NaN. Sk >= 1. Rows that see no key: o = 0, lse = -inf.
    """
    tile, head = tile_and_head(tl.cdiv(seqlen_q, BLOCK_M), batch * heads_q, HEADS_PER_WAVE, IS_CAUSAL)
    b = head // heads_q
    h = head % heads_q
    h_kv = h // group
    start_m = tile * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    offset = seqlen_k - seqlen_q  # bottom-right: row i sees keys up to i + offset

    q = head_base(q, b, h, stride_qb, stride_qh, LOADS)
    k = head_base(k, b, h_kv, stride_kb, stride_kh, LOADS)
    v = head_base(v, b, h_kv, stride_vb, stride_vh, LOADS)
    q_tile = load_tile(q, b, h, start_m, stride_qm, seqlen_q, BLOCK_M, HEAD_DIM, BLOCK_D, True, LOADS)  # [M, D]

    # keys [0, full) are seen by every row of the tile, keys [full, end) by some
    if IS_CAUSAL:
        end = tl.minimum(seqlen_k, tl.maximum(start_m + BLOCK_M + offset, 0))
        full = tl.minimum(seqlen_k, tl.maximum(start_m + 1 + offset, 0)) // BLOCK_N * BLOCK_N
    else:
        end = seqlen_k
        full = seqlen_k // BLOCK_N * BLOCK_N

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    if MASKED == "inside":
        acc, total, peak = _over_keys(
            acc, total, peak, q_tile, k, v, b, h_kv, 0, end, full, rows, offset, qk_scale, stride_kn, stride_vn, seqlen_k,
            HEAD_DIM, HEAD_DIM_V, IS_CAUSAL, NEGATE, BLOCK_N, BLOCK_D, BLOCK_DV, LOADS, PRECISION, "past_full",
        )  # fmt: skip
    else:
        if MASKED == "first":
            acc, total, peak = _over_keys(
                acc, total, peak, q_tile, k, v, b, h_kv, full, end, full, rows, offset, qk_scale, stride_kn, stride_vn,
                seqlen_k, HEAD_DIM, HEAD_DIM_V, IS_CAUSAL, NEGATE, BLOCK_N, BLOCK_D, BLOCK_DV, LOADS, PRECISION, "always",
            )  # fmt: skip
        acc, total, peak = _over_keys(
            acc, total, peak, q_tile, k, v, b, h_kv, 0, full, full, rows, offset, qk_scale, stride_kn, stride_vn, seqlen_k,
            HEAD_DIM, HEAD_DIM_V, IS_CAUSAL, NEGATE, BLOCK_N, BLOCK_D, BLOCK_DV, LOADS, PRECISION, "never",
        )  # fmt: skip
        if MASKED == "last":
            acc, total, peak = _over_keys(
                acc, total, peak, q_tile, k, v, b, h_kv, full, end, full, rows, offset, qk_scale, stride_kn, stride_vn,
                seqlen_k, HEAD_DIM, HEAD_DIM_V, IS_CAUSAL, NEGATE, BLOCK_N, BLOCK_D, BLOCK_DV, LOADS, PRECISION, "always",
            )  # fmt: skip

    # a row whose scores are all -inf has total 0: 0 / 0 = NaN, as softmax has it; a row with no key at all is 0
    out = acc / total[:, None]
    sees_a_key = rows + offset >= 0
    if IS_CAUSAL:
        out = tl.where(sees_a_key[:, None], out, 0.0)
    head_lse = lse + (b.to(tl.int64) * heads_q + h) * seqlen_q
    all_rows = (batch * heads_q).to(tl.int64) * seqlen_q
    store_lse(
        head_lse, rows, peak, total, sees_a_key | (not IS_CAUSAL), rows < seqlen_q, all_rows, q_tile.dtype == tl.float32
    )
    store_tile(
        o + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh, out, start_m, stride_om, seqlen_q,
        BLOCK_M, HEAD_DIM_V, BLOCK_DV,
    )  # fmt: skip


VARIANT = Variant(
    name="fwd",
    kernel=fwd_kernel,
    space=SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "lse": "fp32"},
    descriptors={"q": ("BLOCK_M", "BLOCK_D"), "k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV")},
    grid=lambda problem, config: triton.cdiv(problem.seqlen_q, config["BLOCK_M"]) * problem.batch * problem.heads_q,
    constants=lambda spec: {"NEGATE": spec.negate},
)
