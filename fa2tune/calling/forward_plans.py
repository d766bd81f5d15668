"""The plan of a forward by its config: the tuned kernel, or keys split among programs where that is expected to be faster."""

from __future__ import annotations

import torch

from fa2tune.calling import split_schedule
from fa2tune.calling.choosing import log_once
from fa2tune.calling.refusals import is_refusal
from fa2tune.compiling.choice import Choice
from fa2tune.compiling.compiler import HostTrouble, NoTritonError, binary_config
from fa2tune.compiling.registry import variant_named
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import SPLIT_KERNEL, SplitPlan
from fa2tune.launching.passes import ForwardPlan
from fa2tune.spec.problem import Config, Problem

#: Binaries that did not compile or load, which are not tried again for another length.
_REFUSED = set[tuple[object, ...]]()


def forward_plan(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, choice: Choice, gpu: Gpu,
    may_split: bool = True,
) -> ForwardPlan | SplitPlan:  # fmt: skip
    """``choice``: of the tuned kernel that serves. Where the kernel that splits keys does not compile or load, or there is
    nothing to compile it with, the tuned one serves, and the log says so."""
    split = split_schedule.config_of(problem, choice.config, gpu) if may_split else None
    if split is not None and (binary := _binary(problem, split, gpu)) not in _REFUSED:
        try:
            return SplitPlan(problem, q, k, v, softmax_scale, split)
        except Exception as error:
            if not is_refusal(error) and not isinstance(error, NoTritonError | HostTrouble | OSError):
                raise
            _REFUSED.add(binary)
            log_once(f"the first choice for fwd failed on {gpu.name} ({error}); next: keys are not split")
    return ForwardPlan(problem, q, k, v, softmax_scale, choice)


def _binary(problem: Problem, split: Config, gpu: Gpu) -> tuple[object, ...]:
    named = binary_config(variant_named(SPLIT_KERNEL), split)
    return problem.specialization, gpu.name, *sorted(named.items())
