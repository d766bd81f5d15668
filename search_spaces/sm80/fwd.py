"""Search space of kernels/sm80/fwd.py."""

from fa2tune.search_spaces.lib.ampere import (
    BAND_KEYS,
    COPIES_ARE_ALIGNED,
    NAME,
    RACED_LIMITS,
    SIXTEEN_BIT,
    WITHOUT_WGMMA,
    block_dims,
    even_bands,
    register_cap_leaves,
    shared_limit,
)
from fa2tune.search_spaces.lib.common import REGISTER_CAP_BINDS, REGISTERS_HOLD_LOOP, TILES_FIT, rows_per_warp
from fa2tune.spec.problem import Config, Problem, Specialization, head_dim_parts
from fa2tune.spec.variant import WARP_THREADS, Constraint, SearchSpace, added

STEP = 16  #: columns of Q and K that are in registers at once, where Q is read from shared memory

#: (BLOCK_M, BLOCK_N, num_warps, SCHEDULE, Q_IN_REGISTERS, SUMS) by the most columns of Q, K and V: the best of the races of
#: docs/experiments/mma-sync.md.
BEST = {
    64: (128, 64, 4, "double", True, "first"), 96: (128, 64, 4, "fa2", False, "add"),
    128: (128, 32, 4, "double", False, "first"), 256: (64, 32, 4, "fa2", True, "mma"),
}  # fmt: skip
#: The same for 99 KiB of shared memory a block, and 100 a multiprocessor: two blocks of it, but for 256, where one block has
#: eight warps.
BEST_SMALL = {64: BEST[64], 128: (128, 32, 4, "fa2", False, "first"), 256: (128, 32, 8, "fa2", True, "mma")}


def buffers(config: Config) -> int:
    """Of K and of V."""
    return 1 if config["SCHEDULE"] == "fa2" else 2


def shared_bytes(config: Config, spec: Specialization) -> int:
    """What a program takes."""
    d, dv = block_dims(spec)
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    exchanged = m * (n + 8) if config.get("O_IN_HALVES") else 0  # P, and four float32 a row
    q = max(m * d, exchanged) if config["Q_IN_REGISTERS"] else m * d + exchanged
    through_k = m * dv  # O leaves by memory that is free by then
    return int(2 * max(q + buffers(config) * n * (d + dv), through_k))


def live_registers(config: Config, spec: Specialization) -> int:
    """Of a thread through the loop: output, scores, and Q where it stays."""
    held = block_dims(spec)[0] if config["Q_IN_REGISTERS"] else config.get("Q_HELD", 0)
    q = held // 2  # two to a register
    held = config["BLOCK_M"] * (sum(head_dim_parts(spec.head_dim_v)) + config["BLOCK_N"] + q)
    return int(held // (config["num_warps"] * WARP_THREADS))


def default(spec: Specialization, arch: int) -> Config:
    """Where the search starts."""
    best, most = BEST_SMALL if shared_limit(arch) < 160 * 1024 else BEST, max(spec.head_dim, spec.head_dim_v)
    block_m, block_n, warps, schedule, q_in_registers, sums = best[min(columns for columns in best if columns >= most)]
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "SCHEDULE": schedule, "Q_IN_REGISTERS": q_in_registers, "SUMS": sums,
        "HEADS_PER_WAVE": 16, "IMPLEMENTATION": NAME, "num_warps": warps, "maxnreg": 0,
    }  # fmt: skip


def suited(problem: Problem, config: Config) -> Config:
    """A row's config for a call's own heads."""
    return even_bands(problem, config, problem.batch * problem.heads_q, BAND_KEYS)


SPACE = SearchSpace(
    name="fwd_sm80",
    dimensions={
        "IMPLEMENTATION": (NAME,),
        "BLOCK_M": (64, 128),
        "BLOCK_N": (32, 64, 128),
        # one buffer of K and of V, asked for in turns, two barriers a block; or two of each, asked for a block ahead, and one
        "SCHEDULE": ("fa2", "double"),
        "Q_IN_REGISTERS": (False, True),  # or read from shared memory once per key block
        "Q_HELD": added(0, 32, 64, 96, older=0),  # or so many of its columns in registers, and the others read
        "O_IN_HALVES": added(False, older=False),  # two warps share a row of O; not searched: not timed
        "SUMS": ("add", "mma", "first"),  # of rows: by additions, or by products with ones, after P V or before it
        "HEADS_PER_WAVE": (1, 4, 16),
        "num_warps": (4, 8),
        "maxnreg": (0, 128, 168),  # 128: four blocks of four warps share a multiprocessor, 168: three
    },
    constraints=(
        WITHOUT_WGMMA,
        SIXTEEN_BIT,
        COPIES_ARE_ALIGNED,
        REGISTER_CAP_BINDS,
        rows_per_warp("BLOCK_M"),
        Constraint(
            "halves_of_o_have_rows",
            "O_IN_HALVES with fewer than 32 rows a warp",
            "a warp with half of O's columns has 32 rows: with 16 it would read as much of V as with all columns",
            lambda config, spec, arch: (
                not config["O_IN_HALVES"]
                or (
                    config["BLOCK_M"] >= 16 * config["num_warps"]
                    and min(filter(None, head_dim_parts(spec.head_dim_v))) >= 16
                )
            ),
        ),
        Constraint(
            "held_columns_are_of_q",
            "Q_HELD with Q_IN_REGISTERS, or more than Q has",
            "columns of Q in registers are some of its own, in whole steps, where not all are there, with padding",
            lambda config, spec, arch: (
                not config["Q_HELD"] or (not config["Q_IN_REGISTERS"] and config["Q_HELD"] <= spec.head_dim)
            ),
        ),
        Constraint(
            *REGISTERS_HOLD_LOOP,
            "output, scores and Q, where it stays, live through the loop; beyond 224 of the 255 registers of a thread (or with "
            "fewer than 40 left under a cap) what a product reads is spilled in every trip",
            lambda config, spec, arch: (
                live_registers(config, spec) <= 224 and register_cap_leaves(live_registers(config, spec), config)
            ),
        ),
        Constraint(
            *TILES_FIT,
            "the tiles of Q, K and V exceed the shared memory of a block: 163 KiB on compute capability 8.0 and 8.7, 99 KiB on "
            "8.6, 8.9 and 12.0",
            lambda config, spec, arch: shared_bytes(config, spec) <= shared_limit(arch),
        ),
    ),
    default=default,
    default_from=64,
    default_on=RACED_LIMITS,
)
