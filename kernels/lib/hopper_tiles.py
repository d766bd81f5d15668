"""Which key tile a program of the fused Hopper backward works on next, and how the producer sends it to the other warps."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.division import banded, divide, divide_with_rest
from fa2tune.kernels.lib.hopper import mbarrier
from fa2tune.kernels.lib.hopper_blocks import blocks_of_part, query_blocks
from fa2tune.kernels.lib.hopper_packed import received_work
from fa2tune.kernels.lib.warps import WARP
from fa2tune.search_spaces.sm90 import bwd_fused as space

#: Keys of a tile.
BLOCK_N = gl.constexpr(space.GROUPS * space.KEYS)


class Tile(NamedTuple):
    """A key tile, and the query blocks that see it, as ``query_blocks`` has them."""

    alive: gl.tensor  #: whether there is one
    b: gl.tensor
    h_kv: gl.tensor  #: QUERY_PARTS: a part of it
    start_n: gl.tensor  #: first key in its sequence
    first: gl.tensor
    full: gl.tensor
    end: gl.tensor
    rotation: gl.tensor
    queries: gl.tensor  #: of its sequence
    keys: gl.tensor
    first_k: gl.tensor  #: row of k where the sequence starts
    own_row: gl.tensor  #: and of the workspaces
    sequence: gl.tensor  #: its number; of packed ones only where a score term wants it


@gluon.jit
def key_head(h_kv, call, form):
    """The key head of a tile, whose ``h_kv`` counts parts with QUERY_PARTS."""
    head = h_kv
    if form.QUERY_PARTS:
        head = divide(h_kv, call.group, call.by.group)
    return head


@gluon.jit
def first_query_head(h_kv, call, form):
    """Of those of a tile's key head."""
    if form.QUERY_PARTS:
        return divide(h_kv, call.group, call.by.group)
    else:
        return h_kv * call.group


@gluon.jit
def query_heads(call, form):
    """How many a key head has. QUERY_PARTS: one, and ``group`` counts parts."""
    if form.QUERY_PARTS:
        return 1
    else:
        return call.group


