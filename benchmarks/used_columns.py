"""Times Hopper forwards whose products leave out columns that no head dim fills, next to the same with all columns of a tile.

    python benchmarks/used_columns.py --out benchmarks/calls/used_columns.json [--seconds 200]    # resumes from the file

Each call runs as it is served, by kernels/sm90/fwd.py, and with USED_D as all columns of Q's and K's tiles. Results are
compared with float32 arithmetic. CUDA graphs, interleaved; microseconds a call. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import side_by_side
import torch
import workloads
from launch_choices import race

from fa2tune.calling import choosing, dispatch
from fa2tune.compiling.choice import Choice
from fa2tune.launching import passes
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

BURST_MS = 3.0


def _calls() -> dict[str, Problem]:
    found = {}
    for dim in (104, 112, 168, 176, 200, 208, 224, 240):
        for mask in (FULL, CAUSAL):
            found[f"{dim} {mask}"] = Problem("bf16", 3, 20, 10, 2872, 2872, dim, dim, mask)
    found["short 224 full"] = Problem("bf16", 4, 28, 28, 700, 700, 224, 224, FULL)
    found["short 112 causal"] = Problem("bf16", 8, 12, 4, 900, 900, 112, 112, CAUSAL)
    return found


def of_all_columns(choice: Choice) -> Choice:
    """The same kernel, multiplying all columns of Q's and K's tiles."""
    variant = choice.variant

    def constants(spec: Any, config: Any) -> dict[str, Any]:
        found = variant.constants(spec, config)
        return {**found, "USED_D": found["BLOCK_D"] + found["REST_D"]}

    return replace(choice, variant=replace(variant, constants=constants))


def measured(problem: Problem) -> dict[str, Any]:
    (q, k, v), _, check, _ = workloads.posed(problem)
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    scale = problem.head_dim**-0.5
    ours = passes.describe(q, k, v, problem.mask, scale)
    served = choosing.choose(ours, "fwd", dispatch.gpu_of(0))
    if served.variant.name != "sm90/fwd":
        raise SystemExit(f"{workloads.described(problem)}: served by {served.variant.name}")
    plans = {
        "used": passes.ForwardPlan(ours, q, k, v, scale, served),
        "all": passes.ForwardPlan(ours, q, k, v, scale, of_all_columns(served)),
    }
    for name, plan in plans.items():
        if wrong := check({"o": plan(q, k, v)[0].transpose(1, 2)}):
            raise SystemExit(f"{workloads.described(problem)}, {name}: {wrong}")
    times = race([functools.partial(plan, q, k, v) for plan in plans.values()], torch.cuda.Stream(), BURST_MS)
    return {"call": workloads.described(problem), "us": dict(zip(plans, (round(us, 2) for us in times), strict=True))}


def line(name: str, call: Mapping[str, Any]) -> str:
    used, whole = call["us"]["used"], call["us"]["all"]
    return f"{name:18} used {used:8.1f} us, all {whole:8.1f} us, {used / whole:.3f}"


@click.command(help=(__doc__ or "").splitlines()[0])
@side_by_side.share_option
@click.option("--seconds", type=float, default=200.0, show_default=True, help="Begins no call after so long.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON; its calls are not measured again.")
def main(share: slice, seconds: float, out: Path | None) -> None:
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})
    side_by_side.fill(record, side_by_side.in_share(_calls(), share), measured, seconds, out, line)


if __name__ == "__main__":
    main()
