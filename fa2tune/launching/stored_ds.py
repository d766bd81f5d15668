"""A dense backward of head dims above 128 with dS in memory, in place of a strategy's kernels: dK, dV and dS are made by
the kernel of the role bwd_stored_ds, and dQ of dS by the one after it. Delta is made before, of the whole call.

dS takes two bytes a pair of query and key, so a call may run in slices, of batch entries or of key heads of one: both kernels
of a slice, over views of the tensors, and then the next slice in the same memory. Results have the same bits on every run, in
however many slices. Where tiles of queries are few, their keys are split into DQ_SPLITS parts, and the role bwd_dq_combine adds
these up, in a fixed order. Which calls, and how many: ``calling/schedules/stored_ds_schedule.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from fa2tune.compiling.compiler import around
from fa2tune.compiling.registry import space_file
from fa2tune.compiling.support import companion, companion_most, companion_path
from fa2tune.launching import dq_parts, launch
from fa2tune.launching.cuda import Chain, Launch
from fa2tune.launching.launch import Strides, Workspace, bind, form, strides_of
from fa2tune.launching.passes import placed
from fa2tune.launching.whole_backward import WholePlan
from fa2tune.logs import warn_once
from fa2tune.spec.problem import ITEMSIZE, Config, Problem
from fa2tune.spec.roles import BWD_STORED_DS
from fa2tune.spec.variant import Variant, Workspaces

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  #: dq, dk, dv
#: Tensors that have query heads and those that have key heads.
_OF_QUERIES, _OF_KEYS = ("q", "o", "do", "dq"), ("k", "v", "dk", "dv")
_OF_ROWS = ("lse", "delta")  #: of query heads, float32, contiguous


class Slice(NamedTuple):
    """Of a call."""

    batch: int  #: first batch entry
    batches: int
    head: int  #: first key head
    heads: int

    def of(self, problem: Problem) -> Problem:
        return replace(
            problem, batch=self.batches, heads_q=self.heads * problem.group, heads_kv=self.heads
        )  # fmt: skip


def able(problem: Problem, arch: int) -> bool:
    """Whether the kernels can compute such calls, and this Triton them."""
    return problem.tma and companion_path(BWD_STORED_DS, problem.specialization, arch) is not None


def ds_shape(problem: Problem, arch: int) -> tuple[int, ...]:
    """Of dS, whole blocks, as the kernel that makes it has it. ValueError: none can."""
    shape: tuple[int, ...] = space_file(kernel(problem, arch).name).ds_shape(problem)
    return shape


def ds_bytes(problem: Problem, arch: int) -> int:
    return math.prod(ds_shape(problem, arch)) * ITEMSIZE[problem.dtype]


def most_slices(problem: Problem, arch: int) -> int:
    """That a call may run in; 0: no kernel computes it."""
    return companion_most(BWD_STORED_DS, problem.specialization, arch, "SLICES")


def fewest_slices(problem: Problem, most_bytes: int, arch: int) -> int:
    """Slices, each of whose dS takes so many bytes at most; 0: that of a single key head takes more."""
    held = most_bytes // ds_bytes(Slice(0, 1, 0, 1).of(problem), arch)  # key heads
    if held >= problem.heads_kv:
        return -(-problem.batch // (held // problem.heads_kv))
    return problem.batch * -(-problem.heads_kv // held) if held else 0


def slices(problem: Problem, count: int) -> list[Slice]:
    """So many, or fewer where batch entries or heads come out even: whole batch entries as long as there are enough."""
    if count <= problem.batch:
        each = -(-problem.batch // count)
        return [
            Slice(first, min(each, problem.batch - first), 0, problem.heads_kv)
            for first in range(0, problem.batch, each)
        ]
    each = -(-problem.heads_kv // -(-count // problem.batch))
    heads = [(first, min(each, problem.heads_kv - first)) for first in range(0, problem.heads_kv, each)]
    return [Slice(entry, 1, *some) for entry in range(problem.batch) for some in heads]


def most_splits(problem: Problem, config: Config, arch: int) -> int:
    """Parts that the keys of dQ may be split into: each has a block."""
    if config["SLICES"] > 1 or not dq_parts.can_combine(problem, arch):
        return 1
    most = companion_most(BWD_STORED_DS, problem.specialization, arch, "DQ_SPLITS")
    return min(most, -(-problem.seqlen_k // config["BLOCK_N"]))


def kernel(problem: Problem, arch: int) -> Variant:
    """What makes dK, dV and dS. ValueError: none can."""
    return companion(BWD_STORED_DS, problem.specialization, arch)


def kernels(problem: Problem, config: Config, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What runs for a config, each once, in order, with its config and a problem whose specialization it is compiled for."""
    main = kernel(problem, arch)
    before, after = around(main, problem.specialization, config, arch)
    found = [(*one, problem) for one in (*before, (main, config), *after)]
    if config["DQ_SPLITS"] > 1:
        combine, its_config, plain = dq_parts.combining(problem, arch)
        found.append((combine, {**its_config, "EARLY": True}, plain))
    return found


