"""Tiles whose rows are (query, query head) pairs of one key head, for kernels/sm90/fwd_grouped.py: which rows a tile has, the
warp that loads them, where they are stored. Device side.

Of a tile's MEMBERS query heads, a power of two, row r is query r // MEMBERS and head r % MEMBERS. Q and O are seen through
descriptors of five dimensions (batch, key head, query, member of its group, column), whose box [1, 1, 64 / MEMBERS, MEMBERS,
columns] lies in shared memory as 64 rows. Members behind the group, and queries behind the last one, are out of bounds: they
are loaded as zeros, and stores leave them out.

Of packed sequences five dimensions leave none for each of batch and key head. What both would add is one distance, in units of
16 bytes (``_by_member`` in fa2tune/launching/launch.py). Queries are counted so that a sequence's last one is at the bound."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.division import divide
from fa2tune.kernels.lib.hopper import (
    PACKED_ROWS,
    fence_async_shared,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
)
from fa2tune.kernels.lib.hopper_forward import K_EMPTY, ROWS, V_EMPTY, await_last, await_room, tile_of, turns_of
from fa2tune.kernels.lib.hopper_parts import expect_parts, load_parts


class Members(NamedTuple):
    """Query heads of one key head: coordinates of descriptors of Q and O."""

    b: gl.tensor  #: of packed sequences PACKED_ROWS
    h_kv: gl.tensor  #: of packed sequences the distance of a sequence's end and a key head
    first: gl.tensor  #: in the group


@gluon.jit
def _rows_for(descriptor, COUNT: gl.constexpr, MEMBERS: gl.constexpr, WIDTH: gl.constexpr):
    return gl.allocate_shared_memory(
        descriptor.dtype, [COUNT, 1, 1, ROWS // MEMBERS, MEMBERS, WIDTH], descriptor.layout
    )


@gluon.jit
def rows_for(descriptors, COUNT: gl.constexpr, MEMBERS: gl.constexpr, WIDTH: gl.constexpr, REST: gl.constexpr):
    """Shared memory for so many groups' rows of Q or O, of each part. REST 0: there is one part."""
    found = (_rows_for(descriptors[0], COUNT, MEMBERS, WIDTH),)
    if REST > 0:
        found = (found[0], _rows_for(descriptors[1], COUNT, MEMBERS, REST))
    return found


@gluon.jit
def _rows_in(smem, slot):
    WIDTH: gl.constexpr = smem.shape[-1]
    return smem.index(slot).reshape([ROWS, WIDTH])


@gluon.jit
def rows_in(smem, slot):
    """[ROWS, columns] of a slot, of each part."""
    found = (_rows_in(smem[0], slot),)
    if len(smem) > 1:
        found = (found[0], _rows_in(smem[1], slot))
    return found


class GroupedDivisors(NamedTuple):
    """``Divisors`` of tiles of several heads."""

    band: tuple
    width: tuple
    rest: tuple
    group: tuple
    times: tuple  #: that a key head has MEMBERS query heads
    heads: tuple  #: key heads of a batch entry


