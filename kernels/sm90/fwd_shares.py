"""Forward for Hopper whose programs have equal shares of all key blocks: that of kernels/sm90/fwd.py for calls whose tiles do
not fill the multiprocessors evenly.

By whole tiles such a call takes as long as the multiprocessor with the most of them: 304 tiles on 132 take three rounds, of
which the last has 40, and of 112 tiles under a causal mask the longest has twice as many keys as the mean. Here each program
takes the same number of key blocks (kernels/lib/hopper_shares.py). Whole tiles leave as O and lse; sums of the others' parts go
to memory, and fwd_join.py puts them together. Groups, rings and products are those of fwd_split.py.

Matrix products are shared out so by Osama et al., Stream-K, PPoPP 2023 (whole rounds first: section 5.2)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import fence_async_shared
from fa2tune.kernels.lib.hopper_forward import (
    ROWS,
    Barriers,
    Call,
    Form,
    Shared,
    await_turn,
    quotients,
    signal_next_turn,
    slots,
    where_seen,
)
from fa2tune.kernels.lib.hopper_key_parts import PartDivisors, store_parts_of_rows
from fa2tune.kernels.lib.hopper_part_sums import contributions, sum_part
from fa2tune.kernels.lib.hopper_parts import descriptors_of, shared_for
from fa2tune.kernels.lib.hopper_shares import Blocks, goes_on, next_at, produce_share, run_of, share_of
from fa2tune.search_spaces.lib.hopper import part_dims, used_by, used_columns
from fa2tune.search_spaces.lib.hopper_key_parts import HELD
from fa2tune.search_spaces.sm90 import fwd
from fa2tune.search_spaces.sm90 import fwd_shares as space
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant, Workspaces

PRODUCER_REGISTERS = gl.constexpr(fwd.PRODUCER_REGISTERS)
TILE_ROWS = gl.constexpr(space.TILE_ROWS)
GROUPS = gl.constexpr(space.TILE_ROWS // ROWS.value)
LN2 = gl.constexpr(0.6931471805599453)
_START_NEXT = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")


@gluon.jit
def _store_whole(acc, peak, total, first, inside, place, out, call, HEAD_DIM_V: gl.constexpr, form):
    """O and lse of a group's rows of a whole tile, from query ``first`` on, of which ``inside`` are there."""
    found = quotients(acc, total)
    o, lse, stride_b, stride_h, stride_m = out
    h = place.h_kv * call.group + place.member
    word = (peak + gl.log2(total)) * LN2
    r = gl.arange(0, ROWS, layout=peak.type.layout)
    if form.RIGHT_BOUNDED:
        offset = call.seqlen_k - call.seqlen_q
        word = gl.where(form.SEES_A_KEY(first + r, offset, call.seqlen_k, call.window), word, float("-inf"))
        found = where_seen(found, first, offset, call.seqlen_k, call.window, form.SEES_A_KEY, False)
    lse += (place.b * call.heads_q + h).to(gl.int64) * call.seqlen_q + first
    gl.store(lse + r, word, mask=r < inside)
    o += place.b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h + first.to(gl.int64) * stride_m
    store_parts_of_rows(found, o, stride_m, inside, HEAD_DIM_V)


@gluon.jit
def _store_part(acc, peak, total, slot, sums, CONSUMER: gl.constexpr, HEAD_DIM_V: gl.constexpr):
    """A group's sums of a tile that is not whole, of all its rows: P V [ROWS, columns], maxima and sums of P [ROWS]."""
    o_parts, stats = sums
    stats += slot * (2 * TILE_ROWS) + CONSUMER * ROWS + gl.arange(0, ROWS, layout=peak.type.layout)
    gl.store(stats, peak)
    gl.store(stats + TILE_ROWS, total)
    o_parts += (slot * TILE_ROWS + CONSUMER * ROWS).to(gl.int64) * HEAD_DIM_V
    store_parts_of_rows(acc, o_parts, HEAD_DIM_V, ROWS, HEAD_DIM_V)


