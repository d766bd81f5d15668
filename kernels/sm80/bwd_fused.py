"""FlashAttention backward by mma.sync and cp.async, for GPUs without wgmma, all five products in one kernel: a program owns a
tile of keys, whose dK and dV stay in registers; dQ is summed over the programs by atomic adds into float32 sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.ampere import Source
from fa2tune.kernels.lib.ampere_backward import Call, Form, Heads, constants, layouts, over_heads
from fa2tune.kernels.lib.ampere_keys import put_keys
from fa2tune.kernels.lib.common import tile_and_head
from fa2tune.kernels.lib.extent import packed_sequence, packed_tiles
from fa2tune.kernels.lib.gluon_extent import place
from fa2tune.search_spaces.sm80 import bwd_fused as space
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant, Workspaces

#: Query rows of a block of the workspaces, of packed sequences.
UNIT = gl.constexpr(space.ROW_UNIT)
TURN_ROWS = gl.constexpr(space.TURN_ROWS)


@gluon.jit
def bwd_fused_sm80_kernel(
    q, k, v, do, peaks, deltas, sums, dk, dv, cu_seqlens_q, cu_seqlens_k, qk_scale, softmax_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    batch, heads_q, group, seqlen_q, seqlen_k, rows_padded, HEADS_PER_WAVE, window_left, window_right,
    score_first, score_second,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    QUERY_BLOCKS: gl.constexpr, HIDE: gl.constexpr, HIDE_QUERIES: gl.constexpr, LEFT_BOUNDED: gl.constexpr,
    LAST_KEY: gl.constexpr, APPLY: gl.constexpr, GRAD: gl.constexpr, RAGGED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
    SCORE_WARPS: gl.constexpr, KEY_WARPS: gl.constexpr, QUERY_WARPS: gl.constexpr, P_THROUGH: gl.constexpr, EARLY: gl.constexpr,
    V_IN_REGISTERS: gl.constexpr, SCORES_APART: gl.constexpr, KEYS_APART: gl.constexpr, DK_FIRST: gl.constexpr,
    DK_OTHER: gl.constexpr, DV_FIRST: gl.constexpr, DV_OTHER: gl.constexpr, DQ_FIRST: gl.constexpr, DQ_OTHER: gl.constexpr,
    IN_ORDER: gl.constexpr,
):  # fmt: skip
    """q, do [B, Hq, Sq, D or DV], k, v [B, Hkv, Sk, D or DV]; peaks, deltas [B, Hq, rows_padded] float32 and sums [B, Hq,
    rows_padded, BLOCK_D] float32, as kernels/sm80/bwd_prepare.py leaves them -> dk [B, Hkv, Sk, D], dv [B, Hkv, Sk, DV], and
    dS K added to the sums, in the order of ``_places``, still to be multiplied by softmax_scale. The order of these sums is not
    fixed without IN_ORDER: then behind the deltas is a turn, 0 at first, for each TURN_ROWS rows: the number of key tiles that
    have added. A tile waits for the one before it, which has a smaller program number, so runs or has ended.

    bf16 or fp16; bases and strides are multiples of 16 bytes.
    P_THROUGH "shared": scores [queries, keys]; P and dS go to the products of dK and dV through shared memory. "one": through
    the same buffer, one after the other, so that a block may have more queries. "registers": scores [keys, queries]; P and dS
    are operands where they are, and dS goes through shared memory for dQ alone. EARLY: dP comes before the exponentials.
    V_IN_REGISTERS: V is there as an operand of dP, and takes no shared memory. SCORES_APART: half of the warps have scores,
    the others dP. KEYS_APART: half have dK, the others dV.
    Q and dO of the next block are asked for when dK is done, so that they come during dQ and its sums.
    RAGGED: B is 1, batch the number of sequences, which lie one after the other from cu_seqlens_q[s] and cu_seqlens_k[s] on;
    in the workspaces from block cu_seqlens_q[s] // UNIT + s on. Rows behind the last one: dk = dv = 0.
    """
    TRANSPOSED: gl.constexpr = P_THROUGH == "registers"
    LAYOUTS: gl.constexpr = layouts(WARPS, SCORE_WARPS, KEY_WARPS, QUERY_WARPS, TRANSPOSED, SCORES_APART, KEYS_APART)
    COLUMN: gl.constexpr = gl.SliceLayout(1 if TRANSPOSED else 0, LAYOUTS[0])
    form: gl.constexpr = Form(
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, HEAD_DIM=HEAD_DIM, HEAD_DIM_V=HEAD_DIM_V,
        WARPS=WARPS, SCORES=LAYOUTS[0], KEYS=LAYOUTS[1], QUERIES=LAYOUTS[2], TRANSPOSED=TRANSPOSED, ONE=P_THROUGH == "one",
        EARLY=EARLY, V_IN_REGISTERS=V_IN_REGISTERS, SCORES_APART=SCORES_APART,
        KEYS_APART=KEYS_APART, PAIR=LAYOUTS[3], IN_TURNS=False, IN_ORDER=IN_ORDER, HIDE=HIDE,
        HIDE_QUERIES=HIDE_QUERIES, LEFT_BOUNDED=LEFT_BOUNDED, LAST_KEY=LAST_KEY, APPLY=APPLY, GRAD=GRAD,
        DK_FIRST=DK_FIRST, DK_OTHER=DK_OTHER, DV_FIRST=DV_FIRST, DV_OTHER=DV_OTHER, DQ_FIRST=DQ_FIRST, DQ_OTHER=DQ_OTHER,
    )  # fmt: skip
    heads_kv = heads_q // group
    turns = deltas
    if IN_ORDER:
        turns += (1 if RAGGED else batch) * heads_q.to(gl.int64) * rows_padded
    # causal: the first key tiles are seen by most queries, so tiles run upwards, longest first
    if RAGGED:
        number, head = tile_and_head(packed_tiles(seqlen_k, batch, BLOCK_N), heads_kv, HEADS_PER_WAVE, False)
        tile, first_k, seqlen_k, first_q, seqlen_q = place(
            cu_seqlens_k, cu_seqlens_q, batch, seqlen_k, seqlen_q, number, BLOCK_N, WARPS
        )
        sequence = packed_sequence(number, tile, first_k, BLOCK_N)
        first_row = (first_q // UNIT + sequence).to(gl.int64) * UNIT
        q += first_q.to(gl.int64) * stride_qm
        do += first_q.to(gl.int64) * stride_dom
        k += first_k.to(gl.int64) * stride_kn
        v += first_k.to(gl.int64) * stride_vn
        dk += first_k.to(gl.int64) * stride_dkn
        dv += first_k.to(gl.int64) * stride_dvn
        peaks += first_row
        deltas += first_row
        sums += first_row * BLOCK_D
        turns += first_row // TURN_ROWS
    else:
        tile, head = tile_and_head(gl.cdiv(seqlen_k, BLOCK_N), batch * heads_kv, HEADS_PER_WAVE, False)
    b = head // heads_kv
    h_kv = head % heads_kv
    if not RAGGED:
        sequence = b
    start_n = tile * BLOCK_N
    columns = start_n + gl.arange(0, BLOCK_N, layout=COLUMN)
    offset = seqlen_k - seqlen_q
    first_row = (b.to(gl.int64) * heads_q + h_kv * group) * rows_padded
    q += b.to(gl.int64) * stride_qb + (h_kv * group).to(gl.int64) * stride_qh
    do += b.to(gl.int64) * stride_dob + (h_kv * group).to(gl.int64) * stride_doh
    k += b.to(gl.int64) * stride_kb + h_kv.to(gl.int64) * stride_kh
    v += b.to(gl.int64) * stride_vb + h_kv.to(gl.int64) * stride_vh
    peaks += first_row
    deltas += first_row
    sums += first_row * BLOCK_D
    turns += first_row // TURN_ROWS

    heads = Heads(
        q, do, peaks, deltas, sums, turns, stride_qh, stride_qm, stride_doh, stride_dom, rows_padded, group,
        h_kv * group,
    )  # fmt: skip
    call = Call(
        start_n, columns, offset, seqlen_q, seqlen_k, (window_left, window_right), (score_first, score_second), qk_scale,
        sequence,
    )  # fmt: skip
    dk_acc, dk_more, dv_acc, dv_more = over_heads(
        heads, Source(k, stride_kn, seqlen_k), Source(v, stride_vn, seqlen_k), QUERY_BLOCKS, call, form
    )  # fmt: skip
    dk += b.to(gl.int64) * stride_dkb + h_kv.to(gl.int64) * stride_dkh
    dv += b.to(gl.int64) * stride_dvb + h_kv.to(gl.int64) * stride_dvh
    put_keys(
        dk, dv, dk_acc, dk_more, dv_acc, dv_more, stride_dkn, stride_dvn, start_n, seqlen_k, softmax_scale, form
    )  # fmt: skip


def _workspaces(problem: Problem, config: Config) -> Workspaces:
    rows = (problem.batch, problem.heads_q, space.padded_rows(problem))
    columns = space.block_dims(problem.specialization)[0]
    heads, turns = problem.batch * problem.heads_q, rows[2] // space.TURN_ROWS
    deltas = (heads * (rows[2] + turns),) if config.get("IN_ORDER") else rows
    return {"peaks": (rows, "fp32"), "deltas": (deltas, "fp32"), "sums": ((*rows, columns), "fp32")}


VARIANT = Variant(
    serves="bwd_fused",
    kernel=bwd_fused_sm80_kernel,
    space=space.SPACE,
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
        "cu_seqlens_q": "i32",
        "cu_seqlens_k": "i32",
    },
    descriptors={},
    grid=lambda problem, config, _sm_count, _early: problem.key_tiles(config["BLOCK_N"]) * problem.heads_kv,
    constants=constants,
    fitted=space.fitted,
    suited=space.suited,
    before=("sm80/bwd_prepare",),
    passes_before=lambda _spec, config: {"IN_ORDER": True} if config.get("IN_ORDER") else {},
    after=("sm80/bwd_finish",),
    workspaces=_workspaces,
    scalars=lambda problem, _config, _early: {"rows_padded": space.padded_rows(problem)},
)
