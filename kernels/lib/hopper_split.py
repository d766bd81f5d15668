"""Packed sequences in the split Hopper backward (kernels/sm90/bwd_dq.py, bwd_dkdv.py): where a program's tile lies, and the
coordinates of its rows. Device side.

``packed`` of a tile is () in a dense call, and of packed sequences (row of q where its sequence ends, its queries, row of k
where it ends, its keys, rows of q of all sequences, and its number, where a score term wants it). Descriptors end where a
sequence ends, as kernels/lib/hopper_packed.py has them, so loops and stores are those of a dense call."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.extent import packed_sequence
from fa2tune.kernels.lib.gluon_extent import place
from fa2tune.kernels.lib.hopper import PACKED_ROWS
from fa2tune.search_spaces.portable import packed_order as space

WORDS = gl.constexpr(space.WORDS)


@gluon.jit
def _word(order, number, alive, WORD: gl.constexpr):
    """That of entry ``number`` of packed_order; 0 where there is none."""
    return gl.load(order + WORDS * (1 + number) + WORD, mask=alive, other=0)


@gluon.jit
def tile_in_order(order, number, total_q, SCORED: gl.constexpr):
    """(first row in its sequence, ``packed``) of the query tile of this number; there may be fewer, and of another one the
    sequence has no rows."""
    alive = number < gl.load(order)
    start_m = _word(order, number, alive, 0)
    end_q = _word(order, number, alive, 1)
    queries = _word(order, number, alive, 2)
    end_k = _word(order, number, alive, 3)
    keys = _word(order, number, alive, 4)
    packed = (end_q, queries, end_k, keys, total_q)
    if SCORED:
        packed = (end_q, queries, end_k, keys, total_q, _word(order, number, alive, 6))
    return start_m, packed


@gluon.jit
def key_tile(
    number, offsets, sequences, total_q, total_k, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, SCORED: gl.constexpr
):
    """(first key in its sequence, ``packed``) of the key tile of this number. One that its sequence does not need begins behind
    its last key, and has no queries. WARPS: of the calling partition."""
    cu_seqlens_q, cu_seqlens_k = offsets
    tile, first_k, keys, first_q, queries = place(
        cu_seqlens_k, cu_seqlens_q, sequences, total_k, total_q, number, BLOCK_N, WARPS
    )
    packed = (first_q + queries, queries, first_k + keys, keys, total_q)
    if SCORED:
        sequence = packed_sequence(number, tile, first_k, BLOCK_N)
        packed = (first_q + queries, queries, first_k + keys, keys, total_q, sequence)
    return tile * BLOCK_N, packed


@gluon.jit
def _of_side(b, row, packed, SIDE: gl.constexpr):
    """SIDE: 0 of q, 2 of k."""
    if len(packed) > 0:
        b = packed[SIDE]
        row += PACKED_ROWS - packed[SIDE + 1]
    return b, row


@gluon.jit
def of_queries(b, row, tile):
    """(batch coordinate, row coordinate) of a row of q, do or dq."""
    return _of_side(b, row, tile.packed, 0)


@gluon.jit
def of_keys(b, row, tile):
    """The same of a row of k, v, dk or dv."""
    return _of_side(b, row, tile.packed, 2)


@gluon.jit
def sequence_of(tile):
    """Number of its sequence, or of the batch entry."""
    sequence = tile.b
    if len(tile.packed) > 5:
        sequence = tile.packed[5]
    return sequence


@gluon.jit
def rows_of_head(seqlen_q, tile):
    """From a head's lse and delta to the next one's."""
    if len(tile.packed) > 0:
        seqlen_q = tile.packed[4]
    return seqlen_q
