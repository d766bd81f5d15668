"""Times what may serve forwards of drawn calls that were behind a peer: tiles, RESCALE, tile orders, shared tiles, split keys.

    python benchmarks/ahead.py benchmarks/dense_forwards.py RECORD...                       # first: every binary; no GPU
    python benchmarks/dense_forwards.py RECORD... --out dense_forwards.json [--seconds 300]  # resumes from the file
    python benchmarks/dense_forwards.py --table dense_forwards.json                         # a file, as text

RECORD: drawings of benchmarks/random_calls.py (benchmarks/calls/random_calls_6.json.gz). Of their forwards, those below BEHIND
of a peer. Candidates are what serves; the row's config, and it with other values of RESCALE and HEADS_PER_WAVE; one
config for each tile, number of Q stages and programs a multiprocessor; the estimated best tiles of several heads, of each size;
the estimated best split of keys, and the Hopper one. Each result is compared with float32 arithmetic; a wrong one is an error.
Each candidate is a CUDA graph; replays are interleaved; the file holds medians of seven bursts in microseconds a call, and what
was recorded. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import few_queries
import side_by_side
import torch
import workloads
from dense_backwards import posed
from launch_choices import FORM, forms_of, race

from fa2tune import gpus
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.schedules import key_splits_schedule
from fa2tune.compiling.registry import variant_named
from fa2tune.gpus import Gpu
from fa2tune.launching import key_splits, passes
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.score import NONE

BEHIND = 1.0
ORDERS = (0, 1, 4, 22)
BURST_MS = 3.0
SHOWN, MOST_FORMS = 5, 16
LONG = 512  #: from so many queries on forms are tried with RESCALE "never", too
#: What is named of a config.
NAMED = ("BLOCK_M", "BLOCK_N", "Q_STAGES", "STAGES", "RESCALE", "IN_PARTS", "HEADS_PER_WAVE", "maxnreg", "O_THROUGH")
YES_NO = {"PINGPONG": "in turn", "Q_IN_REGISTERS": "Q kept", "NUMBERED": "numbered"}


def calls(records: tuple[Path, ...]) -> dict[str, tuple[Problem, Mapping[str, float]]]:
    """Name -> (call, recorded microseconds), of the forwards behind a peer."""
    found = {}
    for path in records:
        for name, call in json.loads(gzip.decompress(path.read_bytes()))["calls"].items():
            run = call.get("fwd", {})
            if run.get("ratio") and run["ratio"] < BEHIND:
                found[f"{path.name.split('.')[0].removeprefix('random_calls')} {name}"] = posed(call), run["us"]
    return found


def label(config: Config) -> str:
    if few_queries.in_place(config):
        return few_queries.label(config)
    said = [f"{config[name]}" for name in NAMED if name in config]
    return " ".join(said + [word for name, word in YES_NO.items() if config.get(name)])


def forms(spec: Specialization) -> list[Config]:
    """All of the space, "lazy", where they are few, else those of ``launch_choices.forms_of``."""
    space, fixed = variant_named("sm90/fwd").space, {"HEADS_PER_WAVE": 0, "RESCALE": "lazy", "Q_LATE": False}
    points = (point for point in space.points() if all(point[name] == value for name, value in fixed.items()))
    found = [point for point in points if space.broken(point, spec, 90) is None]
    if len(found) <= MOST_FORMS:
        return found
    if spec.head_dim == spec.head_dim_v:
        return forms_of(spec.head_dim, spec.mask)
    return list({tuple(config[name] for name in FORM): config for config in found}.values())


def candidates(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """Name -> config; the first is the row's."""
    space = variant_named("sm90/fwd").space
    row = choosing.choose(problem, "fwd", gpu, True)
    made = [row.config]
    for config in [row.config, *forms(problem.specialization)]:
        if "RESCALE" in config:
            large = config is row.config or (config["BLOCK_M"] >= 128 and problem.seqlen_q >= LONG)
            made += [{**config, "RESCALE": value} for value in ("lazy", *["never"] * large)]
    made += [{**row.config, "HEADS_PER_WAVE": order} for order in ORDERS]
    made = [one for one in made if one is row.config or space.broken(one, problem.specialization, gpu.arch) is None]
    made += few_queries.grouped_tiles(problem, gpu) if problem.group > 1 else []
    made.append(key_splits_schedule.best(problem, gpu)[1])
    if hopper := key_splits_schedule.hopper_best(problem, gpu):
        made.append(hopper[1])
    return {label(one): one for one in made}


