"""A query tile of kernels/sm90/fwd.py over key blocks: scores, softmax, P V. Device side."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import mbarrier
from fa2tune.kernels.lib.hopper_forward import (
    K_EMPTY,
    V_EMPTY,
    await_turn,
    hand_back,
    pass_turn_on,
    shrunk,
    words_suit,
)
from fa2tune.kernels.lib.hopper_key_tiles import (
    add_keys,
    hidden,
    keys_to_carry,
    left_layout,
    negated,
    products_of_keys,
    row_maxima,
    scores_done,
    sums_of,
    weights_of,
)
from fa2tune.kernels.lib.hopper_parts import of_first_keys, products_done


class Seen(NamedTuple):
    """What a group's rows of a tile see of its keys."""

    rows: gl.tensor  #: [ROWS], counted in their sequence
    offset: gl.tensor
    seqlen_k: gl.tensor
    window: tuple
    below: gl.tensor  #: the group's last key block, and one
    done: gl.tensor  #: key blocks of earlier tiles


@gluon.jit
def issue_scores(q_tile, smem, barriers, entry, pred, CONSUMER: gl.constexpr, form):
    """Starts Q K^T [ROWS, BLOCK_N] of a ring entry, once it is there and, with PINGPONG, it is this group's turn. Without
    pred it does not wait for the entry and multiplies what lies there."""
    stage = entry % form.STAGES
    mbarrier.wait(barriers.k_ready.index(stage), (entry // form.STAGES) & 1, pred=pred)
    if form.PINGPONG:
        await_turn(CONSUMER)
    return products_of_keys(q_tile, smem.k, stage, form.BLOCK_N)


@gluon.jit
def over_keys(
    acc, total, peak, p, begin, end, seen, q_tile, smem, barriers, qk_scale, CONSUMER: gl.constexpr, form,
    RESCALE: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Key blocks [begin, end), counted back from block ``below`` - 1: Q K^T of block j is in flight together with P V of
    block j - 1, whose P is carried. RESCALE "never": no score times qk_scale exceeds peak by more than P's type can hold."""
    v_smem = of_first_keys(smem.v, form.BLOCK_N)
    dtype: gl.constexpr = v_smem[0].dtype
    p_layout: gl.constexpr = left_layout(v_smem[0].shape[-1])
    AS_WORDS: gl.constexpr = words_suit(form.WIDEST, form.RIGHT_BOUNDED)
    for j in range(begin, end):
        entry = seen.done + j
        v_stage = (entry - 1) % form.STAGES
        s_next = issue_scores(q_tile, smem, barriers, entry, True, CONSUMER, form)
        mbarrier.wait(barriers.v_ready.index(v_stage), ((entry - 1) // form.STAGES) & 1)
        o_next = add_keys(p, smem.v, v_stage, acc, dtype, form.BLOCK_N)
        if form.PINGPONG:
            pass_turn_on(CONSUMER, form.GROUPS)
        s = scores_done(s_next, len(acc), form.BLOCK_N)
        hand_back(barriers.k_empty, entry, True, K_EMPTY, form)
        if form.NEGATE:
            s = negated(s, form.BLOCK_N)
        if MASK:
            column = (seen.below - 1 - j) * form.BLOCK_N
            s = hidden(s, seen.rows, column, seen.offset, seen.seqlen_k, seen.window, form.HIDE, form.BLOCK_N)
        if RESCALE == "never":
            weights = weights_of(s, qk_scale, peak, form.BLOCK_N)
            total += sums_of(weights, form.BLOCK_N)
        else:
            new_peak = gl.maximum(peak, row_maxima(s, form.BLOCK_N) * qk_scale)
            if RESCALE == "lazy":
                new_peak = gl.where(new_peak - peak > 8.0, new_peak, peak)
            shrink = gl.exp2(peak - new_peak)
            weights = weights_of(s, qk_scale, new_peak, form.BLOCK_N)
            total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + sums_of(
                weights, form.BLOCK_N
            )
            peak = new_peak
        next_p = keys_to_carry(weights, dtype, p_layout, AS_WORDS, form.BLOCK_N)
        acc = products_done(o_next)
        hand_back(barriers.v_empty, entry - 1, True, V_EMPTY, form)
        if RESCALE != "never":
            acc = shrunk(acc, shrink, RESCALE == "lazy")
        p = next_p
    return acc, total, peak, p
