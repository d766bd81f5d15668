"""Times the fused backward of head dims up to 32 in tiles of 32 columns beside padded ones, in each form of its loop.

    python benchmarks/ahead.py benchmarks/narrow_backward.py                         # first: every binary, on all cores; no GPU
    python benchmarks/narrow_backward.py --out narrow_backward.json [--peers fa4]    # resumes from the file
    python benchmarks/narrow_backward.py --list                                      # what would be timed; no GPU
    python benchmarks/narrow_backward.py --table narrow_backward.json                # a file, as text

Of each call: the row in 64 columns ("padded") and as it is served; then, in 32 columns, the row's launch with each form of the
loop, another number of heads a wave, and prepared before instead of beside. Each candidate runs in the number of parts that is
chosen for it. Checks and times are those of benchmarks/dense_backwards.py. --peers also times the call as it is served beside
those, as benchmarks/workloads.py does. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import dense_backwards
import side_by_side
import workloads

from fa2tune import gpus
from fa2tune.calling.schedules import fused_schedule, group_parts_schedule
from fa2tune.compiling import limits
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Config, Problem

KERNEL = dense_backwards.FUSED_KERNEL
#: (batch, query heads, key heads, queries, keys, head dim, mask): those behind FlashAttention-4, and one of each side of 32
CALLS = (
    (9, 33, 33, 5235, 5235, 32, FULL), (2, 5, 5, 5520, 9040, 32, CAUSAL), (6, 12, 4, 2607, 2607, 24, CAUSAL),
    (9, 22, 2, 376, 376, 32, FULL), (256, 4, 4, 256, 256, 32, FULL), (6, 6, 6, 9816, 176, 24, FULL),
    (4, 65, 1, 442, 442, 32, CAUSAL), (1, 5, 5, 538, 538, 32, FULL), (2, 2, 2, 462, 462, 32, CAUSAL),
    (4, 32, 32, 2048, 2048, 16, CAUSAL), (4, 32, 32, 2048, 2048, 32, FULL), (1, 64, 64, 16384, 16384, 32, CAUSAL),
)  # fmt: skip
_APART = {"BLOCK_M": 128, "num_warps": 4}
_BEHIND, _AHEAD, _TOGETHER = ({**_APART, "ORDER": order} for order in ("behind", "ahead", "together"))
_FIRST, _VECTOR = {"EXPONENTIALS_FIRST": True}, {"REDUCE": "vector", "EXPONENTIALS_FIRST": False}
#: Name -> what differs from the row's config in 32 columns.
FORMS: Mapping[str, Config] = {
    "behind": {**_BEHIND, **_VECTOR}, "behind, exponentials first": {**_BEHIND, **_VECTOR, **_FIRST},
    "ahead": {**_AHEAD, **_VECTOR}, "ahead, exponentials first": {**_AHEAD, **_VECTOR, **_FIRST},
    "together": {**_TOGETHER, **_VECTOR}, "together, exponentials first": {**_TOGETHER, **_VECTOR, **_FIRST},
    "together, tma": {**_TOGETHER, "REDUCE": "tma", "EXPONENTIALS_FIRST": False},
    "behind, third stage": {**_BEHIND, **_VECTOR, "STAGES": 3},
    "ahead, exponentials first, third stage": {**_AHEAD, **_VECTOR, **_FIRST, "STAGES": 3},
    "ahead, exponentials first, 1 head a wave": {**_AHEAD, **_VECTOR, **_FIRST, "HEADS_PER_WAVE": 1},
    "ahead, exponentials first, 16 heads a wave": {**_AHEAD, **_VECTOR, **_FIRST, "HEADS_PER_WAVE": 16},
}  # fmt: skip


def posed(shape: tuple[Any, ...]) -> Problem:
    *dims, dim, mask = shape
    return Problem("bf16", *dims, dim, dim, mask)


def _forms(problem: Problem, now: Choice, gpu: Gpu) -> Iterator[tuple[str, Choice]]:
    own = now.of_row
    yield "padded", fused_schedule.of_dense(problem, replace(own, config={**own.config, "NARROW": False}), gpu)
    yield "served", now
    launched = {name: now.config[name] for name in ("BESIDE", "FINISH_BESIDE", "PERSISTENT", "PAIRS", "DYNAMIC")}
    base = {**own.config, **launched, "NARROW": True}
    for name, changes in FORMS.items():
        yield name, replace(now, config={**base, **changes})
    yield "half blocks", replace(now, config=fused_schedule.halves(base))
    if base["BESIDE"]:
        yield "behind, alone", replace(now, config=fused_schedule.apart({**base, **FORMS["behind"]}))


def candidates(problem: Problem, gpu: Gpu) -> dict[str, dense_backwards.Ordered]:
    """Name -> candidate, each config once and only legal ones."""
    found, seen = dict[str, dense_backwards.Ordered](), list[Config]()
    for name, choice in _forms(problem, dense_backwards.chosen(problem, gpu)[KERNEL][0], gpu):
        refused = limits.before_compile(choice.variant, problem.specialization, choice.config, gpu)
        if refused is None and choice.config not in seen:
            seen.append(choice.config)
            found[name] = {KERNEL: (choice, group_parts_schedule.parts_of(problem, KERNEL, choice, gpu))}, ""
    return found


def line(name: str, call: Mapping[str, Any]) -> str:
    base = call["us"]["padded"]
    rates = ", ".join(f"{which} {base / us:.2f}" for which, us in sorted(call["us"].items(), key=lambda one: one[1]))
    peers = f"; beside peers {call['peers']['us']}" if "peers" in call else ""
    return f"{name}: padded {base} us; times as fast: {rates}{peers}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--list", "listed", is_flag=True, help="Print what would be timed on an H200.")
@click.option("--peers", default="", help="Peers, with commas; none by default.")
@click.option("--seconds", type=float, default=300.0, show_default=True, help="Begins no call after so long.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON; its calls are not measured again.")
@click.option("--table", "shown", type=click.Path(exists=True, path_type=Path), help="Print this file's times.")
def main(listed: bool, peers: str, seconds: float, out: Path | None, shown: Path | None) -> None:
    if shown is not None:
        click.echo("\n".join(line(*one) for one in json.loads(shown.read_text("utf-8"))["calls"].items()))
        return
    problems = {workloads.described(problem): problem for problem in map(posed, CALLS)}
    if listed:
        for name, problem in problems.items():
            click.echo(f"{name}: {'; '.join(candidates(problem, gpus.named('h200')))}")
        return
    here = side_by_side.asked(peers, workloads.PEERS) if peers else {}
    record = side_by_side.begun(out, {"environment": side_by_side.environment(), "peers": list(here)})

    def one(problem: Problem) -> dict[str, Any]:
        found: dict[str, Any] = {"us": dense_backwards.measured(problem, candidates)}
        return found | ({"peers": workloads.measure(problem, here)["bwd"]} if here else {})

    side_by_side.fill(record, problems, one, seconds, out, line)


if __name__ == "__main__":
    main()
