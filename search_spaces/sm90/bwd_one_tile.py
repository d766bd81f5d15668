"""Tiles of kernels/sm90/bwd_one_tile.py. Nothing is searched: they follow from head dims and keys."""

from fa2tune.search_spaces.lib.hopper import block_dims
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import SearchSpace

#: Keys of a tile, all that a key head may have, and query rows of a block.
KEYS, ROWS = 128, 64
#: Of a program: four have 64 keys.
WARPS = 8
#: Parts that the query blocks of a key head are split into at most.
MOST_PARTS = 64
#: Columns that fill the registers of a program, and those that leave room in shared memory for another K and V.
MOST_COLUMNS, NARROW_COLUMNS = 128, 64


def widths(spec: Specialization, config: Config) -> dict[str, int]:
    """Columns of a program's half of Q and K, and of V, O and dO."""
    return {name: wide // config["HALVES"] for name, wide in zip(("WIDTH", "WIDTH_V"), block_dims(spec), strict=True)}


def fits(spec: Specialization, arch: int) -> bool:
    """Whether the kernel can compute such a call, apart from its lengths."""
    return arch == 90 and spec.dtype != "fp32" and spec.aligned and not spec.ragged


def blocks(problem: Problem) -> int:
    """Query blocks of a key head, over all of its query heads."""
    return -(-problem.seqlen_q // ROWS) * problem.group


def programs(problem: Problem, config: Config, sm_count: int) -> int:
    """Halves of tiles; PERSISTENT: no more than multiprocessors."""
    tiles, halves = problem.batch * problem.heads_kv * config["PARTS"], config["HALVES"]
    if config["PERSISTENT"]:
        tiles = min(tiles, sm_count // halves)
    return int(tiles * halves)


def halves_of(spec: Specialization) -> tuple[int, ...]:
    """Into how many halves columns may be split: few heads of 128 columns gain by twice as many programs."""
    wide = max(block_dims(spec))
    return (1,) if wide <= NARROW_COLUMNS else (1, 2) if wide <= MOST_COLUMNS else (2,)


def can_take_turns(spec: Specialization) -> bool:
    """Whether shared memory holds K and V of two key heads."""
    return max(block_dims(spec)) <= NARROW_COLUMNS


def config_of(spec: Specialization, parts: int, halves: int | None = None, turns: bool = False) -> Config:
    """``halves``: None for as few as registers allow; ``turns``: PERSISTENT."""
    return {
        "BLOCK_M": ROWS, "BLOCK_N": KEYS, "HALVES": halves or halves_of(spec)[0],
        "STAGES": 1 if max(block_dims(spec)) > MOST_COLUMNS else 2, "PERSISTENT": turns, "PARTS": parts,
        "num_warps": WARPS,
    }  # fmt: skip


SPACE = SearchSpace(
    name="bwd_hopper_one_tile",
    dimensions={
        "BLOCK_M": (ROWS,),
        "BLOCK_N": (KEYS,),
        "HALVES": (1, 2),  # programs that share the columns of dQ, dK and dV
        "STAGES": (1, 2),  # query blocks that are loaded at once
        "PERSISTENT": (False, True),  # a program takes tiles in turns
        "PARTS": tuple(range(1, MOST_PARTS + 1)),
        "num_warps": (WARPS,),
    },
    constraints=(),
    default=lambda spec, arch: config_of(spec, 1),
)
