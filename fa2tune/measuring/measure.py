"""Timing on the GPU that is there, kept warm: contenders interleaved round by round, each launch out of a cold L2, or in
turns alone.

Runs in a child process that may die (``worker.py``): before a contender's first launch it reports which one it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from fa2tune.compiling.compiler import CompileError
from fa2tune.compiling.registry import portable_config
from fa2tune.launching import passes
from fa2tune.measuring import clock_monitor, racing, reference, timing, worker
from fa2tune.measuring.clock_monitor import Reading
from fa2tune.measuring.samples import CRAWLING, EFFORTS, Race
from fa2tune.spec.extent import OFFSETS
from fa2tune.spec.key import RAGGED_FAMILY, TuningKey
from fa2tune.spec.problem import BACKWARD, Config, Problem
from fa2tune.spec.variant import implementation_of

WARM_UP_SECONDS = 0.4  #: of matrix products, before the first race and after a pause
IDLE_SECONDS = 1.0  #: a pause that lets the clocks drop
FLUSH_BYTES_AT_MOST = 256 << 20
LEAD = 8  #: times the L2 is flushed before a block of launches: an overwrite, of four times the L2, takes the memory longer
#: than a launch takes the host
#: Seconds until a launch counts as hung: the anchor's first, others', a block of the race
FIRST_LAUNCH_SECONDS, LAUNCH_SECONDS, BLOCK_SECONDS = 20.0, 5.0, 20.0
#: Whose first two launches take longer, and so many times as long as the anchor's first, is not raced.
SLOW_SECONDS, SLOWER = 0.2, 50.0
HOT_SECONDS = 1.0  #: before the first turn of a race: a GPU that was cool, or waited, clocks higher for so long
#: Share of a turn that is not timed: the GPU's power management takes a fifth of a second or more to follow.
SETTLING = 0.5
FEW = 8  #: launches, of which a turn has as many at least
REST_SECONDS = 0.5  #: at a time, for a throttled GPU
RESTS = 20  #: in a race; then the GPU is taken as it is
TURN_RESTS = 2  #: in one by turns, which are long


class _WarmGpu:
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
            config = portable_config("fwd", problem.specialization, key.arch)
            options = {"mask": problem.mask, "softmax_scale": key.head_dim**-0.5}
            offsets = _offsets(key, q.device)
            o, lse = passes.forward(q, k, v, **options, config=config, offsets=tuple(offsets.values()))
            staged |= {"o": o, "lse": lse, **offsets}
            if backward:
                staged |= {"do": do, "delta": (o.float() * do.float()).sum(-1), "dk": torch.empty_like(k),
                           "dv": torch.empty_like(v), "dq": torch.empty_like(q)}  # fmt: skip
            self.stage = (problem, backward), staged
        return self.stage[1]


def _offsets(key: TuningKey, device: torch.device) -> dict[str, torch.Tensor]:
    """Of a key's packed sequences, as kernels name them."""
    if key.family != RAGGED_FAMILY:
        return {}
    ends = torch.tensor([0, *key.lengths()], device=device).cumsum(0).to(torch.int32)
    return dict.fromkeys(OFFSETS, ends)


@cache
def _warm_gpu() -> _WarmGpu:
    return _WarmGpu()


