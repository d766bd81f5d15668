"""Head dims in one part or two: 96 columns are a tile of 64 and one of 32, where a single tile would have 128.

What has columns of a head dim is a tuple of one or two: descriptors, shared memory, tiles, accumulators. Each part is a power
of two wide, the first the wider one. With one part all of this inlines to what it is without tuples. Device side.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import (
    fence_async_shared,
    load_block,
    mbarrier,
    store_block,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.constexpr_function
def product_layout(columns, rows=64):
    """Of a product of so many rows and columns: each warp has 16 of the rows, so those of one group are 64."""
    return gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, columns, 16])


@gluon.jit
def descriptors_of(first, rest):
    """Those of a tensor's parts. ``rest``: None where there is one part."""
    found = (first,)
    if rest is not None:
        found = (first, rest)
    return found


@gluon.jit
def shared_for(descriptors, SLOTS: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, REST: gl.constexpr):
    """Shared memory [SLOTS, 1, 1, HEIGHT, columns] of each part, as its descriptor fills it; of packed sequences [SLOTS, 1, 1,
    1, HEIGHT, columns]. REST 0: there is one part."""
    found = (_slots_for(descriptors[0], SLOTS, HEIGHT, WIDTH),)
    if REST > 0:
        found = (found[0], _slots_for(descriptors[1], SLOTS, HEIGHT, REST))
    return found


