"""Search space of kernels/sm90/fwd.py."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from fa2tune.search_spaces.lib.common import REGISTERS_HOLD_TILES, REGISTERS_SM, TILES_FIT
from fa2tune.search_spaces.lib.hopper import (
    BARRIER_BYTES,
    HEAD_DIM_HAS_PARTS,
    SIXTEEN_BIT,
    TMA_ADDRESSES_TENSORS,
    begins_within_sectors,
    spare_registers,
)
from fa2tune.spec.problem import Config, Problem, Specialization, head_dim_parts, padded_head_dim
from fa2tune.spec.variant import WARPGROUP_THREADS, Constraint, SearchSpace, added

ROWS = 64  #: query rows of a consumer group
#: Bytes of shared memory of a multiprocessor, of which each program costs 1 KiB beside its own.
SHARED_BYTES_SM = 228 * 1024
PRODUCER_REGISTERS = 24  #: a thread, the fewest there are
V_ENTRIES = 3  #: of V's ring with V_HALVES, of half a block each
#: RESCALE "never" takes the bound of a row's scores in place of their maximum, where it lies at most so many powers of two
#: above the highest of the row's first block. P is then smaller by as many. bf16 and float32 have 126 below 1: what is lost is
#: a key whose P is 2^-62 of the largest. fp16 has 14, and 10 more of falling precision, but P may reach 2^HEADROOM_FP16: keys
#: below 2^-22 of the largest are lost, and the sum of many just above it is biased.
LOOSEST = 64.0
LOOSEST_FP16, HEADROOM_FP16 = 17.0, 15.0
#: And where it is no larger than this: float32 has it, and the scores, within 0.3, in whatever order they are summed. From 1 on
#: fp16's P may overflow.
LARGEST_BOUND = 2.0**18
#: Bytes of K and V that may be in use at once: L2 has 50 MB, in two halves.
L2_BYTES = 32 << 20
#: "never" reads all keys once more, at 3 TB/s 100 / n of what n query rows a key head take at 600 TFLOP/s, to gain up to 13 %.
LEAST_QUERIES = 1024
#: Up to these head dims exponentials take longer than products, so fewer queries are worth that pass: 465 of 13298 keys at 32
#: took 0.85 of the time, 286 of 10259 at 16 as long (docs/experiments/narrow-forwards.md).
NARROW, LEAST_QUERIES_NARROW = 48, 384

#: padded head dim, at least 64 -> the best of the sweeps in docs/experiments.md
BEST = {
    64: {"BLOCK_M": 192, "BLOCK_N": 128, "Q_STAGES": 2, "PINGPONG": True, "NUMBERED": False},
    128: {"BLOCK_M": 128, "BLOCK_N": 128, "Q_STAGES": 2, "PINGPONG": True, "NUMBERED": True},
    256: {"BLOCK_M": 128, "BLOCK_N": 64, "Q_STAGES": 1, "PINGPONG": False, "NUMBERED": False},
}  # fmt: skip
#: What suits a causal mask, and a window, better: tiles of uneven lengths have little use for a second Q.
BEST_CAUSAL = {64: {"Q_STAGES": 1, "NUMBERED": True}, 128: {"Q_STAGES": 1}, 256: {}}


def programs(config: Config) -> int:
    """Programs a multiprocessor holds at once, by maxnreg, the registers that a thread gets at launch; 0: all there are."""
    return _held(config["BLOCK_M"], config["maxnreg"])


@cache
def _held(rows: int, launch: int) -> int:
    return REGISTERS_SM // (_threads(rows) * launch) if launch else 1


def _threads(rows: int) -> int:
    """Of a program: its consumer groups and the producer's."""
    return WARPGROUP_THREADS * (rows // ROWS + 1)


def registers(config: Config) -> int:
    """Registers a thread of a consumer group gets: what the groups' share of the launch leaves beside the producer."""
    groups = config["BLOCK_M"] // ROWS
    launch = config["maxnreg"] or REGISTERS_SM // _threads(config["BLOCK_M"]) // 8 * 8
    return int(((groups + 1) * launch - PRODUCER_REGISTERS) // groups // 8 * 8)


def _shared_limit(config: Config) -> int:
    """Bytes of shared memory a program may have."""
    return SHARED_BYTES_SM // programs(config) - 1024


def blocks(spec: Specialization, config: Config) -> dict[str, int]:
    """Columns of the parts of Q's and V's head dims; REST_D and REST_DV are 0 where there is one part."""
    d, dv = (padded_head_dim(spec.head_dim), 0), (padded_head_dim(spec.head_dim_v), 0)
    if config["IN_PARTS"] != "none":
        d = head_dim_parts(spec.head_dim)
    if config["IN_PARTS"] == "both":
        dv = head_dim_parts(spec.head_dim_v)
    return {"BLOCK_D": d[0], "REST_D": d[1], "BLOCK_DV": dv[0], "REST_DV": dv[1]}


def columns(spec: Specialization, config: Config) -> tuple[int, int]:
    """Columns of the tiles of Q and K, and of those of V and O: of all parts."""
    found = blocks(spec, config)
    return found["BLOCK_D"] + found["REST_D"], found["BLOCK_DV"] + found["REST_DV"]


def in_parts(spec: Specialization) -> str:
    """IN_PARTS where nothing was measured: all that has parts."""
    return "both" if head_dim_parts(spec.head_dim_v)[1] else "qk" if head_dim_parts(spec.head_dim)[1] else "none"


def _has_parts(spec: Specialization, config: Config) -> bool:
    """Whether the head dims have the parts that a config wants."""
    wanted = {"none": 0, "qk": spec.head_dim, "both": spec.head_dim_v}[config["IN_PARTS"]]
    return wanted == 0 or head_dim_parts(wanted)[1] > 0


def default(spec: Specialization, arch: int) -> Config:
    """Where the search starts: the best tile, and what of O and a third stage fits beside it."""
    widest = max(64, padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v))
    best = {
        **BEST[widest],
        **(BEST_CAUSAL[widest] if spec.mask_hooks.masked else {}),
        "RESCALE": "lazy",
        "Q_IN_REGISTERS": False,
        "HEADS_PER_WAVE": 0,
        "IN_PARTS": in_parts(spec),
        "maxnreg": 0,
        "num_warps": 4,
    }
    return fitted(spec, {**best, "O_THROUGH": "own", "STAGES": 2})


def fitted(spec: Specialization, config: Config) -> Config:
    """The config of a row of other head dims, padded as far as these, for these: in parts, with the room for O, the stages and
    what ``_roomier`` names that tiles of fewer columns leave. With a score term, whose instructions take longer than the
    products: two programs a multiprocessor where there is room for them (docs/experiments/forward.md), else with maxima of
    scores, and less in registers."""
    found = _roomier(spec, {**config, "IN_PARTS": in_parts(spec)})
    if spec.scored:
        two = {**of_tiles(spec, ROWS, 64, 128), "HEADS_PER_WAVE": config["HEADS_PER_WAVE"]}
        if _registers_hold(spec, two) and _shared_bytes(two, spec, two["STAGES"], two["O_THROUGH"]) <= _shared_limit(
            two
        ):
            return two
        smaller = ({"Q_IN_REGISTERS": False}, {"BLOCK_N": 64}, {"Q_IN_REGISTERS": False, "BLOCK_N": 64})
        tried = [without_norms({**found, **change}) for change in ({}, *smaller)]
        found = next((one for one in tried if _registers_hold(spec, one)), tried[-1])
    return _with_room(spec, found)


def _with_room(spec: Specialization, config: Config) -> Config:
    """With the room for O and the stages that fit beside it."""
    o = next(_paths_of_o(spec, config, 2), config["O_THROUGH"])
    stages = max(count for count in (2, 3) if count == 2 or _shared_bytes(config, spec, 3, o) <= _shared_limit(config))
    return {**config, "O_THROUGH": o, "STAGES": stages}


def of_tiles(spec: Specialization, rows: int, keys: int, maxnreg: int) -> Config:
    """Tiles of so many rows and keys with one Q, "lazy", for calls of few of them: Q in registers, head dims above 64 in parts,
    as those that leave two groups no registers to share a multiprocessor with else, and as many stages as there is room for. It
    may be none of the space's, where these head dims leave no room."""
    wide = max(spec.head_dim, spec.head_dim_v) > 64 or (rows > ROWS and maxnreg > 0)
    config = {
        "BLOCK_M": rows, "BLOCK_N": keys, "Q_STAGES": 1, "PINGPONG": rows > ROWS, "RESCALE": "lazy",
        "Q_IN_REGISTERS": True, "O_THROUGH": "own", "NUMBERED": True, "HEADS_PER_WAVE": 0,
        "IN_PARTS": in_parts(spec) if wide else "none", "maxnreg": maxnreg, "num_warps": 4,
    }  # fmt: skip
    if not _registers_hold(spec, config):
        config["Q_IN_REGISTERS"] = False
    return _with_room(spec, config)


def third_stage(spec: Specialization, config: Config) -> Config | None:
    """The config with a third stage of K and V in O's memory, O through Q's, for head dims whose rows begin in the midst of a
    sector of 32 bytes, which are slow to load; None: there is room for both, or for neither."""
    if not begins_within_sectors(spec) or config["BLOCK_M"] != 2 * ROWS:
        return None
    found = {**config, "STAGES": 3, "O_THROUGH": "q"}
    if _shared_bytes(config, spec, 3, "own") <= _shared_limit(config) or config["Q_STAGES"] != 1:
        return None
    fits = _o_has_the_shape(spec, found) and _shared_bytes(config, spec, 3, "q") <= _shared_limit(config)
    return found if fits else None


def in_v_halves(spec: Specialization) -> Config | None:
    """Tiles of 128 rows and 128 keys, of dense calls, where one and a half blocks of V have room beside two of K, and two have
    none; None: elsewhere."""
    config = {
        **of_tiles(spec, 2 * ROWS, 128, 0), "STAGES": 2, "Q_IN_REGISTERS": False, "NUMBERED": False, "O_THROUGH": "q",
        "V_HALVES": True,
    }  # fmt: skip
    room = _shared_bytes({**config, "V_HALVES": False}, spec, 2, "q") <= _shared_limit(config)
    return None if room or SPACE.broken(config, spec, 90) is not None else config


def few_tiles(spec: Specialization) -> Config:
    """For packed calls of few tiles, as they were timed: half as many rows a tile, two programs a multiprocessor."""
    return {**of_tiles(spec, ROWS, 64, 128), "NUMBERED": False}


def _roomier(spec: Specialization, config: Config) -> Config:
    """With 128 keys a block, else with a second Q beside three stages, where parts have room for it and padded columns have
    not: what padded columns have room for, the row was measured against. On an H200 blocks of 128 keys for 64 took 192 with a
    V of 128 from 1.03 to 1.23 of padded, and 160 from 1.14 to 1.20; a second Q, causal, took 96 from 0.96 to 1.02 and 80 from
    1.05 to 1.07. Beside two stages only it gains 160 nothing. See docs/experiments/head-dims.md.
    RESCALE stays, although "never" took 192 from 1.13 to 1.22 at 24576 query rows a key head: at 80 and 96 it is slower, and
    its pass over the keys is dear in short problems."""
    if config["IN_PARTS"] == "none" or programs(config) > 1:
        return config
    padded = {"IN_PARTS": "none"}
    longer = {**config, "BLOCK_N": 128}
    if (
        config["BLOCK_N"] == 64
        and _registers_hold(spec, longer)
        and any(_paths_of_o(spec, longer, 2))
        and not any(_paths_of_o(spec, {**longer, **padded}, 2))
    ):
        return longer
    ahead = {**config, "Q_STAGES": 2}
    gained = "own" in _paths_of_o(spec, ahead, 3) and "own" not in _paths_of_o(spec, {**ahead, **padded}, 3)
    return ahead if gained else config


def _paths_of_o(spec: Specialization, config: Config, stages: int) -> Iterator[str]:
    """What O may go through beside so many stages, the best first: its own memory, then as the config has it."""
    paths = dict.fromkeys(("own", config["O_THROUGH"], "halves", "q"))
    return (
        o for o in paths
        if _o_has_the_shape(spec, {**config, "O_THROUGH": o})
        and (o != "q" or config["Q_STAGES"] == 1)
        and _shared_bytes(config, spec, stages, o) <= _shared_limit(config)
    )  # fmt: skip


def suited(problem: Problem, config: Config) -> Config:
    """The config for this problem: no pass over all keys where few queries or a window read part of them; of packed sequences
    packed_schedule in fa2tune/calling says whether it pays. Rows were measured with as many queries as keys. Tiles of a window
    are of one length: heads one by one keep K and V in L2. Of packed sequences the GPU alone knows how many heads' K and V that
    is. Where a tile's groups may differ by any number of blocks, the next tile waits (``passed_blocks_fit_ring``)."""
    if not problem.mask.measured:
        found = without_norms({**config, "HEADS_PER_WAVE": 0})
        hooks = problem.mask.hooks
        return {**found, "Q_STAGES": 1} if hooks.right and not hooks.diagonal else found
    if problem.extent.ragged:
        return {**config, "HEADS_PER_WAVE": 0}
    least = LEAST_QUERIES_NARROW if max(problem.head_dim, problem.head_dim_v) <= NARROW else LEAST_QUERIES
    few = problem.seqlen_q * problem.heads_q < least * problem.heads_kv
    few = few and (problem.seqlen_q == 1 or problem.seqlen_q < problem.seqlen_k)
    return without_norms(config) if few else config


def without_norms(config: Config) -> Config:
    """With maxima of scores, where a config has bounds of them, by the norms of all keys."""
    return {**config, "RESCALE": "lazy"} if config["RESCALE"] == "never" else config


def _passes_fewer(spec: Specialization, config: Config) -> bool:
    """Whether a group passes fewer blocks by than the ring has stages."""
    return spec.mask_hooks.diagonal and -(-(config["BLOCK_M"] - ROWS) // config["BLOCK_N"]) < config["STAGES"]


def o_columns(spec: Specialization, config: Config) -> int:
    """Columns of the first part of O that lie in shared memory at once."""
    return blocks(spec, config)["BLOCK_DV"] // (2 if config["O_THROUGH"] == "halves" else 1)


def _o_has_the_shape(spec: Specialization, config: Config) -> bool:
    """Whether O can go through what O_THROUGH says: through Q only if each of its parts has the shape of that part of Q, and in
    halves only if it has one part."""
    found = blocks(spec, config)
    if config["O_THROUGH"] == "q":
        return found["BLOCK_D"] == found["BLOCK_DV"] and found["REST_DV"] in (0, found["REST_D"])
    return config["O_THROUGH"] == "own" or found["REST_DV"] == 0


def _live_registers(config: Config, spec: Specialization) -> int:
    """Registers a consumer thread holds at once: scores, output, probabilities of the block before, and Q where it stays."""
    d, dv = columns(spec, config)
    n = config["BLOCK_N"]
    return int(n // 2 + dv // 2 + n // 4 + (d // 4 if config["Q_IN_REGISTERS"] else 0))


def _registers_hold(spec: Specialization, config: Config) -> bool:
    return _live_registers(config, spec) <= registers(config) - spare_registers(spec, config["BLOCK_N"])


def _shared_bytes(config: Config, spec: Specialization, stages: int, o: str) -> int:
    """With so many stages, and O going through ``o``."""
    d, dv = columns(spec, config)
    rows = config["BLOCK_M"]
    o_bytes = {"own": rows * dv, "halves": rows * dv // 2, "q": 0}[o]
    v_blocks = V_ENTRIES / 2 if config.get("V_HALVES") else stages
    ring = config["BLOCK_N"] * (stages * d + v_blocks * dv)
    return int(2 * (config["Q_STAGES"] * rows * d + o_bytes + ring)) + BARRIER_BYTES


def _stages_used(config: Config, spec: Specialization) -> bool:
    """Whether no more stages would fit, up to 3."""
    o = config["O_THROUGH"]
    return config["STAGES"] >= 3 or _shared_bytes(config, spec, config["STAGES"] + 1, o) > _shared_limit(config)


def band_within_l2(seqlen_k: int, columns: int) -> int:
    """HEADS_PER_WAVE 0 where the longest tiles are last: the power of two of heads, up to 64, whose K and V the L2 holds.
    ``columns``: of K and V together, 2 bytes each."""
    held = L2_BYTES // (2 * columns) // max(1, seqlen_k)
    return 1 << max(0, min(64, held).bit_length() - 1)


def heads_in_band(problem: Problem, columns: int) -> int:
    """Of HEADS_PER_WAVE 0, as kernels/lib/hopper_forward.py has it."""
    hooks = problem.mask.hooks
    longest_last = hooks.right and not hooks.left
    return band_within_l2(problem.seqlen_k, columns) if longest_last else 1


SPACE = SearchSpace(
    name="fwd_hopper",
    dimensions={
        "BLOCK_M": (64, 128, 192),  # one, two or three consumer groups, of four warps and 64 rows each
        "BLOCK_N": (64, 128),
        "STAGES": (2, 3),  # K and V tiles under way
        "Q_STAGES": (1, 2),  # 2: the next tile's Q is there, and its first Q K^T runs, while this tile ends
        "PINGPONG": (False, True),  # groups issue their products in turn
        # O: after every block; only where a maximum grew by 2^8; or never, and without any maxima, in tiles where the norms of
        # Q and K keep the scores in bounds (elsewhere as "lazy")
        "RESCALE": ("now", "lazy", "never"),
        "Q_IN_REGISTERS": (False, True),  # True: Q is not read from shared memory once per key block
        "O_THROUGH": ("own", "halves", "q"),  # the shared memory O leaves by: its own, half of it twice, or Q's
        "NUMBERED": (False, True),  # True: K and V are released at named barriers, where a group need not wait
        # which head dims are computed as a sum of two powers of two, 96 as 64 + 32: none (padded to one), that of Q and K, or
        # that of V, too. V's second part takes as many instructions more as its first
        "IN_PARTS": added("none", "qk", "both", older="none"),
        "HEADS_PER_WAVE": (0, 4, 22, 64),  # 0: as many as suit the length; 22: a sixth of an H200's multiprocessors
        # divisors as kernels/lib/division.py has them, where the kernel divides otherwise; not searched: short calls have them
        # (fa2tune/calling/schedules/forward_schedule.py)
        "DIVISORS": added(False, older=False),
        # V in three entries of half a block (kernels/lib/hopper_halves.py); not searched: few_tiles offers it
        "V_HALVES": added(False, older=False),
        # registers a thread at launch; 128: two programs of 64 rows share a multiprocessor, 80: three, or two of 128 rows
        "maxnreg": (0, 80, 128),
        "num_warps": (4,),
    },
    constraints=(
        SIXTEEN_BIT,
        TMA_ADDRESSES_TENSORS,
        replace(HEAD_DIM_HAS_PARTS, holds=lambda config, spec, arch: _has_parts(spec, config)),
        Constraint(
            "norms_bound_scores",
            "RESCALE never with a score term",
            "a score term may make scores larger than the norms of Q and K let them be",
            lambda config, spec, arch: not spec.scored or config["RESCALE"] != "never",
        ),
        Constraint(
            "one_group_shares",
            "maxnreg does not suit the number of consumer groups",
            "one consumer group leaves the tensor cores idle during its exponentials, unless another program uses them; fewer "
            "registers than there are pay only where another program takes the rest",
            lambda config, spec, arch: programs(config) > 1 if config["maxnreg"] else config["BLOCK_M"] > ROWS,
        ),
        Constraint(
            "turns_take_groups",
            "PINGPONG needs two consumer groups",
            "groups take turns inside a program; a single group would wait for itself",
            lambda config, spec, arch: not (config["PINGPONG"] and config["BLOCK_M"] == ROWS),
        ),
        Constraint(
            *REGISTERS_HOLD_TILES,
            "scores, output, probabilities of the block before (and Q) are in registers at the same time; with fewer than 32 "
            "left, or 40 and 80 with a score term, ptxas spills and serialises the products (C7512)",
            lambda config, spec, arch: _registers_hold(spec, config),
        ),
        Constraint(
            "launch_registers_hold_a_product",
            "maxnreg leaves too few registers for a product",
            "ptxas rejects a wgmma (C7602) whose scores or output (columns / 2 registers) leave fewer than 30 of the registers "
            "that a thread has at launch, whatever the group gets later",
            lambda config, spec, arch: (
                config["maxnreg"] == 0
                or max(config["BLOCK_N"], blocks(spec, config)["BLOCK_DV"]) // 2 + 30 <= config["maxnreg"]
            ),
        ),
        Constraint(
            *TILES_FIT,
            "Q, O and the stages of K and V exceed a program's share of 228 KiB, of which each program uses 1 KiB more",
            lambda config, spec, arch: (
                _shared_bytes(config, spec, config["STAGES"], config["O_THROUGH"]) <= _shared_limit(config)
            ),
        ),
        Constraint(
            "stages_use_shared_memory",
            "shared memory left for another stage",
            "a program's share of shared memory is fixed, so what another stage would take is wasted otherwise",
            lambda config, spec, arch: _stages_used(config, spec),
        ),
        Constraint(
            "passed_blocks_fit_ring",
            "too few STAGES, so this mask deadlocks",
            "bounded on the right, the first group skips the blocks that only later groups see, while its last product still "
            "reads a V tile; with no more stages than such blocks, producer and group deadlock. How many there are is known "
            "where the mask's file states diagonal",
            lambda config, spec, arch: (
                config["Q_STAGES"] == 1 or not spec.mask_hooks.right or _passes_fewer(spec, config)
            ),
        ),
        Constraint(
            "halves_of_v_suit",
            "V_HALVES with other rings",
            "V in halves is of two blocks of 128 keys, with one Q, released at mbarriers, of dense calls",
            lambda config, spec, arch: (
                not config.get("V_HALVES")
                or (config["BLOCK_N"], config["STAGES"], config["Q_STAGES"], config["NUMBERED"], spec.ragged)
                == (128, 2, 1, False, False)
            ),
        ),
        Constraint(
            "o_through_q_alone",
            "O cannot be stored through Q's memory",
            "O is stored through Q's shared memory only if its parts have Q's shapes and the next tile's Q is not there yet",
            lambda config, spec, arch: (
                config["O_THROUGH"] != "q" or (config["Q_STAGES"] == 1 and _o_has_the_shape(spec, config))
            ),
        ),
        Constraint(
            "halves_are_of_one_part",
            "O in two parts is not stored in halves",
            "a head dim in two parts is not stored in halves: where O has no room of its own, it has that of Q",
            lambda config, spec, arch: config["O_THROUGH"] != "halves" or _o_has_the_shape(spec, config),
        ),
        Constraint(
            "o_has_room_of_its_own",
            "O shares memory although memory of its own fits",
            "O in halves or in Q's memory waits for its own stores; where two stages of K and V leave room for O, it need not, "
            "but where rows begin within a sector of 32 bytes, a third stage may be worth it",
            lambda config, spec, arch: (
                config["O_THROUGH"] == "own"
                or _shared_bytes(config, spec, 2, "own") > _shared_limit(config)
                or config == third_stage(spec, config)
            ),
        ),
    ),
    default=default,
    default_from=64,
)
