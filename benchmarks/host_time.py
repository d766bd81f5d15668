"""Host microseconds of a warm call without gradients, and of forward + backward, against SDPA's FlashAttention-2.

    python benchmarks/host_time.py [PEER ...]

A tiny input (batch 1, 8 heads, 128 x 64, bf16), so that the GPU is never what the host waits for. Chunks of calls of the
peers are interleaved; the figure is the median over chunks. Needs a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import click

from fa2tune.bench import Stand
from fa2tune.bench_card import Card, NoGpuError
from fa2tune.peers import SUBJECT, select
from fa2tune.problem import Problem

TINY = Problem(
    "bf16", batch=1, heads_q=8, heads_kv=8, seqlen_q=128, seqlen_k=128, head_dim=64, head_dim_v=64, causal=False
)
CHUNKS, CALLS = 41, 50


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
@click.argument("peers", nargs=-1)
def main(peers: tuple[str, ...]) -> None:
    """Host time of a warm call of fa2tune and PEERS (default: sdpa-flash)."""
    import torch

    try:
        card = Card()
        chosen, _ = select(peers or ("sdpa-flash",))
    except (NoGpuError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    stand = Stand(TINY, chosen, card.device)
    click.echo(f"{card.environment()['gpu']}, torch {torch.__version__}; host microseconds per call")
    for pass_, title in (("fwd", "without gradients"), ("both", "forward + backward")):
        times = host_microseconds({name: stand.call(name, pass_) for name in chosen}, torch.cuda.synchronize)
        for name, microseconds in times.items():
            click.echo(f"{title:20}{name:16}{microseconds:8.1f}   fa2tune / it {times[SUBJECT] / microseconds:.2f}")


if __name__ == "__main__":
    main()
