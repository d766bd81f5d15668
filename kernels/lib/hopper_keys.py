"""A query tile of kernels/sm90/fwd.py over key blocks: scores, softmax, P V. Device side."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import mbarrier, warpgroup_mma_wait
from fa2tune.kernels.lib.hopper_forward import (
    K_EMPTY,
    ROWS,
    V_EMPTY,
    await_turn,
    hand_back,
    of_carried,
    pass_turn_on,
    shrunk,
    sum_parts,
    to_carry,
    words_suit,
)
from fa2tune.kernels.lib.hopper_parts import add_products, product_layout, product_of_rows, products_done, tiles_in


@gluon.jit
def issue_scores(
    q_tile, k_smem, k_ready, entry, pred, CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PINGPONG: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Starts Q K^T [ROWS, BLOCK_N] of a ring entry, once it is there and, with PINGPONG, it is this group's turn. Without
    pred it does not wait for the entry and multiplies what lies there."""
    stage = entry % STAGES
    mbarrier.wait(k_ready.index(stage), (entry // STAGES) & 1, pred=pred)
    if PINGPONG:
        await_turn(CONSUMER)
    k_tile = tiles_in(k_smem, stage)
    return product_of_rows(q_tile, k_tile, gl.zeros([ROWS, BLOCK_N], gl.float32, layout))


@gluon.jit
def over_keys(
    acc, total, peak, p, begin, end, done, below, q_tile, smem, barriers, rows, offset, seqlen_k, window, qk_scale,
    CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WIDEST: gl.constexpr, STAGES: gl.constexpr,
    PINGPONG: gl.constexpr, RESCALE: gl.constexpr, NUMBERED: gl.constexpr, NEGATE: gl.constexpr, HIDE: gl.constexpr,
    RIGHT_BOUNDED: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Key blocks [begin, end), counted back from block ``below`` - 1: Q K^T of block j is in flight together with P V of
    block j - 1, whose P is carried. RESCALE "never": no score times qk_scale exceeds peak by more than P's type can hold."""
    _, k_smem, v_smem, _ = smem
    _, _, k_ready, k_empty, v_ready, v_empty = barriers
    GROUPS: gl.constexpr = BLOCK_M // ROWS
    dtype: gl.constexpr = v_smem[0].dtype
    s_layout: gl.constexpr = product_layout(BLOCK_N)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(v_smem[0].shape[-1]), 2)
    AS_WORDS: gl.constexpr = words_suit(WIDEST, RIGHT_BOUNDED)
    for j in range(begin, end):
        entry = done + j
        v_stage = (entry - 1) % STAGES
        s_next = issue_scores(q_tile, k_smem, k_ready, entry, True, CONSUMER, BLOCK_N, STAGES, PINGPONG, s_layout)
        mbarrier.wait(v_ready.index(v_stage), ((entry - 1) // STAGES) & 1)
        o_next = add_products(of_carried(p, dtype, p_layout), tiles_in(v_smem, v_stage), acc)
        if PINGPONG:
            pass_turn_on(CONSUMER, GROUPS)
        s = warpgroup_mma_wait(len(acc), deps=[s_next])
        hand_back(k_empty, entry, True, K_EMPTY, STAGES, GROUPS, NUMBERED)
        if NEGATE:
            s = -s
        if MASK:
            s = HIDE(s, rows, (below - 1 - j) * BLOCK_N, offset, seqlen_k, window, s_layout)
        if RESCALE == "never":
            weights = gl.exp2(gl.fma(s, qk_scale, -peak[:, None]))
            total += sum_parts(weights)
        else:
            new_peak = gl.maximum(peak, gl.max(s, 1) * qk_scale)
            if RESCALE == "lazy":
                new_peak = gl.where(new_peak - peak > 8.0, new_peak, peak)
            shrink = gl.exp2(peak - new_peak)
            weights = gl.exp2(gl.fma(s, qk_scale, -new_peak[:, None]))
            total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + sum_parts(
                weights
            )
            peak = new_peak
        next_p = to_carry(weights, dtype, p_layout, AS_WORDS)
        acc = products_done(o_next)
        hand_back(v_empty, entry - 1, True, V_EMPTY, STAGES, GROUPS, NUMBERED)
        if RESCALE != "never":
            acc = shrunk(acc, shrink, RESCALE == "lazy")
        p = next_p
    return acc, total, peak, p
