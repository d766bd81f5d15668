"""From a call to a loaded kernel: memo, lookup ladder, limits re-checked, launch.

The hit path is one dictionary look-up: no lock, no file, no compile, no collective. A miss reads the cache layers (once per
process), walks the lookup ladder of :mod:`fa2tune.rows.lookup`, and loads the kernel from a trusted file of binaries
(:mod:`fa2tune.compiling.binaries`), or compiles it. Where no row serves, the documented default config does (``default`` in
the kernel's search space), and a log line says so once per key.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch

from fa2tune import gpus, uncollected
from fa2tune.calling import arguments, dense, group_schedule, schedule
from fa2tune.calling.defaults import default_config, portable_default, specialized_default
from fa2tune.calling.empty import NoKeys, is_empty
from fa2tune.calling.refusals import is_refusal, without_frames
from fa2tune.calling.saved import check_saved, of_offsets
from fa2tune.calling.settings import CAPTURE_MISS, DEFAULT, ERROR
from fa2tune.compiling import binaries, limits, measured_code
from fa2tune.compiling.compiler import uses_descriptors
from fa2tune.compiling.registry import misfit, variant_of
from fa2tune.gpus import Gpu
from fa2tune.launching.cuda import forget_packed, relaxed_capture
from fa2tune.launching.launch import CaptureMiss
from fa2tune.launching.passes import (
    BackwardPlan,
    ForwardPlan,
    describe,
    empty_ordered,
    float32_precision,
    lse_of,
)
from fa2tune.rows import lookup, reader
from fa2tune.rows.row import PREDICTED, Row, backward_implementation, over_portable
from fa2tune.spec.extent import WHOLE, Extent
from fa2tune.spec.key import TuningKey
from fa2tune.spec.mask import Mask, Window
from fa2tune.spec.problem import BACKWARD, FUSED, SPLIT, STRATEGIES, Config, Problem
from fa2tune.spec.score import Score, score_of
from fa2tune.spec.variant import WARP_SPECIALIZED, implementation_of

log = logging.getLogger("fa2tune")

#: How calls were served: step of the lookup ladder -> plans made. For monitoring; ``fa2tune.explain`` says it for one call.
SERVED: Counter[str] = Counter()

#: Plans by everything that selects them. Bounded: a full memo is emptied, and the plans in use come back one by one.
FORWARD_PLANS: dict[tuple[Any, ...], Any] = {}
BACKWARD_PLANS: dict[tuple[Any, ...], Any] = {}
PLANS_KEPT = 4096

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Choice:
    """A config and where it came from."""

    config: Config
    step: str  #: "exact, measured", ..., or "default"
    answer: lookup.Answer | None = None  #: None: the default
    #: row of another length bucket whose config suits this batch, heads and lengths better; None: the answer's own
    scheduled: Row | None = None

    @property
    def measured(self) -> str:
        """The version of Triton whose machine code the row was measured with; "": the default."""
        row = self.scheduled or (self.answer and self.answer.row)
        return row.triton if row else ""

    @property
    def lead(self) -> float | None:
        """How many times as fast as the portable winner of its key; None: it is that, or the default."""
        return over_portable(self.answer.row, self.answer.layer.rows) if self.answer else None


@cache
def layers() -> list[reader.Layer]:
    """The cache layers, read once per process."""
    return reader.layers()


def reload() -> None:
    """Forget every plan, every layer and every file of binaries, so that the next call reads the files anew. Kernels that are
    loaded stay loaded."""
    layers.cache_clear()
    binaries.forget()
    FORWARD_PLANS.clear()
    BACKWARD_PLANS.clear()
    forget_packed()


@cache
def toolchain() -> lookup.Toolchain:
    """What is running here, for the life of this process."""
    return measured_code.toolchain()


@cache
def gpu_of(device_index: int) -> Gpu:
    """The GPU at a CUDA index; -1 (the interpreter) gives one of the lowest architecture. RuntimeError: too old for every
    kernel."""
    if device_index < 0:
        return gpus.named("a100")
    properties = torch.cuda.get_device_properties(device_index)
    arch = 10 * properties.major + properties.minor
    gpu = gpus.identify(properties.name, arch, properties.multi_processor_count)
    if arch < gpus.MIN_ARCH:
        raise RuntimeError(
            f"attention: cuda:{device_index} ({properties.name}) has compute capability {gpu.capability}, "
            f"{gpus.MIN_ARCH / 10} or higher is needed"
        )
    return gpu


def key_of(problem: Problem, kernel: str, gpu: Gpu) -> TuningKey:
    """The key of a row that fits this problem exactly."""
    return TuningKey(
        gpu.name, gpu.sm_count, gpu.arch, kernel, problem.dtype, problem.precision, problem.head_dim, problem.head_dim_v,
        problem.mask.row_mask, problem.bucket,
    )  # fmt: skip


def _fitted(problem: Problem, row: Row) -> Row:
    """A kernel's row with every dimension of the search, as for the problem's head dims and (packed sequences) forms."""
    variant = variant_of(row.key.kernel, row.config)
    config = variant.space.completed(row.config)
    alike = lookup.same_columns(row.key, problem.head_dim, problem.head_dim_v)
    config = config if alike else dict(variant.fitted(problem.specialization, config))
    return replace(row, config=dict(variant.suited(problem, config)) if problem.extent.ragged else config)


def refusal(
    problem: Problem, gpu: Gpu, deterministic: bool = True, served: Callable[[str, bool], bool] = lambda *asked: True
) -> Callable[[Row], str | None]:
    """Why a row cannot serve this problem on this GPU, or None. Limits are checked again for every row.

    ``served(kernel, specialized)``: whether a row of that kernel, which a whole backward runs, can serve."""

    def of_strategy(row: Row) -> str | None:
        if row.strategy not in STRATEGIES:
            return f"the strategy {row.strategy!r:.40} is not known to this version"
        if row.specialized != (WARP_SPECIALIZED in row.config.values()):
            kind = "a" if row.specialized else "no"
            return f"it is filed as {row.filed_as}, with {kind} warp-specialised kernel, which contradicts its config"
        if row.implementation != backward_implementation(row.specialized):
            return f"the implementation {row.implementation!r:.40} is not known to this version"
        if row.barred:
            return row.barred
        if row.strategy == FUSED and deterministic:
            return "it sums dQ in no fixed order, and deterministic=True asks for one"
        for kernel in STRATEGIES[row.strategy]:
            if row.config.get(kernel) == WARP_SPECIALIZED and not served(kernel, True):
                return f"no row of its warp-specialised {kernel} can serve this problem"
        return None

    def of_kernel(row: Row) -> str | None:
        if (odd := misfit(row.key.kernel, row.implementation, row.config)) is not None:
            return odd
        variant = variant_of(row.key.kernel, row.config)
        config = _fitted(problem, row).config
        if uses_descriptors(variant, config) and not problem.tma:
            return "a descriptor cannot address these tensors: base or strides are not multiples of 16 bytes, or a row's is 0"
        refused = limits.before_compile(variant, problem.specialization, config, gpu)
        return refused.why if refused else None

    return lambda row: of_strategy(row) if row.key.kernel == BACKWARD else of_kernel(row)


def kind_refusal(problem: Problem, gpu: Gpu, specialized: bool | None) -> Callable[[Row], str | None]:
    """``refusal`` of a kernel's rows; ``specialized``: where only warp-specialised ones, or only the others, are asked for."""
    acceptable = refusal(problem, gpu)

    def why(row: Row) -> str | None:
        if specialized not in (None, row.specialized):
            return f"the whole backward was measured with {'a' if specialized else 'no'} warp-specialised kernel"
        # measurements stand behind that default (see fa2tune.calling.defaults), none behind the prediction
        if row.obtained == PREDICTED and not row.specialized and specialized_default(row.key.kernel, problem, gpu):
            return (
                "it was only predicted, for a portable kernel: the warp-specialised default was measured to be faster"
            )
        return acceptable(row)

    return why


