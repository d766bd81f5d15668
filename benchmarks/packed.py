"""Times packed sequences: equal lengths beside the dense call, and mixed lengths.

    python benchmarks/packed.py [--out benchmarks/calls/packed.json]

16 query and key heads of 128, causal, bf16. Of equal lengths the packed forward stands beside the dense forward with the same
portable config, and beside the dense call as it is served. CUDA events around single calls, interleaved, L2 flushed each time;
medians of 25. TFLOP/s count visible pairs. Needs a GPU.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import torch

import fa2tune
from fa2tune.calling import choosing, dispatch
from fa2tune.launching import passes
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL

HEADS, DIM, REPEATS = 16, 128, 25
FLUSHED_WORDS = 64 << 20  #: int32 words, several times the L2
PACKINGS: Mapping[str, tuple[int, ...]] = {
    "16 of 1024": (1024,) * 16,
    "4 of 4096": (4096,) * 4,
    "8, the longest 8192": (8192, 100, 4000, 1, 0, 700, 2000, 1391),
    "300 of 1 to 109": tuple(1 + 53 * n % 109 for n in range(300)),
}


def microseconds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians, interleaved."""
    for call in calls.values():
        for _ in range(3):
            call()
    flush = torch.empty(FLUSHED_WORDS, dtype=torch.int32, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(1e3 * start.elapsed_time(end))
    return {name: round(statistics.median(times), 1) for name, times in samples.items()}


def measured(lengths: tuple[int, ...]) -> dict[str, Any]:
    """Times of one packing, and TFLOP/s."""
    q, k, v = (
        torch.randn(sum(lengths), HEADS, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    offsets = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    o = fa2tune.attention_varlen(q, k, v, offsets, causal=True)
    do, (packed_q, packed_k, packed_v) = torch.randn_like(o), (tensor.detach() for tensor in (q, k, v))
    calls: dict[str, Callable[[], Any]] = {
        "packed forward": lambda: fa2tune.attention_varlen(packed_q, packed_k, packed_v, offsets, causal=True),
        "packed backward": lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True),
    }
    if len(set(lengths)) == 1:
        dense = [tensor.unflatten(0, (len(lengths), -1)).transpose(1, 2) for tensor in (packed_q, packed_k, packed_v)]
        views = [tensor.transpose(0, 1)[None] for tensor in (packed_q, packed_k, packed_v)]
        ragged = passes.describe(*views, CAUSAL, DIM**-0.5, extent=Extent(RAGGED, len(lengths), lengths[0]))
        config = choosing.choose(ragged, "fwd", dispatch.gpu_of(0)).config
        plan = passes.ForwardPlan(passes.describe(*dense, CAUSAL, DIM**-0.5), *dense, DIM**-0.5, config)
        calls["dense forward, same config"] = lambda: plan(*dense)
        calls["dense forward"] = lambda: fa2tune.attention(*dense, causal=True)
    times = microseconds(calls)
    flops = 4 * DIM * HEADS * sum(length * (length + 1) / 2 for length in lengths)
    rates = {name: round(flops * (2.5 if "backward" in name else 1) / us / 1e6) for name, us in times.items()}
    return {"us": times, "tflops": rates}


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Every figure, as JSON.")
def main(out: Path | None) -> None:
    if not torch.cuda.is_available():
        raise click.ClickException("needs a CUDA GPU that torch can use")
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):  # a cool GPU clocks higher
        matrix @ matrix
    here = choosing.toolchain()
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "driver": here.driver, "torch": torch.__version__, "triton": here.triton,
        "date": time.strftime("%Y-%m-%d"), "packings": {},
    }  # fmt: skip
    for name, lengths in PACKINGS.items():
        facts["packings"][name] = found = measured(lengths)
        click.echo(f"{name:22} {found}")
    if out is not None:
        out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
