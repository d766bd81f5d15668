"""One tile of keys' way over the queries of a head, by mma.sync and cp.async, with all five products of the backward: dK and dV
stay in registers, dQ is added to float32 sums. Shared by the fused backwards of kernels/sm80/."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from fa2tune.kernels.lib.ampere import (
    MINUS_INFINITY,
    ZERO,
    Source,
    a_b,
    a_bt,
    add_columns,
    ask,
    at_b,
    block_barrier,
    hidden_behind,
    in_place,
    mma_layout,
    none_yet,
    operand_a,
    operand_b,
    shared_layout,
)
from fa2tune.kernels.lib.ampere_dq_accumulation import TURN_ROWS, add_to_sums, await_turn_of, signal_turn
from fa2tune.kernels.lib.ampere_pairs import (
    ds_by_halves,
    pair_at_b,
    pair_layout,
    pair_none_yet,
    pair_of_tiles,
    pair_row,
)
from fa2tune.search_spaces.sm80 import bwd_fused as space
from fa2tune.spec.problem import Config, Specialization, head_dim_parts, padded_head_dim

STEP = gl.constexpr(space.STEP)


class Form(NamedTuple):
    """What is compiled in. Kept as gl.constexpr: assigned without, its fields would be values of the running program."""

    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_D: gl.constexpr
    BLOCK_DV: gl.constexpr
    HEAD_DIM: gl.constexpr
    HEAD_DIM_V: gl.constexpr
    WARPS: gl.constexpr
    SCORES: gl.constexpr  #: layouts of the accumulators: of scores,
    KEYS: gl.constexpr  #: of dK and dV,
    QUERIES: gl.constexpr  #: and of dQ
    TRANSPOSED: gl.constexpr
    ONE: gl.constexpr
    EARLY: gl.constexpr
    V_IN_REGISTERS: gl.constexpr
    SCORES_APART: gl.constexpr  #: half of the warps have scores, the others dP
    KEYS_APART: gl.constexpr  #: half of the warps have dK, the others dV; accumulators are [2, BLOCK_N, columns]
    PAIR: gl.constexpr  #: SCORES_APART: layout of the accumulators of both; otherwise SCORES
    IN_TURNS: gl.constexpr  #: a program has several tiles of keys, one after the other
    IN_ORDER: gl.constexpr  #: tiles of keys add to dQ of a block one after the other, from the first on
    HIDE: gl.constexpr
    HIDE_QUERIES: gl.constexpr
    LEFT_BOUNDED: gl.constexpr
    LAST_KEY: gl.constexpr  #: or None
    APPLY: gl.constexpr  #: of the score term
    GRAD: gl.constexpr
    DK_FIRST: gl.constexpr
    DK_OTHER: gl.constexpr
    DV_FIRST: gl.constexpr
    DV_OTHER: gl.constexpr
    DQ_FIRST: gl.constexpr
    DQ_OTHER: gl.constexpr


class Heads(NamedTuple):
    """Where the first of the query heads that read a key head lies, and the steps to the next one."""

    q: gl.tensor
    do: gl.tensor
    peaks: gl.tensor
    deltas: gl.tensor
    sums: gl.tensor
    turns: gl.tensor  #: IN_ORDER: 32 bits for each TURN_ROWS queries; otherwise anything
    stride_qh: gl.tensor
    stride_qm: gl.tensor
    stride_doh: gl.tensor
    stride_dom: gl.tensor
    rows_padded: gl.tensor
    count: gl.tensor
    first: gl.tensor  #: number of the first


class Head(NamedTuple):
    """One of them."""

    q: tuple
    do: tuple
    peaks: gl.tensor
    deltas: gl.tensor
    sums: gl.tensor
    turns: gl.tensor
    begin: gl.tensor  #: the first query that sees the tile of keys, in whole blocks
    shared_end: gl.tensor  #: IN_ORDER: queries from here on do not see the tile before
    number: gl.tensor


class Shared(NamedTuple):
    """Shared memory of a tile."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    raw: tuple  #: SCORES_APART: P before the mask, and dP less delta; otherwise nothing
    v_first: gl.tensor  #: V_IN_REGISTERS: V as an operand of dP, its first DV_FIRST columns; otherwise nothing
    v_other: gl.tensor  #: and the next DV_OTHER
    pairs: tuple  #: Q and dO; K and V; what ``raw`` has; dS and P: as one each, or nothing


