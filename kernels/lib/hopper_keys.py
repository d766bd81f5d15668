"""A query tile of kernels/sm90/fwd.py over key blocks: scores, softmax, P V. Device side."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import mbarrier, warpgroup_mma_wait
from fa2tune.kernels.lib.hopper_forward import (
    K_EMPTY,
    ROWS,
    V_EMPTY,
    await_turn,
    of_carried,
    pairs_suit,
    release,
    shrunk,
    signal_next_turn,
    sum_parts,
    to_carry,
)
from fa2tune.kernels.lib.hopper_halves import add_halves, halves_to_carry, release_halves
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    product_layout,
    product_of_rows,
    products_done,
    tiles_in,
    used_of,
)


class Seen(NamedTuple):
    """What a group's rows of a tile see of its keys."""

    rows: gl.tensor  #: [ROWS], counted in their sequence
    offset: gl.tensor
    seqlen_k: gl.tensor
    window: tuple
    below: gl.tensor  #: the group's last key block, and one
    done: gl.tensor  #: key blocks of earlier tiles
    score: tuple
    batch: gl.tensor  #: number of the sequence
    head: gl.tensor  #: of the query head, or of each row's [ROWS, 1]


@gluon.jit
def issue_scores(q_tile, smem, barriers, entry, pred, CONSUMER: gl.constexpr, form):
    """Starts Q K^T [ROWS, BLOCK_N] of a ring entry, once it is there and, with PINGPONG, it is this group's turn. Without
    pred it does not wait for the entry and multiplies what lies there."""
    layout: gl.constexpr = product_layout(form.BLOCK_N)
    stage = entry % form.STAGES
    mbarrier.wait(barriers.k_ready.index(stage), (entry // form.STAGES) & 1, pred=pred)
    if form.PINGPONG:
        await_turn(CONSUMER)
    k_tile = used_of(tiles_in(smem.k, stage), form.USED_D)
    return product_of_rows(q_tile, k_tile, gl.zeros([ROWS, form.BLOCK_N], gl.float32, layout))


@gluon.jit
def with_term(s, column, seen, form):
    """Products [ROWS, BLOCK_N] with the keys from ``column`` on, as the score term has them."""
    if form.NEGATE:
        s = -s
    columns = column + gl.arange(0, form.BLOCK_N, layout=gl.SliceLayout(0, s.type.layout))
    return form.APPLY(s, seen.score, seen.rows[:, None], columns[None, :], seen.offset, seen.batch, seen.head)


@gluon.jit
def over_keys(
    acc, total, peak, p, begin, end, seen, q_tile, smem, barriers, qk_scale, CONSUMER: gl.constexpr, form,
    RESCALE: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Key blocks [begin, end), counted back from block ``below`` - 1: Q K^T of block j is in flight together with P V of
    block j - 1, whose P is carried. RESCALE "never": no score times qk_scale exceeds peak by more than P's type can hold."""
    dtype: gl.constexpr = smem.v[0].dtype
    s_layout: gl.constexpr = product_layout(form.BLOCK_N)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(smem.v[0].shape[-1]), 2)
    AS_PAIRS: gl.constexpr = pairs_suit(form.WIDEST, form.RIGHT_BOUNDED)
    for j in range(begin, end):
        entry = seen.done + j
        v_stage = (entry - 1) % form.STAGES
        s_next = issue_scores(q_tile, smem, barriers, entry, True, CONSUMER, form)
        if form.V_HALVES:
            o_next = add_halves(p, acc, entry - 1, smem, barriers)
        else:
            mbarrier.wait(barriers.v_ready.index(v_stage), ((entry - 1) // form.STAGES) & 1)
            o_next = add_products(of_carried(p, dtype, p_layout), tiles_in(smem.v, v_stage), acc)
        if form.PINGPONG:
            signal_next_turn(CONSUMER, form.GROUPS)
        s = warpgroup_mma_wait(2 * len(acc) if form.V_HALVES else len(acc), deps=[s_next])
        release(barriers.k_empty, entry, True, K_EMPTY, form)
        column = (seen.below - 1 - j) * form.BLOCK_N
        s = with_term(s, column, seen, form)
        if MASK:
            s = form.HIDE(s, seen.rows, column, seen.offset, seen.seqlen_k, seen.window, s_layout)
        if RESCALE == "never":
            if form.V_HALVES:
                acc = products_done(o_next)
                release_halves(entry - 1, barriers)
            weights = gl.exp2(gl.fma(s, qk_scale, -peak[:, None]))
            total += sum_parts(weights)
        else:
            new_peak = gl.maximum(peak, gl.max(s, 1) * qk_scale)
            if RESCALE == "lazy":
                new_peak = gl.where(new_peak - peak > 8.0, new_peak, peak)
            if form.V_HALVES:  # before the exponentials: half of the next block's V has no other room
                acc = products_done(o_next)
                release_halves(entry - 1, barriers)
            shrink = gl.exp2(peak - new_peak)
            weights = gl.exp2(gl.fma(s, qk_scale, -new_peak[:, None]))
            total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + sum_parts(
                weights
            )
            peak = new_peak
        if form.V_HALVES:
            next_p = halves_to_carry(weights, dtype, p_layout)
        else:
            next_p = to_carry(weights, dtype, p_layout, AS_PAIRS)
            acc = products_done(o_next)
            release(barriers.v_empty, entry - 1, True, V_EMPTY, form)
        if RESCALE != "never":
            acc = shrunk(acc, shrink, RESCALE == "lazy")
        p = next_p
    return acc, total, peak, p
