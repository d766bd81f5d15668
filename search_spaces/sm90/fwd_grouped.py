"""Tiles of kernels/sm90/fwd_grouped.py: they follow from head dims, mask and the call's heads and lengths, and nothing is
searched. They are those that rows of kernels/sm90/fwd.py have with RESCALE "lazy" and one Q tile."""

from functools import lru_cache

from fa2tune.search_spaces.lib.hopper import (
    BARRIER_BYTES,
    SHARED_BYTES,
    narrow_blocks,
    narrow_columns,
    o_fits_q,
    spare_registers,
)
from fa2tune.spec.problem import Config, Problem, Specialization, padded_head_dim
from fa2tune.spec.variant import SearchSpace

#: BLOCK_M: one consumer group, or two.
ROWS = (64, 128)
#: BLOCK_M -> programs that a multiprocessor holds at once, maxnreg for that, and registers that a consumer thread gets then.
HELD = {64: (2, 128, 232), 128: (1, 0, 240)}
#: Of a consumer thread, at the launch beside a product.
PRODUCT_REGISTERS = 30
#: Keys of a block.
KEYS = (64, 128)
#: Query heads of a key head that are rows of one tile, the last of them perhaps not there.
MEMBERS = (2, 4, 8, 16, 32, 64)


def fits(spec: Specialization, config: Config) -> bool:
    """Whether shared memory holds Q, O and the stages of K and V, and registers scores, output, the weights of the block
    before, and Q where it stays; at the launch one product. Each program uses 1 KiB more of shared memory."""
    (d, dv), rows, keys = narrow_columns(spec), config["BLOCK_M"], config["BLOCK_N"]
    held, at_launch, registers = HELD[rows]
    own = rows * dv if config["O_THROUGH"] == "own" else 0
    shared = 2 * (rows * d + own + config["STAGES"] * keys * (d + dv)) + BARRIER_BYTES
    live = keys // 2 + dv // 2 + keys // 4 + (d // 4 if config["Q_IN_REGISTERS"] else 0)
    product = max(keys, narrow_blocks(spec)["BLOCK_DV"]) // 2 + PRODUCT_REGISTERS
    return (
        shared <= (SHARED_BYTES + 1024) // held - 1024
        and live <= registers - spare_registers(spec, keys)
        and product <= (at_launch or product)
        and (config["O_THROUGH"] == "own" or o_fits_q(narrow_blocks(spec)))
    )


@lru_cache(maxsize=1024)
def _tile(spec: Specialization, rows: int, keys: int) -> Config | None:
    """With memory of O's own, else that of Q, then with as many stages as fit; None: nothing fits."""
    widest = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v))
    several = rows > ROWS[0] and widest <= 128
    tile = {
        "BLOCK_M": rows, "BLOCK_N": keys, "PINGPONG": several, "Q_IN_REGISTERS": rows == ROWS[0],
        "NUMBERED": several and (spec.mask_hooks.masked or widest == 128), "num_warps": 4, "maxnreg": HELD[rows][1],
    }  # fmt: skip
    found = ({**tile, "O_THROUGH": o, "STAGES": stages} for o in ("own", "q") for stages in (3, 2))
    return next((one for one in found if fits(spec, one)), None)


def tiles(spec: Specialization, arch: int) -> tuple[tuple[int, int], ...]:
    """(rows, keys of a block) that a tile may have; none, where the kernel cannot compute such a call."""
    if arch != 90 or spec.dtype == "fp32" or not spec.aligned:
        return ()
    if spec.ragged and spec.wide:  # coordinates count units of 16 bytes in 32 bits
        return ()
    return tuple((rows, keys) for rows in ROWS for keys in KEYS if _tile(spec, rows, keys) is not None)


def config_of(spec: Specialization, rows: int, keys: int, members: int) -> Config:
    """``members``: one of MEMBERS. ValueError: ``rows`` and ``keys`` are none of ``tiles``."""
    tile = _tile(spec, rows, keys)
    if tile is None:
        raise ValueError(
            f"rows, keys: got {rows}, {keys} for head dims {spec.head_dim} and {spec.head_dim_v}, which no such tile fits"
        )
    return {**tile, "MEMBERS": members}


def default(spec: Specialization, arch: int) -> Config:
    return config_of(spec, ROWS[-1], KEYS[0], MEMBERS[1])


def query_heads(problem: Problem, config: Config) -> int:
    """Heads that tiles have, counted over a batch entry: of each key head so many query heads at once."""
    return problem.heads_kv * -(-problem.group // config["MEMBERS"])


def programs(problem: Problem, config: Config) -> int:
    """Tiles: what is shared out among programs."""
    return int(problem.query_tiles(config["BLOCK_M"] // config["MEMBERS"]) * query_heads(problem, config))


SPACE = SearchSpace(
    name="fwd_hopper_grouped",
    dimensions={
        "BLOCK_M": ROWS,
        "BLOCK_N": KEYS,
        "MEMBERS": MEMBERS,
        "STAGES": (2, 3),
        "PINGPONG": (False, True),
        "Q_IN_REGISTERS": (False, True),
        "O_THROUGH": ("own", "q"),
        "NUMBERED": (False, True),
        "num_warps": (4,),
        "maxnreg": (0, 128),
    },
    constraints=(),
    default=default,
)
