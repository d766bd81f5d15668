"""From a call to a loaded kernel: memo, lookup ladder, limits re-checked, launch.

The hit path is one dictionary look-up: no lock, no file, no compile, no collective. A miss reads the cache layers (once per
process), walks the lookup ladder of :mod:`fa2tune.rows.lookup`, and loads the kernel from a trusted file of binaries
(:mod:`fa2tune.compiling.binaries`), or compiles it. Where no row serves, the documented default config does (``default`` in
the kernel's search space), and a log line says so once per key.
"""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import torch

from fa2tune import gpus, uncollected
from fa2tune.calling import (
    arguments,
    backward_plans,
    choosing,
    copies,
    forward_plans,
    merging,
    unseen,
    varlen_schedules,
)
from fa2tune.calling.choosing import Chooser, choose_backward
from fa2tune.calling.empty import NoKeys, Zeros
from fa2tune.calling.kinds import PORTABLE_ROWS
from fa2tune.calling.refusals import cannot_be_had, is_refusal, without_frames
from fa2tune.calling.saved import check_saved, of_offsets
from fa2tune.calling.settings import CAPTURE_MISS, RAISE, TAKE_DEFAULT
from fa2tune.compiling import binaries
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import passes, ported
from fa2tune.launching.cuda import forget_packed, relaxed_capture
from fa2tune.launching.launch import CaptureMiss
from fa2tune.launching.passes import (
    float32_precision,
    in_one_batch,
    lse_of,
)
from fa2tune.logs import warn_once
from fa2tune.spec.extent import WHOLE, Extent
from fa2tune.spec.mask import Mask, Window
from fa2tune.spec.problem import BACKWARD, FUSED, SPLIT, STRATEGIES, Config, Problem
from fa2tune.spec.score import Score
from fa2tune.spec.variant import WARP_SPECIALIZED, implementation_of

#: How calls were served: step of the lookup ladder, or what ran in place of a row -> kernels of the plans made. For monitoring;
#: ``fa2tune.explain`` says it for one call.
SERVED: Counter[str] = Counter()

#: Plans by everything that selects them. Bounded: a full memo is emptied, and the plans in use come back one by one.
FORWARD_PLANS: dict[tuple[Any, ...], Any] = {}
BACKWARD_PLANS: dict[tuple[Any, ...], Any] = {}
PLANS_KEPT = 4096

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@cache
def gpu_of(device_index: int) -> Gpu:
    """The GPU at a CUDA index; -1 (the interpreter) gives one of the lowest architecture; in a process that runs ported code,
    the one whose code that is. RuntimeError: too old for every kernel."""
    if device_index < 0:
        return gpus.named("a100")
    if (other := ported.running_for()) is not None:
        return other
    properties = torch.cuda.get_device_properties(device_index)
    arch = 10 * properties.major + properties.minor
    gpu = gpus.identify(properties.name, arch, properties.multi_processor_count)
    if arch < gpus.MIN_ARCH:
        raise RuntimeError(
            f"attention: cuda:{device_index} ({properties.name}) has compute capability {gpu.capability}, "
            f"{gpus.MIN_ARCH / 10} or higher is needed"
        )
    return gpu


def reload() -> None:
    """Forget every plan, every layer and every file of binaries, so that the next call reads the files anew. Kernels that are
    loaded stay loaded."""
    choosing.forget()
    forward_plans.forget()
    backward_plans.forget()
    merging.forget()
    varlen_schedules.forget()
    binaries.forget()
    FORWARD_PLANS.clear()
    BACKWARD_PLANS.clear()
    forget_packed()


def with_copies(
    chooser: Chooser, names: Sequence[str], pass_: str, deterministic: bool = False
) -> Chooser | None:  # fmt: skip
    """What chooses for a pass ("fwd", "bwd") where ``names``, the tensors that TMA cannot address, are copied before; None:
    they are not. All are, if that is expected to be faster and every kernel is then warp-specialised. ``chooser``: of the call
    without copies."""
    problem = chooser.problem
    if problem.tma or problem.extent.ragged or not names or not copies.pays(problem, chooser.gpu, pass_, names):
        return None
    ours = chooser.of(copies.addressable(problem))
    choices = choose_backward(ours, deterministic)[1] if pass_ == BACKWARD else {"fwd": ours.choose("fwd")}
    return ours if all(implementation_of(one.config) == WARP_SPECIALIZED for one in choices.values()) else None


