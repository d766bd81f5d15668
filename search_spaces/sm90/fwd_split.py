"""Tiles of kernels/sm90/fwd_split.py: they follow from the head dims and the mask (search_spaces/lib/hopper_key_parts.py), and
nothing is searched."""

from fa2tune.search_spaces.lib.hopper_key_parts import ROWS, tile
from fa2tune.search_spaces.lib.hopper_key_parts import tiles as tiles
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import SearchSpace

#: Parts that keys are split into at most.
MOST_SPLITS = 256


def config_of(spec: Specialization, rows: int, splits: int) -> Config:
    """``splits``: 2 or more. ValueError: ``rows`` is none of ``tiles``."""
    found = tile(spec, rows)
    if found is None:
        raise ValueError(
            f"rows: got {rows} for head dims {spec.head_dim} and {spec.head_dim_v}, which no such tile fits"
        )
    return {**found, "EARLY": True, "SPLITS": splits}


def default(spec: Specialization, arch: int) -> Config:
    return {**config_of(spec, ROWS[-1], MOST_SPLITS), "EARLY": False}


def programs(problem: Problem, config: Config) -> int:
    """Parts of tiles: what is shared out among programs."""
    return int(problem.query_tiles(config["BLOCK_M"]) * problem.heads_q * config["SPLITS"])


SPACE = SearchSpace(
    name="fwd_hopper_split",
    dimensions={
        "BLOCK_M": ROWS,
        "BLOCK_N": (64, 128),
        "STAGES": (2, 3),
        "PINGPONG": (False, True),
        "Q_IN_REGISTERS": (False, True),
        "NUMBERED": (False, True),
        "IN_PARTS": (False, True),  # head dims are computed as sums of two powers of two
        "EARLY": (False, True),  # the kernel that puts parts together may start before this one has ended
        "SPLITS": tuple(range(2, MOST_SPLITS + 1)),
        "num_warps": (4,),
        "maxnreg": (0, 128),
    },
    constraints=(),
    default=default,
)
