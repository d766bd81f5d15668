"""Search space of kernels/fwd_hopper.py."""

from fa2tune.problem import Config, Specialization, padded_head_dim
from fa2tune.search_spaces.hopper import BARRIER_BYTES, SHARED_BYTES, SIXTEEN_BIT, TMA_ADDRESSES_TENSORS
from fa2tune.variant import Constraint, SearchSpace

#: Registers a thread of a consumer group gets, by groups: what 64 Ki leave beside a producer of 24.
REGISTERS = {2: 240, 3: 160}

#: padded head dim, at least 64 -> the best of the sweeps in docs/experiments.md
BEST = {
    64: {"BLOCK_M": 192, "BLOCK_N": 128, "GROUPS": 3, "Q_STAGES": 2, "PINGPONG": True, "RESCALE": "late"},
    128: {"BLOCK_M": 128, "BLOCK_N": 128, "GROUPS": 2, "Q_STAGES": 2, "PINGPONG": False, "RESCALE": "now"},
    256: {"BLOCK_M": 128, "BLOCK_N": 64, "GROUPS": 2, "Q_STAGES": 1, "PINGPONG": False, "RESCALE": "lazy"},
}  # fmt: skip


def _dims(spec: Specialization) -> tuple[int, int]:
    return padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v)


def default(spec: Specialization, arch: int) -> Config:
    """Where the search starts: the best tile, and what of O and of a third stage fits beside it."""
    best = {
        **BEST[max(64, *_dims(spec))],
        "Q_IN_REGISTERS": False,
        "PERSISTENT": True,
        "HEADS_PER_WAVE": 0,
        "num_warps": 4,
    }
    fitting = (
        {**best, "O_THROUGH": o, "STAGES": stages}
        for o in ("own", "halves")
        for stages in (3, 2)
        if _shared_bytes(best, spec, stages, o) <= SHARED_BYTES
    )
    return next(fitting)


def o_columns(spec: Specialization, config: Config) -> int:
    """Columns of O that lie in shared memory at once."""
    return _dims(spec)[1] // (2 if config["O_THROUGH"] == "halves" else 1)


def _live_registers(config: Config, spec: Specialization) -> int:
    """Registers a consumer thread holds at once: scores, output, probabilities of the block before, and Q where it stays."""
    d, dv = _dims(spec)
    n = config["BLOCK_N"]
    return int(n // 2 + dv // 2 + n // 4 + (d // 4 if config["Q_IN_REGISTERS"] else 0))


def _shared_bytes(config: Config, spec: Specialization, stages: int, o: str) -> int:
    """With so many stages, and O going through ``o``."""
    d, dv = _dims(spec)
    rows = config["BLOCK_M"]
    o_bytes = {"own": rows * dv, "halves": rows * dv // 2, "q": 0}[o]
    return int(2 * (config["Q_STAGES"] * rows * d + o_bytes + stages * config["BLOCK_N"] * (d + dv))) + BARRIER_BYTES


def _stages_used(config: Config, spec: Specialization) -> bool:
    """Whether no more stages would fit, up to 3."""
    o = config["O_THROUGH"]
    return config["STAGES"] >= 3 or _shared_bytes(config, spec, config["STAGES"] + 1, o) > SHARED_BYTES


SPACE = SearchSpace(
    name="fwd_hopper",
    dimensions={
        "BLOCK_M": (128, 192),
        "BLOCK_N": (64, 128),
        "GROUPS": (2, 3),  # of consumers: four warps and 64 rows each
        "STAGES": (2, 3, 4),  # K and V tiles under way
        "Q_STAGES": (1, 2),  # 2: the next tile's Q is there, and its first Q K^T runs, while this tile ends
        "PINGPONG": (False, True),  # groups issue their products in turn
        "RESCALE": ("now", "late", "lazy"),  # O: before the next Q K^T, under it, or only where a maximum grew by 2^8
        "Q_IN_REGISTERS": (False, True),
        "O_THROUGH": ("own", "halves", "q"),  # the shared memory O leaves by: its own, half of it twice, or Q's
        "PERSISTENT": (False, True),  # one program a multiprocessor, which takes every n-th tile; or a program a tile
        "HEADS_PER_WAVE": (0, 4, 16, 64),  # 0: as many as suit the length
        "num_warps": (4,),
    },
    constraints=(
        SIXTEEN_BIT,
        TMA_ADDRESSES_TENSORS,
        Constraint(
            "rows_per_group",
            "a Hopper product has 64 rows, a group holds as many; with 128 the scores and O of a group spill, or leave the "
            "other groups nothing to hide behind (two thirds of the speed at head dims 64 and 128)",
            lambda config, spec, arch: config["BLOCK_M"] == 64 * config["GROUPS"],
        ),
        Constraint(
            "registers_hold_tiles",
            "scores, output, probabilities of the block before (and Q) live in registers at once; with fewer than 32 beside "
            "them ptxas spills and runs the products one by one (C7512)",
            lambda config, spec, arch: _live_registers(config, spec) <= REGISTERS[config["GROUPS"]] - 32,
        ),
        Constraint(
            "tiles_fit_shared_memory",
            "Q, O and the stages of K and V exceed 227 KiB, the most a Hopper GPU gives a block",
            lambda config, spec, arch: (
                _shared_bytes(config, spec, config["STAGES"], config["O_THROUGH"]) <= SHARED_BYTES
            ),
        ),
        Constraint(
            "stages_use_shared_memory",
            "a program has its multiprocessor alone, so what a third stage would take is of no other use",
            lambda config, spec, arch: _stages_used(config, spec),
        ),
        Constraint(
            "passed_blocks_fit_ring",
            "under a causal mask the first group passes by the blocks that only later groups see, while its last product "
            "still holds a V tile: with no more stages than such blocks, producer and group wait for each other",
            lambda config, spec, arch: (
                not spec.causal
                or config["Q_STAGES"] == 1
                or -(-(config["BLOCK_M"] - 64) // config["BLOCK_N"]) < config["STAGES"]
            ),
        ),
        Constraint(
            "next_tile_exists",
            "a program that takes one tile has no next one whose Q it could fetch",
            lambda config, spec, arch: config["Q_STAGES"] == 1 or config["PERSISTENT"],
        ),
        Constraint(
            "o_through_q_alone",
            "O goes by Q's shared memory only where it has Q's shape, and where the next tile's Q is not there already",
            lambda config, spec, arch: (
                config["O_THROUGH"] != "q" or (config["Q_STAGES"] == 1 and _dims(spec)[0] == _dims(spec)[1])
            ),
        ),
        Constraint(
            "o_has_room_of_its_own",
            "O in halves or by Q's place waits for its own stores; where two stages of K and V leave O room, it need not",
            lambda config, spec, arch: (
                config["O_THROUGH"] == "own" or _shared_bytes(config, spec, 2, "own") > SHARED_BYTES
            ),
        ),
    ),
    default=default,
)
