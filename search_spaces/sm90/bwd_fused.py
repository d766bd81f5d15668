"""Search space of kernels/sm90/bwd_fused.py."""

from typing import Any

from fa2tune.search_spaces.lib.common import TILES_FIT
from fa2tune.search_spaces.lib.hopper import (
    BARRIER_BYTES,
    PACKED_WITHIN_32_BITS,
    SHARED_BYTES,
    SIXTEEN_BIT,
    TMA_ADDRESSES_TENSORS,
    block_dims,
    trimmed,
)
from fa2tune.spec.problem import Config, Problem, Specialization, head_dim_parts, padded_head_dim
from fa2tune.spec.variant import Constraint, SearchSpace, Used, added

GROUPS, KEYS = 2, 64  #: consumer groups of four warps, and the keys of each
REGISTERS = 240  #: that a consumer thread gets: what 64 Ki leave beside a producer of 24
TERMS = 8  #: bfloat16 numbers a row, in memory, that lse or delta is the sum of
TERM_COLUMNS = 16  #: and in shared memory, where one step of a wgmma adds them up
TURN_ROWS = 64  #: of dQ, to which key tiles add in turns with IN_ORDER
CHUNK = 128  #: query rows that kernels/sm90/bwd_prepare_overlapped.py signals at once
#: Keys whose products with a query row take one multiprocessor as long as preparing that row beside others: 45 to 60 measured
#: (docs/experiments.md), and some more, as main waits for what is late
ROWS_WORTH = 60
HELPERS_WORTH = 62  #: and, with FINISH_BESIDE, of preparing a row and finishing its dQ: 60 to 85 measured
ARGUMENT_BYTES = 512  #: of shared memory, that the descriptors of second parts take on their way to the partitions
PIECE = 64  #: rows, and at most columns, of a piece of dQ whose sums lie together, where they are in register order
NARROW_COLUMNS = 32  #: of every tile, of head dims up to that, with NARROW
#: The loop of groups apart there: in seven long calls 1.5 % behind the best form raced, 6.5 % with what rows of 64 columns name
NARROW_LOOP = {"ORDER": "ahead", "REDUCE": "vector", "EXPONENTIALS_FIRST": False}
#: The loop of head dims in parts: 2 to 6 % faster than "behind" in five packed calls (docs/experiments/few-heads-packed.md)
PARTS_LOOP = {"ORDER": "together", "REDUCE": "vector", "EXPONENTIALS_FIRST": False}
#: Share of the columns of padded tiles, up to which V has parts of its own: 0.53 to 0.80 gained 1.06 to 1.37, 0.85 lost 2 %
#: (benchmarks/calls/v_apart.json)
APART_MOST = 0.8

#: (BLOCK_M, REDUCE, ORDER, EXPONENTIALS_FIRST, DYNAMIC, HEADS_PER_WAVE, num_warps) by (columns, whether masked), from sweeps in
#: docs/experiments.md
BEST = {
    (32, False): (128, "vector", "ahead", False, True, 4, 4),
    (32, True): (128, "vector", "ahead", False, True, 4, 4),
    (64, False): (128, "vector", "behind", False, True, 1, 4),
    (64, True): (128, "vector", "behind", False, True, 4, 4),
    (128, False): (64, "vector", "behind", False, True, 1, 4),
    (128, True): (64, "tma", "behind", True, True, 4, 4),
}


def columns(spec: Specialization, config: Config) -> int:
    """Of every tile, and of a row of sums: K, Q, V and dO share one width, what lacks is zeros. In parts, only of the sums.
    Configs of older rows name no NARROW, and no V_APART."""
    if config.get("V_APART"):
        return max(NARROW_COLUMNS, padded_head_dim(spec.head_dim))
    return NARROW_COLUMNS if config.get("NARROW") else max(block_dims(spec))


def is_narrow(spec: Specialization) -> bool:
    """Whether both head dims fit NARROW_COLUMNS."""
    return max(spec.head_dim, spec.head_dim_v) <= NARROW_COLUMNS


