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
    """A call, and by pass what was recorded: the best peer and the ratio to it."""

    problem: Problem
    before: Mapping[str, tuple[str, float]]

    @property
    def least(self) -> float:
        return min(ratio for _, ratio in self.before.values())


def behind(records: Sequence[Path], below: float) -> dict[str, Behind]:
    """Name -> call, of those of which a pass was below a ratio; lowest first. BadParameter: a file is not of one drawing."""
    found: dict[str, Behind] = {}
    for path in records:
        record = json.loads(gzip.decompress(path.read_bytes()))
        if "calls" not in record:
            raise click.BadParameter(f"{path} has no calls: wanted records of one drawing each", param_hint="RECORDS")
        for call in record["calls"].values():
            known = {name: call[name] for name in PASSES if call.get(name, {}).get("ratio") is not None}
            one = Behind(posed(call), {name: (of["best_peer"], of["ratio"]) for name, of in known.items()})
            if known and one.least < below:
                found[workloads.described(one.problem)] = one
    return dict(sorted(found.items(), key=lambda named: named[1].least))


def measured(call: Behind, peers: Mapping[str, side_by_side.Peer]) -> dict[str, Any]:
    """The call beside those peers that were the best of a pass, and "before": its peers and ratios then."""
    wanted = {side_by_side.SUBJECT, *(peer for peer, _ in call.before.values())}
    asked = {name: peer for name, peer in peers.items() if name in wanted}
    found = workloads.recorded(random_calls.measured_and_served, asked, call.problem)
    return {**found, "before": dict(call.before)}


def now(call: Mapping[str, Any], pass_: str) -> float | None:
    """The ratio to the peer that was the best; None: it was not timed."""
    return call[pass_]["ratio"] if call["before"][pass_][0] in call.get(pass_, {}).get("us", {}) else None


def report(record: Mapping[str, Any]) -> Iterator[str]:
    yield from (*workloads.setting(record), "")
    yield "| call | forward, x best peer | now | backward, x best peer | now |"
    yield "|---|---|---|---|---|"
    for name, call in record["calls"].items():
        cells = []
        for pass_ in PASSES:
            peer, before = call["before"].get(pass_, ("", None))
            ratio = now(call, pass_) if peer else None
            cells += [f"{before} ({peer})", f"{peer} not timed" if ratio is None else f"{ratio}"] if peer else ["", ""]
        yield f"| {name} | {' | '.join(cells)} |"
    for pass_ in PASSES:
        were = [c for c in record["calls"].values() if c["before"].get(pass_, ("", 1.0))[1] < random_calls.LEVEL]
        ratios = [ratio for call in were if (ratio := now(call, pass_)) is not None]
        still = sum(ratio < random_calls.LEVEL for ratio in ratios)
        yield f"- {pass_}: {len(were)} were behind, {len(ratios)} are timed beside the same peer, {still} are behind still"


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
        click.echo("\n".join(f"{name}: {dict(call.before)}" for name, call in calls.items()))
        return
    here = side_by_side.asked(None, workloads.PEERS)
    record = side_by_side.begun(out, {"environment": side_by_side.environment(), "peers": list(here), "seed": None})
    side_by_side.fill(record, calls, lambda call: measured(call, here), seconds, out)
    click.echo("\n".join(report(record)))


if __name__ == "__main__":
    main()
