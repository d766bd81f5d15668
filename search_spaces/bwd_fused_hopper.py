"""Search space of kernels/bwd_fused_hopper.py."""

from fa2tune.problem import Config, Problem, Specialization
from fa2tune.search_spaces.hopper import BARRIER_BYTES, SHARED_BYTES, SIXTEEN_BIT, TMA_ADDRESSES_TENSORS, block_dims
from fa2tune.variant import Constraint, SearchSpace

GROUPS, KEYS = 2, 64  #: consumer groups of four warps, and the keys of each
REGISTERS = 240  #: that a consumer thread gets: what 64 Ki leave beside a producer of 24

#: (BLOCK_M, REDUCE, ORDER, EXPONENTIALS_FIRST, PERSISTENT) by (columns, causal), best of the sweeps in docs/experiments.md
BEST = {
    (64, False): (128, "tma", "ahead", False, True),
    (64, True): (128, "tma", "behind", False, False),
    (128, False): (64, "vector", "behind", True, False),
    (128, True): (64, "vector", "behind", False, False),
}


def columns(spec: Specialization) -> int:
    """Of every tile: K, Q, V and dO share one width, what lacks is zeros."""
    return max(block_dims(spec))


def padded_rows(problem: Problem) -> int:
    """Query rows of the workspaces: whole blocks, of any config and of the kernels before and after."""
    return (problem.seqlen_q + 127) // 128 * 128


def default(spec: Specialization, arch: int) -> Config:
    """Where the search starts."""
    block_m, reduce, order, first, persistent = BEST[min(128, columns(spec)), spec.causal]
    return {
        "BLOCK_M": block_m, "REDUCE": reduce, "ORDER": order, "EXPONENTIALS_FIRST": first, "STAGES": 2,
        "PERSISTENT": persistent, "HEADS_PER_WAVE": 8 if spec.causal else 4, "num_warps": 4,
    }  # fmt: skip


def _shared_bytes(config: Config, spec: Specialization) -> int:
    d, m, keys = columns(spec), config["BLOCK_M"], GROUPS * KEYS
    together = config["ORDER"] == "together"
    rings = config["STAGES"] * 2 * m * (2 * d + 4)  # Q and lse, dO and delta
    ds = (2 if together else 3) * 2 * keys * m
    out = 4 * m * d if config["REDUCE"] == "tma" else (2 if together else 1) * 2 * keys * d
    return int(2 * 2 * keys * d + rings + ds + out) + BARRIER_BYTES


SPACE = SearchSpace(
    name="bwd_fused_hopper",
    dimensions={
        "BLOCK_M": (64, 128),
        "REDUCE": ("tma", "vector"),  # dQ into its sums: TMA from shared memory, or vector reductions from registers
        # dQ of a block together with its dK; or a block behind, so that no group waits for the other's dS; or that, and the
        # scores of the next block ahead, beside the reduction
        "ORDER": ("together", "behind", "ahead"),
        "EXPONENTIALS_FIRST": (False, True),  # no waiting for dP before all of them are computed
        "STAGES": (2,),  # of the rings of Q and dO; a third gained nothing
        "PERSISTENT": (False, True),  # one program a multiprocessor, which takes every n-th tile; or a program a tile
        "HEADS_PER_WAVE": (1, 4, 8, 32),
        "num_warps": (4,),
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
            "half_blocks_for_short_causal",
            "at 64 columns a block of 64 queries pays its barriers for half the work; it came near the lead only under a "
            "causal mask at lengths of 512 and 1024, with vector reductions and dQ behind",
            lambda config, spec, arch: (
                columns(spec) > 64
                or config["BLOCK_M"] == 128
                or (spec.causal and config["REDUCE"] == "vector" and config["ORDER"] == "behind")
            ),
        ),
        Constraint(
            "tiles_fit_shared_memory",
            "K, V, the rings of Q and dO, dS and what leaves exceed 227 KiB, the most a Hopper GPU gives a block",
            lambda config, spec, arch: _shared_bytes(config, spec) <= SHARED_BYTES,
        ),
    ),
    default=default,
)
