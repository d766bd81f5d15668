"""The fused Hopper backward with dQ summed in a fixed order, for deterministic calls: whether it serves, and in which form.
Arithmetic on the host.

The key tiles of a head add to a block of dQ in turns, the last keys first. A tile goes through its query blocks from its first
one on, so of tiles that start together each meets a block just behind the one above it. How fast they go is the pace of the
first of them, whose additions have to find their rows in L2: ``band`` (docs/experiments/turns.md).
"""

from __future__ import annotations

from dataclasses import replace

from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.maskfile import mask_named
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant

#: Columns of tiles -> queries and keys from which on it serves: 1.06 to 1.43 times as fast as the split kernels at 64, 1.00 to
#: 1.08 at 128, where it is slower (0.85) with several query heads a key head: benchmarks/calls/turns_2.json.
SERVES = {64: 1024, 128: 2048}
GROUPED = 64  #: columns up to which it serves these, too
#: Key tiles of all heads, for each multiprocessor, from which on: with fewer the last tiles, which are the longest under a
#: causal mask, cost more than the split kernels do.
LEAST_ROUNDS = 4
#: Heads of a band, at most. Their tiles are given out in turn, so a tile of the same head comes as many tiles later.
MOST_HEADS = 32
#: Share of L2 that a band's Q, dO and sums of dQ may take. At head dim 64 and 8192 tokens 8 heads (0.53) took 0.64 of the time
#: of 32 (2.1); at head dim 128 and 2048 tokens 8 (0.27) 0.78 of that of 32 (1.07): benchmarks/calls/turns.json. Twice or half
#: as many heads as this gives took 0.98 to 1.2 of the time (turns_2.json).
L2_SHARE = 0.7


def covers(variant: Variant) -> bool:
    """Whether a fused kernel has such a form."""
    return variant.space is bwd_fused.SPACE


def band(problem: Problem, columns: int, gpu: Gpu) -> int:
    """Key heads of a band: the power of two, up to MOST_HEADS, whose rows L2 holds. Of a row it is two times 2 bytes a column,
    Q and dO, and 4 of the sums. Tiles of a head follow each other through its rows; those that start later find them there."""
    head = 8 * columns * problem.group * max(1, problem.seqlen_q)
    held = min(MOST_HEADS, int(gpu.l2_bytes * L2_SHARE) // head)
    return 1 << max(0, held.bit_length() - 1)


def config_of(problem: Problem, config: Config, gpu: Gpu) -> Config:
    """A row's config in that form."""
    return {**_in_order(problem, config), "HEADS_PER_WAVE": band(problem, _columns(problem, config), gpu)}


def _columns(problem: Problem, config: Config) -> int:
    return bwd_fused.columns(problem.specialization, config)


def _in_order(problem: Problem, config: Config) -> Config:
    """In bands as the config has them, which is no matter of the binary."""
    wide = _columns(problem, config) > 64
    loop = {"BLOCK_M": 64 if wide else 128, "num_warps": 8 if wide else 4, "EXPONENTIALS_FIRST": False, "STAGES": 2}
    return {**config, **loop, **bwd_fused.TURNS, "IN_ORDER": True}


def forms(problem: Problem, free: Choice, arch: int) -> list[Config]:
    """In which form the fused kernel may serve deterministic calls, whatever their batch and heads; ``free``: its choice for
    others. Head dims in parts, and those of 32 columns, have none. Of a mask bounded on the left the first blocks of a tile
    would wait for the last ones of many tiles."""
    if not covers(free.variant) or _columns(problem, free.config) not in SERVES:
        return []
    if problem.is_empty or problem.extent.ragged or mask_named(problem.mask.name).left:
        return []
    if any(free.config.get(name) for name in ("IN_PARTS", "V_APART", "NARROW")):
        return []
    config = _in_order(problem, free.config)
    return [] if bwd_fused.SPACE.broken(config, problem.specialization, arch) else [config]


def instead_of(problem: Problem, free: Choice, gpu: Gpu) -> Choice | None:
    """What serves a deterministic call in place of ``free``; None: the split kernels do."""
    tiles = -(-problem.seqlen_k // (bwd_fused.GROUPS * bwd_fused.KEYS)) * problem.batch * problem.heads_kv
    if tiles < LEAST_ROUNDS * gpu.sm_count or not forms(problem, free, gpu.arch):
        return None
    wide = _columns(problem, free.config)
    if min(problem.seqlen_q, problem.seqlen_k) < SERVES[wide] or (problem.group > 1 and wide > GROUPED):
        return None
    config = config_of(problem, free.config, gpu)
    return replace(free.of_row, config=config)  # nothing to fall back to: all other forms sum in no order
