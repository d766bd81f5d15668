"""A term as one that adds it would write it (tests/added_terms.py): ALiBi, whose slopes here halve from one sequence of a call
to the next, so that all that a term is given counts.

score = (8 / heads, 1 / softmax_scale): the slope of head h, from 0 on, is 2^(-8 (h + 1) / heads), and kernels multiply by
softmax_scale later on.
"""

import triton
import triton.language as tl

from fa2tune.spec.scorefile import ScoreHooks


@triton.jit
def apply(scores, score, rows, columns, offset, batch, head):
    slope = tl.math.exp2((head + 1) * -score[0] - batch)
    return scores - (rows + offset - columns) * (slope * score[1])


@triton.jit
def grad(ds, scores, score, rows, columns, offset, batch, head):
    return ds


def transformed(scores, values, places):
    number = scores.new_zeros(()) + places.head  # of the scores' dtype, whether the head is a tensor or an integer
    slope = 2.0 ** (-8.0 * (number + 1) / values[0] - places.batch)
    return scores - slope * (places.rows + places.offset - places.columns)


def arguments(softmax_scale, values):
    return 8.0 / values[0], 1.0 / softmax_scale


SCORE = ScoreHooks("alibi", transformed=transformed, values={"heads": (1, 2**16)}, arguments=arguments)
