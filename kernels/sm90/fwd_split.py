"""Forward for Hopper whose keys are split among programs: that of kernels/sm90/fwd.py for calls of few tiles.

Each program takes one part of the keys that its tile of queries sees; kernels/portable/fwd_combine.py puts the parts together.
Groups, rings and products are those of kernels/sm90/fwd.py with one Q tile, and RESCALE is "lazy". Packed sequences: tiles come
from its queue."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.common import LOWEST
from fa2tune.kernels.lib.division import divisors
from fa2tune.kernels.lib.hopper import fence_async_shared
from fa2tune.kernels.lib.hopper_forward import (
    ROWS,
    Barriers,
    Call,
    Form,
    Shared,
    await_turn,
    signal_next_turn,
    slots,
)
from fa2tune.kernels.lib.hopper_key_parts import (
    PartDivisors,
    Sums,
    blocks_of,
    packed_place,
    place_of,
    store_sums,
    turns_of,
)
from fa2tune.kernels.lib.hopper_part_sums import contributions, sum_part
from fa2tune.kernels.lib.hopper_parts import descriptors_of, shared_for
from fa2tune.kernels.lib.hopper_queue import make_queue, produce_parts, received_tile, sequence_of
from fa2tune.search_spaces.lib.hopper import part_dims, used_by, used_columns
from fa2tune.search_spaces.lib.hopper_key_parts import HELD
from fa2tune.search_spaces.portable.packed_order import order_and_counter
from fa2tune.search_spaces.sm90 import fwd, fwd_split
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant, Workspaces

PRODUCER_REGISTERS = gl.constexpr(fwd.PRODUCER_REGISTERS)
#: Parameters: the divisors of ``PartDivisors``.
BY = ("by_tiles", "by_group", "by_parts", "by_heads")
_START_NEXT = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")


@gluon.jit
def _one_part(
    turn, done, place, own, sums, smem, barriers, qk_scale, call, CONSUMER: gl.constexpr, HEAD_DIM_V: gl.constexpr, form
):  # fmt: skip
    """This group's rows of a program's turn-th part. own: as call, with the lengths of its sequence. Returns how many key
    blocks are done then."""
    below, n_blocks, used = blocks_of(place, own, sums.parts, form)
    done, acc, peak, row_total = sum_part(
        turn, done, below, n_blocks, place, own, smem, barriers, qk_scale, CONSUMER, form
    )
    row_total = gl.where(used, row_total, 0.0)
    peak = gl.where(used, peak, LOWEST)
    kept = contributions(acc, row_total)
    first = place.row + CONSUMER * ROWS
    if form.LEFT_BOUNDED or form.RIGHT_BOUNDED or form.RAGGED:
        rows = first + gl.arange(0, ROWS, layout=peak.type.layout)
        sees_a_key = form.SEES_A_KEY(rows, own.seqlen_k - own.seqlen_q, own.seqlen_k, own.window)
        if form.RAGGED:
            sees_a_key = sees_a_key & (own.seqlen_k > 0)
        row_total = gl.where(sees_a_key, row_total, -1.0)
    store_sums(kept, peak, row_total, place.before + first, own.seqlen_q - first, place, sums, call, HEAD_DIM_V)
    return done


@gluon.jit
def _consume(sums, smem, barriers, queue, qk_scale, call, CONSUMER: gl.constexpr, HEAD_DIM_V: gl.constexpr, form):
    """One consumer group: rows [CONSUMER * ROWS, (CONSUMER + 1) * ROWS) of every tile."""
    if form.PINGPONG and CONSUMER == form.GROUPS - 1:
        signal_next_turn(CONSUMER, form.GROUPS)  # the first turn is group 0's
    done = 0  # key blocks of earlier parts
    if form.RAGGED:
        turn = 0
        head, start, end_q, rows, _end_k, keys = received_tile(queue, 0, 4)
        while head >= 0:
            place = packed_place(head, start, end_q, rows, sequence_of(queue, turn, 4), call, sums.parts)
            own = Call(1, call.heads_q, call.group, rows, keys, 0, call.window, call.score, call.by)
            done = _one_part(turn, done, place, own, sums, smem, barriers, qk_scale, call, CONSUMER, HEAD_DIM_V, form)
            turn += 1
            head, start, end_q, rows, _end_k, keys = received_tile(queue, turn, 4)
    else:
        for turn in range(turns_of(call, sums.parts, form)):
            place = place_of(turn, call, sums.parts, form)
            done = _one_part(turn, done, place, call, sums, smem, barriers, qk_scale, call, CONSUMER, HEAD_DIM_V, form)
    if form.PINGPONG and CONSUMER == 0:
        await_turn(CONSUMER)  # the last group has passed on once more than it was passed


@gluon.jit
def fwd_hopper_split_kernel(
    q, k, v, o_parts, stats, qk_scale, batch, heads_q, group, seqlen_q, seqlen_k, SPLITS, window_left, window_right,
    score_first, score_second, q_rest, k_rest, v_rest, order, taken, by_tiles, by_group, by_parts, by_heads,
    HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, REST_D: gl.constexpr, REST_DV: gl.constexpr,
    BLOCKS_BELOW: gl.constexpr, FIRST_BLOCK: gl.constexpr, CLEAR_BLOCKS: gl.constexpr, HIDE: gl.constexpr,
    SEES_A_KEY: gl.constexpr, LEFT_BOUNDED: gl.constexpr, RIGHT_BOUNDED: gl.constexpr, RAGGED: gl.constexpr,
    NEGATE: gl.constexpr, APPLY: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, NUMBERED: gl.constexpr, EARLY: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    USED_D: gl.constexpr,
):  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o_parts and stats as kernels/portable/fwd_split.py has them
    IN_PARTS, of SPLITS parts.

    q, k, v: descriptors as kernels/sm90/fwd.py has them, and qk_scale, Sk and the number of programs, too. A part in which a
    row sees no key has the sum 0 and the lowest maximum there is, so that it counts for nothing. EARLY: the next kernel may
    start when all programs of this one have. by_tiles, ..., by_heads: of a dense call, those of ``PartDivisors``.
    RAGGED: batch, lengths and order as kernels/sm90/fwd.py has them; parts are those of one batch entry that holds all rows."""
    if EARLY:
        gl.inline_asm_elementwise(_START_NEXT, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)
    GROUPS: gl.constexpr = BLOCK_M // ROWS
    q, k, v = descriptors_of(q, q_rest), descriptors_of(k, k_rest), descriptors_of(v, v_rest)
    q_smem = shared_for(q, GROUPS, ROWS, BLOCK_D, REST_D)
    k_smem = shared_for(k, STAGES, BLOCK_N, BLOCK_D, REST_D)
    v_smem = shared_for(v, STAGES, BLOCK_N, BLOCK_DV, REST_DV)
    q_ready, q_empty = slots(GROUPS, 1), slots(GROUPS, 1)
    k_ready, v_ready = slots(STAGES, 1), slots(STAGES, 1)
    k_empty, v_empty = k_ready, v_ready  # NUMBERED: no warp arrives or waits at these
    if not NUMBERED:
        k_empty, v_empty = slots(STAGES, GROUPS), slots(STAGES, GROUPS)
    queue = make_queue(order, taken, RAGGED)
    fence_async_shared()
    sums = Sums(o_parts, stats, SPLITS)
    smem = Shared(q_smem, k_smem, v_smem, ())
    barriers = Barriers(q_ready, q_empty, k_ready, k_empty, v_ready, v_empty)
    by = PartDivisors((by_tiles,), (by_group,), (by_parts,), (by_heads,))
    if RAGGED:
        batch = 1
        by = PartDivisors((), (), (), ())
    call = Call(
        batch, heads_q, group, seqlen_q, seqlen_k, 0, (window_left, window_right), (score_first, score_second), by
    )  # fmt: skip
    form: gl.constexpr = Form(
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, GROUPS=GROUPS, STAGES=STAGES, V_HALVES=False, Q_STAGES=1, PINGPONG=PINGPONG,
        RESCALE="lazy", Q_IN_REGISTERS=Q_IN_REGISTERS, O_THROUGH="own", NUMBERED=NUMBERED, USED_D=USED_D,
        COLUMNS=BLOCK_D + REST_D + BLOCK_DV + REST_DV,
        WIDEST=max(BLOCK_D + REST_D, BLOCK_DV + REST_DV), NEGATE=NEGATE, APPLY=APPLY, RAGGED=RAGGED, BLOCKS_BELOW=BLOCKS_BELOW,
        FIRST_BLOCK=FIRST_BLOCK, CLEAR_BLOCKS=CLEAR_BLOCKS, HIDE=HIDE, SEES_A_KEY=SEES_A_KEY, LEFT_BOUNDED=LEFT_BOUNDED,
        RIGHT_BOUNDED=RIGHT_BOUNDED, LONGEST_LAST=False,
    )  # fmt: skip
    # constants stay constants only in a literal tuple, so each group's is written out
    if GROUPS == 1:
        gl.warp_specialize([
            (_consume, (sums, smem, barriers, queue, qk_scale, call, 0, HEAD_DIM_V, form)),
            (produce_parts, (q, k, v, smem, barriers, queue, call, SPLITS, form)),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (sums, smem, barriers, queue, qk_scale, call, 0, HEAD_DIM_V, form)),
            (_consume, (sums, smem, barriers, queue, qk_scale, call, 1, HEAD_DIM_V, form)),
            (produce_parts, (q, k, v, smem, barriers, queue, call, SPLITS, form)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def _grid(problem: Problem, config: Config, sm_count: int, _early: bool) -> int:
    return min(fwd_split.programs(problem, config), sm_count * HELD[config["BLOCK_M"]][0])


def _scalars(problem: Problem, config: Config, _early: bool) -> dict[str, int]:
    if problem.extent.ragged:
        return dict.fromkeys(BY, 0)
    tiles = problem.query_tiles(config["BLOCK_M"]) // problem.batch
    return divisors(BY, tiles, problem.group, config["SPLITS"], problem.heads_kv)


def _workspaces(problem: Problem, config: Config) -> Workspaces:
    return order_and_counter(problem, config["BLOCK_M"]) if problem.extent.ragged else {}


VARIANT = Variant(
    role="fwd_split",
    kernel=fwd_hopper_split_kernel,
    space=fwd_split.SPACE,
    tensors={"q": "", "k": "", "v": "", "o_parts": "fp32", "stats": "fp32", "q_rest": "", "k_rest": "", "v_rest": "",
             "order": "i32", "taken": "i32"},
    descriptors={"q": (fwd.ROWS, "BLOCK_D"), "k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV"),
                 "q_rest": (fwd.ROWS, "REST_D"), "k_rest": ("BLOCK_N", "REST_D"), "v_rest": ("BLOCK_N", "REST_DV")},
    rest_of={"q_rest": "q", "k_rest": "k", "v_rest": "v"},
    grid=_grid,
    constants=lambda spec, config: {
        "NEGATE": spec.negate, **part_dims(spec, config), "CONSUMER_REGISTERS": HELD[config["BLOCK_M"]][2],
        "USED_D": used_columns(spec),
    },
    used=lambda spec, config: used_by(spec, part_dims(spec, config), ("DV",)),
    min_arch=90,
    max_arch=90,
    packed_before=("portable/packed_order",),
    passes_on=lambda spec, config: {"BLOCK_Q": config["BLOCK_M"], "EARLY": True} if spec.ragged else {},
    early=lambda problem, _config, _sm_count: problem.extent.ragged,
    workspaces=_workspaces,
    scalars=_scalars,
)  # fmt: skip
