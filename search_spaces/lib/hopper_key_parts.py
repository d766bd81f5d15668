"""Tiles of kernels whose tiles of queries have their keys in parts: kernels/sm90/fwd_split.py and fwd_shares.py. They are those
that rows of kernels/sm90/fwd.py have with RESCALE "lazy", in the room that O leaves: it goes to memory from registers."""

from fa2tune.search_spaces.lib.hopper import (
    BARRIER_BYTES,
    SHARED_BYTES,
    block_dims,
    columns,
    parts_pay,
    spare_registers,
)
from fa2tune.spec.problem import Config, Specialization

#: BLOCK_M: one consumer group, or two.
ROWS = (64, 128)
#: BLOCK_M -> programs that a multiprocessor holds at once, maxnreg for that, and registers that a consumer thread gets then.
HELD = {64: (2, 128, 232), 128: (1, 0, 240)}
#: Columns of Q or V up to which groups take turns (docs/experiments/few-queries.md).
MOST_IN_TURN = 192


def fits(spec: Specialization, config: Config) -> bool:
    """Whether shared memory holds Q and the stages of K and V, and registers scores, output and the weights of the block
    before, and Q where it stays. Each program uses 1 KiB more of shared memory."""
    (d, dv), rows, keys = columns(spec, config), config["BLOCK_M"], config["BLOCK_N"]
    programs, _, registers = HELD[rows]
    shared = 2 * (rows * d + config["STAGES"] * keys * (d + dv)) + BARRIER_BYTES
    live = keys // 2 + dv // 2 + keys // 4 + (d // 4 if config["Q_IN_REGISTERS"] else 0)
    return shared <= (SHARED_BYTES + 1024) // programs - 1024 and live <= registers - spare_registers(spec, keys)


def tile(spec: Specialization, rows: int) -> Config | None:
    """As many keys a block as fit beside two stages, then as many stages; None: nothing fits. Dense calls above 128 columns
    have groups in turn up to MOST_IN_TURN, and in blocks of 64 keys Q in registers: others were not timed so."""
    narrow = max(block_dims(spec)) <= 128
    own = {
        "BLOCK_M": rows, "PINGPONG": rows > ROWS[0] and narrow, "Q_IN_REGISTERS": rows == ROWS[0],
        "NUMBERED": rows > ROWS[0] and narrow and (spec.mask_hooks.masked or max(block_dims(spec)) == 128),
        "IN_PARTS": parts_pay(spec), "num_warps": 4, "maxnreg": HELD[rows][1],
    }  # fmt: skip
    sizes = ((keys, stages) for keys in (128, 64) for stages in (3, 2))
    tiles_of_sizes = ({**own, "BLOCK_N": keys, "STAGES": stages} for keys, stages in sizes)
    found = next((one for one in tiles_of_sizes if fits(spec, one)), None)
    timed = not (spec.ragged or spec.scored) and max(columns(spec, own)) <= MOST_IN_TURN
    if found is None or narrow or rows == ROWS[0] or not timed:
        return found
    kept = found["BLOCK_N"] == 64
    return {**found, "PINGPONG": True, "NUMBERED": kept, "Q_IN_REGISTERS": kept}


def tiles(spec: Specialization, arch: int) -> tuple[int, ...]:
    """Rows that a tile may have; none, where the kernel cannot compute such a call."""
    if arch != 90 or spec.dtype == "fp32" or not spec.aligned:
        return ()
    return tuple(rows for rows in ROWS if tile(spec, rows) is not None)
