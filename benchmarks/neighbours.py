"""Neighbours: what one token, or one head, more costs.

    python benchmarks/neighbours.py --out n.json [--seconds 480]   # resumes from the file
    python benchmarks/neighbours.py --list                         # the pairs, and what is allowed of lengths; no GPU
    python benchmarks/neighbours.py --table n.json                 # a file, as Markdown

Lengths: a length one above a bucket takes another row. It may cost what its own count of whole tiles says, with the config that
serves it, and 2 % more. Heads: TFLOP/s may fall by 10 % from h to h + 1 where there are four waves of tiles or more, below that
by as much as those of the peer that falls least. h fills the last wave, so that one head more begins another.

Both calls of a pair are checked as benchmarks/workloads.py has it, and take turns as CUDA graphs (benchmarks/side_by_side.py).
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import side_by_side
import workloads

from fa2tune import gpus
from fa2tune.calling.choosing import Chooser, choose_backward
from fa2tune.calling.schedules.group_parts_schedule import TILE_KEYS
from fa2tune.gpus import Gpu
from fa2tune.launching import group_parts
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import BUCKETS, WORKLOAD_HIDDEN, WORKLOAD_TOKENS, Config, Problem

MORE, FALL, NOISE = 0.02, 0.10, 0.01  #: NOISE: of a difference between fa2tune and a peer
WAVES, MANY_WAVES, TILE, SM_COUNT = (1, 2, 3, 4, 6), 4, 128, 132
HEADS = ((2048, 128, CAUSAL), (2048, 64, FULL), (1024, 256, CAUSAL))  #: length, head dim, mask


@dataclass(frozen=True)
class Pair:
    kind: str  #: "length" or "head": what there is one more of
    below: Problem
    above: Problem

    @property
    def waves(self) -> float:
        return self.below.query_tiles(TILE) * self.below.heads_q / SM_COUNT


def pairs() -> dict[str, Pair]:
    found: dict[str, Pair] = {}
    for bucket in BUCKETS:
        for dim in (64, 128):
            for mask in (CAUSAL, FULL):
                heads = WORKLOAD_HIDDEN // dim
                below = Problem("bf16", WORKLOAD_TOKENS // bucket, heads, heads, bucket, bucket, dim, dim, mask)
                above = replace(below, seqlen_q=bucket + 1, seqlen_k=bucket + 1)
                found[f"length {bucket} + 1, head dim {dim}, {mask}"] = Pair("length", below, above)
    for length, dim, mask in HEADS:
        for waves in WAVES:
            heads = waves * SM_COUNT * TILE // length
            below = Problem("bf16", 1, heads, heads, length, length, dim, dim, mask)
            above = replace(below, heads_q=heads + 1, heads_kv=heads + 1)
            found[f"heads {heads} + 1, {length} x {dim}, {mask}"] = Pair("head", below, above)
    return found


# ---- what is allowed


def configs(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """Pass -> the config whose tiles count: of the forward, and of the backward's kernel that makes dK and dV."""
    chooser = Chooser(problem, gpu)
    backward = choose_backward(chooser, False)[1]
    kernel = next(name for name in backward if name in group_parts.MAKE_DK_DV)
    return {"fwd": chooser.choose("fwd").config, "bwd": backward[kernel].config}


