"""Packed sequences in Gluon kernels: where a tile lies, as kernels/lib/extent.py has it, with the layouts that Gluon wants
named. Device side."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.extent import STEP
from fa2tune.kernels.lib.warps import WARP


@gluon.jit
def _start(cu_seqlens, index, total):
    """Where a sequence starts. Whatever cu_seqlens holds, no row outside the tensor is addressed."""
    return gl.minimum(gl.maximum(gl.load(cu_seqlens + index), 0), total)


@gluon.jit
def place(own, other, sequences, own_total, other_total, tile, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Of a tile of ``packed_tiles`` over the sequences of ``own``: (tile in its sequence, first row, rows of the sequence,
    first row of the sequence in ``other``, its rows there), all scalars. A tile that its sequence does not need has 0 of the
    last. WARPS: of the calling partition; each warp works it out by itself, no shared memory, no barrier."""
    layout: gl.constexpr = gl.BlockedLayout([4], [WARP], [WARPS], [0])  # every warp has all of a step
    before = gl.zeros([STEP], gl.int32, layout)
    for first in range(0, sequences + 1, STEP):
        index = first + gl.arange(0, STEP, layout=layout)
        start = gl.load(own + index, mask=index <= sequences, other=0)
        start = gl.minimum(gl.maximum(start, 0), own_total)
        before += ((index <= sequences) & (start // BLOCK + index <= tile)).to(gl.int32)
    sequence = gl.maximum(gl.sum(before, 0) - 1, 0)
    following = gl.minimum(sequence + 1, sequences)
    start = _start(own, sequence, own_total)
    end = gl.where(sequence < sequences, _start(own, following, own_total), own_total)
    rows = gl.maximum(end - start, 0)
    tile -= start // BLOCK + sequence
    first_other = _start(other, sequence, other_total)
    rows_other = gl.maximum(_start(other, following, other_total) - first_other, 0)
    return tile, start, rows, first_other, gl.where(tile * BLOCK < rows, rows_other, 0)
