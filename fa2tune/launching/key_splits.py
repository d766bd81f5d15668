"""A forward whose keys are split among programs: for calls of few queries, or of few tiles, or of one long sequence among
packed ones.

Each part's sums go to a workspace and are put together after (role fwd_combine); of one part there is nothing to put together.
Tiles of a kernel of the role fwd_split_grouped have the queries of all heads of a key head as rows, those of fwd_split queries
of one head. Which of the two, and how many parts: ``calling/schedules/key_splits_schedule.py``; of packed sequences, for which
the latter alone serves, ``packed_splits_schedule.py``.

Forwards by the role fwd_shares, some of whose tiles are in parts, and by fwd_grouped, fwd_one_tile, fwd_multistage and
fwd_80_keys, whose keys are not split, are planned here as well: they, too, run in place of the tuned kernel
(``calling/schedules/in_place_schedule.py``), fwd_grouped of packed sequences, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType

import torch

from fa2tune.compiling.compiler import around
from fa2tune.compiling.registry import role_kernel, space_file, variant_named
from fa2tune.compiling.support import companion, companion_most, companion_space
from fa2tune.launching import launch
from fa2tune.launching.cuda import Chain
from fa2tune.launching.launch import InterpretedChain, TensorPlace, Workspace, bind, chain, form, strides_of
from fa2tune.launching.passes import ALIGNMENT, ForwardPlan, ordered_before, placed
from fa2tune.spec.extent import WHOLE
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.roles import (
    FWD_80_KEYS,
    FWD_COMBINE,
    FWD_GROUPED,
    FWD_MULTISTAGE,
    FWD_ONE_TILE,
    FWD_SHARES,
    FWD_SPLIT,
    FWD_SPLIT_GROUPED,
)
from fa2tune.spec.score import NONE
from fa2tune.spec.variant import Variant, implementation_of

#: By what only configs of this role name.
_ROLE_BY_NAME = {
    "TAIL": FWD_80_KEYS, "SHARES": FWD_SHARES, "MEMBERS": FWD_GROUPED, "KEYS": FWD_ONE_TILE, "STAGE_KEYS": FWD_MULTISTAGE,
}  # fmt: skip


def is_grouped(config: Config) -> bool:
    """Whether a config is of the kernel whose tiles have the query heads of a key head as rows."""
    return "MEMBERS" in config


def parts_of(config: Config) -> int:
    """Into how many parts keys are split."""
    return int(config.get("SPLITS", 1))


def is_in_shares(config: Config) -> bool:
    """Whether a config is of the kernel whose programs have equal shares of all key blocks."""
    return "SHARES" in config


def is_one_tile(config: Config) -> bool:
    """Whether a config is of the kernel whose tiles have all keys of a key head."""
    return "KEYS" in config


def is_multistage(config: Config) -> bool:
    """Whether a config is of the kernel whose warps load for themselves."""
    return "STAGE_KEYS" in config


def has_longer_blocks(config: Config) -> bool:
    """Whether a config is of the kernel whose key blocks have 64 keys and a tail."""
    return "TAIL" in config


MAIN_KEYS = 64  #: of its blocks, as role fwd_80_keys has them


def keys_of_block(config: Config) -> int:
    """Of such a kernel."""
    return MAIN_KEYS + int(config["TAIL"])


@cache  # asked of every config that is estimated
def _kernel(role: str | None, implementation: str) -> tuple[str, str]:
    """(Role, path of the kernel with that role) that configs are of; ``role``: None for both that split keys. ValueError: they
    are of none, or of several."""
    roles = (FWD_SPLIT_GROUPED, FWD_SPLIT) if role is None else (role,)
    found = [(role, path) for role in roles if (path := role_kernel(role, implementation)) is not None]
    if not found:
        raise ValueError(
            f"config: got {implementation!r:.40}, which no kernel that runs in place of the tuned forward is"
        )
    if len(found) > 1:
        raise ValueError(f"{found[0][1]} and {found[1][1]} are both {implementation}")
    return found[0]


def role_in_place(config: Config) -> str | None:
    """Of a config in place of the tuned forward's; None: of one that splits keys, whichever of both."""
    for name, role in _ROLE_BY_NAME.items():
        if name in config:
            return role
    return None


def role_of(config: Config) -> str:
    """Of the kernel that a config is of: entries tell the role, with the implementation."""
    return _kernel(role_in_place(config), implementation_of(config))[0]


def splitting(config: Config) -> Variant:
    """The kernel that a config is of."""
    return variant_named(_kernel(role_in_place(config), implementation_of(config))[1])


def sums(problem: Problem, splits: int, start: int = 0) -> list[Workspace]:
    """Where what is summed over each part lies, from ``start`` on: O, relative to a maximum, and maxima and sums of P."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    parts = Workspace((splits, rows, problem.head_dim_v), torch.float32, start)
    return [parts, Workspace((2, splits, rows), torch.float32, -(-parts.end // ALIGNMENT) * ALIGNMENT)]


def plain(problem: Problem) -> Problem:
    """As the kernel that puts parts together is compiled for: one binary serves all masks and score terms, and packed
    sequences, whose rows are those of one batch entry."""
    return replace(problem, mask=FULL, score=NONE, negate=False, precision="ieee", aligned=True, extent=WHOLE)


def kernels(problem: Problem, config: Config, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What runs for a config of a kernel that splits keys, or has equal shares of them, or tiles of several heads or with all
    keys, in order, each with its config and a problem whose specialization it is compiled for."""
    variant = splitting(config)
    before, after = around(variant, problem.specialization, config, arch)
    found = [(*one, problem) for one in [*before, (variant, config), *after]]
    if parts_of(config) > 1:
        posed, parts = plain(problem), parts_of(config)
        combine = companion(FWD_COMBINE, posed.specialization, arch)
        found.append((combine, space_file(combine.name).config_of(arch, parts), posed))
    return found


