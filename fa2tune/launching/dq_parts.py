"""dQ of a split Hopper backward with its keys in parts, each a program's: more programs where there are few queries.

Each part's sums go to a workspace, as float32 (kernels/sm90/bwd_dq_split.py), and are added up in a fixed order after
(kernels/portable/bwd_dq_combine.py). How many parts: ``calling/schedules/split_backward_schedule.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fa2tune.compiling.registry import computes, variant_named
from fa2tune.launching.group_parts import Bound
from fa2tune.launching.launch import Strides
from fa2tune.launching.overlapped import DQ
from fa2tune.search_spaces.sm90 import bwd_dq, bwd_dq_split
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant, Workspaces

SPLIT_KERNEL, COMBINE_KERNEL = "sm90/bwd_dq_split", "portable/bwd_dq_combine"


def can(problem: Problem, tuned: Variant, arch: int = 90) -> bool:
    """Whether keys can be split of a call whose dQ ``tuned`` makes."""
    spec = problem.specialization
    if tuned.space is not bwd_dq.SPACE or not problem.tma or not bwd_dq_split.fits(spec, arch):
        return False
    return computes(SPLIT_KERNEL, spec)


def checked(problem: Problem, tuned: Variant, parts: int) -> int:
    """ValueError: keys cannot be split like that."""
    if parts == 1:  # the kernel for more need not be imported
        return parts
    most = bwd_dq_split.MOST_SPLITS if can(problem, tuned) else 1
    if not 1 <= parts <= most:
        raise ValueError(f"parts: got {parts} for {DQ}, allowed are 1 to {most}")
    return parts


def kernels(problem: Problem, parts: int, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What runs, in order, each with its config and a problem whose specialization it is compiled for: one binary of the second
    serves all masks."""
    split, combine = variant_named(SPLIT_KERNEL), variant_named(COMBINE_KERNEL)
    plain = replace(problem, mask=FULL)
    return [
        (split, bwd_dq_split.config_of(problem.specialization, parts), problem),
        (combine, combine.space.default(plain.specialization, arch), plain),
    ]


def workspaces(problem: Problem, parts: int) -> Workspaces:
    """Memory for the parts' sums."""
    sizes = parts, problem.batch * problem.heads_q, problem.seqlen_q, problem.head_dim
    return {"dq_parts": (sizes, "fp32")} if parts > 1 else {}


def launches(problem: Problem, parts: int, given: Strides, arch: int) -> Iterator[Bound]:
    """In place of dQ's kernel."""
    for variant, config, posed in kernels(problem, parts, arch):
        yield Bound(variant, config, posed, given, {}, {"SPLITS": parts})
