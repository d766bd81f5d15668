"""Times packed sequences: beside the portable kernels, equal lengths beside the dense call, and FlashAttention-3.

    python benchmarks/packed.py [--only REGEX] [--out benchmarks/calls/packed.json]
    python benchmarks/packed.py --as a100 [--out benchmarks/calls/packed_sm80.json]

Causal, bf16. The packed call as it is served stands beside the best portable row of the same call; of equal lengths also beside
the dense call as it is served. With a schedule the order of tiles was made before, as layers share it; making it is timed by
itself. A deterministic backward is the split one. A Hopper forward is also timed with fewer tiles of
equal sequences in turns (search_spaces/portable/packed_order.py). The documents of a packing get shorter by one ratio, and lie
in no order. --as: the rows and code of a GPU without wgmma, assembled for this one. FlashAttention-3 (forward only) is a
library with the operator ``_vllm_fa3_C::fwd``, named by FA3_LIBRARY. Timed as benchmarks/side_by_side.py has it, on a stream
of its own, so that a backward runs where it is captured. TFLOP/s count visible pairs. Needs a GPU.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import side_by_side
import torch

import fa2tune
from fa2tune import gpus
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.kinds import PORTABLE_ROWS
from fa2tune.launching import passes, ported
from fa2tune.search_spaces.portable import packed_order
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import WARP_SPECIALIZED, implementation_of


class Packing(NamedTuple):
    lengths: tuple[int, ...]
    heads_q: int = 16
    heads_kv: int = 16
    dim: int = 128


def documents(count: int, total: int, longest: int) -> tuple[int, ...]:
    """Lengths that get shorter by one ratio, ``total`` together, in no order."""
    low, high = 0.0, 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        over = sum(longest * ratio**n for n in range(count)) > total
        low, high = (low, ratio) if over else (ratio, high)
    lengths = [max(1, round(longest * low**n)) for n in range(count)]
    lengths[count // 2] += total - sum(lengths)  # what rounding leaves
    return tuple(lengths[7 * n % count] for n in range(count))


PACKINGS: Mapping[str, Packing] = {
    "16 of 1024": Packing((1024,) * 16),
    "8 of 2048": Packing((2048,) * 8),
    "4 of 4096": Packing((4096,) * 4),
    "16 of 1024, 32 heads of 64": Packing((1024,) * 16, 32, 32, 64),
    "4 of 4096, 32 heads of 64": Packing((4096,) * 4, 32, 32, 64),
    "8, the longest 8192": Packing((8192, 100, 4000, 1, 0, 700, 2000, 1391)),
    "20 of 8 to 160": Packing(tuple(8 * n for n in range(1, 21))),
    "300 of 1 to 109": Packing(tuple(1 + 53 * n % 109 for n in range(300))),
    "32k in 20, the longest 5067": Packing(documents(20, 32768, 5067)),
    "32k in 53, the longest 3756, 32/8 heads": Packing(documents(53, 32768, 3756), 32, 8),
    "16k in 57, the longest 1820, 32 heads of 64": Packing(documents(57, 16384, 1820), 32, 32, 64),
}


def microseconds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians over rounds of CUDA graphs, in turns."""
    stream = torch.cuda.current_stream()
    samples = side_by_side.raced({name: side_by_side.graphed(call, stream) for name, call in calls.items()})
    return {name: round(1e3 * statistics.median(times), 1) for name, times in samples.items()}


def _fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, longest: int) -> Callable[[], Any]:
    torch.ops.load_library(os.environ["FA3_LIBRARY"])
    return lambda: torch.ops._vllm_fa3_C.fwd(
        q, k, v, *[None] * 4, offsets, offsets, *[None] * 3, longest, longest, *[None] * 9, q.shape[-1] ** -0.5, True, -1, -1,
        0.0, True, None, 0, None, 0, None, 1, 0, None,
    )  # fmt: skip


def specialized(config: Mapping[str, Any]) -> bool:
    return implementation_of(config) == WARP_SPECIALIZED


def in_turns(count: int, ragged: Problem, views: list[torch.Tensor], scale: float, config: Mapping[str, Any]) -> Any:
    """The plan of a Hopper forward whose last sequences of one length, of so many tiles, take turns."""
    kept, packed_order.IN_TURNS = packed_order.IN_TURNS, count
    try:
        return passes.ForwardPlan(ragged, *views, scale, config)
    finally:
        packed_order.IN_TURNS = kept


def portable_config(ragged: Problem) -> Config:
    """Of the best portable row; where none serves, of the portable default."""
    chooser = choosing.Chooser(ragged, dispatch.gpu_of(0))
    choice = chooser.choose("fwd", PORTABLE_ROWS)
    if not choice.variant.name.startswith("portable/"):  # the documented default may be of another kind
        choice = chooser.portable_default("fwd")
    return choice.config


