"""The plan of a forward by its config: the tuned kernel, or what is expected to be faster in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fa2tune.calling import backward_plans, copies
from fa2tune.calling.refusals import cannot_be_had
from fa2tune.calling.schedules import in_place_schedule, packed_splits_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.compiling.compiler import binary_config
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import SplitPlan, role_in_place, splitting
from fa2tune.launching.passes import BackwardPlan, ForwardPlan
from fa2tune.launching.whole_backward import WholePlan
from fa2tune.logs import warn_once
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.roles import BWD_ONE_TILE, FWD_80_KEYS, FWD_GROUPED, FWD_MULTISTAGE, FWD_ONE_TILE, FWD_SHARES

#: How a forward is served whose keys are split among programs, for counting.
KEYS_SPLIT = "schedule model, keys split"
#: And one whose tiles have the query heads of a key head as rows.
GROUPED = "schedule model, tiles of several heads"
#: And a forward whose tiles have all keys of a key head, as a backward of few keys by one kernel.
ONE_TILE = backward_plans.WHOLE_KINDS[BWD_ONE_TILE].step
#: And a forward in blocks of 80 keys.
LONGER_BLOCKS = "schedule model, blocks of 80 keys"
#: And a forward whose programs have equal shares of key blocks.
SHARES = "schedule model, equal shares of key blocks"
#: And a forward whose warps load for themselves.
MULTISTAGE = "schedule model, multistage"
#: By ``key_splits.role_in_place``.
_HOW = {
    None: KEYS_SPLIT,
    FWD_GROUPED: GROUPED,
    FWD_ONE_TILE: ONE_TILE,
    FWD_MULTISTAGE: MULTISTAGE,
    FWD_80_KEYS: LONGER_BLOCKS,
    FWD_SHARES: SHARES,
}
#: Behind how each kernel of a split backward is served, where both run at a time.
AT_A_TIME = "; both kernels at a time"
#: Binaries that did not compile or load, or with nothing to compile them, which are not tried again for another length,
#: so that no step of a decode loop waits for it, until ``dispatch.reload`` -> why.
_REFUSED = dict[tuple[object, ...], str]()


def forward_plan(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, choice: Choice, gpu: Gpu,
    may_split: bool = True, lead: int = 0,
) -> ForwardPlan:  # fmt: skip
    """``choice``: of the tuned kernel that serves; ``lead``: as ``ForwardPlan`` has it. Where what runs in its place does
    not compile or load, or there is nothing to compile it with, the tuned one serves, and the log says so."""
    split, refused = split_of(problem, choice, gpu) if may_split else (None, "")
    if split is not None and not refused:
        try:
            return SplitPlan(problem, q, k, v, softmax_scale, split, lead)
        except Exception as error:
            if not cannot_be_had(error):
                raise
            _REFUSED[_binary(problem, split, gpu)] = str(error)
            otherwise = in_place_schedule.words(split).otherwise
            warn_once(f"the first choice for fwd failed on {gpu.name} ({error}); next: {otherwise}")
    return ForwardPlan(problem, q, k, v, softmax_scale, choice, lead)


def forget() -> None:
    """What was refused is tried again."""
    _REFUSED.clear()


def split_of(problem: Problem, choice: Choice, gpu: Gpu) -> tuple[Config | None, str]:
    """A config of what is to run in place of the forward that ``choice`` would serve, None: nothing is; and why its kernels
    could not be had before in this process, "": they were not refused."""
    chosen = packed_splits_schedule.instead_of if problem.extent.ragged else in_place_schedule.instead_of
    split = chosen(problem, choice.config, gpu, choice.row)
    return split, "" if split is None else _REFUSED.get(_binary(problem, split, gpu), "")


def steps(plan: Any, choices: Mapping[str, Choice]) -> list[str]:
    """How each kernel of a plan is served, for counting. ``choices``: that the plan was asked for."""
    made = plan.plan if isinstance(plan, copies.Copying) else plan
    if isinstance(made, SplitPlan):
        return [how(made.config)]
    if isinstance(made, WholePlan):
        return [next(kind.step for kind in backward_plans.WHOLE_KINDS.values() if isinstance(made, kind.plan))]
    at_a_time = AT_A_TIME if isinstance(made, BackwardPlan) and made.order else ""
    return [choice.step + at_a_time for choice in choices.values()]


def how(config: Config) -> str:
    """KEYS_SPLIT or what else a ``SplitPlan`` is made with."""
    return _HOW[role_in_place(config)]


def _binary(problem: Problem, split: Config, gpu: Gpu) -> tuple[object, ...]:
    named = binary_config(splitting(split), split)
    return problem.specialization, gpu.name, *sorted(named.items())
