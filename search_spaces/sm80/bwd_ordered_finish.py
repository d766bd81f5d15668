"""kernels/sm80/bwd_ordered_finish.py is bound by memory at any reasonable block size: a single point, not searched."""

from fa2tune.spec.variant import SearchSpace

SPACE = SearchSpace(
    name="bwd_ordered_finish_sm80",
    dimensions={"BLOCK_R": (32,), "num_warps": (4,), "num_stages": (1,), "maxnreg": (0,)},
    constraints=(),
    default=lambda spec, arch: {"BLOCK_R": 32, "num_warps": 4, "num_stages": 1, "maxnreg": 0},
)
