"""Times forwards of at most 256 keys by the kernel whose tiles have all of them (kernels/sm90/fwd_one_tile.py), beside
what serves otherwise.

    python benchmarks/ahead.py benchmarks/one_tile_forwards.py RECORD...          # first: every binary, on all cores; no GPU
    python benchmarks/one_tile_forwards.py RECORD... --out FILE [--seconds 300]   # resumes from the file
    python benchmarks/one_tile_forwards.py [RECORD...] --table FILE           # a file, as text; of these records what takes it

RECORD: of benchmarks/random_calls.py; of its calls those for which the kernel is asked. Each form is compared with float32
arithmetic before it is timed, as a CUDA graph. Replays are interleaved; the file holds medians of seven bursts in microseconds
a call, and what was recorded. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import dense_forwards
import merged_heads
import side_by_side

from fa2tune import gpus
from fa2tune.calling import dispatch
from fa2tune.calling.choosing import Chooser
from fa2tune.calling.schedules import few_keys_schedule, in_place_schedule
from fa2tune.gpus import Gpu
from fa2tune.launching import key_splits
from fa2tune.spec.problem import Config, Problem

SERVED = "served"


def configs_of(problem: Problem, arch: int) -> dict[str, Config]:
    """Of the kernel, by name; none: it does not compute this call."""
    found = few_keys_schedule.candidates(problem, arch)
    return {name_of(config): config for config in found}


def name_of(config: Config) -> str:
    return f"{config['BLOCK_M']} rows, {config['KEYS']} keys"


def calls_of(records: Sequence[Path], gpu: Gpu) -> dict[str, tuple[Problem, Mapping[str, float]]]:
    """Name -> (problem, recorded microseconds)."""
    return dense_forwards.of_row_masks(
        records, lambda problem, _us: few_keys_schedule.asked(problem, gpu) and bool(configs_of(problem, gpu.arch))
    )


def line(name: str, call: Mapping[str, Any]) -> str:
    us = call["us"]
    peers = {peer: time for peer, time in call["when drawn"].items() if peer != side_by_side.SUBJECT and time}
    best = min(peers, key=lambda peer: peers[peer], default="")
    forms = {form: time for form, time in us.items() if form != SERVED}
    share = min(forms.values(), default=0.0) / us[SERVED]
    return f"{name}: {share:.2f} of {us[SERVED]} us, {forms}; {best} {peers.get(best)} when drawn"


def chosen(problem: Problem, gpu: Gpu) -> Config | None:
    """Of the kernel, where a call takes it whose heads are taken one by one."""
    choice = Chooser(problem, gpu).choose("fwd")
    found = in_place_schedule.instead_of(problem, choice.config, gpu, choice.row)
    return found if found is not None and key_splits.is_one_tile(found) else None


def summary(calls: Mapping[str, Mapping[str, Any]], problems: Mapping[str, Problem], gpu: Gpu) -> Iterator[str]:
    """What calls gain that take it, what the choice and the faster form of each leave, and how near estimates are."""
    errors, taken, left, least = list[float](), list[float](), list[float](), list[float]()
    for name in (one for one in calls if one in problems):
        us, problem = calls[name]["us"], problems[name]
        forms = configs_of(problem, gpu.arch)
        errors += [math.log(few_keys_schedule.one_tile_us(problem, forms[one], gpu) / us[one]) for one in forms]
        config = chosen(problem, gpu)
        share = 1.0 if config is None else us[name_of(config)] / us[SERVED]
        taken += [] if config is None else [share]
        left.append(share)
        least.append(min(us.values()) / us[SERVED])
    if taken:
        mean = statistics.geometric_mean
        lose, off = sum(one > 1.02 for one in taken), math.sqrt(statistics.fmean(one * one for one in errors))
        gain = f"{mean(taken):.3f} of the time; {lose} lose over 2 %, {max(taken):.2f} at most"
        yield f"{len(taken)} of {len(left)} take it, {gain}"
        yield f"the choice leaves {mean(left):.3f} of the time of all, the faster form of each {mean(least):.3f}"
        yield f"{len(errors)} estimates are {off:.3f} off, root mean square"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.argument("records", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@side_by_side.timing_options
def main(records: Sequence[Path], share: slice, seconds: float, out: Path | None, shown: Path | None) -> None:
    if shown is not None:
        calls, h200 = merged_heads.calls_of(shown), gpus.named("h200")
        problems = {name: problem for name, (problem, _) in calls_of(records, h200).items()}
        click.echo("\n".join([*(line(*one) for one in calls.items()), *summary(calls, problems, h200)]))
        return
    few_keys_schedule.MARGIN = 1.0  # what serves otherwise is timed
    gpu = dispatch.gpu_of(0)
    wanted = side_by_side.in_share(calls_of(records, gpu), share)
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})
    one = partial(dense_forwards.compared, configs=lambda ours: configs_of(ours, gpu.arch))
    side_by_side.fill(record, wanted, one, seconds, out, line)


if __name__ == "__main__":
    main()
