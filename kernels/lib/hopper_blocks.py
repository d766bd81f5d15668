"""Which query blocks a key tile of the Hopper backward visits, in which order."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.division import divide


@gluon.jit
def query_blocks(
    start_n, seqlen_q, seqlen_k, window,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, QUERY_BLOCKS: gl.constexpr, LEFT_BOUNDED: gl.constexpr,
):  # fmt: skip
    """(first, full, end, rotation), counted in blocks: [first, end) are to be visited; as block_at has it, those under the mask
    come at [first, full), and those whose queries see all keys of the tile at [full, end)."""
    first, full, full_end, end = QUERY_BLOCKS(start_n, start_n + BLOCK_N, seqlen_q, seqlen_k, window, BLOCK_M)
    if start_n + BLOCK_N > seqlen_k:  # the last, ragged tile: everything under the mask
        full = end
        if LEFT_BOUNDED:
            full_end = end
    rotation = 0
    if LEFT_BOUNDED:
        rotation = full_end - first
        full = end - (full_end - full)
    return first, full, end, rotation


@gluon.jit
def blocks_of_part(part, parts, by, first, full, end):
    """(first, full, end) of one of so many parts of such blocks, which are not rotated. ``by``: as ``divide`` has it."""
    each = divide(end - first + parts - 1, parts, by)
    begin = gl.minimum(first + part * each, end)
    stop = gl.minimum(begin + each, end)
    return begin, gl.minimum(gl.maximum(full, begin), stop), stop


@gluon.jit
def block_at(j, first, end, rotation, LEFT_BOUNDED: gl.constexpr):
    """The query block of place j of [first, end). Of a mask bounded on the left those behind the full ones come first: all that
    are masked come one after the other, and one loop holds them."""
    block = j
    if LEFT_BOUNDED:
        block = j + rotation
        block = gl.where(block < end, block, block - (end - first))
    return block
