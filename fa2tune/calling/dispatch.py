"""From a call to a loaded kernel: memo, lookup ladder, limits re-checked, launch.

The hit path is one dictionary look-up: no lock, no file, no compile, no collective. A miss reads the cache layers (once per
process), walks the ladder of :mod:`fa2tune.rows.lookup`, and loads the kernel out of a trusted file of binaries
(:mod:`fa2tune.compiling.binaries`), or compiles it. Where no row serves, the kernel's documented default
config does (``default`` in its search space), and a log line says so once per key.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from fa2tune import gpus, uncollected
from fa2tune.calling.defaults import default_config, portable_default
from fa2tune.compiling import binaries, fingerprint, limits
from fa2tune.compiling.compiler import CompileError, misfit, uses_descriptors, variant_of
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
    lse_shape,
)
from fa2tune.problem import BACKWARD, FUSED, ROADS, SPLIT, Config, Problem, TuningKey
from fa2tune.rows import lookup, reader
from fa2tune.rows.row import Row, over_portable
from fa2tune.variant import WARP_SPECIALIZED, way_of

log = logging.getLogger("fa2tune")

#: How calls were served: ladder rung -> plans made. For monitoring; ``fa2tune explain`` tells the same for one problem.
SERVED: Counter[str] = Counter()

#: Plans by everything that selects them. Bounded: a full memo is emptied, and the plans in use come back one by one.
FORWARD_PLANS: dict[tuple[Any, ...], Any] = {}
BACKWARD_PLANS: dict[tuple[Any, ...], Any] = {}
PLANS_KEPT = 4096

#: Environment variable: what a call does that finds a kernel not loaded while a CUDA graph is captured, see
#: ``_plan_in_capture``.
CAPTURE_MISS = "FA2TUNE_CAPTURE_MISS"
ERROR, DEFAULT = "error", "default"

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Choice:
    """A config and where it came from."""

    config: Config
    rung: str  #: "exact, measured", ..., or "default"
    answer: lookup.Answer | None = None  #: None: the default

    @property
    def lead(self) -> float | None:
        """How many times as fast as the portable winner of its key; None: it is that, or the default."""
        return over_portable(self.answer.row, self.answer.layer.rows) if self.answer else None


@cache
def layers() -> list[reader.Layer]:
    """The cache layers, read once per process."""
    return reader.layers()


def reload() -> None:
    """Forget every plan, every layer and every file of binaries: files changed under a running process are read at the next
    call. Kernels that are loaded stay loaded."""
    layers.cache_clear()
    binaries.forget()
    FORWARD_PLANS.clear()
    BACKWARD_PLANS.clear()
    forget_packed()


@cache
def toolchain() -> lookup.Toolchain:
    """What is running here, for the life of this process."""
    return fingerprint.toolchain()


@cache
def gpu_of(device_index: int) -> Gpu:
    """The GPU at a CUDA index; -1 (the interpreter) stands for the lowest architecture there is."""
    if device_index < 0:
        return gpus.named("a100")
    properties = torch.cuda.get_device_properties(device_index)
    arch = 10 * properties.major + properties.minor
    return gpus.identify(properties.name, arch, properties.multi_processor_count)


def key_of(problem: Problem, kernel: str, gpu: Gpu) -> TuningKey:
    """What a row that fits this problem exactly would be filed under."""
    return TuningKey(
        gpu.name, gpu.sm_count, gpu.arch, kernel, problem.dtype, problem.precision, problem.head_dim, problem.head_dim_v,
        problem.causal, problem.bucket,
    )  # fmt: skip


def refusal(
    problem: Problem, gpu: Gpu, deterministic: bool = True, served: Callable[[str, bool], bool] = lambda *asked: True
) -> Callable[[Row], str | None]:
    """Why a row cannot serve this problem on this GPU, or None: its limits are re-checked whatever rung it came from.

    ``served(kernel, specialized)``: whether there is a row of a kernel on the road of a whole backward that can."""

    def of_road(row: Row) -> str | None:
        if row.road not in ROADS:
            return f"a road called {row.road!r:.40} is not known here"
        if row.specialized != (WARP_SPECIALIZED in row.config.values()):
            kind = "a" if row.specialized else "no"
            return f"it is filed as {row.variant}, of {kind} warp-specialised kernel, and its config says otherwise"
        if row.barred:
            return row.barred
        if row.road == FUSED and deterministic:
            return "sums dQ in no fixed order, and deterministic=True asks for one"
        for kernel in ROADS[row.road]:
            if row.config.get(kernel) == WARP_SPECIALIZED and not served(kernel, True):
                return f"no row of its warp-specialised {kernel} can serve this problem"
        return None

    def of_kernel(row: Row) -> str | None:
        if (odd := misfit(row.key.kernel, row.variant, row.config)) is not None:
            return odd
        if uses_descriptors(row.config) and not problem.tma:
            return "a descriptor cannot address these tensors: base or strides are not multiples of 16 bytes, or a stride is 0"
        refused = limits.before_compile(variant_of(row.key.kernel, row.config), problem.specialization, row.config, gpu)
        return refused.why if refused else None

    return lambda row: of_road(row) if row.key.kernel == BACKWARD else of_kernel(row)


def kind_refusal(problem: Problem, gpu: Gpu, specialized: bool | None) -> Callable[[Row], str | None]:
    """``refusal`` of a kernel's rows; ``specialized``: where only warp-specialised ones, or only the others, are asked for."""
    acceptable = refusal(problem, gpu)

    def why(row: Row) -> str | None:
        if specialized not in (None, row.specialized):
            return f"the whole backward was measured with {'a' if specialized else 'no'} warp-specialised kernel here"
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
    config = answer.row.config
    return Choice(variant_of(kernel, config).suited(problem, config), answer.rung, answer)


