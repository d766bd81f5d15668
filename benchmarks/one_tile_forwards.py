"""Times forwards of at most 256 keys by the kernel whose tiles have all of them (kernels/sm90/fwd_one_tile.py), beside
what serves otherwise.

    python benchmarks/ahead.py benchmarks/one_tile_forwards.py RECORD...          # first: every binary, on all cores; no GPU
    python benchmarks/one_tile_forwards.py RECORD... --out FILE [--seconds 300]   # resumes from the file
    python benchmarks/one_tile_forwards.py --table FILE                           # a file, as text

RECORD: of benchmarks/random_calls.py; of its calls those for which the kernel is asked. Each form is compared with float32
arithmetic before it is timed, as a CUDA graph. Replays are interleaved; the file holds medians of seven bursts in microseconds
a call, and what was recorded. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import dense_forwards
import merged_heads
import side_by_side
import workloads
from dense_backwards import posed

from fa2tune.calling import dispatch
from fa2tune.calling.schedules import few_keys_schedule
from fa2tune.gpus import Gpu
from fa2tune.spec.mask import ROW_MASKS
from fa2tune.spec.problem import Config, Problem

SERVED = "served"


def configs_of(problem: Problem, arch: int) -> dict[str, Config]:
    """Of the kernel, by name; none: it does not compute this call."""
    found = few_keys_schedule.candidates(problem, arch)
    return {f"{config['BLOCK_M']} rows, {config['KEYS']} keys": config for config in found}


def calls_of(records: Sequence[Path], gpu: Gpu) -> dict[str, tuple[Problem, Mapping[str, float]]]:
    """Name -> (problem, recorded microseconds)."""
    found = {}
    for call in merged_heads.read(records):
        us = call.get("fwd", {}).get("us")
        if us and call["mask"] in ROW_MASKS:
            problem = posed(call)
            if few_keys_schedule.asked(problem, gpu) and configs_of(problem, gpu.arch):
                found[workloads.described(problem)] = problem, us
    return found


def line(name: str, call: Mapping[str, Any]) -> str:
    us = call["us"]
    peers = {peer: time for peer, time in call["when drawn"].items() if peer != side_by_side.SUBJECT and time}
    best = min(peers, key=lambda peer: peers[peer], default="")
    forms = {form: time for form, time in us.items() if form != SERVED}
    share = min(forms.values(), default=0.0) / us[SERVED]
    return f"{name}: {share:.2f} of {us[SERVED]} us, {forms}; {best} {peers.get(best)} when drawn"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.argument("records", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@side_by_side.share_option
@click.option("--seconds", type=float, default=300.0, show_default=True, help="Begins no call after so long.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON; its calls are not measured again.")
@click.option("--table", "shown", type=click.Path(exists=True, path_type=Path), help="Print this file's times.")
def main(records: Sequence[Path], share: slice, seconds: float, out: Path | None, shown: Path | None) -> None:
    if shown is not None:
        click.echo("\n".join(line(*one) for one in merged_heads.calls_of(shown).items()))
        return
    few_keys_schedule.MARGIN = 1.0  # what serves otherwise is timed
    gpu = dispatch.gpu_of(0)
    wanted = side_by_side.in_share(calls_of(records, gpu), share)
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})

    def one(pair: tuple[Problem, Mapping[str, float]]) -> dict[str, Any]:
        problem, drawn = pair
        times, wrong = dense_forwards.measured(problem, lambda ours: configs_of(ours, gpu.arch))
        return {"call": workloads.described(problem), "us": times, "wrong": wrong, "when drawn": drawn}

    side_by_side.fill(record, wanted, one, seconds, out, line)


if __name__ == "__main__":
    main()
