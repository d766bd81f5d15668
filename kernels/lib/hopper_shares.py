"""Equal shares of all key blocks of a call: which of them a program has, and the warp that loads them. Device side.

Tiles of a call lie one after the other, heads one by one, and so do their key blocks, those of a tile from the last one on, as
the loops go. A program first takes ``rounds`` whole tiles, every n-th one of n programs, and then its share of the blocks that
are left: a run of them that may begin and end inside a tile. So a tile that is left is in parts, one for each program whose run
reaches into it. Each tile of a head has ``more`` blocks more than the one before it, but for the last one, which may have
fewer; whole rounds are of calls whose tiles have the same number."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper_forward import K_EMPTY, V_EMPTY, await_last, await_room, load_q
from fa2tune.kernels.lib.hopper_key_parts import Place
from fa2tune.kernels.lib.hopper_parts import expect_parts, load_parts
from fa2tune.search_spaces.sm90 import fwd_shares as space

#: Steps of the search for a tile, less one.
BITS = gl.constexpr(space.TILES_OF_HEAD.bit_length() - 1)


class Blocks(NamedTuple):
    """Key blocks that tiles visit."""

    of_head: gl.tensor
    of_first: gl.tensor  #: those of a head's first tile
    more: gl.tensor  #: that each tile has than the one before it


class Share(NamedTuple):
    """Of one program. Key blocks are counted over all tiles of the call."""

    rounds: gl.tensor  #: whole tiles
    base: gl.tensor  #: first block behind whole rounds
    count: gl.tensor  #: blocks behind them, of all programs; 1, too, where there are none
    begin: gl.tensor
    end: gl.tensor


class Stretch(NamedTuple):
    """Key blocks [below - count, below) of a tile, counted in its head's keys."""

    place: Place
    below: gl.tensor
    count: gl.tensor
    parts: gl.tensor  #: of the tile; 1: it is whole


@gluon.jit
def share_of(call, rounds, blocks):
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    base = rounds * programs * blocks.of_first
    count = blocks.of_head * call.batch * call.heads_q - base
    begin, end = base + own * count // programs, base + (own + 1) * count // programs
    return Share(rounds, base, gl.maximum(count, 1), begin, end)


@gluon.jit
def blocks_before(tile, blocks):
    """Key blocks of the first ``tile`` tiles of a head."""
    return tile * blocks.of_first + tile * (tile - 1) // 2 * blocks.more


@gluon.jit
def _tile_at(inside, tiles, blocks):
    """The tile of a head that has its inside-th key block."""
    tile = inside * 0
    for bit in gl.static_range(BITS, -1, -1):
        later = tile + (1 << bit)
        tile = gl.where((later < tiles) & (blocks_before(later, blocks) <= inside), later, tile)
    return tile


@gluon.jit
def run_of(turn, at, share, blocks, call, form):
    """This program's turn-th run of blocks. at: where the next one begins, once it has no whole tile left."""
    tiles = gl.cdiv(call.seqlen_q, form.BLOCK_M)
    own = gl.program_id(0)
    whole = turn < share.rounds
    rank = turn * gl.num_programs(0) + own
    head = gl.where(whole, rank // tiles, at // blocks.of_head)
    inside = at - head * blocks.of_head
    tile = gl.where(whole, rank - head * tiles, _tile_at(inside, tiles, blocks))
    row = tile * form.BLOCK_M
    visited = form.BLOCKS_BELOW(row + form.BLOCK_M, call.seqlen_q, call.seqlen_k, call.window, form.BLOCK_N)
    skipped = gl.where(whole, 0, inside - blocks_before(tile, blocks))
    count = gl.where(whole, visited, gl.minimum(visited - skipped, share.end - at))
    # the programs that have the tile's first and last block
    start = at - skipped - share.base
    first = ((start + 1) * gl.num_programs(0) - 1) // share.count
    last = ((start + visited) * gl.num_programs(0) - 1) // share.count
    part = gl.where(whole, 0, own - first)
    b = head // call.heads_q
    h = head - b * call.heads_q
    h_kv = h // call.group
    place = Place(0, row, b, h_kv, h - h_kv * call.group, part, b)
    return Stretch(place, visited - skipped, count, gl.where(whole, 1, last - first + 1))


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
    share = share_of(call, rounds, blocks)
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
