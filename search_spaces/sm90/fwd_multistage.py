"""Tiles of kernels/sm90/fwd_multistage.py: stages follow from head dims. Nothing is searched."""

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

#: Query rows of a tile: those of a wgmma. With 128, by eight warps that take the same steps at once, calls took longer.
ROWS = (64,)
#: Keys of a block.
KEYS = (64, 128)
#: Blocks of K and of V that are there or under way.
STAGES = (2, 3, 4)
#: Of a thread at most, and of a multiprocessor.
REGISTERS, SM_REGISTERS = 255, 65536
MORE_THAN_TILES = 40  #: registers of a thread beside scores, weights and output


def shared_bytes(spec: Specialization, rows: int, keys: int, stages: int) -> int:
    """Q, the stages of K and V and, where it has memory of its own, O."""
    d, dv = narrow_columns(spec)
    o = 0 if o_fits_q(narrow_blocks(spec)) else rows * dv
    return 2 * (rows * d + o + stages * keys * (d + dv)) + BARRIER_BYTES


def _live(spec: Specialization, keys: int) -> int:
    """Registers of a thread: scores, weights of the block before, and output."""
    return keys // 2 + keys // 4 + narrow_columns(spec)[1] // 2


def stages_of(spec: Specialization, rows: int, keys: int) -> int:
    """As many as leave room for a second program, where two programs of two stages have room; 0: not even two stages fit."""
    halves = SHARED_BYTES // 2 - 1024
    most = halves if shared_bytes(spec, rows, keys, STAGES[0]) <= halves else SHARED_BYTES
    return max((count for count in STAGES if shared_bytes(spec, rows, keys, count) <= most), default=0)


def fits(spec: Specialization, rows: int, keys: int) -> bool:
    """Whether shared memory holds Q, two stages and O, and registers what a thread has at once."""
    live = _live(spec, keys)
    return stages_of(spec, rows, keys) > 0 and live <= REGISTERS - spare_registers(spec, keys)


def tiles(spec: Specialization, arch: int) -> tuple[tuple[int, int], ...]:
    """(rows, keys) that a tile may have; none, where the kernel cannot compute such a call."""
    plain = spec.dtype != "fp32" and spec.aligned and not spec.ragged and not spec.scored
    if arch != 90 or not plain or spec.mask_hooks.left:
        return ()
    return tuple((rows, keys) for rows in ROWS for keys in KEYS if fits(spec, rows, keys))


def config_of(spec: Specialization, rows: int, keys: int) -> Config:
    """``rows``, ``keys``: one of ``tiles``."""
    return {
        "BLOCK_M": rows, "STAGE_KEYS": keys, "STAGES": stages_of(spec, rows, keys), "num_warps": rows // 16, "maxnreg": 0,
    }  # fmt: skip


def default(spec: Specialization, arch: int) -> Config:
    return config_of(spec, ROWS[0], KEYS[0])


def held(spec: Specialization, rows: int, keys: int) -> int:
    """Programs that a multiprocessor holds at once, by its shared memory, of which each takes 1 KiB more, and its registers."""
    of_registers = SM_REGISTERS // (2 * rows * (_live(spec, keys) + MORE_THAN_TILES))
    shared = shared_bytes(spec, rows, keys, stages_of(spec, rows, keys))
    return max(1, min((SHARED_BYTES + 1024) // (shared + 1024), of_registers))


def programs(problem: Problem, config: Config) -> int:
    """Tiles."""
    return int(problem.query_tiles(config["BLOCK_M"]) * problem.heads_q)


SPACE = SearchSpace(
    name="fwd_hopper_multistage",
    dimensions={"BLOCK_M": ROWS, "STAGE_KEYS": KEYS, "STAGES": STAGES, "num_warps": (4,), "maxnreg": (0,)},
    constraints=(),
    default=default,
)
