"""Forward of few queries: keys are split among programs, and a tile's rows are the queries of all query heads of a key head.

Each program takes one part of the keys that its tile sees; kernels/portable/fwd_combine.py puts the parts together. With one
part it writes the output itself."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import LOWEST, dot, dot_add, head_base, load_tile
from fa2tune.kernels.lib.packed_heads import QueryHeads, load_queries, queries_of, store_output
from fa2tune.search_spaces.portable.fwd_split import SPACE, programs
from fa2tune.spec.variant import Variant

_START_NEXT = tl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")


@triton.jit
def fwd_split_kernel(
    q, k, v, o, lse, o_parts, stats, qk_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, batch, heads_q, heads_kv, group, seqlen_q, seqlen_k, SPLITS,
    window_left, window_right, score_first, score_second,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KEY_RANGE: tl.constexpr, KEEP: tl.constexpr, SEES: tl.constexpr, LEFT_BOUNDED: tl.constexpr,
    RIGHT_BOUNDED: tl.constexpr, APPLY: tl.constexpr, NEGATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOADS: tl.constexpr, IN_PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o and lse as kernels/portable/fwd.py has them or, IN_PARTS,
    o_parts [SPLITS, B, Hkv, Sq * group, DV] and stats [2, SPLITS, B, Hkv, Sq * group], float32, contiguous: of each part the
    sums of P V, the maxima that P is relative to (log2 domain) and the sums of P; that is -1 where a row sees no key at all.
    EARLY: the next kernel may start when all programs of this one have."""
    if EARLY:
        tl.inline_asm_elementwise(_START_NEXT, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
    rows_of_head = seqlen_q * group
    tiles = tl.cdiv(rows_of_head, BLOCK_M)
    # tiles run fastest: those that read the same keys run at the same time
    pid = tl.program_id(0)
    tile = pid % tiles
    split = pid // tiles % SPLITS
    head = pid // tiles // SPLITS
    b = head // heads_kv
    h_kv = head - b * heads_kv
    start = tile * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    first, count = queries_of(start, group, seqlen_q, BLOCK_M)
    queries = rows // group
    head_q = h_kv * group + rows - queries * group
    offset = seqlen_k - seqlen_q
    q_tile = load_queries(
        q, b, h_kv, rows, group, seqlen_q, stride_qb, stride_qh, stride_qm, HEAD_DIM, BLOCK_D
    )  # [M, D]
    k = head_base(k, b, h_kv, stride_kb, stride_kh, LOADS)
    v = head_base(v, b, h_kv, stride_vb, stride_vh, LOADS)

    window = (window_left, window_right)
    score = (score_first, score_second)
    begin, full_begin, full_end, end = KEY_RANGE(first, count, offset, seqlen_k, window, BLOCK_N)
    blocks = tl.cdiv(end - begin, BLOCK_N)
    end = tl.minimum(begin + (split + 1) * blocks // SPLITS * BLOCK_N, end)
    begin += split * blocks // SPLITS * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    for n in tl.range(begin, end, BLOCK_N):
        k_tile = load_tile(k, b, h_kv, n, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, BLOCK_D, True, LOADS)  # [N, D]
        scores = dot(q_tile, tl.trans(k_tile), PRECISION)  # [M, N]
        if NEGATE:
            scores = -scores
        keys = n + tl.arange(0, BLOCK_N)  # vanishes without a term; ``columns`` stay in their place
        scores = APPLY(scores, score, queries[:, None], keys[None, :], offset, b, head_q[:, None])
        outside = n + BLOCK_N > full_end
        if LEFT_BOUNDED:
            outside = outside | (n < full_begin)
        if outside:
            columns = n + tl.arange(0, BLOCK_N)
            seen = KEEP(queries[:, None], columns[None, :], offset, seqlen_k, window)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * qk_scale)
        p = tl.math.exp2(tl.fma(scores, qk_scale, -new_peak[:, None]))
        shrink = tl.math.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v_tile = load_tile(v, b, h_kv, n, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True, LOADS)  # [N, DV]
        acc = dot_add(p.to(v_tile.dtype), v_tile, acc, PRECISION)
        peak = new_peak

    sees_a_key = SEES(queries, offset, seqlen_k, window)
    inside = rows < rows_of_head
    if IN_PARTS:
        all_rows = (batch * heads_q).to(tl.int64) * seqlen_q
        own = split * all_rows + head.to(tl.int64) * rows_of_head + rows  # [M]
        d = tl.arange(0, BLOCK_DV)
        mask = inside[:, None]
        if HEAD_DIM_V != BLOCK_DV:
            mask = mask & (d < HEAD_DIM_V)[None, :]
        tl.store(o_parts + (own[:, None] * HEAD_DIM_V + d[None, :]), acc, mask=mask)
        if LEFT_BOUNDED or RIGHT_BOUNDED:
            total = tl.where(sees_a_key, total, -1.0)
        tl.store(stats + own, peak, mask=inside)
        tl.store(stats + SPLITS * all_rows + own, total, mask=inside)
    else:
        # a row whose scores are all -inf has total 0: 0 / 0 = NaN, as softmax has it; a row with no key at all is 0
        out = acc / total[:, None]
        if LEFT_BOUNDED or RIGHT_BOUNDED:
            out = tl.where(sees_a_key[:, None], out, 0.0)
        unmasked: tl.constexpr = not LEFT_BOUNDED and not RIGHT_BOUNDED
        store_output(
            o, lse, out, peak, total, sees_a_key | unmasked, b, h_kv, rows, inside,
            QueryHeads(batch, heads_q, group, seqlen_q), (stride_ob, stride_oh, stride_om), HEAD_DIM_V, BLOCK_DV,
            q_tile.dtype == tl.float32,
        )  # fmt: skip


VARIANT = Variant(
    role="fwd_split_grouped",
    kernel=fwd_split_kernel,
    space=SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "lse": "fp32", "o_parts": "fp32", "stats": "fp32"},
    descriptors={"k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV")},
    grid=lambda problem, config, _sm_count, _early: programs(problem, config),
    constants=lambda spec, _config: {"NEGATE": spec.negate},
)
