"""FlashAttention-2 backward over key tiles (paper: algorithm 2): dK and dV and, in the fused variant, dQ by atomic adds.

Scores are computed transposed, [keys, queries], so that P^T and dS^T are the register operands of the dV and dK products.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import (
    Call,
    Form,
    Head,
    dot,
    dot_add,
    head_base,
    load_lse,
    load_tile,
    rows_of,
    store_tile,
    tile_and_head,
)
from fa2tune.kernels.lib.extent import packed_sequence, packed_tiles, place
from fa2tune.spec.variant import Variant


class Keys(NamedTuple):
    """A tile of keys."""

    columns: tl.tensor  #: their numbers [N]
    k: tl.tensor  #: [N, D]
    v: tl.tensor  #: [N, DV]


class Queries(NamedTuple):
    """A query head's: q and do, and where its rows of the others start."""

    q: tuple
    do: tuple
    lse: tl.tensor
    delta: tl.tensor
    dq: tl.tensor
    all_rows: tl.tensor  #: from lse to the plane of what its rounding left out


@triton.jit
def _over_queries(dk_acc, dv_acc, tile, head, begin, end, call, form, MASK: tl.constexpr):
    """Queries [begin, end) of one head into dk_acc [N, D] and dv_acc [N, DV]; WITH_DQ: dS K into dq as well. MASK: "never",
    "always", or "outside_full": of queries that do not lie in [full[0], full[1]), decided at run time."""
    for m in tl.range(begin, end, form.BLOCK):
        rows = m + tl.arange(0, form.BLOCK)
        inside = rows < head.q.end
        q_tile = rows_of(head.q, m, form.HEAD_DIM, form.BLOCK_D, True, form)  # [M, D]
        lse_row, lse_low = load_lse(head.lse, rows, inside, head.all_rows, q_tile.dtype == tl.float32)  # [M]
        scores = form.APPLY(
            dot(tile.k, tl.trans(q_tile), form.PRECISION), call.score, rows[None, :], tile.columns[:, None], call.offset,
            call.batch, call.head,
        )  # [N, M]  # fmt: skip
        p = tl.math.exp2(tl.fma(scores, call.qk_scale, -lse_row[None, :]) - lse_low[None, :])
        if MASK == "always":
            seen = form.KEEP(rows[None, :], tile.columns[:, None], call.offset, call.seqlen_k, call.window)
            p = tl.where(seen, p, 0.0)
        elif MASK == "outside_full":
            outside = m < call.full[0]
            if form.LEFT_BOUNDED:
                outside = outside | (m + form.BLOCK > call.full[1])
            if outside:
                seen = form.KEEP(rows[None, :], tile.columns[:, None], call.offset, call.seqlen_k, call.window)
                p = tl.where(seen, p, 0.0)
        do_tile = rows_of(head.do, m, form.HEAD_DIM_V, form.BLOCK_DV, True, form)  # [M, DV]
        dv_acc = dot_add(p.to(do_tile.dtype), do_tile, dv_acc, form.PRECISION)
        delta_row = tl.load(head.delta + rows, mask=inside, other=0.0)
        ds = p * (dot(tile.v, tl.trans(do_tile), form.PRECISION) - delta_row[None, :])
        ds = form.GRAD(
            ds, scores, call.score, rows[None, :], tile.columns[:, None], call.offset, call.batch, call.head
        ).to(q_tile.dtype)  # [N, M]  # fmt: skip
        dk_acc = dot_add(ds, q_tile, dk_acc, form.PRECISION)
        if form.WITH_DQ:
            dq_tile = dot(tl.trans(ds), tile.k, form.PRECISION)  # [M, D]
            d = tl.arange(0, form.BLOCK_D)
            block = head.dq + tl.cast(m, tl.int64) * form.HEAD_DIM
            pointers = block + (tl.arange(0, form.BLOCK)[:, None] * form.HEAD_DIM + d[None, :])
            tl.atomic_add(pointers, dq_tile, mask=inside[:, None] & (d < form.HEAD_DIM)[None, :], sem="relaxed")
    return dk_acc, dv_acc


