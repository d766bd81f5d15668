"""Division by numbers that the host knows, as a multiplication: Granlund and Montgomery, Division by Invariant Integers using
Multiplication, 1994, section 4. A 32-bit division takes a GPU 40 instructions, each of which waits for the one before; the warp
that loads does four to seven of them one after the other before it asks for anything.

A divisor is one 64-bit argument whose name begins with ``by_``: 32 bits of a multiplier, and above them a shift. () stands for
one that the host has not sent: the kernel divides."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def divisor(number: int) -> int:
    """Of 1 <= number < 2^31, for dividends from 0 to 2^31 - 1."""
    if number == 1:
        return 0
    doublings = (number - 1).bit_length()
    return -(-(1 << 31 + doublings) // number) | doublings - 1 << 32


@gluon.jit
def divide(dividend, number, by):
    """dividend // number, of a dividend that is not negative. ``by``: the number's divisor, or ()."""
    if len(by) > 0:
        multiplier = by[0].to(gl.int32)
        found = gl.umulhi(dividend, multiplier) >> (by[0] >> 32).to(gl.int32)
        return gl.where(multiplier == 0, dividend, found)
    else:
        return dividend // number


@triton.jit
def divided(dividend, by):
    """The same, of a divisor that is there."""
    multiplier = by.to(tl.int32)
    found = tl.umulhi(dividend, multiplier) >> (by >> 32).to(tl.int32)
    return tl.where(multiplier == 0, dividend, found)
