"""FlashAttention-2 backward over query tiles: dQ without atomics, the deterministic half of the split backward. It also
makes delta = rowsum(dO * O) - dlse (paper: algorithm 2, line 4), which the other half reads: no kernel of its own before."""

from typing import NamedTuple

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import (
    Call,
    Form,
    Head,
    delta_of_rows,
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
from fa2tune.search_spaces.portable.bwd_dq import SPACE
from fa2tune.spec.variant import Variant


class Queries(NamedTuple):
    """A tile of queries."""

    rows: tl.tensor  #: their numbers [M]
    q: tl.tensor  #: [M, D]
    do: tl.tensor  #: [M, DV]
    lse: tl.tensor  #: [M], as load_lse has it
    lse_low: tl.tensor  #: [M]
    delta: tl.tensor  #: [M]


@triton.jit
def _over_keys(acc, tile, k, v, begin, end, call, form, MASK: tl.constexpr):
    """Keys [begin, end) into acc [M, D]. MASK as in the forward: "never", "always" or "outside_full"."""
    for n in tl.range(begin, end, form.BLOCK):
        k_tile = rows_of(k, n, form.HEAD_DIM, form.BLOCK_D, MASK != "never", form)  # [N, D]
        v_tile = rows_of(v, n, form.HEAD_DIM_V, form.BLOCK_DV, MASK != "never", form)  # [N, DV]
        keys = n + tl.arange(0, form.BLOCK)  # vanishes without a term; ``columns`` stay in their place
        scores = form.APPLY(
            dot(tile.q, tl.trans(k_tile), form.PRECISION), call.score, tile.rows[:, None], keys[None, :], call.offset,
            call.batch, call.head,
        )  # [M, N]  # fmt: skip
        p = tl.math.exp2(tl.fma(scores, call.qk_scale, -tile.lse[:, None]) - tile.lse_low[:, None])
        columns = n + tl.arange(0, form.BLOCK)
        if MASK == "always":
            seen = form.KEEP(tile.rows[:, None], columns[None, :], call.offset, call.seqlen_k, call.window)
            p = tl.where(seen, p, 0.0)
        elif MASK == "outside_full":
            outside = n + form.BLOCK > call.full[1]
            if form.LEFT_BOUNDED:
                outside = outside | (n < call.full[0])
            if outside:
                seen = form.KEEP(tile.rows[:, None], columns[None, :], call.offset, call.seqlen_k, call.window)
                p = tl.where(seen, p, 0.0)
        ds = p * (dot(tile.do, tl.trans(v_tile), form.PRECISION) - tile.delta[:, None])
        ds = form.GRAD(
            ds, scores, call.score, tile.rows[:, None], columns[None, :], call.offset, call.batch, call.head
        )  # fmt: skip
        acc = dot_add(ds.to(k_tile.dtype), k_tile, acc, form.PRECISION)
    return acc


@triton.jit
def bwd_dq_kernel(
    q, k, v, o, do, dlse, lse, delta, dq, cu_seqlens_q, cu_seqlens_k, qk_scale, softmax_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, stride_dlseb, stride_dlseh, stride_dlsem,
    stride_dqb, stride_dqh, stride_dqm, batch, heads_q, group, seqlen_q, seqlen_k, has_dlse, HEADS_PER_WAVE,
    window_left, window_right, score_first, score_second,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KEY_RANGE: tl.constexpr, KEEP: tl.constexpr, LEFT_BOUNDED: tl.constexpr, RIGHT_BOUNDED: tl.constexpr,
    APPLY: tl.constexpr, GRAD: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOADS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """q, k, v, o, do as the forward's; lse as the forward leaves it -> dq [B, Hq, Sq, D], delta [B, Hq, Sq] float32. Sk >= 1.

    dlse [B, Hq, Sq] float32 is read only if has_dlse. RAGGED: as the forward has it; rows behind the last sequence: dq = 0.
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
        o += first_q.to(tl.int64) * stride_om
        do += first_q.to(tl.int64) * stride_dom
        dq += first_q.to(tl.int64) * stride_dqm
        dlse += first_q.to(tl.int64) * stride_dlsem
        k += first_k.to(tl.int64) * stride_kn
        v += first_k.to(tl.int64) * stride_vn
        lse += first_q
        delta += first_q
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
    offset = seqlen_k - seqlen_q

    q = head_base(q, b, h, stride_qb, stride_qh, LOADS)
    do = head_base(do, b, h, stride_dob, stride_doh, LOADS)
    k = head_base(k, b, h_kv, stride_kb, stride_kh, LOADS)
    v = head_base(v, b, h_kv, stride_vb, stride_vh, LOADS)
    q_tile = load_tile(q, b, h, start_m, stride_qm, seqlen_q, BLOCK_M, HEAD_DIM, BLOCK_D, True, LOADS)  # [M, D]
    do_tile = load_tile(do, b, h, start_m, stride_dom, seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True, LOADS)  # [M, DV]
    first_row = (b.to(tl.int64) * heads_q + h) * rows_of_head
    inside = rows < seqlen_q
    all_rows = (batch * heads_q).to(tl.int64) * rows_of_head
    lse_row, lse_low = load_lse(lse + first_row, rows, inside, all_rows, q_tile.dtype == tl.float32)  # [M]
    o = head_base(o, b, h, stride_ob, stride_oh, "pointer")
    o_tile = load_tile(o, b, h, start_m, stride_om, seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True, "pointer")  # [M, DV]
    dlse = head_base(dlse, b, h, stride_dlseb, stride_dlseh, "pointer")
    delta_row = delta_of_rows(
        o_tile, do_tile, dlse, rows, stride_dlsem, inside & (tl.zeros_like(rows) + has_dlse != 0)
    )  # [M]
    tl.store(delta + first_row + rows, delta_row, mask=inside)

    window = (window_left, window_right)
    begin, full_begin, full_end, end = KEY_RANGE(start_m, BLOCK_M, offset, seqlen_k, window, BLOCK_N)
    queries = Queries(rows, q_tile, do_tile, lse_row, lse_low, delta_row)
    keys = Head(k, b, h_kv, stride_kn, seqlen_k)
    values = Head(v, b, h_kv, stride_vn, seqlen_k)
    call = Call(offset, seqlen_k, window, (full_begin, full_end), (score_first, score_second), qk_scale, sequence, h)
    form: tl.constexpr = Form(
        HEAD_DIM=HEAD_DIM, HEAD_DIM_V=HEAD_DIM_V, BLOCK=BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, KEEP=KEEP,
        LEFT_BOUNDED=LEFT_BOUNDED, APPLY=APPLY, GRAD=GRAD, LOADS=LOADS, PRECISION=PRECISION,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if MASKED == "inside":
        acc = _over_keys(acc, queries, keys, values, begin, end, call, form, "outside_full")
    else:
        if LEFT_BOUNDED:
            acc = _over_keys(acc, queries, keys, values, begin, full_begin, call, form, "always")
        if MASKED == "first":
            acc = _over_keys(acc, queries, keys, values, full_end, end, call, form, "always")
        acc = _over_keys(acc, queries, keys, values, full_begin, full_end, call, form, "never")
        if MASKED == "last":
            acc = _over_keys(acc, queries, keys, values, full_end, end, call, form, "always")
    store_tile(
        dq + b.to(tl.int64) * stride_dqb + h.to(tl.int64) * stride_dqh, acc * softmax_scale, start_m, stride_dqm,
        seqlen_q, BLOCK_M, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


VARIANT = Variant(
    serves="bwd_dq",
    kernel=bwd_dq_kernel,
    space=SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "do": "", "dlse": "fp32", "lse": "fp32", "delta": "fp32", "dq": "",
             "cu_seqlens_q": "i32", "cu_seqlens_k": "i32"},
    descriptors={"q": ("BLOCK_M", "BLOCK_D"), "do": ("BLOCK_M", "BLOCK_DV"),
                 "k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV")},
    grid=lambda problem, config, _sm_count, _early: problem.query_tiles(config["BLOCK_M"]) * problem.heads_q,
)  # fmt: skip
