"""Tensors that TMA cannot address: copied first, where the copy is expected to take less time than the warp-specialised kernels
save. They are not fit for it where a base or a stride is no multiple of 16 bytes, or rows have a stride of 0.

The constants are fitted to 24 measured cases on an H200, docs/experiments/group-parts.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from fa2tune.gpus import Gpu
from fa2tune.launching.launch import addressing, strides_of
from fa2tune.launching.passes import empty_ordered
from fa2tune.spec.problem import BACKWARD, ITEMSIZE, Problem

#: By how much longer calls take by pointer, as a share of what ``busy_us`` says: in vectors of 16 bytes (only a row stride of 0
#: keeps TMA out), and element by element.
BY_VECTORS, BY_ELEMENTS = {"fwd": 0.5, BACKWARD: 0.7}, 6.0
#: Share of the peak rate that the warp-specialised kernels reach.
RATE = 0.65
#: Query rows of a tile.
TILE = 128
#: Share of the memory's bandwidth that a copy of such tensors reaches, and microseconds of its launch.
COPY_RATE, LAUNCH_US = 0.4, 4.0
#: Microseconds that the host takes for a pass without copies, and for each copy more: calls that end on the GPU before the
#: host has launched the next one are not made faster.
HOST_US, HOST_COPY_US = {"fwd": 13.0, BACKWARD: 80.0}, 8.0


def unaddressable(tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Names of the (batch, heads, seqlen, dim) tensors that no descriptor can address."""
    found = (name for name, one in tensors.items() if not addressing({name: one}, {name: strides_of(one)})[2])
    return tuple(found)


def _elements(problem: Problem, name: str) -> int:
    """Of q, k, v, o or do."""
    rows = (problem.heads_kv, problem.seqlen_k) if name in ("k", "v") else (problem.heads_q, problem.seqlen_q)
    return problem.batch * math.prod(rows) * (problem.head_dim if name in ("q", "k") else problem.head_dim_v)


def busy_us(problem: Problem, gpu: Gpu, pass_: str) -> float:
    """Microseconds of a pass: all multiprocessors share its work, but the longest tile is one's alone."""
    longest = min(1.0, TILE / problem.seqlen_q * min(2.0, problem.seqlen_k / max(1.0, problem.keys_seen)))
    at_once = min(float(gpu.sm_count), problem.batch * problem.heads_q / longest)
    return problem.flops(pass_) / (gpu.peak(problem.dtype, problem.precision) * 1e6 * RATE * at_once / gpu.sm_count)


def pays(problem: Problem, gpu: Gpu, pass_: str, names: Collection[str]) -> bool:
    """Whether copies of these tensors are expected to be worth it, where a warp-specialised kernel then serves. ``pass_``:
    "fwd" or "bwd"."""
    if problem.is_empty:
        return False
    elements = sum(_elements(problem, name) for name in names)
    longer = BY_VECTORS[pass_] if problem.aligned else BY_ELEMENTS
    copied = 2 * elements * ITEMSIZE[problem.dtype] / (gpu.hbm_gbs * 1e3 * COPY_RATE)
    busy = busy_us(problem, gpu, pass_)
    waits = (1 + longer) * busy > HOST_US[pass_] + len(names) * HOST_COPY_US
    return waits and longer * busy > copied + len(names) * LAUNCH_US


def addressable(problem: Problem) -> Problem:
    """As it is after the copies."""
    return replace(problem, aligned=True, tma=True)


Copy = Callable[[torch.Tensor], torch.Tensor]  #: of a tensor its copy


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialised, for a dense copy in the same memory order: (b, h, s, d) or (b, s, h, d)."""
    return empty_ordered(tensor, tensor.shape[3])


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """That copy."""
    return like(tensor).copy_(tensor)


class Copying:
    """A plan, called with tensors some of which are copied first: by their places among its arguments."""

    by_address = False

    def __init__(self, plan: Any, places: Mapping[int, Copy]) -> None:
        self.plan, self.places = plan, dict(places)
        #: what a recorded forward reads of its plan
        self.problem, self.softmax_scale = (getattr(plan, name, None) for name in ("problem", "softmax_scale"))

    def __call__(self, *tensors: torch.Tensor | None) -> Any:
        return self.plan(
            *(one if one is None or at not in self.places else self.places[at](one) for at, one in enumerate(tensors))
        )


def copying(plan: Any, arguments: tuple[str, ...], made: Mapping[str, Copy]) -> Any:
    """``plan``, whose arguments are called so; those that ``made`` names are copied first."""
    return Copying(plan, {arguments.index(name): copy for name, copy in made.items()}) if made else plan
