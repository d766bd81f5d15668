"""Queries that see no key. Causal masks and windows are aligned at the bottom right, so with more queries than keys the first
ones see none: their output and gradients are 0, their lse is -inf. Kernels compute them like others, a tile after the other.
Where it takes less time, they are filled in. Kernels get the queries behind them, and write into the whole tensor.

Estimated by constants that are fitted to times of an H200 (``benchmarks/filled_in.py``, docs/experiments/schedule.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fa2tune.calling.schedules.key_splits_schedule import MEASURED_ON
from fa2tune.gpus import Gpu
from fa2tune.launching.passes import lse_of, lse_shape
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import BACKWARD, ITEMSIZE, Problem

#: Rows of a tile; microseconds of one such tile, and of each column of its head dims, the mean of Q's and V's: a tile loads and
#: stores, and computes nothing that counts.
BLIND_TILE, TILE_US, COLUMN_US = 128, {"fwd": 0.6, BACKWARD: 1.6}, {"fwd": 0.022, BACKWARD: 0.034}
#: Share of the memory's bandwidth that fills reach.
RATE = 0.7
#: Launches that are added: fills of o and lse and a copy of lse; a fill of dq and a copy of lse. Microseconds of one.
LAUNCHES, LAUNCH_US = {"fwd": 3, BACKWARD: 2}, {"fwd": 1.65, BACKWARD: 1.0}
#: Bytes of an element that fills take at a time.
WORD = 16
#: What is saved must be more than what is added by so many microseconds: the host launches more.
MARGIN_US = 2.0


def count(problem: Problem) -> int:
    """How many queries of a head, the first ones, see no key."""
    right = 0 if problem.mask == CAUSAL else (problem.mask.window or (None, None))[1]
    if right is None or problem.extent.ragged:
        return 0
    return max(0, problem.seqlen_q - problem.seqlen_k - right)


def estimate(problem: Problem, gpu: Gpu, pass_: str) -> tuple[float, float]:
    """Microseconds that filling them in saves, and that it adds. ``pass_``: "fwd" or "bwd"."""
    rows = count(problem) * problem.batch * problem.heads_q
    columns = (problem.head_dim + problem.head_dim_v) / 2
    computed = rows / BLIND_TILE / gpu.sm_count * (TILE_US[pass_] + columns * COLUMN_US[pass_])
    dim = problem.head_dim_v if pass_ == "fwd" else problem.head_dim
    filled = rows * dim * ITEMSIZE[problem.dtype] / (gpu.hbm_gbs * 1e3 * RATE)
    return computed, filled + LAUNCHES[pass_] * LAUNCH_US[pass_]


def filled_in(problem: Problem, gpu: Gpu, pass_: str) -> int:
    """How many of them are to be filled in instead of computed; 0: none. ``pass_``: "fwd" or "bwd"."""
    rows = count(problem)
    if not rows or problem.is_empty or gpu.arch not in MEASURED_ON:
        return 0
    if problem.wide:  # o and dq have strides of the whole; the problem behind it may not know that these need 64 bits
        return 0
    saved, added = estimate(problem, gpu, pass_)
    return rows if saved > added + MARGIN_US else 0


def behind(problem: Problem, rows: int) -> Problem:
    """The problem of the queries behind the first ``rows``."""
    return replace(problem, seqlen_q=problem.seqlen_q - rows) if rows else problem


def in_words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in elements of 16 bytes, if its rows allow it. Fills of tensors with gaps go element by element: of 2
    bytes at 1.5 to 1.8 TB/s on an H200."""
    places = (tensor.storage_offset(), *tensor.stride()[:-1], tensor.shape[-1])
    if tensor.stride(-1) != 1 or any(place * tensor.element_size() % WORD for place in places):
        return tensor
    return tensor.view(torch.complex128)


class Forward:
    """The plan of a forward whose first ``rows`` queries are filled in. ``inner``: (q, k, v) of the others -> (o of all, whose
    first rows are not written, lse of the others)."""

    by_address = False

    def __init__(self, problem: Problem, rows: int, softmax_scale: float, inner: Callable[..., Any]) -> None:
        self.rows, self.inner = rows, inner
        self.problem, self.softmax_scale = problem, softmax_scale

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows
        lse = q.new_empty(lse_shape(q), dtype=torch.float32)
        if lse.dim() > q.dim() - 1:  # of float32 inputs there is a second plane: what rounding left out
            lse[..., :rows].zero_()
        lse_of(lse)[..., :rows].fill_(float("-inf"))
        o, lse[..., rows:] = self.inner(q[:, :, rows:], k, v)
        in_words(o)[:, :, :rows].zero_()
        return o, lse


class Backward:
    """The same of a backward. ``inner``: (do, dlse, q, k, v, o, lse) of the others -> (dq of all, dk, dv)."""

    def __init__(self, rows: int, inner: Callable[..., Any]) -> None:
        self.rows, self.inner = rows, inner

    def __call__(
        self, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        rows = self.rows
        behind_do, behind_q, behind_o = (tensor[:, :, rows:] for tensor in (do, q, o))
        behind_dlse = None if dlse is None else dlse[..., rows:]
        dq, dk, dv = self.inner(behind_do, behind_dlse, behind_q, k, v, behind_o, lse[..., rows:].contiguous())
        in_words(dq)[:, :, :rows].zero_()
        return dq, dk, dv
