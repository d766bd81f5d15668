"""A dense backward of few keys by one kernel, of the role bwd_one_tile, in place of a strategy's: neither delta nor sums of dQ
lie in memory.

Where the query blocks of a key head are split into parts, one of the role bwd_gather adds up what they make of dK and
dV, in a fixed order. Which calls, and how many parts: ``calling/schedules/one_tile_schedule.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType

import torch

from fa2tune.compiling.registry import space_file
from fa2tune.compiling.support import companion, companion_most, companion_path
from fa2tune.launching import group_parts
from fa2tune.launching.cuda import Chain
from fa2tune.launching.group_parts import Bound
from fa2tune.launching.launch import InterpretedChain, Strides
from fa2tune.launching.whole_backward import WholePlan, in_one_block, launches_of, parts_of_keys
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.roles import BWD_GATHER, BWD_ONE_TILE
from fa2tune.spec.variant import Variant, Workspaces


def able(problem: Problem, arch: int) -> bool:
    """Whether the kernel can compute such calls of few keys, and this Triton it."""
    return problem.tma and companion_path(BWD_ONE_TILE, problem.specialization, arch) is not None


def space_of(problem: Problem, arch: int) -> ModuleType:
    """The file of the kernel's search space. ValueError: none can."""
    return space_file(companion(BWD_ONE_TILE, problem.specialization, arch).name)


def can(problem: Problem, arch: int) -> bool:
    """The same of a call."""
    most = companion_most(BWD_ONE_TILE, problem.specialization, arch, "BLOCK_N") if problem.tma else 0
    return 1 <= problem.seqlen_k <= most


def most_parts(problem: Problem, arch: int) -> int:
    """That queries may be split into; 1: no kernel adds up more. ValueError: none makes one."""
    summed = group_parts.can(problem, arch, [BWD_GATHER])
    return max(space_of(problem, arch).SPACE.dimensions["PARTS"]) if summed else 1


def kernels(problem: Problem, config: Config, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What runs for a config, in order, each with its config and a problem whose specialization it is compiled for: one binary
    of the second serves all masks."""
    found = [(companion(BWD_ONE_TILE, problem.specialization, arch), config, problem)]
    return found if config["PARTS"] == 1 else [*found, group_parts.gather(problem, arch)]


def workspaces(problem: Problem, config: Config) -> Workspaces:
    """Memory for the parts' dK and dV."""
    return parts_of_keys(problem, config["PARTS"])


def launches(problem: Problem, config: Config, given: Strides, arch: int) -> Iterator[Bound]:
    """In order."""
    return launches_of(problem, kernels(problem, config, arch), config["PARTS"], given)


def bound(
    problem: Problem, tensors: Mapping[str, torch.Tensor], softmax_scale: float, config: Config, device_index: int
) -> tuple[Chain | InterpretedChain, list[torch.Tensor]]:
    """As ``WholePlan.bound``, with memory for the parts."""
    return in_one_block(launches, workspaces(problem, config), problem, tensors, softmax_scale, config, device_index)


class OneTilePlan(WholePlan):
    """Needs 1 to BLOCK_N keys."""

    bound = staticmethod(bound)


def backward(
    do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    lse: torch.Tensor, problem: Problem, softmax_scale: float, config: Config,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """One backward with an explicit config; ``problem``: what the tensors pose (``passes.describe``)."""
    return OneTilePlan(problem, do, dlse, q, k, v, o, softmax_scale, config)(do, dlse, q, k, v, o, lse)
