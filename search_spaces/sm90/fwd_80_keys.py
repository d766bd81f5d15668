"""Tiles of kernels/sm90/fwd_80_keys.py: they follow from head dims. Nothing is searched."""

from fa2tune.search_spaces.lib.hopper import BARRIER_BYTES, SHARED_BYTES, narrow_blocks
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import SearchSpace

#: Query rows of a consumer group, groups, and query rows of a tile.
ROWS, GROUPS, TILE_ROWS = 64, 2, 128
#: Keys of a block, in two pieces that are powers of two.
MAIN, TAIL = 64, 16
KEYS = MAIN + TAIL
#: Columns of K that lie side by side in shared memory: 128 bytes.
CHUNK = 64
STAGES = 2
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
#: Of Q, K and V: with fewer, blocks of 128 keys have room.
COLUMNS = 256


#: Q, through whose memory O leaves, K and V.
SHARED = 2 * COLUMNS * (TILE_ROWS + 2 * STAGES * KEYS) + BARRIER_BYTES
assert SHARED <= SHARED_BYTES


def fits(spec: Specialization, arch: int) -> bool:
    """Whether the kernel computes such calls."""
    hooks, blocks = spec.mask_hooks, narrow_blocks(spec)
    plain = spec.dtype != "fp32" and spec.aligned and not spec.ragged and not spec.scored
    whole = (blocks["BLOCK_D"], blocks["REST_D"]) == (blocks["BLOCK_DV"], blocks["REST_DV"]) == (COLUMNS, 0)
    return arch == 90 and plain and whole and not (hooks.left or hooks.right)


def config_of(spec: Specialization) -> Config:
    """TAIL tells its configs from those of other kernels, and says to schedules what a block has behind 64 keys."""
    return {
        "BLOCK_M": TILE_ROWS, "TAIL": TAIL, "PINGPONG": False, "HEADS_PER_WAVE": 0, "num_warps": 4, "maxnreg": 0,
    }  # fmt: skip


def default(spec: Specialization, arch: int) -> Config:
    return config_of(spec)


SPACE = SearchSpace(
    name="fwd_hopper_80_keys",
    dimensions={
        "BLOCK_M": (TILE_ROWS,), "TAIL": (TAIL,), "PINGPONG": (False, True), "HEADS_PER_WAVE": (0,), "num_warps": (4,),
        "maxnreg": (0,),
    },
    constraints=(),
    default=default,
)  # fmt: skip