def _found(
    problem: Problem, kernel: str, gpu: Gpu, specialized: bool | None, among: Sequence[reader.Layer] | None = None,
    node: lookup.Toolchain | None = None,
) -> lookup.Answer | None:  # fmt: skip
    """The best row of the ladder for one kernel."""
    why_not, found = kind_refusal(problem, gpu, specialized), layers() if among is None else among
    return lookup.find(key_of(problem, kernel, gpu), gpu.silicon, found, why_not, node or toolchain())


def choose(
    problem: Problem,
    kernel: str,
    gpu: Gpu,
    specialized: bool | None = None,
    among: Sequence[reader.Layer] | None = None,
    node: lookup.Toolchain | None = None,
) -> Choice:
    """The config for one kernel of this problem: the best row of the ladder, else the default. ``specialized``: whether it
    is to be warp-specialised, where such a row can serve; None: as the rows have it. ``among``: None for the layers of this
    process; ``node``: what is running where the call will be, None for here."""
    kinds = (True, False) if specialized else (specialized,)
    answer = next(filter(None, (_found(problem, kernel, gpu, kind, among, node) for kind in kinds)), None)
    if answer is None:
        _log_once(
            f"no tuned row for {kernel} on {gpu.name} (head dim {problem.head_dim}, {problem.dtype}): default config"
        )
        return Choice(default_config(kernel, problem, gpu), "default")
    row, config = suited(problem, gpu, answer, node or toolchain())
    return Choice(config, answer.step, answer, None if row is answer.row else row)