class Call(NamedTuple):
    """A tile of keys, and what decides which of them a query sees."""

    start_n: gl.tensor
    columns: gl.tensor  #: their numbers
    offset: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    window: tuple
    score: tuple
    qk_scale: gl.tensor
    batch: gl.tensor  #: number of the sequence


@gluon.constexpr_function
def layouts(warps, score_warps, key_warps, query_warps, transposed, scores_apart, keys_apart):
    """Of the accumulators of scores, of dK and dV, of dQ, and, of both by half of the warps each, of scores and dP."""
    if transposed:
        score_warps, key_warps = warps, warps
    scores, keys, queries = (mma_layout(down, warps // down) for down in (score_warps, key_warps, query_warps))
    pair = scores
    if scores_apart:
        pair = pair_layout(score_warps, warps)
    if keys_apart:
        keys = pair_layout(key_warps, warps)
    return scores, keys, queries, pair


@gluon.constexpr_function
def row_layout(scores, transposed, pair, halves):
    """Of the numbers of queries."""
    return pair_row(pair) if halves else gl.SliceLayout(0 if transposed else 1, scores)


@gluon.jit
def _ask_queries(smem, head, m, form):
    ask(smem.q, head.q, m, form.BLOCK_M, form.HEAD_DIM, form.BLOCK_D, form.WARPS, True)
    ask(smem.do, head.do, m, form.BLOCK_M, form.HEAD_DIM_V, form.BLOCK_DV, form.WARPS, True)
    async_copy.commit_group()


@gluon.jit
def _times_v(dp, smem, held, FIRST: gl.constexpr, COLUMNS: gl.constexpr, form):
    """dp plus what columns [FIRST, FIRST + COLUMNS) of dO and of V, which is ``held`` in registers, add to it."""
    do = smem.do.slice(FIRST, COLUMNS, 1)
    if form.TRANSPOSED:
        dp = mma_v2(held, do.permute([1, 0]).load(operand_b(form.SCORES)), dp)
    else:
        dp = mma_v2(do.load(operand_a(form.SCORES)), held, dp)
    return dp


@gluon.jit
def _none(form):
    """Zeros for scores or dP."""
    if form.TRANSPOSED:
        zeros = gl.zeros([form.BLOCK_N, form.BLOCK_M], gl.float32, layout=form.SCORES)
    else:
        zeros = gl.zeros([form.BLOCK_M, form.BLOCK_N], gl.float32, layout=form.SCORES)
    return zeros


@gluon.jit
def _scores(smem, rows, columns, head, call, form):
    """Q K^T [BLOCK_M, BLOCK_N], or transposed, as the score term has it. ``rows`` and ``columns`` broadcast against it."""
    if form.TRANSPOSED:
        s = a_bt(_none(form), smem.k, smem.q, form.HEAD_DIM, STEP, form.SCORES)
    else:
        s = a_bt(_none(form), smem.q, smem.k, form.HEAD_DIM, STEP, form.SCORES)
    return form.APPLY(s, call.score, rows, columns, call.offset, call.batch, head.number)


@gluon.jit
def _dp(smem, form):
    """dO V^T, as scores are."""
    dp = _none(form)
    if form.V_IN_REGISTERS:
        dp = _times_v(dp, smem, smem.v_first, 0, form.DV_FIRST, form)
        if form.DV_OTHER > 0:
            dp = _times_v(dp, smem, smem.v_other, form.DV_FIRST, form.DV_OTHER, form)
    elif form.TRANSPOSED:
        dp = a_bt(dp, smem.v, smem.do, form.HEAD_DIM_V, STEP, form.SCORES)
    else:
        dp = a_bt(dp, smem.do, smem.v, form.HEAD_DIM_V, STEP, form.SCORES)
    return dp


@gluon.jit
def _add_keys(dk_acc, dk_more, dv_acc, dv_more, smem, form):
    """dK and dV plus what P and dS in shared memory add."""
    ROWS: gl.constexpr = form.BLOCK_M
    if form.KEYS_APART:
        dk_acc, dk_more = pair_at_b(
            dk_acc, dk_more, smem.pairs[3], smem.pairs[0], ROWS, STEP, form.DK_FIRST, form.DK_OTHER, form.KEYS
        )
    else:
        dv_acc, dv_more = at_b(dv_acc, dv_more, smem.p, smem.do, ROWS, STEP, form.DV_FIRST, form.DV_OTHER, form.KEYS)
        dk_acc, dk_more = at_b(dk_acc, dk_more, smem.ds, smem.q, ROWS, STEP, form.DK_FIRST, form.DK_OTHER, form.KEYS)
    return dk_acc, dk_more, dv_acc, dv_more


@gluon.jit
def _trip(dk_acc, dk_more, dv_acc, dv_more, peak, m, end, head, smem, call, form, MASK: gl.constexpr):
    """Queries [m, m + BLOCK_M) of a head, whose peaks are at hand. The last block asks for itself once more, which is never
    read. IN_ORDER: blocks come from the last to the first."""
    BLOCK_M: gl.constexpr = form.BLOCK_M
    BLOCK_N: gl.constexpr = form.BLOCK_N
    SCORES: gl.constexpr = form.SCORES
    ROW: gl.constexpr = row_layout(form.SCORES, form.TRANSPOSED, form.PAIR, form.SCORES_APART)
    dtype: gl.constexpr = smem.k.dtype
    r = gl.arange(0, BLOCK_M, layout=ROW)
    rows = m + r
    if form.IN_ORDER:  # noqa: SIM108
        after = gl.maximum(m - BLOCK_M, head.begin)
    else:
        after = gl.minimum(m + BLOCK_M, end - BLOCK_M)
    async_copy.wait_group(0)
    delta = gl.load(gl.multiple_of(head.deltas + rows, [8]))  # whole blocks of padded rows
    if form.SCORES_APART:
        ds_by_halves(smem, peak, delta, m, call, STEP, form, MASK)
        await_turn_of(m, end, head, call, form)
        dk_acc, dk_more, dv_acc, dv_more = _add_keys(dk_acc, dk_more, dv_acc, dv_more, smem, form)
    elif form.TRANSPOSED:
        s = _scores(smem, rows[None, :], call.columns[:, None], head, call, form)
        if form.EARLY:
            dp = _dp(smem, form)
        p = gl.exp2(gl.fma(s, call.qk_scale, peak[None, :]))
        if MASK:
            if form.LAST_KEY is not None:
                seen = form.LAST_KEY(rows, call.offset, call.seqlen_k - 1)
                p = hidden_behind(p, call.columns[:, None], seen[None, :], ZERO)
            else:
                p = form.HIDE_QUERIES(p, call.columns, m, call.offset, call.seqlen_k, call.window, SCORES)
        slope = form.GRAD(
            p, s, call.score, rows[None, :], call.columns[:, None], call.offset, call.batch, head.number
        )  # fmt: skip
        if not form.EARLY:
            dp = _dp(smem, form)
        ds = (slope * (dp - delta[None, :])).to(dtype)
        smem.ds.store(ds)
        await_turn_of(m, end, head, call, form)
        p_tile = gl.convert_layout(p.to(dtype), operand_a(form.KEYS))
        dv_acc, dv_more = add_columns(
            dv_acc, dv_more, p_tile, smem.do, 0, BLOCK_M, form.DV_FIRST, form.DV_OTHER, form.KEYS
        )
        ds_tile = gl.convert_layout(ds, operand_a(form.KEYS))
        dk_acc, dk_more = add_columns(
            dk_acc, dk_more, ds_tile, smem.q, 0, BLOCK_M, form.DK_FIRST, form.DK_OTHER, form.KEYS
        )
    else:
        s = _scores(smem, rows[:, None], call.columns[None, :], head, call, form)
        if form.EARLY:
            dp = _dp(smem, form)
        weight = gl.fma(s, call.qk_scale, peak[:, None])
        if MASK:
            if form.LAST_KEY is not None:
                seen = form.LAST_KEY(rows, call.offset, call.seqlen_k - 1)
                weight = hidden_behind(weight, call.columns[None, :], seen[:, None], MINUS_INFINITY)
            else:
                weight = form.HIDE(weight, rows, call.start_n, call.offset, call.seqlen_k, call.window, SCORES)
        p = gl.exp2(weight)
        slope = form.GRAD(
            p, s, call.score, rows[:, None], call.columns[None, :], call.offset, call.batch, head.number
        )  # fmt: skip
        smem.p.store(p.to(dtype))
        if form.ONE:
            dv_acc, dv_more = at_b(
                dv_acc, dv_more, smem.p, smem.do, BLOCK_M, STEP, form.DV_FIRST, form.DV_OTHER, form.KEYS
            )
            dp = _dp(smem, form)
            p = smem.p.load(SCORES).to(gl.float32)
            smem.p.store((p * (dp - delta[:, None])).to(dtype))
            await_turn_of(m, end, head, call, form)
            dk_acc, dk_more = at_b(
                dk_acc, dk_more, smem.p, smem.q, BLOCK_M, STEP, form.DK_FIRST, form.DK_OTHER, form.KEYS
            )
        else:
            if not form.EARLY:
                dp = _dp(smem, form)
            smem.ds.store((slope * (dp - delta[:, None])).to(dtype))
            await_turn_of(m, end, head, call, form)
            dk_acc, dk_more, dv_acc, dv_more = _add_keys(dk_acc, dk_more, dv_acc, dv_more, smem, form)
    if form.IN_ORDER:
        block_barrier()  # all threads are behind what one has seen; it stands for the one that the copies need
    peak = gl.load(gl.multiple_of(head.peaks + (after + r), [8]))
    _ask_queries(smem, head, after, form)
    dq = none_yet(BLOCK_M, form.DQ_FIRST, form.QUERIES)
    dq_more = none_yet(BLOCK_M, form.DQ_OTHER, form.QUERIES)
    if form.TRANSPOSED:
        dq, dq_more = at_b(dq, dq_more, smem.ds, smem.k, BLOCK_N, STEP, form.DQ_FIRST, form.DQ_OTHER, form.QUERIES)
    else:
        dq, dq_more = a_b(dq, dq_more, smem.ds, smem.k, BLOCK_N, STEP, form.DQ_FIRST, form.DQ_OTHER, form.QUERIES)
    block_sums = head.sums + m.to(gl.int64) * form.BLOCK_D
    add_to_sums(block_sums, dq, BLOCK_M, form.BLOCK_D, form.HEAD_DIM, 0, form.DQ_FIRST, form.QUERIES)
    if form.DQ_OTHER > 0:
        add_to_sums(
            block_sums, dq_more, BLOCK_M, form.BLOCK_D, form.HEAD_DIM, form.DQ_FIRST, form.DQ_OTHER, form.QUERIES
        )
    return dk_acc, dk_more, dv_acc, dv_more, peak


@gluon.jit
def _over_queries(dk_acc, dk_more, dv_acc, dv_more, peak, first, stop, end, head, smem, call, form, MASK: gl.constexpr):
    """Queries [first, stop) of a head, in whole blocks; ``end``: of all of its queries."""
    for at in range(first, stop, form.BLOCK_M):
        if form.IN_ORDER:  # noqa: SIM108
            m = first + stop - form.BLOCK_M - at
        else:
            m = at
        dk_acc, dk_more, dv_acc, dv_more, peak = _trip(
            dk_acc, dk_more, dv_acc, dv_more, peak, m, end, head, smem, call, form, MASK
        )  # fmt: skip
    return dk_acc, dk_more, dv_acc, dv_more, peak


@gluon.jit
def _ask_keys(smem, source, start_n, DIM: gl.constexpr, COLUMNS: gl.constexpr, form):
    step = source.stride
    if form.IN_TURNS:
        step = in_place(source.stride)
    ask(smem, Source(source.base, step, source.end), start_n, form.BLOCK_N, DIM, COLUMNS, form.WARPS, True)


@gluon.jit
def _held(v, form):
    """V [BLOCK_N, columns] of shared memory as an operand of dP."""
    if form.TRANSPOSED:  # noqa: SIM108
        tile = v.load(operand_a(form.SCORES))
    else:
        tile = v.permute([1, 0]).load(operand_b(form.SCORES))
    return tile


@gluon.jit
def over_heads(heads, k, v, blocks_of, call, form):
    """A tile of keys over all queries of all query heads that read its key head: dK and dV, each in two accumulators, and dS K
    added to the sums. ``k``, ``v``: Sources; ``blocks_of``: QUERY_BLOCKS of the mask."""
    BLOCK_M: gl.constexpr = form.BLOCK_M
    BLOCK_N: gl.constexpr = form.BLOCK_N
    ROW: gl.constexpr = row_layout(form.SCORES, form.TRANSPOSED, form.PAIR, form.SCORES_APART)
    dtype: gl.constexpr = k.base.dtype.element_ty
    q = heads.q
    do = heads.do
    peaks = heads.peaks
    deltas = heads.deltas
    sums = heads.sums
    start_n = call.start_n
    q_do, k_v, p_dp, ds_p, raw = start_n, start_n, start_n, start_n, (start_n, start_n)  # where there is nothing
    v_first, v_other = start_n, start_n
    if form.V_IN_REGISTERS:  # V goes there first, through memory that Q and dO then take
        k_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, form.BLOCK_D], shared_layout(form.BLOCK_D))
        v_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, form.BLOCK_DV], shared_layout(form.BLOCK_DV))
        _ask_keys(v_smem, v, start_n, form.HEAD_DIM_V, form.BLOCK_DV, form)
        async_copy.commit_group()
        _ask_keys(k_smem, k, start_n, form.HEAD_DIM, form.BLOCK_D, form)
        async_copy.wait_group(0)
        v_first = _held(v_smem.slice(0, form.DV_FIRST, 1), form)
        if form.DV_OTHER > 0:
            v_other = _held(v_smem.slice(form.DV_FIRST, form.DV_OTHER, 1), form)
    # allocated by the tile: what dK and dV go out through may then take the place of what is read no more
    if form.SCORES_APART or form.KEYS_APART:
        q_do, q_smem, do_smem = pair_of_tiles(dtype, BLOCK_M, form.BLOCK_D)
    else:
        q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, form.BLOCK_D], shared_layout(form.BLOCK_D))
        do_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, form.BLOCK_DV], shared_layout(form.BLOCK_DV))
    if form.SCORES_APART:
        k_v, k_smem, v_smem = pair_of_tiles(dtype, BLOCK_N, form.BLOCK_D)
    elif not form.V_IN_REGISTERS:
        k_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, form.BLOCK_D], shared_layout(form.BLOCK_D))
        v_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, form.BLOCK_DV], shared_layout(form.BLOCK_DV))
    if form.TRANSPOSED:
        ds_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], shared_layout(BLOCK_M))
        p_smem = ds_smem
    elif form.KEYS_APART:
        ds_p, ds_smem, p_smem = pair_of_tiles(dtype, BLOCK_M, BLOCK_N)
    else:
        ds_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], shared_layout(BLOCK_N))
        p_smem = ds_smem
        if not form.ONE:
            p_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], shared_layout(BLOCK_N))
    if form.SCORES_APART:
        p_dp, raw_p, raw_dp = pair_of_tiles(dtype, BLOCK_M, BLOCK_N)
        raw = (raw_p, raw_dp)
    smem = Shared(
        k_smem, v_smem, q_smem, do_smem, p_smem, ds_smem, raw, v_first, v_other, (q_do, k_v, p_dp, ds_p)
    )  # fmt: skip

    # queries in whole blocks: [begin, full) under the mask, [full, full_end) see every key of the tile, then its left side
    blocks = blocks_of(start_n, start_n + BLOCK_N, call.seqlen_q, call.seqlen_k, call.window, BLOCK_M)
    begin = gl.to_tensor(blocks[0]) * BLOCK_M
    end = blocks[3] * BLOCK_M
    # the last, ragged tile: everything under the mask
    full = gl.where(start_n + BLOCK_N > call.seqlen_k, end, blocks[1] * BLOCK_M)
    full_end = end
    if form.LEFT_BOUNDED:
        full_end = gl.maximum(blocks[2] * BLOCK_M, full)

    if not form.V_IN_REGISTERS:
        _ask_keys(k_smem, k, start_n, form.HEAD_DIM, form.BLOCK_D, form)
        _ask_keys(v_smem, v, start_n, form.HEAD_DIM_V, form.BLOCK_DV, form)
    if form.KEYS_APART:
        dk_acc = pair_none_yet(BLOCK_N, form.DK_FIRST, form.KEYS)
        dk_more = pair_none_yet(BLOCK_N, form.DK_OTHER, form.KEYS)
        dv_acc = gl.to_tensor(0)
        dv_more = gl.to_tensor(0)
    else:
        dk_acc = none_yet(BLOCK_N, form.DK_FIRST, form.KEYS)
        dk_more = none_yet(BLOCK_N, form.DK_OTHER, form.KEYS)
        dv_acc = none_yet(BLOCK_N, form.DV_FIRST, form.KEYS)
        dv_more = none_yet(BLOCK_N, form.DV_OTHER, form.KEYS)
    turns, shared_end = heads.turns, end
    if form.IN_ORDER:
        m = gl.maximum(end - BLOCK_M, 0)
        if form.LEFT_BOUNDED:
            before = blocks_of(start_n - BLOCK_N, start_n, call.seqlen_q, call.seqlen_k, call.window, BLOCK_M)
            shared_end = gl.where(before[0] < before[3], before[3], 0) * BLOCK_M
    else:
        m = gl.maximum(gl.minimum(begin, end - BLOCK_M), 0)  # no query may see this tile
    for g in range(heads.count):
        async_copy.wait_group(0)  # the copies of the head before, which are not read
        head = Head(
            Source(q, heads.stride_qm, call.seqlen_q), Source(do, heads.stride_dom, call.seqlen_q), peaks, deltas, sums,
            turns, begin, shared_end, heads.first + g,
        )  # fmt: skip
        _ask_queries(smem, head, m, form)
        peak = gl.load(peaks + m + gl.arange(0, BLOCK_M, layout=ROW))
        if form.IN_ORDER and form.LEFT_BOUNDED:
            dk_acc, dk_more, dv_acc, dv_more, peak = _over_queries(
                dk_acc, dk_more, dv_acc, dv_more, peak, full_end, end, end, head, smem, call, form, True
            )  # fmt: skip
        if not form.IN_ORDER:
            dk_acc, dk_more, dv_acc, dv_more, peak = _over_queries(
                dk_acc, dk_more, dv_acc, dv_more, peak, begin, full, end, head, smem, call, form, True
            )  # fmt: skip
        dk_acc, dk_more, dv_acc, dv_more, peak = _over_queries(
            dk_acc, dk_more, dv_acc, dv_more, peak, full, full_end, end, head, smem, call, form, False
        )  # fmt: skip
        if form.IN_ORDER:
            dk_acc, dk_more, dv_acc, dv_more, peak = _over_queries(
                dk_acc, dk_more, dv_acc, dv_more, peak, begin, full, end, head, smem, call, form, True
            )  # fmt: skip
            block_barrier()  # all threads have added
            if begin < end:
                signal_turn(turns + begin // TURN_ROWS, start_n // BLOCK_N + 1)
            turns += heads.rows_padded // TURN_ROWS
        elif form.LEFT_BOUNDED:
            dk_acc, dk_more, dv_acc, dv_more, peak = _over_queries(
                dk_acc, dk_more, dv_acc, dv_more, peak, full_end, end, end, head, smem, call, form, True
            )  # fmt: skip
        q += heads.stride_qh
        do += heads.stride_doh
        peaks += heads.rows_padded
        deltas += heads.rows_padded
        sums += heads.rows_padded.to(gl.int64) * form.BLOCK_D
    async_copy.wait_group(0)  # nothing is on its way into shared memory that dK and dV go through, or the next tile
    return dk_acc, dk_more, dv_acc, dv_more


def constants(spec: Specialization, config: Config) -> dict[str, Any]:
    """Among them: columns of each result in the first of its accumulators, and in the second. 96 are 64 and 32, so that none is
    computed for the padding; one holds them all where warps would find no column of their own in the second."""
    found: dict[str, Any] = {"WARPS": config["num_warps"]}
    for name, dim, down in (("DK", spec.head_dim, "KEY_WARPS"), ("DV", spec.head_dim_v, "KEY_WARPS"),
                            ("DQ", spec.head_dim, "QUERY_WARPS")):  # fmt: skip
        first, other = head_dim_parts(dim)
        if other < 8 * (config["num_warps"] // config[down]):
            first, other = padded_head_dim(dim), 0
        found |= {f"{name}_FIRST": first, f"{name}_OTHER": other}
    return found
