"""Times backwards of a few microseconds with each kernel started before the one before it ends (EARLY_START), and without.

    python benchmarks/ahead.py benchmarks/early_start.py                   # first: every binary, on all cores; no GPU
    python benchmarks/early_start.py --out early_start.json                # resumes from the file
    python benchmarks/early_start.py --drawing RECORD --out FILE           # drawn calls, of 20 us and more
    python benchmarks/early_start.py --list                                # what would be timed; no GPU
    python benchmarks/early_start.py --table early_start.json              # a file, as text

Of each call what serves it without the form, the same with it, and what its row names, in the same number of parts. Of head
dims above 128, which the split kernels serve, one kernel after the other; where both are expected to be faster at a time, in
that order, too. --drawing: of records of benchmarks/random_calls.py the calls that are served with the form now, and took
LONGER microseconds or more. Kernels with the form also have their divisors from the host (kernels/lib/division.py): both are
timed together. Checks and times are those of benchmarks/dense_backwards.py. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import dense_backwards
import side_by_side
import workloads

from fa2tune import gpus
from fa2tune.calling.schedules import fused_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

KERNEL = dense_backwards.FUSED_KERNEL
ROW, WITHOUT, WITH = "the row's form", "one after the other", "started early"
AT_A_TIME, BOTH = "at a time", "at a time, started early"
LONGER = 20.0
#: (batch, heads, queries, keys, head dim, mask)
CALLS = (
    (2, 3, 158, 802, 96, FULL), (8, 2, 220, 220, 96, CAUSAL), (10, 1, 208, 208, 24, CAUSAL), (1, 1, 85, 386, 56, FULL),
    (10, 1, 341, 341, 56, CAUSAL), (5, 3, 647, 647, 128, CAUSAL), (1, 4, 572, 572, 88, CAUSAL), (8, 8, 515, 515, 32, CAUSAL),
    (2, 8, 1024, 1024, 64, CAUSAL), (2, 16, 2048, 2048, 128, FULL), (1, 1, 104, 104, 248, CAUSAL), (2, 5, 92, 92, 240, FULL),
    (4, 6, 300, 300, 192, CAUSAL), (2, 8, 1000, 1000, 256, FULL),
    (1, 16, 1100, 1100, 128, CAUSAL), (4, 8, 1024, 1024, 128, CAUSAL), (8, 8, 515, 515, 128, CAUSAL),
    (1, 24, 1100, 1100, 128, CAUSAL), (3, 12, 700, 700, 120, CAUSAL), (12, 16, 300, 300, 128, CAUSAL),
    (2, 10, 1000, 1000, 128, FULL), (2, 10, 1000, 1000, 96, CAUSAL),
)  # fmt: skip


def posed(shape: tuple[Any, ...]) -> Problem:
    batch, heads, queries, keys, dim, mask = shape
    return Problem("bf16", batch, heads, heads, queries, keys, dim, dim, mask)


def _started(choice: Choice, early: bool) -> Choice:
    return replace(choice, config={**choice.config, "EARLY_START": early})


def short(_problem: Problem, choices: Mapping[str, Choice], call: Mapping[str, Any]) -> bool:
    """Whether --drawing takes a call."""
    early = any(choice.config.get("EARLY_START") for choice in choices.values())
    return early and call["us"]["fa2tune"] >= LONGER


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


def line(name: str, call: Mapping[str, Any]) -> str:
    us = call["us"]
    return f"{name}: {', '.join(f'{which} {its} us' for which, its in us.items())}; {us[WITHOUT] - us[WITH]:.1f} less"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--list", "listed", is_flag=True, help="Print what would be timed on an H200.")
@click.option(
    "--drawing", "records", type=click.Path(exists=True, path_type=Path), multiple=True, help="Calls of these."
)
@side_by_side.timing_options
def main(
    listed: bool, records: tuple[Path, ...], share: slice, seconds: float, out: Path | None, shown: Path | None
) -> None:
    if shown is not None:
        click.echo("\n".join(line(*one) for one in json.loads(shown.read_text("utf-8"))["calls"].items()))
        return
    problems = {workloads.described(one): one for one in map(posed, CALLS)}
    if records:
        problems = dense_backwards.drawn(records, gpus.named("h200"), short)
    problems = dict(list(problems.items())[share])
    if listed:
        for name, problem in problems.items():
            found = candidates(problem, gpus.named("h200"))
            for kernel, (choice, parts) in found[WITH][0].items():
                click.echo(f"{name}: {kernel}, {parts} parts, {dict(choice.config)}; {', '.join(found)}")
        return
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})

    def one(problem: Problem) -> dict[str, Any]:
        return {"us": dense_backwards.measured(problem, candidates)}

    side_by_side.fill(record, problems, one, seconds, out, line)


if __name__ == "__main__":
    main()
