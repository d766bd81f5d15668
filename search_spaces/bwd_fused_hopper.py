"""Search space of kernels/bwd_fused_hopper.py."""

from typing import Any

from fa2tune.problem import Config, Problem, Specialization
from fa2tune.search_spaces.hopper import BARRIER_BYTES, SHARED_BYTES, SIXTEEN_BIT, TMA_ADDRESSES_TENSORS, block_dims
from fa2tune.variant import Constraint, SearchSpace

GROUPS, KEYS = 2, 64  #: consumer groups of four warps, and the keys of each
REGISTERS = 240  #: that a consumer thread gets: what 64 Ki leave beside a producer of 24
TERMS = 8  #: bfloat16 numbers a row, in memory, that lse or delta is the sum of
TERM_COLUMNS = 16  #: and in shared memory, where one step of a wgmma adds them up
CHUNK = 128  #: query rows of which kernels/bwd_beside_hopper.py tells at once
#: Keys whose products with a query row take one multiprocessor as long as preparing that row beside others: 45 to 60 measured
#: (docs/experiments.md), and some more, as main waits for what is late
ROWS_WORTH = 60
HELPERS_WORTH = 62  #: and, with FINISH_BESIDE, of preparing a row and finishing its dQ: 60 to 85 measured
PIECE = 64  #: rows, and at most columns, of a piece of dQ whose sums lie together, where they are in register order

#: (BLOCK_M, REDUCE, ORDER, EXPONENTIALS_FIRST, DYNAMIC, HEADS_PER_WAVE, num_warps) by (columns, causal), from the sweeps in
#: docs/experiments.md
BEST = {
    (64, False): (128, "vector", "behind", False, True, 1, 4),
    (64, True): (128, "vector", "behind", False, True, 4, 4),
    (128, False): (64, "vector", "behind", False, True, 1, 4),
    (128, True): (64, "tma", "behind", True, True, 4, 4),
}


def columns(spec: Specialization) -> int:
    """Of every tile: K, Q, V and dO share one width, what lacks is zeros."""
    return max(block_dims(spec))


def padded_rows(problem: Problem) -> int:
    """Query rows of the workspaces: whole blocks, of any config and of the kernels before and after."""
    return (problem.seqlen_q + 127) // 128 * 128


def joined(config: Config) -> bool:
    """Whether both groups are one partition."""
    return bool(config["num_warps"] == 8)


def derived(spec: Specialization, config: Config) -> dict[str, Any]:
    """What the kernel and its descriptors are told beside the config."""
    block_m, d = config["BLOCK_M"], columns(spec)
    one = joined(config)
    return {
        "BLOCK_D": d,
        "TILE_ROWS": GROUPS * KEYS if one else KEYS,  # of K, V, dK and dV that one TMA moves
        "PIECE_ROWS": block_m if one else block_m // 2,  # of the sums, in all columns, that one TMA adds to
        "DQ_BEHIND": config["ORDER"] != "together", "SCORES_AHEAD": config["ORDER"] == "ahead",
        "CONSUMER_REGISTERS": REGISTERS,
        # of K, two where that pays: the next tile's K is there when a tile ends, and its V soon after. At 128 columns they do
        # not fit; of groups apart the loops get slower by more than a tile's end gets faster
        "K_STAGES": 2 if one and d == 64 else 1,
    }  # fmt: skip


