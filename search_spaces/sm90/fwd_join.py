"""kernels/sm90/fwd_join.py is bound by memory: its tile is fixed, and the rest follows from kernels/sm90/fwd_shares.py."""

from fa2tune.search_spaces.lib import hopper_shares
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import SearchSpace

ROWS, WARPS = 8, 4  #: of a program


def default(spec: Specialization, arch: int) -> Config:
    return {
        "BLOCK_R": ROWS, "BLOCK_M": hopper_shares.TILE_ROWS, "BLOCK_N": 64, "EARLY": False, "SHARES": hopper_shares.MOST_SHARES,
        "ROUNDS": 0, "num_warps": WARPS, "num_stages": 1, "maxnreg": 0,
    }  # fmt: skip


SPACE = SearchSpace(
    name="fwd_hopper_join",
    dimensions={
        "BLOCK_R": (ROWS,),
        **hopper_shares.BOTH,
        "num_warps": (WARPS,),
        "num_stages": (1,),
        "maxnreg": (0,),
    },
    constraints=(),
    default=default,
)
