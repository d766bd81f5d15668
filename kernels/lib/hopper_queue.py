"""Packed sequences in the Hopper forward: a queue of tiles. The producer takes the next one that no program had, as
kernels/portable/packed_order.py has ordered them, and sends it to the consumer groups. Device side."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import PACKED_ROWS, await_kernel_before, mbarrier
from fa2tune.kernels.lib.hopper_forward import (
    K_EMPTY,
    V_EMPTY,
    await_last,
    await_room,
    heads_in_band,
    load_q,
    produce,
)
from fa2tune.kernels.lib.hopper_grouped import load_members, members_of, packed_members, produce_grouped
from fa2tune.kernels.lib.hopper_key_parts import part_of_blocks, produce_key_parts
from fa2tune.kernels.lib.hopper_parts import expect_parts, load_parts
from fa2tune.kernels.lib.warps import WARP
from fa2tune.search_spaces.portable import packed_order as space
from fa2tune.search_spaces.sm90 import fwd as forward_space

WORDS = gl.constexpr(space.WORDS)
ROWS = gl.constexpr(forward_space.ROWS)
#: Places for tiles sent. When the producer sends tile t + 1 it has loaded Q of tile t, so every group is through with tile
#: t - 2, whose Q lay there at the latest (two slots of Q), and reads none of what was sent before tile t - 1.
PLACES = gl.constexpr(4)
#: Key blocks of a tile that are loaded after its producer has taken the next tile. A counter's and a load's latency lie under
#: them; tiles taken earlier would even out less: the one that is done first is to get the longest that is left.
AHEAD = gl.constexpr(3)
#: Of a place: its head, where packed_order leaves room, and the number of its sequence.
HEAD, SEQUENCE = gl.constexpr(5), gl.constexpr(6)
#: Behind the last number the counter is 0 again, for the next launch: each tile of a call is taken once.
_TAKE = gl.constexpr(
    "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.b32 $0, 0; "
    "@p atom.relaxed.gpu.global.inc.u32 $0, [$1], $2; }"
)
_SHARE = gl.constexpr("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;")


@gluon.jit
def make_queue(order, taken, RAGGED: gl.constexpr):
    """(order, taken, numbers, mbarriers ``sent``); () of a dense call. Word 1 of ``taken`` is the counter."""
    if RAGGED:
        numbers = gl.allocate_shared_memory(gl.int32, [PLACES, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        sent = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(PLACES):
            mbarrier.init(sent.index(i), count=1)
        return order, taken, numbers, sent
    else:
        return ()


@gluon.jit
def _take(queue, count):
    """One warp takes a number from the counter of ``count`` tiles, which its first lane gets. Nothing waits for it until
    ``_share``."""
    _, taken, _, _ = queue
    given = [(taken + 1).to(gl.int64), count - 1]
    return gl.inline_asm_elementwise(_TAKE, "=r,l,r", given, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _share(taken):
    return gl.inline_asm_elementwise(_SHARE, "=r,r", [taken], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _send(queue, turn, index, tiles, heads, heads_per_wave):
    """The producer sends its turn-th tile, which has this number in the queue. Bands of heads: as tile_of has them."""
    order, _, numbers, sent = queue
    layout: gl.constexpr = gl.BlockedLayout([1], [WARP], [1], [0])
    band = index // gl.maximum(tiles * heads_per_wave, 1)
    first = band * heads_per_wave
    width = gl.maximum(gl.minimum(heads - first, heads_per_wave), 1)  # the last band may be narrower
    inside = index - band * (tiles * heads_per_wave)
    alive = index < tiles * heads
    word = gl.arange(0, WORDS, layout=layout)
    entry = gl.load(order + WORDS * (1 + gl.where(alive, inside // width, 0)) + word)
    entry = gl.where(word == HEAD, gl.where(alive, first + inside % width, -1), entry)
    numbers.index(turn % PLACES).store(entry)
    mbarrier.arrive(sent.index(turn % PLACES), count=1)


@gluon.jit
def _number(numbers, place, WORD: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [WARP], [WARPS], [0])
    return gl.max(numbers.index(place).slice(WORD, 1).load(layout), 0)


@gluon.jit
def received_tile(queue, turn, WARPS: gl.constexpr):
    """(head, first row, row where the sequence ends, its rows, key where it ends, its keys) of this program's turn-th tile; a
    head of -1: there is none. WARPS: of the partition that asks."""
    _, _, numbers, sent = queue
    place = turn % PLACES
    mbarrier.wait(sent.index(place), (turn // PLACES) & 1)
    head = _number(numbers, place, HEAD, WARPS)
    start_m = _number(numbers, place, 0, WARPS)
    end_q = _number(numbers, place, 1, WARPS)
    rows = _number(numbers, place, 2, WARPS)
    end_k = _number(numbers, place, 3, WARPS)
    keys = _number(numbers, place, 4, WARPS)
    return head, start_m, end_q, rows, end_k, keys


@gluon.jit
def sequence_of(queue, turn, WARPS: gl.constexpr):
    """The number of the sequence of a tile that ``received_tile`` gave before; behind the last one, how many there are."""
    _, _, numbers, _ = queue
    return _number(numbers, turn % PLACES, SEQUENCE, WARPS)


@gluon.jit
def _produce_packed(q, k, v, smem, barriers, queue, call, parts, form):
    """As ``produce``, over the tiles of a queue. Coordinates are counted so that a block ends where its sequence does
    (``_addressed`` in fa2tune/launching/launch.py). parts: None, or into how many the keys of a tile are split; heads of the
    queue are then parts of query heads."""
    order, _, _, _ = queue
    await_kernel_before()  # nothing of what packed_order writes is read before
    FIRST: gl.constexpr = 1 if form.Q_STAGES > 1 else 0
    heads_q, group, window = call.heads_q, call.group, call.window
    if parts is not None:
        heads_q, group = heads_q * parts, group * parts
    tiles = gl.load(order)
    band = call.heads_per_wave
    if band == 0:
        band = gl.minimum(heads_in_band(gl.maximum(gl.load(order + 2), 1), form.COLUMNS, True) * group, heads_q)
    programs = gl.num_programs(0)
    done = 0  # key blocks of earlier tiles
    turn = 0
    taken = turn
    _send(queue, 0, gl.program_id(0), tiles, heads_q, band)
    head, start_m, end_q, rows, end_k, keys = received_tile(queue, 0, 1)
    while head >= 0:
        h_kv = head // group
        row_q = PACKED_ROWS - rows + start_m
        below = gl.maximum(form.BLOCKS_BELOW(start_m + form.BLOCK_M, rows, keys, window, form.BLOCK_N), 1)
        n_blocks = below - form.FIRST_BLOCK(start_m, rows, keys, window, form.BLOCK_N)
        h = head
        if parts is not None:
            h = head // parts
            below, n_blocks, _used = part_of_blocks(below, n_blocks, head - h * parts, parts, call.by.parts)
        row_k = PACKED_ROWS - keys + (below - 1) * form.BLOCK_N
        load_q(q, end_q, h, row_q, turn, smem, barriers, 0, FIRST, form)
        taken_at = gl.maximum(n_blocks - AHEAD, 0)
        for j in range(n_blocks):
            if j == taken_at:
                taken = _take(queue, tiles * heads_q)
            stage = (done + j) % form.STAGES
            row = row_k - j * form.BLOCK_N  # the last block, the one under the mask, comes first
            await_room(barriers.k_empty, done + j, K_EMPTY, form)
            expect_parts(k, barriers.k_ready.index(stage))
            load_parts(k, end_k, h_kv, row, barriers.k_ready.index(stage), smem.k, stage)
            if j == 0:
                load_q(q, end_q, h, row_q, turn, smem, barriers, FIRST, form.GROUPS, form)
            await_room(barriers.v_empty, done + j, V_EMPTY, form)
            expect_parts(v, barriers.v_ready.index(stage))
            load_parts(v, end_k, h_kv, row, barriers.v_ready.index(stage), smem.v, stage)
        done += n_blocks
        turn += 1
        _send(queue, turn, programs + _share(taken), tiles, heads_q, band)  # a group asks for it where this one ends
        head, start_m, end_q, rows, end_k, keys = received_tile(queue, turn, 1)
    await_last(barriers, done, form)


@gluon.jit
def produce_tiles(q, k, v, smem, barriers, queue, call, form):
    """One warp: what the consumers want of q, k and v. RAGGED: of the tiles of a queue."""
    if form.RAGGED:
        _produce_packed(q, k, v, smem, barriers, queue, call, None, form)
    else:
        produce(q, k, v, smem, barriers, call, form)


@gluon.jit
def produce_parts(q, k, v, smem, barriers, queue, call, parts, form):
    """``produce_key_parts``. RAGGED: of the tiles of a queue."""
    if form.RAGGED:
        _produce_packed(q, k, v, smem, barriers, queue, call, parts, form)
    else:
        produce_key_parts(q, k, v, smem, barriers, call, parts, form)


@gluon.jit
def _produce_packed_members(q, k, v, smem, barriers, queue, q_units, call, MEMBERS: gl.constexpr, form):
    """As ``_produce_packed``, of tiles whose rows are the query heads of a key head: heads of the queue are MEMBERS of them."""
    order, _, _, _ = queue
    await_kernel_before()  # nothing of what packed_order writes is read before
    window = call.window
    times = gl.cdiv(call.group, MEMBERS)
    heads = call.heads_q // call.group * times
    tiles = gl.load(order)
    band = gl.minimum(heads_in_band(gl.maximum(gl.load(order + 2), 1), form.COLUMNS, True) * times, heads)
    programs = gl.num_programs(0)
    done = 0  # key blocks of earlier tiles
    turn = 0
    taken = turn
    _send(queue, 0, gl.program_id(0), tiles, heads, band)
    head, start, end_q, rows, end_k, keys = received_tile(queue, 0, 1)
    while head >= 0:
        members = members_of(head, call, MEMBERS)
        h_kv = members.h_kv
        members = packed_members(members, end_q, q_units)
        below = gl.maximum(form.BLOCKS_BELOW(start + form.BLOCK_M // MEMBERS, rows, keys, window, form.BLOCK_N), 1)
        count = below - form.FIRST_BLOCK(start, rows, keys, window, form.BLOCK_N)
        row_k = PACKED_ROWS - keys + (below - 1) * form.BLOCK_N
        taken_at = gl.maximum(count - AHEAD, 0)
        for j in range(count):
            if j == taken_at:
                taken = _take(queue, tiles * heads)
            stage = (done + j) % form.STAGES
            row = row_k - j * form.BLOCK_N
            await_room(barriers.k_empty, done + j, K_EMPTY, form)
            expect_parts(k, barriers.k_ready.index(stage))
            load_parts(k, end_k, h_kv, row, barriers.k_ready.index(stage), smem.k, stage)
            if j == 0:
                load_members(q, members, PACKED_ROWS - rows + start, turn, smem, barriers, MEMBERS, form)
            await_room(barriers.v_empty, done + j, V_EMPTY, form)
            expect_parts(v, barriers.v_ready.index(stage))
            load_parts(v, end_k, h_kv, row, barriers.v_ready.index(stage), smem.v, stage)
        done += count
        turn += 1
        _send(queue, turn, programs + _share(taken), tiles, heads, band)
        head, start, end_q, rows, end_k, keys = received_tile(queue, turn, 1)
    await_last(barriers, done, form)


@gluon.jit
def produce_members(q, k, v, smem, barriers, queue, q_units, call, MEMBERS: gl.constexpr, form):
    """``produce_grouped``. RAGGED: of the tiles of a queue."""
    if form.RAGGED:
        _produce_packed_members(q, k, v, smem, barriers, queue, q_units, call, MEMBERS, form)
    else:
        produce_grouped(q, k, v, smem, barriers, call, MEMBERS, form)
