"""Time backwards with query groups in each number of parts, and calls whose tensors TMA cannot address, as they are and copied.

    python benchmarks/group_parts.py --out benchmarks/calls/group_parts.json

Backward: every divisor of the group up to 16, and what the dispatcher chooses; configs are the dispatcher's. Copies: both
passes of 2 x 16 heads of 128, causal, with bases off by 2 bytes, with rows of 131 elements, and with expanded K and V on the
portable kernels, against copies of these tensors and the warp-specialised kernels. Each candidate is a CUDA graph; replays
are interleaved in random order; the file holds medians of seven bursts in microseconds a call. A candidate whose result
differs from the first one's by more than bf16 allows is an error. Needs a GPU of compute capability 9.0. What Triton's cache
lacks is compiled first, one binary after the other.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from launch_choices import race

from fa2tune.calling import choosing, copies, dispatch
from fa2tune.calling.schedules import group_parts_schedule
from fa2tune.launching import group_parts, passes
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import BACKWARD, STRATEGIES, Config, Problem

#: (batch, query heads, key heads, length, head dim), whether deterministic; causal
CALLS = (
    ((1, 8, 1, 8192, 128), False),
    ((2, 71, 1, 2048, 64), False),
    ((1, 48, 1, 8192, 128), False),
    ((4, 32, 2, 2048, 128), False),
    ((2, 32, 8, 8192, 128), False),
    ((2, 28, 4, 4096, 128), False),
    ((4, 32, 1, 2048, 128), False),
    ((1, 32, 8, 777, 128), False),
    ((1, 8, 1, 8192, 128), True),
    ((4, 32, 2, 2048, 128), True),
    ((1, 8, 1, 8192, 256), True),
)
MOST_PARTS = 16
LENGTHS = (4096, 2048, 1024, 512)
BURST_MS = 5.0

Made = tuple[torch.Tensor, ...]


def posed(shape: tuple[int, ...]) -> Problem:
    batch, heads_q, heads_kv, seqlen, dim = shape
    return Problem("bf16", batch, heads_q, heads_kv, seqlen, seqlen, dim, dim, CAUSAL)


def backward_configs(problem: Problem, gpu: Any, deterministic: bool = False) -> tuple[str, dict[str, Config]]:
    """(strategy, kernel -> config), as the dispatcher chooses them."""
    strategy, kinds = choosing.strategy_of(problem, gpu, deterministic)
    return strategy, {n: choosing.choose(problem, n, gpu, kinds.get(n)).config for n in STRATEGIES[strategy]}


def split_kernel(configs: Mapping[str, Config]) -> str:
    """The one whose groups are split."""
    return next(kernel for kernel in configs if kernel in group_parts.MAKE_DK_DV)


def randoms(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def forward_plan(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> passes.ForwardPlan:
    config = choosing.choose(problem, "fwd", dispatch.gpu_of(0)).config
    return passes.ForwardPlan(problem, q, k, v, problem.head_dim**-0.5, config)


def same(one: Made, other: Made, what: object) -> None:
    """RuntimeError: results are further apart than bf16 allows."""
    for a, b in zip(one, other, strict=True):
        a, b = a.float().nan_to_num(neginf=-1e4), b.float().nan_to_num(neginf=-1e4)
        if not (a - b).abs().max() <= 0.03 + 0.03 * b.abs().max():
            raise RuntimeError(f"{what}: results differ by {(a - b).abs().max():.3f}")


def timed(calls: Mapping[Any, Callable[[], Made]], stream: torch.cuda.Stream, what: object) -> dict[Any, float]:
    """Name -> median microseconds a call."""
    results = [call() for call in calls.values()]
    for result in results[1:]:
        same(result, results[0], what)
    del results
    return dict(zip(calls, (round(us, 1) for us in race(list(calls.values()), stream, BURST_MS)), strict=True))


def parts_of(shape: tuple[int, ...], deterministic: bool, stream: torch.cuda.Stream) -> dict[str, Any]:
    """Times of one backward by the number of parts."""
    gpu, problem = dispatch.gpu_of(0), posed(shape)
    batch, heads_q, heads_kv, seqlen, dim = shape
    q, do = (randoms(batch, heads_q, seqlen, dim) for _ in range(2))
    k, v = (randoms(batch, heads_kv, seqlen, dim) for _ in range(2))
    o, lse = forward_plan(problem, q, k, v)(q, k, v)
    strategy, configs = backward_configs(problem, gpu, deterministic)
    kernel = split_kernel(configs)
    best = group_parts_schedule.parts_of(problem, kernel, configs[kernel], gpu)

    def call(count: int) -> Callable[[], Made]:
        plan = passes.BackwardPlan(
            problem, do, None, q, k, v, o, dim**-0.5, strategy, configs, parts={kernel: count}
        )  # fmt: skip
        return lambda: plan(do, None, q, k, v, o, lse)

    counts = [n for n in group_parts.allowed(problem) if n in (1, best) or n <= MOST_PARTS]
    us = timed({n: call(n) for n in counts}, stream, shape)
    return {"shape": shape, "deterministic": deterministic, "us": us, "chosen": best}


def odd_base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def odd_rows(tensor: torch.Tensor) -> torch.Tensor:
    *sizes, dim = tensor.shape
    return tensor.new_empty(*sizes, dim + 3)[..., 1 : dim + 1].copy_(tensor)


def one_head(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :1].expand(tensor.shape)


#: Kind of tensors -> what makes q, k and v so. Of "expanded" only the portable kernels are timed without a copy.
KINDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "odd base": (odd_base,) * 3,
    "odd rows": (odd_rows,) * 3,
    "expanded": (torch.Tensor.contiguous, one_head, one_head),
}


def copies_of(seqlen: int, kind: str, stream: torch.cuda.Stream) -> dict[str, Any]:
    """Times of both passes as the tensors are, by pointer, and with copies, by TMA."""
    gpu, scale = dispatch.gpu_of(0), 128**-0.5
    q, k, v, do = (randoms(2, 16, seqlen, 128) for _ in range(4))
    q, k, v = (make(t) for make, t in zip(KINDS[kind], (q, k, v), strict=True))
    names = ("k", "v") if kind == "expanded" else ("q", "k", "v")
    given = {"q": q, "k": k, "v": v}
    dense_ones = {name: copies.like(t).copy_(t) if name in names else t for name, t in given.items()}
    problem = replace(passes.describe(q, k, v, CAUSAL, scale), tma=False)
    ours = copies.addressable(problem)
    forwards = {
        "as they are": forward_plan(problem, q, k, v),
        "copied": copies.copying(
            forward_plan(ours, **dense_ones), ("q", "k", "v"), dict.fromkeys(names, copies.copied)
        ),
    }
    o, lse = forwards["as they are"](q, k, v)

    def backward(asked: Problem, tensors: Mapping[str, torch.Tensor]) -> passes.BackwardPlan:
        strategy, configs = backward_configs(asked, gpu)
        parts = group_parts_schedule.parts(asked, configs, gpu)
        return passes.BackwardPlan(
            asked, do, None, o=o, softmax_scale=scale, strategy=strategy, configs=configs, parts=parts, **tensors
        )

    arguments = ("do", "dlse", "q", "k", "v", "o", "lse")
    backwards = {
        "as they are": backward(problem, given),
        "copied": copies.copying(backward(ours, dense_ones), arguments, dict.fromkeys(names, copies.copied)),
    }
    return {
        "seqlen": seqlen, "kind": kind, "names": names,
        "fwd": timed({n: lambda plan=plan: plan(q, k, v) for n, plan in forwards.items()}, stream, kind),
        BACKWARD: timed(
            {n: lambda plan=plan: plan(do, None, q, k, v, o, lse) for n, plan in backwards.items()}, stream, kind
        ),
    }  # fmt: skip


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(out: Path) -> None:
    random.seed(1)
    stream = torch.cuda.Stream()
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": choosing.toolchain().triton,
        "driver": choosing.toolchain().driver, "date": time.strftime("%Y-%m-%d"), "parts": [], "copies": [],
    }  # fmt: skip
    for shape, deterministic in CALLS:
        facts["parts"].append(found := parts_of(shape, deterministic, stream))
        print(found, flush=True)
        torch.cuda.empty_cache()
    for seqlen in LENGTHS:
        for kind in KINDS:
            facts["copies"].append(found := copies_of(seqlen, kind, stream))
            print(found, flush=True)
    out.write_text(json.dumps(facts, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
