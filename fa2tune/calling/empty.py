"""Calls without a single (query, key) pair: nothing is launched."""

from __future__ import annotations

from typing import Any

import torch

from fa2tune.launching.passes import empty_gradients, empty_ordered, in_one_batch, lse_of, lse_shape, without_batch
from fa2tune.spec.problem import Problem


class NoKeys:
    """The forward without a single (query, key) pair: zeros, and -inf for lse."""

    by_address = False

    def __init__(self, problem: Problem, softmax_scale: float) -> None:
        self.problem, self.softmax_scale = problem, softmax_scale

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ragged = self.problem.extent.ragged
        if ragged and q.dim() == 3:  # as passes.ForwardPlan has it
            q = in_one_batch(q)
        lse = q.new_zeros(lse_shape(q), dtype=torch.float32)
        lse_of(lse).fill_(float("-inf"))
        o = empty_ordered(q, v.shape[-1]).zero_()
        return without_batch(o) if ragged else o, lse


class Zeros:
    """The backward without a single pair."""

    def __call__(
        self,
        do: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if q.dim() == 3:  # packed: gradients have one batch entry, as those of other packed calls
            q, k, v = (in_one_batch(tensor) for tensor in (q, k, v))
        dq, dk, dv = (gradient.zero_() for gradient in empty_gradients(q, k, v))
        return dq, dk, dv