def all_kernels(problem: Problem, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """Everything that a call of any number of queries may run: heads and lengths decide."""
    spec: Specialization = problem.specialization
    configs = []
    if (space := space_of(problem, arch, FWD_SPLIT_GROUPED)) is not None:
        most = most_parts(problem, space, arch)
        sizes = ((rows, splits) for rows in space.tiles(spec, arch) for splits in (1, 2, most) if splits <= most)
        configs += [space.config_of(spec, arch, problem.tma, *size) for size in sizes]
    if (space := space_of(problem, arch, FWD_SPLIT)) is not None and most_parts(problem, space, arch) > 1:
        configs += [space.config_of(spec, rows, 2) for rows in space.tiles(spec, arch)]
    found = [one for config in configs for one in kernels(problem, config, arch)]
    if any(parts_of(config) > 1 for config in configs):
        found += _combining(problem, arch)
    return found


def _combining(problem: Problem, arch: int) -> Iterator[tuple[Variant, Config, Problem]]:
    """What puts any number of parts together: a binary for each number of them that a program has at once."""
    posed = plain(problem)
    combine = companion(FWD_COMBINE, posed.specialization, arch)
    space, seen = space_file(combine.name), set[tuple[int, int]]()
    for parts in range(2, max(space.SPACE.dimensions["SPLITS"]) + 1):
        config = space.config_of(arch, parts)
        if (tile := (config["BLOCK_R"], config["BLOCK_S"])) not in seen:
            seen.add(tile)
            yield combine, config, posed


def space_of(problem: Problem, arch: int, role: str) -> ModuleType | None:
    """The file of the search space of the kernel with a role that computes this call; None: none does. All but those of the
    role fwd_split_grouped read Q, K and V by TMA."""
    if (role != FWD_SPLIT_GROUPED and not problem.tma) or (role == FWD_GROUPED and problem.group < 2):
        return None
    return companion_space(role, problem.specialization, arch)


def most_parts(problem: Problem, space: ModuleType, arch: int) -> int:
    """Into how many parts a kernel with this file of its search space may split keys: as many as can be put together; 1:
    none."""
    combined = companion_most(FWD_COMBINE, plain(problem).specialization, arch, "SPLITS")
    return max(1, min(combined, max(space.SPACE.dimensions["SPLITS"])))


def split_tiles(problem: Problem, arch: int) -> tuple[int, ...]:
    """Rows that a tile of the role fwd_split may have; none, where no kernel computes this call."""
    space = space_of(problem, arch, FWD_SPLIT)
    return () if space is None else space.tiles(problem.specialization, arch)


def grouped_tiles(problem: Problem, arch: int) -> tuple[tuple[int, int], ...]:
    """(rows, keys of a block) that a tile of the role fwd_grouped may have; none, where no kernel computes this call."""
    space = space_of(problem, arch, FWD_GROUPED)
    return () if space is None else space.tiles(problem.specialization, arch)


def bound(
    problem: Problem, tensors: Mapping[str, torch.Tensor], softmax_scale: float, config: Config, device_index: int
) -> tuple[Chain | InterpretedChain, list[torch.Tensor]]:
    """(What runs, called with the tensors and then with memory for the order of packed tiles and for parts; like that memory,
    none if there is neither). ``tensors``: q, k, v, o, lse, and of packed sequences where they start, by name, of which shapes
    and strides count."""
    if is_one_tile(config) and config["KEYS"] < problem.seqlen_k:
        raise ValueError(f"config: got KEYS {config['KEYS']} for {problem.seqlen_k} keys, a tile must have all of them")
    if is_in_shares(config) and (refused := space_file(splitting(config).name).refused(problem, config)):
        raise ValueError(refused)
    arch = launch.arch_of(device_index) if device_index >= 0 else 0
    strides = {name: strides_of(tensor) for name, tensor in tensors.items() if tensor.dim() == 4 and name != "lse"}
    given = {name: index for index, name in enumerate(tensors)}
    todo, queue = ordered_before(problem, kernels(problem, config, arch), given)
    places: dict[str, TensorPlace] = {**given, **queue}
    block: list[torch.Tensor] = []
    asked = splitting(config).workspaces(problem, config)
    workspaces, size = placed(asked, tensors["q"].dtype, 0, queue)
    places |= workspaces
    if parts_of(config) > 1:
        places["o_parts"], places["stats"] = made = sums(problem, parts_of(config), size)
        size = made[-1].end
    if size:
        block = [torch.empty(size, dtype=torch.uint8, device="meta")]
    scalars = {"heads_kv": problem.heads_kv}
    launches = []
    for variant, its_config, posed in todo:
        memory = form(variant, posed.specialization, its_config).passed
        names = tuple(name for name, tensor in memory.items() if tensor in places)
        own = {**scalars, **variant.scalars(posed, its_config, False)}
        one = bind(variant, posed, its_config, strides, softmax_scale, names, device_index, workspaces, own)
        launches.append((one, [places[memory[name]] for name in names]))
    return chain(launches, device_index), block


class SplitPlan(ForwardPlan):
    """As ``passes.ForwardPlan``, of a config of what runs in place of the tuned kernel."""

    bound = staticmethod(bound)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, softmax_scale: float, config: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward with an explicit config; ``problem``: what the tensors pose (``passes.describe``)."""
    return SplitPlan(problem, q, k, v, softmax_scale, config)(q, k, v)