def road_refusal(
    problem: Problem, gpu: Gpu, deterministic: bool, among: Sequence[reader.Layer] | None = None,
    node: lookup.Toolchain | None = None,
) -> Callable[[Row], str | None]:  # fmt: skip
    """Why a row for a whole backward cannot serve this problem, or None. ``among``, ``node``: as ``choose`` has them."""

    def served(kernel: str, specialized: bool) -> bool:
        return _found(problem, kernel, gpu, specialized, among, node) is not None

    return refusal(problem, gpu, deterministic, served)


def kinds_of(row: Row) -> dict[str, bool]:
    """Of a whole backward's row: kernel -> whether it is warp-specialised."""
    return {kernel: way == WARP_SPECIALIZED for kernel, way in row.config.items()}


def road_of(
    problem: Problem, gpu: Gpu, deterministic: bool, among: Sequence[reader.Layer] | None = None,
    node: lookup.Toolchain | None = None,
) -> tuple[str, Mapping[str, bool]]:  # fmt: skip
    """(road, kernel -> whether it is to be warp-specialised), by the row for the whole backward; the road is "split" or
    "fused", split where there is no row (it is deterministic), and a kernel that the row does not name chooses by itself."""
    key = key_of(problem, BACKWARD, gpu)
    acceptable = road_refusal(problem, gpu, deterministic, among, node)
    answer = lookup.find(key, gpu.silicon, layers() if among is None else among, acceptable, node or toolchain())
    if answer is None:
        return SPLIT, {}
    return answer.row.road, kinds_of(answer.row)


def served_by(problem: Problem, gpu: Gpu, backward: bool) -> dict[str, str]:
    """Kernel -> the way it goes for this problem, and how far a warp-specialised one is ahead of the portable winner."""
    kinds: Mapping[str, bool | None] = {"fwd": None}
    if backward:
        road, known = road_of(problem, gpu, False)
        kinds = {kernel: known.get(kernel) for kernel in ROADS[road]}
    chosen = {kernel: choose(problem, kernel, gpu, kind) for kernel, kind in kinds.items()}
    return {
        kernel: way_of(choice.config) + ("" if choice.lead is None else f" ({choice.lead:.2f} x portable)")
        for kernel, choice in chosen.items()
    }


@cache
def _log_once(message: str) -> None:
    log.warning("fa2tune: %s", message)


Plan = TypeVar("Plan")


def _is_refusal(error: Exception) -> bool:
    """Whether a config does not compile or load here. Triton, whose OutOfResources it may be, need not be imported."""
    return isinstance(error, CompileError) or type(error).__name__ == "OutOfResources"


