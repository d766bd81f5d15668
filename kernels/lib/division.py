"""Division by numbers that the host knows, as a multiplication: Granlund and Montgomery, Division by Invariant Integers using
Multiplication, 1994, section 4. A 32-bit division takes a GPU 40 instructions, each of which waits for the one before; the warp
that loads does four to seven of them one after the other before it asks for anything.

A divisor is one 64-bit argument whose name begins with ``by_``: 32 bits of a multiplier, and above them a shift. () stands for
one that the host has not sent: the kernel divides."""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: Parameters: those of ``Divisors``.
BY = ("by_band", "by_width", "by_rest", "by_heads", "by_group")


class Divisors(NamedTuple):
    """Of a kernel that gives out tiles in bands of heads; () where the kernel divides."""

    band: tuple  #: tiles of a band
    width: tuple  #: heads of a band
    rest: tuple  #: and of the last one, if that has fewer
    heads: tuple  #: of a batch entry
    group: tuple  #: query heads of a key head


def of_bands(tiles: int, band: int, batch: int, heads: int, group: int) -> dict[str, int]:
    """The arguments BY: of ``tiles`` a head, given out in bands of so many of batch * heads."""
    return divisors(BY, tiles * band, band, batch * heads % band or 1, heads, group)


def divisors(names: Sequence[str], *numbers: int) -> dict[str, int]:
    """Arguments of these names."""
    return {name: divisor(one) for name, one in zip(names, numbers, strict=True)}


def divisor(number: int) -> int:
    """Of 1 <= number < 2^31, for dividends from 0 to 2^31 - 1.

    Raises ValueError for another number: a call without heads or rows runs no kernel.
    """
    if not 1 <= number < 1 << 31:
        raise ValueError(f"number must be from 1 to {(1 << 31) - 1} but is {number}: no kernel divides by it")
    if number == 1:
        return 0
    doublings = (number - 1).bit_length()
    return -(-(1 << 31 + doublings) // number) | doublings - 1 << 32


@gluon.jit
def divide(dividend, number, by):
    """dividend // number, of a dividend that is not negative. ``by``: the number's divisor, or ()."""
    if len(by) > 0:
        multiplier = (by[0] << 32 >> 32).to(gl.int32)
        found = gl.umulhi(dividend, multiplier) >> (by[0] >> 32).to(gl.int32)
        return gl.where(multiplier == 0, dividend, found)
    else:
        return dividend // number


@gluon.jit
def divide_with_rest(dividend, number, by):
    """(dividend // number, dividend % number), as ``divide`` has them."""
    quotient = divide(dividend, number, by)
    if len(by) > 0:
        return quotient, dividend - quotient * number
    else:
        return quotient, dividend % number


@gluon.jit
def banded(index, tiles, heads, heads_per_wave, by):
    """(tile, head, band) of a place in the order of bands, by ``Divisors``; a place behind the last one has any numbers."""
    band = divide(index, tiles * heads_per_wave, by.band)
    first = band * heads_per_wave
    width = gl.maximum(gl.minimum(heads - first, heads_per_wave), 1)  # the last band may be narrower
    inside = index - band * (tiles * heads_per_wave)
    if len(by.band) > 0:
        tile = gl.where(width < heads_per_wave, divide(inside, width, by.rest), divide(inside, width, by.width))
        return tile, first + inside - tile * width, band
    else:
        return inside // width, first + inside % width, band


@triton.jit
def divided(dividend, by):
    """The same, of a divisor that is there."""
    multiplier = (by << 32 >> 32).to(tl.int32)
    found = tl.umulhi(dividend, multiplier) >> (by >> 32).to(tl.int32)
    return tl.where(multiplier == 0, dividend, found)
