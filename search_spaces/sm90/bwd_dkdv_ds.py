"""Tiles of kernels/sm90/bwd_dkdv_ds.py. Nothing is searched: they are what shared memory has room for."""

from fa2tune.search_spaces.lib.common import REGISTERS_HOLD_TILES, TILES_FIT
from fa2tune.search_spaces.lib.hopper import (
    BARRIER_BYTES,
    SHARED_BYTES,
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
#: Of more columns, without a mask, a fourth stage and a second P pay where programs take tile after tile: level at 168 and 184,
#: 1 to 4 % faster in the mean at others. Up to so many they take 2 to 7 % longer.
FEW_COLUMNS = 144
MOST_SLICES = 256
MOST_DQ_SPLITS = 64  #: that kernels/sm90/bwd_dq_ds.py has
MOST_STAGES = 4


def fits(spec: Specialization, arch: int) -> bool:
    """Whether the kernel, and the one behind it, can compute such a call, if they can its mask."""
    able = arch == 90 and spec.dtype != "fp32" and spec.aligned and not spec.ragged
    return able and max(block_dims(spec)) > 128


def config_of(spec: Specialization, heads: int = 1) -> Config:
    """One tile a program. ``heads``: of a band. Mostly more stages or P gain nothing: docs/experiments/split-backward.md."""
    found = {
        "BLOCK_M": BLOCK, "BLOCK_N": BLOCK, "STAGES": 3, "P_STAGES": 1, "HEADS_PER_WAVE": heads, "PERSISTENT": False,
        "IN_PARTS": parts_pay(spec), "SLICES": 1, "DQ_SPLITS": 1, "num_warps": 4,
    }  # fmt: skip
    if shared_bytes(found, spec) > SHARED_BYTES:
        found["STAGES"] = 2
    return {**found, "DQ_GROUPS": 3 if columns(spec, found)[0] <= THREE_GROUPS else 2}


def of_row(problem: Problem, config: Config) -> Config:
    """That of a call whose row of kernels/sm90/bwd_dkdv.py has this config, whose band it has. Two groups make dQ of up to 128
    rows a head."""
    found = config_of(problem.specialization, config["HEADS_PER_WAVE"])
    return {**found, "DQ_GROUPS": 2} if problem.seqlen_q <= 2 * BLOCK else found


def tile_after_tile(spec: Specialization, config: Config) -> Config | None:
    """The same with programs that take tile after tile; None: there is no room for that."""
    more = not spec.mask_hooks.masked and columns(spec, config)[0] > FEW_COLUMNS
    under_way = ((4, 2), (3, 2), (3, 1)) if more else ((3, 1),)
    forms = ({**config, "PERSISTENT": True, "STAGES": stages, "P_STAGES": p} for stages, p in under_way)
    return next((one for one in forms if SPACE.broken(one, spec, 90) is None), None)


def shared_bytes(config: Config, spec: Specialization) -> int:
    """K, V, Q and dO in their rings, P in its, and dS."""
    tiles = (1 + config["STAGES"]) * sum(columns(spec, config)) + (config["P_STAGES"] + 1) * BLOCK
    return int(2 * BLOCK * tiles) + BARRIER_BYTES


def programs(problem: Problem, config: Config, sm_count: int) -> int:
    """One a key tile; PERSISTENT: at most one a multiprocessor."""
    tiles = problem.key_tiles(BLOCK) * problem.heads_kv
    return min(tiles, sm_count) if config["PERSISTENT"] else tiles


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
        "PERSISTENT": (False, True),  # a program takes tile after tile
        "P_STAGES": (1, 2),  # tiles of P on their way from one group to the other
        "HEADS_PER_WAVE": (1, 2, 4, 8, 16, 64),
        "DQ_GROUPS": (2, 3),  # of the kernel behind it
        "DQ_SPLITS": tuple(range(1, MOST_DQ_SPLITS + 1)),  # parts of the keys there
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
            "same_head_dims",
            "PERSISTENT needs the same head dim of Q and V",
            "K shares the slots of Q, through which dV leaves, and V those of dO",
            lambda config, spec, arch: not config["PERSISTENT"] or len(set(columns(spec, config))) == 1,
        ),
        Constraint(
            "stages_ahead",
            "PERSISTENT needs three stages or more",
            "the last block of a tile, K and V of the next tile and its first block are there at the same time",
            lambda config, spec, arch: not config["PERSISTENT"] or config["STAGES"] >= 3,
        ),
        Constraint(
            "splits_of_whole_calls",
            "DQ_SPLITS above 1 needs SLICES 1",
            "slices would add up their parts in turn; few tiles of queries have no need of slices",
            lambda config, spec, arch: config["DQ_SPLITS"] == 1 or config["SLICES"] == 1,
        ),
        Constraint(
            *TILES_FIT,
            "K, V, P, dS and the stages of Q and dO exceed 227 KiB, the limit per block on Hopper",
            lambda config, spec, arch: shared_bytes(config, spec) <= SHARED_BYTES,
        ),
    ),
    default=lambda spec, arch: config_of(spec),
)
