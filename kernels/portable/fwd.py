"""FlashAttention-2 forward (paper: algorithm 1): one program per query tile, online softmax over key tiles."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import (
    LOWEST,
    Call,
    Form,
    Head,
    dot,
    dot_add,
    head_base,
    load_tile,
    rows_of,
    store_lse,
    store_tile,
    tile_and_head,
)
from fa2tune.kernels.lib.extent import packed_sequence, packed_tiles, place
from fa2tune.search_spaces.portable.fwd import SPACE
from fa2tune.spec.variant import Variant


@triton.jit
def _over_keys(acc, total, peak, q_tile, rows, k, v, begin, end, call, form, MASK: tl.constexpr):
    """Keys [begin, end) into acc [M, DV], total [M] and peak [M] (log2 domain). MASK: "never", "always", or "outside_full": of
    tiles that do not lie in [full[0], full[1]), decided at run time."""
    for n in tl.range(begin, end, form.BLOCK):
        k_tile = rows_of(k, n, form.HEAD_DIM, form.BLOCK_D, MASK != "never", form)  # [N, D]
        scores = dot(q_tile, tl.trans(k_tile), form.PRECISION)  # [M, N]
        if form.NEGATE:
            scores = -scores
        keys = n + tl.arange(0, form.BLOCK)  # vanishes without a term; ``columns`` stay in their place
        scores = form.APPLY(
            scores, call.score, rows[:, None], keys[None, :], call.offset, call.batch, call.head
        )  # fmt: skip
        columns = n + tl.arange(0, form.BLOCK)
        if MASK == "always":
            seen = form.KEEP(rows[:, None], columns[None, :], call.offset, call.seqlen_k, call.window)
            scores = tl.where(seen, scores, float("-inf"))
        elif MASK == "outside_full":
            outside = n + form.BLOCK > call.full[1]
            if form.LEFT_BOUNDED:
                outside = outside | (n < call.full[0])
            if outside:
                seen = form.KEEP(rows[:, None], columns[None, :], call.offset, call.seqlen_k, call.window)
                scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * call.qk_scale)
        p = tl.math.exp2(tl.fma(scores, call.qk_scale, -new_peak[:, None]))
        shrink = tl.math.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v_tile = rows_of(v, n, form.HEAD_DIM_V, form.BLOCK_DV, MASK != "never", form)  # [N, DV]
        acc = dot_add(p.to(v_tile.dtype), v_tile, acc, form.PRECISION)
        peak = new_peak
    return acc, total, peak


@triton.jit
def fwd_kernel(
    q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k, qk_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, batch, heads_q, group, seqlen_q, seqlen_k, HEADS_PER_WAVE, window_left, window_right,
    score_first, score_second,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KEY_RANGE: tl.constexpr, KEEP: tl.constexpr, SEES: tl.constexpr, LEFT_BOUNDED: tl.constexpr,
    RIGHT_BOUNDED: tl.constexpr, APPLY: tl.constexpr, RAGGED: tl.constexpr, NEGATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOADS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o [B, Hq, Sq, DV], lse [B, Hq, Sq] float32, natural log;
    for float32 inputs lse [2, B, Hq, Sq], whose second plane is what the rounding of the first left out.

    qk_scale is |softmax_scale| * log2(e), and not 0: -inf * 0 would be NaN. Sk >= 1. Rows that see no key: o = 0, lse = -inf.

    RAGGED: B is 1, batch the number of sequences, which lie one after the other from cu_seqlens_q[s] and cu_seqlens_k[s] on.
    Rows behind the last one: o = 0, lse = -inf. LOADS is "pointer".
    """
    rows_of_head = seqlen_q
    if RAGGED:
        number, head = tile_and_head(
            packed_tiles(seqlen_q, batch, BLOCK_M), heads_q, HEADS_PER_WAVE, RIGHT_BOUNDED and not LEFT_BOUNDED
        )
        tile, first_q, seqlen_q, first_k, seqlen_k = place(
            cu_seqlens_q, cu_seqlens_k, batch, seqlen_q, seqlen_k, number, BLOCK_M
        )
        sequence = packed_sequence(number, tile, first_q, BLOCK_M)
        batch = 1
        q += first_q.to(tl.int64) * stride_qm
        k += first_k.to(tl.int64) * stride_kn
        v += first_k.to(tl.int64) * stride_vn
        o += first_q.to(tl.int64) * stride_om
        lse += first_q
    else:
        tile, head = tile_and_head(
            tl.cdiv(seqlen_q, BLOCK_M), batch * heads_q, HEADS_PER_WAVE, RIGHT_BOUNDED and not LEFT_BOUNDED
        )
    b = head // heads_q
    h = head % heads_q
    if not RAGGED:
        sequence = b
    h_kv = h // group
    start_m = tile * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    offset = seqlen_k - seqlen_q  # bottom-right: row i sees keys up to i + offset

    q = head_base(q, b, h, stride_qb, stride_qh, LOADS)
    k = head_base(k, b, h_kv, stride_kb, stride_kh, LOADS)
    v = head_base(v, b, h_kv, stride_vb, stride_vh, LOADS)
    q_tile = load_tile(q, b, h, start_m, stride_qm, seqlen_q, BLOCK_M, HEAD_DIM, BLOCK_D, True, LOADS)  # [M, D]

    window = (window_left, window_right)
    begin, full_begin, full_end, end = KEY_RANGE(start_m, BLOCK_M, offset, seqlen_k, window, BLOCK_N)
    keys = Head(k, b, h_kv, stride_kn, seqlen_k)
    values = Head(v, b, h_kv, stride_vn, seqlen_k)
    call = Call(offset, seqlen_k, window, (full_begin, full_end), (score_first, score_second), qk_scale, sequence, h)
    form: tl.constexpr = Form(
        HEAD_DIM=HEAD_DIM, HEAD_DIM_V=HEAD_DIM_V, BLOCK=BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, KEEP=KEEP,
        LEFT_BOUNDED=LEFT_BOUNDED, APPLY=APPLY, NEGATE=NEGATE, LOADS=LOADS, PRECISION=PRECISION,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    if MASKED == "inside":
        acc, total, peak = _over_keys(
            acc, total, peak, q_tile, rows, keys, values, begin, end, call, form, "outside_full"
        )  # fmt: skip
    else:
        if LEFT_BOUNDED:
            acc, total, peak = _over_keys(
                acc, total, peak, q_tile, rows, keys, values, begin, full_begin, call, form, "always"
            )  # fmt: skip
        if MASKED == "first":
            acc, total, peak = _over_keys(
                acc, total, peak, q_tile, rows, keys, values, full_end, end, call, form, "always"
            )  # fmt: skip
        acc, total, peak = _over_keys(
            acc, total, peak, q_tile, rows, keys, values, full_begin, full_end, call, form, "never"
        )  # fmt: skip
        if MASKED == "last":
            acc, total, peak = _over_keys(
                acc, total, peak, q_tile, rows, keys, values, full_end, end, call, form, "always"
            )  # fmt: skip

    # a row whose scores are all -inf has total 0: 0 / 0 = NaN, as softmax has it; a row with no key at all is 0
    out = acc / total[:, None]
    sees_a_key = SEES(rows, offset, seqlen_k, window)
    if RAGGED:
        sees_a_key = sees_a_key & (seqlen_k > 0)
    if LEFT_BOUNDED or RIGHT_BOUNDED or RAGGED:
        out = tl.where(sees_a_key[:, None], out, 0.0)
    head_lse = lse + (b.to(tl.int64) * heads_q + h) * rows_of_head
    all_rows = (batch * heads_q).to(tl.int64) * rows_of_head
    unmasked: tl.constexpr = not LEFT_BOUNDED and not RIGHT_BOUNDED and not RAGGED
    store_lse(
        head_lse, rows, peak, total, sees_a_key | unmasked, rows < seqlen_q, all_rows, q_tile.dtype == tl.float32
    )  # fmt: skip
    store_tile(
        o + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh, out, start_m, stride_om, seqlen_q,
        BLOCK_M, HEAD_DIM_V, BLOCK_DV,
    )  # fmt: skip


VARIANT = Variant(
    serves="fwd",
    kernel=fwd_kernel,
    space=SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "lse": "fp32", "cu_seqlens_q": "i32", "cu_seqlens_k": "i32"},
    descriptors={"q": ("BLOCK_M", "BLOCK_D"), "k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV")},
    grid=lambda problem, config, _sm_count, _early: problem.query_tiles(config["BLOCK_M"]) * problem.heads_q,
    constants=lambda spec, _config: {"NEGATE": spec.negate},
)
