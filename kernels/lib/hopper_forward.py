"""What surrounds the products of kernels/sm90/fwd.py: a program's tiles, the warp that loads, turns, masks, sums.

What travels together from function to function is a named tuple. Partitions get its fields in their order; another one is
other machine code, and Triton's cache, whose key holds no such class, does not see it change."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.division import banded, divide
from fa2tune.kernels.lib.hopper import mbarrier, named_barrier_arrive_if, named_barrier_sync
from fa2tune.kernels.lib.hopper_halves import load_halves, pass_halves
from fa2tune.kernels.lib.hopper_parts import expect_parts, load_parts, squares_of, tiles_in, used_of
from fa2tune.kernels.lib.warps import WARP, WARPGROUP
from fa2tune.search_spaces.portable import fwd_norms
from fa2tune.search_spaces.sm90 import fwd as space

#: Query rows of a consumer group: those of one wgmma.
ROWS = gl.constexpr(space.ROWS)
#: K and V that may be in use at once.
L2_BYTES = gl.constexpr(space.L2_BYTES)

#: Of fwd_norms: how many maxima a head has, and the least that a squared norm counts as.
PARTS, SMALLEST = gl.constexpr(fwd_norms.PARTS), gl.constexpr(fwd_norms.SMALLEST)

#: Named barriers, at which warps of several partitions wait; Triton takes the first ones, one a partition. A warp that
#: only arrives goes on at once, where an arrival at an mbarrier first waits for all warps of the partition.
K_EMPTY = gl.constexpr(7)  #: no warp reads the stage of K: one a stage
V_EMPTY = gl.constexpr(10)  #: nor of V
TURN = gl.constexpr(13)  #: a group may issue its products: one a group


class Form(NamedTuple):
    """What is compiled in, of the config, the head dims and the mask. Kept as gl.constexpr: assigned without, its fields would
    be values of the running program."""

    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    COLUMNS: gl.constexpr  #: of K and V together
    WIDEST: gl.constexpr  #: columns of the wider of Q and V
    USED_D: gl.constexpr  #: of those of Q and K, the first ones that are not all zeros
    STAGES: gl.constexpr
    V_HALVES: gl.constexpr  #: V's ring is that of lib/hopper_halves.py, and STAGES are K's
    Q_STAGES: gl.constexpr
    PINGPONG: gl.constexpr
    RESCALE: gl.constexpr
    Q_IN_REGISTERS: gl.constexpr
    O_THROUGH: gl.constexpr
    NUMBERED: gl.constexpr
    NEGATE: gl.constexpr
    APPLY: gl.constexpr  #: of the score term
    RAGGED: gl.constexpr
    BLOCKS_BELOW: gl.constexpr
    FIRST_BLOCK: gl.constexpr
    CLEAR_BLOCKS: gl.constexpr
    HIDE: gl.constexpr
    SEES_A_KEY: gl.constexpr
    LEFT_BOUNDED: gl.constexpr
    RIGHT_BOUNDED: gl.constexpr
    GROUPS: gl.constexpr  #: of consumers
    LONGEST_LAST: gl.constexpr  #: a head's last tiles have the most keys


class Call(NamedTuple):
    """What a launch is given. RAGGED: batch is the number of sequences, the lengths are those of all together."""

    batch: gl.tensor
    heads_q: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    heads_per_wave: gl.tensor
    window: tuple
    score: tuple  #: run-time numbers of the score term
    by: tuple  #: Divisors


class Shared(NamedTuple):
    """Shared memory, of each the parts: [slots, 1, 1, rows, columns]."""

    q: tuple
    k: tuple
    v: tuple
    o: tuple


class Barriers(NamedTuple):
    """mbarriers, one a slot."""

    q_ready: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_ready: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor


class Work(NamedTuple):
    """What a consumer group has for all of its tiles."""

    share: tuple  #: of the program, as the kernel has it
    out: tuple  #: where results go, likewise
    smem: Shared
    barriers: Barriers
    queue: tuple
    qk_scale: gl.tensor
    call: Call


@gluon.jit
def slots(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """An mbarrier a slot."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def await_turn(CONSUMER: gl.constexpr):
    """Until the group before has issued its products."""
    named_barrier_sync(TURN + CONSUMER, 2 * WARPGROUP)