@gluon.jit
def _consume(
    out, sums, smem, barriers, qk_scale, call, rounds, blocks, CONSUMER: gl.constexpr, HEAD_DIM_V: gl.constexpr, form
):  # fmt: skip
    """One consumer group: rows [CONSUMER * ROWS, (CONSUMER + 1) * ROWS) of every tile."""
    if form.PINGPONG and CONSUMER == form.GROUPS - 1:
        signal_next_turn(CONSUMER, form.GROUPS)  # the first turn is group 0's
    share = share_of(gl.program_id(0), gl.num_programs(0), call, rounds, blocks)
    done = 0  # key blocks of earlier runs
    turn = 0
    at = share.begin
    while goes_on(turn, at, share):
        run = run_of(turn, at, share, blocks, call, form)
        place = run.place
        done, acc, peak, total = sum_part(
            turn, done, run.below, run.count, place, call, smem, barriers, qk_scale, CONSUMER, form
        )
        first = place.row + CONSUMER * ROWS
        if run.whole:
            _store_whole(acc, peak, total, first, call.seqlen_q - first, place, out, call, HEAD_DIM_V, form)
        else:
            _store_part(contributions(acc, total), peak, total, run.slot, sums, CONSUMER, HEAD_DIM_V)
        at = next_at(turn, at, run, share)
        turn += 1
    if form.PINGPONG and CONSUMER == 0:
        await_turn(CONSUMER)  # the last group has passed on once more than it was passed


