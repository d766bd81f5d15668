"""Tiles of kernels/sm90/bwd_dq_ds.py, which runs behind kernels/sm90/bwd_dkdv_ds.py. Nothing is searched."""

from fa2tune.search_spaces.lib.hopper import BARRIER_BYTES, SHARED_BYTES, columns, parts_pay
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import SearchSpace

BLOCK = 64  #: keys of a block, query rows of a group
#: Registers a thread of a consumer group gets, by groups: what 64 Ki leave beside a producer of 24.
REGISTERS = {2: 240, 3: 160}
MOST_STAGES = 5
MOST_SPLITS = 64


def stages(spec: Specialization, config: Config) -> int:
    """Blocks of K and dS that there is room for beside dQ on its way out."""
    wide = columns(spec, config)[0]
    room = SHARED_BYTES - BARRIER_BYTES - 2 * BLOCK * config["GROUPS"] * wide
    return min(MOST_STAGES, room // (2 * BLOCK * (wide + BLOCK * config["GROUPS"])))


SPACE = SearchSpace(
    name="bwd_dq_ds_hopper",
    dimensions={
        "GROUPS": (2, 3),
        "BLOCK_N": (BLOCK,),
        "WHOLE": (False, True),  # keys in one part: dQ leaves in the call's dtype
        "SPLITS": tuple(range(1, MOST_SPLITS + 1)),
        "IN_PARTS": (False, True),
        "num_warps": (4,),
    },
    constraints=(),
    default=lambda spec, arch: {
        "GROUPS": 2,
        "BLOCK_N": BLOCK,
        "WHOLE": True,
        "SPLITS": 1,
        "IN_PARTS": parts_pay(spec),
        "num_warps": 4,
    },
)


def passed_on(_spec: Specialization, config: Config) -> Config:
    """What the kernel before it says."""
    splits = config["DQ_SPLITS"]
    return {"GROUPS": config["DQ_GROUPS"], "IN_PARTS": config["IN_PARTS"], "WHOLE": splits == 1, "SPLITS": splits}


def programs(problem: Problem, config: Config) -> int:
    return int(problem.query_tiles(BLOCK * config["GROUPS"]) * problem.heads_q * config["SPLITS"])
