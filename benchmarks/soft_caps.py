"""Time calls with a soft cap: by the kernels that serve them, by portable ones, and the same calls without a cap.

    python benchmarks/soft_caps.py [--seconds 400] [--out FILE]

Shapes are those of Gemma 2 (head dims 256 and 128, grouped heads, windows) and a few others, bf16, 16k tokens, both passes.
"served": what the dispatcher chooses; "portable": the best rows of portable kernels, split in the backward. Each is a CUDA
graph; replays are interleaved in random order; times are medians of seven bursts in microseconds a call. Capped results that
differ by more than bf16 allows are an error. Needs a GPU of compute capability 9.0. What Triton's cache lacks is compiled first
(``benchmarks/ahead.py`` does so beforehand).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from group_parts import BURST_MS, Made, backward_configs, randoms, same
from launch_choices import race

from fa2tune.calling import choosing, dispatch
from fa2tune.calling.kinds import PORTABLE_ROWS
from fa2tune.launching import passes
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import SPLIT, STRATEGIES, Problem
from fa2tune.spec.score import NONE, Score

CAP = Score("softcap", 50.0)
#: Query heads, key heads, head dim, length, mask.
CALLS: tuple[tuple[int, int, int, int, Mask], ...] = (
    (8, 4, 256, 8192, CAUSAL), (8, 4, 256, 8192, band(4095, 0)), (16, 8, 256, 4096, CAUSAL),
    (32, 16, 128, 8192, CAUSAL), (32, 16, 128, 8192, band(4095, 0)), (16, 16, 128, 2048, FULL),
    (32, 32, 64, 4096, CAUSAL), (32, 32, 64, 2048, FULL), (32, 8, 128, 512, CAUSAL),
)  # fmt: skip
TOKENS = 16384


def served(problem: Problem, gpu: Any, portable: bool) -> tuple[Any, tuple[str, dict[str, Any]]]:
    """Config of the forward, and (strategy, kernel -> config) of the backward."""
    if not portable:
        return choosing.choose(problem, "fwd", gpu).config, backward_configs(problem, gpu)
    backward = {kernel: choosing.choose(problem, kernel, gpu, PORTABLE_ROWS).config for kernel in STRATEGIES[SPLIT]}
    return choosing.choose(problem, "fwd", gpu, PORTABLE_ROWS).config, (SPLIT, backward)


def times(heads_q: int, heads_kv: int, dim: int, length: int, mask: Mask, stream: torch.cuda.Stream) -> dict[str, Any]:
    gpu, batch = dispatch.gpu_of(0), TOKENS // length
    capped = replace(Problem("bf16", batch, heads_q, heads_kv, length, length, dim, dim, mask), score=CAP)
    q, do = (randoms(batch, heads_q, length, dim) for _ in range(2))
    k, v = (randoms(batch, heads_kv, length, dim) for _ in range(2))
    found: dict[str, Any] = {"call": f"{batch} x {heads_q}/{heads_kv} x {length}, {dim}, {mask}", "fwd": {}, "bwd": {}}
    calls: dict[str, dict[str, Callable[[], Made]]] = {"fwd": {}, "bwd": {}}
    for name, problem, portable in (
        ("none", replace(capped, score=NONE), False), ("served", capped, False), ("portable", capped, True),
    ):  # fmt: skip
        config, (strategy, configs) = served(problem, gpu, portable)
        forward = passes.ForwardPlan(problem, q, k, v, dim**-0.5, config)
        o, lse = forward(q, k, v)
        backward = passes.BackwardPlan(problem, do, None, q, k, v, o, dim**-0.5, strategy, configs)
        calls["fwd"][name] = lambda forward=forward: forward(q, k, v)  # type: ignore[misc]
        calls["bwd"][name] = lambda plan=backward, o=o, lse=lse: plan(do, None, q, k, v, o, lse)  # type: ignore[misc]
    for side, each in calls.items():
        same(each["served"](), each["portable"](), (found["call"], side))
        found[side] = dict(zip(each, (round(us, 1) for us in race(list(each.values()), stream, BURST_MS)), strict=True))
    return found


@click.command(help=__doc__)
@click.option("--seconds", type=float, default=400.0, show_default=True, help="Begin no call after this time.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="All times, as JSON.")
def main(seconds: float, out: Path | None) -> None:
    begun, stream, found = time.monotonic(), torch.cuda.Stream(), []
    for call in CALLS:
        if time.monotonic() - begun > seconds:
            break
        found.append(times(*call, stream))
        click.echo(json.dumps(found[-1]))
        if out is not None:
            out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "calls": found}, indent=1))


if __name__ == "__main__":
    main()
