"""Whether a call's query heads are taken as one head for each key head (``launching/merged_heads.py``), and the plans of such
calls.

Tiles of one head are filled by its queries up to the last one. Of 77 queries a tile of 128 rows has 51 for nothing, and with 18
heads a key head there are 18 such tiles where their 1386 rows fill 11. Both are estimated as they would be served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from fa2tune.calling import backward_plans, forward_plans
from fa2tune.calling.choosing import Chooser, choose_backward
from fa2tune.calling.copies import Copy
from fa2tune.calling.schedules import (
    grouped_schedule,
    in_place_schedule,
    key_splits_schedule,
    one_tile_schedule,
)
from fa2tune.launching import merged_heads
from fa2tune.launching.merged_heads import lies, lse_ordered, merged, view
from fa2tune.launching.passes import BackwardPlan, ForwardPlan, empty_ordered, lse_shape, without_memory
from fa2tune.launching.stored_ds import StoredDsPlan
from fa2tune.launching.whole_backward import WholePlan
from fa2tune.spec.mask import STACKED
from fa2tune.spec.problem import BACKWARD, HEADS_FIRST, QUERIES_FIRST, Problem

#: One head must be predicted to be faster by this share, and by so many microseconds more where lse's rows have to be put in
#: another order before.
MARGIN, LSE_US = 0.03, 3.0
#: Under the causal mask of its rows it takes longer than the estimates say, which are those of the mask of one head: by 1.05 in
#: the geometric mean of 75 forwards of an H200 (benchmarks/merged_heads.py), by 1.03 in that of 57 backwards. Both are counted
#: alike.
STACKED_COST = 1.05
#: Forwards of fewer queries are left to kernels that split keys, whose tiles have the rows of all heads already.
LEAST_QUERIES = grouped_schedule.LEAST_QUERIES
#: Of so many queries and more, rows beside the call are less than MARGIN of its tiles: not asked, as another length bucket's
#: rows would have to be looked up.
MOST_QUERIES = 4096


#: Binaries of one head a key head that did not compile or load, or with nothing to compile them: not tried again for another
#: length until ``dispatch.reload``.
_REFUSED = set[tuple[object, ...]]()


def forget() -> None:
    """What was refused is tried again."""
    _REFUSED.clear()


def refuse(ours: Chooser, pass_: str) -> None:
    """Not to be tried again. ``ours``: what chooses for one head a key head."""
    _REFUSED.add(_place(ours, pass_))


def _place(ours: Chooser, pass_: str) -> tuple[object, ...]:
    return ours.problem.specialization, ours.gpu.name, pass_


def asked(problem: Problem, arch: int) -> bool:
    """Whether it is estimated at all."""
    measured = problem.tma and arch in key_splits_schedule.MEASURED_ON
    return measured and problem.seqlen_q < MOST_QUERIES and merged_heads.can(problem)


def forward_us(chooser: Chooser) -> float:
    """Microseconds of a forward as it is served, estimated."""
    problem, gpu, choice = chooser.problem, chooser.gpu, chooser.choose("fwd")
    split, refused = forward_plans.split_of(problem, choice, gpu)
    return in_place_schedule.served_us(problem, choice.config, gpu, choice.row, None if refused else split)


def backward_us(chooser: Chooser, deterministic: bool) -> float | None:
    """The same of a backward; None: of what serves there is no estimate."""
    problem, gpu = chooser.problem, chooser.gpu
    _, choices = choose_backward(chooser, deterministic)
    divided = backward_plans.division(problem, choices, gpu)
    whole, refused = backward_plans.whole(problem, choices, divided, gpu)
    if whole is not None and not refused:
        return whole.kind.estimated_us(problem, whole.config, gpu)
    if any(choice.config.get("IN_ORDER") for choice in choices.values()):  # what waits in turn is not estimated
        return None
    return one_tile_schedule.otherwise_us(problem, choices, divided.parts, divided.order, gpu)


def merging(
    chooser: Chooser, pass_: str, deterministic: bool = False, lse: str | None = None, lead: int = 0
) -> Chooser | None:
    """What chooses for a pass ("fwd", "bwd") whose query heads are taken as one; None: they are not. ``chooser``: of the call
    as it is; ``deterministic``: of a backward; ``lse``: how its rows lie in memory (``order_of_lse``), None: as the forward of
    such a call leaves them; ``lead``: of o or dq, as plans have it, for which queries have to come first (``lead_as_one``)."""
    problem = chooser.problem
    if (
        not problem.stacked
        or (lead and problem.stacked != QUERIES_FIRST)
        or not asked(problem, chooser.gpu.arch)
        or (pass_ != BACKWARD and problem.seqlen_q < LEAST_QUERIES)
    ):
        return None
    if lse is None:
        as_one = pass_ == BACKWARD and merging(chooser, "fwd") is not None
        lse = problem.stacked if as_one else HEADS_FIRST
    ours = chooser.of(merged(problem))
    return ours if _place(ours, pass_) not in _REFUSED and pays(chooser, ours, pass_, deterministic, lse) else None


def pays(chooser: Chooser, ours: Chooser, pass_: str, deterministic: bool, lse: str) -> bool:
    """Whether that is expected to be faster. ``ours``: what chooses for one head a key head."""
    cost = STACKED_COST if ours.problem.mask.name == STACKED else 1.0
    if pass_ != BACKWARD:
        now, then = forward_us(chooser), cost * forward_us(ours)
        if then >= (1 - MARGIN) * now:
            return False
        # else a backward of heads one by one would have lse put in order
        free = chooser.problem.stacked == HEADS_FIRST or now - then > LSE_US
        return free or merging(chooser, BACKWARD, lse=QUERIES_FIRST) is not None
    before, after = backward_us(chooser, deterministic), backward_us(ours, deterministic)
    if before is None or after is None:
        return False
    before += LSE_US if lse == QUERIES_FIRST else 0.0
    after = cost * after + (LSE_US if lse != chooser.problem.stacked else 0.0)
    return after < (1 - MARGIN) * before


def order_of_lse(lse: torch.Tensor) -> str:
    """How rows of lse lie in memory: HEADS_FIRST, QUERIES_FIRST; "": otherwise."""
    if lse.is_contiguous():
        return HEADS_FIRST
    return QUERIES_FIRST if lse.dim() == 3 and lse.transpose(1, 2).is_contiguous() else ""


def as_one(tensors: Mapping[str, torch.Tensor | None], order: str) -> dict[str, Any]:
    """(batch, heads, seqlen, ...) tensors by name, k among them: those with query heads as of one head a key head, the same
    memory."""
    k = tensors["k"]
    assert k is not None
    of_queries = ("do", "dlse", "q", "o")
    return {
        name: view(one, k.shape[1], order) if name in of_queries and one is not None else one
        for name, one in tensors.items()
    }


def as_read(
    tensors: Mapping[str, torch.Tensor | None], lse: str, order: str
) -> tuple[dict[str, Any], dict[str, Copy]]:  # fmt: skip
    """(A backward's tensors as its kernels read them, how those are copied that are copied first for it), by name.
    ``tensors``: dlse, do, q, k, v and o; ``lse``: how its rows lie; ``order``: of the one head, "": there is none."""
    asked, ordered, wanted = dict(tensors), dict[str, Copy](), order or HEADS_FIRST
    if lse != wanted:
        ordered["lse"] = partial(lse_ordered, order=wanted)
    dlse = tensors["dlse"]
    if order and dlse is not None and not lies(dlse, order):
        ordered["dlse"] = partial(lse_ordered, order=order)
        asked["dlse"] = lse_ordered(dlse, order)
    return as_one(asked, order) if order else asked, ordered


def lead_as_one(problem: Problem, lead: int, order: str) -> int:
    """How many rows are in front of the one head's where ``lead`` are in front of each query head's. ``order``: of the one
    head, "": there is none. Queries first, these are the same rows; heads first, they lie between those of the query heads."""
    return lead * problem.group if order else lead


def giving_forward(
    plan: ForwardPlan, problem: Problem, q: torch.Tensor, order: str, lead: int
) -> None:  # fmt: skip
    """Has the plan of one head a key head give o and lse as a call with ``q`` (batch, heads_q, seqlen_q, head_dim) wants them,
    which poses ``problem``. ``lead``: of o, in front of each query head; the plan was made with ``lead_as_one``."""
    plan.problem = problem  # which the backward begins with
    plan.lead = lead
    lse = torch.empty(lse_shape(q), dtype=torch.float32, device="meta")
    plan.fresh.gives(empty_ordered(without_memory(q), problem.head_dim_v, lead), lse_ordered(lse, order))


def giving_backward(plan: BackwardPlan | WholePlan, q: torch.Tensor, order: str, lead: int) -> None:
    """The same of a backward's plan: dq, for calls with ``q``."""
    plan.lead = lead
    plan.fresh.gives(empty_ordered(without_memory(q), q.shape[3], lead))
    if isinstance(plan, StoredDsPlan) and plan.without is not None:
        plan.without = _without(plan.without, order, lead)


def _without(made: Callable[..., Any], order: str, lead: int) -> Callable[..., Any]:
    """``StoredDsPlan.without`` for tensors as a call has them."""

    def planned(*tensors: Any) -> Any:
        named = dict(zip(("do", "dlse", "q", "k", "v", "o"), tensors, strict=True))
        plan = made(*as_one(named, order).values())
        giving_backward(plan, named["q"], order, lead)
        return plan

    return planned