def has_parts(spec: Specialization) -> bool:
    """Whether both head dims are the same sum of two powers of two, half of ``columns`` and less."""
    return head_dim_parts(spec.head_dim) == head_dim_parts(spec.head_dim_v) and head_dim_parts(spec.head_dim)[1] > 0


def parts(spec: Specialization, config: Config) -> tuple[int, int]:
    """Columns of the parts of the tiles of Q and K; the second is 0 where there is one part. Configs of older rows name no
    IN_PARTS."""
    return _parts_of(spec.head_dim) if config.get("IN_PARTS") else (columns(spec, config), 0)


def parts_v(spec: Specialization, config: Config) -> tuple[int, int]:
    """The same of the tiles of V and dO."""
    return _parts_of(spec.head_dim_v) if config.get("V_APART") else parts(spec, config)


def _parts_of(head_dim: int) -> tuple[int, int]:
    first, rest = head_dim_parts(head_dim)
    return max(NARROW_COLUMNS, first), rest


def can_be_apart(spec: Specialization) -> bool:
    """Whether V and dO may have tiles of other columns than Q and K. Where 64 columns hold both, parts cost what they save."""
    wide = max(block_dims(spec)) == 128
    return wide and _parts_of(spec.head_dim) != _parts_of(spec.head_dim_v)


def computed(spec: Specialization, v_apart: bool) -> float:
    """Columns of a product in parts, on average: three of five have those of Q, two those of V, its own or the same."""
    d, dv = (sum(_parts_of(dim)) for dim in (spec.head_dim, spec.head_dim_v))
    return (3 * d + 2 * dv) / 5 if v_apart else d


def apart_pays(spec: Specialization) -> bool:
    """Whether V has parts of its own where nothing was measured: they leave out a fifth of the columns, at least."""
    return can_be_apart(spec) and computed(spec, True) <= APART_MOST * max(block_dims(spec))


def with_v_apart(config: Config) -> Config:
    """A row's config with V_APART, for head dims that ``can_be_apart``, the kernel alone on the GPU."""
    heads = 16 if config["HEADS_PER_WAVE"] == 1 else config["HEADS_PER_WAVE"]
    apart = {"IN_PARTS": True, "V_APART": True, "NARROW": False, "BESIDE": False, "FINISH_BESIDE": False}
    return {**config, **PARTS_LOOP, **apart, "HEADS_PER_WAVE": heads, "num_warps": 4}


def padded_rows(problem: Problem) -> int:
    """Query rows of the workspaces: whole blocks, of any config and of the kernels before and after; of packed sequences whole
    blocks of each (kernels/lib/hopper_packed.py)."""
    return problem.extent.tiles(1, problem.seqlen_q, CHUNK) * CHUNK


def concatenated(config: Config) -> bool:
    """Whether both groups are one partition."""
    return bool(config["num_warps"] == 8)


def derived(spec: Specialization, config: Config) -> dict[str, Any]:
    """What the kernel and its descriptors get besides the config."""
    block_m, d = config["BLOCK_M"], columns(spec, config)
    one = concatenated(config)
    return {
        "BLOCK_D": d,
        **dict(zip(("PART_D", "REST_D"), parts(spec, config), strict=True)),
        **dict(zip(("PART_DV", "REST_DV"), parts_v(spec, config), strict=True)),
        "TILE_ROWS": GROUPS * KEYS if one else KEYS,  # of K, V, dK and dV that one TMA moves
        "PIECE_ROWS": block_m if one else block_m // 2,  # of the sums, in all columns, that one TMA adds to
        "DQ_BEHIND": config["ORDER"] != "together", "SCORES_AHEAD": config["ORDER"] == "ahead",
        "CONSUMER_REGISTERS": REGISTERS,
        # of K, two where that pays: the next tile's K is there when a tile ends, and its V soon after. At 128 columns they do
        # not fit; of groups apart the loops get slower by more than a tile's end gets faster
        "K_STAGES": 2 if one and d <= 64 else 1,
    }  # fmt: skip


def used(spec: Specialization, config: Config) -> Used:
    """Results: of dK and dV; dQ's are of half of its columns."""
    head_dims = (spec.head_dim, *parts(spec, config)), (spec.head_dim_v, *parts_v(spec, config))
    return Used(trimmed(*head_dims), trimmed(*head_dims, step=16))


