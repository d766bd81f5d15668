"""kernels/portable/bwd_gather.py sums dK and dV of parts. Bound by memory: its tile is fixed."""

from fa2tune.spec.variant import SearchSpace

SPACE = SearchSpace(
    name="bwd_gather",
    dimensions={
        "BLOCK_N": (16,),
        "EARLY": (False, True),  # starts before the parts are written, and waits for them
        "num_warps": (4,),
        "num_stages": (1,),
        "maxnreg": (0,),
    },
    constraints=(),
    default=lambda spec, arch: {"BLOCK_N": 16, "EARLY": False, "num_warps": 4, "num_stages": 1, "maxnreg": 0},
)
