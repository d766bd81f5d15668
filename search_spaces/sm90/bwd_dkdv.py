"""Search space of kernels/sm90/bwd_dkdv.py."""

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

KEYS = 64  #: of a group that owns keys
#: Registers a thread of a consumer group gets: what 64 Ki leave beside a producer of 24.
REGISTERS = 240
#: (OWN, BLOCK_M, BLOCK_N, STAGES, P_STAGES) by padded head dim, best of the sweeps in docs/experiments.md
BEST = {64: ("keys", 64, 128, 3, 1), 128: ("keys", 64, 128, 2, 1), 256: ("products", 64, 64, 2, 2)}


def default(spec: Specialization, arch: int) -> Config:
    """Where the search starts."""
    own, block_m, block_n, stages, p_stages = BEST[max(block_dims(spec))]
    best = {
        "OWN": own, "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": stages, "P_STAGES": p_stages,
        "HEADS_PER_WAVE": 4, "IN_PARTS": False, "num_warps": 4,
    }  # fmt: skip
    return fitted(spec, best)


def fitted(spec: Specialization, config: Config) -> Config:
    """The config of a row of other head dims, padded as far as these, for these: in parts. A third stage, for which there is
    then room, gained nothing (docs/experiments/head-dims.md)."""
    return {**config, "IN_PARTS": parts_pay(spec)}


def _live_registers(config: Config, spec: Specialization) -> int:
    """Registers a consumer thread holds at once: accumulators, float32 tiles of 64 keys x BLOCK_M queries and operands made of
    them, lse or delta of every fourth query."""
    d, dv = columns(spec, config)
    m = config["BLOCK_M"]
    if config["OWN"] == "keys":
        return int(d // 2 + dv // 2 + m + 2 * (m // 4))
    return int(config["BLOCK_N"] // 64 * (max(d, dv) // 2 + m // 2 + m // 4) + m // 4)


def _shared_bytes(config: Config, spec: Specialization) -> int:
    d, dv = columns(spec, config)
    tiles = (config["BLOCK_N"] + config["STAGES"] * config["BLOCK_M"]) * (d + dv)
    p = 0 if config["OWN"] == "keys" else config["P_STAGES"] * config["BLOCK_N"] * config["BLOCK_M"]
    return int(2 * (tiles + p)) + BARRIER_BYTES


SPACE = SearchSpace(
    name="bwd_dkdv_hopper",
    dimensions={
        "OWN": ("keys", "products"),  # what a group makes: dK and dV of 64 keys, or one of them of all the tile's keys
        "BLOCK_M": (64,),  # 32: half of the shared memory bandwidth wasted; 128: no registers
        "BLOCK_N": (64, 128),
        "STAGES": (2, 3, 4),  # tiles of Q and dO under way
        "P_STAGES": (1, 2),  # tiles of P on their way from one group to the other
        "HEADS_PER_WAVE": (1, 2, 4, 8, 16, 64),
        "IN_PARTS": added(False, True, older=False),  # head dims as sums of two powers of two, 192 as 128 + 64
        "num_warps": (4,),
        # started before dQ's kernel ends, for whose end it waits before it reads delta; not searched
        "EARLY_START": added(False, older=False),
        # divisors as kernels/lib/division.py has them; not searched: short calls have them
        "DIVISORS": added(False, older=False),
    },
    constraints=(
        SIXTEEN_BIT,
        TMA_ADDRESSES_TENSORS,
        HEAD_DIM_HAS_PARTS,
        PACKED_WITHIN_32_BITS,
        Constraint(
            "two_groups_of_keys",
            "OWN keys needs BLOCK_N 128 and P_STAGES 1",
            "two groups that own 64 keys each need a tile of 128 keys, and exchange no P",
            lambda config, spec, arch: (
                config["OWN"] != "keys" or (config["BLOCK_N"] == 128 and config["P_STAGES"] == 1)
            ),
        ),
        Constraint(
            "keys_where_they_fit",
            "OWN products is slower than OWN keys, which fits",
            "where a group's registers hold dK and dV of 64 keys, it need not wait for the other's P: 4 to 27 % faster",
            lambda config, spec, arch: config["OWN"] == "keys" or max(block_dims(spec)) > 128,
        ),
        Constraint(
            *REGISTERS_HOLD_TILES,
            "accumulators, scores and the operands made from them are in registers at the same time; with fewer than 16 left "
            "ptxas spills and serialises the products (C7512)",
            lambda config, spec, arch: _live_registers(config, spec) <= REGISTERS - 16,
        ),
        Constraint(
            *TILES_FIT,
            "K, V, P and the stages of Q and dO exceed 227 KiB, the limit per block on Hopper",
            lambda config, spec, arch: _shared_bytes(config, spec) <= SHARED_BYTES,
        ),
    ),
    default=default,
    default_from=64,
)