@gluon.jit
def make_tile_channel(LISTENERS: gl.constexpr, DYNAMIC: gl.constexpr):
    """How the producer sends LISTENERS partitions what it took: (words, mbarriers ``sent``, mbarriers ``received``), two places
    each, in turn; () without DYNAMIC."""
    if DYNAMIC:
        tile_smem = gl.allocate_shared_memory(gl.int32, [2, WARP], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        sent = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        received = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(sent.index(i), count=1)
            mbarrier.init(received.index(i), count=LISTENERS)
        return tile_smem, sent, received
    else:
        return ()


@gluon.jit
def _share(call, form):
    """(Key tiles of a head, of which a program takes so many at once, such shares of a head)."""
    tiles = gl.cdiv(call.seqlen_k, BLOCK_N)
    together = 2 if form.PAIRS else 1
    shares = gl.cdiv(tiles, together)
    return tiles, together, shares


@gluon.jit
def _count_tiles(call):
    """Key tiles of all heads."""
    return gl.cdiv(call.seqlen_k, BLOCK_N) * call.batch * call.heads_kv


@gluon.jit
def first_number(call, form):
    """Of this program's first tile. IN_ORDER: of none, so that all are taken from the counter. Then every tile that another
    waits for is taken before it, by a program that runs."""
    number = gl.program_id(0)
    if form.IN_ORDER:
        number = _count_tiles(call)
    return number


@gluon.jit
def laps_of(call, form):
    """Laps of this program, as far as it knows."""
    _tiles, together, shares = _share(call, form)
    laps = gl.cdiv(shares * call.batch * call.heads_kv, gl.num_programs(0)) * together
    if form.DYNAMIC:
        laps = 1
    return laps


@gluon.jit
def work(lap, taken, call, form):
    """(whether there is one, batch entry, key head, first key, query blocks) of this program's key tile of a lap. As
    tile_and_head of kernels/lib/common.py; causal: the first tiles are the longest. Programs that take several tiles go through
    their order forth and back, which evens the lengths out (a band's are equal, and it changes nothing), or (PAIRS) take the
    n-th tile of a head and the n-th last, or (DYNAMIC) the tile of the number taken, the next that no program had."""
    tiles, together, shares = _share(call, form)
    programs = gl.num_programs(0)
    lane = gl.program_id(0)
    if form.RIGHT_BOUNDED and not form.PAIRS:
        lane = gl.where(lap % 2 == 0, lane, programs - 1 - lane)
    index = taken if form.DYNAMIC else lap // together * programs + lane
    heads = call.batch * call.heads_kv
    tile, head, _band = banded(index, shares, heads, call.heads_per_wave, call.by)
    alive = index < shares * heads
    if form.PAIRS:
        other = tiles - 1 - tile
        alive = alive & ((lap % 2 == 0) | (other != tile))  # the tile in the middle has no other
        tile = gl.where(lap % 2 == 0, tile, other)
    if form.IN_ORDER:  # a tile adds to dQ behind the one above it, which is to be taken before
        tile = tiles - 1 - tile
    start_n = tile * BLOCK_N
    first, full, end, rotation = query_blocks(
        start_n, call.seqlen_q, call.seqlen_k, call.window, form.BLOCK_M, BLOCK_N, form.QUERY_BLOCKS, form.LEFT_BOUNDED
    )
    if form.QUERY_PARTS:
        _, part = divide_with_rest(head, call.group, call.by.group)
        first, full, end = blocks_of_part(part, call.group, call.by.group, first, full, end)
    b, h_kv = divide_with_rest(head, call.heads_kv, call.by.heads)
    return alive, b, h_kv, start_n, first, full, end, rotation


@gluon.jit
def _laps_with(lap, taken, call):
    """Laps of this program, once the number of its next tile is known: one more than this, or no more."""
    return gl.where(taken < _count_tiles(call), lap + 2, 0)


@gluon.jit
def take(lap, counter, channel, call, form):
    """The producer takes this program's tile of the next lap and sends it to the other warps: (its number, laps)."""
    tile_smem, sent, received = channel
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    if not form.IN_ORDER:
        taken = gl.num_programs(0) + taken
    slot = lap % 2
    mbarrier.wait(received.index(slot), ((lap // 2) & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [WARP], [1], [0])
    tile_smem.index(slot).store(gl.full([WARP], 0, gl.int32, layout) + taken)
    mbarrier.arrive(sent.index(slot), count=1)
    return taken, _laps_with(lap, taken, call)


@gluon.jit
def received_number(lap, channel, call, WARPS: gl.constexpr):
    """What the producer took after this lap."""
    tile_smem, sent, received = channel
    slot = lap % 2
    mbarrier.wait(sent.index(slot), (lap // 2) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [WARP], [WARPS], [0])
    taken = gl.max(tile_smem.index(slot).load(layout), 0)
    mbarrier.arrive(received.index(slot), count=1)
    return taken, _laps_with(lap, taken, call)


@gluon.jit
def next_tile(lap, taken, channel, call, WARPS: gl.constexpr, form):
    """A consumer's tile of a lap. WARPS: of its partition."""
    if form.RAGGED:
        alive, h_kv, start_n, queries, keys, first_k, own_row, sequence, first, full, end, rotation = received_work(
            lap, channel, call.window, WARPS, form
        )
        if form.QUERY_PARTS:
            first, full, end = blocks_of_part(h_kv % call.group, call.group, (), first, full, end)
        return Tile(alive, 0, h_kv, start_n, first, full, end, rotation, queries, keys, first_k, own_row, sequence)
    else:
        alive, b, h_kv, start_n, first, full, end, rotation = work(lap, taken, call, form)
        return Tile(alive, b, h_kv, start_n, first, full, end, rotation, call.seqlen_q, call.seqlen_k, 0, 0, b)


@gluon.jit
def laps_behind(lap, tile):
    """Laps of a program of packed sequences, which ends with a tile that there is not."""
    return gl.where(tile.alive, lap + 2, 0)
