"""Tiles whose keys are split among programs: which key blocks a part has, the warp that loads them, and where a part's sums go.
Device side.

A part is one of ``parts`` nearly equal runs of the key blocks that a tile visits, counted from the last one as the loops go, so
that the parts of a tile are even under any mask. A part of fewer blocks than parts may have none: it then takes one, whose sums
are not used, so that groups and producer need no case of its own."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.division import divide
from fa2tune.kernels.lib.hopper import mbarrier
from fa2tune.kernels.lib.hopper_forward import (
    K_EMPTY,
    ROWS,
    V_EMPTY,
    await_last,
    await_room,
    await_turn,
    load_q,
    release,
    signal_next_turn,
)
from fa2tune.kernels.lib.hopper_parts import expect_parts, load_parts


class PartDivisors(NamedTuple):
    """As kernels/lib/division.py has them; () where the kernel divides."""

    tiles: tuple  #: of a head
    group: tuple
    parts: tuple  #: of a tile
    heads: tuple  #: key heads of a batch entry


class Sums(NamedTuple):
    """Where the sums of all parts lie, and of how many parts."""

    o_parts: gl.tensor  #: pointer to [parts, B, Hkv, Sq * group, DV]
    stats: gl.tensor  #: pointer to [2, parts, B, Hkv, Sq * group]
    parts: gl.tensor


class Place(NamedTuple):
    """A part of a tile."""

    before: gl.tensor  #: rows of q in front of its sequence
    row: gl.tensor  #: first query
    b: gl.tensor
    h_kv: gl.tensor
    member: gl.tensor  #: which query head of the key head
    part: gl.tensor
    sequence: gl.tensor  #: number of it, which b is not of packed sequences


@gluon.jit
def turns_of(call, parts, form):
    """How many parts this program takes: every n-th one of n programs."""
    count = gl.cdiv(call.seqlen_q, form.BLOCK_M) * call.batch * call.heads_q * parts
    programs = gl.num_programs(0)
    turns = 1
    if len(call.by.parts) > 0:  # there are no more programs than parts, and one turn takes no division
        if count > programs:
            turns = gl.cdiv(count - gl.program_id(0), programs)
    else:
        turns = gl.cdiv(count - gl.program_id(0), programs)
    return turns


@gluon.jit
def place_of(turn, call, parts, form):
    """Of this program's turn-th part. Those that read the same keys follow one another, and run at the same time."""
    tiles = gl.cdiv(call.seqlen_q, form.BLOCK_M)
    index = turn * gl.num_programs(0) + gl.program_id(0)
    head = divide(index, tiles, call.by.tiles)
    part = divide(head, call.group, call.by.group)
    key_head = divide(part, parts, call.by.parts)
    heads_kv = divide(call.heads_q, call.group, call.by.group)
    b = divide(key_head, heads_kv, call.by.heads)
    return Place(
        0,
        (index - head * tiles) * form.BLOCK_M,
        b,
        key_head - b * heads_kv,
        head - part * call.group,
        part - key_head * parts,
        b,
    )


@gluon.jit
def packed_place(head, start, end_q, rows, sequence, call, parts):
    """Of what a queue gave (``received_tile``, ``sequence_of`` in hopper_queue.py): its heads are parts of query heads."""
    query_head = head // parts
    h_kv = query_head // call.group
    return Place(end_q - rows, start, 0, h_kv, query_head - h_kv * call.group, head - query_head * parts, sequence)


@gluon.jit
def blocks_of(place, call, parts, form):
    """``part_of_blocks`` of a place. RAGGED: call has the lengths of its sequence, which may have no keys."""
    below = form.BLOCKS_BELOW(place.row + form.BLOCK_M, call.seqlen_q, call.seqlen_k, call.window, form.BLOCK_N)
    if form.RAGGED:
        below = gl.maximum(below, 1)
    blocks = below - form.FIRST_BLOCK(place.row, call.seqlen_q, call.seqlen_k, call.window, form.BLOCK_N)
    return part_of_blocks(below, blocks, place.part, parts, call.by.parts)


@gluon.jit
def part_of_blocks(below, blocks, part, parts, by):
    """(below, count, used) of a tile that sees so many blocks below ``below``: the part has the key blocks
    [below - count, below), one or more; not used: they are another's."""
    begin = divide(blocks * part, parts, by)
    count = divide(blocks * (part + 1), parts, by) - begin
    return below - begin, gl.maximum(count, 1), count > 0