def helpers(problem: Problem, config: Config, sm_count: int) -> int:
    """Multiprocessors that FINISH_BESIDE leaves to the kernels before and after the main one: their share of all the work, or
    what the main kernel's last round would leave idle, where it would take one more for that share."""
    if not config["FINISH_BESIDE"]:
        return 0
    worth, whole = share_of_helpers(problem)
    wanted = min(-(-sm_count * worth // whole), sm_count - 1)
    if not problem.mask.hooks.even:  # tiles of any length: there are no rounds
        return wanted
    tiles = -(-problem.seqlen_k // (GROUPS * KEYS)) * problem.batch * problem.heads_kv

    def busy(programs: int) -> float:
        return tiles / (-(-tiles // programs) * programs)

    if busy(sm_count - wanted) >= 0.95 * busy(sm_count):
        return wanted
    return sm_count - -(-tiles // -(-tiles // sm_count))


def share_of_helpers(problem: Problem) -> tuple[int, int]:
    """As (so many of so many), in keys. The main kernel works on whole tiles of them. Which programs go on preparing follows
    from this, too (kernels/sm90/bwd_prepare_overlapped.py)."""
    return HELPERS_WORTH, keys_worked(problem) + HELPERS_WORTH


def keys_worked(problem: Problem) -> int:
    """Keys that the main kernel multiplies a query row with, on average: whole tiles, and none that its block does not see. A
    mask cuts half a tile at each bounded end of what a row sees."""
    tile = GROUPS * KEYS
    most = -(-problem.extent.length(problem.seqlen_k) // tile) * tile
    hooks = problem.mask.hooks
    if not hooks.masked:
        return most
    seen = round(problem.keys_seen)
    return seen + tile // 2 if hooks.left != hooks.right else min(seen + tile, most)


def permuted_columns(spec: Specialization, config: Config) -> int:
    """Columns of a piece of sums in register order."""
    found = columns(spec, config)
    return min(PIECE, found) if concatenated(config) else int(config["BLOCK_M"] * found // 128)


#: What packed sequences need: the producer determines the next tile and its place, and passes both to the groups.
PACKED = {"PERSISTENT": True, "PAIRS": False, "DYNAMIC": True}


#: What tiles that add to dQ in a fixed order need.
TURNS = {
    "REDUCE": "tma", "ORDER": "together", "PERSISTENT": True, "PAIRS": False, "DYNAMIC": True, "BESIDE": False,
    "FINISH_BESIDE": False, "EARLY_START": False, "IN_PARTS": False, "V_APART": False, "QUERY_PARTS": False,
}  # fmt: skip


def suited(problem: Problem, config: Config) -> Config:
    """The config for this problem: of packed sequences, in the form that they can have."""
    return {**config, **PACKED} if problem.extent.ragged else config


def default(spec: Specialization, arch: int) -> Config:
    """Where the search starts."""
    wide = NARROW_COLUMNS if is_narrow(spec) else min(128, max(block_dims(spec)))
    block_m, reduce, order, first, dynamic, heads, warps = BEST[wide, spec.mask_hooks.masked]
    best = {
        "BLOCK_M": block_m, "REDUCE": reduce, "ORDER": order, "EXPONENTIALS_FIRST": first, "STAGES": 2,
        "PERSISTENT": True, "PAIRS": False, "DYNAMIC": dynamic, "BESIDE": False, "FINISH_BESIDE": False,
        "HEADS_PER_WAVE": heads, "IN_PARTS": False, "V_APART": False, "NARROW": False, "num_warps": warps,
    }  # fmt: skip
    return fitted(spec, best)


def fitted(spec: Specialization, config: Config) -> Config:
    """The config of a row of other head dims, padded as far as these, for these: up to NARROW_COLUMNS in tiles of as many.
    Wider ones in parts, whose groups are apart, in step, and add to dQ from registers. One head a wave becomes 16: with one,
    all programs add to the same few rows of dQ at a time, which their products hide no longer (96 and 80, 8192 tokens: 1.05 of
    padded, and 1.17 and 1.20 with 16). Not of 64 columns, where parts cost as much as they save. V has parts of its own where
    ``apart_pays``. See docs/experiments/head-dims.md, and docs/experiments/few-heads-packed.md for the order."""
    config = {**config, "V_APART": False}
    if spec.scored:  # as "term_has_registers" wants it
        config["BLOCK_M"] = 64
    if apart_pays(spec):
        return with_v_apart(config)
    if not has_parts(spec) or max(block_dims(spec)) == 64:
        loop = NARROW_LOOP if is_narrow(spec) and config["PERSISTENT"] and not concatenated(config) else {}
        return {**config, **loop, "IN_PARTS": False, "NARROW": is_narrow(spec)}
    heads = 16 if config["HEADS_PER_WAVE"] == 1 else config["HEADS_PER_WAVE"]
    return {**config, **PARTS_LOOP, "IN_PARTS": True, "NARROW": False, "HEADS_PER_WAVE": heads, "num_warps": 4}


def shared_bytes(config: Config, spec: Specialization) -> int:
    """What a program takes."""
    d, dv, m, keys = sum(parts(spec, config)), sum(parts_v(spec, config)), config["BLOCK_M"], GROUPS * KEYS
    together = config["ORDER"] == "together"
    rings = config["STAGES"] * 2 * m * (d + dv + 2 * TERM_COLUMNS)  # Q and dO, each with its terms
    ds = (2 if together else 3) * 2 * keys * m
    out = 4 * m * d if config["REDUCE"] == "tma" else 2 * keys * d
    if config.get("V_APART") or (config["REDUCE"] != "tma" and together and not concatenated(config)):
        out += 2 * keys * dv
    more = ARGUMENT_BYTES if config.get("IN_PARTS") else 0
    more += 4 * GROUPS * m if spec.scored else 0  # lse of a block, on its way to all threads of a group
    return int(2 * keys * (derived(spec, config)["K_STAGES"] * d + dv) + rings + ds + out) + BARRIER_BYTES + more


SPACE = SearchSpace(
    name="bwd_fused_hopper",
    dimensions={
        "BLOCK_M": (64, 128),
        # dQ into its sums: TMA from shared memory (ORDER "together": by a warp of its own), or vector reductions from registers
        "REDUCE": ("tma", "vector"),
        # dQ of a block together with its dK; or a block behind, so that no group waits for the other's dS; or that, and the
        # scores of the next block ahead, beside the reduction
        "ORDER": ("together", "behind", "ahead"),
        "EXPONENTIALS_FIRST": (False, True),  # asks ptxas not to wait for dP before all of them are computed
        "STAGES": (2, 3),  # of the rings of Q and dO; a third gained nothing at 64 columns and more
        "PERSISTENT": (False, True),  # one program a multiprocessor, which takes every n-th tile; or a program a tile
        "PAIRS": (
            False,
            True,
        ),  # tiles two by two, the n-th of a head and the n-th last: even shares under a causal mask
        "DYNAMIC": (False, True),  # the next tile that no program has taken, by a counter
        "BESIDE": (False, True),  # lse, delta and zeros prepared overlapped with the first tiles, or before
        "FINISH_BESIDE": (False, True),  # and dQ made of its sums overlapped with the last ones, or after
        # each kernel started before the one before it ends, for whose end it waits; not searched: short calls have it
        # (fa2tune/calling/schedules/fused_schedule.py)
        "EARLY_START": added(False, older=False),
        # key tiles add to dQ in a fixed order; not searched: deterministic calls have it
        # (fa2tune/calling/schedules/turns_schedule.py)
        "IN_ORDER": added(False, older=False),
        # packed sequences of more queries come first; not searched: calls whose last tiles would end alone have it
        # (fa2tune/calling/schedules/packed_schedule.py)
        "LONGER_FIRST": added(False, older=False),
        # of ungrouped heads a key tile's query blocks in parts, each a program's; not searched: calls of few tiles have it
        # (fa2tune/calling/schedules/query_parts_schedule.py)
        "QUERY_PARTS": added(False, older=False),
        "HEADS_PER_WAVE": (1, 4, 8, 16, 32),
        "IN_PARTS": added(
            False, True, older=False
        ),  # head dims as sums of two powers of two, 96 as 64 + 32, not padded
        # V and dO in parts of their own, which need not be those of Q and K
        "V_APART": added(False, True, older=False),
        "NARROW": added(False, True, older=False),  # head dims up to 32 in tiles of 32 columns, not padded to 64
        "num_warps": (4, 8),  # the two groups apart, a partition each; or concatenated in one
    },
    constraints=(
        Constraint(
            "narrow_tiles_hold_head_dims",
            "NARROW of head dims above 32, or with IN_PARTS",
            "tiles of Q, K, V and dO share one width, so 32 columns are for calls whose head dims both fit",
            lambda config, spec, arch: not config["NARROW"] or (is_narrow(spec) and not config["IN_PARTS"]),
        ),
        Constraint(
            "third_stage_of_narrow_tiles",
            "STAGES 3 needs NARROW and no ORDER together",
            "blocks of 32 columns take less time than it takes to load the next; at 64 columns and more a third stage gained "
            "nothing, and the order together has no named barrier left for it",
            lambda config, spec, arch: config["STAGES"] == 2 or (config["NARROW"] and config["ORDER"] != "together"),
        ),
        SIXTEEN_BIT,
        TMA_ADDRESSES_TENSORS,
        Constraint(
            "registers_hold_accumulators",
            "dK, dV, scores and dP exceed the registers",
            "dK and dV of 64 keys, the scores and dP are in a group's registers at the same time; beyond 192 of 240 ptxas "
            "serialises the products, and with 256 columns dK and dV alone need all (the split kernels serve there)",
            lambda config, spec, arch: (
                (sum(parts(spec, config)) + sum(parts_v(spec, config))) // 2 + config["BLOCK_M"] <= 192
            ),
        ),
        Constraint(
            "parts_are_of_both_head_dims",
            "IN_PARTS of head dims that have not the same two parts",
            "tiles of Q, K, V and dO share one shape, so both head dims need the same two parts, and have to have two",
            lambda config, spec, arch: not config["IN_PARTS"] or config["V_APART"] or has_parts(spec),
        ),
        Constraint(
            "v_apart_is_in_parts",
            "V_APART with BESIDE, or of head dims that are alike",
            "tiles of V and dO have other columns only in parts, where one of the head dims has 65 to 128 columns; and the "
            "kernels that overlap know one width",
            lambda config, spec, arch: (
                not config["V_APART"] or (config["IN_PARTS"] and not config["BESIDE"] and can_be_apart(spec))
            ),
        ),
        Constraint(
            "parts_are_added_apart",
            "IN_PARTS needs REDUCE vector and num_warps 4",
            "in parts a group's piece of dQ is of one part, no block that a TMA could add; concatenated groups share one",
            lambda config, spec, arch: (
                not config["IN_PARTS"] or (config["REDUCE"] == "vector" and not concatenated(config))
            ),
        ),
        Constraint(
            "half_blocks_if_joined",
            "BLOCK_M 64 at 64 columns needs num_warps 8 and REDUCE vector",
            "at 64 columns a block of 64 queries has the barriers of a whole block for half the work; it is faster only at "
            "lengths up to 2048, with concatenated groups (one partition has the keys of both) and vector reductions",
            lambda config, spec, arch: (
                max(columns(spec, config), sum(parts_v(spec, config))) > 64
                or config["BLOCK_M"] == 128
                or spec.scored
                or (config["REDUCE"] == "vector" and concatenated(config))
            ),
        ),
        Constraint(
            "term_has_registers",
            "a score term with BLOCK_M 128",
            "what a score term gave lives as long as P, until its derivative is taken; of 128 queries ptxas spills in every "
            "block",
            lambda config, spec, arch: not spec.scored or config["BLOCK_M"] == 64,
        ),
        Constraint(
            "joined_groups_go_together",
            "num_warps 8 needs ORDER together",
            "concatenated groups synchronise twice per block, so they cannot run apart, which the other orders are for",
            lambda config, spec, arch: not concatenated(config) or config["ORDER"] == "together",
        ),
        Constraint(
            "joined_groups_at_64_columns",
            "num_warps 8 at 64 columns needs BLOCK_M 64",
            "5 to 15 % slower than separate groups, except with the half blocks of short problems",
            lambda config, spec, arch: (
                not concatenated(config) or columns(spec, config) > 64 or config["BLOCK_M"] == 64
            ),
        ),
        Constraint(
            "orders_are_for_persistent_programs",
            "PAIRS or DYNAMIC has no effect here",
            "without a mask all tiles take the same time, so pairs gain nothing; a program of one tile takes no next one",
            lambda config, spec, arch: (
                config["PAIRS"] + config["DYNAMIC"] <= (1 if config["PERSISTENT"] else 0)
                and (spec.mask_hooks.masked or not config["PAIRS"])
            ),
        ),
        Constraint(
            "others_take_over_what_comes_late",
            "BESIDE needs DYNAMIC if PERSISTENT",
            "with an overlapped prologue, programs start at different times, so tiles cannot be assigned to them in advance",
            lambda config, spec, arch: not config["BESIDE"] or config["DYNAMIC"] or not config["PERSISTENT"],
        ),
        Constraint(
            "who_prepares_makes_room_for_who_finishes",
            "FINISH_BESIDE without the options that it needs",
            "the epilogue (cast of dQ) runs in the programs of the prologue once all tiles of a head are added; the warp that "
            "counts them must add them itself, or they are added from registers",
            lambda config, spec, arch: (
                not config["FINISH_BESIDE"]
                or (
                    config["BESIDE"]
                    and config["DYNAMIC"]
                    and (config["REDUCE"] == "vector" or config["ORDER"] == "together")
                )
            ),
        ),
        Constraint(
            "early_start_waits_for_ends",
            "EARLY_START with BESIDE",
            "overlapped kernels wait for flags, not for each other's end",
            lambda config, spec, arch: not config["EARLY_START"] or not config["BESIDE"],
        ),
        Constraint(
            "turns_follow_the_counter",
            "IN_ORDER without the options that it needs",
            "a tile waits for the one above it, which must have been taken from the counter before; a warp of its own waits, "
            "and adds to dQ; kernels that overlap count tiles, not turns",
            lambda config, spec, arch: (
                not config["IN_ORDER"]
                or (not spec.ragged and all(config[name] == value for name, value in TURNS.items()))
            ),
        ),
        Constraint(
            "packed_sequences_in_one_form",
            "packed sequences need DYNAMIC, PERSISTENT and no PAIRS",
            "the producer finds where a packed tile lies when it takes it from the counter",
            lambda config, spec, arch: not spec.ragged or all(config[name] == value for name, value in PACKED.items()),
        ),
        Constraint(
            "longer_first_is_written_before",
            "LONGER_FIRST with BESIDE, or of sequences that are not packed",
            "the kernel that prepares rows before writes the order of packed tiles; one that overlaps prepares rows in the "
            "order of the sequences",
            lambda config, spec, arch: not config["LONGER_FIRST"] or (spec.ragged and not config["BESIDE"]),
        ),
        Constraint(
            "query_parts_are_of_whole_blocks",
            "QUERY_PARTS with BESIDE, PAIRS, IN_ORDER or a left-bounded mask",
            "a part is a run of a tile's query blocks, which a mask bounded on the left rotates; kernels that overlap, and "
            "turns, count a tile once",
            lambda config, spec, arch: (
                not config["QUERY_PARTS"]
                or not (config["BESIDE"] or config["PAIRS"] or config["IN_ORDER"] or spec.mask_hooks.left)
            ),
        ),
        PACKED_WITHIN_32_BITS,
        Constraint(
            *TILES_FIT,
            "K, V, the rings of Q and dO, dS and the output tiles exceed 227 KiB, the limit per block on Hopper",
            lambda config, spec, arch: shared_bytes(config, spec) <= SHARED_BYTES,
        ),
    ),
    default=default,
)
