"""The plan of a backward that kernels of their own make in place of a strategy's: what both kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from fa2tune.launching.cuda import Chain
from fa2tune.launching.launch import InterpretedChain
from fa2tune.launching.passes import Fresh, empty_ordered, without_memory
from fa2tune.spec.problem import Config, Problem


class WholePlan(ABC):
    """do, dlse, q, k, v, o, lse -> (dq, dk, dv), as ``passes.BackwardPlan``."""

    order = ""

    def __init__(
        self, problem: Problem, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, o: torch.Tensor, softmax_scale: float, config: Config,
    ) -> None:  # fmt: skip
        self.config = config
        dq, dk, dv = (empty_ordered(without_memory(t), t.shape[3]) for t in (q, k, v))
        lse = torch.empty(tuple(q.shape[:3]), device="meta")
        tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
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
        tensors = (q, k, v, o, do, lse, dq, dk, dv)
        self.chain((*tensors, *block) if dlse is None else (*tensors, dlse, *block))
        return dq, dk, dv
