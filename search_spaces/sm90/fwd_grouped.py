"""Tiles of kernels/sm90/fwd_grouped.py: they follow from head dims, mask and the call's heads and lengths, and nothing is
searched. They are those that rows of kernels/sm90/fwd.py have with RESCALE "lazy" and one Q tile."""

from fa2tune.search_spaces.lib.hopper import BARRIER_BYTES
from fa2tune.search_spaces.sm90 import fwd
from fa2tune.spec.problem import Config, Problem, Specialization, padded_head_dim
from fa2tune.spec.variant import SearchSpace

#: BLOCK_M: one consumer group, or two.
ROWS = (64, 128)
#: BLOCK_M -> maxnreg, for two programs a multiprocessor, or one.
LAUNCH_REGISTERS = {64: 128, 128: 0}
#: Keys of a block.
KEYS = (64, 128)
#: Query heads of a key head that are rows of one tile, the last of them perhaps not there.
MEMBERS = (2, 4, 8, 16, 32, 64)


def programs_held(config: Config) -> int:
    """Programs that a multiprocessor holds at once."""
    return fwd.PROGRAMS[config["maxnreg"]]


def _shared_bytes(spec: Specialization, config: Config) -> int:
    d, dv = fwd.columns(spec, config)
    o = config["BLOCK_M"] * dv if config["O_THROUGH"] == "own" else 0
    return 2 * (config["BLOCK_M"] * d + o + config["STAGES"] * config["BLOCK_N"] * (d + dv)) + BARRIER_BYTES


def fits(spec: Specialization, config: Config) -> bool:
    """Whether shared memory holds Q, O and the stages of K and V, and registers what those of kernels/sm90/fwd.py are to hold:
    scores, output, the weights of the block before, Q where it stays; at the launch one product."""
    (d, dv), keys = fwd.columns(spec, config), config["BLOCK_N"]
    live = keys // 2 + dv // 2 + keys // 4 + (d // 4 if config["Q_IN_REGISTERS"] else 0)
    product = max(keys, fwd.blocks(spec, config)["BLOCK_DV"]) // 2 + 30
    return (
        _shared_bytes(spec, config) <= fwd.SHARED_BYTES_SM // programs_held(config) - 1024
        and live <= fwd.registers(config) - fwd.SPARE_REGISTERS
        and product <= (config["maxnreg"] or product)
        and (config["O_THROUGH"] == "own" or _alike(spec, config))
    )


def _alike(spec: Specialization, config: Config) -> bool:
    """Whether O's parts have the shapes of Q's, so that it can leave through Q's memory."""
    found = fwd.blocks(spec, config)
    return found["BLOCK_D"] == found["BLOCK_DV"] and found["REST_DV"] in (0, found["REST_D"])


def _tile(spec: Specialization, rows: int, keys: int) -> Config | None:
    """With memory of O's own, else that of Q, then with as many stages as fit; None: nothing fits."""
    widest = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v))
    several = rows > ROWS[0] and widest <= 128
    tile = {
        "BLOCK_M": rows, "BLOCK_N": keys, "PINGPONG": several, "Q_IN_REGISTERS": rows == ROWS[0],
        "NUMBERED": several and (spec.mask != "full" or widest == 128), "IN_PARTS": fwd.in_parts(spec),
        "num_warps": 4, "maxnreg": LAUNCH_REGISTERS[rows],
    }  # fmt: skip
    found = ({**tile, "O_THROUGH": o, "STAGES": stages} for o in ("own", "q") for stages in (3, 2))
    return next((one for one in found if fits(spec, one)), None)


def tiles(spec: Specialization, arch: int) -> tuple[tuple[int, int], ...]:
    """(rows, keys of a block) that a tile may have; none, where the kernel cannot compute such a call."""
    if arch != 90 or spec.dtype == "fp32" or not spec.aligned or spec.ragged or spec.score != "none":
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
        "IN_PARTS": ("none", "qk", "both"),
        "num_warps": (4,),
        "maxnreg": (0, 128),
    },
    constraints=(),
    default=default,
)
