"""Forward for Hopper whose tiles have the query heads of a key head as rows: that of kernels/sm90/fwd.py for grouped heads of
few queries, which fill no tile of their own. K and V are read once for all heads of a tile.

Groups, rings and products are those of kernels/sm90/fwd.py with one Q tile, and RESCALE is "lazy". Packed sequences: tiles come
from its queue."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.common import LOWEST
from fa2tune.kernels.lib.division import divisors
from fa2tune.kernels.lib.hopper import PACKED_ROWS, fence_async_shared, mbarrier, tma_store_wait, warpgroup_mma_wait
from fa2tune.kernels.lib.hopper_forward import (
    K_EMPTY,
    ROWS,
    V_EMPTY,
    Barriers,
    Call,
    Form,
    Shared,
    Work,
    await_turn,
    of_carried,
    pairs_suit,
    quotients,
    release,
    repack,
    signal_next_turn,
    slots,
    sum_parts,
    to_carry,
    turns_of,
)
from fa2tune.kernels.lib.hopper_grouped import (
    GroupedDivisors,
    members_of,
    packed_members,
    place_of,
    query_heads,
    rows_for,
    rows_in,
    store_rows,
    tiles_of,
    where_seen,
)
from fa2tune.kernels.lib.hopper_key_parts import pass_entries
from fa2tune.kernels.lib.hopper_keys import Seen, issue_scores, over_keys, with_term
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    descriptors_of,
    first_parts,
    loaded,
    product_layout,
    products_done,
    shared_for,
    tiles_in,
    used_of,
    zeros_for,
)
from fa2tune.kernels.lib.hopper_queue import make_queue, produce_members, received_tile, sequence_of
from fa2tune.search_spaces.lib.hopper import narrow_blocks, narrow_columns, used_by, used_columns
from fa2tune.search_spaces.portable.packed_order import order_and_counter
from fa2tune.search_spaces.sm90 import fwd, fwd_grouped
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant, Workspaces

PRODUCER_REGISTERS = gl.constexpr(fwd.PRODUCER_REGISTERS)
LN2 = gl.constexpr(0.6931471805599453)


#: Parameters: the divisors of ``GroupedDivisors``.
BY = ("by_band", "by_width", "by_rest", "by_group", "by_times", "by_heads")


class Outputs(NamedTuple):
    o: tuple  #: descriptors of its parts
    lse: gl.tensor  #: pointer to [B, Hq, Sq]
    units: tuple  #: of o, as ``packed_members`` has them


@gluon.jit
def _one_tile(
    turn, done, start, head, end_q, seqlen_q, seqlen_k, work, CONSUMER: gl.constexpr, MEMBERS: gl.constexpr, form
):
    """This group's rows of a program's turn-th tile, that of queries from ``start`` on. Returns what the next tile is called
    with: (done, start, head, end_q, seqlen_q, seqlen_k). RAGGED: the last two are its sequence's, which ends at row end_q of
    all."""
    tiles, heads = work.share
    out, smem, barriers = work.out, work.smem, work.barriers
    queue, qk_scale, call = work.queue, work.qk_scale, work.call
    QUERIES: gl.constexpr = ROWS // MEMBERS
    dtype: gl.constexpr = smem.q[0].dtype
    s_layout: gl.constexpr = product_layout(form.BLOCK_N)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(smem.v[0].shape[-1]), 2)
    AS_PAIRS: gl.constexpr = pairs_suit(form.WIDEST, form.RIGHT_BOUNDED)
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    window = call.window
    offset = seqlen_k - seqlen_q  # bottom-right: query i sees keys up to i + offset
    first = start + CONSUMER * QUERIES
    rows = first + gl.arange(0, ROWS, layout=row_s) // MEMBERS
    below = form.BLOCKS_BELOW(first + QUERIES, seqlen_q, seqlen_k, window, form.BLOCK_N)
    if form.RAGGED and not form.RIGHT_BOUNDED:
        below = gl.maximum(below, 1)  # a sequence may have no keys
    n_blocks = below - form.FIRST_BLOCK(start, seqlen_q, seqlen_k, window, form.BLOCK_N)
    clear_begin, clear_end = form.CLEAR_BLOCKS(first, first + QUERIES, seqlen_q, seqlen_k, window, form.BLOCK_N)
    n_masked = 1
    if form.RIGHT_BOUNDED:
        n_masked = gl.maximum(below - clear_end, 1)
    n_clear = n_blocks  # from there on blocks lie under the mask's left side
    if form.LEFT_BOUNDED:
        n_masked = gl.minimum(n_masked, n_blocks)
        n_clear = gl.maximum(gl.minimum(below - clear_begin, n_blocks), n_masked)
    if form.RIGHT_BOUNDED:  # blocks that only later groups see
        ends = form.BLOCKS_BELOW(start + form.BLOCK_M // MEMBERS, seqlen_q, seqlen_k, window, form.BLOCK_N)
        done = pass_entries(done, ends - below, barriers, CONSUMER, form)
    q_tile = used_of(rows_in(smem.q, CONSUMER), form.USED_D)
    mbarrier.wait(barriers.q_ready.index(CONSUMER), turn & 1)
    if form.Q_IN_REGISTERS:
        q_tile = loaded(q_tile, gl.DotOperandLayout(0, s_layout, 2))

    # ---- the last block, which may be ragged
    s = issue_scores(q_tile, smem, barriers, done, True, CONSUMER, form)
    if form.PINGPONG:
        signal_next_turn(CONSUMER, form.GROUPS)
    s = warpgroup_mma_wait(0, deps=[s])
    release(barriers.k_empty, done, True, K_EMPTY, form)
    sequence, its_heads = query_heads(head, call, MEMBERS, row_s)  # both vanish without a score term
    if form.RAGGED:
        sequence = sequence_of(queue, turn, 4)
    seen = Seen(rows, offset, seqlen_k, window, below, done, call.score, sequence, its_heads)
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
        )  # fmt: skip
    p = repack(p, form.RAGGED)
    acc, total, peak, p = over_keys(
        acc, total, peak, p, n_masked, n_clear, seen, q_tile, smem, barriers, qk_scale, CONSUMER, form, form.RESCALE, False
    )  # fmt: skip
    if form.LEFT_BOUNDED:
        p = repack(p, form.RAGGED)
        acc, total, peak, p = over_keys(
            acc, total, peak, p, n_clear, n_blocks, seen, q_tile, smem, barriers, qk_scale, CONSUMER, form, form.RESCALE, True
        )  # fmt: skip
    if form.O_THROUGH != "q":
        mbarrier.arrive(barriers.q_empty.index(CONSUMER), count=1)

    # ---- the last P V, and beside it where this tile goes and which one is next
    done += n_blocks
    v_stage = (done - 1) % form.STAGES
    mbarrier.wait(barriers.v_ready.index(v_stage), ((done - 1) // form.STAGES) & 1)
    acc = add_products(of_carried(p, dtype, p_layout), tiles_in(smem.v, v_stage), acc)
    members = members_of(head, call, MEMBERS)
    next_end, next_q, next_k = end_q, seqlen_q, seqlen_k
    if form.RAGGED:
        next_head, next_start, next_end, next_q, _end_k, next_k = received_tile(queue, turn + 1, 4)
    else:
        next_start, next_head = place_of(turn + 1, tiles, heads, call, MEMBERS, form)
    acc = products_done(acc)
    release(barriers.v_empty, done - 1, True, V_EMPTY, form)

    # a row whose scores are all -inf has total 0: 0 / 0 = NaN, as softmax has it; a row with no key at all is 0
    row_total = gl.sum(total, 1)
    word = (peak + gl.log2(gl.convert_layout(row_total, row_s))) * LN2
    o = quotients(acc, row_total)
    if form.LEFT_BOUNDED or form.RIGHT_BOUNDED or form.RAGGED:
        sees_a_key = form.SEES_A_KEY(rows, offset, seqlen_k, window)
        if form.RAGGED:
            sees_a_key = sees_a_key & (seqlen_k > 0)
        word = gl.where(sees_a_key, word, float("-inf"))
        o = where_seen(o, first, offset, seqlen_k, window, MEMBERS, form)
    member = members.first + gl.arange(0, ROWS, layout=row_s) % MEMBERS
    heads_before = members.b * call.heads_q + members.h_kv * call.group
    query = first
    if form.RAGGED:
        place = (heads_before + member).to(gl.int64) * call.seqlen_q + (end_q - seqlen_q) + rows
        members = packed_members(members, end_q, out.units)
        query = PACKED_ROWS - seqlen_q + first
    else:
        place = (heads_before + member).to(gl.int64) * seqlen_q + rows
    gl.store(out.lse + place, word, mask=(rows < seqlen_q) & (member < call.group))
    store_rows(o, out.o, members, query, smem.o, CONSUMER)
    if form.O_THROUGH == "q":
        tma_store_wait(0)
        mbarrier.arrive(barriers.q_empty.index(CONSUMER), count=1)
    return done, next_start, next_head, next_end, next_q, next_k


@gluon.jit
def _consume(out, smem, barriers, queue, qk_scale, call, CONSUMER: gl.constexpr, MEMBERS: gl.constexpr, form):
    """One consumer group: rows [CONSUMER * ROWS, (CONSUMER + 1) * ROWS) of every tile."""
    if form.PINGPONG and CONSUMER == form.GROUPS - 1:
        signal_next_turn(CONSUMER, form.GROUPS)  # the first turn is group 0's
    tiles, heads = tiles_of(call, MEMBERS, form)
    work = Work((tiles, heads), out, smem, barriers, queue, qk_scale, call)
    done = 0  # key blocks of earlier tiles
    if form.RAGGED:
        turn = 0
        head, start, end_q, seqlen_q, _end_k, seqlen_k = received_tile(queue, 0, 4)
        while head >= 0:
            done, start, head, end_q, seqlen_q, seqlen_k = _one_tile(
                turn, done, start, head, end_q, seqlen_q, seqlen_k, work, CONSUMER, MEMBERS, form
            )
            turn += 1
    else:
        start, head = place_of(0, tiles, heads, call, MEMBERS, form)
        for turn in range(turns_of(tiles * heads, call.by)):
            done, start, head, _end_q, _seqlen_q, _seqlen_k = _one_tile(
                turn, done, start, head, 0, call.seqlen_q, call.seqlen_k, work, CONSUMER, MEMBERS, form
            )
    if form.PINGPONG and CONSUMER == 0:
        await_turn(CONSUMER)  # the last group has passed on once more than it was passed
    tma_store_wait(0)


@gluon.jit
def fwd_hopper_grouped_kernel(
    q, k, v, o, lse, qk_scale, batch, heads_q, group, seqlen_q, seqlen_k, window_left, window_right,
    score_first, score_second, q_rest, k_rest, v_rest, o_rest, order, taken, q_units, q_group_units, o_units, o_group_units,
    band, by_band, by_width, by_rest, by_group, by_times, by_heads,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, REST_D: gl.constexpr, REST_DV: gl.constexpr,
    BLOCKS_BELOW: gl.constexpr, FIRST_BLOCK: gl.constexpr, CLEAR_BLOCKS: gl.constexpr, HIDE: gl.constexpr,
    SEES_A_KEY: gl.constexpr, LEFT_BOUNDED: gl.constexpr, RIGHT_BOUNDED: gl.constexpr, RAGGED: gl.constexpr,
    NEGATE: gl.constexpr, APPLY: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MEMBERS: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, O_THROUGH: gl.constexpr, NUMBERED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    USED_D: gl.constexpr,
):  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o [B, Hq, Sq, DV], lse [B, Hq, Sq] float32, natural log.

    q, o: descriptors of blocks [1, 1, 64 / MEMBERS, MEMBERS, columns] of [B, Hkv, Sq, group, columns]; k, v, the rest of each,
    qk_scale and Sk as kernels/sm90/fwd.py has them. Rows that see no key: o = 0, lse = -inf. Any number of programs: each takes
    every n-th tile. band: heads, of MEMBERS query heads each, that are given out together; by_band, ..., by_heads: those of
    ``GroupedDivisors``. RAGGED has neither.

    RAGGED: as kernels/sm90/fwd.py has it, order of tiles of BLOCK_M / MEMBERS queries. q_units, o_units: of 16 bytes, from a
    row of q and o to the next; q_group_units, o_group_units: from the query heads of a key head to the next ones."""
    GROUPS: gl.constexpr = BLOCK_M // ROWS
    LONGEST_LAST: gl.constexpr = RIGHT_BOUNDED and not LEFT_BOUNDED
    COLUMNS: gl.constexpr = BLOCK_D + REST_D + BLOCK_DV + REST_DV
    q, k = descriptors_of(q, q_rest), descriptors_of(k, k_rest)
    v, o = descriptors_of(v, v_rest), descriptors_of(o, o_rest)
    q_smem = rows_for(q, GROUPS, MEMBERS, BLOCK_D, REST_D)
    k_smem = shared_for(k, STAGES, BLOCK_N, BLOCK_D, REST_D)
    v_smem = shared_for(v, STAGES, BLOCK_N, BLOCK_DV, REST_DV)
    o_smem = first_parts(q_smem, o) if O_THROUGH == "q" else rows_for(o, GROUPS, MEMBERS, BLOCK_DV, REST_DV)
    q_ready, q_empty = slots(GROUPS, 1), slots(GROUPS, 1)
    k_ready, v_ready = slots(STAGES, 1), slots(STAGES, 1)
    k_empty, v_empty = k_ready, v_ready  # NUMBERED: no warp arrives or waits at these
    if not NUMBERED:
        k_empty, v_empty = slots(STAGES, GROUPS), slots(STAGES, GROUPS)
    queue = make_queue(order, taken, RAGGED)
    fence_async_shared()
    out = Outputs(o, lse, (o_units, o_group_units))
    q_steps = (q_units, q_group_units)
    smem = Shared(q_smem, k_smem, v_smem, o_smem)
    barriers = Barriers(q_ready, q_empty, k_ready, k_empty, v_ready, v_empty)
    if RAGGED:
        by = GroupedDivisors((), (), (), (), (), ())
    else:
        by = GroupedDivisors((by_band,), (by_width,), (by_rest,), (by_group,), (by_times,), (by_heads,))
    call = Call(
        batch, heads_q, group, seqlen_q, seqlen_k, band, (window_left, window_right), (score_first, score_second), by
    )  # fmt: skip
    form: gl.constexpr = Form(
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, GROUPS=GROUPS, STAGES=STAGES, V_HALVES=False, Q_STAGES=1, PINGPONG=PINGPONG,
        RESCALE="lazy", Q_IN_REGISTERS=Q_IN_REGISTERS, O_THROUGH=O_THROUGH, NUMBERED=NUMBERED, COLUMNS=COLUMNS, USED_D=USED_D,
        WIDEST=max(BLOCK_D + REST_D, BLOCK_DV + REST_DV), NEGATE=NEGATE, APPLY=APPLY, RAGGED=RAGGED, BLOCKS_BELOW=BLOCKS_BELOW,
        FIRST_BLOCK=FIRST_BLOCK, CLEAR_BLOCKS=CLEAR_BLOCKS, HIDE=HIDE, SEES_A_KEY=SEES_A_KEY, LEFT_BOUNDED=LEFT_BOUNDED,
        RIGHT_BOUNDED=RIGHT_BOUNDED, LONGEST_LAST=LONGEST_LAST,
    )  # fmt: skip
    # constants stay constants only in a literal tuple, so each group's is written out
    if GROUPS == 1:
        gl.warp_specialize([
            (_consume, (out, smem, barriers, queue, qk_scale, call, 0, MEMBERS, form)),
            (produce_members, (q, k, v, smem, barriers, queue, q_steps, call, MEMBERS, form)),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (out, smem, barriers, queue, qk_scale, call, 0, MEMBERS, form)),
            (_consume, (out, smem, barriers, queue, qk_scale, call, 1, MEMBERS, form)),
            (produce_members, (q, k, v, smem, barriers, queue, q_steps, call, MEMBERS, form)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def _scalars(problem: Problem, config: Config, _early: bool) -> dict[str, int]:
    if problem.extent.ragged:
        return dict.fromkeys(("band", *BY), 0)
    heads = problem.batch * fwd_grouped.query_heads(problem, config)
    band = fwd.heads_in_band(problem, sum(narrow_columns(problem.specialization)))
    tiles = problem.query_tiles(config["BLOCK_M"] // config["MEMBERS"]) // problem.batch
    times = -(-problem.group // config["MEMBERS"])
    return {"band": band, **divisors(BY, tiles * band, band, heads % band or 1, problem.group, times, problem.heads_kv)}


def _workspaces(problem: Problem, config: Config) -> Workspaces:
    if not problem.extent.ragged:
        return {}
    return order_and_counter(problem, config["BLOCK_M"] // config["MEMBERS"])


def _grid(problem: Problem, config: Config, sm_count: int, _early: bool) -> int:
    return min(fwd_grouped.programs(problem, config), sm_count * fwd_grouped.HELD[config["BLOCK_M"]][0])


VARIANT = Variant(
    role="fwd_grouped",
    kernel=fwd_hopper_grouped_kernel,
    space=fwd_grouped.SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "lse": "fp32", "q_rest": "", "k_rest": "", "v_rest": "", "o_rest": "",
             "order": "i32", "taken": "i32"},
    descriptors={"q": (1, 1, "QUERIES", "MEMBERS", "BLOCK_D"), "k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV"),
                 "o": (1, 1, "QUERIES", "MEMBERS", "BLOCK_DV"),
                 "q_rest": (1, 1, "QUERIES", "MEMBERS", "REST_D"), "k_rest": ("BLOCK_N", "REST_D"),
                 "v_rest": ("BLOCK_N", "REST_DV"), "o_rest": (1, 1, "QUERIES", "MEMBERS", "REST_DV")},
    rest_of={"q_rest": "q", "k_rest": "k", "v_rest": "v", "o_rest": "o"},
    grid=_grid,
    constants=lambda spec, config: {
        "NEGATE": spec.negate, **narrow_blocks(spec), "QUERIES": fwd.ROWS // config["MEMBERS"],
        "CONSUMER_REGISTERS": fwd_grouped.HELD[config["BLOCK_M"]][2], "USED_D": used_columns(spec),
    },
    used=lambda spec, _config: used_by(spec, narrow_blocks(spec), ("DV",)),
    min_arch=90,
    max_arch=90,
    packed_before=("portable/packed_order",),
    passes_on=lambda spec, config: {"BLOCK_Q": config["BLOCK_M"] // config["MEMBERS"], "EARLY": True} if spec.ragged else {},
    early=lambda problem, _config, _sm_count: problem.extent.ragged,
    workspaces=_workspaces,
    scalars=_scalars,
)  # fmt: skip