@gluon.jit
def fwd_hopper_shares_kernel(
    q, k, v, o, lse, o_parts, stats, qk_scale, stride_ob, stride_oh, stride_om, batch, heads_q, group, seqlen_q, seqlen_k,
    ROUNDS, blocks_of_head, blocks_of_first, blocks_more, window_left, window_right, score_first, score_second,
    q_rest, k_rest, v_rest,
    HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, REST_D: gl.constexpr, REST_DV: gl.constexpr,
    BLOCKS_BELOW: gl.constexpr, FIRST_BLOCK: gl.constexpr, CLEAR_BLOCKS: gl.constexpr, HIDE: gl.constexpr,
    SEES_A_KEY: gl.constexpr, LEFT_BOUNDED: gl.constexpr, RIGHT_BOUNDED: gl.constexpr, RAGGED: gl.constexpr,
    NEGATE: gl.constexpr, APPLY: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, NUMBERED: gl.constexpr, EARLY: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    USED_D: gl.constexpr,
):  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o [B, Hq, Sq, DV] and lse [B, Hq, Sq] of whole tiles; of
    others o_parts [programs, 2, BLOCK_M, DV], the sums of P V, and stats [programs, 2, 2, BLOCK_M], maxima of scores times
    qk_scale and sums of P, all float32. A program's second slot is of the tile that it begins, the first of another.

    q, k, v: descriptors as kernels/sm90/fwd.py has them, and qk_scale and Sk, too. No mask that is bounded on the left.
    blocks_of_head, ..., blocks_more: ``Blocks``. EARLY: the next kernel may start when all programs of this one have."""
    if EARLY:
        gl.inline_asm_elementwise(_START_NEXT, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)
    q, k, v = descriptors_of(q, q_rest), descriptors_of(k, k_rest), descriptors_of(v, v_rest)
    q_smem = shared_for(q, GROUPS, ROWS, BLOCK_D, REST_D)
    k_smem = shared_for(k, STAGES, BLOCK_N, BLOCK_D, REST_D)
    v_smem = shared_for(v, STAGES, BLOCK_N, BLOCK_DV, REST_DV)
    q_ready, q_empty = slots(GROUPS, 1), slots(GROUPS, 1)
    k_ready, v_ready = slots(STAGES, 1), slots(STAGES, 1)
    k_empty, v_empty = k_ready, v_ready  # NUMBERED: no warp arrives or waits at these
    if not NUMBERED:
        k_empty, v_empty = slots(STAGES, GROUPS), slots(STAGES, GROUPS)
    fence_async_shared()
    out = (o, lse, stride_ob, stride_oh, stride_om)
    sums = (o_parts, stats)
    smem = Shared(q_smem, k_smem, v_smem, ())
    barriers = Barriers(q_ready, q_empty, k_ready, k_empty, v_ready, v_empty)
    by = PartDivisors((), (), (), ())
    call = Call(
        batch, heads_q, group, seqlen_q, seqlen_k, 0, (window_left, window_right), (score_first, score_second), by
    )  # fmt: skip
    blocks = Blocks(blocks_of_head, blocks_of_first, blocks_more)
    form: gl.constexpr = Form(
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, GROUPS=GROUPS, STAGES=STAGES, V_HALVES=False, Q_STAGES=1, PINGPONG=PINGPONG,
        RESCALE="lazy", Q_IN_REGISTERS=Q_IN_REGISTERS, O_THROUGH="own", NUMBERED=NUMBERED, USED_D=USED_D,
        COLUMNS=BLOCK_D + REST_D + BLOCK_DV + REST_DV,
        WIDEST=max(BLOCK_D + REST_D, BLOCK_DV + REST_DV), NEGATE=NEGATE, APPLY=APPLY, RAGGED=RAGGED, BLOCKS_BELOW=BLOCKS_BELOW,
        FIRST_BLOCK=FIRST_BLOCK, CLEAR_BLOCKS=CLEAR_BLOCKS, HIDE=HIDE, SEES_A_KEY=SEES_A_KEY, LEFT_BOUNDED=LEFT_BOUNDED,
        RIGHT_BOUNDED=RIGHT_BOUNDED, LONGEST_LAST=False,
    )  # fmt: skip
    # constants stay constants only in a literal tuple, so each group's is written out
    gl.warp_specialize([
        (_consume, (out, sums, smem, barriers, qk_scale, call, ROUNDS, blocks, 0, HEAD_DIM_V, form)),
        (_consume, (out, sums, smem, barriers, qk_scale, call, ROUNDS, blocks, 1, HEAD_DIM_V, form)),
        (produce_share, (q, k, v, smem, barriers, call, ROUNDS, blocks, form)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def _scalars(problem: Problem, config: Config, _early: bool) -> dict[str, int]:
    return space.scalars(problem, config)


def _workspaces(problem: Problem, config: Config) -> Workspaces:
    slots = config["SHARES"], 2
    return {
        "o_parts": ((*slots, space.TILE_ROWS, problem.head_dim_v), "fp32"), "stats": ((*slots, 2, space.TILE_ROWS), "fp32"),
    }  # fmt: skip


VARIANT = Variant(
    role="fwd_shares",
    kernel=fwd_hopper_shares_kernel,
    space=space.SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "lse": "fp32", "o_parts": "fp32", "stats": "fp32", "q_rest": "", "k_rest": "",
             "v_rest": ""},
    descriptors={"q": (fwd.ROWS, "BLOCK_D"), "k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV"),
                 "q_rest": (fwd.ROWS, "REST_D"), "k_rest": ("BLOCK_N", "REST_D"), "v_rest": ("BLOCK_N", "REST_DV")},
    rest_of={"q_rest": "q", "k_rest": "k", "v_rest": "v"},
    grid=lambda _problem, config, _sm_count, _early: config["SHARES"],
    grid_dimensions=("SHARES",),
    constants=lambda spec, config: {
        "NEGATE": spec.negate, **part_dims(spec, config), "CONSUMER_REGISTERS": HELD[config["BLOCK_M"]][2],
        "USED_D": used_columns(spec),
    },
    used=lambda spec, config: used_by(spec, part_dims(spec, config), ("DV",)),
    min_arch=90,
    max_arch=90,
    scalars=_scalars,
    after=("sm90/fwd_join",),
    passes_on=lambda _spec, config: {
        name: config[name] for name in ("BLOCK_M", "BLOCK_N", "SHARES", "ROUNDS", "EARLY")
    },
    workspaces=_workspaces,
)  # fmt: skip