@gluon.jit
def signal_next_turn(CONSUMER: gl.constexpr, GROUPS: gl.constexpr):
    named_barrier_arrive_if(True, TURN + (CONSUMER + 1) % GROUPS, 2 * WARPGROUP)


@gluon.jit
def release(empty, entry, pred, NUMBER: gl.constexpr, form):
    """This group reads a ring entry no more. NUMBERED: it arrives at a named barrier, from NUMBER on one a stage."""
    if form.NUMBERED:
        named_barrier_arrive_if(pred, NUMBER + entry % form.STAGES, WARPGROUP * form.GROUPS + WARP)
    else:
        mbarrier.arrive(empty.index(entry % form.STAGES), count=1, pred=pred)


@gluon.jit
def await_room(empty, entry, NUMBER: gl.constexpr, form):
    """The producer, until no group reads what lies where a ring entry goes."""
    if form.NUMBERED:
        if entry >= form.STAGES:
            named_barrier_sync(NUMBER + entry % form.STAGES, WARPGROUP * form.GROUPS + WARP)
    else:
        mbarrier.wait(empty.index(entry % form.STAGES), ((entry // form.STAGES) & 1) ^ 1)


@gluon.jit
def turns_of(tiles, by):
    """How many of the tiles this program takes: one of every round of as many tiles as there are programs."""
    programs = gl.num_programs(0)
    rounds = 1
    if len(by.band) > 0:  # there are no more programs than tiles, and one round takes no division
        if tiles > programs:
            rounds = tiles // programs
    else:
        rounds = tiles // programs
    return rounds + (_lane(rounds) < tiles - rounds * programs).to(gl.int32)


@gluon.jit
def _lane(turn):
    """This program's place in a round. Every other round runs backwards, which evens out tiles that get shorter and shorter."""
    return gl.where(turn % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))


@gluon.jit
def tile_of(turn, tiles, heads, heads_per_wave, by, BLOCK_M: gl.constexpr, LONGEST_LAST: gl.constexpr):
    """(first row, head, counted over the batch) of this program's turn-th tile, of ``tiles`` a head; of a turn that never
    comes, any numbers. Bands of heads as in tile_and_head of lib/common.py; under a causal mask every other band has its
    shortest tiles first, the last one its longest, so that a round that spans two bands has tiles of one length."""
    index = turn * gl.num_programs(0) + _lane(turn)
    tile, head, band = banded(index, tiles, heads, heads_per_wave, by)
    if LONGEST_LAST:
        longest_first = (divide(heads + heads_per_wave - 1, heads_per_wave, by.width) - band) % 2 == 1
        tile = gl.where(longest_first, tiles - 1 - tile, tile)
    return tile * BLOCK_M, head


@gluon.jit
def heads_in_band(seqlen_k, COLUMNS: gl.constexpr, LONGEST_LAST: gl.constexpr):
    """A band that suits the problem: heads one by one, or under a causal mask, whose tiles are to even out inside a band, the
    power of two, up to 64, whose K and V L2 holds. COLUMNS: of K and V together, 2 bytes each."""
    width = 1
    if LONGEST_LAST:
        held = L2_BYTES // (2 * COLUMNS) // seqlen_k
        for power in gl.static_range(1, 7):
            width = gl.where(held >= 1 << power, 1 << power, width)
    return width


@gluon.jit
def load_q(q, b, h, start_m, turn, smem, barriers, FIRST: gl.constexpr, LAST: gl.constexpr, form):
    """Q of the consumer groups [FIRST, LAST)."""
    for c in gl.static_range(FIRST, LAST):
        slot = (turn % form.Q_STAGES) * form.GROUPS + c
        mbarrier.wait(barriers.q_empty.index(slot), ((turn // form.Q_STAGES) & 1) ^ 1)
        expect_parts(q, barriers.q_ready.index(slot))
        load_parts(q, b, h, start_m + c * ROWS, barriers.q_ready.index(slot), smem.q, slot)


@gluon.jit
def _load_k(k, b, h, row, entry, smem, barriers, form):
    """K of a key block, from key ``row`` on, into its entry of the ring."""
    stage = entry % form.STAGES
    await_room(barriers.k_empty, entry, K_EMPTY, form)
    expect_parts(k, barriers.k_ready.index(stage))
    load_parts(k, b, h, row, barriers.k_ready.index(stage), smem.k, stage)


@gluon.jit
def produce(q, k, v, smem, barriers, call, form):
    """One warp: the tiles of Q, K and V, in the order in which the consumers want them. q, k, v: tuples of their parts."""
    FIRST: gl.constexpr = (
        1 if form.Q_STAGES > 1 else 0
    )  # the first group's Q comes before its K, where there is room for it
    seqlen_q, seqlen_k, window = call.seqlen_q, call.seqlen_k, call.window
    tiles = gl.cdiv(seqlen_q, form.BLOCK_M)
    heads = call.batch * call.heads_q
    done = 0  # key blocks of earlier tiles
    for turn in range(turns_of(tiles * heads, call.by)):
        start_m, head = tile_of(turn, tiles, heads, call.heads_per_wave, call.by, form.BLOCK_M, form.LONGEST_LAST)
        b = divide(head, call.heads_q, call.by.heads)
        h = head - b * call.heads_q
        h_kv = divide(h, call.group, call.by.group)
        below = form.BLOCKS_BELOW(start_m + form.BLOCK_M, seqlen_q, seqlen_k, window, form.BLOCK_N)
        n_blocks = below - form.FIRST_BLOCK(start_m, seqlen_q, seqlen_k, window, form.BLOCK_N)
        load_q(q, b, h, start_m, turn, smem, barriers, 0, FIRST, form)
        if form.V_HALVES:  # K one block ahead of V, whose room is given back later
            last = (below - 1) * form.BLOCK_N
            _load_k(k, b, h_kv, last, done, smem, barriers, form)
            load_q(q, b, h, start_m, turn, smem, barriers, FIRST, form.GROUPS, form)
            for j in range(n_blocks):
                if j + 1 < n_blocks:
                    _load_k(k, b, h_kv, last - (j + 1) * form.BLOCK_N, done + j + 1, smem, barriers, form)
                load_halves(v, b, h_kv, last - j * form.BLOCK_N, done + j, smem, barriers)
        else:
            for j in range(n_blocks):
                stage = (done + j) % form.STAGES
                row = (below - 1 - j) * form.BLOCK_N  # the last block, the one under the mask, comes first
                await_room(barriers.k_empty, done + j, K_EMPTY, form)
                expect_parts(k, barriers.k_ready.index(stage))
                load_parts(k, b, h_kv, row, barriers.k_ready.index(stage), smem.k, stage)
                if j == 0:
                    load_q(q, b, h, start_m, turn, smem, barriers, FIRST, form.GROUPS, form)
                await_room(barriers.v_empty, done + j, V_EMPTY, form)
                expect_parts(v, barriers.v_ready.index(stage))
                load_parts(v, b, h_kv, row, barriers.v_ready.index(stage), smem.v, stage)
        done += n_blocks
    await_last(barriers, done, form)


@gluon.jit
def await_last(barriers, done, form):
    """The producer leaves no warp at a named barrier: it has waited at those of the last stages, too."""
    if form.NUMBERED:
        for entry in range(gl.maximum(done, form.STAGES), done + form.STAGES):
            await_room(barriers.v_empty, entry, V_EMPTY, form)
            await_room(barriers.k_empty, entry, K_EMPTY, form)


@gluon.jit
def q_again(q_smem, slot, at_least_one, form):
    """Q's used columns [ROWS, columns] of a slot, for one more loop. What is 1 or more makes the address another one to ptxas,
    which kept for the products of one loop what it works out on the way into another, which a tile may pass by
    (docs/hopper.md). Each loop of a tile needs another number."""
    return used_of(tiles_in(q_smem, slot + gl.minimum(at_least_one - 1, 0)), form.USED_D)


@gluon.jit
def skip_blocks(start_m, done, alive, seqlen_q, seqlen_k, window, barriers, CONSUMER: gl.constexpr, form):
    """Releases the key blocks of a tile that only later groups see, where the mask is bounded on the right. Returns how many
    blocks are done then."""
    n_all = form.BLOCKS_BELOW(start_m + form.BLOCK_M, seqlen_q, seqlen_k, window, form.BLOCK_N)
    n_mine = form.BLOCKS_BELOW(start_m + (CONSUMER + 1) * ROWS, seqlen_q, seqlen_k, window, form.BLOCK_N)
    unseen = gl.where(alive, n_all - n_mine, 0)
    for entry in range(done, done + unseen):
        mbarrier.wait(barriers.k_ready.index(entry % form.STAGES), (entry // form.STAGES) & 1)
        if form.PINGPONG:
            await_turn(CONSUMER)
            signal_next_turn(CONSUMER, form.GROUPS)
        release(barriers.k_empty, entry, True, K_EMPTY, form)
        if form.V_HALVES:
            pass_halves(entry, barriers)
        else:
            mbarrier.wait(barriers.v_ready.index(entry % form.STAGES), (entry // form.STAGES) & 1)
            release(barriers.v_empty, entry, True, V_EMPTY, form)
    return done + unseen


@gluon.jit
def bound_of(q_shared, norms, keys, qk_scale, layout: gl.constexpr):
    """[ROWS]: what no score of a row of Q times qk_scale exceeds: |q| times the largest |k| (Cauchy-Schwarz). ``keys``: whose,
    a head's, or a head's of one sequence."""
    squares = squares_of(q_shared, layout)
    parts = gl.arange(0, PARTS, layout=gl.BlockedLayout([1], [WARP], [4], [0]))  # every warp has them all
    largest = gl.max(gl.load(norms + keys * PARTS + parts), 0)
    return gl.sqrt(gl.maximum(squares, SMALLEST)) * (largest * qk_scale)


@gluon.jit
def sum_parts(x):
    """x [R, N] -> [R, 4]: sums of what each of the four threads of a row holds, so no exchange between threads."""
    R: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return gl.sum(gl.sum(x.reshape([R, N // 8, 4, 2]), 3), 1)


@gluon.constexpr_function
def _rounding(dtype):
    """PTX that rounds two numbers to dtype, into one word."""
    pair = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return f"cvt.rn.{pair}.f32 $0, $2, $1;"


@gluon.constexpr_function
def pairs_suit(columns, right_bounded):
    """Whether P is carried as words. ``columns``: the wider of Q's and V's. Measured (docs/experiments.md): at head dim 64
    under a causal mask they gain up to 6 %, where three groups spill without them; without a mask they lose up to 4 %, at 128
    up to 2 %, at 256 they are level."""
    return right_bounded and columns <= 64


@gluon.jit
def to_carry(weights, dtype: gl.constexpr, layout: gl.constexpr, AS_PAIRS: gl.constexpr):
    """Weights [R, N] rounded to dtype, as they go from one trip of a loop, or from one loop, to the next: [R, N] in a product's
    layout, or AS_PAIRS [R, N / 2], each of the values of two columns side by side. 16-bit values may be kept, spilled and put
    together one by one; words may not, but are not made before the product that reads the last ones is done."""
    if AS_PAIRS:
        R: gl.constexpr = weights.shape[0]
        N: gl.constexpr = weights.shape[1]
        left, right = gl.split(weights.reshape([R, N // 2, 2]))
        p = gl.inline_asm_elementwise(_rounding(dtype), "=r,f,f", [left, right], dtype=gl.int32, is_pure=True, pack=1)
    else:
        p = gl.convert_layout(weights.to(dtype), layout)
    return p


@gluon.jit
def of_carried(p, dtype: gl.constexpr, layout: gl.constexpr):
    """What to_carry made, as the left factor of a product. Under Triton 3.6 nothing is moved or computed for it."""
    if p.dtype == gl.int32:
        left, right = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        p = gl.join(left, right).reshape([p.shape[0], 2 * p.shape[1]]).to(dtype, bitcast=True)
        p = gl.convert_layout(p, layout, assert_trivial=True)
    return p


@gluon.jit
def repack(p, WORDS: gl.constexpr = False):
    """p unchanged, between two loops: without this its 16-bit values are put together again in every trip of the second. WORDS:
    p may be carried as words, which ptxas else moves to the product's registers in every trip, of packed sequences."""
    if p.dtype != gl.int32:
        p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=True, pack=2)
    elif WORDS:
        p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=True, pack=1)
    return p


@gluon.jit
def repacked(p, form):
    """``repack`` of what is carried, or of both of its halves."""
    return (repack(p[0], form.RAGGED), repack(p[1], form.RAGGED)) if form.V_HALVES else repack(p, form.RAGGED)


@gluon.constexpr_function
def _rescaling(n):
    """PTX that multiplies n numbers of a thread by n others, unless all of these, in the whole warp, are 1. They are those of
    two rows: of an accumulator's registers 0 and 1 are of the one, 2 and 3 of the other, and so on."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.f32 q, ${2 * n + 2}, 0f3F800000; "
        f"or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; {products} DONE: }}"
    )


@gluon.constexpr_function
def _rescaling_operands(n):
    return ",".join([*["=f"] * n, *map(str, range(n)), *["f"] * n])


@gluon.constexpr_function
def _rescaled_at_once(columns):
    """Accumulators of a thread in one piece of PTX."""
    return min(columns // 2, 64)


@gluon.jit
def rescaled(acc, shrink):
    """acc [ROWS, N] * shrink [ROWS, 1]. Warps none of whose rows has shrink other than 1 pass it by, each for itself: a branch
    on a sum over rows would have all of a group's warps wait for each other."""
    COUNT: gl.constexpr = _rescaled_at_once(acc.shape[1])
    return gl.inline_asm_elementwise(
        _rescaling(COUNT), _rescaling_operands(COUNT), [acc, shrink], dtype=gl.float32, is_pure=False, pack=COUNT
    )


@gluon.jit
def shrunk(acc, shrink, LAZY: gl.constexpr):
    """The accumulators of all parts, their rows multiplied by shrink [ROWS]; LAZY: as ``rescaled`` does."""
    found = (_shrunk(acc[0], shrink, LAZY),)
    if len(acc) > 1:
        found = (found[0], _shrunk(acc[1], shrink, LAZY))
    return found


@gluon.jit
def _shrunk(acc, shrink, LAZY: gl.constexpr):
    factor = gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return rescaled(acc, factor) if LAZY else acc * factor


@gluon.jit
def quotients(acc, row_total):
    """The accumulators of all parts over sums of rows [ROWS]."""
    found = (_quotient(acc[0], row_total),)
    if len(acc) > 1:
        found = (found[0], _quotient(acc[1], row_total))
    return found


@gluon.jit
def _quotient(acc, row_total):
    return acc * (1.0 / gl.convert_layout(row_total, gl.SliceLayout(1, acc.type.layout)))[:, None]


@gluon.jit
def where_seen(out, first, offset, seqlen_k, window, SEES_A_KEY: gl.constexpr, RAGGED: gl.constexpr):
    """O's parts, from row ``first`` on, with 0 in rows that see no key. RAGGED: seqlen_k may be 0."""
    found = (_where_seen(out[0], first, offset, seqlen_k, window, SEES_A_KEY, RAGGED),)
    if len(out) > 1:
        found = (found[0], _where_seen(out[1], first, offset, seqlen_k, window, SEES_A_KEY, RAGGED))
    return found


@gluon.jit
def _where_seen(out, first, offset, seqlen_k, window, SEES_A_KEY: gl.constexpr, RAGGED: gl.constexpr):
    rows = first + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, out.type.layout))
    seen = SEES_A_KEY(rows, offset, seqlen_k, window)
    if RAGGED:
        seen = seen & (seqlen_k > 0)
    return gl.where(seen[:, None], out, 0.0)
