"""Search space of kernels/sm90/bwd_dq.py."""

from fa2tune.search_spaces.lib.common import REGISTERS_HOLD_TILES, TILES_FIT
from fa2tune.search_spaces.lib.hopper import (
    BARRIER_BYTES,
    HEAD_DIM_HAS_PARTS,
    PACKED_WITHIN_32_BITS,
    SHARED_BYTES,
    SIXTEEN_BIT,
    TMA_ADDRESSES_TENSORS,
    block_dims,
    columns,
    parts_pay,
)
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import Constraint, SearchSpace, added

ROWS = 64  #: query rows of a consumer group
#: Registers a thread of a consumer group gets, by groups: what 64 Ki leave beside a producer of 24.
REGISTERS = {2: 240, 3: 160}

#: (GROUPS, BLOCK_N, K_STAGES, V_STAGES) by padded head dim, best of the sweeps in docs/experiments.md
BEST = {64: (3, 64, 2, 2), 128: (2, 128, 2, 1), 256: (2, 64, 2, 1)}


def default(spec: Specialization, arch: int) -> Config:
    """Where the search starts."""
    groups, block_n, k_stages, v_stages = BEST[max(block_dims(spec))]
    best = {
        "GROUPS": groups, "BLOCK_N": block_n, "K_STAGES": k_stages, "V_STAGES": v_stages,
        "HEADS_PER_WAVE": 4, "IN_PARTS": False, "num_warps": 4,
    }  # fmt: skip
    return fitted(spec, best)


def fitted(spec: Specialization, config: Config) -> Config:
    """The config of a row of other head dims, padded as far as these, for these: in parts. More stages, for which there is then
    room, gained nothing (docs/experiments/head-dims.md)."""
    return {**config, "IN_PARTS": parts_pay(spec)}


def rows(config: Config) -> int:
    """Query rows of a tile."""
    return ROWS * int(config["GROUPS"])


def _live_registers(config: Config, spec: Specialization) -> int:
    """Registers a consumer thread holds at once: dQ, scores and dP, and dS as an operand."""
    return int(columns(spec, config)[0] // 2 + config["BLOCK_N"] + config["BLOCK_N"] // 4)


def _shared_bytes(config: Config, spec: Specialization) -> int:
    d, dv = columns(spec, config)
    rings = config["BLOCK_N"] * (config["K_STAGES"] * d + config["V_STAGES"] * dv)
    return int(2 * (rows(config) * (d + dv) + rings)) + BARRIER_BYTES


SPACE = SearchSpace(
    name="bwd_dq_hopper",
    dimensions={
        "GROUPS": (2, 3),  # of consumers, four warps and 64 query rows each
        "BLOCK_N": (64, 128),
        "K_STAGES": (2, 3),  # K tiles under way; one, and nothing is under way while dS K runs (a third slower)
        "V_STAGES": (1, 2),
        "HEADS_PER_WAVE": (1, 2, 4, 8, 16, 64),
        "IN_PARTS": added(False, True, older=False),  # head dims as sums of two powers of two, 192 as 128 + 64
        "num_warps": (4,),
        "EARLY_START": added(False, older=False),  # the next kernel started before this one ends; not searched
        # divisors as kernels/lib/division.py has them; not searched: short calls have them
        "DIVISORS": added(False, older=False),
    },
    constraints=(
        SIXTEEN_BIT,
        TMA_ADDRESSES_TENSORS,
        HEAD_DIM_HAS_PARTS,
        PACKED_WITHIN_32_BITS,
        Constraint(
            *REGISTERS_HOLD_TILES,
            "dQ, the scores, dP and dS are in registers at the same time; with fewer than 16 left ptxas spills and serialises "
            "the products (C7512)",
            lambda config, spec, arch: _live_registers(config, spec) <= REGISTERS[config["GROUPS"]] - 16,
        ),
        Constraint(
            *TILES_FIT,
            "Q, dO and the stages of K and V exceed 227 KiB, the limit per block on Hopper",
            lambda config, spec, arch: _shared_bytes(config, spec) <= SHARED_BYTES,
        ),
    ),
    default=default,
    default_from=64,
)
