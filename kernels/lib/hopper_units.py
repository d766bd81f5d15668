"""Shared memory in units of eight rows, after which the pattern of swizzled rows of 128 bytes repeats: a tile of any multiple
of eight rows is so many units, where tiles of Gluon are powers of two high. Triton from 3.7 on refuses to see a unit as a tile
that is larger. Device side."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

UNIT = gl.constexpr(8)


@gluon.constexpr_function
def _layout():
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def units_for(dtype: gl.constexpr, COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    """COUNT units of rows of 128 bytes, one behind the other."""
    return gl.allocate_shared_memory(dtype, [COUNT, UNIT, COLUMNS], _layout())


@gluon.jit
def unit_as_block(units, first, descriptor):
    """What begins at a unit, as a block of the tensor behind the descriptor."""
    return units.index(first)._reinterpret(descriptor.dtype, descriptor.block_shape, descriptor.layout)


@gluon.jit
def unit_as_rows(units, first, HEIGHT: gl.constexpr):
    """The same as a tile [HEIGHT, columns], a power of two high, of which fewer rows may be read."""
    COLUMNS: gl.constexpr = units.shape[-1]
    return units.index(first)._reinterpret(units.dtype, [HEIGHT, COLUMNS], _layout())
