"""The fused Hopper backward with dQ summed in a fixed order, for deterministic calls: whether it serves, and in which form.
Arithmetic on the host.

The key tiles of a head add to a block of dQ in turns, the last keys first. A tile goes through its query blocks from its first
one on, so of tiles that start together each meets a block just behind the one above it, and waits for none. What is left to
wait for is how long a turn takes to be seen, where a band has few heads (docs/experiments/dense-backward.md).
"""

from __future__ import annotations

from dataclasses import replace

from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.maskfile import mask_named
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant

#: Whether it serves at all: not timed yet (benchmarks/dense_backwards.py --forms turns).
SERVES = False
#: Key tiles of all heads, for each multiprocessor, from which on: with fewer the last tiles, which are the longest under a
#: causal mask, cost more than the split kernels do.
LEAST_ROUNDS = 4
#: Heads of a band. Their tiles are given out in turn, so a tile of the same head comes as many tiles later.
BAND = 32


def covers(variant: Variant) -> bool:
    """Whether a fused kernel has such a form."""
    return variant.space is bwd_fused.SPACE


def config_of(problem: Problem, config: Config) -> Config:
    """A row's config in that form."""
    wide = bwd_fused.columns(problem.specialization, config) > 64
    loop = {"BLOCK_M": 64 if wide else 128, "num_warps": 8 if wide else 4, "EXPONENTIALS_FIRST": False, "STAGES": 2}
    return {**config, **loop, **bwd_fused.TURNS, "IN_ORDER": True, "HEADS_PER_WAVE": BAND}


def instead_of(problem: Problem, free: Choice, gpu: Gpu) -> Choice | None:
    """What serves a deterministic call in place of ``free``, the choice of the fused kernel that serves others; None: the split
    kernels do. Head dims in parts, and those of 32 columns, have no such form. Of a mask bounded on the left the first blocks
    of a tile would wait for the last ones of many tiles."""
    if not SERVES or problem.is_empty or problem.extent.ragged or mask_named(problem.mask.name).left:
        return None
    if any(free.config.get(name) for name in ("IN_PARTS", "V_APART", "NARROW")):
        return None
    tiles = -(-problem.seqlen_k // (bwd_fused.GROUPS * bwd_fused.KEYS)) * problem.batch * problem.heads_kv
    config = config_of(problem, free.config)
    if tiles < LEAST_ROUNDS * gpu.sm_count or bwd_fused.SPACE.broken(config, problem.specialization, gpu.arch):
        return None
    return replace(free.of_row, config=config)  # nothing to fall back to: all other forms sum in no order
