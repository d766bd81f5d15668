"""From a call to a loaded kernel: memo, lookup ladder, limits re-checked, launch.

The hit path is one dictionary look-up: no lock, no file, no compile, no collective. A miss reads the cache layers (once per
process), walks the ladder of :mod:`fa2tune.lookup`, and compiles. Where no row serves, the kernel's documented default
config does (``default`` in its search space), and a log line says so once per key.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch

from fa2tune import gpus, limits, lookup, reader
from fa2tune.compiler import CompileError, uses_descriptors, variant_named, variants
from fa2tune.fingerprint import backward_hash, driver_version, kernel_hash
from fa2tune.gpus import Gpu
from fa2tune.passes import (
    ROADS,
    SPLIT,
    BackwardPlan,
    ForwardPlan,
    describe,
    empty_ordered,
    float32_precision,
    lse_of,
    lse_shape,
)
from fa2tune.problem import BACKWARD, Config, Problem, TuningKey
from fa2tune.row import PREDICTED, Row

log = logging.getLogger("fa2tune")

#: How calls were served: ladder rung -> plans made. For monitoring; ``fa2tune explain`` tells the same for one problem.
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
    rung: str  #: "exact, measured", ..., or "default"


@cache
def layers() -> list[reader.Layer]:
    """The cache layers, read once per process."""
    return reader.layers()


def reload() -> None:
    """Forget every plan and every layer: a cache file changed under a running process is read at the next call."""
    layers.cache_clear()
    FORWARD_PLANS.clear()
    BACKWARD_PLANS.clear()


@cache
def toolchain() -> lookup.Toolchain:
    """What is running here: a row made with another Triton, driver or kernel source is stale."""
    import triton

    hashes = {name: kernel_hash(variant) for name, variant in variants().items()} | {BACKWARD: backward_hash()}
    return lookup.Toolchain(triton.__version__, driver_version(), hashes)


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


def refusal(problem: Problem, gpu: Gpu, deterministic: bool = True) -> Callable[[Row], str | None]:
    """Why a row cannot serve this problem on this GPU, or None: its limits are re-checked whatever rung it came from."""

    def why(row: Row) -> str | None:
        if row.key.kernel == BACKWARD:
            if row.variant == SPLIT:
                return None
            if row.obtained == PREDICTED:
                return "sums dQ in no fixed order, and only a measurement, not a prediction, makes up for that"
            return "sums dQ in no fixed order, and deterministic=True asks for one" if deterministic else None
        if uses_descriptors(row.config) and not problem.tma:
            return "a descriptor cannot address these tensors: base or strides are not multiples of 16 bytes, or a stride is 0"
        variant = variant_named(row.key.kernel)
        if set(row.config) != set(variant.space.dimensions):
            return f"its config does not name the dimensions of {variant.name}"
        refused = limits.before_compile(variant, problem.specialization, row.config, gpu)
        return refused.why if refused else None

    return why


def default_config(kernel: str, problem: Problem, arch: int) -> Config:
    """The documented default, with pointer loads where a descriptor cannot address the tensors."""
    spec = problem.specialization
    return variant_named(kernel).space.default(spec if problem.tma else replace(spec, aligned=False), arch)


def choose(problem: Problem, kernel: str, gpu: Gpu) -> Choice:
    """The config for one kernel of this problem: the best row of the ladder, else the default."""
    key = key_of(problem, kernel, gpu)
    answer = lookup.find(key, gpu.silicon, layers(), refusal(problem, gpu), toolchain())
    if answer is None:
        _log_once(
            f"no tuned row for {kernel} on {gpu.name} (head dim {problem.head_dim}, {problem.dtype}): default config"
        )
        return Choice(default_config(kernel, problem, gpu.arch), "default")
    return Choice(answer.row.config, answer.rung)


def road_of(problem: Problem, gpu: Gpu, deterministic: bool) -> str:
    """ "split" or "fused": by the row for the whole backward, split where there is none (it is deterministic)."""
    if deterministic:
        return SPLIT
    key = key_of(problem, BACKWARD, gpu)
    answer = lookup.find(key, gpu.silicon, layers(), refusal(problem, gpu, deterministic), toolchain())
    return answer.row.variant if answer else SPLIT


@cache
def _log_once(message: str) -> None:
    log.warning("fa2tune: %s", message)


Plan = TypeVar("Plan")


def _plan(
    problem: Problem, kernels: tuple[str, ...], device_index: int, make: Callable[[Mapping[str, Config]], Plan]
) -> Plan:
    """Choose a config per kernel and make the plan. A row whose config does not compile or load here gives way to the
    defaults, and the log says so."""
    if device_index >= 0 and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "attention: the first call for a problem compiles and loads its kernel, which a CUDA graph capture does not "
            "allow; make one warm-up call with these shapes before capturing"
        )
    gpu = gpu_of(device_index)
    choices = {kernel: choose(problem, kernel, gpu) for kernel in kernels}
    try:
        plan = make({kernel: choice.config for kernel, choice in choices.items()})
    except Exception as error:
        from triton.runtime.errors import OutOfResources

        if not isinstance(error, (CompileError, OutOfResources)) or all(c.rung == "default" for c in choices.values()):
            raise
        _log_once(f"the tuned config of {', '.join(kernels)} failed on {gpu.name} ({error}): default config")
        choices = {kernel: Choice(default_config(kernel, problem, gpu.arch), "default") for kernel in kernels}
        plan = make({kernel: choice.config for kernel, choice in choices.items()})
    SERVED.update(choice.rung for choice in choices.values())
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
        plan = _plan(
            problem,
            ("fwd",),
            q.get_device(),
            lambda configs: ForwardPlan(problem, q, k, v, softmax_scale, configs["fwd"]),
        )
    _remember(FORWARD_PLANS, key, plan)
    return plan


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of (batch, heads, seqlen, dim) tensors that have been checked; lse of ``passes.lse_shape``."""
    key = forward_key(q, k, v, causal, softmax_scale, "bhsd")
    plan = FORWARD_PLANS.get(key) or forward_plan(key, q, k, v, causal, softmax_scale)
    return plan(q, k, v)


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
    elif do.stride(3) != 1:  # an expanded gradient, as .sum().backward() sends: the kernels read rows
        do = do.contiguous()
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), o.stride(), do.stride(),
        None if dlse is None else dlse.stride(), q.dtype, q.get_device(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr() | o.data_ptr() | do.data_ptr()) & 15, causal, softmax_scale, deterministic,
        float32_precision() if q.dtype is torch.float32 else "",
    )  # fmt: skip
    plan = BACKWARD_PLANS.get(key)
    if plan is None:
        problem = describe(q, k, v, causal, softmax_scale, o=o, do=do)
        if _is_empty(problem):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        device_index, gradient = q.get_device(), do
        road = road_of(problem, gpu_of(device_index), deterministic)
        plan = _plan(
            problem, ROADS[road], device_index,
            lambda configs: BackwardPlan(problem, gradient, dlse, q, k, v, o, softmax_scale, road, configs),
        )  # fmt: skip
        _remember(BACKWARD_PLANS, key, plan)
    return plan(do, dlse, q, k, v, o, lse)
