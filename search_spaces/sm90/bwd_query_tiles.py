"""Tiles of kernels/sm90/bwd_query_tiles.py. Nothing is searched: they follow from head dims and queries."""

from fa2tune.search_spaces.lib.hopper import SHARED_BYTES, columns, parts_pay
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import SearchSpace

#: Query rows of a tile, and keys of a block.
ROWS, KEYS = (64, 128), 64
#: Parts that the key blocks of a tile are split into at most.
MOST_SPLITS = 128
#: Bytes of shared memory that barriers and alignment take, and what the system keeps of a program.
OTHER_BYTES = 1536
#: Registers of a thread that leave a multiprocessor two programs of 128 rows, of up to so many padded columns.
TWO_PROGRAMS, TWO_PROGRAMS_COLUMNS = 128, 64
#: Head dims, padded, up to which registers hold a tile of 64 rows: each thread has dQ's columns and those of dK or dV.
NARROW = 192


def fits(spec: Specialization, arch: int) -> bool:
    """Whether the kernel can compute such a call, apart from its lengths."""
    return arch == 90 and spec.dtype != "fp32" and spec.aligned and not spec.ragged


def rows_of(spec: Specialization) -> tuple[int, ...]:
    """Those of ROWS that registers hold."""
    narrow = max(columns(spec, {"IN_PARTS": parts_pay(spec)})) <= NARROW
    return ROWS if narrow else ROWS[1:]


def programs(problem: Problem, config: Config) -> int:
    """Parts of tiles."""
    return int(problem.query_tiles(config["BLOCK_M"]) * problem.heads_q * config["SPLITS"])


def shared_bytes(spec: Specialization, config: Config) -> int:
    """Q, dO, stages of K and V, P and dS of a program."""
    rows = config["BLOCK_M"] + config["STAGES"] * config["BLOCK_N"]
    return 2 * (rows * sum(columns(spec, config)) + 2 * config["BLOCK_M"] * config["BLOCK_N"]) + OTHER_BYTES


def at_once(spec: Specialization, config: Config) -> int:
    """Programs that a multiprocessor holds, as shared memory and registers go."""
    narrow = max(columns(spec, config)) <= TWO_PROGRAMS_COLUMNS
    most = {64: 3 if narrow else 2, 128: 2 if narrow else 1}[config["BLOCK_M"]]
    return min(most, SHARED_BYTES // shared_bytes(spec, config))


def config_of(spec: Specialization, rows: int, splits: int) -> Config:
    """``rows``: of ROWS; ``splits``: parts of the keys. Two key blocks are loaded at once where that leaves room for as many
    programs."""
    in_parts = parts_pay(spec)
    narrow = max(columns(spec, {"IN_PARTS": in_parts})) <= TWO_PROGRAMS_COLUMNS
    config = {
        "BLOCK_M": rows, "BLOCK_N": KEYS, "STAGES": 1, "IN_PARTS": in_parts, "WHOLE": splits == 1, "SPLITS": splits,
        "num_warps": rows // 16, "maxnreg": TWO_PROGRAMS if rows == 128 and narrow else 0,
    }  # fmt: skip
    twice = {**config, "STAGES": 2}
    room = SHARED_BYTES // at_once(spec, config)
    return twice if shared_bytes(spec, twice) <= room else config


SPACE = SearchSpace(
    name="bwd_hopper_query_tiles",
    dimensions={
        "BLOCK_M": ROWS,
        "BLOCK_N": (KEYS,),
        "STAGES": (1, 2),  # key blocks that are loaded at once
        "IN_PARTS": (False, True),  # head dims are computed as sums of two powers of two
        "WHOLE": (False, True),  # keys in one part: dQ leaves in the call's dtype
        "SPLITS": tuple(range(1, MOST_SPLITS + 1)),
        "num_warps": (4, 8),
        "maxnreg": (0, TWO_PROGRAMS),
    },
    constraints=(),
    default=lambda spec, arch: config_of(spec, ROWS[-1], 1),
)
