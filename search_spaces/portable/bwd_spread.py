"""kernels/portable/bwd_spread.py writes K and V once per part of a query group. Bound by memory: a single point."""

from fa2tune.spec.variant import SearchSpace

SPACE = SearchSpace(
    name="bwd_spread",
    dimensions={"BLOCK_N": (32,), "num_warps": (4,), "num_stages": (1,), "maxnreg": (0,)},
    constraints=(),
    default=lambda spec, arch: {"BLOCK_N": 32, "num_warps": 4, "num_stages": 1, "maxnreg": 0},
)
