"""dQ of a split Hopper backward with its keys in parts, each a program's: more programs where there are few queries.

Each part's sums go to a workspace, as float32 (role bwd_dq_split), and are added up in a fixed order after (role
bwd_dq_combine). How many parts: ``calling/schedules/split_backward_schedule.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fa2tune.compiling.registry import space_file
from fa2tune.compiling.support import companion, companion_most, companion_path
from fa2tune.launching.group_parts import Bound
from fa2tune.launching.launch import Strides
from fa2tune.launching.overlapped import DQ
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.roles import BWD_DQ_COMBINE, BWD_DQ_SPLIT
from fa2tune.spec.variant import WARP_SPECIALIZED, Variant, Workspaces


def can(problem: Problem, tuned: Variant, arch: int) -> bool:
    """Whether keys can be split of a call whose dQ ``tuned`` makes."""
    return most_parts(problem, tuned, arch) > 1


def most_parts(problem: Problem, tuned: Variant, arch: int) -> int:
    """Into how many parts at most; 1: into none."""
    if WARP_SPECIALIZED not in tuned.implementations or not problem.tma:
        return 1
    if not can_combine(problem, arch):
        return 1
    return max(1, companion_most(BWD_DQ_SPLIT, problem.specialization, arch, "SPLITS"))


def checked(problem: Problem, tuned: Variant, parts: int, arch: int) -> int:
    """ValueError: keys cannot be split like that."""
    if parts == 1:  # the kernel for more need not be imported
        return parts
    most = most_parts(problem, tuned, arch)
    if not 1 <= parts <= most:
        raise ValueError(f"parts: got {parts} for {DQ}, allowed are 1 to {most}")
    return parts


def splitting(problem: Problem, arch: int) -> Variant:
    """The kernel with keys in parts. ValueError: none computes this call."""
    return companion(BWD_DQ_SPLIT, problem.specialization, arch)


def combining(problem: Problem, arch: int) -> tuple[Variant, Config, Problem]:
    """What adds the parts up, with its config and a problem whose specialization it is compiled for: one binary serves all
    masks."""
    plain = replace(problem, mask=FULL)
    combine = companion(BWD_DQ_COMBINE, plain.specialization, arch)
    return combine, combine.space.default(plain.specialization, arch), plain


def can_combine(problem: Problem, arch: int) -> bool:
    """Whether that is there."""
    return companion_path(BWD_DQ_COMBINE, replace(problem, mask=FULL).specialization, arch) is not None


def kernels(problem: Problem, parts: int, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What runs, in order, each with its config and a problem whose specialization it is compiled for."""
    split = splitting(problem, arch)
    return [(split, space_file(split.name).config_of(problem.specialization, parts), problem), combining(problem, arch)]


def workspaces(problem: Problem, parts: int) -> Workspaces:
    """Memory for the parts' sums."""
    sizes = parts, problem.batch * problem.heads_q, problem.seqlen_q, problem.head_dim
    return {"dq_parts": (sizes, "fp32")} if parts > 1 else {}


def launches(problem: Problem, parts: int, given: Strides, arch: int) -> Iterator[Bound]:
    """In place of dQ's kernel."""
    for variant, config, posed in kernels(problem, parts, arch):
        yield Bound(variant, config, posed, given, {}, {"SPLITS": parts})
