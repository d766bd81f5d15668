"""kernels/sm90/bwd_prepare.py is bound by memory at any reasonable block size: a single point, not searched."""

from fa2tune.spec.variant import SearchSpace

ROWS = 32  #: of a block
#: Parameters: divisors, as kernels/lib/division.py has them, of a head's blocks and of a batch entry's heads.
BY = ("by_prepared", "by_query_heads")

SPACE = SearchSpace(
    name="bwd_prepare_hopper",
    dimensions={"BLOCK_R": (ROWS,), "num_warps": (4,), "num_stages": (1,), "maxnreg": (0,)},
    constraints=(),
    default=lambda spec, arch: {"BLOCK_R": ROWS, "num_warps": 4, "num_stages": 1, "maxnreg": 0},
)