def helpers(problem: Problem, config: Config, sm_count: int) -> int:
    """Multiprocessors that FINISH_BESIDE leaves to the kernels before and after the main one: their share of all the work, or
    what the main kernel's last round would leave idle, where it would take one more for that share."""
    if not config["FINISH_BESIDE"]:
        return 0
    worth, whole = share_of_helpers(problem)
    wanted = min(-(-sm_count * worth // whole), sm_count - 1)
    if problem.causal:  # tiles of any length: there are no rounds
        return wanted
    tiles = -(-problem.seqlen_k // (GROUPS * KEYS)) * problem.batch * problem.heads_kv

    def busy(programs: int) -> float:
        return tiles / (-(-tiles // programs) * programs)

    if busy(sm_count - wanted) >= 0.95 * busy(sm_count):
        return wanted
    return sm_count - -(-tiles // -(-tiles // sm_count))


def share_of_helpers(problem: Problem) -> tuple[int, int]:
    """As (so many of so many), in keys. The main kernel works on whole tiles of them. Who goes on preparing is reckoned from
    this, too (kernels/bwd_beside_hopper.py)."""
    tile = GROUPS * KEYS
    keys = round(problem.keys_seen) + tile // 2 if problem.causal else -(-problem.seqlen_k // tile) * tile
    return HELPERS_WORTH, keys + HELPERS_WORTH


def permuted_columns(spec: Specialization, config: Config) -> int:
    """Columns of a piece of sums in register order."""
    return PIECE if joined(config) else int(config["BLOCK_M"] * columns(spec) // 128)


def default(spec: Specialization, arch: int) -> Config:
    """Where the search starts."""
    block_m, reduce, order, first, dynamic, heads, warps = BEST[min(128, columns(spec)), spec.causal]
    return {
        "BLOCK_M": block_m, "REDUCE": reduce, "ORDER": order, "EXPONENTIALS_FIRST": first, "STAGES": 2,
        "PERSISTENT": True, "PAIRS": False, "DYNAMIC": dynamic, "BESIDE": False, "FINISH_BESIDE": False,
        "HEADS_PER_WAVE": heads, "num_warps": warps,
    }  # fmt: skip


def shared_bytes(config: Config, spec: Specialization) -> int:
    """What a program takes."""
    d, m, keys = columns(spec), config["BLOCK_M"], GROUPS * KEYS
    together = config["ORDER"] == "together"
    rings = config["STAGES"] * 2 * m * 2 * (d + TERM_COLUMNS)  # Q and dO, each with its terms
    ds = (2 if together else 3) * 2 * keys * m
    out = 4 * m * d if config["REDUCE"] == "tma" else (2 if together and not joined(config) else 1) * 2 * keys * d
    return int((derived(spec, config)["K_STAGES"] + 1) * 2 * keys * d + rings + ds + out) + BARRIER_BYTES


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
        "STAGES": (2,),  # of the rings of Q and dO; a third gained nothing
        "PERSISTENT": (False, True),  # one program a multiprocessor, which takes every n-th tile; or a program a tile
        "PAIRS": (
            False,
            True,
        ),  # tiles two by two, the n-th of a head and the n-th last: even shares under a causal mask
        "DYNAMIC": (False, True),  # the next tile that no program has taken, by a counter
        "BESIDE": (False, True),  # lse, delta and zeros prepared beside the first tiles, or before
        "FINISH_BESIDE": (False, True),  # and dQ made of its sums beside the last ones, or after
        "HEADS_PER_WAVE": (1, 4, 8, 32),
        "num_warps": (4, 8),  # the two groups apart, a partition each; or joined in one
    },
    constraints=(
        SIXTEEN_BIT,
        TMA_ADDRESSES_TENSORS,
        Constraint(
            "registers_hold_accumulators",
            "dK and dV of 64 keys, the scores and dP live in a group's registers at once; beyond 192 of 240 ptxas runs the "
            "products one by one, and with 256 columns dK and dV alone take all (the split kernels serve there)",
            lambda config, spec, arch: columns(spec) + config["BLOCK_M"] <= 192,
        ),
        Constraint(
            "half_blocks_if_joined",
            "at 64 columns a block of 64 queries pays its barriers for half the work; it leads only at lengths up to 2048, by "
            "joined groups with vector reductions",
            lambda config, spec, arch: (
                columns(spec) > 64 or config["BLOCK_M"] == 128 or (config["REDUCE"] == "vector" and joined(config))
            ),
        ),
        Constraint(
            "joined_groups_go_together",
            "groups that meet twice a block cannot drift apart, which is what the other orders are for",
            lambda config, spec, arch: not joined(config) or config["ORDER"] == "together",
        ),
        Constraint(
            "joined_groups_at_64_columns",
            "5 to 15 % behind groups apart, but with the half blocks of short problems",
            lambda config, spec, arch: not joined(config) or columns(spec) > 64 or config["BLOCK_M"] == 64,
        ),
        Constraint(
            "orders_are_for_persistent_programs",
            "without a mask all tiles are alike, and there is nothing to pair; a program a tile has nothing to take next",
            lambda config, spec, arch: (
                config["PAIRS"] + config["DYNAMIC"] <= (1 if config["PERSISTENT"] else 0)
                and (spec.causal or not config["PAIRS"])
            ),
        ),
        Constraint(
            "others_take_over_what_comes_late",
            "programs begin where a multiprocessor has nothing left to prepare, so none may be owed a share of the tiles",
            lambda config, spec, arch: not config["BESIDE"] or config["DYNAMIC"] or not config["PERSISTENT"],
        ),
        Constraint(
            "who_prepares_makes_room_for_who_finishes",
            "dQ is finished where rows were prepared; whether a head has all its tiles a warp of its own counts: it adds them "
            "itself, or those do who add from registers",
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
            "tiles_fit_shared_memory",
            "K, V, the rings of Q and dO, dS and what leaves exceed 227 KiB, the most a Hopper GPU gives a block",
            lambda config, spec, arch: shared_bytes(config, spec) <= SHARED_BYTES,
        ),
    ),
    default=default,
)