def workspaces(problem: Problem, config: Config, arch: int) -> Workspaces:
    """Memory for delta, for dS of the largest slice, which is the first, and for the sums of dQ's parts."""
    largest = slices(problem, config["SLICES"])[0].of(problem)
    rows = problem.batch, problem.heads_q, problem.seqlen_q
    return {
        "delta": (rows, "fp32"),
        "ds": (ds_shape(largest, arch), ""),
        **dq_parts.workspaces(problem, config["DQ_SPLITS"]),
    }


def _begins(problem: Problem, one: Slice, strides: Strides) -> dict[str, int]:
    """Tensor -> bytes behind its start, where a slice begins; what is not among them has its start."""
    found, item = {}, ITEMSIZE[problem.dtype]
    for names, head in ((_OF_QUERIES, one.head * problem.group), (_OF_KEYS, one.head)):
        for name in names:
            found[name] = item * (one.batch * strides[name][0] + head * strides[name][1])
    row = (one.batch * problem.heads_q + one.head * problem.group) * problem.seqlen_q
    return found | dict.fromkeys(_OF_ROWS, 4 * row)


def bound(
    problem: Problem, tensors: Mapping[str, torch.Tensor], softmax_scale: float, config: Config, device_index: int
) -> tuple[Chain, list[torch.Tensor]]:
    """As ``WholePlan.bound``. Slices of one size share the launches that they are bound to."""
    strides = {name: strides_of(tensor) for name, tensor in tensors.items() if tensor.dim() == 4 or name == "dlse"}
    arch = launch.arch_of(device_index)
    spaces, size = placed(workspaces(problem, config, arch), tensors["q"].dtype, 0)
    index = {name: nth for nth, name in enumerate(tensors)}
    #: (kernel, batch, heads) -> its launch, and the tensors that it takes
    known: dict[tuple[str, int, int], tuple[Launch, list[str]]] = {}
    made: list[tuple[Launch, list[tuple[int, int]]]] = []

    def add(variant: Variant, its_config: Config, posed: Problem, begins: Mapping[str, int]) -> None:
        key = variant.name, posed.batch, posed.heads_kv
        if key not in known:
            ours = {**spaces, "ds": Workspace(ds_shape(posed, arch), spaces["ds"].dtype, spaces["ds"].start)}
            memory = form(variant, posed.specialization, its_config).passed
            names = tuple(name for name, tensor in memory.items() if tensor in index or tensor in ours)
            launched = bind(variant, posed, its_config, strides, softmax_scale, names, device_index, ours, scalars)
            assert isinstance(launched, Launch)  # no interpreter runs these kernels
            known[key] = launched, [memory[name] for name in names]
        launched, wanted = known[key]
        places = ((index[name], 0) if name in index else (-1, spaces[name].start) for name in wanted)
        begun = (begins.get(name, 0) for name in wanted)
        made.append((launched, [(which, start + more) for (which, start), more in zip(places, begun, strict=True)]))

    scalars = {"SPLITS": config["DQ_SPLITS"]}
    made_by = kernels(problem, config, arch)
    first = next(nth for nth, (variant, *_) in enumerate(made_by) if variant is kernel(problem, arch))
    before, (main, dq), behind = made_by[:first], made_by[first : first + 2], made_by[first + 2 :]
    for one in before:
        add(*one, {})
    for some in slices(problem, config["SLICES"]):
        begins = _begins(problem, some, strides)
        for variant, its_config, _ in (main, dq):
            add(variant, its_config, some.of(problem), begins)
    for one in behind:
        add(*one, {})
    return Chain(made, device_index), [torch.empty(size, dtype=torch.uint8, device="meta")]


class StoredDsPlan(WholePlan):
    """Needs head dims above 128, and memory for dS of a slice. Where that is not there, ``without`` makes the plan that serves
    from then on: (do, dlse, q, k, v, o) -> a plan. In a CUDA graph's capture, and without it, running out of memory is an
    error, as ever."""

    bound = staticmethod(bound)
    without: Callable[..., Callable[..., Gradients]] | None = None
    instead: Callable[..., Gradients] | None = None

    def __call__(
        self, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, lse: torch.Tensor,
    ) -> Gradients:  # fmt: skip
        if self.instead is None:
            try:
                return super().__call__(do, dlse, q, k, v, o, lse)
            except torch.OutOfMemoryError:
                if self.without is None or torch.cuda.is_current_stream_capturing():
                    raise
            warn_once("no memory for dS of a backward: split kernels serve such calls, with less memory and speed")
            self.instead = self.without(
                do, dlse, q, k, v, o
            )  # behind the error, which holds what was allocated before it
        return self.instead(do, dlse, q, k, v, o, lse)