def _without_frames(error: BaseException) -> BaseException:
    """The same, and what it came from, without tracebacks. A frame holds its callers' frames, and those hold tensors: where
    one of them keeps the error, too, nothing of it goes before the garbage collector comes by."""
    error.__traceback__ = None
    for link in (error.__cause__, error.__context__):
        if link is not None and link.__traceback__ is not None:
            _without_frames(link)
    return error


def _plan(
    problem: Problem, kinds: Mapping[str, bool | None], device_index: int, make: Callable[[Mapping[str, Config]], Plan]
) -> Plan:
    """Choose a config per kernel and make the plan. A row whose config does not compile or load here gives way to the best
    portable one, that to the defaults, and the log says so. ``kinds``: kernel -> see ``choose``. CaptureMiss: a kernel is
    not loaded yet, and must not be now."""
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
            _log_once(f"the config of {', '.join(kinds)} that came first failed on {gpu.name} ({failure}): {name}")
        try:
            plan = make({kernel: choice.config for kernel, choice in choices.items()})
        except Exception as error:
            if not _is_refusal(error):
                raise
            failure = _without_frames(error)
            continue
        SERVED.update(choice.rung for choice in choices.values())
        return plan
    assert failure is not None
    try:
        raise failure
    finally:
        del failure  # else this frame and the error that tells of it would hold each other


def _plan_in_capture(
    miss: CaptureMiss, problem: Problem, kernels: Sequence[str], device_index: int,
    make: Callable[[Mapping[str, Config]], Plan],
) -> Plan:  # fmt: skip
    """What FA2TUNE_CAPTURE_MISS asks for where a kernel is not loaded: an error, or the documented default configs, loaded in
    the midst of the capture. Not remembered: after it, calls are served as ever."""
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
            plan = make({kernel: default_config(kernel, problem, gpu) for kernel in kernels})
        except Exception as error:
            if not _is_refusal(error):
                raise
            plan = make({kernel: portable_default(kernel, problem, gpu.arch) for kernel in kernels})
    SERVED["default, in a capture"] += len(kernels)
    return plan


def _remember(memo: dict[tuple[Any, ...], Any], key: tuple[Any, ...], plan: Any) -> None:
    if len(memo) >= PLANS_KEPT:
        memo.clear()
    memo[key] = plan


class _NoKeys:
    """The forward without a single (query, key) pair: zeros, and -inf for lse; and its backward, all zero."""

    def __init__(self, problem: Problem, softmax_scale: float) -> None:
        self.causal, self.softmax_scale = problem.causal, softmax_scale

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lse = q.new_zeros(lse_shape(q), dtype=torch.float32)
        lse_of(lse).fill_(float("-inf"))
        return empty_ordered(q, v.shape[3]).zero_(), lse


def _is_empty(problem: Problem) -> bool:
    return 0 in (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)


def check_among(name: str, value: Any, allowed: tuple[bool | None, ...]) -> None:
    """TypeError: no truth value. One that follows from a length may not be known yet, under torch.compile. The numbers that
    equal one pass, numpy's truth values too, as they do where a plan is remembered."""
    if isinstance(value, (bool, torch.SymBool)):
        return
    if not isinstance(value, Hashable) or value not in frozenset(allowed):
        raise TypeError(f"{name}: got {value!r:.80}, allowed are {', '.join(map(str, allowed))}")


def forward_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None, layout: str
) -> tuple[Any, ...]:
    """Everything that an argument check, a config or a launch depends on."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.get_device(),
        k.get_device(), v.get_device(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15, causal, softmax_scale, layout,
        float32_precision() if q.dtype is torch.float32 else "",
    )  # fmt: skip


def forward_plan(
    key: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float
) -> Any:
    """Make and remember the plan of a forward; q, k, v are (batch, heads, seqlen, dim)."""
    problem = describe(q, k, v, causal, softmax_scale)
    plan: Any
    if _is_empty(problem):
        plan = _NoKeys(problem, softmax_scale)
    else:

        def make(configs: Mapping[str, Config]) -> ForwardPlan:
            return ForwardPlan(problem, q, k, v, softmax_scale, configs["fwd"])

        try:
            with uncollected():
                plan = _plan(problem, {"fwd": None}, q.get_device(), make)
        except CaptureMiss as miss:
            return _plan_in_capture(miss, problem, ("fwd",), q.get_device(), make)
    _remember(FORWARD_PLANS, key, plan)
    return plan


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of (batch, heads, seqlen, dim) tensors that have been checked; lse of ``passes.lse_shape``."""
    key = forward_key(q, k, v, causal, softmax_scale, "bhsd")
    plan = FORWARD_PLANS.get(key) or forward_plan(key, q, k, v, causal, softmax_scale)
    return plan(q, k, v)