Made = TypeVar("Made")
Planned = tuple[Any, bool]  #: a plan, and whether calls after a CUDA graph's capture have it, too
#: kernel -> its choice, to a plan
Make = Callable[[Mapping[str, Choice]], Made]


def _plan(chooser: Chooser, first: Mapping[str, Choice], make: Make[Made], rows_alone: bool = False) -> Made:
    """Make the plan of the first choice. Where its config does not compile or load here, the row's own is tried, then the best
    portable row, then the default configs, at last one in small tiles, and the log says so; the row's own, too, where there is
    nothing to compile another form of it with. CaptureMiss: a kernel is not loaded yet, and a CUDA graph is being captured.
    ``rows_alone``: after the row's own nothing is tried."""
    ladder: tuple[tuple[str, Callable[[str], Choice]], ...] = (
        ("", first.__getitem__),
        ("the row's own config", lambda kernel: first[kernel].of_row),
        ("the best portable row", lambda kernel: chooser.choose(kernel, PORTABLE_ROWS)),
        ("default config", chooser.default),
        ("portable default", chooser.portable_default),
        ("small tiles", chooser.in_small_tiles),
    )
    failure: BaseException | None = None
    tried: list[dict[str, tuple[Config, str]]] = []
    formed = any(choice.otherwise is not None for choice in first.values())
    for name, chosen in ladder[:2] if rows_alone else ladder:
        choices = {kernel: chosen(kernel) for kernel in first}
        asked = {kernel: (choice.config, choice.triton) for kernel, choice in choices.items()}
        if asked in tried:
            continue
        tried.append(asked)
        if failure:
            warn_once(f"the first choice for {', '.join(first)} failed on {chooser.gpu.name} ({failure}); next: {name}")
        try:
            plan = make(choices)
        except Exception as error:
            if not (is_refusal(error) or (formed and len(tried) == 1 and cannot_be_had(error))):
                raise
            failure = without_frames(error)
            continue
        SERVED.update(forward_plans.steps(plan, choices))
        return plan
    assert failure is not None
    try:
        raise failure
    finally:
        del failure  # else this frame and the error would hold each other


def _of_rows(choices: Mapping[str, Choice]) -> dict[str, Choice]:
    return {kernel: choice.of_row for kernel, choice in choices.items()}


def _backward_plan(
    chooser: Chooser, deterministic: bool, make: Callable[[str, Mapping[str, Choice]], Made], own: bool = False,
    rows_alone: bool = False,
) -> Made:  # fmt: skip
    """``_plan`` of a whole backward. A deterministic fused one that does not compile or load here, or that there is nothing to
    compile with, gives way to the split one: no other fused kernel is deterministic. ``own``: with the rows' own configs;
    ``rows_alone``: as ``_plan`` has it."""
    strategy, choices = choose_backward(chooser, deterministic)
    if deterministic and strategy == FUSED:
        try:
            plan = make(strategy, choices)
        except Exception as error:
            if not cannot_be_had(error):
                raise
            why = f"the first choice for a deterministic backward failed on {chooser.gpu.name} ({error}); next: {SPLIT}"
            warn_once(why)
        else:
            SERVED.update(forward_plans.steps(plan, choices))
            return plan
        strategy, choices = choose_backward(chooser, deterministic, in_order=False)
    return _plan(chooser, _of_rows(choices) if own else choices, partial(make, strategy), rows_alone)


def _plan_in_capture(miss: CaptureMiss, chooser: Chooser, kernels: Sequence[str], make: Make[Made]) -> Made:
    """What FA2TUNE_CAPTURE_MISS asks for where a kernel is not loaded: an error, or the documented default configs, loaded
    during the capture. Not remembered: calls after the capture choose again."""
    setting = os.environ.get(CAPTURE_MISS, RAISE)
    if setting == RAISE:
        raise RuntimeError(
            f"attention: {miss} is not loaded yet for a call like this, and a CUDA graph is being captured: make one warm-up "
            f"call with these shapes before capturing, or set {CAPTURE_MISS}={TAKE_DEFAULT} to take the default config"
        ) from None
    if setting != TAKE_DEFAULT:
        raise ValueError(f"{CAPTURE_MISS}: got {setting!r:.40}, allowed are {RAISE} and {TAKE_DEFAULT}") from None
    warn_once(f"{', '.join(kernels)} first called while a CUDA graph is captured: default config")
    with relaxed_capture():
        plan = _first_to_compile((chooser.default, chooser.portable_default, chooser.in_small_tiles), kernels, make)
    SERVED["default, in a capture"] += len(kernels)
    return plan


