"""Times backwards of few key tiles with the query blocks of a tile in parts (QUERY_PARTS), and what serves without.

    python benchmarks/ahead.py benchmarks/query_parts.py                   # first: every binary, on all cores; no GPU
    python benchmarks/query_parts.py --out benchmarks/calls/query_parts.json [--seconds 300]  # resumes from the file
    python benchmarks/query_parts.py --drawing RECORD... --out FILE        # dense calls of random_calls.py that have parts
    python benchmarks/query_parts.py --list                                # what would be timed; no GPU
    python benchmarks/query_parts.py --table benchmarks/calls/query_parts.json                # a file, as text

Of each dense call of CALLS what serves it without parts, the fused kernel alone on the GPU, and that with each number of parts
that leaves no more than MOST_TILES tiles a multiprocessor, each kernel started early; with the fewest also one after the other.
Checks and times are those of benchmarks/dense_backwards.py. Packed calls: packed_choices.py --drawing 11. Needs a GPU of
compute capability 9.0.
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
from early_start import posed

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.calling.schedules import fused_schedule, group_parts_schedule, query_parts_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import group_parts
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

KERNEL = dense_backwards.FUSED_KERNEL
MOST_TILES = 4
KEYS = bwd_fused.GROUPS * bwd_fused.KEYS
#: (batch, heads, queries, keys, head dim, mask)
CALLS = (
    (1, 2, 2144, 2144, 128, CAUSAL), (1, 1, 8192, 8192, 128, CAUSAL), (1, 2, 8192, 8192, 128, CAUSAL),
    (1, 1, 1024, 1024, 64, FULL), (1, 4, 4096, 4096, 128, CAUSAL), (1, 8, 2048, 2048, 128, CAUSAL),
    (1, 8, 2048, 2048, 64, CAUSAL), (1, 4, 4096, 4096, 64, CAUSAL), (1, 1, 16384, 16384, 128, FULL),
    (1, 2, 8192, 8192, 64, FULL), (7, 1, 1405, 1405, 56, CAUSAL), (5, 3, 958, 958, 32, FULL),
    (2, 2, 1000, 5000, 96, CAUSAL), (2, 2, 5000, 1000, 96, FULL), (1, 16, 1024, 1024, 128, CAUSAL),
    (3, 3, 1024, 1024, 128, FULL), (1, 3, 4096, 4096, 24, CAUSAL), (2, 9, 3818, 3818, 56, CAUSAL),
    (1, 17, 1024, 1024, 128, FULL), (3, 1, 2500, 2500, 40, CAUSAL), (1, 32, 640, 640, 64, CAUSAL),
    (4, 1, 700, 700, 88, CAUSAL), (1, 6, 6559, 6559, 120, FULL), (1, 1, 500, 4000, 64, FULL),
)  # fmt: skip


def without_parts(problem: Problem, gpu: Gpu) -> Mapping[str, Choice]:
    with dense_backwards.whole_blocks():
        return choosing.choose_backward(choosing.Chooser(problem, gpu), False)[1]


def in_parts(choice: Choice, parts: int, early: bool = True) -> dense_backwards.Ordered:
    config = {**query_parts_schedule.form(choice), "EARLY_START": early}
    return {KERNEL: (replace(choice, config=config, otherwise=choice.of_row.config), parts)}, ""


def candidates(problem: Problem, gpu: Gpu) -> dict[str, dense_backwards.Ordered]:
    """Name -> candidate."""
    without = without_parts(problem, gpu)
    found: dict[str, dense_backwards.Ordered] = {}
    if KERNEL not in without:
        return found
    choice = without[KERNEL]
    found["without"] = {KERNEL: (choice, group_parts_schedule.parts_of(problem, KERNEL, choice, gpu))}, ""
    alone = {**fused_schedule.apart(choice.config), "EARLY_START": True}
    found["fused, alone"] = {KERNEL: (replace(choice, config=alone), 1)}, ""
    tiles = problem.batch * problem.heads_q * -(-problem.seqlen_k // KEYS)
    counts = [
        n for n in group_parts.query_counts(problem, gpu.arch) if n == 2 or n * tiles <= MOST_TILES * gpu.sm_count
    ]
    for parts in counts:
        found[f"{parts} parts"] = in_parts(choice, parts)
    found[f"{counts[0]} parts, one after the other"] = in_parts(choice, counts[0], False)
    return found


def predicted(problem: Problem, gpu: Gpu) -> str:
    """What is chosen, and microseconds."""
    choice = without_parts(problem, gpu)[KERNEL]
    form = query_parts_schedule.form(choice)
    times = [
        f"{parts} parts {fused_schedule.predicted_us(problem, form, gpu, parts):.1f}"
        for parts in group_parts.query_counts(problem, gpu.arch)
    ]
    now = choosing.choose_backward(choosing.Chooser(problem, gpu), False)[1]
    chosen = group_parts_schedule.parts_of(problem, KERNEL, now[KERNEL], gpu) if KERNEL in now else "split kernels"
    alone = fused_schedule.predicted_us(problem, choice.config, gpu)
    return f"chosen {chosen}; fused {alone:.1f}, {', '.join(times)}"


def in_parts_now(_problem: Problem, choices: Mapping[str, Choice], _call: Mapping[str, Any]) -> bool:
    """Whether --drawing takes a call."""
    return KERNEL in choices and group_parts.of_queries(choices[KERNEL].config)


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
        calls = json.loads(shown.read_text("utf-8"))["calls"]
        click.echo("\n".join(f"{name}: {call['us']}" for name, call in calls.items()))
        return
    gpu = gpus.named("h200")
    problems = {workloads.described(one): one for one in map(posed, CALLS)}
    if records:
        problems = dense_backwards.drawn(records, gpu, in_parts_now)
    problems = dict(list(problems.items())[share])
    if listed:
        for name, problem in problems.items():
            click.echo(f"{name}: {predicted(problem, gpu)}")
        return
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})

    def one(problem: Problem) -> dict[str, Any]:
        return {"us": dense_backwards.measured(problem, candidates)}

    side_by_side.fill(record, problems, one, seconds, out, lambda name, call: f"{name}: {call['us']}")


if __name__ == "__main__":
    main()