def _runner(key: TuningKey, contender: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Callable[[], object]:
    """What one sample launches: a kernel with a config, and what its variant runs around it, or for ``bwd`` a whole pass:
    {"strategy": .., "configs": ..}."""
    scale = key.head_dim**-0.5
    device = torch.cuda.current_device()
    problem = key.workload()
    if key.kernel == BACKWARD:
        order = ("do", "q", "k", "v", "o")
        do, q, k, v, o = (tensors[name] for name in order)
        plan = passes.BackwardPlan(problem, do, None, q, k, v, o, scale, contender["strategy"], contender["configs"])
        offsets = [tensors[name] for name in OFFSETS if name in tensors]
        return lambda: plan(do, None, q, k, v, o, tensors["lse"], *offsets)
    step = passes.Step(key.kernel, problem, contender, tensors, scale, device)
    return lambda: step(tensors)


def _line_up(
    key: TuningKey, contenders: Sequence[Config | Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[int, Callable[[], object]], dict[int, str]]:
    """Launch each once: (what can run, why the others cannot)."""
    from triton.runtime.errors import OutOfResources

    runners: dict[int, Callable[[], object]] = {}
    failures: dict[int, str] = {}
    first, patience = math.inf, FIRST_LAUNCH_SECONDS
    for index, contender in enumerate(contenders):
        worker.report(index)
        try:
            runner = _runner(key, contender, tensors)
            worker.report(index, patience)  # compiled and loaded: from here on the GPU alone takes time
            took = _seconds(runner)
            slow = took > max(SLOW_SECONDS, SLOWER * first)
            if slow:  # perhaps the host was busy, or the GPU
                worker.report(index, patience)
                took = _seconds(runner)
                slow = took > max(SLOW_SECONDS, SLOWER * first)
        except (CompileError, OutOfResources, torch.cuda.OutOfMemoryError) as error:
            failures[index] = worker.reason_of(error)
            continue
        if index == 0:
            first, patience = took, max(LAUNCH_SECONDS, SLOWER * took)
        elif slow:
            failures[index] = (
                f"{CRAWLING}: its second launch took {took:.2f} s, the reference config's first {first:.3f} s"
            )
            continue
        runners[index] = runner
    return runners, failures


def _seconds(runner: Callable[[], object]) -> float:
    begun = time.monotonic()
    runner()
    torch.cuda.synchronize()
    return time.monotonic() - begun


class _Track:
    """The current device, for ``racing.run``."""

    def __init__(
        self,
        gpu: _WarmGpu,
        runners: Mapping[int, Callable[[], object]],
        seen: clock_monitor.ClockMonitor,
        turn_seconds: float,
    ) -> None:
        """``turn_seconds``: as ``Effort`` has it."""
        self.gpu, self.runners, self.seen, self.turn_seconds = gpu, runners, seen, turn_seconds
        self.rests, self.hot = TURN_RESTS if turn_seconds else RESTS, False

    def launch(self, schedule: Sequence[int]) -> list[float]:
        calls = [self.runners[index] for index in schedule]
        if not self.turn_seconds:
            found = timing.finish(timing.submit(calls, self.gpu.flush_buffer.zero_, LEAD))
            self._alive()
        else:
            if not self.hot:
                timing.settle(calls[0], HOT_SECONDS, FEW)
                self._alive()
                self.hot = True
            settling = SETTLING * self.turn_seconds
            found = [timing.alone(call, settling, self.turn_seconds - settling, FEW, self._alive) for call in calls]
        self.gpu.last_used = time.monotonic()
        return found

    def _alive(self) -> None:
        worker.report(-1, BLOCK_SECONDS)

    def read(self) -> Reading:
        return self.seen.read()

    def rest(self) -> bool:
        self.rests, self.hot = self.rests - 1, False
        if self.rests < 0:
            return False
        time.sleep(REST_SECONDS)
        worker.report(-1)
        self.gpu.warm_up()
        return True


def race(
    key: TuningKey, contenders: Sequence[Config | Mapping[str, Any]], effort: str,
    best_ratios: Mapping[Any, float] = MappingProxyType({}),
) -> Race:  # fmt: skip
    """Time the contenders against each other at the key's workload. ``contenders[0]`` is the anchor of every comparison, the
    default in most races. ``effort``: one of ``samples.EFFORTS``; ``best_ratios``: implementation -> its best time so
    far over the anchor's, by which those far behind are dropped.

    Reports the index of each contender before its first launch. Raises what CUDA raises when a launch goes wrong."""
    gpu = _warm_gpu()
    tensors = gpu.tensors(key)
    runners, failures = _line_up(key, contenders, tensors)
    if 0 not in runners:
        worker.report(0)
        raise RuntimeError(f"the anchor cannot be launched: {failures[0]}")
    worker.report(-1, BLOCK_SECONDS)
    gpu.warm_up()
    seen = clock_monitor.of_device(torch.cuda.current_device())
    # each implementation has a row, so a leader, of its own
    groups = ["" if key.kernel == BACKWARD else implementation_of(contender) for contender in contenders]
    found = racing.run(
        _Track(gpu, runners, seen, EFFORTS[effort].turn_seconds), groups, list(runners), EFFORTS[effort], best_ratios
    )
    return replace(found, failures=failures, power_limit_w=seen.power_limit_w())