def _first_to_compile(ladder: Sequence[Callable[[str], Choice]], kernels: Sequence[str], make: Make[Made]) -> Made:
    """The plan of the first choices that compile and load here; the last ones' error."""
    *others, last = ladder
    for chosen in others:
        try:
            return make({kernel: chosen(kernel) for kernel in kernels})
        except Exception as error:
            if not is_refusal(error):
                raise
    return make({kernel: last(kernel) for kernel in kernels})


def _planned(
    first: Callable[[], Any], of_rows: Callable[[], Any], in_capture: Callable[[CaptureMiss], Any] | None
) -> Planned:  # fmt: skip
    """The first plan. Where a kernel of it is not loaded, and a CUDA graph is being captured: that of the rows' own configs,
    which a warm-up call of another batch may have loaded, else what ``in_capture`` makes of the miss (None: CaptureMiss)."""
    try:
        with uncollected():
            return first(), True
    except CaptureMiss:
        try:
            with uncollected():
                return of_rows(), False
        except CaptureMiss as miss:
            if in_capture is None:
                raise
            return in_capture(miss), False


def _of_one_head_or_all(
    chooser: Chooser, pass_: str, one_head: Chooser | None, planned: Callable[[Chooser, str], Planned]
) -> Planned:
    """The plan of one query head a key head, where ``one_head`` chooses for it; else, or where its kernels do not compile or
    load, or there is nothing to compile them with, of the heads that there are, and the log says so."""
    if one_head is not None:
        try:
            return planned(one_head, chooser.problem.stacked)
        except CaptureMiss:  # a warm-up call may have loaded the others
            return planned(chooser, "")[0], False
        except Exception as error:
            if not cannot_be_had(error):
                raise
            merging.refuse(one_head, pass_)
            warn_once(f"the first choice for {pass_} failed on {chooser.gpu.name} ({error}); next: heads one by one")
    return planned(chooser, "")


def _remember(memo: dict[tuple[Any, ...], Any], key: tuple[Any, ...], plan: Any) -> None:
    if len(memo) >= PLANS_KEPT:
        memo.clear()
    memo[key] = plan


def _exact(window: Any) -> tuple[Any, ...]:
    """A window for a plan's key: (True, 0) and (1.0, 0) equal (1, 0), and are errors. TypeError: not a pair."""
    return (type(window), *window, *map(type, window))


def forward_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None, layout: str,
    window: Window | None = None, mask: str | Mask | None = None,
    softcap: float | None = None, score: str | Score | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Everything that an argument check, a config or a launch depends on."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.get_device(),
        k.get_device(), v.get_device(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15, causal, softmax_scale, layout,
        float32_precision() if q.dtype is torch.float32 else "", window if window is None else _exact(window), mask,
        softcap, type(softcap), score,
    )  # fmt: skip


