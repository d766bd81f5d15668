"""Times short forwards by the kernel whose warps load for themselves (kernels/sm90/fwd_multistage.py), next to what serves
otherwise.

    python benchmarks/ahead.py benchmarks/multistage_forwards.py RECORD...        # first: every binary, on all cores; no GPU
    python benchmarks/multistage_forwards.py RECORD... --out FILE [--seconds 300] # resumes from the file
    python benchmarks/multistage_forwards.py --table FILE                         # a file, as text

RECORD: of benchmarks/random_calls.py; of its calls those below MOST_US for which the kernel is asked. Each form is compared
with float32 arithmetic before it is timed, as a CUDA graph. Replays are interleaved; the file holds medians of seven bursts in
microseconds a call, and what was recorded. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import dense_forwards
import few_queries
import side_by_side

from fa2tune.calling import dispatch
from fa2tune.calling.schedules import multistage_schedule
from fa2tune.gpus import Gpu
from fa2tune.spec.problem import Config, Problem

MOST_US = 30.0


def configs_of(problem: Problem, arch: int) -> dict[str, Config]:
    """Of the kernel, by name; none: it does not compute this call."""
    return {few_queries.label(config): config for config in multistage_schedule.candidates(problem, arch)}


def calls_of(records: Sequence[Path], gpu: Gpu) -> dict[str, tuple[Problem, Mapping[str, float]]]:
    """Name -> (problem, recorded microseconds)."""

    def taken(problem: Problem, us: Mapping[str, float]) -> bool:
        short = us.get(side_by_side.SUBJECT, MOST_US) < MOST_US
        return short and multistage_schedule.asked(problem, gpu) and bool(configs_of(problem, gpu.arch))

    return dense_forwards.of_row_masks(records, taken)


def line(name: str, call: Mapping[str, Any]) -> str:
    return f"{name}: {call['us']}; when drawn {call['when drawn']}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.argument("records", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@side_by_side.timing_options
def main(records: Sequence[Path], share: slice, seconds: float, out: Path | None, shown: Path | None) -> None:
    if shown is not None:
        click.echo("\n".join(line(*one) for one in json.loads(shown.read_text("utf-8"))["calls"].items()))
        return
    multistage_schedule.MARGIN = 1.0  # what serves otherwise is timed
    gpu = dispatch.gpu_of(0)
    wanted = side_by_side.in_share(calls_of(records, gpu), share)
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})
    one = partial(dense_forwards.compared, configs=lambda ours: configs_of(ours, gpu.arch))
    side_by_side.fill(record, wanted, one, seconds, out, line)


if __name__ == "__main__":
    main()
