"""A dense backward by one kernel whose programs have a tile of queries each and walk the keys, of the role bwd_query_tiles, in
place of a strategy's: neither delta nor dS lie in memory, and each is made once.

Where a key head has several tiles of queries, one of the role bwd_gather adds up what they make of dK and dV; where the keys
are split into parts, one of the role bwd_dq_combine adds up these parts' dQ. Both in a fixed order. Which calls, and how many
parts: ``calling/schedules/query_tiles_schedule.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType

import torch

from fa2tune.compiling.registry import space_file
from fa2tune.compiling.support import companion, companion_most, companion_path
from fa2tune.launching import dq_parts, group_parts
from fa2tune.launching.cuda import Chain
from fa2tune.launching.group_parts import Bound
from fa2tune.launching.launch import InterpretedChain, Strides
from fa2tune.launching.whole_backward import WholePlan, in_one_block, launches_of, parts_of_keys
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.roles import BWD_GATHER, BWD_QUERY_TILES
from fa2tune.spec.variant import Variant, Workspaces


def able(problem: Problem, arch: int) -> bool:
    """Whether the kernel can compute such calls, and this Triton it."""
    return problem.tma and companion_path(BWD_QUERY_TILES, problem.specialization, arch) is not None


def can(problem: Problem, config: Config, arch: int) -> bool:
    """Whether the kernels that run after it are there."""
    if config["SPLITS"] > 1 and not dq_parts.can_combine(problem, arch):
        return False
    return tiles(problem, config) == 1 or group_parts.can(problem, arch, [BWD_GATHER])


def space_of(problem: Problem, arch: int) -> ModuleType:
    """The file of the kernel's search space. ValueError: none can."""
    return space_file(companion(BWD_QUERY_TILES, problem.specialization, arch).name)


def most_splits(problem: Problem, config: Config, arch: int) -> int:
    """Parts that keys may be split into: each has a block."""
    most = companion_most(BWD_QUERY_TILES, problem.specialization, arch, "SPLITS")
    return min(most, -(-problem.seqlen_k // config["BLOCK_N"]))


def tiles(problem: Problem, config: Config) -> int:
    """Tiles of queries of a key head, over all of its query heads."""
    return -(-problem.seqlen_q // config["BLOCK_M"]) * problem.group


def kernels(problem: Problem, config: Config, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What runs for a config, in order, each with its config and a problem whose specialization it is compiled for: one binary
    of those behind the first serves all masks."""
    found = [(companion(BWD_QUERY_TILES, problem.specialization, arch), config, problem)]
    if config["SPLITS"] > 1:
        found.append(dq_parts.combining(problem, arch))
    if tiles(problem, config) > 1:
        found.append(group_parts.gather(problem, arch))
    main, *behind = found
    return [main, *((variant, {**its_config, "EARLY": True}, posed) for variant, its_config, posed in behind)]


def workspaces(problem: Problem, config: Config) -> Workspaces:
    """Memory for the parts' dQ, and for the tiles' dK and dV."""
    return {**dq_parts.workspaces(problem, config["SPLITS"]), **parts_of_keys(problem, tiles(problem, config))}


def launches(problem: Problem, config: Config, given: Strides, arch: int) -> Iterator[Bound]:
    """In order."""
    scalars = {"SPLITS": config["SPLITS"]}
    return launches_of(problem, kernels(problem, config, arch), tiles(problem, config), given, scalars)


def bound(
    problem: Problem, tensors: Mapping[str, torch.Tensor], softmax_scale: float, config: Config, device_index: int
) -> tuple[Chain | InterpretedChain, list[torch.Tensor]]:
    """As ``WholePlan.bound``."""
    return in_one_block(launches, workspaces(problem, config), problem, tensors, softmax_scale, config, device_index)


class QueryTilesPlan(WholePlan):
    """Needs at least one key."""

    bound = staticmethod(bound)
