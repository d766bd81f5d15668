"""The plan of a backward by its choices: query groups in parts, keys of dQ in parts, both kernels of a split one at a time, or
one kernel for all of it, where that is expected to be faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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


class Division(NamedTuple):
    """How the work of a backward's kernels is divided for a call, worked out once."""

    groups: dict[str, int]  #: parts of query groups, by kernel, where they are split
    keys: int  #: parts that keys of dQ are to be split into; 1: they are not
    refused: str  #: why the kernels for that could not be had before in this process; "": they were not refused
    #: Of ``beside.ORDERS``, in which both kernels of a split backward run at a time; "": one after the other.
    order: str

    @property
    def parts(self) -> dict[str, int]:
        """By kernel, those of dQ's keys too, where its kernels can be had."""
        return {**self.groups, DQ: self.keys} if self.keys > 1 and not self.refused else self.groups


def division(problem: Problem, choices: Mapping[str, Choice], gpu: Gpu) -> Division:
    """Of the kernels of ``choices``."""
    groups = group_parts_schedule.parts(problem, choices, gpu)
    keys = split_backward_schedule.key_parts(problem, choices, groups, gpu)
    refused = _REFUSED.get((problem.specialization, gpu.name), "") if keys > 1 else ""
    found = Division(groups, keys, refused, "")
    return found._replace(order=split_backward_schedule.order_of(problem, choices, found.parts, gpu))


def one_tile(problem: Problem, choices: Mapping[str, Choice], divided: Division, gpu: Gpu) -> tuple[Config | None, str]:
    """The config of the kernel that is to make all of a backward in place of ``choices``, whose work is ``divided``, None: none
    is; and why it could not be had before in this process, "": it was not refused."""
    found = one_tile_schedule.config_of(problem, choices, divided.parts, divided.order, gpu)
    return found, "" if found is None else _REFUSED.get(_one_tile(problem, gpu), "")


def _one_tile(problem: Problem, gpu: Gpu) -> tuple[object, ...]:
    return problem.specialization, gpu.name, one_key_tile.KERNEL


def backward_plan(
    problem: Problem, strategy: str, choices: Mapping[str, Choice], gpu: Gpu, given: Mapping[str, Any], may_split: bool
) -> BackwardPlan | OneTilePlan:
    """``given``: what else a ``BackwardPlan`` takes. Where the kernel that makes all of a backward does not compile or load, or
    there is nothing to compile it with, those of ``choices`` serve, and the log says so."""

    def planned(parts: Mapping[str, int], order: str) -> BackwardPlan:
        return BackwardPlan(problem, **given, strategy=strategy, configs=choices, parts=parts, order=order)

    if not may_split:
        return planned({}, "")
    divided = division(problem, choices, gpu)
    config, refused = one_tile(problem, choices, divided, gpu)
    if config is not None and not refused:
        try:
            return OneTilePlan(problem, **given, config=config)
        except Exception as error:
            if not cannot_be_had(error):
                raise
            _REFUSED[_one_tile(problem, gpu)] = str(error)
            warn_once(f"the first choice for {BACKWARD} failed on {gpu.name} ({error}); next: {', '.join(choices)}")
    if divided.parts == divided.groups:
        return planned(divided.groups, divided.order)
    try:
        return planned(divided.parts, divided.order)
    except Exception as error:
        if not cannot_be_had(error):
            raise
        why = str(error)
    order = split_backward_schedule.order_of(problem, choices, divided.groups, gpu)
    plan = planned(divided.groups, order)  # fails, too, where another kernel was the reason
    _REFUSED[problem.specialization, gpu.name] = why
    warn_once(f"the first choice for {DQ} failed on {gpu.name} ({why}); next: keys are not split")
    return plan
