"""The tile of kernels/sm90/bwd_dq_split.py: that of rows of kernels/sm90/bwd_dq.py at head dims above 128, where registers hold
no other one. Nothing is searched."""

from fa2tune.search_spaces.lib.hopper import parts_pay
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import SearchSpace

GROUPS, BLOCK_N = 2, 64
ROWS = 64 * GROUPS  #: query rows of a tile
#: Parts that keys are split into at most.
MOST_SPLITS = 128


def config_of(spec: Specialization, splits: int) -> Config:
    """``splits``: 2 or more."""
    return {
        "GROUPS": GROUPS, "BLOCK_N": BLOCK_N, "K_STAGES": 2, "V_STAGES": 1, "IN_PARTS": parts_pay(spec), "SPLITS": splits,
        "num_warps": 4,
    }  # fmt: skip


def fits(spec: Specialization, arch: int) -> bool:
    """Whether the kernel can compute such a call."""
    return arch == 90 and spec.dtype != "fp32" and spec.aligned and not spec.ragged


def programs(problem: Problem, splits: int) -> int:
    """Parts of tiles."""
    return int(problem.query_tiles(ROWS) * problem.heads_q * splits)


SPACE = SearchSpace(
    name="bwd_dq_hopper_split",
    dimensions={
        "GROUPS": (GROUPS,),
        "BLOCK_N": (BLOCK_N,),
        "K_STAGES": (2,),
        "V_STAGES": (1,),
        "IN_PARTS": (False, True),  # head dims are computed as sums of two powers of two
        "SPLITS": tuple(range(2, MOST_SPLITS + 1)),
        "num_warps": (4,),
    },
    constraints=(),
    default=lambda spec, arch: config_of(spec, MOST_SPLITS),
)