@gluon.jit
def _slots_for(descriptor, SLOTS: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    if len(descriptor.block_type.shape) == 5:
        found = gl.allocate_shared_memory(descriptor.dtype, [SLOTS, 1, 1, 1, HEIGHT, WIDTH], descriptor.layout)
    else:
        found = gl.allocate_shared_memory(descriptor.dtype, [SLOTS, 1, 1, HEIGHT, WIDTH], descriptor.layout)
    return found


@gluon.jit
def expect_parts(descriptors, barrier):
    """The barrier of a tile awaits the bytes of all its parts."""
    if len(descriptors) == 1:
        mbarrier.expect(barrier, descriptors[0].block_type.nbytes)
    else:
        mbarrier.expect(barrier, descriptors[0].block_type.nbytes + descriptors[1].block_type.nbytes)


@gluon.jit
def expect_tiles(descriptors, barrier, TILES: gl.constexpr):
    """The same of so many tiles."""
    REST: gl.constexpr = descriptors[1].block_type.nbytes if len(descriptors) > 1 else 0
    mbarrier.expect(barrier, TILES * (descriptors[0].block_type.nbytes + REST))


@gluon.jit
def expect_both(descriptors, others, barrier):
    """The same of two tiles."""
    ONE: gl.constexpr = descriptors[1].block_type.nbytes if len(descriptors) > 1 else 0
    OTHER: gl.constexpr = others[1].block_type.nbytes if len(others) > 1 else 0
    mbarrier.expect(barrier, descriptors[0].block_type.nbytes + others[0].block_type.nbytes + (ONE + OTHER))


@gluon.jit
def load_parts(descriptors, b, h, row, barrier, smem, slot):
    """A tile's parts, from row ``row`` on, into a slot."""
    load_block(descriptors[0], b, h, row, 0, barrier, smem[0].index(slot))
    if len(descriptors) > 1:
        load_block(descriptors[1], b, h, row, smem[0].shape[-1], barrier, smem[1].index(slot))


@gluon.jit
def _tile_in(smem, slot):
    HEIGHT: gl.constexpr = smem.shape[-2]
    WIDTH: gl.constexpr = smem.shape[-1]
    return smem.index(slot).reshape([HEIGHT, WIDTH])


@gluon.jit
def tiles_in(smem, slot):
    """[rows, columns] of a slot, of each part."""
    found = (_tile_in(smem[0], slot),)
    if len(smem) > 1:
        found = (found[0], _tile_in(smem[1], slot))
    return found


@gluon.constexpr_function
def powers_of_two(columns, used):
    """(first column, columns) of pieces of a part that together have its first ``used`` columns, the widest first; of all of
    it, the part."""
    found, begin, end = [], 0, min(used, columns)
    while begin < end:
        width = 1 << ((end - begin).bit_length() - 1)
        found.append((begin, width))
        begin += width
    return tuple(found)


@gluon.jit
def _piece_of(tile, BEGIN: gl.constexpr, WIDTH: gl.constexpr):
    found = tile
    if tile.shape[-1] != WIDTH:
        found = tile.slice(BEGIN, WIDTH, 1)
    return found


@gluon.jit
def used_of(tiles, USED: gl.constexpr):
    """The first USED columns of a tile, a multiple of 16, as pieces of its parts that are powers of two wide. Behind them are
    zeros: of 224 columns in a tile of 256, products take 128, 64 and 32."""
    PIECES: gl.constexpr = powers_of_two(tiles[0].shape[-1], USED)
    found = (_piece_of(tiles[0], PIECES[0][0], PIECES[0][1]),)
    for i in gl.static_range(1, len(PIECES)):
        found = found + (_piece_of(tiles[0], PIECES[i][0], PIECES[i][1]),)  # noqa: RUF005
    if len(tiles) > 1:
        REST: gl.constexpr = powers_of_two(tiles[1].shape[-1], USED - tiles[0].shape[-1])
        for i in gl.static_range(len(REST)):
            found = found + (_piece_of(tiles[1], REST[i][0], REST[i][1]),)  # noqa: RUF005
    return found


@gluon.jit
def loaded(tiles, layout: gl.constexpr):
    """The parts of a tile, or its pieces, in registers."""
    found = (tiles[0].load(layout),)
    for i in gl.static_range(1, len(tiles)):
        found = found + (tiles[i].load(layout),)  # noqa: RUF005
    return found


@gluon.jit
def squares_of(tiles, layout: gl.constexpr):
    """[rows] in a slice of ``layout``: the squared norms of a shared tile's rows, float32."""
    first = tiles[0].load(gl.DotOperandLayout(0, layout, 2)).to(gl.float32)
    squares = gl.convert_layout(gl.sum(first * first, 1), gl.SliceLayout(1, layout))
    if len(tiles) > 1:
        rest = tiles[1].load(gl.DotOperandLayout(0, layout, 2)).to(gl.float32)
        squares += gl.convert_layout(gl.sum(rest * rest, 1), gl.SliceLayout(1, layout))
    return squares


@gluon.jit
def product_of_rows(a, b, start):
    """a b^T, its parts or pieces summed into one accumulator, asynchronously. ``start``: zeros, which are not read."""
    found = warpgroup_mma(a[0], b[0].permute((1, 0)), start, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(a)):
        found = warpgroup_mma(a[i], b[i].permute((1, 0)), found, is_async=True)
    return found


@gluon.jit
def zeros_for(v_smem, HEIGHT: gl.constexpr):
    """Accumulators [HEIGHT, columns] float32 for the parts of V."""
    WIDTH: gl.constexpr = v_smem[0].shape[-1]
    found = (gl.zeros([HEIGHT, WIDTH], gl.float32, product_layout(WIDTH, HEIGHT)),)
    if len(v_smem) > 1:
        REST: gl.constexpr = v_smem[1].shape[-1]
        found = (found[0], gl.zeros([HEIGHT, REST], gl.float32, product_layout(REST, HEIGHT)))
    return found


@gluon.jit
def add_products(p, v, acc):
    """acc + p v in each part, asynchronously: as many products are then under way as there are parts. p is in the layout of a
    left factor of the first part, which is also that of the second."""
    found = (warpgroup_mma(p, v[0], acc[0], is_async=True),)
    if len(acc) > 1:
        layout: gl.constexpr = gl.DotOperandLayout(0, acc[1].type.layout, 2)
        again = gl.convert_layout(p, layout, assert_trivial=True)
        found = (found[0], warpgroup_mma(again, v[1], acc[1], is_async=True))
    return found


@gluon.jit
def products_done(acc):
    """Waits for all products; the accumulators."""
    if len(acc) == 1:
        found = (warpgroup_mma_wait(0, deps=[acc[0]]),)
    else:
        first, rest = warpgroup_mma_wait(0, deps=[acc[0], acc[1]])
        found = (first, rest)
    return found


@gluon.jit
def products_done_with(acc, operand, BEHIND: gl.constexpr):
    """Waits until only the last ``BEHIND`` products may be under way: (the accumulators, the left factor in registers, which
    stays alive until then)."""
    if len(acc) == 1:
        first, operand = warpgroup_mma_wait(BEHIND, deps=[acc[0], operand])
        found = (first,)
    else:
        first, rest, operand = warpgroup_mma_wait(BEHIND, deps=[acc[0], acc[1], operand])
        found = (first, rest)
    return found, operand


@gluon.jit
def products_and_pieces_done(acc, operand, pieces, BEHIND: gl.constexpr):
    """The same of products that were issued before those of ``pieces``: (the accumulators, the left factor, the pieces)."""
    if len(acc) == 1:
        first, operand, piece = warpgroup_mma_wait(BEHIND, deps=[acc[0], operand, pieces[0]])
        found, done = (first,), (piece,)
    elif len(pieces) == 1:
        first, rest, operand, piece = warpgroup_mma_wait(BEHIND, deps=[acc[0], acc[1], operand, pieces[0]])
        found, done = (first, rest), (piece,)
    else:
        first, rest, operand, piece, other = warpgroup_mma_wait(
            BEHIND, deps=[acc[0], acc[1], operand, pieces[0], pieces[1]]
        )
        found, done = (first, rest), (piece, other)
    return found, operand, done


@gluon.constexpr_function
def alike(smem, others):
    """Whether two shared memories have the same parts."""
    return [part.shape[-1] for part in smem] == [part.shape[-1] for part in others]


@gluon.jit
def scaled(tiles, factor):
    """Each part times a number."""
    found = (tiles[0] * factor,)
    if len(tiles) > 1:
        found = (found[0], tiles[1] * factor)
    return found


@gluon.jit
def store_parts(tiles, descriptors, b, h, row, smem, slot):
    """Tiles [rows, columns], rounded, through shared memory that what was stored before has left by then; returns before they
    have left it."""
    tma_store_wait(0)
    put_parts(tiles, descriptors, b, h, row, smem, slot)


@gluon.jit
def put_parts(tiles, descriptors, b, h, row, smem, slot):
    """The same through unused shared memory."""
    if len(tiles) == 1:
        put_in(tiles, descriptors, b, h, row, (smem[0].index(slot),))
    else:
        put_in(tiles, descriptors, b, h, row, (smem[0].index(slot), smem[1].index(slot)))


@gluon.jit
def put_in(tiles, descriptors, b, h, row, places):
    """The same, each part through its own [1, 1, rows, columns]."""
    first = places[0]
    HEIGHT: gl.constexpr = first.shape[-2]
    WIDTH: gl.constexpr = first.shape[-1]
    first.reshape([HEIGHT, WIDTH]).store(tiles[0].to(first.dtype))
    if len(tiles) == 1:
        fence_async_shared()
        store_block(descriptors[0], b, h, row, 0, first)
    else:
        rest = places[1]
        REST: gl.constexpr = rest.shape[-1]
        rest.reshape([HEIGHT, REST]).store(tiles[1].to(first.dtype))
        fence_async_shared()
        store_block(descriptors[0], b, h, row, 0, first)
        store_block(descriptors[1], b, h, row, WIDTH, rest)


@gluon.jit
def store_in_halves(tiles, descriptors, b, h, row, smem, slot):
    """The same of a head dim in one part, half of whose columns fit ``smem``: one half after the other."""
    HEIGHT: gl.constexpr = smem[0].shape[-2]
    HALF: gl.constexpr = smem[0].shape[-1]
    place = smem[0].index(slot)
    tma_store_wait(0)
    left, right = gl.split(tiles[0].to(place.dtype).reshape([HEIGHT, 2, HALF]).permute((0, 2, 1)))
    place.reshape([HEIGHT, HALF]).store(left)
    fence_async_shared()
    store_block(descriptors[0], b, h, row, 0, place)
    tma_store_wait(0)
    place.reshape([HEIGHT, HALF]).store(right)
    fence_async_shared()
    store_block(descriptors[0], b, h, row, HALF, place)


@gluon.jit
def first_parts(smem, others):
    """As many of the parts of ``smem`` as ``others`` has."""
    found = smem
    if len(others) < len(smem):
        found = (smem[0],)
    return found
