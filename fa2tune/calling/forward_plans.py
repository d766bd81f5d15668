"""The plan of a forward by its config: the tuned kernel, or keys split among programs where that is expected to be faster."""

from __future__ import annotations

import torch

from fa2tune.calling import split_schedule
from fa2tune.calling.choosing import log_once
from fa2tune.calling.refusals import is_refusal
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import SplitPlan
from fa2tune.launching.passes import ForwardPlan
from fa2tune.spec.problem import Problem


def forward_plan(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, choice: Choice, gpu: Gpu,
) -> ForwardPlan | SplitPlan:  # fmt: skip
    """``choice``: of the tuned kernel that serves. Where the kernel that splits keys does not compile or load, the tuned one
    serves, and the log says so."""
    split = split_schedule.config_of(problem, choice.config, gpu)
    if split is not None:
        try:
            return SplitPlan(problem, q, k, v, softmax_scale, split)
        except Exception as error:
            if not is_refusal(error):
                raise
            log_once(f"the first choice for fwd failed on {gpu.name} ({error}); next: keys are not split")
    return ForwardPlan(problem, q, k, v, softmax_scale, choice)
