"""FlashAttention forward by mma.sync and cp.async, for GPUs without wgmma: one program per query tile, its key blocks from the
last to the first, copies of K and V under way during products and exponentials."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from fa2tune.kernels.lib.ampere import (
    LN2,
    LOWEST,
    MINUS_INFINITY,
    Source,
    a_b,
    a_bt,
    ask,
    for_lanes,
    hidden_behind,
    lanes,
    mma_layout,
    none_yet,
    operand_a,
    operand_b,
    put,
    raise_peak,
    raised_in,
    scaled_if,
    shared_layout,
)
from fa2tune.kernels.lib.common import tile_and_head
from fa2tune.kernels.lib.extent import packed_sequence, packed_tiles
from fa2tune.kernels.lib.gluon_extent import place
from fa2tune.search_spaces.sm80.fwd import SPACE, STEP, suited
from fa2tune.spec.problem import head_dim_parts
from fa2tune.spec.variant import Variant

#: Columns of Q and K that one step of Q K^T takes where Q is read from shared memory.
STEP_COLUMNS = gl.constexpr(STEP)
#: Keys that one step of P V takes where P is read from shared memory.
STEP_KEYS = gl.constexpr(STEP)


class Form(NamedTuple):
    """What is compiled in. Kept as gl.constexpr: assigned without, its fields would be values of the running program."""

    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_D: gl.constexpr
    BLOCK_DV: gl.constexpr
    HEAD_DIM: gl.constexpr
    HEAD_DIM_V: gl.constexpr
    WARPS: gl.constexpr
    SCHEDULE: gl.constexpr
    Q_IN_REGISTERS: gl.constexpr
    Q_HELD: gl.constexpr
    NEGATE: gl.constexpr
    HIDE: gl.constexpr
    LAST_KEY: gl.constexpr  #: or None
    APPLY: gl.constexpr
    SUMS: gl.constexpr
    O_IN_HALVES: gl.constexpr
    FIRST: gl.constexpr
    OTHER: gl.constexpr


class Query(NamedTuple):
    """A tile of Q."""

    smem: gl.shared_memory_descriptor
    tile: gl.tensor  #: Q_IN_REGISTERS: it; otherwise smem
    held: tuple  #: its first Q_HELD columns, in steps
    rows: gl.tensor  #: their numbers


class Buffers(NamedTuple):
    """Shared memory of a key block."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor  #: O_IN_HALVES: what goes to the warps that share a row of O
    shrink: gl.shared_memory_descriptor


class Call(NamedTuple):
    """Keys of a tile, and what decides which of them a row sees."""

    k: tuple
    v: tuple
    first: gl.tensor  #: block
    below: gl.tensor  #: the block behind the last
    offset: gl.tensor
    seqlen_k: gl.tensor
    window: tuple
    score: tuple
    qk_scale: gl.tensor
    batch: gl.tensor  #: number of the sequence
    head: gl.tensor  #: of the query head