def forward_plan(
    key: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softmax_scale: float,
    score: Score, extent: Extent = WHOLE, lead: int = 0,
) -> Any:  # fmt: skip
    """Make and remember the plan of a forward; q, k, v are (batch, heads, seqlen, dim), of a ragged extent batch is 1.
    ``lead``: as ``passes.ForwardPlan`` has it."""
    problem = passes.describe(q, k, v, mask, softmax_scale, score, extent)
    plan: Any
    if problem.is_empty:
        plan = NoKeys(problem, softmax_scale)
        _remember(FORWARD_PLANS, key, plan)
        return plan
    gpu, given, names = gpu_of(q.get_device()), {"q": q, "k": k, "v": v}, tuple[str, ...]()
    if rows := unseen.filled_in(problem, gpu, "fwd"):
        others = partial(forward, mask=mask, softmax_scale=softmax_scale, score=score, lead=rows)
        plan = unseen.Forward(problem, rows, softmax_scale, others)
        _remember(FORWARD_PLANS, key, plan)
        return plan
    chooser = Chooser(problem, gpu)
    if not problem.tma and (ours := with_copies(chooser, found := copies.unaddressable(given), "fwd")):
        names = found
        q, k, v = (copies.like(one) if name in names else one for name, one in given.items())
        chooser = ours.of(passes.describe(q, k, v, mask, softmax_scale, score))

    def planned(chooser: Chooser, order: str) -> Planned:
        seen = q
        if order:  # offsets may need 64 bits
            seen = merging.as_one({"q": q, "k": k}, order)["q"]
            chooser = chooser.of(passes.describe(seen, k, v, chooser.problem.mask, softmax_scale, score))

        def make(choices: Mapping[str, Choice], may_split: bool = True) -> Any:
            plan = forward_plans.forward_plan(
                chooser.problem, seen, k, v, softmax_scale, choices["fwd"], gpu, may_split,
                merging.lead_as_one(problem, lead, order),
            )  # fmt: skip
            if order:
                merging.giving_forward(plan, problem, q, order, lead)
            return copies.copying(plan, tuple(given), dict.fromkeys(names, copies.copied))

        first = {"fwd": chooser.choose("fwd")}
        whole = partial(make, may_split=False)
        return _planned(
            lambda: _plan(chooser, first, make, bool(order)),
            lambda: _plan(chooser, _of_rows(first), whole, bool(order)),
            None if order else lambda miss: _plan_in_capture(miss, chooser, ("fwd",), whole),
        )

    plan, lasting = _of_one_head_or_all(chooser, "fwd", merging.merging(chooser, "fwd", lead=lead), planned)
    if lasting:
        _remember(FORWARD_PLANS, key, plan)
    return plan


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softmax_scale: float, score: Score, lead: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of (batch, heads, seqlen, dim) tensors that have been checked; lse of ``passes.lse_shape``. ``lead``: of o, as
    ``passes.ForwardPlan`` has it, for calls with a key."""
    key = (*forward_key(q, k, v, False, softmax_scale, "bhsd", None, mask, None, score), lead)
    plan = FORWARD_PLANS.get(key) or forward_plan(key, q, k, v, mask, softmax_scale, score, lead=lead)
    return plan(q, k, v)


def backward(
    do: torch.Tensor | None, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    o: torch.Tensor, lse: torch.Tensor, mask: Mask, softmax_scale: float, deterministic: bool, score: Score,
    extent: Extent = WHOLE, offsets: tuple[torch.Tensor, ...] = (), lead: int = 0,
) -> Tensors3:  # fmt: skip
    """(dq, dk, dv). do has o's shape, dlse lse's, either may be None, and their strides are free. ``offsets``: cu_seqlens_q,
    cu_seqlens_k and, if it is scheduled, the order of tiles, if the extent is ragged; then do, q, k, v and o may be (total,
    heads, dim). ``lead``: of dq, as ``passes.BackwardPlan`` has it, for dense calls with a key."""
    if dlse is not None:
        dlse = lse_of(dlse)
        if max(dlse.stride()) >= 1 << 31:  # its strides are 32-bit arguments of the kernels
            dlse = dlse.contiguous()
    if do is None:
        do = torch.zeros_like(o)
    steps, dtype = do.stride(), q.dtype
    if steps[-1] != 1:  # an expanded gradient, as .sum().backward() sends: the kernels read rows
        do = do.contiguous()
        steps = do.stride()
    key = (  # nothing of it is taken from the forward: hooks on saved tensors may change all of it
        q.shape, k.shape, v.shape, o.shape, lse.shape, q.stride(), k.stride(), v.stride(), o.stride(), lse.stride(), steps,
        None if dlse is None else dlse.stride(), dtype, k.dtype, v.dtype, o.dtype, lse.dtype, do.dtype,
        q.get_device(), k.get_device(), v.get_device(), o.get_device(), lse.get_device(), offsets and of_offsets(offsets),
        (q.data_ptr() | k.data_ptr() | v.data_ptr() | o.data_ptr() | do.data_ptr()) & 15,
        mask.name, mask.values, score.name, score.values, softmax_scale, deterministic, extent, lead,
        float32_precision() if dtype is torch.float32 else "",
    )  # fmt: skip
    plan = BACKWARD_PLANS.get(key)
    if plan is None:
        arguments.check_among(
            "deterministic", deterministic, (True, False)
        )  # a forward from the memo has not checked it
        if extent.ragged and q.dim() == 3:
            do, q, k, v, o = (in_one_batch(tensor) for tensor in (do, q, k, v, o))
        if dlse is not None:
            dlse.data_ptr()  # raises for one that batches others, as do's above
        check_saved(q, k, v, o, lse, do, extent, offsets)
        saved, lse_order = (q, k, v, o, lse), merging.order_of_lse(lse)
        in_rows = [t if (lse_order if t is lse else t.stride(-1) == 1) else t.contiguous() for t in saved]
        if any(map(operator.is_not, in_rows, saved)):
            q, k, v, o, lse = in_rows
            return backward(do, dlse, q, k, v, o, lse, mask, softmax_scale, deterministic, score, extent, offsets, lead)
        tensors = {"do": do, "q": q, "k": k, "v": v, "o": o}
        plan, lasting = _new_backward(tensors, dlse, lse_order, mask, softmax_scale, deterministic, score, extent, lead)
        if lasting:
            _remember(BACKWARD_PLANS, key, plan)
    return plan(do, dlse, q, k, v, o, lse, *offsets)


def _new_backward(
    given: Mapping[str, torch.Tensor], dlse: torch.Tensor | None, lse: str, mask: Mask, softmax_scale: float,
    deterministic: bool, score: Score, extent: Extent, lead: int,
) -> Planned:  # fmt: skip
    """The plan of a backward of (batch, heads, seqlen, dim) tensors: do, q, k, v and o; ``lse``: how its rows lie; ``lead``: of
    dq."""
    posed: Callable[..., Problem] = partial(passes.describe, mask=mask, softmax_scale=softmax_scale, score=score)
    problem = posed(**given, extent=extent)
    if problem.is_empty:
        return Zeros(), True
    gpu, names, tensors = gpu_of(given["q"].get_device()), tuple[str, ...](), dict(given)
    if rows := unseen.filled_in(problem, gpu, BACKWARD):
        others = partial(
            backward, mask=mask, softmax_scale=softmax_scale, deterministic=deterministic, score=score, lead=rows
        )
        return unseen.Backward(rows, others), True
    chooser = Chooser(problem, gpu)
    found = () if problem.tma else copies.unaddressable(tensors)
    if found and (ours := with_copies(chooser, found, BACKWARD, deterministic)):
        names = found
        tensors = {name: copies.like(one) if name in names else one for name, one in tensors.items()}
        chooser = ours.of(posed(**tensors, extent=extent))

    def planned(chooser: Chooser, order: str) -> Planned:
        asked, ordered = merging.as_read({"dlse": dlse, **tensors}, lse, order)
        copied = {**dict.fromkeys(names, copies.copied), **ordered}
        if order:  # offsets may need 64 bits
            chooser = chooser.of(posed(**{name: asked[name] for name in tensors}, mask=chooser.problem.mask))

        def make(strategy: str, choices: Mapping[str, Choice], may_split: bool = True) -> Any:
            call = {"softmax_scale": softmax_scale, "lead": merging.lead_as_one(problem, lead, order), **asked}
            plan = backward_plans.backward_plan(chooser.problem, strategy, choices, gpu, call, may_split)
            if order:
                merging.giving_backward(plan, tensors["q"], order, lead)
            return copies.copying(plan, ("do", "dlse", "q", "k", "v", "o", "lse"), copied)

        whole = partial(make, may_split=False)
        return _planned(
            lambda: _backward_plan(chooser, deterministic, make, rows_alone=bool(order)),
            lambda: _backward_plan(chooser, deterministic, whole, True, bool(order)),
            None if order else lambda miss: _plan_in_capture(miss, chooser, STRATEGIES[SPLIT], partial(whole, SPLIT)),
        )

    return _of_one_head_or_all(chooser, BACKWARD, merging.merging(chooser, BACKWARD, deterministic, lse, lead), planned)