def measured(packing: Packing) -> dict[str, Any]:
    """Times of one packing, TFLOP/s, and which kernel served the packed forward."""
    lengths, scale = packing.lengths, packing.dim**-0.5
    q, k, v = (
        torch.randn(sum(lengths), heads, packing.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (packing.heads_q, packing.heads_kv, packing.heads_kv)
    )
    offsets = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    schedule = fa2tune.varlen_schedule(offsets, total_q=len(q))
    o, fixed, shared = (
        fa2tune.attention_varlen(q, k, v, offsets, causal=True, deterministic=fixed, schedule=shared)
        for fixed, shared in ((False, None), (True, None), (True, schedule))
    )
    do, (packed_q, packed_k, packed_v) = torch.randn_like(o), (tensor.detach() for tensor in (q, k, v))
    views = [tensor.transpose(0, 1)[None] for tensor in (packed_q, packed_k, packed_v)]
    ragged = passes.describe(*views, CAUSAL, scale, extent=Extent(RAGGED, len(lengths)))
    served = choosing.choose(ragged, "fwd", dispatch.gpu_of(0)).config
    portable = portable_config(ragged)
    plan = passes.ForwardPlan(ragged, *views, scale, portable)
    others = {count: in_turns(count, ragged, views, scale, served) for count in (32, 64)} if specialized(served) else {}
    calls: dict[str, Callable[[], Any]] = {
        "packed forward": lambda: fa2tune.attention_varlen(packed_q, packed_k, packed_v, offsets, causal=True),
        "packed forward, schedule": lambda: fa2tune.attention_varlen(
            packed_q, packed_k, packed_v, offsets, causal=True, schedule=schedule
        ),
        "varlen_schedule": lambda: fa2tune.varlen_schedule(offsets, total_q=len(q)),
        "portable forward": lambda: plan(*views, offsets, offsets),
        "packed backward": lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True),
        "packed backward, deterministic": lambda: torch.autograd.grad(fixed, (q, k, v), do, retain_graph=True),
        "packed backward, deterministic, schedule": lambda: torch.autograd.grad(
            shared, (q, k, v), do, retain_graph=True
        ),
    }
    for count, other in others.items():
        calls[f"packed forward, {count} tiles in turns"] = partial(other, *views, offsets, offsets)
    if len(set(lengths)) == 1:
        dense = [tensor.unflatten(0, (len(lengths), -1)).transpose(1, 2) for tensor in (packed_q, packed_k, packed_v)]
        calls["dense forward"] = lambda: fa2tune.attention(*dense, causal=True)
    if "FA3_LIBRARY" in os.environ:
        calls["FlashAttention-3 forward"] = _fa3(packed_q, packed_k, packed_v, offsets, max(lengths))
    times = microseconds(calls)
    flops = 4 * packing.dim * packing.heads_q * sum(length * (length + 1) / 2 for length in lengths)
    rates = {
        name: round(flops * (2.5 if "backward" in name else 1) / us / 1e6)
        for name, us in times.items()
        if name != "varlen_schedule"
    }
    return {"us": times, "tflops": rates, "served": implementation_of(served), "config": dict(served)}


def record(packings: Mapping[str, Any], measure: Callable[[Any], dict[str, Any]], out: Path | None) -> None:
    """Measure each packing on a warm GPU and print it; ``out``: every figure, as JSON."""
    if not torch.cuda.is_available():
        raise click.ClickException("needs a CUDA GPU that torch can use")
    side_by_side.warm()
    here = choosing.toolchain()
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "driver": here.driver, "torch": torch.__version__, "triton": here.triton,
        "date": time.strftime("%Y-%m-%d"), "packings": {},
    }  # fmt: skip
    for name, packing in packings.items():
        with torch.cuda.stream(torch.cuda.Stream()):
            facts["packings"][name] = found = measure(packing)
        click.echo(f"{name}: {found['served']}, TFLOP/s {found['tflops']}, us {found['us']}")
    if out is not None:
        out.write_text(json.dumps(facts, indent=1) + "\n")


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Every figure, as JSON.")
@click.option("--only", default="", help="Regular expression: packings whose name it is found in.")
@click.option("--as", "gpu", help="A GPU without wgmma, whose code runs here.")
def main(out: Path | None, only: str, gpu: str | None) -> None:
    if gpu is not None:
        ported.begin(gpus.named(gpu))
    record({name: packing for name, packing in PACKINGS.items() if re.search(only, name)}, measured, out)


if __name__ == "__main__":
    main()