def suited(problem: Problem, gpu: Gpu, answer: lookup.Answer, node: lookup.Toolchain) -> tuple[Row, Config]:
    """The config for this batch, these heads and lengths, and the row it comes from: the answer's, or of another length."""
    variant = variant_of(answer.row.key.kernel, answer.row.config)
    by_work = not problem.mask.measured and answer.row.specialized
    if not schedule.covers(variant) and not by_work:
        return answer.row, variant.suited(problem, _fitted(problem, answer.row).config)
    acceptable = refusal(problem, gpu)
    others = [row for row in lookup.of_other_lengths(answer, node) if acceptable(row) is None]
    if not schedule.covers(variant):
        row = schedule.of_like_work(problem, answer.row, others)
        return row, variant.suited(problem, _fitted(problem, row).config)
    served, *others = (_fitted(problem, row) for row in (answer.row, *others))
    row, config = schedule.best(problem, served, others, gpu.sm_count)
    return answer.row if row is served else row, config


def strategy_refusal(
    problem: Problem, gpu: Gpu, deterministic: bool, among: Sequence[reader.Layer] | None = None,
    node: lookup.Toolchain | None = None,
) -> Callable[[Row], str | None]:  # fmt: skip
    """Why a row for a whole backward cannot serve this problem, or None. ``among``, ``node``: as ``choose`` has them."""

    def served(kernel: str, specialized: bool) -> bool:
        return _found(problem, kernel, gpu, specialized, among, node) is not None

    return refusal(problem, gpu, deterministic, served)


def kinds_of(row: Row) -> dict[str, bool]:
    """Of a whole backward's row: kernel -> whether it is warp-specialised."""
    return {kernel: implementation == WARP_SPECIALIZED for kernel, implementation in row.config.items()}


