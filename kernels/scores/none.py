"""No score term: scores are q k^T times softmax_scale. Both hooks inline to nothing."""

import triton
import triton.language as tl  # noqa: F401  # Triton's interpreter wants it beside every jit function

from fa2tune.spec.scorefile import ScoreHooks


@triton.jit
def apply(scores, score, rows, columns, offset, batch, head):
    """q k^T of a tile -> what softmax is taken of, both still to be multiplied by softmax_scale.

    rows, columns: numbers of queries and keys in their sequence, int32, which broadcast against the scores; row i is at place
    i + offset of the keys. batch: number of the sequence. head: of the query head in the call, or numbers that broadcast."""
    return scores


@triton.jit
def grad(ds, scores, score, rows, columns, offset, batch, head):
    """The loss's gradient by what ``apply`` gave (scores) -> by what it was given."""
    return ds


def transformed(scores, values, _places):
    """On the host: scores, times softmax_scale, as softmax takes them."""
    return scores


SCORE = ScoreHooks("none", transformed=transformed, numbered=False)
