"""kernels/portable/fwd_combine.py is bound by memory: its tile follows from the number of parts, and nothing is searched."""

from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import SearchSpace

#: Parts that a program has at once: the fewest that hold all, or the most; and rows, so that BLOCK_R * BLOCK_S is PARTS. With
#: one row a program, 2872 rows of 5 parts took 12 us more than of 4.
AT_ONCE = (4, 8, 16, 32)
PARTS = 32
#: Parts that there are at most.
MOST_SPLITS = 256


def config_of(arch: int, splits: int) -> Config:
    at_once = next((parts for parts in AT_ONCE if splits <= parts), AT_ONCE[-1])
    return {
        "BLOCK_R": PARTS // at_once, "BLOCK_S": at_once, "EARLY": arch >= 90, "SPLITS": splits, "num_warps": 4,
        "num_stages": 1, "maxnreg": 0,
    }  # fmt: skip


def default(spec: Specialization, arch: int) -> Config:
    return {**config_of(arch, MOST_SPLITS), "EARLY": False}


SPACE = SearchSpace(
    name="fwd_combine",
    dimensions={
        "BLOCK_R": tuple(PARTS // parts for parts in AT_ONCE),
        "BLOCK_S": AT_ONCE,
        "EARLY": (False, True),  # starts before the parts are written, and waits for them
        "SPLITS": tuple(range(2, MOST_SPLITS + 1)),
        "num_warps": (4,),
        "num_stages": (1,),
        "maxnreg": (0,),
    },
    constraints=(),
    default=default,
)
