"""kernels/portable/packed_order.py works on a few numbers and is not searched: the next kernel says BLOCK_Q and EARLY."""

from fa2tune.spec.problem import Problem
from fa2tune.spec.variant import SearchSpace

WORDS = 8  #: int32 of an entry, 32 bytes
#: Tiles, of sequences that are alike, whose sequences take turns: all. Fewer keep less K and V in use at a time, and were not
#: measured; by simulation 64 balance as well (docs/experiments/varlen.md).
IN_TURNS = ALL = 1 << 30


def order_shape(problem: Problem, block: int) -> tuple[int, int]:
    """Of what the kernel writes for tiles of ``block`` queries: room for as many as any lengths can need, and the head."""
    return problem.query_tiles(block) + 1, WORDS


_TILES = {"BLOCK_Q": 128, "IN_TURNS": IN_TURNS, "EARLY": False}

SPACE = SearchSpace(
    name="packed_order",
    dimensions={
        "BLOCK_Q": (64, 128, 192),
        "IN_TURNS": (32, 64, ALL),
        "EARLY": (False, True),  # the next kernel may start before this one has ended
        "num_warps": (1,),
        "num_stages": (1,),
        "maxnreg": (0,),
    },
    constraints=(),
    default=lambda spec, arch: {**_TILES, "num_warps": 1, "num_stages": 1, "maxnreg": 0},
)
