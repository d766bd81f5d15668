"""The plan of a backward by its choices: query groups in parts, keys of dQ in parts, both kernels of a split one at a time, or
kernels of its own for all of it (for few keys; by tiles of queries; with dS in memory), where that is expected to be faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fa2tune.calling.refusals import cannot_be_had
from fa2tune.calling.schedules import (
    group_parts_schedule,
    one_tile_schedule,
    query_tiles_schedule,
    split_backward_schedule,
    stored_ds_schedule,
)
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import one_key_tile, query_tiles, stored_ds
from fa2tune.launching.one_key_tile import OneTilePlan
from fa2tune.launching.overlapped import DQ
from fa2tune.launching.passes import BackwardPlan
from fa2tune.launching.query_tiles import QueryTilesPlan
from fa2tune.launching.stored_ds import StoredDsPlan
from fa2tune.launching.whole_backward import WholePlan
from fa2tune.logs import warn_once
from fa2tune.spec.problem import BACKWARD, Config, Problem
from fa2tune.spec.roles import BWD_ONE_TILE, BWD_QUERY_TILES, BWD_STORED_DS
from fa2tune.spec.variant import Variant

#: Where the kernels that split keys of dQ, or those that make all of a backward, did not compile or load, or there was
#: nothing to compile them with: not tried again for other lengths until ``dispatch.reload`` -> why.
_REFUSED = dict[tuple[object, ...], str]()


def forget() -> None:
    """What was refused is tried again."""
    _REFUSED.clear()


class Division(NamedTuple):
    """How the work of a backward's kernels is divided for a call, worked out once."""

    groups: dict[str, int]  #: parts of query groups, or of query blocks, by kernel
    keys: int  #: parts that keys of dQ are to be split into; 1: they are not
    refused: str  #: why the kernels for that could not be had before in this process; "": they were not refused
    #: Of ``overlapped.ORDERS``, in which both kernels of a split backward run at a time; "": one after the other.
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


class WholeKind(NamedTuple):
    """Of kernels that make all of a backward in place of a strategy's."""

    what: str  #: in a few words
    step: str  #: how such a backward is served, for counting
    #: (problem, choices, parts, order, gpu) -> a config, None: they are not expected to be faster
    config_of: Callable[[Problem, Mapping[str, Choice], Mapping[str, int], str, Gpu], Config | None]
    estimated_us: Callable[[Problem, Config, Gpu], float]
    about: Callable[[Problem, Config, int], str]  #: in one sentence
    kernels: Callable[[Problem, Config, int], list[tuple[Variant, Config, Problem]]]
    plan: type[WholePlan]


#: By the role of the first kernel. The first one that is expected to be faster serves.
WHOLE_KINDS: dict[str, WholeKind] = {
    BWD_QUERY_TILES: WholeKind(
        "tiles of queries", "schedule model, tiles of queries", query_tiles_schedule.config_of,
        query_tiles_schedule.query_tiles_us, query_tiles_schedule.about, query_tiles.kernels, QueryTilesPlan,
    ),
    BWD_ONE_TILE: WholeKind(
        "all of it by one kernel", "schedule model, one key tile", one_tile_schedule.config_of, one_tile_schedule.one_tile_us,
        one_tile_schedule.about, one_key_tile.kernels, OneTilePlan,
    ),
    BWD_STORED_DS: WholeKind(
        "dS in memory", "schedule model, dS in memory", stored_ds_schedule.config_of, stored_ds_schedule.stored_us,
        stored_ds_schedule.about, stored_ds.kernels, StoredDsPlan,
    ),
}  # fmt: skip


class Whole(NamedTuple):
    """What makes all of a backward in place of its choices."""

    role: str  #: of WHOLE_KINDS
    config: Config

    @property
    def kind(self) -> WholeKind:
        return WHOLE_KINDS[self.role]

    def kernels(self, problem: Problem, arch: int) -> list[tuple[Variant, Config, Problem]]:
        """What runs, each once, in order, with its config and a problem whose specialization it is compiled for."""
        return self.kind.kernels(problem, self.config, arch)

    def place(self, problem: Problem, gpu: Gpu) -> tuple[object, ...]:
        """In _REFUSED."""
        return problem.specialization, gpu.name, self.role


def wholes(
    problem: Problem, choices: Mapping[str, Choice], divided: Division, gpu: Gpu
) -> Iterator[tuple[Whole, str]]:  # fmt: skip
    """What may make all of a backward in place of ``choices``, whose work is ``divided``, the first choice first; and why it
    could not be had before in this process, "": it was not refused."""
    for role, kind in WHOLE_KINDS.items():
        config = kind.config_of(problem, choices, divided.parts, divided.order, gpu)
        if config is not None:
            found = Whole(role, config)
            yield found, _REFUSED.get(found.place(problem, gpu), "")


def whole(
    problem: Problem, choices: Mapping[str, Choice], divided: Division, gpu: Gpu
) -> tuple[Whole | None, str]:  # fmt: skip
    """The first of ``wholes`` that was not refused; of none such the first of all, and why it was; None: there is none."""
    first: tuple[Whole | None, str] = (None, "")
    for found, refused in wholes(problem, choices, divided, gpu):
        if not refused:
            return found, ""
        first = first if first[0] is not None else (found, refused)
    return first


def without(
    problem: Problem, strategy: str, choices: Mapping[str, Choice], divided: Division, softmax_scale: float, lead: int
) -> Callable[..., BackwardPlan]:
    """As ``StoredDsPlan`` has it. Holds no tensors."""

    def planned(*tensors: Any) -> BackwardPlan:
        do, dlse, q, k, v, o = tensors
        return BackwardPlan(
            problem, do, dlse, q, k, v, o, softmax_scale, strategy, choices, divided.groups, lead=lead
        )  # fmt: skip

    return planned


def backward_plan(
    problem: Problem, strategy: str, choices: Mapping[str, Choice], gpu: Gpu, given: Mapping[str, Any], may_split: bool
) -> BackwardPlan | WholePlan:
    """``given``: what else a ``BackwardPlan`` takes. Where the kernels that make all of a backward do not compile or load, or
    there is nothing to compile them with, those of ``choices`` serve, and the log says so."""

    def planned(parts: Mapping[str, int], order: str) -> BackwardPlan:
        return BackwardPlan(problem, **given, strategy=strategy, configs=choices, parts=parts, order=order)

    if not may_split:
        return planned({}, "")
    divided = division(problem, choices, gpu)
    for found, refused in wholes(problem, choices, divided, gpu):
        if refused:
            continue
        try:
            made = found.kind.plan(problem, **given, config=found.config)
            if isinstance(made, StoredDsPlan):
                made.without = without(problem, strategy, choices, divided, given["softmax_scale"], made.lead)
            return made
        except Exception as error:
            if not cannot_be_had(error):
                raise
            _REFUSED[found.place(problem, gpu)] = str(error)
            after, unless = whole(problem, choices, divided, gpu)
            following = ", ".join(choices) if after is None or unless else after.kind.what
            warn_once(f"the first choice for {BACKWARD} failed on {gpu.name} ({error}); next: {following}")
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
