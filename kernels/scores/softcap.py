"""Tanh soft cap, as Gemma 2 has it: cap * tanh(softmax_scale * q k^T / cap).

score = (softmax_scale / cap, cap / softmax_scale): run-time numbers, since kernels multiply by softmax_scale later on.
"""

import triton
import triton.language as tl

from fa2tune.spec.scorefile import ScoreHooks


@triton.jit
def apply(scores, score, rows, columns, offset, batch, head):
    """As kernels/scores/none.py has it, within 6e-7 of it. The tanh is 1 - 2 / (1 + exp(2 x)), which cancels where x is small;
    there the first terms of the series do. Triton's own tanh is a call into CUDA's library, which its interpreter lacks."""
    first, second = score
    x = scores * first
    below = 1.0 + tl.math.exp2(x * 2.8853900817779268)
    # rsqrt of a square: one instruction more than a reciprocal, and three fewer than a division
    large = 1.0 - 2.0 * tl.math.rsqrt(below * below)
    square = x * x
    terms = square * -0.008863235529902197 + 0.021869488536155203
    terms = square * terms - 0.05396825396825397
    terms = square * terms + 0.13333333333333333
    terms = square * terms - 0.3333333333333333
    small = x + x * square * terms
    return tl.where(square < 0.1225, small, large) * second


@triton.jit
def grad(ds, scores, score, rows, columns, offset, batch, head):
    tanh = scores * score[0]
    return ds * (1.0 - tanh * tanh)


def transformed(scores, values, _places):
    (cap,) = values
    return cap * (scores / cap).tanh()


def arguments(softmax_scale, values):
    (cap,) = values
    return softmax_scale / cap, cap / softmax_scale


SCORE = ScoreHooks("softcap", transformed=transformed, values={"cap": (1e-3, 1e6)}, arguments=arguments, numbered=False)
