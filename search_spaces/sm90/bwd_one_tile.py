"""Tiles of kernels/sm90/bwd_one_tile.py. Nothing is searched: they follow from head dims and keys."""

from fa2tune.search_spaces.lib.hopper import block_dims
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import SearchSpace

#: Keys of a tile, all that a key head may have; and query rows of a block.
KEYS, ROWS = (64, 128), (64, 128)
#: Parts that the query blocks of a key head are split into at most.
MOST_PARTS = 64
#: Columns that fill the registers of a program.
MOST_COLUMNS = 128


def widths(spec: Specialization, config: Config) -> dict[str, int]:
    """Columns of a program's half of Q and K, and of V, O and dO."""
    return {name: wide // config["HALVES"] for name, wide in zip(("WIDTH", "WIDTH_V"), block_dims(spec), strict=True)}


def fits(spec: Specialization, arch: int) -> bool:
    """Whether the kernel can compute such a call, apart from its lengths."""
    return arch == 90 and spec.dtype != "fp32" and spec.aligned and not spec.ragged and spec.score == "none"


def keys_of(seqlen_k: int) -> int | None:
    """Of the tile for so many keys; None: they are more than a tile has."""
    return next((keys for keys in KEYS if seqlen_k <= keys), None)


def blocks(problem: Problem, config: Config) -> int:
    """Query blocks of a key head, over all of its query heads."""
    return -(-problem.seqlen_q // config["BLOCK_M"]) * problem.group


def programs(problem: Problem, config: Config) -> int:
    return int(problem.batch * problem.heads_kv * config["PARTS"] * config["HALVES"])


def config_of(spec: Specialization, keys: int, parts: int) -> Config:
    """``keys``: of a tile, one of KEYS."""
    halves = 2 if max(block_dims(spec)) > MOST_COLUMNS else 1
    return {
        "BLOCK_M": 64, "BLOCK_N": keys, "HALVES": halves, "STAGES": 1 if halves == 2 else 2, "PARTS": parts,
        "num_warps": keys // 16, "maxnreg": 0,
    }  # fmt: skip


SPACE = SearchSpace(
    name="bwd_hopper_one_tile",
    dimensions={
        "BLOCK_M": ROWS,
        "BLOCK_N": KEYS,
        "HALVES": (1, 2),  # programs that share the columns of dQ, dK and dV
        "STAGES": (1, 2, 3),  # query blocks that are loaded at once
        "PARTS": tuple(range(1, MOST_PARTS + 1)),
        "num_warps": (4, 8),  # 64 keys each four
        "maxnreg": (0, 128),
    },
    constraints=(),
    default=lambda spec, arch: config_of(spec, KEYS[-1], 1),
)
