"""A whole backward of few keys: one tile has all keys of a key head, so a program sees every key of its query rows. It makes
delta, dQ in the call's dtype, dK and dV: no kernel before, no sums in memory, and the same bits on every run.

Query blocks of a key head, over all of its query heads, may be split into parts, each a program's, whose dK and dV
kernels/portable/bwd_gather.py adds up. HALVES 2: each of two programs has half of the columns of dQ, dK and dV, where
registers do not hold all of them; both compute S and dP."""

from typing import NamedTuple

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import LOG2E, dot, dot_add, head_base
from fa2tune.search_spaces.portable.bwd_one_tile import SPACE, programs, widths
from fa2tune.spec.variant import Variant


class Columns(NamedTuple):
    """Of one half of a head dim; kept as values of the running program."""

    own: tl.tensor  #: first of those that a program writes
    other: tl.tensor  #: first of those that it only reads, if HALVES is 2


@triton.jit
def _columns(
    src, b, h, row, stride_row, rows_end, first,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HALVES: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + ROWS), columns [first, first + WIDTH) of a head: as ``load_tile`` of lib/common.py has all columns."""
    if LOADS == "descriptor":
        return src.load([b, h, row, first]).reshape([ROWS, WIDTH])
    else:
        r = tl.arange(0, ROWS)
        d = first + tl.arange(0, WIDTH)
        start = src + tl.cast(row, tl.int64) * stride_row
        mask = (row + r < rows_end)[:, None]
        if DIM != WIDTH * HALVES:
            mask = mask & (d < DIM)[None, :]
        return tl.load(start + (r[:, None] * stride_row + d[None, :]), mask=mask, other=0.0)


@triton.jit
def _store_columns(
    base, tile, row, stride_row, rows_end, first,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, ROWS)
    d = first + tl.arange(0, WIDTH)
    mask = (row + r < rows_end)[:, None]
    if DIM != WIDTH * HALVES:
        mask = mask & (d < DIM)[None, :]
    pointers = base + tl.cast(row, tl.int64) * stride_row + (r[:, None] * stride_row + d[None, :])
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def bwd_one_tile_kernel(
    q, k, v, o, do, dlse, lse, dq, dk, dv, qk_scale, softmax_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, stride_dlseb, stride_dlseh, stride_dlsem,
    stride_dqb, stride_dqh, stride_dqm, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    heads_q, group, seqlen_q, seqlen_k, has_dlse, PARTS, window_left, window_right,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALVES: tl.constexpr, STAGES: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """q, k, v, o, do as the forward's, lse as it leaves it, dlse [B, Hq, Sq] float32 (read only if has_dlse) ->
    dq [B, Hq, Sq, D]; dk, dv [B, Hkv * PARTS, Sk, D / DV], head h * PARTS + p of part p of key head h. 1 <= Sk <= BLOCK_N."""
    heads_kv = heads_q // group
    index = tl.program_id(0)
    # programs that read the same keys and queries run at the same time
    half = 0
    if HALVES == 2:
        half = index % 2
        index = index // 2
    part = index % PARTS
    head = index // PARTS
    b = head // heads_kv
    h_kv = head - b * heads_kv
    of_d = Columns(half * WIDTH, (1 - half) * WIDTH)
    of_dv = Columns(half * WIDTH_V, (1 - half) * WIDTH_V)
    columns = tl.arange(0, BLOCK_N)
    offset = seqlen_k - seqlen_q
    window = (window_left, window_right)

    k = head_base(k, b, h_kv, stride_kb, stride_kh, "pointer")
    v = head_base(v, b, h_kv, stride_vb, stride_vh, "pointer")
    k_tile = _columns(
        k, b, h_kv, 0, stride_kn, seqlen_k, of_d.own, BLOCK_N, HEAD_DIM, WIDTH, HALVES, "pointer"
    )  # [N, W]
    v_tile = _columns(
        v, b, h_kv, 0, stride_vn, seqlen_k, of_dv.own, BLOCK_N, HEAD_DIM_V, WIDTH_V, HALVES, "pointer"
    )  # [N, WV]
    if HALVES == 2:
        k_rest = _columns(k, b, h_kv, 0, stride_kn, seqlen_k, of_d.other, BLOCK_N, HEAD_DIM, WIDTH, HALVES, "pointer")
        v_rest = _columns(
            v, b, h_kv, 0, stride_vn, seqlen_k, of_dv.other, BLOCK_N, HEAD_DIM_V, WIDTH_V, HALVES, "pointer"
        )

    blocks = tl.cdiv(seqlen_q, BLOCK_M)  # of a query head
    begin = blocks * group * part // PARTS
    end = blocks * group * (part + 1) // PARTS
    dk_acc = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)
    for n in tl.range(begin, end, num_stages=STAGES):
        member = n // blocks
        m = (n - member * blocks) * BLOCK_M
        h = h_kv * group + member
        rows = m + tl.arange(0, BLOCK_M)
        inside = rows < seqlen_q
        its_q = head_base(q, b, h, stride_qb, stride_qh, LOADS)
        its_do = head_base(do, b, h, stride_dob, stride_doh, LOADS)
        its_o = head_base(o, b, h, stride_ob, stride_oh, LOADS)
        first_row = (b.to(tl.int64) * heads_q + h) * seqlen_q
        q_tile = _columns(
            its_q, b, h, m, stride_qm, seqlen_q, of_d.own, BLOCK_M, HEAD_DIM, WIDTH, HALVES, LOADS
        )  # [M, W]
        do_tile = _columns(
            its_do, b, h, m, stride_dom, seqlen_q, of_dv.own, BLOCK_M, HEAD_DIM_V, WIDTH_V, HALVES, LOADS
        )  # [M, WV]
        o_tile = _columns(
            its_o, b, h, m, stride_om, seqlen_q, of_dv.own, BLOCK_M, HEAD_DIM_V, WIDTH_V, HALVES, LOADS
        )  # [M, WV]
        # past the end +inf, so that p = exp2(s - inf) = 0
        lse_row = tl.load(lse + first_row + rows, mask=inside, other=float("inf")) * LOG2E  # [M]
        its_dlse = dlse + b.to(tl.int64) * stride_dlseb + h.to(tl.int64) * stride_dlseh
        has_it = inside & (tl.zeros_like(rows) + has_dlse != 0)
        dlse_row = tl.load(its_dlse + rows.to(tl.int64) * stride_dlsem, mask=has_it, other=0.0)  # [M]
        delta_row = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1) - dlse_row
        scores = dot(k_tile, tl.trans(q_tile), "ieee")  # [N, M]
        dp = dot(v_tile, tl.trans(do_tile), "ieee")  # [N, M]
        if HALVES == 2:
            q_rest = _columns(its_q, b, h, m, stride_qm, seqlen_q, of_d.other, BLOCK_M, HEAD_DIM, WIDTH, HALVES, LOADS)
            do_rest = _columns(
                its_do, b, h, m, stride_dom, seqlen_q, of_dv.other, BLOCK_M, HEAD_DIM_V, WIDTH_V, HALVES, LOADS
            )
            o_rest = _columns(
                its_o, b, h, m, stride_om, seqlen_q, of_dv.other, BLOCK_M, HEAD_DIM_V, WIDTH_V, HALVES, LOADS
            )
            delta_row += tl.sum(o_rest.to(tl.float32) * do_rest.to(tl.float32), 1)
            scores = dot_add(k_rest, tl.trans(q_rest), scores, "ieee")
            dp = dot_add(v_rest, tl.trans(do_rest), dp, "ieee")
        p = tl.math.exp2(tl.fma(scores, qk_scale, -lse_row[None, :]))
        seen = KEEP(rows[None, :], columns[:, None], offset, seqlen_k, window)
        p = tl.where(seen, p, 0.0)
        dv_acc = dot_add(p.to(do_tile.dtype), do_tile, dv_acc, "ieee")
        ds = (p * (dp - delta_row[None, :])).to(q_tile.dtype)  # [N, M]
        dk_acc = dot_add(ds, q_tile, dk_acc, "ieee")
        dq_tile = dot(tl.trans(ds), k_tile, "ieee") * softmax_scale  # [M, W]
        its_dq = head_base(dq, b, h, stride_dqb, stride_dqh, "pointer")
        _store_columns(its_dq, dq_tile, m, stride_dqm, seqlen_q, of_d.own, BLOCK_M, HEAD_DIM, WIDTH, HALVES)

    its_dk = head_base(dk, b, h_kv * PARTS + part, stride_dkb, stride_dkh, "pointer")
    its_dv = head_base(dv, b, h_kv * PARTS + part, stride_dvb, stride_dvh, "pointer")
    _store_columns(its_dk, dk_acc * softmax_scale, 0, stride_dkn, seqlen_k, of_d.own, BLOCK_N, HEAD_DIM, WIDTH, HALVES)
    _store_columns(its_dv, dv_acc, 0, stride_dvn, seqlen_k, of_dv.own, BLOCK_N, HEAD_DIM_V, WIDTH_V, HALVES)


VARIANT = Variant(
    kernel=bwd_one_tile_kernel,
    space=SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "do": "", "dlse": "fp32", "lse": "fp32", "dq": "", "dk": "", "dv": ""},
    descriptors={"q": ("BLOCK_M", "WIDTH"), "o": ("BLOCK_M", "WIDTH_V"), "do": ("BLOCK_M", "WIDTH_V")},
    grid=lambda problem, config, _sm_count, _early: programs(problem, config),
    constants=widths,
)  # fmt: skip
