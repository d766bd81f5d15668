"""Host time of a warm call in microseconds, without gradients and for forward + backward, against SDPA's FlashAttention-2.

    python benchmarks/host_time.py

The input is tiny (batch 1, 8 heads, 128 x 64, bf16), so that the host never waits for the GPU. no_grad and the choice of
SDPA's backend are set once, outside the loops. Chunks of calls are interleaved; the figure is the median over chunks. Needs
a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import click
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import fa2tune
from fa2tune.bench.gpu import BenchGpu, NoGpuError

SHAPE = (1, 8, 128, 64)
CHUNKS, CALLS = 61, 50


def host_microseconds(
    calls: Mapping[str, Callable[[], object]],
    synchronize: Callable[[], object],
    chunks: int = CHUNKS,
    count: int = CALLS,
) -> dict[str, float]:
    """Median over chunks of the wall time per call, the GPU idle when a chunk begins. The first chunk warms up."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(chunks + 1):
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            samples[name].append((time.perf_counter() - start) / count * 1e6)
    return {name: statistics.median(times[1:]) for name, times in samples.items()}


@click.command()
def main() -> None:
    """Host time of a warm call of fa2tune and of SDPA."""
    try:
        gpu = BenchGpu()
    except NoGpuError as error:
        raise click.ClickException(str(error)) from None
    q, k, v, do = (torch.randn(SHAPE, device=gpu.device, dtype=torch.bfloat16) for _ in range(4))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    functions = {"fa2tune": fa2tune.attention, "SDPA, FlashAttention-2": scaled_dot_product_attention}
    click.echo(f"{gpu.environment()['gpu']}, torch {torch.__version__}; host microseconds per call")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with torch.no_grad():
            forward = {name: (lambda f=f: f(q, k, v)) for name, f in functions.items()}
            times = {"without gradients": host_microseconds(forward, torch.cuda.synchronize)}
        both = {name: (lambda f=f: torch.autograd.grad(f(*leaves), leaves, do)) for name, f in functions.items()}
        times["forward + backward"] = host_microseconds(both, torch.cuda.synchronize)
    for title, found in times.items():
        for name, microseconds in found.items():
            click.echo(f"{title:20}{name:24}{microseconds:8.1f}   fa2tune / it {found['fa2tune'] / microseconds:.2f}")


if __name__ == "__main__":
    main()
