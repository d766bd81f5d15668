"""Times short calls with divisors from the host (DIVISORS) and with kernels that divide.

    python benchmarks/divisors.py forward RECORD... --out f.json [--seconds 300]   # resumes from the file
    python benchmarks/divisors.py split RECORD... --out s.json                     # both kernels of split backwards
    python benchmarks/divisors.py --table f.json                                   # a file, as text

RECORD: drawings of benchmarks/random_calls.py. Of their calls those that are served with DIVISORS, each of them served and
without. Checks and times are those of benchmarks/dense_forwards.py and dense_backwards.py: results are compared with float32
arithmetic first, replays of CUDA graphs are interleaved. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import dense_backwards
import dense_forwards
import side_by_side
import workloads

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.gpus import Gpu
from fa2tune.spec.problem import Config, Problem

SENT, DIVIDED = "sent", "divided"


def without(config: Config) -> Config:
    return {**config, "DIVISORS": False}


def forward_configs(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """What serves by the warp-specialised kernel, and the same that divides; nothing where DIVISORS do not serve."""
    config = choosing.choose(problem, "fwd", gpu).config
    return {SENT: config, DIVIDED: without(config)} if config.get("DIVISORS") else {}


def split_candidates(problem: Problem, gpu: Gpu) -> dict[str, dense_backwards.Ordered]:
    """The same of both kernels of a split backward."""
    choices, order = dense_backwards.split(problem, gpu)
    if not any(choice.config.get("DIVISORS") for choice, _ in choices.values()):
        return {}
    own = {name: (replace(choice, config=without(choice.config)), parts) for name, (choice, parts) in choices.items()}
    return {SENT: (choices, order), DIVIDED: (own, order)}


FORMS = {"forward": forward_configs, "split": split_candidates}


def drawn(records: tuple[Path, ...], form: str, gpu: Gpu) -> Iterator[tuple[str, Problem]]:
    for path in records:
        for name, call in json.loads(gzip.decompress(path.read_bytes()))["calls"].items():
            problem = dense_backwards.posed(call)
            if FORMS[form](problem, gpu):
                yield f"{path.name.partition('.')[0].rpartition('_')[2]}.{name}", problem


def measured(problem: Problem, form: str, gpu: Gpu) -> dict[str, float]:
    if form == "split":
        return dense_backwards.measured(problem, split_candidates)
    times, wrong = dense_forwards.measured(problem, lambda posed: forward_configs(posed, gpu))
    if wrong:
        raise click.ClickException(f"{workloads.described(problem)}: {wrong}")
    return {name: times[name] for name in (SENT, DIVIDED)}


def line(name: str, call: Mapping[str, Any]) -> str:
    us = call["us"]
    return f"{name}, {call['call']}: {us[SENT]} us, {us[DIVIDED]} where it divides, {us[SENT] / us[DIVIDED]:.3f} of the time"


def summary(calls: Mapping[str, Mapping[str, Any]]) -> str:
    ratios = sorted(call["us"][SENT] / call["us"][DIVIDED] for call in calls.values())
    saved = statistics.median(call["us"][DIVIDED] - call["us"][SENT] for call in calls.values())
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    return (
        f"{len(ratios)} calls: {ratios[0]:.3f} to {ratios[-1]:.3f} of the time, geometric mean {mean:.3f}, "
        f"{saved:.2f} us saved in the median, {sum(ratio > 1.01 for ratio in ratios)} slower by more than 1 %"
    )


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@side_by_side.of_drawings(FORMS)
def main(
    form: str, records: tuple[Path, ...], share: slice, seconds: float, out: Path | None, shown: Path | None
) -> None:
    if shown is not None:
        calls = json.loads(shown.read_text("utf-8"))["calls"]
        click.echo("\n".join([*(line(*one) for one in calls.items()), summary(calls)]))
        return
    gpu = gpus.named("h200")
    problems = dict(list(drawn(records, form, gpu))[share])
    record = side_by_side.begun(out, {"environment": side_by_side.environment(), "form": form})

    def one(problem: Problem) -> dict[str, Any]:
        return {"call": workloads.described(problem), "us": measured(problem, form, gpu)}

    side_by_side.fill(record, problems, one, seconds, out, line)
    click.echo(summary(record["calls"]))


if __name__ == "__main__":
    main()