def _check_saved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor
) -> None:
    """That what the forward saved has come back as it was, whatever hooks did to it. TypeError or ValueError names what has
    not."""
    keys, columns = k.shape[:3], v.shape[3]
    shapes = {"k": (*keys, q.shape[3]), "v": (*keys, columns)}
    shapes |= dict.fromkeys(("o", "the gradient of o"), (*q.shape[:3], columns))
    for name, tensor in (("k", k), ("v", v), ("o", o), ("the gradient of o", do)):
        if tensor.dtype is not q.dtype:
            raise TypeError(
                f"attention's backward: got {name} of dtype {tensor.dtype}, q has {q.dtype}; all must agree"
            )
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"attention's backward: got {name} of shape {tuple(tensor.shape)}, the forward had {shapes[name]}"
            )
    for name, tensor in (("k", k), ("v", v), ("o", o), ("lse", lse), ("the gradient of o", do)):
        if tensor.device != q.device:
            raise ValueError(f"attention's backward: got {name} on {tensor.device}, q is on {q.device}")
    if lse.dtype is not torch.float32 or tuple(lse.shape) != lse_shape(q):
        raise TypeError(
            f"attention's backward: got lse of dtype {lse.dtype}, shape {tuple(lse.shape)}; the forward of q of dtype "
            f"{q.dtype} saved torch.float32, {lse_shape(q)}"
        )


def backward(
    do: torch.Tensor | None, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    o: torch.Tensor, lse: torch.Tensor, causal: bool, softmax_scale: float, deterministic: bool,
) -> Tensors3:  # fmt: skip
    """(dq, dk, dv). do has o's shape, dlse lse's, either may be None, and their strides are free."""
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
        q.get_device(), k.get_device(), v.get_device(), o.get_device(), lse.get_device(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr() | o.data_ptr() | do.data_ptr()) & 15,
        causal, softmax_scale, deterministic, float32_precision() if dtype is torch.float32 else "",
    )  # fmt: skip
    plan = BACKWARD_PLANS.get(key)
    if plan is None:
        check_among("deterministic", deterministic, (True, False))  # who had a plan of the forward was not asked there
        if dlse is not None:
            dlse.data_ptr()  # raises for one that batches others, as do's above
        _check_saved(q, k, v, o, lse, do)
        saved = q, k, v, o, lse
        dense = tuple(t if t.stride(-1) == 1 and t is not lse else t.contiguous() for t in saved)
        if any(new is not old for new, old in zip(dense, saved, strict=True)):
            q, k, v, o, lse = dense
            return backward(do, dlse, q, k, v, o, lse, causal, softmax_scale, deterministic)
        problem = describe(q, k, v, causal, softmax_scale, o=o, do=do)
        if _is_empty(problem):
            dq, dk, dv = (empty_ordered(t, t.shape[3]).zero_() for t in (q, k, v))
            return dq, dk, dv
        device_index, gradient = q.get_device(), do

        def on(road: str) -> Callable[[Mapping[str, Config]], BackwardPlan]:
            return lambda configs: BackwardPlan(problem, gradient, dlse, q, k, v, o, softmax_scale, road, configs)

        try:
            with uncollected():
                road, kinds = road_of(problem, gpu_of(device_index), deterministic)
                asked = {kernel: kinds.get(kernel) for kernel in ROADS[road]}
                plan = _plan(problem, asked, device_index, on(road))
        except CaptureMiss as miss:
            plan = _plan_in_capture(miss, problem, ROADS[SPLIT], device_index, on(SPLIT))
            return plan(do, dlse, q, k, v, o, lse)
        _remember(BACKWARD_PLANS, key, plan)
    return plan(do, dlse, q, k, v, o, lse)
