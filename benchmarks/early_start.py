"""Times calls of a few microseconds with each kernel started before the one before it ends (EARLY_START), and without.

    python benchmarks/ahead.py benchmarks/early_start.py                   # first: every binary, on all cores; no GPU
    python benchmarks/early_start.py --out early_start.json                # resumes from the file
    python benchmarks/early_start.py --list                                # what would be timed; no GPU
    python benchmarks/early_start.py --table early_start.json              # a file, as text
    python benchmarks/early_start.py --forwards --out early_forwards.json  # the same options

Of each call what serves it without the form, the same with it, and what its row names, in the same number of parts. Of head
dims above 128, which the split kernels serve, one kernel after the other; where both are expected to be faster at a time, in
that order, too. Checks and times are those of benchmarks/dense_backwards.py.

--forwards: the tuned kernel, one call after the other, and each behind a kernel of another library that makes its Q ("behind"):
the time of both. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import dense_backwards
import launch_choices
import side_by_side
import torch
import workloads

from fa2tune import gpus
from fa2tune.calling import choosing, dispatch, forward_plans
from fa2tune.calling.schedules import fused_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import passes
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

KERNEL = dense_backwards.FUSED_KERNEL
ROW, WITHOUT, WITH = "the row's form", "one after the other", "started early"
AT_A_TIME, BOTH = "at a time", "at a time, started early"
#: (batch, heads, queries, keys, head dim, mask)
CALLS = (
    (2, 3, 158, 802, 96, FULL), (8, 2, 220, 220, 96, CAUSAL), (10, 1, 208, 208, 24, CAUSAL), (1, 1, 85, 386, 56, FULL),
    (10, 1, 341, 341, 56, CAUSAL), (5, 3, 647, 647, 128, CAUSAL), (1, 4, 572, 572, 88, CAUSAL), (8, 8, 515, 515, 32, CAUSAL),
    (2, 8, 1024, 1024, 64, CAUSAL), (2, 16, 2048, 2048, 128, FULL), (1, 1, 104, 104, 248, CAUSAL), (2, 5, 92, 92, 240, FULL),
    (4, 6, 300, 300, 192, CAUSAL), (2, 8, 1000, 1000, 256, FULL),
)  # fmt: skip


BURST_MS = 3.0
FORWARDS = (
    (34, 1, 476, 476, 16, FULL), (22, 3, 226, 102, 192, FULL), (7, 4, 700, 700, 16, FULL), (3, 2, 363, 385, 224, FULL),
    (33, 2, 201, 201, 128, FULL), (6, 11, 221, 221, 184, CAUSAL), (1, 2, 2176, 2176, 48, CAUSAL), (2, 5, 1605, 1605, 128, FULL),
    (3, 66, 88, 88, 160, FULL), (1, 6, 1316, 1316, 224, FULL), (2, 16, 2048, 2048, 128, CAUSAL), (1, 1, 77, 77, 64, FULL),
)  # fmt: skip


def posed(shape: tuple[Any, ...]) -> Problem:
    batch, heads, queries, keys, dim, mask = shape
    return Problem("bf16", batch, heads, heads, queries, keys, dim, dim, mask)


def _started(choice: Choice, early: bool) -> Choice:
    return replace(choice, config={**choice.config, "EARLY_START": early})


def candidates(problem: Problem, gpu: Gpu) -> dict[str, dense_backwards.Ordered]:
    """Name -> candidate."""
    now = dense_backwards.chosen(problem, gpu)
    if KERNEL not in now:
        without, early = (
            {name: (_started(choice, early), parts) for name, (choice, parts) in now.items()} for early in (False, True)
        )
        order = dense_backwards.order_of(problem, now, gpu)
        found: dict[str, dense_backwards.Ordered] = {WITHOUT: (without, ""), WITH: (early, "")}
        return {**found, AT_A_TIME: (without, order), BOTH: (early, order)} if order else found
    choice, parts = now[KERNEL]
    if choice.config["BESIDE"]:
        choice = replace(choice, config=fused_schedule.apart(choice.config), otherwise=choice.config)
    found = {name: ({KERNEL: (_started(choice, early), parts)}, "") for name, early in ((WITHOUT, False), (WITH, True))}
    if choice.of_row.config["BESIDE"]:
        found[ROW] = {KERNEL: (choice.of_row, parts)}, ""
    return found


def forward_candidates(problem: Problem, gpu: Gpu) -> dict[str, Choice]:
    """Name -> choice."""
    choice = choosing.choose(problem, "fwd", gpu)
    early = forward_plans.started_early(choice)
    return {WITHOUT: choice} if early is None else {WITHOUT: choice, WITH: replace(choice, config=early)}


def forwards(problem: Problem) -> dict[str, float]:
    """Candidate -> microseconds."""
    sides = [(problem.heads_q, problem.seqlen_q), *[(problem.heads_kv, problem.seqlen_k)] * 2]
    source, k, v = (
        torch.randn(problem.batch, heads, rows, problem.head_dim, device="cuda", dtype=torch.bfloat16)
        for heads, rows in sides
    )
    q, scale = torch.empty_like(source), problem.head_dim**-0.5
    torch.neg(source, out=q)
    do = torch.ones(1, device="cuda", dtype=torch.bfloat16).expand(q.transpose(1, 2).shape)
    want = workloads.expected(problem, *(one.transpose(1, 2) for one in (q, k, v)), do)
    calls: dict[str, Callable[[], Any]] = {}
    for name, choice in forward_candidates(problem, dispatch.gpu_of(0)).items():
        plan = passes.ForwardPlan(problem, q, k, v, scale, choice)

        def behind(plan: passes.ForwardPlan = plan) -> Any:
            torch.neg(source, out=q)
            return plan(q, k, v)

        q.fill_(math.nan)
        if (why := workloads.wrong({"o": behind()[0].transpose(1, 2)}, want, problem.group)) is not None:
            raise click.ClickException(f"{workloads.described(problem)}, {name}: {why}")
        calls |= {name: partial(plan, q, k, v), f"{name}, behind": behind}
    times = launch_choices.race(list(calls.values()), torch.cuda.Stream(), BURST_MS)
    return dict(zip(calls, (round(us, 2) for us in times), strict=True))


def line(name: str, call: Mapping[str, Any]) -> str:
    us = call["us"]
    return f"{name}: {', '.join(f'{which} {its} us' for which, its in us.items())}; {us[WITHOUT] - us[WITH]:.1f} less"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--forwards", "of_forwards", is_flag=True, help="Forwards instead.")
@click.option("--list", "listed", is_flag=True, help="Print what would be timed on an H200.")
@click.option("--seconds", type=float, default=300.0, show_default=True, help="Begins no call after so long.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON; its calls are not measured again.")
@click.option("--table", "shown", type=click.Path(exists=True, path_type=Path), help="Print this file's times.")
def main(of_forwards: bool, listed: bool, seconds: float, out: Path | None, shown: Path | None) -> None:
    if shown is not None:
        click.echo("\n".join(line(*one) for one in json.loads(shown.read_text("utf-8"))["calls"].items()))
        return
    shapes = FORWARDS if of_forwards else CALLS
    problems = {workloads.described(problem): problem for problem in map(posed, shapes)}
    if listed:
        for name, problem in problems.items():
            if of_forwards:
                for which, tuned in forward_candidates(problem, gpus.named("h200")).items():
                    click.echo(f"{name}: {which}, {dict(tuned.config)}")
                continue
            found = candidates(problem, gpus.named("h200"))
            for kernel, (choice, parts) in found[WITH][0].items():
                click.echo(f"{name}: {kernel}, {parts} parts, {dict(choice.config)}; {', '.join(found)}")
        return
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})

    def one(problem: Problem) -> dict[str, Any]:
        return {"us": forwards(problem) if of_forwards else dense_backwards.measured(problem, candidates)}

    side_by_side.fill(record, problems, one, seconds, out, line)


if __name__ == "__main__":
    main()
