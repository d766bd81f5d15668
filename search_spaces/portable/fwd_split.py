"""Tiles of kernels/portable/fwd_split.py: they follow from the rows of a key head, and nothing is searched."""

from collections.abc import Mapping

from fa2tune.search_spaces.lib.common import is_narrow, least_stages
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, Specialization, padded_head_dim
from fa2tune.spec.variant import DESCRIPTOR, POINTER, SearchSpace

#: Parts that keys are split into at most.
MOST_SPLITS = 256
#: BLOCK_M: rows of a tile, which are pairs of a query and one of the query heads of a key head.
ROWS = (16, 32, 64, 128)
#: padded head dim, at least 64 -> BLOCK_M -> (BLOCK_N, num_warps, num_stages). HOPPER: by a sweep on an H200, tiles of more
#: than 16 rows at head dim 128 alone (docs/experiments/few-queries.md).
Tiles = Mapping[int, Mapping[int, tuple[int, int, int]]]
HOPPER: Tiles = {
    64: {16: (128, 4, 3), 32: (128, 4, 3), 64: (128, 4, 3), 128: (128, 8, 3)},
    128: {16: (64, 4, 3), 32: (64, 4, 3), 64: (128, 4, 1), 128: (128, 8, 3)},
    256: {16: (64, 4, 3), 32: (32, 4, 3), 64: (64, 4, 2), 128: (64, 8, 2)},
}
#: GPUs without TMA, and those with 99 KiB of shared memory a block.
OLDER: Tiles = {
    64: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 2), 128: (64, 8, 2)},
    128: {16: (32, 4, 3), 32: (32, 4, 3), 64: (32, 4, 3), 128: (32, 8, 2)},
    256: {16: (16, 4, 3), 32: (16, 4, 3), 64: (32, 4, 2), 128: (32, 8, 1)},
}
FP32: Tiles = {
    64: {16: (32, 4, 2), 32: (32, 4, 2), 64: (32, 8, 1)},
    128: {16: (32, 4, 1), 32: (16, 4, 1), 64: (16, 8, 1)},
    256: {16: (16, 4, 1), 32: (16, 8, 1)},
}


def _tiles(spec: Specialization, arch: int) -> Mapping[int, tuple[int, int, int]]:
    widest = max(64, padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v))
    return (FP32 if spec.dtype == "fp32" else HOPPER if 90 <= arch < 120 else OLDER)[widest]


def tiles(spec: Specialization, arch: int) -> tuple[int, ...]:
    """Rows that a tile may have."""
    return tuple(_tiles(spec, arch))


def config_of(spec: Specialization, arch: int, tma: bool, rows: int, splits: int) -> Config:
    """``rows``: of a tile, one of ``tiles``; ``tma``: whether a descriptor can address K and V."""
    block_n, warps, stages = _tiles(spec, arch)[rows]
    described = tma and 90 <= arch < 120 and spec.dtype != "fp32"
    if described:
        stages = max(stages, least_stages(spec))
    elif 90 <= arch < 120 and spec.dtype != "fp32" and rows >= 64 and is_narrow(spec):
        block_n = min(block_n, 32)
    return {
        "BLOCK_M": rows, "BLOCK_N": block_n, "LOADS": DESCRIPTOR if described else POINTER, "IN_PARTS": splits > 1,
        "EARLY": arch >= 90, "SPLITS": splits, "num_warps": warps, "num_stages": stages, "maxnreg": 0,
    }  # fmt: skip


def default(spec: Specialization, arch: int) -> Config:
    return {**config_of(spec, arch, spec.aligned, ROWS[0], MOST_SPLITS), "EARLY": False}


def shared_bytes(spec: Specialization, config: Config) -> int:
    """Of a program, about. Where a tile is too small for wgmma Triton buffers one stage less, and P goes through shared memory.
    In one stage V takes the place of K."""
    d, dv = padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v)
    rows, keys, small = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_M"] < 64
    columns = max(1, config["num_stages"] - small) * (d + dv) if config["num_stages"] > 1 else max(d, dv)
    return int(ITEMSIZE[spec.dtype] * (keys * columns + rows * d + small * rows * keys)) + 1024


def row_tiles(problem: Problem, rows: int) -> int:
    """Tiles of so many rows over all key heads and the batch."""
    return -(-problem.seqlen_q * problem.group // rows) * problem.heads_kv * problem.batch


def programs(problem: Problem, config: Config) -> int:
    return int(row_tiles(problem, config["BLOCK_M"]) * config["SPLITS"])


SPACE = SearchSpace(
    name="fwd_split",
    dimensions={
        "BLOCK_M": ROWS,
        "BLOCK_N": (16, 32, 64, 128),
        "LOADS": (POINTER, DESCRIPTOR),  # of K and V
        "IN_PARTS": (False, True),  # True: another kernel puts the output together
        "EARLY": (False, True),  # it may start before the one before it has ended, and the next one then
        "SPLITS": tuple(range(1, MOST_SPLITS + 1)),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
        "maxnreg": (0,),
    },
    constraints=(),
    default=default,
)
