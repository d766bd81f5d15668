"""Which GPU a call is served for."""

from __future__ import annotations

from functools import cache

import torch

from fa2tune import gpus
from fa2tune.gpus import Gpu
from fa2tune.launching import ported


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
