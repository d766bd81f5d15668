"""Sequences of their own lengths, packed one after the other: where a tile lies. Device side.

``cu_seqlens`` [sequences + 1] holds where each sequence starts, and where the last one ends. The host does not read it. A grid
has room for every way to divide ``total`` rows: sequence s owns the tiles from cu_seqlens[s] // BLOCK + s on, which are at
least as many as its rows need, and the rows behind the last sequence are one more sequence, with nothing on the other side.
"""

import triton
import triton.language as tl

#: Starts of sequences that a program reads at once.
STEP = tl.constexpr(128)


@triton.jit
def _start(cu_seqlens, index, total):
    """Where a sequence starts. Whatever cu_seqlens holds, no row outside the tensor is addressed."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + index), 0), total)


@triton.jit
def packed_tiles(total, sequences, BLOCK: tl.constexpr):
    """Tiles of a grid, as ``Extent.tiles`` has them on the host."""
    return total // BLOCK + sequences + 1


@triton.jit
def packed_sequence(number, tile, first, BLOCK: tl.constexpr):
    """Which sequence a tile of ``packed_tiles`` is of: ``number`` in the grid, ``tile`` in the sequence, whose first row is
    ``first``."""
    return number - tile - first // BLOCK


@triton.jit
def place(own, other, sequences, own_total, other_total, tile, BLOCK: tl.constexpr):
    """Of a tile of ``packed_tiles`` over the sequences of ``own``: (tile in its sequence, first row, rows of the sequence,
    first row of the sequence in ``other``, its rows there). A tile that its sequence does not need has 0 of the last."""
    before = tl.zeros([STEP], tl.int32)
    for first in range(0, sequences + 1, STEP):
        index = first + tl.arange(0, STEP)
        start = tl.load(own + index, mask=index <= sequences, other=0)
        start = tl.minimum(tl.maximum(start, 0), own_total)
        before += ((index <= sequences) & (start // BLOCK + index <= tile)).to(tl.int32)
    sequence = tl.maximum(tl.sum(before, 0) - 1, 0)
    following = tl.minimum(sequence + 1, sequences)
    start = _start(own, sequence, own_total)
    end = tl.where(sequence < sequences, _start(own, following, own_total), own_total)
    rows = tl.maximum(end - start, 0)
    tile -= start // BLOCK + sequence
    first_other = _start(other, sequence, other_total)
    rows_other = tl.maximum(_start(other, following, other_total) - first_other, 0)
    return tile, start, rows, first_other, tl.where(tile * BLOCK < rows, rows_other, 0)
