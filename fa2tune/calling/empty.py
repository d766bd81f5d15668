"""Calls without a single (query, key) pair: nothing is launched."""

from __future__ import annotations

import torch

from fa2tune.launching.passes import empty_ordered, lse_of, lse_shape
from fa2tune.spec.problem import Problem


class NoKeys:
    """The forward without a single (query, key) pair: zeros, and -inf for lse; and its backward, all zero."""

    def __init__(self, problem: Problem, softmax_scale: float) -> None:
        self.mask, self.softmax_scale, self.score = problem.mask, softmax_scale, problem.score
        self.extent = problem.extent

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = q.new_zeros(lse_shape(q), dtype=torch.float32)
        lse_of(lse).fill_(float("-inf"))
        return empty_ordered(q, v.shape[3]).zero_(), lse


def is_empty(problem: Problem) -> bool:
    return 0 in (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
