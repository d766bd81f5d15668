"""Drawn calls that were behind a peer when they were recorded, beside that peer again: which are behind still, worst first.

    python benchmarks/ahead.py benchmarks/behind_calls.py benchmarks/calls/random_calls_*.json.gz  # compiles; no GPU
    python benchmarks/behind_calls.py benchmarks/calls/random_calls_*.json.gz --out r.json [--below 0.95] [--seconds 480]
    python benchmarks/behind_calls.py --table r.json

Records are those of benchmarks/random_calls.py, whose checks and times these are. Calls that were looked at say where to look
next; what fa2tune's speed is, only a new drawing says.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import random_calls
import side_by_side
import workloads
from dense_backwards import posed

from fa2tune.spec.problem import Problem

PASSES = ("fwd", "bwd")


class Behind(NamedTuple):
    """A call as it was recorded: by pass, its ratio to the best peer and which that was."""

    problem: Problem
    ratios: Mapping[str, float]
    peers: frozenset[str]


def behind(records: Sequence[Path], below: float) -> dict[str, Behind]:
    """Name -> call, of those of which a pass was below a ratio; lowest first. Records of several drawings are passed
    over."""
    found: dict[str, Behind] = {}
    for path in records:
        for call in json.loads(gzip.decompress(path.read_bytes())).get("calls", {}).values():
            known = {name: call[name] for name in PASSES if call.get(name, {}).get("ratio") is not None}
            ratios = {name: one["ratio"] for name, one in known.items()}
            if ratios and min(ratios.values()) < below:
                peers = frozenset(one["best_peer"] for one in known.values())
                found[workloads.described(posed(call))] = Behind(posed(call), ratios, peers)
    return dict(sorted(found.items(), key=lambda one: min(one[1].ratios.values())))


def measured(call: Behind, peers: Mapping[str, side_by_side.Peer]) -> dict[str, Any]:
    """The call beside those peers that were the best of a pass, and "before": its ratios then."""
    asked = {name: peer for name, peer in peers.items() if name in {side_by_side.SUBJECT, *call.peers}}
    found = workloads.recorded(random_calls.measured_and_served, asked, call.problem)
    return {**found, "before": dict(call.ratios)}


def report(record: Mapping[str, Any]) -> Iterator[str]:
    yield from (
        *workloads.setting(record),
        "",
        "| call | forward, before | now | backward, before | now |",
        "|---|---|---|---|---|",
    )
    for name, call in record["calls"].items():
        cells = []
        for pass_ in PASSES:
            now = call.get(pass_, {})
            cells += [
                f"{call['before'].get(pass_, '')}",
                f"{now.get('ratio') or ''} ({now.get('best_peer') or 'no peer'})",
            ]
        yield f"| {name} | {' | '.join(cells)} |"
    for pass_ in PASSES:
        pairs = [
            (c["before"][pass_], c[pass_]["ratio"])
            for c in record["calls"].values()
            if pass_ in c and pass_ in c["before"]
        ]
        then = [now for before, now in pairs if before < random_calls.LEVEL and now is not None]
        yield f"- {pass_}: {sum(now < random_calls.LEVEL for now in then)} of {len(then)} that were behind still are"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.argument("records", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--below", type=float, default=random_calls.LEVEL, show_default=True, help="Calls of which a pass was below this."
)
@click.option("--list", "listed", is_flag=True, help="Print the calls, measure nothing.")
@side_by_side.timing_options
def main(records: tuple[Path, ...], below: float, listed: bool, share: slice, seconds: float, out: Path | None,
         shown: Path | None) -> None:  # fmt: skip
    if shown is not None:
        click.echo("\n".join(report(json.loads(shown.read_text("utf-8")))))
        return
    if not records:
        raise click.UsageError("got no record, wanted files of drawings")
    calls = side_by_side.in_share(behind(records, below), share)
    if listed:
        click.echo("\n".join(f"{name}: {dict(call.ratios)}" for name, call in calls.items()))
        return
    here = side_by_side.asked(None, workloads.PEERS)
    record = side_by_side.begun(out, {"environment": side_by_side.environment(), "peers": list(here), "seed": None})
    side_by_side.fill(record, calls, lambda call: measured(call, here), seconds, out)
    click.echo("\n".join(report(record)))


if __name__ == "__main__":
    main()
