"""The plan of a backward by its choices: query groups in parts, keys of dQ in parts, both kernels of a split one at a time, or
one kernel for all of it, where that is expected to be faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fa2tune.calling.refusals import cannot_be_had
from fa2tune.calling.schedules import group_parts_schedule, one_tile_schedule, split_backward_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import one_key_tile
from fa2tune.launching.beside import DQ
from fa2tune.launching.one_key_tile import OneTilePlan
from fa2tune.launching.passes import BackwardPlan
from fa2tune.logs import warn_once
from fa2tune.spec.problem import BACKWARD, Config, Problem

#: Where the kernels that split keys of dQ, or the one that makes all of a backward, did not compile or load, or there was
#: nothing to compile them with: not tried again for other lengths until ``dispatch.reload`` -> why.
_REFUSED = dict[tuple[object, ...], str]()


def forget() -> None:
    """What was refused is tried again."""
    _REFUSED.clear()


def key_parts(
    problem: Problem, choices: Mapping[str, Choice], parts: Mapping[str, int], gpu: Gpu
) -> tuple[int, str]:  # fmt: skip
    """Into how many parts keys of dQ are to be split, 1: they are not; and why the kernels for it could not be had before in
    this process, "": they were not refused. ``parts``: of query groups, by kernel."""
    count = split_backward_schedule.key_parts(problem, choices, parts, gpu)
    return count, _REFUSED.get((problem.specialization, gpu.name), "") if count > 1 else ""


def one_tile(problem: Problem, choices: Mapping[str, Choice], gpu: Gpu) -> tuple[Config | None, str]:
    """The config of the kernel that is to make all of a backward, None: none is; and why it could not be had before in this
    process, "": it was not refused."""
    if not one_tile_schedule.asked(problem, gpu):
        return None, ""
    parts = group_parts_schedule.parts(problem, choices, gpu)
    count, refused = key_parts(problem, choices, parts, gpu)
    parts = {**parts, DQ: count} if count > 1 and not refused else parts
    order = split_backward_schedule.order_of(problem, choices, parts, gpu)
    found = one_tile_schedule.config_of(problem, choices, parts, order, gpu)
    return found, "" if found is None else _REFUSED.get(_one_tile(problem, gpu), "")


def _one_tile(problem: Problem, gpu: Gpu) -> tuple[object, ...]:
    return problem.specialization, gpu.name, one_key_tile.KERNEL


def backward_plan(
    problem: Problem, strategy: str, choices: Mapping[str, Choice], gpu: Gpu, given: Mapping[str, Any], may_split: bool
) -> BackwardPlan | OneTilePlan:
    """``given``: what else a ``BackwardPlan`` takes. Where the kernel that makes all of a backward does not compile or load, or
    there is nothing to compile it with, those of ``choices`` serve, and the log says so."""
    config, refused = one_tile(problem, choices, gpu) if may_split else (None, "")
    if config is not None and not refused:
        try:
            return OneTilePlan(problem, **given, config=config)
        except Exception as error:
            if not cannot_be_had(error):
                raise
            _REFUSED[_one_tile(problem, gpu)] = str(error)
            warn_once(f"the first choice for {BACKWARD} failed on {gpu.name} ({error}); next: {', '.join(choices)}")
    return _of_strategy(problem, strategy, choices, gpu, given, may_split)


def _of_strategy(
    problem: Problem, strategy: str, choices: Mapping[str, Choice], gpu: Gpu, given: Mapping[str, Any], may_split: bool
) -> BackwardPlan:
    """Where the kernels that split keys of dQ do not compile or load, or there is nothing to compile them with, dQ's own kernel
    serves, and the log says so."""

    def planned(parts: Mapping[str, int]) -> BackwardPlan:
        order = split_backward_schedule.order_of(problem, choices, parts, gpu) if may_split else ""
        return BackwardPlan(problem, **given, strategy=strategy, configs=choices, parts=parts, order=order)

    parts = group_parts_schedule.parts(problem, choices, gpu) if may_split else {}
    count, refused = key_parts(problem, choices, parts, gpu) if may_split else (1, "")
    if count > 1 and not refused:
        try:
            return planned({**parts, DQ: count})
        except Exception as error:
            if not cannot_be_had(error):
                raise
            why = str(error)
        plan = planned(parts)  # fails, too, where another kernel was the reason
        _REFUSED[problem.specialization, gpu.name] = why
        warn_once(f"the first choice for {DQ} failed on {gpu.name} ({why}); next: keys are not split")
        return plan
    return planned(parts)
