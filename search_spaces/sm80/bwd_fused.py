"""Search space of kernels/sm80/bwd_fused.py."""

from fa2tune.search_spaces.lib.ampere import (
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
from fa2tune.search_spaces.lib.common import REGISTER_CAP_BINDS, REGISTERS_HOLD_LOOP, TILES_FIT
from fa2tune.spec.problem import Config, Problem, Specialization, head_dim_parts
from fa2tune.spec.variant import WARP_THREADS, Constraint, SearchSpace, added

STEP = 16  #: rows or columns of a product's operands that are in registers at once
TURN_ROWS = 16  #: of dQ, to which key tiles add in turns with IN_ORDER: no block has fewer
ROW_UNIT = 128  #: query rows of the workspaces are whole multiples: whole blocks, of any config

APART = "KEYS_APART"
#: (BLOCK_M, BLOCK_N, num_warps, P_THROUGH, EARLY, SCORE_WARPS, KEY_WARPS, QUERY_WARPS, and what is True besides) by the most
#: columns of Q, K and V: the best of the races of docs/experiments/mma-sync.md.
BEST = {
    64: (32, 128, 4, "registers", False, 1, 4, 2, ()), 96: (64, 128, 8, "shared", True, 2, 4, 2, (APART,)),
    128: (128, 128, 8, "one", False, 4, 4, 4, ()), 256: (64, 64, 8, "shared", False, 2, 2, 2, ()),
}  # fmt: skip
#: Under a mask.
BEST_CAUSAL = {**BEST, 128: (64, 128, 8, "shared", True, 2, 2, 2, ())}
#: For 99 KiB of shared memory a block. At 256 V is in registers: beside it there is no room for 32 queries.
BEST_SMALL = {
    64: BEST[64], 128: (64, 64, 4, "shared", True, 2, 2, 2, ()),
    256: (32, 64, 8, "shared", False, 2, 2, 2, ("V_IN_REGISTERS",)),
}  # fmt: skip


def padded_rows(problem: Problem) -> int:
    """Query rows of the workspaces; of packed sequences whole blocks of each."""
    return problem.extent.tiles(1, problem.seqlen_q, ROW_UNIT) * ROW_UNIT


def shared_bytes(config: Config, spec: Specialization) -> int:
    """What a program takes: K, V, Q, dO, dS and, where it goes through shared memory, P. V in registers comes by the memory of
    Q, dO, P and dS."""
    d, dv = block_dims(spec)
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    scores = 4 if config.get("SCORES_APART") else 2 if config["P_THROUGH"] == "shared" else 1  # tiles
    others = m * (d + dv) + m * n * scores
    if config.get("V_IN_REGISTERS"):
        return int(2 * max(n * d + max(n * dv, others), n * max(d, dv)))
    return int(2 * (n * (d + dv) + others))


def live_registers(config: Config, spec: Specialization) -> int:
    """Of a thread through the loop: dK, dV, and scores and dP or dQ, whichever are more."""
    d, dv = sum(head_dim_parts(spec.head_dim)), sum(head_dim_parts(spec.head_dim_v))
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    held = n * dv // 2 * config["SCORE_WARPS"] if config.get("V_IN_REGISTERS") else 0  # two to a register
    return int(
        (n * (d + dv) + held + max((1 if config["P_THROUGH"] == "one" else 2) * m * n, m * d))
        // (config["num_warps"] * WARP_THREADS)
    )


def _warps_fit(config: Config, spec: Specialization) -> bool:
    """Whether every warp has 16 rows and 8 columns of each product."""
    d, dv = block_dims(spec)
    warps, m, n = config["num_warps"], config["BLOCK_M"], config["BLOCK_N"]
    keys = 2 * n if config.get("KEYS_APART") else n  # two results, one below the other
    shapes = [(config["KEY_WARPS"], keys, min(d, dv)), (config["QUERY_WARPS"], m, d)]
    if config["P_THROUGH"] != "registers":
        shapes.append((config["SCORE_WARPS"], 2 * m if config.get("SCORES_APART") else m, n))
    return all(down <= warps and 16 * down <= rows and 8 * (warps // down) <= columns for down, rows, columns in shapes)


def default(spec: Specialization, arch: int) -> Config:
    """Where the search starts."""
    d, dv = block_dims(spec)
    best = (
        BEST_SMALL
        if shared_limit(arch) < 160 * 1024
        else BEST
        if not spec.mask_hooks.masked and not spec.scored
        else BEST_CAUSAL
    )
    most = max(spec.head_dim, spec.head_dim_v)
    alike = spec.head_dim == spec.head_dim_v  # as products apart have to be
    held = min(columns for columns in best if columns >= most and (alike or APART not in best[columns][-1]))
    block_m, block_n, warps, through, early, score, key, query, true = best[held]
    while 8 * (warps // key) > min(d, dv):  # few columns of one of the two
        key *= 2
    while 8 * (warps // query) > d:
        query *= 2
    block_m = max(block_m, 16 * query)
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "P_THROUGH": through, "EARLY": early, "SCORE_WARPS": score,
        "KEY_WARPS": key, "QUERY_WARPS": query, "HEADS_PER_WAVE": 16, "IMPLEMENTATION": NAME, "num_warps": warps,
        "maxnreg": 0, **dict.fromkeys(true, True),
    }  # fmt: skip


def fitted(spec: Specialization, config: Config) -> Config:
    """A row's config without scores apart in fp16, as "dp_has_range" wants it. For calls that have a score term: with buffers
    of their own for P and dS, as "term_has_room" wants it, and as many queries a block as there is then memory for."""
    if not spec.scored:
        return {**config, "SCORES_APART": False} if spec.dtype == "fp16" else config
    found = {**config, "SCORES_APART": False}
    if config["P_THROUGH"] == "one":
        found |= {"P_THROUGH": "shared", "EARLY": True, "BLOCK_M": min(config["BLOCK_M"], 64)}
    most = found["BLOCK_M"] // 16
    return {**found, **{name: min(found[name], most) for name in ("SCORE_WARPS", "QUERY_WARPS")}}


def suited(problem: Problem, config: Config) -> Config:
    """A row's config for a call's own heads: no more in a band than needed, as programs of a band add to dQ of all of them."""
    return even_bands(problem, config, problem.batch * problem.heads_kv)


SPACE = SearchSpace(
    name="bwd_fused_sm80",
    dimensions={
        "IMPLEMENTATION": (NAME,),
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_N": (64, 128),
        # scores [queries, keys], and P and dS to the products of dK and dV through shared memory, in two buffers or in one; or
        # scores [keys, queries], whose P and dS are operands in registers
        "P_THROUGH": ("shared", "registers", "one"),
        "EARLY": (False, True),  # dP ahead of the exponentials, whose stores its loads cannot pass
        "V_IN_REGISTERS": added(False, True, older=False),  # as an operand of dP
        # scores by half of the warps and dP by the others, and dK and dV so: warps read less of the operands
        "SCORES_APART": added(False, True, older=False),
        "KEYS_APART": added(False, True, older=False),
        "SCORE_WARPS": (1, 2, 4),  # warps along the rows of scores, of dK and dV, and of dQ; the others along columns
        "KEY_WARPS": (2, 4, 8),
        "QUERY_WARPS": (1, 2, 4),
        # key tiles add to dQ one after the other; not searched: deterministic calls have it (calling/schedules/ordered.py)
        "IN_ORDER": added(False, older=False),
        "HEADS_PER_WAVE": (1, 4, 16),
        "num_warps": (4, 8),
        "maxnreg": (0, 128, 168),
    },
    constraints=(
        WITHOUT_WGMMA,
        SIXTEEN_BIT,
        COPIES_ARE_ALIGNED,
        REGISTER_CAP_BINDS,
        Constraint(
            "warps_have_rows",
            "more warps than a product has rows or columns for",
            "a warp computes at least 16 rows and 8 columns of a product; more warps than that would repeat each other's work",
            lambda config, spec, arch: _warps_fit(config, spec),
        ),
        Constraint(
            "products_apart_are_alike",
            "SCORES_APART or KEYS_APART of products that are not alike",
            "half of the warps each have one of two products of the same shape, whose factors P and dS are in shared memory",
            lambda config, spec, arch: (
                not (config["SCORES_APART"] or config["KEYS_APART"])
                or (
                    spec.head_dim == spec.head_dim_v
                    and config["P_THROUGH"] == "shared"
                    and not (config["SCORES_APART"] and (config["V_IN_REGISTERS"] or config["SCORE_WARPS"] == 1))
                )
            ),
        ),
        Constraint(
            "dp_has_range",
            "SCORES_APART in fp16",
            "dP less delta goes through shared memory in 16 bits, not yet times P: with a scaled loss it exceeds 65504, where "
            "gradients do not",
            lambda config, spec, arch: not config["SCORES_APART"] or spec.dtype == "bf16",
        ),
        Constraint(
            "term_has_room",
            "a score term with SCORES_APART, or P_THROUGH one",
            "a term's derivative times P goes into dS: not where P comes back from shared memory, or where other warps have dP",
            lambda config, spec, arch: not spec.scored or (config["P_THROUGH"] != "one" and not config["SCORES_APART"]),
        ),
        Constraint(
            "p_in_registers_has_one_split",
            "P_THROUGH registers needs SCORE_WARPS 1 and KEY_WARPS num_warps",
            "P and dS are operands of the warp that computed them, so its rows of scores are its rows of dK and dV",
            lambda config, spec, arch: (
                config["P_THROUGH"] != "registers"
                or (config["SCORE_WARPS"] == 1 and config["KEY_WARPS"] == config["num_warps"])
            ),
        ),
        Constraint(
            *REGISTERS_HOLD_LOOP,
            "dK, dV, scores and dP (or dQ) live through the loop; beyond 224 of the 255 registers of a thread (or with fewer "
            "than 40 left under a cap) what a product reads is spilled in every trip",
            lambda config, spec, arch: (
                live_registers(config, spec) <= 224 and register_cap_leaves(live_registers(config, spec), config)
            ),
        ),
        Constraint(
            *TILES_FIT,
            "K, V, Q, dO, dS and P exceed the shared memory of a block: 163 KiB on compute capability 8.0 "
            "and 8.7, 99 KiB on 8.6, 8.9 and 12.0",
            lambda config, spec, arch: shared_bytes(config, spec) <= shared_limit(arch),
        ),
    ),
    default=default,
    default_from=64,
    default_on=RACED_LIMITS,
)

MOST_BUFFERS = 256
#: Of kernels/sm80/bwd_ordered.py: the same configs, and how many sums of dQ there are, which calling/schedules/ordered.py
#: chooses for a call. Nothing is searched; a config without it is the other kernel's, which has one sum.
IN_ORDER = SearchSpace(
    name="bwd_ordered_sm80",
    dimensions={**SPACE.dimensions, "DQ_BUFFERS": added(*range(1, MOST_BUFFERS + 1), older=1)},
    constraints=SPACE.constraints,
    default=default,
)
