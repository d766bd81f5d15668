"""V's ring in entries of half a block, of the Hopper forward: three of them take the room of one and a half blocks, where two
whole blocks of V have none beside two of K. Device side."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import mbarrier, warpgroup_mma
from fa2tune.kernels.lib.hopper_parts import expect_parts, load_parts, product_layout, tiles_in
from fa2tune.search_spaces.sm90 import fwd as space

ENTRIES = gl.constexpr(space.V_ENTRIES)


@gluon.jit
def load_halves(v, b, h, row, block, smem, barriers):
    """The producer: V of the block-th key block, from key ``row`` on, one half after the other."""
    HALF: gl.constexpr = smem.v[0].shape[-2]
    for nth in gl.static_range(2):
        entry = 2 * block + nth
        slot = entry % ENTRIES
        mbarrier.wait(barriers.v_empty.index(slot), ((entry // ENTRIES) & 1) ^ 1)
        expect_parts(v, barriers.v_ready.index(slot))
        load_parts(v, b, h, row + nth * HALF, barriers.v_ready.index(slot), smem.v, slot)


@gluon.jit
def _await_half(entry, barriers):
    mbarrier.wait(barriers.v_ready.index(entry % ENTRIES), (entry // ENTRIES) & 1)


@gluon.jit
def release_halves(block, barriers):
    """This group reads a block's V no more."""
    for nth in gl.static_range(2):
        mbarrier.arrive(barriers.v_empty.index((2 * block + nth) % ENTRIES), count=1)


@gluon.jit
def pass_halves(block, barriers):
    """It does not read it at all: it is released once it is there."""
    for nth in gl.static_range(2):
        _await_half(2 * block + nth, barriers)
    release_halves(block, barriers)


@gluon.jit
def halves_to_carry(weights, dtype: gl.constexpr, layout: gl.constexpr):
    """Weights [R, N] as two of [R, N / 2] in a product's layout, rounded: of the first half of the keys, and of the second."""
    R: gl.constexpr = weights.shape[0]
    N: gl.constexpr = weights.shape[1]
    left, right = gl.split(weights.to(dtype).reshape([R, 2, N // 2]).permute((0, 2, 1)))
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def _add_half(p, v, acc):
    found = (warpgroup_mma(p, v[0], acc[0], is_async=True),)
    if len(acc) > 1:
        layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(v[1].shape[-1]), 2)
        again = gl.convert_layout(p, layout, assert_trivial=True)
        found = (found[0], warpgroup_mma(again, v[1], acc[1], is_async=True))
    return found


@gluon.jit
def add_halves(p, acc, block, smem, barriers):
    """acc + P V of a block, asynchronously, once each half of V is there: two products for each part of V. ``p``: as
    ``halves_to_carry`` has it."""
    first = 2 * block
    _await_half(first, barriers)
    acc = _add_half(p[0], tiles_in(smem.v, first % ENTRIES), acc)
    _await_half(first + 1, barriers)
    return _add_half(p[1], tiles_in(smem.v, (first + 1) % ENTRIES), acc)
