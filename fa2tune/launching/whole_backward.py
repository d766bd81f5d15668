"""The plan of a backward that kernels of their own make in place of a strategy's: what all kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from fa2tune.launching import group_parts, launch
from fa2tune.launching.cuda import Chain
from fa2tune.launching.group_parts import Bound
from fa2tune.launching.launch import InterpretedChain, Strides, TensorPlace, bind, chain, form, strides_of
from fa2tune.launching.passes import Fresh, empty_gradients, placed, without_memory
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant, Workspaces


def in_one_block(
    launches: Callable[[Problem, Config, Strides, int], Iterable[Bound]], spaces: Workspaces, problem: Problem,
    tensors: Mapping[str, torch.Tensor], softmax_scale: float, config: Config, device_index: int,
) -> tuple[Chain | InterpretedChain, list[torch.Tensor]]:  # fmt: skip
    """As ``WholePlan.bound``: ``launches`` of (problem, config, strides, architecture), in order, whose workspaces lie in one
    block of memory."""
    arch = launch.arch_of(device_index) if device_index >= 0 else 0
    strides = {name: strides_of(tensor) for name, tensor in tensors.items() if tensor.dim() == 4 or name == "dlse"}
    parts, size = placed(spaces, tensors["q"].dtype, 0)
    places: dict[str, TensorPlace] = {**{name: index for index, name in enumerate(tensors)}, **parts}
    made = []
    for one in launches(problem, config, strides, arch):
        memory = form(one.variant, one.problem.specialization, one.config).passed
        wanted = {name: one.renamed.get(tensor, tensor) for name, tensor in memory.items()}
        names = tuple(name for name, tensor in wanted.items() if tensor in places)
        shaped = {name: parts[new] for name, new in one.renamed.items()}
        launched = bind(
            one.variant, one.problem, one.config, one.strides, softmax_scale, names, device_index, {**parts, **shaped},
            one.scalars,
        )  # fmt: skip
        made.append((launched, [places[wanted[name]] for name in names]))
    block = [torch.empty(size, dtype=torch.uint8, device="meta")] if size else []
    return chain(made, device_index), block


#: Tensors of a kernel that are workspaces where there are parts, by the names of these.
_PARTS_OF = {name: group_parts.PARTS_OF[name] for name in ("dk", "dv")}


def parts_of_keys(problem: Problem, parts: int) -> Workspaces:
    """Memory for dK and dV of so many parts of a key head, which are rounded once more, as those of a split query group are."""
    if parts == 1:
        return {}
    ours = group_parts.split(problem, parts)
    return {own: (group_parts.sizes_of(ours, name), "") for name, own in _PARTS_OF.items()}


def launches_of(
    problem: Problem, kernels: Sequence[tuple[Variant, Config, Problem]], parts: int, given: Strides,
    scalars: Mapping[str, int] | None = None,
) -> Iterator[Bound]:  # fmt: skip
    """Launches of ``kernels``, of which the first makes dK and dV of so many parts of a key head. ``scalars``: more of them."""
    main, *behind = kernels
    known = {"heads_kv": problem.heads_kv, "parts": parts, **(scalars or {})}
    if parts == 1:
        yield Bound(*main, given, {}, known)
    else:
        ours = group_parts.split(problem, parts)
        dense = {name: group_parts.dense_strides(ours, name) for name in _PARTS_OF}
        yield Bound(*main, {**given, **dense}, _PARTS_OF, known)
    for one in behind:
        yield Bound(*one, given, {}, known)


class WholePlan(ABC):
    """do, dlse, q, k, v, o, lse -> (dq, dk, dv), as ``passes.BackwardPlan``."""

    order = ""

    def __init__(
        self, problem: Problem, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, o: torch.Tensor, softmax_scale: float, config: Config, lead: int = 0,
    ) -> None:  # fmt: skip
        """``lead``: as ``passes.BackwardPlan`` has it."""
        self.config, self.lead = config, lead
        dq, dk, dv = empty_gradients(*map(without_memory, (q, k, v)), lead=lead)
        lse = torch.empty(tuple(q.shape[:3]), device="meta")
        tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, "dq": dq[:, :, lead:], "dk": dk, "dv": dv}
        tensors |= {} if dlse is None else {"dlse": dlse}
        self.chain, block = self.bound(problem, tensors, softmax_scale, config, q.get_device())
        self.fresh = Fresh(q.device, dq, dk, dv, *block)

    @staticmethod
    @abstractmethod
    def bound(
        problem: Problem, tensors: Mapping[str, torch.Tensor], softmax_scale: float, config: Config, device_index: int
    ) -> tuple[Chain | InterpretedChain, list[torch.Tensor]]:
        """(What runs, called with the tensors and then with memory for workspaces, like that memory, none if there are none).
        ``tensors``: by name, of which shapes and strides count."""

    def __call__(
        self, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        dq, dk, dv, *block = self.fresh()
        tensors = (q, k, v, o, do, lse, dq[:, :, self.lead :] if self.lead else dq, dk, dv)
        self.chain((*tensors, *block) if dlse is None else (*tensors, dlse, *block))
        return dq, dk, dv
