"""The GPU under ``fa2tune bench``: timing on a warm GPU, interleaved or each call alone, peak memory, and what GPU it is."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from fa2tune import __version__

#: Rounds are run untimed for this long before a cell is timed: clocks settle, allocations are cached. Seconds.
WARM_SECONDS = 0.2
MIN_ROUNDS, MAX_ROUNDS = 10, 100
#: A sustained sample: a call over and over for the first, then timed for the second. Power management takes a fifth of a
#: second or more to follow. Seconds.
SETTLE_SECONDS, TURN_SECONDS = 0.3, 0.3
HOT_SECONDS = 1.2  #: of all calls before that: a GPU that was cool, or waited, clocks higher for so long
FEWEST = 4  #: launches of either part of a turn
TURNS = 2  #: of each call, forth and back, so that what drifts evenly cancels
#: At least this much is overwritten to empty the L2, and at least four times its size. Bytes.
FLUSH_BYTES = 256 << 20
#: At most this many overwrites are queued ahead of a round: the launch queue holds about a thousand entries.
MAX_LEAD = 200


class NoGpuError(RuntimeError):
    """There is no CUDA GPU that torch can use."""


class BenchGpu:
    """The current CUDA device. Raises NoGpuError where there is none."""

    device = "cuda"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise NoGpuError(
                "bench needs a CUDA GPU that torch can use: torch.cuda.is_available() is False "
                f"(torch {torch.__version__}, built for CUDA {torch.version.cuda})"
            )
        self._torch = torch
        self._properties = torch.cuda.get_device_properties()
        self._scratch: Any = None

    def environment(self) -> dict[str, Any]:
        """GPU, driver, clocks (MHz), power limit (W), versions and date (UTC): what a figure is worth nothing without."""
        from fa2tune import gpus

        torch, properties = self._torch, self._properties
        gpu = gpus.present()
        return {
            "gpu": properties.name,
            "gpu_key": gpu.name if gpu else None,
            "sm_count": properties.multi_processor_count,
            "arch": 10 * properties.major + properties.minor,
            "memory_bytes": properties.total_memory,
            **_smi(f"GPU-{properties.uuid}"),
            "fa2tune": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": _cudnn(torch.backends.cudnn.version()),
            "triton": _version("triton"),
            "flash-attn-4": _version("flash-attn-4"),
            "python": platform.python_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def healthy(self) -> bool:
        """Whether the CUDA context survived what ran last."""
        try:
            self._torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def free_bytes(self) -> int:
        """Bytes that tensors could still take, torch's cached blocks included."""
        cuda = self._torch.cuda
        return int(cuda.mem_get_info()[0] + cuda.memory_reserved() - cuda.memory_allocated())

    def release(self) -> None:
        """Give cached memory back, so that one problem's leftovers do not crowd the next."""
        self._scratch = None
        self._torch.cuda.empty_cache()

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """The most memory that one call held at once beyond what was allocated before it, its results included."""
        cuda = self._torch.cuda
        cuda.synchronize()
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        results = call()
        cuda.synchronize()
        del results
        return int(cuda.max_memory_allocated() - before)

    def time(self, calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
        """Milliseconds of GPU time, one sample per call and round, interleaved: every round runs every call once, in a
        random order, each after the L2 was emptied. About ``seconds`` per call, within MIN_ROUNDS and MAX_ROUNDS."""
        from fa2tune.measuring import timing

        order, shuffle = list(calls), random.Random(0).shuffle
        flush_seconds = self._flush_seconds()
        began, host, whole = time.perf_counter(), 0.0, 0.0
        while time.perf_counter() - began < WARM_SECONDS:
            start = time.perf_counter()
            submitted = timing.submit([calls[name] for name in order], self._flush, lead=0)
            host = time.perf_counter() - start
            timing.finish(submitted)
            whole = time.perf_counter() - start
        # The GPU must be behind the host whenever a start event is reached, or the event times the host's launches. So each
        # round queues behind overwrites that keep the GPU busy for twice as long as the host needs to submit the round.
        lead = min(MAX_LEAD, math.ceil(2 * host / flush_seconds))
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, round(seconds * len(calls) / whole)))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            shuffle(order)
            found = timing.finish(timing.submit([calls[name] for name in order], self._flush, lead))
            for name, microseconds in zip(order, found, strict=True):
                samples[name].append(microseconds / 1e3)
        return samples

    def sustain(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Milliseconds a call, where each call has the GPU for itself: TURNS samples each, of turns in which nothing else runs
        and the L2 is as the call before left it. The clock is then the one that this call's own power allows, where ``time``
        has every call run at the clock that all of them leave the GPU. A call that takes the host longer than the GPU is as
        slow as the host."""
        from fa2tune.measuring import timing

        for call in calls.values():
            timing.settle(call, HOT_SECONDS / len(calls), FEWEST)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(TURNS):
            for name in list(calls)[:: -1 if turn % 2 else 1]:
                samples[name].append(timing.alone(calls[name], SETTLE_SECONDS, TURN_SECONDS, FEWEST) / 1e3)
        return samples

    def _flush(self) -> None:
        if self._scratch is None:
            size = max(FLUSH_BYTES, 4 * self._properties.L2_cache_size)
            self._scratch = self._torch.empty(size, dtype=self._torch.int8, device=self.device)
        self._scratch.zero_()

    def _flush_seconds(self) -> float:
        self._flush()
        self._torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            self._flush()
        self._torch.cuda.synchronize()
        return (time.perf_counter() - start) / 10


def _cudnn(number: int | None) -> str | None:
    """91900 -> "9.19.0"."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


_SMI = {
    "driver": "driver_version",
    "clock_mhz": "clocks.sm",
    "clock_max_mhz": "clocks.max.sm",
    "power_limit_w": "power.limit",
}


def _smi(device: str) -> dict[str, Any]:
    """What only nvidia-smi tells; None each where it is absent or does not know (a MIG slice)."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI.values())}", "--format=csv,noheader,nounits", "-i", device]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(_SMI)
    values: list[Any] = [part.strip() for part in listing.strip().split(",")]
    numbers = [_number(value) for value in values[1:]]
    return dict(zip(_SMI, [values[0], *numbers], strict=True))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None