@triton.jit
def bwd_keys_kernel(
    q, k, v, do, lse, delta, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, qk_scale, softmax_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    batch, heads_q, group, seqlen_q, seqlen_k, HEADS_PER_WAVE, window_left, window_right,
    score_first, score_second,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUERY_RANGE: tl.constexpr, KEEP: tl.constexpr, LEFT_BOUNDED: tl.constexpr, APPLY: tl.constexpr, GRAD: tl.constexpr,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr, WITH_DQ: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LOADS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """q, k, v, do as the forward's, lse as it leaves it, delta [B, Hq, Sq] float32 -> dk [B, Hkv, Sk, D], dv [B, Hkv, Sk, DV].

    qk_scale = softmax_scale * log2(e). WITH_DQ: adds dS K to dq, float32 [B, Hq, Sq, D] contiguous, zero at the start and
    still to be multiplied by softmax_scale; the order of these sums is not fixed. RAGGED: as the forward has it; rows behind
    the last sequence: dk = dv = 0.
    """
    heads_kv = heads_q // group
    rows_of_head = seqlen_q
    # causal: the first key tiles are seen by most queries, so tiles run upwards, longest first
    if RAGGED:
        number, head = tile_and_head(packed_tiles(seqlen_k, batch, BLOCK_N), heads_kv, HEADS_PER_WAVE, False)
        tile, first_k, seqlen_k, first_q, seqlen_q = place(
            cu_seqlens_k, cu_seqlens_q, batch, seqlen_k, seqlen_q, number, BLOCK_N
        )
        sequence = packed_sequence(number, tile, first_k, BLOCK_N)
        batch = 1
        k += first_k.to(tl.int64) * stride_kn
        v += first_k.to(tl.int64) * stride_vn
        dk += first_k.to(tl.int64) * stride_dkn
        dv += first_k.to(tl.int64) * stride_dvn
        q += first_q.to(tl.int64) * stride_qm
        do += first_q.to(tl.int64) * stride_dom
        lse += first_q
        delta += first_q
        if WITH_DQ:
            dq += first_q.to(tl.int64) * HEAD_DIM
    else:
        tile, head = tile_and_head(tl.cdiv(seqlen_k, BLOCK_N), batch * heads_kv, HEADS_PER_WAVE, False)
    b = head // heads_kv
    h_kv = head % heads_kv
    if not RAGGED:
        sequence = b
    start_n = tile * BLOCK_N
    columns = start_n + tl.arange(0, BLOCK_N)
    offset = seqlen_k - seqlen_q

    k = head_base(k, b, h_kv, stride_kb, stride_kh, LOADS)
    v = head_base(v, b, h_kv, stride_vb, stride_vh, LOADS)
    k_tile = load_tile(k, b, h_kv, start_n, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, BLOCK_D, True, LOADS)  # [N, D]
    v_tile = load_tile(v, b, h_kv, start_n, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True, LOADS)  # [N, DV]

    window = (window_left, window_right)
    begin, full_begin, full_end, end = QUERY_RANGE(
        start_n, BLOCK_N, offset, seqlen_q, window, BLOCK_M
    )  # fmt: skip
    last = tl.cdiv(end, BLOCK_M) * BLOCK_M
    full_begin = tl.where(
        start_n + BLOCK_N > seqlen_k, last, full_begin
    )  # the last, ragged tile: everything under the mask
    if LEFT_BOUNDED:
        full_end = tl.maximum(full_end, full_begin)

    tile_of_keys = Keys(columns, k_tile, v_tile)
    form: tl.constexpr = Form(
        HEAD_DIM=HEAD_DIM, HEAD_DIM_V=HEAD_DIM_V, BLOCK=BLOCK_M, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, KEEP=KEEP,
        LEFT_BOUNDED=LEFT_BOUNDED, APPLY=APPLY, GRAD=GRAD, LOADS=LOADS, PRECISION=PRECISION, WITH_DQ=WITH_DQ,
    )  # fmt: skip
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    all_rows = (batch * heads_q).to(tl.int64) * rows_of_head
    for g in range(group):  # every query head that reads this key head
        h = h_kv * group + g
        head_q = Head(head_base(q, b, h, stride_qb, stride_qh, LOADS), b, h, stride_qm, seqlen_q)
        head_do = Head(head_base(do, b, h, stride_dob, stride_doh, LOADS), b, h, stride_dom, seqlen_q)
        first_row = (b.to(tl.int64) * heads_q + h) * rows_of_head
        head_dq = dq
        if WITH_DQ:
            head_dq = dq + first_row * HEAD_DIM
        its = Queries(head_q, head_do, lse + first_row, delta + first_row, head_dq, all_rows)
        call = Call(
            offset, seqlen_k, window, (full_begin, full_end), (score_first, score_second), qk_scale, sequence, h
        )  # fmt: skip
        if MASKED == "inside":
            dk_acc, dv_acc = _over_queries(dk_acc, dv_acc, tile_of_keys, its, begin, end, call, form, "outside_full")
        else:
            if MASKED == "first":
                dk_acc, dv_acc = _over_queries(
                    dk_acc, dv_acc, tile_of_keys, its, begin, full_begin, call, form, "always"
                )
            dk_acc, dv_acc = _over_queries(dk_acc, dv_acc, tile_of_keys, its, full_begin, full_end, call, form, "never")
            if LEFT_BOUNDED:
                dk_acc, dv_acc = _over_queries(dk_acc, dv_acc, tile_of_keys, its, full_end, end, call, form, "always")
            if MASKED == "last":
                dk_acc, dv_acc = _over_queries(
                    dk_acc, dv_acc, tile_of_keys, its, begin, full_begin, call, form, "always"
                )

    store_tile(
        dk + b.to(tl.int64) * stride_dkb + h_kv.to(tl.int64) * stride_dkh, dk_acc * softmax_scale, start_n, stride_dkn,
        seqlen_k, BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    store_tile(
        dv + b.to(tl.int64) * stride_dvb + h_kv.to(tl.int64) * stride_dvh, dv_acc, start_n, stride_dvn,
        seqlen_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV,
    )  # fmt: skip


def _grid(problem, config, _sm_count, _early):
    return problem.key_tiles(config["BLOCK_N"]) * problem.heads_kv


def described(space, with_dq, serves):
    """The Variant of this kernel for a search space, with dQ's sums in it or without."""
    return Variant(
        serves=serves,
        kernel=bwd_keys_kernel,
        space=space,
        tensors={"q": "", "k": "", "v": "", "do": "", "lse": "fp32", "delta": "fp32", "dq": "fp32", "dk": "", "dv": "",
                 "cu_seqlens_q": "i32", "cu_seqlens_k": "i32"},
        descriptors={"q": ("BLOCK_M", "BLOCK_D"), "do": ("BLOCK_M", "BLOCK_DV"),
                     "k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV")},
        grid=_grid,
        constants=lambda spec, _config: {"WITH_DQ": with_dq},
    )  # fmt: skip
