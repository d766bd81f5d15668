"""FlashAttention forward for Hopper: one warp feeds K and V by TMA, groups of four warps multiply and exponentiate."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.division import BY, Divisors, divide_with_rest, of_bands
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
    bound_of,
    heads_in_band,
    of_carried,
    pairs_suit,
    q_again,
    quotients,
    release,
    repacked,
    signal_next_turn,
    skip_blocks,
    sum_parts,
    tile_of,
    to_carry,
    turns_of,
    where_seen,
)
from fa2tune.kernels.lib.hopper_halves import ENTRIES, add_halves, halves_to_carry, release_halves
from fa2tune.kernels.lib.hopper_keys import Seen, issue_scores, over_keys, with_term
from fa2tune.kernels.lib.hopper_parts import (
    add_products,
    descriptors_of,
    first_parts,
    loaded,
    product_layout,
    products_done,
    shared_for,
    store_in_halves,
    store_parts,
    tiles_in,
    used_of,
    zeros_for,
)
from fa2tune.kernels.lib.hopper_queue import make_queue, produce_tiles, received_tile, sequence_of
from fa2tune.search_spaces.lib.hopper import used_by, used_columns
from fa2tune.search_spaces.portable.fwd_norms import norms_shape
from fa2tune.search_spaces.portable.packed_order import order_and_counter
from fa2tune.search_spaces.sm90 import fwd as space
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant, Workspaces

PRODUCER_REGISTERS = gl.constexpr(space.PRODUCER_REGISTERS)
LN2 = gl.constexpr(0.6931471805599453)
#: Start of the running row maximum, as in kernels/lib/common.py.
LOWEST = gl.constexpr(-3.0e38)
#: With RESCALE "never": how far, as a power of two, the bound of a row's scores may lie above the highest score seen of it.
LOOSEST = gl.constexpr(space.LOOSEST)
LOOSEST_FP16 = gl.constexpr(space.LOOSEST_FP16)
#: And what P may reach in fp16, which has five bits of exponent: its largest is then not yet infinite.
HEADROOM_FP16 = gl.constexpr(space.HEADROOM_FP16)
#: Rounding moves larger ones, and scores, by more than P has room for.
LARGEST_BOUND = gl.constexpr(space.LARGEST_BOUND)


class Outputs(NamedTuple):
    """Global memory, but for what the producer loads."""

    o: tuple  #: descriptors of its parts
    lse: gl.tensor  #: pointer to [B, Hq, Sq]
    norms: gl.tensor  #: pointer, of bound_of


class Share(NamedTuple):
    """A program's tiles in a dense call."""

    tiles: gl.tensor  #: of a head
    heads: gl.tensor  #: of all batch entries
    turns: gl.tensor  #: tiles of this program
    offset: gl.tensor


@gluon.jit
def _tile_of(turn, share, call, form):
    return tile_of(turn, share.tiles, share.heads, call.heads_per_wave, call.by, form.BLOCK_M, form.LONGEST_LAST)


