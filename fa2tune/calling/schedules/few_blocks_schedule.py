"""In which order the fused Hopper backward's products run where key tiles see few query blocks: a rule, no GPU.

A row's order may compute the next block's scores, or the last block's dQ, beside this block's products. That takes longer at a
tile's start and end, which tuned workloads of many blocks hardly feel. (docs/experiments/dense-backward.md)"""

from __future__ import annotations

from dataclasses import replace

from fa2tune.calling.schedules import fused_schedule, group_parts_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching.passes import ACCUMULATES_DQ
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Config, Problem

#: (columns, BLOCK_M) -> blocks of a tile, on average, up to which the order "together" is faster, and whether with a mask, too.
#: Set by 47 calls (docs/experiments/dense-backward.md).
FEW_BLOCKS = {(128, 64): (12, True), (32, 128): (30, False)}


def form(config: Config) -> Config:
    """All products of a block before those of the next one; as it was raced, with vector reductions and tiles by a counter."""
    return {**config, **bwd_fused.PARTS_LOOP, **bwd_fused.PACKED, "num_warps": 8 if config["BLOCK_M"] == 64 else 4}


def _formed(problem: Problem, config: Config, arch: int) -> tuple[int, Config] | None:
    """(blocks up to which it is faster, the config in that order); None: it never is, or is that already."""
    kind = bwd_fused.columns(problem.specialization, config), config["BLOCK_M"]
    most, masked = FEW_BLOCKS.get(kind, (0, False))
    if not most or config["ORDER"] == "together" or not (masked or problem.mask == FULL):
        return None
    found = form(config)
    return (most, found) if bwd_fused.SPACE.broken(found, problem.specialization, arch) is None else None


def forms(problem: Problem, choice: Choice, arch: int) -> list[Config]:
    """Configs of other machine code that some dense call may have in place of a row's, or of another form of it."""
    if not fused_schedule.covers(choice.variant, problem):
        return []
    others = (choice.config, *fused_schedule.all_forms(problem, choice, arch))
    return [found[1] for config in others if (found := _formed(problem, config, arch)) is not None]


def in_step(problem: Problem, choice: Choice, gpu: Gpu) -> Choice:
    """``choice``, or that in the order "together"."""
    if problem.is_empty or not fused_schedule.covers(choice.variant, problem):
        return choice
    if (found := _formed(problem, choice.config, gpu.arch)) is None:
        return choice
    most, config = found
    group = problem.group // group_parts_schedule.parts_of(problem, ACCUMULATES_DQ, choice, gpu)
    met = fused_schedule.blocks_met(
        problem.seqlen_q, problem.seqlen_k, problem.mask, config["BLOCK_M"], fused_schedule.TILE
    )
    few = group * sum(met) <= most * len(met)
    return replace(choice, config=config, otherwise=choice.of_row.config) if few else choice
