"""kernels/portable/bwd_dq_combine.py is bound by memory: its tile is fixed."""

from fa2tune.spec.variant import SearchSpace

#: Rows that a program has, and parts of them at once: few queries are to be many programs, each of many loads under way.
ROWS, PARTS = 2, 8

SPACE = SearchSpace(
    name="bwd_dq_combine",
    dimensions={
        "BLOCK_R": (ROWS,),
        "BLOCK_S": (PARTS,),
        "EARLY": (False, True),  # starts before the parts are written, and waits for them
        "num_warps": (4,),
        "num_stages": (1,),
        "maxnreg": (0,),
    },
    constraints=(),
    default=lambda spec, arch: {
        "BLOCK_R": ROWS, "BLOCK_S": PARTS, "EARLY": False, "num_warps": 4, "num_stages": 1, "maxnreg": 0,
    },
)  # fmt: skip