@gluon.jit
def _one_tile(ahead, done, start_m, head, end_q, seqlen_q, seqlen_k, turn, work, CONSUMER: gl.constexpr, form):
    """This group's rows of a program's turn-th tile. ahead: its first block's scores, if Q_STAGES is 2. Returns what the next
    tile is called with: (ahead, done, start_m, head, end_q, seqlen_q, seqlen_k). RAGGED: the last two are its sequence's, which
    ends at row end_q of all."""
    share, out, smem, barriers = work.share, work.out, work.smem, work.barriers
    queue, qk_scale, call = work.queue, work.qk_scale, work.call
    # A tile is worked out beside its own first exponentials: where the one before ends, the divisions would hold up products.
    # With one Q tile nothing could run meanwhile, and a causal mask has to know the next tile there.
    AT_FIRST: gl.constexpr = form.Q_STAGES > 1 and not form.RIGHT_BOUNDED and not form.RAGGED
    OWN_ADDRESSES: gl.constexpr = form.Q_STAGES > 1 and not form.Q_IN_REGISTERS
    # where scores are not known to be bounded
    OFTEN: gl.constexpr = "lazy" if form.RESCALE == "never" else form.RESCALE
    dtype: gl.constexpr = smem.q[0].dtype
    s_layout: gl.constexpr = product_layout(form.BLOCK_N)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(smem.v[0].shape[-1]), 2)
    AS_PAIRS: gl.constexpr = pairs_suit(form.WIDEST, form.RIGHT_BOUNDED)
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    window = call.window
    if form.Q_STAGES > 1:
        s = ahead
    if AT_FIRST:
        start_m, head = _tile_of(turn, share, call, form)
        b, h = divide_with_rest(head, call.heads_q, call.by.heads)
    offset = share.offset
    if form.RAGGED:
        offset = seqlen_k - seqlen_q
    first = start_m + CONSUMER * ROWS
    rows = first + gl.arange(0, ROWS, layout=row_s)
    below = form.BLOCKS_BELOW(first + ROWS, seqlen_q, seqlen_k, window, form.BLOCK_N)
    if form.RAGGED and not form.RIGHT_BOUNDED:
        # a sequence may have no keys; what is known to be 1 or more is none for q_again
        below = gl.maximum(below, 1)
    n_blocks = below - form.FIRST_BLOCK(start_m, seqlen_q, seqlen_k, window, form.BLOCK_N)
    clear_begin, clear_end = form.CLEAR_BLOCKS(first, first + ROWS, seqlen_q, seqlen_k, window, form.BLOCK_N)
    n_masked = 1
    if form.RIGHT_BOUNDED:
        n_masked = gl.maximum(below - clear_end, 1)
    n_clear = n_blocks  # from there on blocks lie under the mask's left side
    if form.LEFT_BOUNDED:
        n_masked = gl.minimum(n_masked, n_blocks)
        n_clear = gl.maximum(gl.minimum(below - clear_begin, n_blocks), n_masked)
    q_slot = (turn % form.Q_STAGES) * form.GROUPS + CONSUMER
    q_shared = tiles_in(smem.q, q_slot)
    if form.Q_STAGES == 1:
        if form.RIGHT_BOUNDED:
            done = skip_blocks(start_m, done, True, seqlen_q, seqlen_k, window, barriers, CONSUMER, form)
        mbarrier.wait(barriers.q_ready.index(q_slot), turn & 1)
    q_tile = used_of(q_shared, form.USED_D)
    if form.Q_IN_REGISTERS:
        q_tile = loaded(q_tile, gl.DotOperandLayout(0, s_layout, 2))
    if form.Q_STAGES == 1:
        s = issue_scores(q_tile, smem, barriers, done, True, CONSUMER, form)
        if form.PINGPONG:
            signal_next_turn(CONSUMER, form.GROUPS)
    if form.RESCALE == "never":
        keys_of = head // call.group
        if form.RAGGED:
            keys_of = keys_of * (call.batch + 1) + sequence_of(queue, turn, 4)
        bound = bound_of(q_shared, out.norms, keys_of, qk_scale, s_layout)
    if form.Q_STAGES == 1:
        s = warpgroup_mma_wait(0, deps=[s])
        release(barriers.k_empty, done, True, K_EMPTY, form)

    # ---- the last block, which may be ragged
    if form.RAGGED:
        sequence, query_head = sequence_of(queue, turn, 4), head
    else:
        sequence, query_head = divide_with_rest(head, call.heads_q, call.by.heads)
    seen = Seen(rows, offset, seqlen_k, window, below, done, call.score, sequence, query_head)
    s = with_term(s, (below - 1) * form.BLOCK_N, seen, form)
    s = form.HIDE(s, rows, (below - 1) * form.BLOCK_N, offset, seqlen_k, window, s_layout)
    peak = gl.maximum(gl.max(s, 1) * qk_scale, LOWEST)
    bounded = False
    if form.RESCALE == "never":
        HEADROOM: gl.constexpr = HEADROOM_FP16 if dtype == gl.float16 else 0.0
        MOST: gl.constexpr = LOOSEST_FP16 if dtype == gl.float16 else LOOSEST
        # rows that see none of these keys have scores above -bound; of a NaN nothing is known
        near = (bound - gl.maximum(peak, -bound) <= MOST) & (bound <= LARGEST_BOUND)
        far = gl.where(near, 0, 1)
        bounded = gl.max(far, 0) == 0
        peak = gl.where(bounded, bound - HEADROOM, peak)
    weights = gl.exp2(gl.fma(s, qk_scale, -peak[:, None]))
    total = sum_parts(weights)
    p = halves_to_carry(weights, dtype, p_layout) if form.V_HALVES else to_carry(weights, dtype, p_layout, AS_PAIRS)
    acc = zeros_for(smem.v, ROWS)
    if form.RIGHT_BOUNDED:
        acc, total, peak, p = over_keys(
            acc, total, peak, p, 1, n_masked, seen, q_tile, smem, barriers, qk_scale, CONSUMER, form, OFTEN, True
        )
    p = repacked(p, form)
    exact = n_masked
    if form.RESCALE == "never":
        exact = gl.where(bounded, n_clear, n_masked)
        if OWN_ADDRESSES and form.RIGHT_BOUNDED:
            q_tile = q_again(smem.q, q_slot, seqlen_q, form)
        acc, total, peak, p = over_keys(
            acc, total, peak, p, n_masked, exact, seen, q_tile, smem, barriers, qk_scale, CONSUMER, form, "never", False
        )
        p = repacked(p, form)
    if OWN_ADDRESSES and (form.RIGHT_BOUNDED or form.RESCALE == "never"):
        # of packed sequences under no mask the compiler knows n_blocks
        q_tile = q_again(smem.q, q_slot, n_blocks if form.RIGHT_BOUNDED or not form.RAGGED else seqlen_q, form)
    acc, total, peak, p = over_keys(
        acc, total, peak, p, exact, n_clear, seen, q_tile, smem, barriers, qk_scale, CONSUMER, form, OFTEN, False
    )
    if form.LEFT_BOUNDED:
        p = repacked(p, form)
        if OWN_ADDRESSES:
            q_tile = q_again(smem.q, q_slot, call.heads_q if form.RAGGED else call.batch, form)
        acc, total, peak, p = over_keys(
            acc, total, peak, p, n_clear, n_blocks, seen, q_tile, smem, barriers, qk_scale, CONSUMER, form, OFTEN, True
        )
    if form.O_THROUGH != "q":
        mbarrier.arrive(barriers.q_empty.index(q_slot), count=1)

    # ---- the last P V, and Q K^T of the next tile's first block
    done += n_blocks
    v_entry = done - 1
    if form.Q_STAGES > 1:
        if form.RAGGED:
            next_head, next_m, next_end, next_q, _end_k, next_k = received_tile(queue, turn + 1, 4)
            more = next_head >= 0
        else:
            more = turn + 1 < share.turns
            next_q, next_k = seqlen_q, seqlen_k
            if form.RIGHT_BOUNDED:
                next_m, next_head = _tile_of(turn + 1, share, call, form)
        if form.RIGHT_BOUNDED:
            done = skip_blocks(next_m, done, more, next_q, next_k, window, barriers, CONSUMER, form)
        q_slot = ((turn + 1) % form.Q_STAGES) * form.GROUPS + CONSUMER
        mbarrier.wait(barriers.q_ready.index(q_slot), ((turn + 1) // form.Q_STAGES) & 1, pred=more)
        s_next = issue_scores(
            used_of(tiles_in(smem.q, q_slot), form.USED_D), smem, barriers, done, more, CONSUMER, form
        )
    if form.V_HALVES:
        acc = add_halves(p, acc, v_entry, smem, barriers)
    else:
        mbarrier.wait(barriers.v_ready.index(v_entry % form.STAGES), (v_entry // form.STAGES) & 1)
        acc = add_products(of_carried(p, dtype, p_layout), tiles_in(smem.v, v_entry % form.STAGES), acc)
    if form.Q_STAGES == 1:  # the divisions run beside P V
        if form.RAGGED:
            next_head, next_m, next_end, next_q, _end_k, next_k = received_tile(queue, turn + 1, 4)
        else:
            next_m, next_head = _tile_of(turn + 1, share, call, form)
    else:
        if form.PINGPONG:
            signal_next_turn(CONSUMER, form.GROUPS)
        s = warpgroup_mma_wait(len(acc), deps=[s_next])
        release(barriers.k_empty, done, more, K_EMPTY, form)
    acc = products_done(acc)
    if form.V_HALVES:
        release_halves(v_entry, barriers)
    else:
        release(barriers.v_empty, v_entry, True, V_EMPTY, form)

    # a row whose scores are all -inf has total 0: 0 / 0 = NaN, as softmax has it; a row with no key at all is 0
    row_total = gl.sum(total, 1)
    word = (peak + gl.log2(gl.convert_layout(row_total, row_s))) * LN2
    o = quotients(acc, row_total)
    if form.LEFT_BOUNDED or form.RIGHT_BOUNDED or form.RAGGED:
        sees_a_key = form.SEES_A_KEY(rows, offset, seqlen_k, window)
        if form.RAGGED:
            sees_a_key = sees_a_key & (seqlen_k > 0)
        word = gl.where(sees_a_key, word, float("-inf"))
        o = where_seen(o, first, offset, seqlen_k, window, form.SEES_A_KEY, form.RAGGED)
    if form.RAGGED:  # the coordinates are such that the tile ends where its sequence does
        b, h, row = end_q, head, PACKED_ROWS - seqlen_q + first
        gl.store(out.lse + head.to(gl.int64) * call.seqlen_q + (end_q - seqlen_q) + rows, word, mask=rows < seqlen_q)
    else:
        gl.store(out.lse + head.to(gl.int64) * seqlen_q + rows, word, mask=rows < seqlen_q)
        row = first
        if not AT_FIRST:
            b, h = divide_with_rest(head, call.heads_q, call.by.heads)
    if form.O_THROUGH == "halves":
        store_in_halves(o, out.o, b, h, row, smem.o, CONSUMER)
    else:
        store_parts(o, out.o, b, h, row, smem.o, CONSUMER)
    if form.O_THROUGH == "q":
        tma_store_wait(0)
        mbarrier.arrive(barriers.q_empty.index(CONSUMER), count=1)
    if not AT_FIRST:
        start_m, head = next_m, next_head
    if form.RAGGED:
        end_q, seqlen_q, seqlen_k = next_end, next_q, next_k
    if form.Q_STAGES > 1:
        ahead = s
    return ahead, done, start_m, head, end_q, seqlen_q, seqlen_k


@gluon.jit
def _consume(out, smem, barriers, queue, qk_scale, call, CONSUMER: gl.constexpr, form):
    """One consumer group: rows [CONSUMER * ROWS, (CONSUMER + 1) * ROWS) of every tile."""
    seqlen_q, seqlen_k = call.seqlen_q, call.seqlen_k
    tiles = gl.cdiv(seqlen_q, form.BLOCK_M)
    heads = call.batch * call.heads_q
    offset = seqlen_k - seqlen_q  # bottom-right: row i sees keys up to i + offset
    turns = turns_of(tiles * heads, call.by)
    share = Share(tiles, heads, turns, offset)
    work = Work(share, out, smem, barriers, queue, qk_scale, call)
    done = 0  # key blocks of earlier tiles
    if form.RAGGED:
        head, start_m, end_q, seqlen_q, _end_k, seqlen_k = received_tile(queue, 0, 4)
        alive = head >= 0
    else:
        start_m, head = _tile_of(0, share, call, form)
        end_q = 0
        alive = True
    if form.PINGPONG and CONSUMER == form.GROUPS - 1:
        signal_next_turn(CONSUMER, form.GROUPS)  # the first turn is group 0's
    if form.Q_STAGES > 1:  # the scores of a tile's first block are computed while the tile before it ends
        if form.RIGHT_BOUNDED:
            done = skip_blocks(start_m, done, alive, seqlen_q, seqlen_k, call.window, barriers, CONSUMER, form)
        mbarrier.wait(barriers.q_ready.index(CONSUMER), 0, pred=alive)
        s = issue_scores(used_of(tiles_in(smem.q, CONSUMER), form.USED_D), smem, barriers, done, alive, CONSUMER, form)
        if form.PINGPONG:
            signal_next_turn(CONSUMER, form.GROUPS)
        s = warpgroup_mma_wait(0, deps=[s])
        release(barriers.k_empty, done, alive, K_EMPTY, form)
    else:
        s = 0
    if form.RAGGED:
        turn = 0
        while head >= 0:
            s, done, start_m, head, end_q, seqlen_q, seqlen_k = _one_tile(
                s, done, start_m, head, end_q, seqlen_q, seqlen_k, turn, work, CONSUMER, form
            )
            turn += 1
    else:
        for turn in range(turns):
            s, done, start_m, head, end_q, seqlen_q, seqlen_k = _one_tile(
                s, done, start_m, head, end_q, seqlen_q, seqlen_k, turn, work, CONSUMER, form
            )
    if form.PINGPONG and CONSUMER == 0:
        await_turn(CONSUMER)  # the last group has passed on once more than it was passed
    tma_store_wait(0)


@gluon.jit
def fwd_hopper_kernel(
    q, k, v, o, lse, qk_scale, batch, heads_q, group, seqlen_q, seqlen_k, HEADS_PER_WAVE, norms, window_left, window_right,
    score_first, score_second, q_rest, k_rest, v_rest, o_rest, order, taken, by_band, by_width, by_rest, by_heads, by_group,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, REST_D: gl.constexpr, REST_DV: gl.constexpr,
    BLOCKS_BELOW: gl.constexpr, FIRST_BLOCK: gl.constexpr,
    CLEAR_BLOCKS: gl.constexpr, HIDE: gl.constexpr, SEES_A_KEY: gl.constexpr, LEFT_BOUNDED: gl.constexpr,
    RIGHT_BOUNDED: gl.constexpr, RAGGED: gl.constexpr, NEGATE: gl.constexpr, APPLY: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    PINGPONG: gl.constexpr, RESCALE: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, O_THROUGH: gl.constexpr,
    NUMBERED: gl.constexpr, O_COLUMNS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, USED_D: gl.constexpr,
    DIVISORS: gl.constexpr, V_HALVES: gl.constexpr,
):  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o [B, Hq, Sq, DV], lse [B, Hq, Sq] float32, natural log.

    q, k, v, o: descriptors of blocks [1, 1, rows, columns], and of the columns behind BLOCK_D or BLOCK_DV, where REST_D or
    REST_DV is not 0, q_rest, ..., o_rest. qk_scale is |softmax_scale| * log2(e), and not 0. Sk >= 1. Rows
    that see no key: o = 0, lse = -inf. Any number of programs: each takes every n-th tile. With one consumer group two or three
    programs share a multiprocessor (maxnreg), and one's start and end of a tile lie under the other's products.
    HEADS_PER_WAVE 0: by heads_in_band. DIVISORS, of a dense call and another HEADS_PER_WAVE: by_band, ..., by_group are those
    of ``Divisors``. norms, only if RESCALE is "never": what fwd_norms_kernel makes of k.

    RAGGED: B is 1, batch the number of sequences, which lie one after the other. order: what packed_order_kernel makes of where
    they start. Programs take tiles from a queue, whose counter is word 1 of taken: 0 before and after. Rows behind the last
    sequence: o = 0, lse = -inf.
    """
    GROUPS: gl.constexpr = BLOCK_M // ROWS
    LONGEST_LAST: gl.constexpr = RIGHT_BOUNDED and not LEFT_BOUNDED
    window = (window_left, window_right)
    WIDEST: gl.constexpr = max(BLOCK_D + REST_D, BLOCK_DV + REST_DV)
    COLUMNS: gl.constexpr = BLOCK_D + REST_D + BLOCK_DV + REST_DV
    q, k = descriptors_of(q, q_rest), descriptors_of(k, k_rest)
    v, o = descriptors_of(v, v_rest), descriptors_of(o, o_rest)
    q_smem = shared_for(q, Q_STAGES * GROUPS, ROWS, BLOCK_D, REST_D)
    k_smem = shared_for(k, STAGES, BLOCK_N, BLOCK_D, REST_D)
    V_SLOTS: gl.constexpr = ENTRIES if V_HALVES else STAGES
    v_smem = shared_for(v, V_SLOTS, BLOCK_N // 2 if V_HALVES else BLOCK_N, BLOCK_DV, REST_DV)
    heads_per_wave = HEADS_PER_WAVE
    if not RAGGED and not DIVISORS and HEADS_PER_WAVE == 0:
        heads_per_wave = heads_in_band(seqlen_k, COLUMNS, LONGEST_LAST)
    o_smem = first_parts(q_smem, o) if O_THROUGH == "q" else shared_for(o, GROUPS, ROWS, O_COLUMNS, REST_DV)
    q_ready = gl.allocate_shared_memory(gl.int64, [Q_STAGES * GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES * GROUPS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES * GROUPS):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    for i in gl.static_range(STAGES, V_SLOTS):
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    queue = make_queue(order, taken, RAGGED)
    fence_async_shared()
    out = Outputs(o, lse, norms)
    smem = Shared(q_smem, k_smem, v_smem, o_smem)
    barriers = Barriers(q_ready, q_empty, k_ready, k_empty, v_ready, v_empty)
    by = Divisors((), (), (), (), ())
    if DIVISORS:
        by = Divisors((by_band,), (by_width,), (by_rest,), (by_heads,), (by_group,))
    call = Call(batch, heads_q, group, seqlen_q, seqlen_k, heads_per_wave, window, (score_first, score_second), by)
    form: gl.constexpr = Form(
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, GROUPS=GROUPS, STAGES=STAGES, V_HALVES=V_HALVES, Q_STAGES=Q_STAGES, PINGPONG=PINGPONG,
        RESCALE=RESCALE, Q_IN_REGISTERS=Q_IN_REGISTERS, O_THROUGH=O_THROUGH, NUMBERED=NUMBERED, COLUMNS=COLUMNS,
        WIDEST=WIDEST, USED_D=USED_D, NEGATE=NEGATE, APPLY=APPLY, RAGGED=RAGGED, BLOCKS_BELOW=BLOCKS_BELOW,
        FIRST_BLOCK=FIRST_BLOCK, CLEAR_BLOCKS=CLEAR_BLOCKS, HIDE=HIDE, SEES_A_KEY=SEES_A_KEY, LEFT_BOUNDED=LEFT_BOUNDED,
        RIGHT_BOUNDED=RIGHT_BOUNDED, LONGEST_LAST=LONGEST_LAST,
    )  # fmt: skip
    # constants stay constants only in a literal tuple, so each group's is written out
    if GROUPS == 1:
        gl.warp_specialize([
            (_consume, (out, smem, barriers, queue, qk_scale, call, 0, form)),
            (produce_tiles, (q, k, v, smem, barriers, queue, call, form)),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize([
            (_consume, (out, smem, barriers, queue, qk_scale, call, 0, form)),
            (_consume, (out, smem, barriers, queue, qk_scale, call, 1, form)),
            (produce_tiles, (q, k, v, smem, barriers, queue, call, form)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (out, smem, barriers, queue, qk_scale, call, 0, form)),
            (_consume, (out, smem, barriers, queue, qk_scale, call, 1, form)),
            (_consume, (out, smem, barriers, queue, qk_scale, call, 2, form)),
            (produce_tiles, (q, k, v, smem, barriers, queue, call, form)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    if NUMBERED:
        # No warp waits at these. Without a use behind the partitions Triton would give their memory to what it hands these,
        # while an mbarrier never invalidated may be written back over it later (docs/hopper.md). To have none of them cost
        # four times the spills at head dim 64, causal, while P was carried as 16-bit values; not raced since.
        for i in gl.static_range(STAGES):
            mbarrier.invalidate(k_empty.index(i))
            mbarrier.invalidate(v_empty.index(i))


def _grid(problem: Problem, config: Config, sm_count: int, _early: bool) -> int:
    tiles = problem.query_tiles(config["BLOCK_M"]) * problem.heads_q
    return min(tiles, sm_count * space.programs(config))


def _scalars(problem: Problem, config: Config, _early: bool) -> dict[str, int]:
    if not config.get("DIVISORS"):
        return dict.fromkeys(BY, 0)
    tiles = problem.query_tiles(config["BLOCK_M"]) // problem.batch
    band = config["HEADS_PER_WAVE"] or space.heads_in_band(problem, sum(space.columns(problem.specialization, config)))
    return {"HEADS_PER_WAVE": band, **of_bands(tiles, band, problem.batch, problem.heads_q, problem.group)}


def _workspaces(problem: Problem, config: Config) -> Workspaces:
    found: dict[str, tuple[tuple[int, ...], str] | str] = {}
    if config["RESCALE"] == "never":
        found["norms"] = norms_shape(problem), "fp32"
    if problem.extent.ragged:
        found |= order_and_counter(problem, config["BLOCK_M"])
    return found


VARIANT = Variant(
    serves="fwd",
    kernel=fwd_hopper_kernel,
    space=space.SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "lse": "fp32", "norms": "fp32",
             "q_rest": "", "k_rest": "", "v_rest": "", "o_rest": "", "order": "i32", "taken": "i32"},
    descriptors={"q": (space.ROWS, "BLOCK_D"), "k": ("BLOCK_N", "BLOCK_D"), "v": ("V_KEYS", "BLOCK_DV"),
                 "o": (space.ROWS, "O_COLUMNS"),
                 "q_rest": (space.ROWS, "REST_D"), "k_rest": ("BLOCK_N", "REST_D"), "v_rest": ("V_KEYS", "REST_DV"),
                 "o_rest": (space.ROWS, "REST_DV")},
    rest_of={"q_rest": "q", "k_rest": "k", "v_rest": "v", "o_rest": "o"},
    grid=_grid,
    constants=lambda spec, config: {
        "NEGATE": spec.negate,
        "DIVISORS": config.get("DIVISORS", False),
        "V_HALVES": config.get("V_HALVES", False),
        "V_KEYS": config["BLOCK_N"] // (2 if config.get("V_HALVES") else 1),
        **space.blocks(spec, config),
        "USED_D": used_columns(spec),
        "O_COLUMNS": space.o_columns(spec, config),
        "CONSUMER_REGISTERS": space.registers(config),
    },
    used=lambda spec, config: used_by(spec, space.blocks(spec, config), ("DV",)),
    min_arch=90,
    max_arch=90,
    before=("portable/fwd_norms",),
    packed_before=("portable/packed_order",),
    passes_on=lambda spec, config: {"BLOCK_Q": config["BLOCK_M"], "EARLY": True} if spec.ragged else {},
    early=lambda problem, _config, _sm_count: problem.extent.ragged,
    surrounded=lambda config, _name: config["RESCALE"] == "never",
    workspaces=_workspaces,
    scalars=_scalars,
    fitted=space.fitted,
    suited=space.suited,
)  # fmt: skip
