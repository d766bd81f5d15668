"""Equal shares of all key blocks of a call: which of them a program has, and the warp that loads them. Device side.

Tiles of a call lie one after the other, heads one by one, and so do their key blocks, those of a tile from the last one on, as
the loops go. A program first takes ``rounds`` whole tiles, every n-th one of n programs, and then its share of the blocks that
are left: a run of them that may begin and end inside a tile. So a tile that is left is in parts, one for each program whose run
reaches into it.

Each tile of a head has ``more`` blocks more than the one before it, but for the last one, which may have fewer; whole rounds
are of calls whose tiles have the same number. A head's tiles lie as the last one, the first, the last but one, the second: two
neighbours have as many blocks as any other two, so no program has a run of many short tiles."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper_forward import K_EMPTY, V_EMPTY, await_last, await_room, load_q
from fa2tune.kernels.lib.hopper_key_parts import Place
from fa2tune.kernels.lib.hopper_parts import expect_parts, load_parts


class Blocks(NamedTuple):
    """Key blocks that tiles visit."""

    of_head: gl.tensor
    of_first: gl.tensor  #: those of a head's first tile
    more: gl.tensor  #: that each tile has than the one before it


class Share(NamedTuple):
    """Of one program. Key blocks are counted over all tiles of the call."""

    number: gl.tensor  #: the program's
    programs: gl.tensor
    rounds: gl.tensor  #: whole tiles
    base: gl.tensor  #: first block behind whole rounds
    count: gl.tensor  #: blocks behind them, of all programs; 1, too, where there are none, for it divides
    begin: gl.tensor
    end: gl.tensor


class Tile(NamedTuple):
    """The tile that has a key block of the call."""

    row: gl.tensor  #: its first query
    b: gl.tensor
    h: gl.tensor
    begin: gl.tensor  #: its first block, counted over all tiles
    visited: gl.tensor  #: its blocks


class KeyRun(NamedTuple):
    """Key blocks [below - count, below) of a tile, counted in its head's keys."""

    place: Place
    below: gl.tensor
    count: gl.tensor
    whole: gl.tensor  #: they are all of its blocks
    slot: gl.tensor  #: where the sums go otherwise


@gluon.jit
def share_of(number, programs, call, rounds, blocks):
    base = rounds * programs * blocks.of_first
    count = blocks.of_head * call.batch * call.heads_q - base
    begin, end = base + number * count // programs, base + (number + 1) * count // programs
    return Share(number, programs, rounds, base, gl.maximum(count, 1), begin, end)


@gluon.jit
def tile_at(at, blocks, call, BLOCK_M: gl.constexpr):
    """The tile that has block ``at``."""
    tiles = gl.cdiv(call.seqlen_q, BLOCK_M)
    head = at // blocks.of_head
    inside = at - head * blocks.of_head
    both = 2 * blocks.of_first + blocks.more * (tiles - 1)  # blocks of two neighbours
    lacks = tiles * blocks.of_first + tiles * (tiles - 1) // 2 * blocks.more - blocks.of_head  # of the last tile
    pair = (inside + lacks) // both
    begin = gl.maximum(pair * both - lacks, 0)
    longer = tiles - 1 - pair
    visited = blocks.of_first + blocks.more * longer - gl.where(pair == 0, lacks, 0)
    second = inside - begin >= visited
    tile = gl.where(second, pair, longer)
    begin = gl.where(second, begin + visited, begin)
    visited = gl.where(second, blocks.of_first + blocks.more * pair, visited)
    b = head // call.heads_q
    return Tile(tile * BLOCK_M, b, head - b * call.heads_q, head * blocks.of_head + begin, visited)


@gluon.jit
def slot_of(number, begins):
    """Of a program's sums. Two of its tiles at most are in parts: one inside which its first run begins, and one that its last
    run begins."""
    return 2 * number + begins


@gluon.jit
def last_of(tile, share):
    """The program that has the last block of a tile that no whole round has."""
    return ((tile.begin - share.base + tile.visited) * share.programs - 1) // share.count


@gluon.jit
def run_of(turn, at, share, blocks, call, form):
    """This program's turn-th run of blocks. at: where the next one begins, once it has no whole tile left."""
    given = turn < share.rounds
    at = gl.where(given, (turn * share.programs + share.number) * blocks.of_first, at)
    tile = tile_at(at, blocks, call, form.BLOCK_M)
    skipped = at - tile.begin
    left = tile.visited - skipped
    count = gl.where(given, left, gl.minimum(left, share.end - at))
    h_kv = tile.h // call.group
    place = Place(0, tile.row, tile.b, h_kv, tile.h - h_kv * call.group, 0, tile.b)
    return KeyRun(place, left, count, count == tile.visited, slot_of(share.number, (skipped == 0).to(gl.int32)))


@gluon.jit
def goes_on(turn, at, share):
    """Whether a program has a turn-th run."""
    return (turn < share.rounds) | (at < share.end)


@gluon.jit
def next_at(turn, at, run, share):
    """Where the run after the turn-th one begins."""
    return gl.where(turn < share.rounds, at, at + run.count)


@gluon.jit
def produce_share(q, k, v, smem, barriers, call, rounds, blocks, form):
    """One warp: Q, K and V of this program's runs, in the order in which the consumers want them. q, k, v: tuples of their
    columns' parts."""
    share = share_of(gl.program_id(0), gl.num_programs(0), call, rounds, blocks)
    done = 0  # key blocks of earlier runs
    turn = 0
    at = share.begin
    while goes_on(turn, at, share):
        run = run_of(turn, at, share, blocks, call, form)
        place = run.place
        h = place.h_kv * call.group + place.member
        for entry in range(done, done + run.count):
            stage = entry % form.STAGES
            row = (run.below - 1 - (entry - done)) * form.BLOCK_N
            await_room(barriers.k_empty, entry, K_EMPTY, form)
            expect_parts(k, barriers.k_ready.index(stage))
            load_parts(k, place.b, place.h_kv, row, barriers.k_ready.index(stage), smem.k, stage)
            if entry == done:
                load_q(q, place.b, h, place.row, turn, smem, barriers, 0, form.GROUPS, form)
            await_room(barriers.v_empty, entry, V_EMPTY, form)
            expect_parts(v, barriers.v_ready.index(stage))
            load_parts(v, place.b, place.h_kv, row, barriers.v_ready.index(stage), smem.v, stage)
        done += run.count
        at = next_at(turn, at, run, share)
        turn += 1
    await_last(barriers, done, form)
