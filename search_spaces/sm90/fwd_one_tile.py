"""Tiles of kernels/sm90/fwd_one_tile.py: they follow from head dims and the call's heads and lengths. Nothing is searched."""

from fa2tune.search_spaces.lib.hopper import (
    BARRIER_BYTES,
    SHARED_BYTES,
    narrow_blocks,
    narrow_columns,
    o_fits_q,
    spare_registers,
)
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import SearchSpace

#: Query rows of a tile: those of a wgmma of one warpgroup or of two.
ROWS = (64, 128)
#: Keys of a tile, all that a key head may have.
KEYS = (64, 128, 256)
#: Of a thread at most, and of a multiprocessor.
REGISTERS, SM_REGISTERS = 255, 65536
#: Of a thread, beside weights and output, and beside scores and weights: as compiled, 18 registers more at most.
MORE_THAN_OUTPUT, MORE_THAN_SCORES = 30, 8


def shared_bytes(spec: Specialization, rows: int, keys: int) -> int:
    """Q, K, V and, where it has memory of its own, O."""
    d, dv = narrow_columns(spec)
    return 2 * (rows * d + (0 if o_fits_q(narrow_blocks(spec)) else rows * dv) + keys * (d + dv)) + BARRIER_BYTES


def fits(spec: Specialization, rows: int, keys: int) -> bool:
    """Whether shared memory holds Q, K, V and O, and registers scores beside their weights, or those beside the output."""
    live = keys // 4 + max(keys, narrow_columns(spec)[1]) // 2
    return shared_bytes(spec, rows, keys) <= SHARED_BYTES and live <= REGISTERS - spare_registers(spec, min(keys, 128))


def tiles(spec: Specialization, arch: int) -> tuple[tuple[int, int], ...]:
    """(rows, keys) that a tile may have; none, where the kernel cannot compute such a call."""
    if arch != 90 or spec.dtype == "fp32" or not spec.aligned or spec.ragged:
        return ()
    return tuple((rows, keys) for rows in ROWS for keys in KEYS if fits(spec, rows, keys))


def config_of(spec: Specialization, rows: int, keys: int) -> Config:
    """``rows``, ``keys``: one of ``tiles``."""
    return {"BLOCK_M": rows, "KEYS": keys, "num_warps": rows // 16, "maxnreg": 0}


def default(spec: Specialization, arch: int) -> Config:
    return config_of(spec, ROWS[0], KEYS[0])


def held(spec: Specialization, rows: int, keys: int) -> int:
    """Programs that a multiprocessor holds at once, by its shared memory, of which each takes 1 KiB more, and its registers."""
    live = max(keys // 4 + narrow_columns(spec)[1] // 2 + MORE_THAN_OUTPUT, 3 * keys // 4 + MORE_THAN_SCORES)
    of_registers = SM_REGISTERS // (2 * rows * live)
    return max(1, min((SHARED_BYTES + 1024) // (shared_bytes(spec, rows, keys) + 1024), of_registers))


def programs(problem: Problem, config: Config) -> int:
    """Tiles."""
    return int(problem.query_tiles(config["BLOCK_M"]) * problem.heads_q)


SPACE = SearchSpace(
    name="fwd_hopper_one_tile",
    dimensions={"BLOCK_M": ROWS, "KEYS": KEYS, "num_warps": (4, 8), "maxnreg": (0,)},
    constraints=(),
    default=default,
)
