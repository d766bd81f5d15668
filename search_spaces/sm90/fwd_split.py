"""Tiles of kernels/sm90/fwd_split.py: they follow from the head dims and the mask, and nothing is searched. They are those that
rows of kernels/sm90/fwd.py have with RESCALE "lazy", in the room that O leaves: it goes to memory from registers."""

from fa2tune.search_spaces.lib.hopper import (
    BARRIER_BYTES,
    SHARED_BYTES,
    block_dims,
    columns,
    parts_pay,
    spare_registers,
)
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import SearchSpace

#: BLOCK_M: one consumer group, or two.
ROWS = (64, 128)
#: BLOCK_M -> programs that a multiprocessor holds at once, maxnreg for that, and registers that a consumer thread gets then.
HELD = {64: (2, 128, 232), 128: (1, 0, 240)}
#: Columns of Q or V up to which groups take turns (docs/experiments/few-queries.md).
MOST_IN_TURN = 192
#: Parts that keys are split into at most.
MOST_SPLITS = 256


def fits(spec: Specialization, config: Config) -> bool:
    """Whether shared memory holds Q and the stages of K and V, and registers scores, output and the weights of the block
    before, and Q where it stays. Each program uses 1 KiB more of shared memory."""
    (d, dv), rows, keys = columns(spec, config), config["BLOCK_M"], config["BLOCK_N"]
    programs, _, registers = HELD[rows]
    shared = 2 * (rows * d + config["STAGES"] * keys * (d + dv)) + BARRIER_BYTES
    live = keys // 2 + dv // 2 + keys // 4 + (d // 4 if config["Q_IN_REGISTERS"] else 0)
    return shared <= (SHARED_BYTES + 1024) // programs - 1024 and live <= registers - spare_registers(spec, keys)


def _tile(spec: Specialization, rows: int) -> Config | None:
    """As many keys a block as fit beside two stages, then as many stages; None: nothing fits. Dense calls above 128 columns
    have groups in turn up to MOST_IN_TURN, and in blocks of 64 keys Q in registers: others were not timed so."""
    narrow = max(block_dims(spec)) <= 128
    tile = {
        "BLOCK_M": rows, "PINGPONG": rows > ROWS[0] and narrow, "Q_IN_REGISTERS": rows == ROWS[0],
        "NUMBERED": rows > ROWS[0] and narrow and (spec.mask_hooks.masked or max(block_dims(spec)) == 128),
        "IN_PARTS": parts_pay(spec), "num_warps": 4, "maxnreg": HELD[rows][1],
    }  # fmt: skip
    sizes = ((keys, stages) for keys in (128, 64) for stages in (3, 2))
    tiles_of_sizes = ({**tile, "BLOCK_N": keys, "STAGES": stages} for keys, stages in sizes)
    found = next((one for one in tiles_of_sizes if fits(spec, one)), None)
    timed = not (spec.ragged or spec.scored) and max(columns(spec, tile)) <= MOST_IN_TURN
    if found is None or narrow or rows == ROWS[0] or not timed:
        return found
    kept = found["BLOCK_N"] == 64
    return {**found, "PINGPONG": True, "NUMBERED": kept, "Q_IN_REGISTERS": kept}


def tiles(spec: Specialization, arch: int) -> tuple[int, ...]:
    """Rows that a tile may have; none, where the kernel cannot compute such a call."""
    if arch != 90 or spec.dtype == "fp32" or not spec.aligned:
        return ()
    return tuple(rows for rows in ROWS if _tile(spec, rows) is not None)


def config_of(spec: Specialization, rows: int, splits: int) -> Config:
    """``splits``: 2 or more. ValueError: ``rows`` is none of ``tiles``."""
    tile = _tile(spec, rows)
    if tile is None:
        raise ValueError(
            f"rows: got {rows} for head dims {spec.head_dim} and {spec.head_dim_v}, which no such tile fits"
        )
    return {**tile, "EARLY": True, "SPLITS": splits}


def default(spec: Specialization, arch: int) -> Config:
    return {**config_of(spec, ROWS[-1], MOST_SPLITS), "EARLY": False}


def programs(problem: Problem, config: Config) -> int:
    """Parts of tiles: what is shared out among programs."""
    return int(problem.query_tiles(config["BLOCK_M"]) * problem.heads_q * config["SPLITS"])


SPACE = SearchSpace(
    name="fwd_hopper_split",
    dimensions={
        "BLOCK_M": ROWS,
        "BLOCK_N": (64, 128),
        "STAGES": (2, 3),
        "PINGPONG": (False, True),
        "Q_IN_REGISTERS": (False, True),
        "NUMBERED": (False, True),
        "IN_PARTS": (False, True),  # head dims are computed as sums of two powers of two
        "EARLY": (False, True),  # the kernel that puts parts together may start before this one has ended
        "SPLITS": tuple(range(2, MOST_SPLITS + 1)),
        "num_warps": (4,),
        "maxnreg": (0, 128),
    },
    constraints=(),
    default=default,
)