@gluon.constexpr_function
def out_layout(warps, in_halves):
    """Accumulator of O."""
    return mma_layout(warps // 2, 2) if in_halves else mma_layout(warps, 1)


@gluon.jit
def _scores(query, k_smem, block, call, form):
    """Q K^T [BLOCK_M, BLOCK_N] of key block ``block``, as the score term has it."""
    MMA: gl.constexpr = mma_layout(form.WARPS, 1)
    s = gl.zeros([form.BLOCK_M, form.BLOCK_N], gl.float32, layout=MMA)
    if form.Q_IN_REGISTERS:
        s = mma_v2(query.tile, k_smem.permute([1, 0]).load(operand_b(MMA)), s)
    else:
        for c in gl.static_range(form.Q_HELD // STEP_COLUMNS):
            k_columns = k_smem.slice(c * STEP_COLUMNS, STEP_COLUMNS, 1).permute([1, 0])
            s = mma_v2(query.held[c], k_columns.load(operand_b(MMA)), s)
        s = a_bt(s, query.smem, k_smem, form.HEAD_DIM, STEP_COLUMNS, MMA, form.Q_HELD // STEP_COLUMNS)
    if form.NEGATE:
        s = -s
    columns = block * form.BLOCK_N + gl.arange(0, form.BLOCK_N, layout=gl.SliceLayout(0, MMA))
    return form.APPLY(
        s, call.score, query.rows[:, None], columns[None, :], call.offset, call.batch, call.head
    )  # fmt: skip


@gluon.jit
def _ask_k(smem, call, row, form, MASK_ROWS: gl.constexpr):
    ask(smem, call.k, row, form.BLOCK_N, form.HEAD_DIM, form.BLOCK_D, form.WARPS, MASK_ROWS)


@gluon.jit
def _ask_v(smem, call, row, form, MASK_ROWS: gl.constexpr):
    ask(smem, call.v, row, form.BLOCK_N, form.HEAD_DIM_V, form.BLOCK_DV, form.WARPS, MASK_ROWS)


@gluon.jit
def _add_rows(total, p_tile, shrink, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MMA: gl.constexpr):
    """total [BLOCK_M, 8], eight times the sum of a row, times shrink [BLOCK_M, 4], plus the products of P with ones."""
    eight = lanes(total)
    eight = eight * for_lanes(shrink, eight)
    eight = gl.convert_layout(eight.reshape([BLOCK_M, 8]), MMA, assert_trivial=True)
    return mma_v2(p_tile, gl.full([BLOCK_N, 8], 1.0, p_tile.dtype, layout=operand_b(MMA)), eight)


@gluon.jit
def _add_through(acc, more, p, shrink, now, form):
    """O times shrink [BLOCK_M, 4], plus P V. P [BLOCK_M, BLOCK_N] and shrink go through shared memory, as the warps of a row of
    O are not those of its scores: each has twice the rows and half the columns, so that it reads half of V."""
    OUT: gl.constexpr = out_layout(form.WARPS, True)
    now.p.store(p.to(now.v.dtype))
    now.shrink.store(shrink)
    parts: gl.constexpr = lanes(acc).type.layout
    shrink = now.shrink.load(gl.SliceLayout(1, gl.SliceLayout(3, parts)))
    raised = raised_in(shrink, form.WARPS // 2)
    acc = scaled_if(raised, acc, shrink, form.WARPS)
    if form.OTHER > 0:
        more = scaled_if(raised, more, shrink, form.WARPS)
    return a_b(acc, more, now.p, now.v, form.BLOCK_N, STEP_KEYS, form.FIRST, form.OTHER, OUT)


@gluon.jit
def _trip(acc, more, total, peak, block, query, now, other, call, form, MASK: gl.constexpr):
    """Key block ``block``, down to the first. "fa2": ``now`` is all there is. What is asked for beyond the first block is that
    block once more, which is never read."""
    MMA: gl.constexpr = mma_layout(form.WARPS, 1)
    BLOCK_M: gl.constexpr = form.BLOCK_M
    BLOCK_N: gl.constexpr = form.BLOCK_N
    before = gl.maximum(block - 1, call.first) * BLOCK_N
    async_copy.wait_group(0)
    if form.SCHEDULE == "fa2":
        # V of the last block may have fewer rows; of every other block all rows are there
        _ask_v(now.v, call, block * BLOCK_N, form, MASK)
        async_copy.commit_group()
        scores = _scores(query, now.k, block, call, form)
        async_copy.wait_group(0)
        _ask_k(now.k, call, before, form, MASK)
        async_copy.commit_group()
    else:
        _ask_k(other.k, call, before, form, MASK)
        _ask_v(other.v, call, before, form, MASK)
        async_copy.commit_group()
        scores = _scores(query, now.k, block, call, form)
    if MASK:
        if form.LAST_KEY is not None:
            columns = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, MMA))
            seen = form.LAST_KEY(query.rows, call.offset, call.seqlen_k - 1)
            scores = hidden_behind(scores, columns[None, :], seen[:, None], MINUS_INFINITY)
        else:
            scores = form.HIDE(scores, query.rows, block * BLOCK_N, call.offset, call.seqlen_k, call.window, MMA)
    parts = lanes(scores)
    top = gl.convert_layout(gl.max(gl.max(parts, 3), 1) * call.qk_scale, peak.type.layout, assert_trivial=True)
    peak, shrink, raised = raise_peak(peak, top, form.WARPS)
    p = gl.exp2(gl.fma(parts, call.qk_scale, for_lanes(-peak, parts)))
    if not form.O_IN_HALVES:
        acc = scaled_if(raised, acc, shrink, form.WARPS)
        if form.OTHER > 0:
            more = scaled_if(raised, more, shrink, form.WARPS)
    p = gl.convert_layout(p.reshape([BLOCK_M, BLOCK_N]), MMA, assert_trivial=True)
    p_tile = gl.convert_layout(p.to(now.v.dtype), operand_a(MMA))
    if form.SUMS == "first":
        total = _add_rows(total, p_tile, shrink, BLOCK_M, BLOCK_N, MMA)
    if form.O_IN_HALVES:
        acc, more = _add_through(acc, more, p, shrink, now, form)
    else:
        acc = mma_v2(p_tile, now.v.slice(0, form.FIRST, 1).load(operand_b(MMA)), acc)
        if form.OTHER > 0:
            more = mma_v2(p_tile, now.v.slice(form.FIRST, form.OTHER, 1).load(operand_b(MMA)), more)
    if form.SUMS == "mma":
        total = _add_rows(total, p_tile, shrink, BLOCK_M, BLOCK_N, MMA)
    elif form.SUMS == "add":
        parts = lanes(p)
        total = total * shrink + gl.convert_layout(gl.sum(gl.sum(parts, 3), 1), total.type.layout, assert_trivial=True)
    return acc, more, total, peak


@gluon.jit
def _over_keys(acc, more, total, peak, begin, end, query, even, odd, call, form, MASK: gl.constexpr):
    """Key blocks [begin, end), counted back from the last. Two buffers change places with every block: by a branch, not by
    turning the loop out for two blocks, whose instructions ptxas would mix, and then find too few registers."""
    for j in range(begin, end):
        if form.SCHEDULE == "fa2" or j % 2 == 0:
            acc, more, total, peak = _trip(
                acc, more, total, peak, call.below - 1 - j, query, even, odd, call, form, MASK
            )  # fmt: skip
        else:
            acc, more, total, peak = _trip(
                acc, more, total, peak, call.below - 1 - j, query, odd, even, call, form, MASK
            )  # fmt: skip
    return acc, more, total, peak


@gluon.jit
def fwd_sm80_kernel(
    q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k, qk_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, batch, heads_q, group, seqlen_q, seqlen_k, HEADS_PER_WAVE, window_left, window_right,
    score_first, score_second,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BLOCKS_BELOW: gl.constexpr, FIRST_BLOCK: gl.constexpr, CLEAR_BLOCKS: gl.constexpr, HIDE: gl.constexpr,
    SEES_A_KEY: gl.constexpr, LEFT_BOUNDED: gl.constexpr, RIGHT_BOUNDED: gl.constexpr, NEGATE: gl.constexpr,
    LAST_KEY: gl.constexpr, APPLY: gl.constexpr, RAGGED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr, SCHEDULE: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, Q_HELD: gl.constexpr, SUMS: gl.constexpr,
    O_IN_HALVES: gl.constexpr, FIRST: gl.constexpr, OTHER: gl.constexpr,
):  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o [B, Hq, Sq, DV], lse [B, Hq, Sq] float32, natural log.

    bf16 or fp16; bases and strides are multiples of 16 bytes. qk_scale is |softmax_scale| * log2(e), and not 0. Sk >= 1. Rows
    that see no key: o = 0, lse = -inf.
    SCHEDULE "fa2": one buffer of K and of V; V of a block is asked for before its Q K^T, K of the next one before the softmax
    (two barriers a block). "double": two of each, both asked for a block ahead (one barrier). FIRST and OTHER: columns of O in
    one accumulator and in a second, as ``head_dim_parts`` has them. SUMS of rows: "add"; or by
    products with ones, "mma" after P V, "first" before it, which hides their latency. O_IN_HALVES: two warps share
    a row of O, half of the columns each; P goes to them through shared memory. Q_HELD: so many columns of Q stay in registers,
    the others are read from shared memory with every key block. LAST_KEY: where the mask has it,
    ``hidden_behind`` hides what comes after it, not HIDE. RAGGED: as kernels/portable/fwd.py has it.
    """
    MMA: gl.constexpr = mma_layout(WARPS, 1)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    OUT: gl.constexpr = out_layout(WARPS, O_IN_HALVES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    DOUBLE: gl.constexpr = SCHEDULE == "double"
    dtype: gl.constexpr = q.dtype.element_ty
    rows_of_head = seqlen_q
    if RAGGED:
        number, head = tile_and_head(
            packed_tiles(seqlen_q, batch, BLOCK_M), heads_q, HEADS_PER_WAVE, RIGHT_BOUNDED and not LEFT_BOUNDED
        )
        tile, first_q, seqlen_q, first_k, seqlen_k = place(
            cu_seqlens_q, cu_seqlens_k, batch, seqlen_q, seqlen_k, number, BLOCK_M, WARPS
        )
        sequence = packed_sequence(number, tile, first_q, BLOCK_M)
        q += first_q.to(gl.int64) * stride_qm
        k += first_k.to(gl.int64) * stride_kn
        v += first_k.to(gl.int64) * stride_vn
        o += first_q.to(gl.int64) * stride_om
        lse += first_q
    else:
        tile, head = tile_and_head(
            gl.cdiv(seqlen_q, BLOCK_M), batch * heads_q, HEADS_PER_WAVE, RIGHT_BOUNDED and not LEFT_BOUNDED
        )
    b = head // heads_q
    h = head % heads_q
    if not RAGGED:
        sequence = b
    h_kv = h // group
    start_m = tile * BLOCK_M
    rows = start_m + gl.arange(0, BLOCK_M, layout=ROW)
    offset = seqlen_k - seqlen_q  # bottom-right: row i sees keys up to i + offset
    window = (window_left, window_right)
    q += b.to(gl.int64) * stride_qb + h.to(gl.int64) * stride_qh
    k += b.to(gl.int64) * stride_kb + h_kv.to(gl.int64) * stride_kh
    v += b.to(gl.int64) * stride_vb + h_kv.to(gl.int64) * stride_vh

    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], shared_layout(BLOCK_D))
    # buffers of their own, not slices of one: the compiler sees that copies into one and reads of another do not meet
    k0 = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_D], shared_layout(BLOCK_D))
    v0 = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_DV], shared_layout(BLOCK_DV))
    k1 = k0
    v1 = v0
    if DOUBLE:
        k1 = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_D], shared_layout(BLOCK_D))
        v1 = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_DV], shared_layout(BLOCK_DV))

    # key blocks from the last to the first: some under the mask, which may be ragged; clear ones; some under its left side
    keys = seqlen_k
    if RAGGED:
        keys = gl.maximum(seqlen_k, 1)  # of a sequence without keys one block, of which nothing is read
    below = BLOCKS_BELOW(start_m + BLOCK_M, seqlen_q, keys, window, BLOCK_N)
    if RAGGED:
        below = gl.maximum(below, 1)  # where cu_seqlens are wrong, too
    first = gl.to_tensor(FIRST_BLOCK(start_m, seqlen_q, seqlen_k, window, BLOCK_N))
    clear_begin, clear_end = CLEAR_BLOCKS(start_m, start_m + BLOCK_M, seqlen_q, seqlen_k, window, BLOCK_N)
    n_blocks = below - first
    n_masked = gl.minimum(gl.maximum(below - clear_end, 0), n_blocks)
    n_clear = n_blocks
    if LEFT_BOUNDED:
        n_clear = gl.maximum(gl.minimum(below - clear_begin, n_blocks), n_masked)

    call = Call(
        Source(k, stride_kn, seqlen_k), Source(v, stride_vn, seqlen_k), first, below, offset, seqlen_k, window,
        (score_first, score_second), qk_scale, sequence, h,
    )  # fmt: skip
    form: gl.constexpr = Form(
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, HEAD_DIM=HEAD_DIM, HEAD_DIM_V=HEAD_DIM_V,
        WARPS=WARPS, SCHEDULE=SCHEDULE, Q_IN_REGISTERS=Q_IN_REGISTERS, Q_HELD=Q_HELD, NEGATE=NEGATE, HIDE=HIDE,
        LAST_KEY=LAST_KEY, APPLY=APPLY, SUMS=SUMS, O_IN_HALVES=O_IN_HALVES, FIRST=FIRST, OTHER=OTHER,
    )  # fmt: skip
    last = (below - 1) * BLOCK_N
    ask(q_smem, Source(q, stride_qm, seqlen_q), start_m, BLOCK_M, HEAD_DIM, BLOCK_D, WARPS, True)
    if Q_IN_REGISTERS or Q_HELD > 0:
        async_copy.commit_group()
    _ask_k(k0, call, last, form, True)
    if DOUBLE:
        _ask_v(v0, call, last, form, True)
    async_copy.commit_group()
    q_tile = q_smem
    held = ()
    if Q_IN_REGISTERS:
        async_copy.wait_group(1)
        q_tile = q_smem.load(operand_a(MMA))
    elif Q_HELD > 0:
        async_copy.wait_group(1)
        for c in gl.static_range(Q_HELD // STEP_COLUMNS):
            held = held + (q_smem.slice(c * STEP_COLUMNS, STEP_COLUMNS, 1).load(operand_a(MMA)),)  # noqa: RUF005
    query = Query(q_smem, q_tile, held, rows)
    p_smem = k0
    shrink_smem = k0
    if O_IN_HALVES:  # after Q is read, whose memory they take if it is in registers
        p_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], shared_layout(BLOCK_N))
        shrink_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_M, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    even = Buffers(k0, v0, p_smem, shrink_smem)
    odd = Buffers(k1, v1, p_smem, shrink_smem)

    acc = gl.zeros([BLOCK_M, FIRST], gl.float32, layout=OUT)
    more = none_yet(BLOCK_M, OTHER, OUT)
    by_thread = gl.sum(gl.sum(lanes(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=MMA)), 3), 1)
    if SUMS != "add":  # noqa: SIM108
        total = gl.zeros([BLOCK_M, 8], gl.float32, layout=MMA)
    else:
        total = by_thread
    peak = gl.full([BLOCK_M, 4], LOWEST, gl.float32, layout=by_thread.type.layout)
    acc, more, total, peak = _over_keys(acc, more, total, peak, 0, n_masked, query, even, odd, call, form, True)
    acc, more, total, peak = _over_keys(acc, more, total, peak, n_masked, n_clear, query, even, odd, call, form, False)
    if LEFT_BOUNDED:
        acc, more, total, peak = _over_keys(
            acc, more, total, peak, n_clear, n_blocks, query, even, odd, call, form, True
        )
    async_copy.wait_group(0)

    # a row whose scores are all -inf has total 0: 0 / 0 = NaN, as softmax has it; a row with no key at all is 0
    if SUMS != "add":  # noqa: SIM108
        row_total = gl.max(total, 1)
    else:
        row_total = gl.convert_layout(gl.sum(total, 1), ROW)
    scale = gl.convert_layout(1.0 / row_total, OUT_ROW)
    out = acc * scale[:, None]
    rest = more
    if OTHER > 0:
        rest = more * scale[:, None]
    word = (gl.convert_layout(gl.max(peak, 1), ROW) + gl.log2(row_total)) * LN2
    if LEFT_BOUNDED or RIGHT_BOUNDED or RAGGED:
        sees_a_key = SEES_A_KEY(rows, offset, seqlen_k, window)
        if RAGGED:
            sees_a_key = sees_a_key & (seqlen_k > 0)
        shown = gl.convert_layout(sees_a_key, OUT_ROW)
        out = gl.where(shown[:, None], out, 0.0)
        if OTHER > 0:
            rest = gl.where(shown[:, None], rest, 0.0)
        word = gl.where(sees_a_key, word, float("-inf"))
    gl.store(lse + (b.to(gl.int64) * heads_q + h) * rows_of_head + rows, word, mask=rows < seqlen_q)
    o += b.to(gl.int64) * stride_ob + h.to(gl.int64) * stride_oh
    if OTHER > 0:
        put(o, out, stride_om, start_m, seqlen_q, BLOCK_M, FIRST, FIRST, WARPS)
        put(o, rest, stride_om, start_m, seqlen_q, BLOCK_M, HEAD_DIM_V, OTHER, WARPS, FIRST)
    else:
        put(o, out, stride_om, start_m, seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, WARPS)


VARIANT = Variant(
    serves="fwd",
    kernel=fwd_sm80_kernel,
    space=SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "lse": "fp32", "cu_seqlens_q": "i32", "cu_seqlens_k": "i32"},
    descriptors={},
    grid=lambda problem, config, _sm_count, _early: problem.query_tiles(config["BLOCK_M"]) * problem.heads_q,
    constants=lambda spec, config: {
        "NEGATE": spec.negate,
        "WARPS": config["num_warps"],
        **dict(zip(("FIRST", "OTHER"), head_dim_parts(spec.head_dim_v), strict=True)),
    },
    suited=suited,
)
