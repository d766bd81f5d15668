"""No score term: scores are q k^T times softmax_scale. Both hooks inline to nothing."""

import triton
import triton.language as tl  # noqa: F401  # Triton's interpreter wants it beside every jit function

from fa2tune.spec.scorefile import ScoreHooks


@triton.jit
def apply(scores, score):
    """q k^T of a tile -> what softmax is taken of, both still to be multiplied by softmax_scale."""
    return scores


@triton.jit
def grad(ds, scores, score):
    """The loss's gradient by what ``apply`` gave (scores) -> by what it was given."""
    return ds


def transformed(scores, values):
    """On the host: scores, times softmax_scale, as softmax takes them."""
    return scores


SCORE = ScoreHooks("none", transformed=transformed)