def strategy_of(
    problem: Problem, gpu: Gpu, deterministic: bool, among: Sequence[reader.Layer] | None = None,
    node: lookup.Toolchain | None = None,
) -> tuple[str, Mapping[str, bool]]:  # fmt: skip
    """(strategy, kernel -> whether it is to be warp-specialised), by the row of the whole backward; the strategy is "split" or
    "fused", split where there is no row (it is deterministic), and a kernel that the row does not name chooses by itself."""
    key = key_of(problem, BACKWARD, gpu)
    acceptable = strategy_refusal(problem, gpu, deterministic, among, node)
    answer = lookup.find(key, gpu.silicon, layers() if among is None else among, acceptable, node or toolchain())
    if answer is None:
        return SPLIT, {}
    return answer.row.strategy, kinds_of(answer.row)


def copied(
    problem: Problem, gpu: Gpu, names: Sequence[str], pass_: str, deterministic: bool = False,
    among: Sequence[reader.Layer] | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Which of ``names``, the tensors that TMA cannot address, are copied before a pass ("fwd", "bwd"): all, where that is
    expected to be faster and every kernel is then warp-specialised; else none. ``among``: as ``choose`` has it."""
    if problem.tma or problem.extent.ragged or not names or not dense.pays(problem, gpu, pass_, names):
        return ()
    ours, kinds = dense.addressable(problem), dict[str, bool | None]({"fwd": None})
    if pass_ == BACKWARD:
        strategy, known = strategy_of(ours, gpu, deterministic, among)
        kinds = {kernel: known.get(kernel) for kernel in STRATEGIES[strategy]}
    chosen = (choose(ours, kernel, gpu, kind, among) for kernel, kind in kinds.items())
    return tuple(names) if all(implementation_of(one.config) == WARP_SPECIALIZED for one in chosen) else ()


@cache
def _log_once(message: str) -> None:
    log.warning("fa2tune: %s", message)


Plan = TypeVar("Plan")
#: (kernel -> config, kernel -> ``Choice.measured``) -> plan
Make = Callable[[Mapping[str, Config], Mapping[str, str]], Plan]


def _plan(problem: Problem, kinds: Mapping[str, bool | None], device_index: int, make: Make[Plan]) -> Plan:
    """Choose a config per kernel and make the plan. Where a row's config does not compile or load here, the best portable row
    is tried, then the default configs, and the log says so. ``kinds``: kernel -> see ``choose``. CaptureMiss: a kernel is not
    loaded yet, and a CUDA graph is being captured."""
    gpu = gpu_of(device_index)
    ladder: tuple[tuple[str, Callable[[str], Choice]], ...] = (
        ("", lambda kernel: choose(problem, kernel, gpu, kinds[kernel])),
        ("the best portable row", lambda kernel: choose(problem, kernel, gpu, False)),
        ("default config", lambda kernel: Choice(default_config(kernel, problem, gpu), "default")),
        ("portable default", lambda kernel: Choice(portable_default(kernel, problem, gpu.arch), "default")),
    )
    failure: BaseException | None = None
    tried: list[Mapping[str, Choice]] = []
    for name, chosen in ladder:
        choices = {kernel: chosen(kernel) for kernel in kinds}
        if choices in tried:
            continue
        tried.append(choices)
        if failure:
            _log_once(f"the first choice for {', '.join(kinds)} failed on {gpu.name} ({failure}); next: {name}")
        try:
            measured = {kernel: choice.measured for kernel, choice in choices.items()}
            plan = make({kernel: choice.config for kernel, choice in choices.items()}, measured)
        except Exception as error:
            if not is_refusal(error):
                raise
            failure = without_frames(error)
            continue
        SERVED.update(choice.step for choice in choices.values())
        return plan
    assert failure is not None
    try:
        raise failure
    finally:
        del failure  # else this frame and the error would hold each other


def _plan_in_capture(
    miss: CaptureMiss, problem: Problem, kernels: Sequence[str], device_index: int,
    make: Make[Plan],
) -> Plan:  # fmt: skip
    """What FA2TUNE_CAPTURE_MISS asks for where a kernel is not loaded: an error, or the documented default configs, loaded
    during the capture. Not remembered: calls after the capture choose again."""
    setting = os.environ.get(CAPTURE_MISS, ERROR)
    if setting == ERROR:
        raise RuntimeError(
            f"attention: {miss} is not loaded yet for a call like this, and a CUDA graph is being captured: make one warm-up "
            f"call with these shapes before capturing, or set {CAPTURE_MISS}={DEFAULT} to take the default config"
        ) from None
    if setting != DEFAULT:
        raise ValueError(f"{CAPTURE_MISS}: got {setting!r:.40}, allowed are {ERROR} and {DEFAULT}") from None
    gpu = gpu_of(device_index)
    _log_once(f"{', '.join(kernels)} first called while a CUDA graph is captured: default config")
    with relaxed_capture():
        try:
            plan = make({kernel: default_config(kernel, problem, gpu) for kernel in kernels}, {})
        except Exception as error:
            if not is_refusal(error):
                raise
            plan = make({kernel: portable_default(kernel, problem, gpu.arch) for kernel in kernels}, {})
    SERVED["default, in a capture"] += len(kernels)
    return plan


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
    softcap: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Everything that an argument check, a config or a launch depends on."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.get_device(),
        k.get_device(), v.get_device(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15, causal, softmax_scale, layout,
        float32_precision() if q.dtype is torch.float32 else "", window if window is None else _exact(window), mask,
        softcap, type(softcap),
    )  # fmt: skip


def forward_plan(
    key: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softmax_scale: float,
    score: Score, extent: Extent = WHOLE,
) -> Any:  # fmt: skip
    """Make and remember the plan of a forward; q, k, v are (batch, heads, seqlen, dim), of a ragged extent batch is 1."""
    problem = describe(q, k, v, mask, softmax_scale, score, extent)
    plan: Any
    if is_empty(problem):
        plan = NoKeys(problem, softmax_scale)
        _remember(FORWARD_PLANS, key, plan)
        return plan
    device_index, given = q.get_device(), {"q": q, "k": k, "v": v}
    names = () if problem.tma else copied(problem, gpu_of(device_index), dense.unaddressable(given), "fwd")
    if names:
        q, k, v = (dense.like(one) if name in names else one for name, one in given.items())
        problem = describe(q, k, v, mask, softmax_scale, score)

    def make(configs: Mapping[str, Config], measured: Mapping[str, str]) -> Any:
        plan = ForwardPlan(problem, q, k, v, softmax_scale, configs["fwd"], measured.get("fwd", ""))
        return dense.copying(plan, tuple(given), names)

    try:
        with uncollected():
            plan = _plan(problem, {"fwd": None}, device_index, make)
    except CaptureMiss as miss:
        return _plan_in_capture(miss, problem, ("fwd",), device_index, make)
    _remember(FORWARD_PLANS, key, plan)
    return plan


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softmax_scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of (batch, heads, seqlen, dim) tensors that have been checked; lse of ``passes.lse_shape``."""
    key = forward_key(q, k, v, False, softmax_scale, "bhsd", None, mask, softcap)
    plan = FORWARD_PLANS.get(key) or forward_plan(key, q, k, v, mask, softmax_scale, score_of(softcap))
    return plan(q, k, v)


def backward(
    do: torch.Tensor | None, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    o: torch.Tensor, lse: torch.Tensor, mask: Mask, softmax_scale: float, deterministic: bool, score: Score,
    extent: Extent = WHOLE, offsets: tuple[torch.Tensor, ...] = (),
) -> Tensors3:  # fmt: skip
    """(dq, dk, dv). do has o's shape, dlse lse's, either may be None, and their strides are free. ``offsets``: cu_seqlens_q and
    cu_seqlens_k, if the extent is ragged."""
    if dlse is not None:
        dlse = lse_of(dlse)
        if max(dlse.stride()) >= 1 << 31:  # its strides are 32-bit arguments of the kernels
            dlse = dlse.contiguous()
    if do is None:
        do = torch.zeros_like(o)
    steps, dtype = do.stride(), q.dtype
    if steps[3] != 1:  # an expanded gradient, as .sum().backward() sends: the kernels read rows
        do = do.contiguous()
        steps = do.stride()
    key = (  # nothing of it is taken from the forward: hooks on saved tensors may change all of it
        q.shape, k.shape, v.shape, o.shape, lse.shape, q.stride(), k.stride(), v.stride(), o.stride(), lse.stride(), steps,
        None if dlse is None else dlse.stride(), dtype, k.dtype, v.dtype, o.dtype, lse.dtype, do.dtype,
        q.get_device(), k.get_device(), v.get_device(), o.get_device(), lse.get_device(), offsets and of_offsets(offsets),
        (q.data_ptr() | k.data_ptr() | v.data_ptr() | o.data_ptr() | do.data_ptr()) & 15,
        mask.name, mask.values, score.name, score.values, softmax_scale, deterministic, extent,
        float32_precision() if dtype is torch.float32 else "",
    )  # fmt: skip
    plan = BACKWARD_PLANS.get(key)
    if plan is None:
        arguments.check_among(
            "deterministic", deterministic, (True, False)
        )  # a forward from the memo has not checked it
        if dlse is not None:
            dlse.data_ptr()  # raises for one that batches others, as do's above
        check_saved(q, k, v, o, lse, do, extent, offsets)
        saved = q, k, v, o, lse
        in_rows = tuple(t if t.stride(-1) == 1 and t is not lse else t.contiguous() for t in saved)
        if any(new is not old for new, old in zip(in_rows, saved, strict=True)):
            q, k, v, o, lse = in_rows
            return backward(do, dlse, q, k, v, o, lse, mask, softmax_scale, deterministic, score, extent, offsets)
        problem = describe(q, k, v, mask, softmax_scale, score, extent, o=o, do=do)
        if is_empty(problem):
            dq, dk, dv = (empty_ordered(t, t.shape[3]).zero_() for t in (q, k, v))
            return dq, dk, dv
        device_index = q.get_device()
        tensors, names = {"do": do, "q": q, "k": k, "v": v, "o": o}, tuple[str, ...]()
        if not problem.tma:
            found = dense.unaddressable(tensors)
            names = copied(problem, gpu_of(device_index), found, BACKWARD, deterministic)
        if names:
            tensors = {name: dense.like(one) if name in names else one for name, one in tensors.items()}
            new_q, new_k, new_v, new_o, new_do = (tensors[name] for name in ("q", "k", "v", "o", "do"))
            problem = describe(new_q, new_k, new_v, mask, softmax_scale, score, extent, o=new_o, do=new_do)

        def on(strategy: str) -> Make[Any]:
            def make(configs: Mapping[str, Config], measured: Mapping[str, str]) -> Any:
                parts = group_schedule.parts(problem, configs, gpu_of(device_index))
                plan = BackwardPlan(
                    problem, dlse=dlse, softmax_scale=softmax_scale, strategy=strategy, configs=configs, measured=measured,
                    parts=parts, **tensors,
                )  # fmt: skip
                return dense.copying(plan, ("do", "dlse", "q", "k", "v", "o", "lse"), names)

            return make

        try:
            with uncollected():
                strategy, kinds = strategy_of(problem, gpu_of(device_index), deterministic)
                asked = {kernel: kinds.get(kernel) for kernel in STRATEGIES[strategy]}
                plan = _plan(problem, asked, device_index, on(strategy))
        except CaptureMiss as miss:
            plan = _plan_in_capture(miss, problem, STRATEGIES[SPLIT], device_index, on(SPLIT))
            return plan(do, dlse, q, k, v, o, lse, *offsets)
        _remember(BACKWARD_PLANS, key, plan)
    return plan(do, dlse, q, k, v, o, lse, *offsets)
