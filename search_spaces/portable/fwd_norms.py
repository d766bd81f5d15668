"""kernels/portable/fwd_norms.py is bound by memory at any reasonable block size: a single point, not searched."""

from fa2tune.spec.problem import Problem
from fa2tune.spec.variant import SearchSpace

PARTS = 32  #: of a head's keys, each with a maximum of its own: as many as a warp has threads
#: The least that a squared norm counts as, by far more than what is lost where squares are too small for float32.
SMALLEST = 2.0**-100


def norms_shape(problem: Problem) -> tuple[int, int, int]:
    """Of what the kernel writes, a program an element. Of packed sequences (key heads, sequences and one of no keys, PARTS)."""
    if problem.extent.ragged:
        return problem.heads_kv, problem.extent.sequences + 1, PARTS
    return problem.batch, problem.heads_kv, PARTS


SPACE = SearchSpace(
    name="fwd_norms",
    dimensions={"BLOCK_R": (64,), "num_warps": (4,), "num_stages": (1,), "maxnreg": (0,)},
    constraints=(),
    default=lambda spec, arch: {"BLOCK_R": 64, "num_warps": 4, "num_stages": 1, "maxnreg": 0},
)
