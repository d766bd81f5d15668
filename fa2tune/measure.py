"""Timing on the GPU that is there: warm card, cold L2, contenders interleaved round by round.

Runs in a child process that may die (``worker.py``): before a contender's first launch it reports which one it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from statistics import median
from typing import Any

import torch

from fa2tune import launch, passes, reference, worker
from fa2tune.compiler import CompileError, variant_named
from fa2tune.problem import BACKWARD, Config, Problem, TuningKey
from fa2tune.samples import EFFORTS, Effort, Race

WARM_UP_SECONDS = 0.4  #: of matrix products, before the first race and after a pause
IDLE_SECONDS = 1.0  #: a pause that lets the clocks drop
FLUSH_BYTES_AT_MOST = 256 << 20
HOPELESS_AFTER = 2  #: rounds, before a contender may be dropped
# NVML's "clocks event reasons" that say a card is ill-cooled or ill-fed, not merely at its power limit
THROTTLED = 0x08 | 0x20 | 0x40 | 0x80  # hardware slowdown, software thermal, hardware thermal, power brake
THROTTLE_RETRIES = 3


@cache
def _nvml() -> Any:
    """(pynvml, handle of the current device), or None without the library. Nothing is measured with it: it only witnesses."""
    try:
        import pynvml
    except ImportError:
        return None
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    return None


def _witness() -> tuple[int | None, int | None, bool]:
    """(SM clock in MHz, power limit in W, throttled); None where NVML does not say."""
    clock = limit = None
    reasons = 0
    if _nvml() is not None:
        pynvml, handle = _nvml()
        with suppress(pynvml.NVMLError):
            clock = int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        with suppress(pynvml.NVMLError):
            limit = int(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)) // 1000
        with suppress(pynvml.NVMLError):
            reasons = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return clock, limit, bool(reasons & THROTTLED)


class _Card:
    """The current device: kept warm, its L2 flushed on demand, and the tensors of the last key."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        size = min(FLUSH_BYTES_AT_MOST, 4 * int(properties.L2_cache_size) or FLUSH_BYTES_AT_MOST)
        self.flush_buffer = torch.empty(size, dtype=torch.int8, device="cuda")
        self.last_used = -IDLE_SECONDS
        self.stage: tuple[tuple[Problem, bool], dict[str, torch.Tensor]] | None = None

    def warm_up(self) -> None:
        if time.monotonic() - self.last_used < IDLE_SECONDS:
            return
        square = torch.randn(4096, 4096, dtype=torch.float16, device="cuda")
        until = time.monotonic() + WARM_UP_SECONDS
        while time.monotonic() < until:
            for _ in range(8):
                square @ square
            torch.cuda.synchronize()

    def tensors(self, key: TuningKey) -> dict[str, torch.Tensor]:
        """Everything a kernel of this key reads or writes, at the key's workload. lse and delta are the real ones."""
        problem, backward = key.workload(), key.kernel != "fwd"
        if self.stage is None or self.stage[0] != (problem, backward):
            self.stage = None  # frees the last key's tensors first
            inputs = reference.make_inputs(problem, "cuda", on_device=True)
            q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.do
            staged = {"q": q, "k": k, "v": v}
            config = variant_named("fwd").space.default(problem.specialization, key.arch)
            o, lse = passes.forward(q, k, v, causal=key.causal, softmax_scale=key.head_dim**-0.5, config=config)
            staged |= {"o": o, "lse": lse}
            if backward:
                staged |= {"do": do, "delta": (o.float() * do.float()).sum(-1), "dk": torch.empty_like(k),
                           "dv": torch.empty_like(v), "dq": torch.empty_like(q)}  # fmt: skip
                staged["dq_sums"] = torch.zeros(q.shape, dtype=torch.float32, device="cuda")
            self.stage = (problem, backward), staged
        return self.stage[1]

    def time(self, run: Callable[[], object], start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Enqueue one launch between two events, out of a cold L2."""
        self.flush_buffer.zero_()
        start.record()
        run()
        end.record()


@cache
def _card() -> _Card:
    return _Card()


def _runner(key: TuningKey, contender: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Callable[[], object]:
    """What one sample launches: a kernel with a config, or for ``bwd`` a whole pass: {"road": .., "configs": ..}."""
    scale = key.head_dim**-0.5
    device = torch.cuda.current_device()
    problem = key.workload()
    if key.kernel == BACKWARD:
        order = ("do", "q", "k", "v", "o")
        do, q, k, v, o = (tensors[name] for name in order)
        plan = passes.BackwardPlan(problem, do, None, q, k, v, o, scale, contender["road"], contender["configs"])
        return lambda: plan(do, None, q, k, v, o, tensors["lse"])
    variant = variant_named(key.kernel)
    own = {
        name: tensors["dq_sums" if key.kernel == "bwd_fused" and name == "dq" else name] for name in _names(key.kernel)
    }
    return launch.prepare(variant, problem, contender, own, scale, device)


def _names(kernel: str) -> tuple[str, ...]:
    if kernel == "fwd":
        return ("q", "k", "v", "o", "lse")
    own = {"bwd_dq": ("o", "dq"), "bwd_dkdv": ("dk", "dv"), "bwd_fused": ("dq", "dk", "dv")}
    return ("q", "k", "v", "do", "lse", "delta", *own[kernel])


def _line_up(
    key: TuningKey, contenders: Sequence[Config | Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[int, Callable[[], object]], dict[int, str]]:
    """Launch each once: (what can run, why the others cannot)."""
    from triton.runtime.errors import OutOfResources

    runners: dict[int, Callable[[], object]] = {}
    failures: dict[int, str] = {}
    for index, contender in enumerate(contenders):
        worker.report(index)
        try:
            runner = _runner(key, contender, tensors)
            runner()
            torch.cuda.synchronize()
        except (CompileError, OutOfResources, torch.cuda.OutOfMemoryError) as error:
            failures[index] = worker.reason_of(error)
            continue
        runners[index] = runner
    return runners, failures


def _run(
    runners: Mapping[int, Callable[[], object]], count: int, effort: Effort, best_ratio: float
) -> list[list[float]]:
    """Rounds of one launch each, the order turning from round to round. Contender 0 is the anchor: it is never dropped."""
    card = _card()
    times: list[list[float]] = [[] for _ in range(count)]
    alive = list(runners)
    least = effort.least_rounds
    done, rounds = 0, least
    while done < rounds:
        turn = done % len(alive)
        events = {}
        for index in alive[turn:] + alive[:turn]:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            card.time(runners[index], *pair)
            events[index] = pair
        torch.cuda.synchronize()
        for index, (start, end) in events.items():
            times[index].append(start.elapsed_time(end) * 1e3)
        done += 1
        if done == HOPELESS_AFTER:
            ratios = {index: min(times[index]) / min(times[0]) for index in alive}
            limit = effort.hopeless * min(best_ratio, *ratios.values(), 1.0)
            alive = [index for index in alive if index == 0 or ratios[index] <= limit]
            rounds = effort.rounds(median(times[0]) * 1e-6)
    card.last_used = time.monotonic()
    return times


def race(
    key: TuningKey, contenders: Sequence[Config | Mapping[str, Any]], effort: str, best_ratio: float = 1.0
) -> Race:
    """Time the contenders against each other at the key's workload. ``contenders[0]`` is the anchor of every comparison: the
    default, where it can run. ``effort``: "screen" or "final"; ``best_ratio``: best time so far over the anchor's, by which
    the hopeless are told.

    Reports the index of each contender before its first launch. Raises what CUDA raises when a launch goes wrong."""
    card = _card()
    tensors = card.tensors(key)
    runners, failures = _line_up(key, contenders, tensors)
    if 0 not in runners:
        worker.report(0)
        raise RuntimeError(f"the anchor cannot be launched: {failures[0]}")
    worker.report(-1)
    for attempt in range(THROTTLE_RETRIES + 1):
        card.warm_up()
        times = _run(runners, len(contenders), EFFORTS[effort], best_ratio)
        clock, limit, throttled = _witness()
        if not throttled or attempt == THROTTLE_RETRIES:
            break
        time.sleep(2.0)
        worker.report(-1)
    return Race(times, failures, clock, limit, attempt + throttled)