@gluon.jit
def pass_entries(done, count, barriers, CONSUMER: gl.constexpr, form):
    """Releases ring entries that this group does not read. Returns how many are done then."""
    for entry in range(done, done + count):
        stage = entry % form.STAGES
        parity = (entry // form.STAGES) & 1
        mbarrier.wait(barriers.k_ready.index(stage), parity)
        if form.PINGPONG:
            await_turn(CONSUMER)
            signal_next_turn(CONSUMER, form.GROUPS)
        release(barriers.k_empty, entry, True, K_EMPTY, form)
        mbarrier.wait(barriers.v_ready.index(stage), parity)
        release(barriers.v_empty, entry, True, V_EMPTY, form)
    return done + count


@gluon.jit
def produce_key_parts(q, k, v, smem, barriers, call, parts, form):
    """One warp: Q, K and V of this program's parts, in the order in which the consumers want them. q, k, v: tuples of their
    columns' parts."""
    done = 0  # key blocks of earlier parts
    for turn in range(turns_of(call, parts, form)):
        place = place_of(turn, call, parts, form)
        below, count, _used = blocks_of(place, call, parts, form)
        h = place.h_kv * call.group + place.member
        for entry in range(done, done + count):
            stage = entry % form.STAGES
            row = (below - 1 - (entry - done)) * form.BLOCK_N
            await_room(barriers.k_empty, entry, K_EMPTY, form)
            expect_parts(k, barriers.k_ready.index(stage))
            load_parts(k, place.b, place.h_kv, row, barriers.k_ready.index(stage), smem.k, stage)
            if entry == done:  # room for Q is there when the part before ends, for this K before
                load_q(q, place.b, h, place.row, turn, smem, barriers, 0, form.GROUPS, form)
            await_room(barriers.v_empty, entry, V_EMPTY, form)
            expect_parts(v, barriers.v_ready.index(stage))
            load_parts(v, place.b, place.h_kv, row, barriers.v_ready.index(stage), smem.v, stage)
        done += count
    await_last(barriers, done, form)


@gluon.jit
def store_sums(acc, peak, total, first, inside, place, sums, call, HEAD_DIM_V: gl.constexpr):
    """A group's sums of P V, its parts of columns [ROWS, columns] each, maxima and sums of P [ROWS], of the queries from
    ``first`` on, counted over all sequences, of which ``inside`` are there. Row r of a key head is query r // group of its
    query head r % group."""
    heads_kv = divide(call.heads_q, call.group, call.by.group)
    all_rows = (call.batch * call.heads_q).to(gl.int64) * call.seqlen_q
    before = (place.b * heads_kv + place.h_kv).to(
        gl.int64
    ) * call.seqlen_q + first  # queries of this key head, and of others
    own = place.part * all_rows + before * call.group + place.member
    r = gl.arange(0, ROWS, layout=peak.type.layout)
    stats = sums.stats + own
    gl.store(stats + r * call.group, peak, mask=r < inside)
    gl.store(stats + sums.parts * all_rows + r * call.group, total, mask=r < inside)
    store_parts_of_rows(acc, sums.o_parts + own * HEAD_DIM_V, call.group * HEAD_DIM_V, inside, HEAD_DIM_V)


@gluon.jit
def store_parts_of_rows(acc, o, stride, inside, HEAD_DIM_V: gl.constexpr):
    """Accumulators [rows, columns] of both parts of columns behind ``o``, whose rows are ``stride`` elements apart, of which
    ``inside`` are there."""
    store_columns(acc[0], o, stride, inside, 0, HEAD_DIM_V)
    if len(acc) > 1:
        WIDTH: gl.constexpr = acc[0].shape[1]
        store_columns(acc[1], o, stride, inside, WIDTH, HEAD_DIM_V)


@gluon.jit
def store_columns(acc, o, stride, inside, FIRST: gl.constexpr, HEAD_DIM_V: gl.constexpr):
    """acc [rows, columns], the columns from FIRST on, in o's dtype behind ``o``, whose rows are ``stride`` elements apart."""
    WIDTH: gl.constexpr = acc.shape[1]
    r = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
    d = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, acc.type.layout))
    mask = (r < inside)[:, None]
    if FIRST + WIDTH > HEAD_DIM_V:
        mask = mask & (d < HEAD_DIM_V)[None, :]
    # a pointer a row, with constants behind it: of sums of both the compiler kept one a column, and spilled them
    gl.store((o + r * stride)[:, None] + d[None, :], acc.to(o.dtype.element_ty), mask=mask)