def measured(problem: Problem, gpu: Gpu) -> dict[str, float]:
    """Candidate -> microseconds; what serves is the first."""
    q, k, v = (
        torch.randn(problem.batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
        for length, heads, dim in (
            (problem.seqlen_q, problem.heads_q, problem.head_dim),
            (problem.seqlen_k, problem.heads_kv, problem.head_dim),
            (problem.seqlen_k, problem.heads_kv, problem.head_dim_v),
        )
    )
    do = torch.ones(1, device="cuda", dtype=torch.bfloat16).expand(
        problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v
    )
    want = workloads.expected(problem, q, k, v, do)
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    scale = problem.head_dim**-0.5
    ours = passes.describe(q, k, v, problem.mask, scale)
    plans: dict[str, Any] = {"served": partial(dispatch.forward, mask=problem.mask, softmax_scale=scale, score=NONE)}
    for name, config in candidates(ours, gpu).items():
        kind = key_splits.SplitPlan if few_queries.in_place(config) else passes.ForwardPlan
        plans[name] = kind(ours, q, k, v, scale, config)
    for name, plan in plans.items():
        torch.use_deterministic_algorithms(True)  # what is allocated is filled with NaN
        o = plan(q, k, v)[0].transpose(1, 2)
        torch.use_deterministic_algorithms(False)
        if (why := workloads.wrong({"o": o}, want, problem.group)) is not None:
            raise click.ClickException(f"{workloads.described(problem)}, {name}: {why}")
    calls = [lambda plan=plan: plan(q, k, v) for plan in plans.values()]
    times = race(calls, torch.cuda.Stream(), BURST_MS)
    return dict(zip(plans, (round(us, 2) for us in times), strict=True))


def line(name: str, call: Mapping[str, Any]) -> str:
    ordered = sorted((us, which) for which, us in call["us"].items() if which != "served")
    best = "; ".join(f"{which}: {us}" for us, which in ordered[:SHOWN])
    return f"{name}, {call['call']}: served {call['us']['served']}, {best}; when drawn {call['when drawn']}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.argument("records", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--list", "listed", is_flag=True, help="Print what would be timed on an H200.")
@side_by_side.share_option
@click.option("--seconds", type=float, default=300.0, show_default=True, help="Begins no call after so long.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON; its calls are not measured again.")
@click.option("--table", "shown", type=click.Path(exists=True, path_type=Path), help="Print this file's times.")
def main(
    records: tuple[Path, ...], listed: bool, share: slice, seconds: float, out: Path | None, shown: Path | None
) -> None:
    if shown is not None:
        click.echo("\n".join(line(*one) for one in json.loads(shown.read_text("utf-8"))["calls"].items()))
        return
    wanted = dict(list(calls(records).items())[share])
    if listed:
        for name, (problem, _) in wanted.items():
            click.echo(f"{name}: {workloads.described(problem)}: {'; '.join(candidates(problem, gpus.named('h200')))}")
        return
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})

    def one(pair: tuple[Problem, Mapping[str, float]]) -> dict[str, Any]:
        problem, us = pair
        times = measured(problem, dispatch.gpu_of(0))
        return {"call": workloads.described(problem), "us": times, "when drawn": us}

    side_by_side.fill(record, wanted, one, seconds, out, line)


if __name__ == "__main__":
    main()
