"""kernels/portable/packed_order.py and packed_orders.py work on a few numbers and are not searched. Of the first one the next
kernel says BLOCK_Q and EARLY."""

from fa2tune.spec.problem import Problem
from fa2tune.spec.variant import SearchSpace, Workspaces

WORDS = 8  #: int32 of an entry, 32 bytes
#: Tiles, of sequences that are alike, whose sequences take turns: all. Fewer keep less K and V in use at a time, and were not
#: measured; by simulation 64 balance as well (docs/experiments/varlen.md).
IN_TURNS = ALL = 1 << 30
#: The same of the split backward's dQ: few, so that HEADS_PER_WAVE keeps about as much K and V in use as in the dense call it
#: was tuned for. Not measured.
DQ_IN_TURNS = 32
#: (queries of a tile, tiles in turns) of what packed_orders.py makes, in this order: of forwards, down to tiles of eight query
#: heads, and of dQ. A call with other tiles orders them itself.
TABLES = (
    *((block, ALL) for block in (192, 128, 64, 32, 16, 8)),
    *((block, DQ_IN_TURNS) for block in (192, 128)),
)


def order_shape(problem: Problem, block: int) -> tuple[int, int]:
    """Of what the kernel writes for tiles of ``block`` queries: room for as many as any lengths can need, and the head."""
    return problem.query_tiles(block) + 1, WORDS


def order_and_counter(problem: Problem, block: int) -> Workspaces:
    """What the kernel writes, whose head has the counter of tiles taken."""
    return {"order": (order_shape(problem, block), "i32"), "taken": "order"}


def tables_shape(problem: Problem, count: int = len(TABLES)) -> tuple[int, int]:
    """Of the first ``count`` of them, one after the other."""
    return sum(order_shape(problem, block)[0] for block, _ in TABLES[:count]), WORDS


def table_at(problem: Problem, block: int, in_turns: int) -> int | None:
    """At which byte of all of them one begins; None: it is none of them."""
    if (block, in_turns) not in TABLES:
        return None
    before, words = tables_shape(problem, TABLES.index((block, in_turns)))
    return 4 * words * before


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

TABLES_SPACE = SearchSpace(
    name="packed_orders",
    dimensions={"num_warps": (1,), "num_stages": (1,), "maxnreg": (0,)},
    constraints=(),
    default=lambda spec, arch: {"num_warps": 1, "num_stages": 1, "maxnreg": 0},
)