@gluon.jit
def tiles_of(call, MEMBERS: gl.constexpr, form):
    """(tiles of each MEMBERS query heads, how many times there are so many of them)."""
    heads_kv = divide(call.heads_q, call.group, call.by.group)
    return gl.cdiv(call.seqlen_q, form.BLOCK_M // MEMBERS), call.batch * heads_kv * gl.cdiv(call.group, MEMBERS)


@gluon.jit
def place_of(turn, tiles, heads, call, MEMBERS: gl.constexpr, form):
    """(first query, which members) of this program's turn-th tile, as ``tile_of`` has them."""
    return tile_of(turn, tiles, heads, call.heads_per_wave, call.by, form.BLOCK_M // MEMBERS, form.LONGEST_LAST)


@gluon.jit
def members_of(head, call, MEMBERS: gl.constexpr):
    """What ``place_of`` counts: the members of a key head follow each other, so that tiles that read the same keys run at the
    same time."""
    times = gl.cdiv(call.group, MEMBERS)
    heads_kv = divide(call.heads_q, call.group, call.by.group)
    key_head = divide(head, times, call.by.times)
    b = divide(key_head, heads_kv, call.by.heads)
    return Members(b, key_head - b * heads_kv, (head - key_head * times) * MEMBERS)


@gluon.jit
def query_heads(head, call, MEMBERS: gl.constexpr, layout: gl.constexpr):
    """(batch entry, number of the query head of each row [ROWS, 1]) of what ``place_of`` counts."""
    members = members_of(head, call, MEMBERS)
    first = members.h_kv * call.group + members.first
    return members.b, (first + gl.arange(0, ROWS, layout=layout) % MEMBERS)[:, None]


@gluon.jit
def packed_members(members, end, units):
    """The same of a sequence that ends at row ``end`` of all; ``units``: of 16 bytes, of a row and of the query heads of a key
    head."""
    return Members(PACKED_ROWS, end * units[0] + members.h_kv * units[1], members.first)


@gluon.jit
def load_members(q, members, row, turn, smem, barriers, MEMBERS: gl.constexpr, form):
    """Q of all consumer groups, from query ``row`` on."""
    for c in gl.static_range(form.GROUPS):
        query = row + c * (ROWS // MEMBERS)
        ready = barriers.q_ready.index(c)
        mbarrier.wait(barriers.q_empty.index(c), (turn & 1) ^ 1)
        expect_parts(q, ready)
        tma_load(q[0], [members.b, members.h_kv, query, members.first, 0], ready, smem.q[0].index(c))
        if len(q) > 1:
            behind = [members.b, members.h_kv, query, members.first, smem.q[0].shape[-1]]
            tma_load(q[1], behind, ready, smem.q[1].index(c))


@gluon.jit
def produce_grouped(q, k, v, smem, barriers, call, MEMBERS: gl.constexpr, form):
    """One warp: Q, K and V of this program's tiles, in the order in which the consumers want them. q, k, v: tuples of their
    parts."""
    seqlen_q, seqlen_k, window = call.seqlen_q, call.seqlen_k, call.window
    tiles, heads = tiles_of(call, MEMBERS, form)
    done = 0  # key blocks of earlier tiles
    for turn in range(turns_of(tiles * heads, call.by)):
        row, head = place_of(turn, tiles, heads, call, MEMBERS, form)
        members = members_of(head, call, MEMBERS)
        below = form.BLOCKS_BELOW(row + form.BLOCK_M // MEMBERS, seqlen_q, seqlen_k, window, form.BLOCK_N)
        count = below - form.FIRST_BLOCK(row, seqlen_q, seqlen_k, window, form.BLOCK_N)
        for entry in range(done, done + count):
            stage = entry % form.STAGES
            key = (below - 1 - (entry - done)) * form.BLOCK_N
            await_room(barriers.k_empty, entry, K_EMPTY, form)
            expect_parts(k, barriers.k_ready.index(stage))
            load_parts(k, members.b, members.h_kv, key, barriers.k_ready.index(stage), smem.k, stage)
            if entry == done:  # room for Q is there when the tile before ends, for this K before
                load_members(q, members, row, turn, smem, barriers, MEMBERS, form)
            await_room(barriers.v_empty, entry, V_EMPTY, form)
            expect_parts(v, barriers.v_ready.index(stage))
            load_parts(v, members.b, members.h_kv, key, barriers.v_ready.index(stage), smem.v, stage)
        done += count
    await_last(barriers, done, form)


@gluon.jit
def _where_seen(out, first, offset, seqlen_k, window, MEMBERS: gl.constexpr, form):
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, out.type.layout)) // MEMBERS
    seen = form.SEES_A_KEY(rows, offset, seqlen_k, window)
    if form.RAGGED:
        seen = seen & (seqlen_k > 0)
    return gl.where(seen[:, None], out, 0.0)


@gluon.jit
def where_seen(out, first, offset, seqlen_k, window, MEMBERS: gl.constexpr, form):
    """O's parts, from query ``first`` on, with 0 in rows that see no key."""
    found = (_where_seen(out[0], first, offset, seqlen_k, window, MEMBERS, form),)
    if len(out) > 1:
        found = (found[0], _where_seen(out[1], first, offset, seqlen_k, window, MEMBERS, form))
    return found


@gluon.jit
def store_rows(out, descriptors, members, query, smem, slot):
    """A group's rows of O [ROWS, columns], rounded, from query ``query`` on, through shared memory that what was stored before
    has left by then; returns before they have left it."""
    tma_store_wait(0)
    _rows_in(smem[0], slot).store(out[0].to(smem[0].dtype))
    if len(out) > 1:
        _rows_in(smem[1], slot).store(out[1].to(smem[1].dtype))
    fence_async_shared()
    tma_store(descriptors[0], [members.b, members.h_kv, query, members.first, 0], smem[0].index(slot))
    if len(out) > 1:
        WIDTH: gl.constexpr = smem[0].shape[-1]
        tma_store(descriptors[1], [members.b, members.h_kv, query, members.first, WIDTH], smem[1].index(slot))
