"""The fused backward by mma.sync with dQ summed in a fixed order, so that equal calls have equal bits: a head has DQ_BUFFERS
programs, each of which walks several tiles of keys, one after the other, and adds dQ to sums that no other program touches.

A thread adds to the same numbers in every tile, and its adds to one address keep their order. bwd_ordered_finish.py beside this
file adds the sums up, in the order of programs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.ampere import Source, in_place
from fa2tune.kernels.lib.ampere_backward import Call, Form, Heads, constants, layouts, over_heads
from fa2tune.kernels.lib.ampere_keys import put_keys
from fa2tune.kernels.lib.common import tile_and_head
from fa2tune.search_spaces.sm80 import bwd_fused
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant, Workspaces


@gluon.jit
def bwd_ordered_sm80_kernel(
    q, k, v, do, peaks, deltas, sums, dk, dv, qk_scale, softmax_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    batch, heads_q, group, seqlen_q, seqlen_k, rows_padded, HEADS_PER_WAVE, DQ_BUFFERS, window_left, window_right,
    score_first, score_second,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    QUERY_BLOCKS: gl.constexpr, HIDE: gl.constexpr, HIDE_QUERIES: gl.constexpr, LEFT_BOUNDED: gl.constexpr,
    LAST_KEY: gl.constexpr, APPLY: gl.constexpr, GRAD: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
    SCORE_WARPS: gl.constexpr, KEY_WARPS: gl.constexpr, QUERY_WARPS: gl.constexpr, P_THROUGH: gl.constexpr, EARLY: gl.constexpr,
    V_IN_REGISTERS: gl.constexpr, SCORES_APART: gl.constexpr, KEYS_APART: gl.constexpr, DK_FIRST: gl.constexpr,
    DK_OTHER: gl.constexpr, DV_FIRST: gl.constexpr, DV_OTHER: gl.constexpr, DQ_FIRST: gl.constexpr, DQ_OTHER: gl.constexpr,
):  # fmt: skip
    """As kernels/sm80/bwd_fused.py, but for sums [DQ_BUFFERS, B, Hq, rows_padded, BLOCK_D] float32, all zeros before. Where
    there are fewer tiles of keys than DQ_BUFFERS some programs have nothing to do."""
    TRANSPOSED: gl.constexpr = P_THROUGH == "registers"
    LAYOUTS: gl.constexpr = layouts(WARPS, SCORE_WARPS, KEY_WARPS, QUERY_WARPS, TRANSPOSED, SCORES_APART, KEYS_APART)
    COLUMN: gl.constexpr = gl.SliceLayout(1 if TRANSPOSED else 0, LAYOUTS[0])
    form: gl.constexpr = Form(
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, HEAD_DIM=HEAD_DIM, HEAD_DIM_V=HEAD_DIM_V,
        WARPS=WARPS, SCORES=LAYOUTS[0], KEYS=LAYOUTS[1], QUERIES=LAYOUTS[2], TRANSPOSED=TRANSPOSED, ONE=P_THROUGH == "one",
        EARLY=EARLY, V_IN_REGISTERS=V_IN_REGISTERS, SCORES_APART=SCORES_APART,
        KEYS_APART=KEYS_APART, PAIR=LAYOUTS[3], IN_TURNS=True, IN_ORDER=False, HIDE=HIDE,
        HIDE_QUERIES=HIDE_QUERIES, LEFT_BOUNDED=LEFT_BOUNDED, LAST_KEY=LAST_KEY, APPLY=APPLY, GRAD=GRAD,
        DK_FIRST=DK_FIRST, DK_OTHER=DK_OTHER, DV_FIRST=DV_FIRST, DV_OTHER=DV_OTHER, DQ_FIRST=DQ_FIRST, DQ_OTHER=DQ_OTHER,
    )  # fmt: skip
    heads_kv = heads_q // group
    place, head = tile_and_head(DQ_BUFFERS, batch * heads_kv, HEADS_PER_WAVE, False)
    offset = seqlen_k - seqlen_q

    # turns go there and back over the programs, as later tiles have less to do under a causal mask
    tiles = gl.cdiv(seqlen_k, BLOCK_N)
    whole = tiles // DQ_BUFFERS
    last = gl.where(whole % 2 == 0, place, DQ_BUFFERS - 1 - place)
    turns = whole + (last < tiles - whole * DQ_BUFFERS).to(gl.int32)
    for turn in range(turns):
        # worked out anew in every turn: known to be the same, all addresses would be in registers during the products
        its_place = in_place(place)
        its_head = in_place(head)
        b = its_head // heads_kv
        h_kv = its_head % heads_kv
        first_row = (b.to(gl.int64) * heads_q + h_kv * group) * rows_padded
        its_q = q + b.to(gl.int64) * stride_qb + (h_kv * group).to(gl.int64) * stride_qh
        its_do = do + b.to(gl.int64) * stride_dob + (h_kv * group).to(gl.int64) * stride_doh
        its_k = k + b.to(gl.int64) * stride_kb + h_kv.to(gl.int64) * stride_kh
        its_v = v + b.to(gl.int64) * stride_vb + h_kv.to(gl.int64) * stride_vh
        its_peaks = peaks + first_row
        its_deltas = deltas + first_row
        its_sums = sums + (its_place.to(gl.int64) * batch * heads_q * rows_padded + first_row) * BLOCK_D
        tile = turn * DQ_BUFFERS + gl.where(turn % 2 == 0, its_place, DQ_BUFFERS - 1 - its_place)
        start_n = tile * BLOCK_N
        columns = start_n + gl.arange(0, BLOCK_N, layout=COLUMN)
        heads = Heads(
            its_q, its_do, its_peaks, its_deltas, its_sums, its_sums, stride_qh, stride_qm, stride_doh, stride_dom,
            rows_padded, group, h_kv * group,
        )  # fmt: skip
        call = Call(
            start_n,
            columns,
            offset,
            seqlen_q,
            seqlen_k,
            (window_left, window_right),
            (score_first, score_second),
            qk_scale,
            b,
        )
        dk_acc, dk_more, dv_acc, dv_more = over_heads(
            heads, Source(its_k, stride_kn, seqlen_k), Source(its_v, stride_vn, seqlen_k), QUERY_BLOCKS, call, form
        )  # fmt: skip
        its_head = in_place(head)
        b = its_head // heads_kv
        h_kv = its_head % heads_kv
        its_dk = dk + b.to(gl.int64) * stride_dkb + h_kv.to(gl.int64) * stride_dkh
        its_dv = dv + b.to(gl.int64) * stride_dvb + h_kv.to(gl.int64) * stride_dvh
        dk_step = in_place(stride_dkn)
        dv_step = in_place(stride_dvn)
        put_keys(
            its_dk, its_dv, dk_acc, dk_more, dv_acc, dv_more, dk_step, dv_step, start_n, seqlen_k, softmax_scale, form
        )  # fmt: skip


def _workspaces(problem: Problem, config: Config) -> Workspaces:
    rows = (problem.batch, problem.heads_q, bwd_fused.padded_rows(problem))
    columns = bwd_fused.block_dims(problem.specialization)[0]
    sums = (config["DQ_BUFFERS"], *rows, columns)
    return {"peaks": (rows, "fp32"), "deltas": (rows, "fp32"), "sums": (sums, "fp32")}


VARIANT = Variant(
    ordered_form_of="sm80/bwd_fused",
    kernel=bwd_ordered_sm80_kernel,
    space=bwd_fused.IN_ORDER,
    tensors={
        "q": "",
        "k": "",
        "v": "",
        "do": "",
        "peaks": "fp32",
        "deltas": "fp32",
        "sums": "fp32",
        "dk": "",
        "dv": "",
    },
    descriptors={},
    grid=lambda problem, config, _sm_count, _early: config["DQ_BUFFERS"] * problem.batch * problem.heads_kv,
    constants=constants,
    before=("sm80/bwd_prepare", "sm80/bwd_ordered_zero"),
    after=("sm80/bwd_ordered_finish",),
    surrounded=lambda config, name: name != "sm80/bwd_ordered_zero" or config["DQ_BUFFERS"] > 1,
    workspaces=_workspaces,
    scalars=lambda problem, config, _early: {
        "rows_padded": bwd_fused.padded_rows(problem),
        "DQ_BUFFERS": config["DQ_BUFFERS"],
    },
)
