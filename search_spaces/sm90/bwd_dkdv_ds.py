"""Tiles of kernels/sm90/bwd_dkdv_ds.py. Nothing is searched: they are those of rows of kernels/sm90/bwd_dkdv.py, as far as
shared memory has room for dS next to them."""

from fa2tune.search_spaces.lib.common import REGISTERS_HOLD_TILES, TILES_FIT
from fa2tune.search_spaces.lib.hopper import (
    BARRIER_BYTES,
    SHARED_BYTES,
    begins_within_sectors,
    block_dims,
    columns,
    parts_pay,
)
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import Constraint, SearchSpace

BLOCK = 64  #: queries of a block, keys of a tile
REGISTERS = 240  #: a thread of a consumer group
#: Columns that three groups of the kernel behind it (kernels/sm90/bwd_dq_ds.py) have registers for, of 64 query rows each. Two
#: read K more often.
THREE_GROUPS = 192
MOST_SLICES = 256
MOST_STAGES = 4


def fits(spec: Specialization, arch: int) -> bool:
    """Whether the kernel, and the one behind it, can compute such a call, if they can its mask."""
    able = arch == 90 and spec.dtype != "fp32" and spec.aligned and not spec.ragged
    return able and max(block_dims(spec)) > 128


def config_of(spec: Specialization, stages: int = 2, p_stages: int = 1, heads: int = 1) -> Config:
    """``stages``, ``p_stages``, ``heads``: as the row of kernels/sm90/bwd_dkdv.py has them."""
    found = {
        "BLOCK_M": BLOCK, "BLOCK_N": BLOCK, "STAGES": stages, "P_STAGES": p_stages, "HEADS_PER_WAVE": heads,
        "IN_PARTS": parts_pay(spec), "SLICES": 1, "num_warps": 4,
    }  # fmt: skip
    return {**found, "DQ_GROUPS": 3 if columns(spec, found)[0] <= THREE_GROUPS else 2}


def of_row(problem: Problem, config: Config) -> Config:
    """That of a call whose row of kernels/sm90/bwd_dkdv.py has this config. Of rows that are slow to load as many tiles as fit
    are under way (docs/experiments/split-backward.md). Two groups make dQ of up to 128 rows a head."""
    spec, stages, p_stages = problem.specialization, config["STAGES"], config["P_STAGES"]
    found = config_of(spec, stages, p_stages, config["HEADS_PER_WAVE"])
    while shared_bytes(found, spec) > SHARED_BYTES:
        stages, p_stages = (stages, p_stages - 1) if p_stages > 1 else (stages - 1, p_stages)
        found = {**found, "STAGES": stages, "P_STAGES": p_stages}
    if begins_within_sectors(spec):
        more = ({**found, "STAGES": count, "P_STAGES": 1} for count in range(MOST_STAGES, stages, -1))
        found = next((one for one in more if shared_bytes(one, spec) <= SHARED_BYTES), found)
    return {**found, "DQ_GROUPS": 2} if problem.seqlen_q <= 2 * BLOCK else found


def shared_bytes(config: Config, spec: Specialization) -> int:
    """K, V, Q and dO in their rings, P in its, and dS."""
    tiles = (1 + config["STAGES"]) * sum(columns(spec, config)) + (config["P_STAGES"] + 1) * BLOCK
    return int(2 * BLOCK * tiles) + BARRIER_BYTES


def ds_shape(problem: Problem) -> tuple[int, ...]:
    """Of dS transposed: whole tiles of keys, and of rows."""
    keys, rows = (-(-length // BLOCK) * BLOCK for length in (problem.seqlen_k, problem.seqlen_q))
    return problem.batch, problem.heads_q, keys, rows


SPACE = SearchSpace(
    name="bwd_dkdv_ds_hopper",
    dimensions={
        "BLOCK_M": (BLOCK,),
        "BLOCK_N": (BLOCK,),
        "STAGES": tuple(range(2, MOST_STAGES + 1)),  # tiles of Q and dO under way
        "P_STAGES": (1, 2),  # tiles of P on their way from one group to the other
        "HEADS_PER_WAVE": (1, 2, 4, 8, 16, 64),
        "DQ_GROUPS": (2, 3),  # of the kernel behind it
        "IN_PARTS": (False, True),  # head dims are computed as sums of two powers of two
        "SLICES": tuple(
            range(1, MOST_SLICES + 1)
        ),  # of batch and key heads, whose dS lies in memory one after the other
        "num_warps": (4,),
    },
    constraints=(
        Constraint(
            *REGISTERS_HOLD_TILES,
            "three groups have 160 registers a thread, too few for a product of 256 columns",
            lambda config, spec, arch: config["DQ_GROUPS"] == 2 or columns(spec, config)[0] <= THREE_GROUPS,
        ),
        Constraint(
            *TILES_FIT,
            "K, V, P, dS and the stages of Q and dO exceed 227 KiB, the limit per block on Hopper",
            lambda config, spec, arch: shared_bytes(config, spec) <= SHARED_BYTES,
        ),
    ),
    default=lambda spec, arch: config_of(spec),
)
