"""Tiles of kernels/portable/bwd_one_tile.py. Nothing is searched: they follow from head dims and keys."""

from fa2tune.spec.problem import MIN_HEAD_DIM, Config, Problem, Specialization, padded_head_dim
from fa2tune.spec.variant import DESCRIPTOR, POINTER, SearchSpace

#: Keys of a tile, all that a key head may have; and query rows of a block.
KEYS, ROWS = (64, 128), (64, 128)
#: Parts that the query blocks of a key head are split into at most.
MOST_PARTS = 64


def widths(spec: Specialization, config: Config) -> dict[str, int]:
    """Columns of a program's half of Q and K, and of V, O and dO."""
    wide = {"WIDTH": spec.head_dim, "WIDTH_V": spec.head_dim_v}
    return {name: max(MIN_HEAD_DIM, padded_head_dim(dim) // config["HALVES"]) for name, dim in wide.items()}


def fits(spec: Specialization) -> bool:
    """Whether the kernel can compute such a call, apart from its lengths."""
    return spec.dtype != "fp32" and not spec.ragged and spec.score == "none"


def keys_of(seqlen_k: int) -> int | None:
    """Of the tile for so many keys; None: they are more than a tile has."""
    return next((keys for keys in KEYS if seqlen_k <= keys), None)


def blocks(problem: Problem, rows: int) -> int:
    """Query blocks of a key head, over all of its query heads."""
    return -(-problem.seqlen_q // rows) * problem.group


def programs(problem: Problem, config: Config) -> int:
    return int(problem.batch * problem.heads_kv * config["PARTS"] * config["HALVES"])


def config_of(spec: Specialization, keys: int, parts: int, tma: bool) -> Config:
    """``keys``: of a tile, one of KEYS; ``tma``: whether descriptors can address Q, O and dO."""
    widest = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v))
    halves = 2 if widest > 128 else 1
    return {
        "BLOCK_M": 64, "BLOCK_N": keys, "HALVES": halves, "STAGES": 1 if halves == 2 else 2,
        "LOADS": DESCRIPTOR if tma else POINTER, "PARTS": parts, "num_warps": 4 if keys == 64 else 8, "num_stages": 1,
        "maxnreg": 0,
    }  # fmt: skip


SPACE = SearchSpace(
    name="bwd_one_tile",
    dimensions={
        "BLOCK_M": ROWS,
        "BLOCK_N": KEYS,
        "HALVES": (1, 2),  # programs that share the columns of dQ, dK and dV
        "STAGES": (1, 2, 3),  # of the loop over query blocks
        "LOADS": (POINTER, DESCRIPTOR),  # of Q, O and dO
        "PARTS": tuple(range(1, MOST_PARTS + 1)),
        "num_warps": (4, 8),
        "num_stages": (1,),
        "maxnreg": (0,),
    },
    constraints=(),
    default=lambda spec, arch: config_of(spec, KEYS[-1], 1, False),
)