def work(problem: Problem, config: Config) -> int:
    """Pairs of a query and a key in all whole tiles that are visited."""
    rows, keys = config["BLOCK_M"], config.get("BLOCK_N", TILE_KEYS)
    last = -(-problem.seqlen_k // keys)
    offset = problem.seqlen_k - problem.seqlen_q
    blocks = (
        min(last, -(-((tile + 1) * rows + offset) // keys)) if problem.mask == CAUSAL else last
        for tile in range(-(-problem.seqlen_q // rows))
    )
    return sum(blocks) * rows * keys * problem.heads_q * problem.batch


def allowed(pair: Pair, gpu: Gpu) -> dict[str, float]:
    """Pass -> times that the longer call may take of the shorter one's time."""
    of_below, of_above = configs(pair.below, gpu), configs(pair.above, gpu)
    return {
        pass_: (1 + MORE) * work(pair.above, of_above[pass_]) / work(pair.below, of_below[pass_]) for pass_ in of_below
    }


# ---- measuring


def measure(
    pair: Pair, peers: Mapping[str, side_by_side.Peer], gpu: Gpu, device: str = "cuda"
) -> dict[str, Any]:  # fmt: skip
    """Pass -> {"cost": peer -> time of the larger call over that of the smaller, median over rounds, "fall": peer -> loss of
    TFLOP/s as a share, "bar", "met"}. Of lengths the bar is one of the cost, of heads one of the fall."""
    ours = {side_by_side.SUBJECT: peers[side_by_side.SUBJECT]}
    raced = ours if pair.kind == "length" or pair.waves >= MANY_WAVES else peers
    calls = {"below": pair.below, "above": pair.above}
    graphs = {side: side_by_side.captured(one, raced, *workloads.posed(one, device)) for side, one in calls.items()}
    found: dict[str, Any] = {"missing": {side: dict(one.missing) for side, one in graphs.items() if one.missing}}
    bars = allowed(pair, gpu) if pair.kind == "length" else {}
    for pass_ in ("fwd", "bwd"):
        both = [name for name in raced if all(name in one.of[pass_] for one in graphs.values())]
        if side_by_side.SUBJECT not in both:
            found[pass_] = {"met": False}
            continue
        samples = side_by_side.raced(
            {f"{side} {name}": one.of[pass_][name] for name in both for side, one in graphs.items()}
        )
        cost = {
            name: statistics.median(
                more / less for more, less in zip(samples[f"above {name}"], samples[f"below {name}"], strict=True)
            )
            for name in both
        }
        more = workloads.operations(pair.above, pass_) / workloads.operations(pair.below, pass_)
        found[pass_] = {"cost": cost, "fall": {name: 1 - more / ratio for name, ratio in cost.items()}}
        found[pass_] |= compared(pair, found[pass_], bars.get(pass_))
    return found


def compared(pair: Pair, found: Mapping[str, Any], most: float | None) -> dict[str, Any]:
    """``most``: times that a longer call may take."""
    if pair.kind == "length":
        return {"bar": most, "met": found["cost"][side_by_side.SUBJECT] <= most}
    rivals = [fall for name, fall in found["fall"].items() if name != side_by_side.SUBJECT]
    bar = FALL if pair.waves >= MANY_WAVES or not rivals else max(FALL, min(rivals) + NOISE)
    return {"bar": bar, "met": found["fall"][side_by_side.SUBJECT] <= bar}


def summary(calls: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for pass_ in ("fwd", "bwd"):
        met = {name: call[pass_]["met"] for name, call in calls.items() if pass_ in call}
        missed = [name for name, is_met in met.items() if not is_met]
        yield f"{pass_}: {len(met) - len(missed)} of {len(met)} pairs within what is allowed" + "".join(
            f"; not {name}" for name in missed
        )


def line(name: str, call: Mapping[str, Any]) -> str:
    return f"{name:44} {'  '.join(summary({'this': call}))}  {call['missing'] or ''}"


def table(record: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| pair | pass | time, x | TFLOP/s lost | allowed | met |", "|---|---|---|---|---|---|")
    for name, call in record["calls"].items():
        for pass_ in ("fwd", "bwd"):
            one, us = call[pass_], side_by_side.SUBJECT
            if "cost" not in one:
                yield f"| {name} | {pass_} | | | | no |"
                continue
            bar = f"{one['bar']:.3f} x" if name.startswith("length") else f"{one['bar']:.1%}"
            cells = (f"{one['cost'][us]:.3f}", f"{one['fall'][us]:.1%}", bar, "yes" if one["met"] else "no")
            yield f"| {name} | {pass_} | {' | '.join(cells)} |"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--list", "listed", is_flag=True, help="Print the pairs, measure nothing.")
@click.option("--gpu", "name", default="h200", show_default=True, help="Of --list.")
@click.option("--peers", help=f"{', '.join(workloads.PEERS)}.  [default: those that are here]")
@click.option("--only", default="", help="Pairs whose name has this text.")
@click.option("--seconds", type=float, default=480.0, show_default=True, help="Begins no pair after so long.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON; pairs that it has are not measured again.")
@click.option(
    "--table", "shown", type=click.Path(path_type=Path, exists=True), help="Print this file's table, measure nothing."
)
def main(
    listed: bool, name: str, peers: str | None, only: str, seconds: float, out: Path | None, shown: Path | None
) -> None:
    if shown is not None:
        record = json.loads(shown.read_text("utf-8"))
        click.echo("\n".join([*table(record), "", *summary(record["calls"])]))
        return
    asked = {name: pair for name, pair in pairs().items() if only in name}
    if listed:
        gpu = gpus.named(name)
        for name, pair in asked.items():
            bars = [f"{pass_} {bar:.3f}" for pass_, bar in allowed(pair, gpu).items()] if pair.kind == "length" else []
            click.echo(f"{name}: {workloads.described(pair.below)}; {', '.join(bars) or f'{pair.waves:.1f} waves'}")
        return
    here = side_by_side.asked(peers, workloads.PEERS)
    record = side_by_side.begun(out, {"environment": side_by_side.environment(), "peers": list(here)})
    one = functools.partial(measure, peers=here, gpu=gpus.device(0))
    side_by_side.fill(record, asked, one, seconds, out, line)
    click.echo("\n".join(summary(record["calls"])))


if __name__ == "__main__":
    main()
