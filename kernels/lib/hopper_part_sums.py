"""What a part of a tile's keys sums to: the loops of kernels/sm90/fwd_split.py and fwd_shares.py. Device side."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.common import LOWEST
from fa2tune.kernels.lib.hopper import mbarrier, warpgroup_mma_wait
from fa2tune.kernels.lib.hopper_forward import (
    K_EMPTY,
    ROWS,
    V_EMPTY,
    of_carried,
    pairs_suit,
    release,
    repack,
    signal_next_turn,
    sum_parts,
    to_carry,
)
from fa2tune.kernels.lib.hopper_key_parts import pass_entries
from fa2tune.kernels.lib.hopper_keys import Seen, issue_scores, over_keys, with_term
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    loaded,
    product_layout,
    products_done,
    tiles_in,
    used_of,
    zeros_for,
)


@gluon.jit
def contributions(acc, total):
    """The accumulators of all parts of columns, 0 in rows whose sum of P [ROWS] is: they see no key here, and V may hold
    infinities."""
    found = (_contribution(acc[0], total),)
    if len(acc) > 1:
        found = (found[0], _contribution(acc[1], total))
    return found


@gluon.jit
def _contribution(acc, total):
    return gl.where(gl.convert_layout(total, gl.SliceLayout(1, acc.type.layout))[:, None] == 0.0, 0.0, acc)


@gluon.jit
def sum_part(
    turn, done, below, n_blocks, place, own, smem, barriers, qk_scale, CONSUMER: gl.constexpr, form
):  # fmt: skip
    """This group's rows of a program's turn-th part, which has the key blocks [below - n_blocks, below), one or more. own: the
    call, with the lengths of its sequence. Returns how many key blocks are done then, the accumulators [ROWS, columns], maxima
    [ROWS] of scores times qk_scale, and sums of P [ROWS]."""
    dtype: gl.constexpr = smem.q[0].dtype
    s_layout: gl.constexpr = product_layout(form.BLOCK_N)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(smem.v[0].shape[-1]), 2)
    AS_PAIRS: gl.constexpr = pairs_suit(form.WIDEST, form.RIGHT_BOUNDED)
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    seqlen_q, seqlen_k, window = own.seqlen_q, own.seqlen_k, own.window
    offset = seqlen_k - seqlen_q  # bottom-right: row i sees keys up to i + offset
    first = place.row + CONSUMER * ROWS
    rows = first + gl.arange(0, ROWS, layout=row_s)
    clear_begin, clear_end = form.CLEAR_BLOCKS(first, first + ROWS, seqlen_q, seqlen_k, window, form.BLOCK_N)
    n_masked = 1
    if form.RIGHT_BOUNDED:
        # blocks that only later groups see; of a part that has no others the last one, in which no row sees a key
        unseen = below - form.BLOCKS_BELOW(first + ROWS, seqlen_q, seqlen_k, window, form.BLOCK_N)
        unseen = gl.minimum(gl.maximum(unseen, 0), n_blocks - 1)
        done = pass_entries(done, unseen, barriers, CONSUMER, form)
        below -= unseen
        n_blocks -= unseen
        n_masked = gl.minimum(gl.maximum(below - clear_end, 1), n_blocks)
    n_clear = n_blocks  # from there on blocks lie under the mask's left side
    if form.LEFT_BOUNDED:
        n_clear = gl.maximum(gl.minimum(below - clear_begin, n_blocks), n_masked)
    q_tile = used_of(tiles_in(smem.q, CONSUMER), form.USED_D)
    mbarrier.wait(barriers.q_ready.index(CONSUMER), turn & 1)
    if form.Q_IN_REGISTERS:
        q_tile = loaded(q_tile, gl.DotOperandLayout(0, s_layout, 2))

    # ---- the last block, which may be ragged
    s = issue_scores(q_tile, smem, barriers, done, True, CONSUMER, form)
    if form.PINGPONG:
        signal_next_turn(CONSUMER, form.GROUPS)
    s = warpgroup_mma_wait(0, deps=[s])
    release(barriers.k_empty, done, True, K_EMPTY, form)
    query_head = place.h_kv * own.group + place.member
    seen = Seen(rows, offset, seqlen_k, window, below, done, own.score, place.sequence, query_head)
    s = with_term(s, (below - 1) * form.BLOCK_N, seen, form)
    s = form.HIDE(s, rows, (below - 1) * form.BLOCK_N, offset, seqlen_k, window, s_layout)
    peak = gl.maximum(gl.max(s, 1) * qk_scale, LOWEST)
    weights = gl.exp2(gl.fma(s, qk_scale, -peak[:, None]))
    total = sum_parts(weights)
    p = to_carry(weights, dtype, p_layout, AS_PAIRS)
    acc = zeros_for(smem.v, ROWS)
    if form.RIGHT_BOUNDED:
        acc, total, peak, p = over_keys(
            acc, total, peak, p, 1, n_masked, seen, q_tile, smem, barriers, qk_scale, CONSUMER, form, form.RESCALE, True
        )
    p = repack(p)
    acc, total, peak, p = over_keys(
        acc, total, peak, p, n_masked, n_clear, seen, q_tile, smem, barriers, qk_scale, CONSUMER, form, form.RESCALE, False
    )  # fmt: skip
    if form.LEFT_BOUNDED:
        p = repack(p)
        acc, total, peak, p = over_keys(
            acc, total, peak, p, n_clear, n_blocks, seen, q_tile, smem, barriers, qk_scale, CONSUMER, form, form.RESCALE, True
        )  # fmt: skip
    # not before, though registers may hold Q: results were wrong so (docs/experiments/equal-shares.md)
    mbarrier.arrive(barriers.q_empty.index(CONSUMER), count=1)

    # ---- the last P V
    done += n_blocks
    v_stage = (done - 1) % form.STAGES
    mbarrier.wait(barriers.v_ready.index(v_stage), ((done - 1) // form.STAGES) & 1)
    acc = add_products(of_carried(p, dtype, p_layout), tiles_in(smem.v, v_stage), acc)
    acc = products_done(acc)
    release(barriers.v_empty, done - 1, True, V_EMPTY, form)
    return done, acc, peak, gl.convert_layout(gl.sum(total, 1), row_s)
