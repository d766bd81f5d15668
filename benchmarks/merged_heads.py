"""Times calls of one key head with its query heads taken one by one and as one head of as many more queries.

    python benchmarks/ahead.py benchmarks/merged_heads.py RECORD...     # first: every binary, on all cores; no GPU
    python benchmarks/merged_heads.py RECORD... --out FILE [--seconds 300]  # resumes from the file
    python benchmarks/merged_heads.py RECORD... --list                  # what would be timed, as predicted for an H200; no GPU
    python benchmarks/merged_heads.py [RECORD...] --table FILE          # a file, as text; of these records' calls what takes it

RECORD: of benchmarks/random_calls.py; of its calls those of one key head whose query heads may be taken as one. Tensors, checks
and races are those of benchmarks/workloads.py. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import functools
import gzip
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import dense_backwards
import side_by_side
import workloads

from fa2tune import gpus
from fa2tune.calling import dispatch, merging
from fa2tune.calling.choosing import Chooser
from fa2tune.gpus import Gpu
from fa2tune.launching.merged_heads import merged
from fa2tune.spec.mask import ROW_MASKS
from fa2tune.spec.problem import BACKWARD, Problem

ONE_BY_ONE = "one by one"


def calls_of(path: Path) -> dict[str, Any]:
    """By name, of a record of a script of benchmarks/."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: dict[str, Any] = json.loads(text).get("calls", {})
    return found


def read(records: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    """The calls of records of benchmarks/random_calls.py."""
    for path in records:
        yield from calls_of(path).values()


def posed(calls: Iterable[Mapping[str, Any]], arch: int) -> dict[str, Problem]:
    """Of calls those that are asked, by name."""
    found = {}
    for call in calls:
        if call["mask"] in ROW_MASKS and "fwd" in call:
            problem = dense_backwards.posed(call)
            if merging.asked(workloads.as_called(problem), arch):
                found[workloads.described(problem)] = problem
    return found


def predicted(problem: Problem, gpu: Gpu) -> dict[str, dict[str, float | None]]:
    """Pass -> microseconds by name of a peer."""
    one_by_one = Chooser(workloads.as_called(problem), gpu)
    of = {ONE_BY_ONE: one_by_one, side_by_side.SUBJECT: one_by_one.of(merged(one_by_one.problem))}
    return {
        "fwd": {name: merging.forward_us(chooser) for name, chooser in of.items()},
        BACKWARD: {name: merging.backward_us(chooser, False) for name, chooser in of.items()},
    }


def attention(problem: Problem, as_one: bool) -> side_by_side.Attention:
    """Public calls whose heads are all taken so. What is captured of the other way before stays as it is."""
    import fa2tune

    merging.pays = lambda *asked: as_one  # type: ignore[assignment]
    dispatch.reload()
    return functools.partial(fa2tune.attention, mask=problem.mask, layout="bshd")


PEERS = {
    side_by_side.SUBJECT: side_by_side.Peer(functools.partial(attention, as_one=True)),
    ONE_BY_ONE: side_by_side.Peer(functools.partial(attention, as_one=False)),
}


def ratios(calls: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What one head gains, and how near predictions are, in a line for each pass."""
    for pass_ in ("fwd", BACKWARD):
        gains, errors = list[float](), list[float]()
        for call in calls.values():
            us, said = call.get(pass_, {}).get("us", {}), call["predicted"][pass_]
            if len(us) == len(PEERS):
                gains.append(math.log(us[side_by_side.SUBJECT] / us[ONE_BY_ONE]))
                if None not in said.values():
                    errors.append(gains[-1] - math.log(said[side_by_side.SUBJECT] / said[ONE_BY_ONE]))
        if gains:
            mean = math.exp(statistics.fmean(gains))
            off = math.sqrt(statistics.fmean(one * one for one in errors)) if errors else math.nan
            yield f"{pass_}: {len(gains)} calls, {mean:.3f} of the time in the geometric mean; predictions {off:.3f} off"


def chosen(problem: Problem, gpu: Gpu) -> tuple[str, ...]:
    """The passes that take it."""
    chooser = Chooser(workloads.as_called(problem), gpu)
    return tuple(pass_ for pass_ in ("fwd", BACKWARD) if merging.merging(chooser, pass_) is not None)


def taken(problems: Mapping[str, Problem], calls: Mapping[str, Mapping[str, Any]], gpu: Gpu) -> Iterator[str]:
    """What the timed calls gain that take it, in a line for each pass."""
    chosen_ = {name: chosen(problem, gpu) for name, problem in problems.items() if name in calls}
    for pass_ in ("fwd", BACKWARD):
        us = [calls[name][pass_]["us"] for name, passes in chosen_.items() if pass_ in passes]
        gains = [one[side_by_side.SUBJECT] / one[ONE_BY_ONE] for one in us if len(one) == len(PEERS)]
        if gains:
            mean, slower = math.exp(statistics.fmean(map(math.log, gains))), sum(one > 1.02 for one in gains)
            yield f"{pass_}: {len(gains)} take it, {mean:.3f} of the time; {slower} lose over 2 %, {max(gains):.2f} at most"


def expectations(problems: Iterable[Problem], gpu: Gpu) -> Iterator[str]:
    """How many calls take it, and what they are expected to gain, in a line for each pass."""
    calls = [(chosen(problem, gpu), predicted(problem, gpu)) for problem in problems]
    for pass_ in ("fwd", BACKWARD):
        us = [expected[pass_] for taken, expected in calls if pass_ in taken]
        gains = [math.log((one[side_by_side.SUBJECT] or 1.0) / (one[ONE_BY_ONE] or 1.0)) for one in us]
        if gains:
            mean = math.exp(statistics.fmean(gains))
            yield f"{pass_}: {len(gains)} of {len(calls)} take it, {mean:.3f} of the time in the geometric mean"


def line(name: str, call: Mapping[str, Any]) -> str:
    said = []
    for pass_ in ("fwd", BACKWARD):
        us, expected = call.get(pass_, {}).get("us", {}), call["predicted"][pass_]
        if len(us) == len(PEERS):
            share = us[side_by_side.SUBJECT] / us[ONE_BY_ONE]
            hoped = "" if None in expected.values() else f"{expected[side_by_side.SUBJECT] / expected[ONE_BY_ONE]:.2f}"
            said.append(f"{pass_} {us[ONE_BY_ONE]} -> {us[side_by_side.SUBJECT]} us, {share:.2f} (predicted {hoped})")
    return f"{name}: {'; '.join(said)} {call['missing'] or ''}".rstrip()


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.argument("records", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--list", "listed", is_flag=True, help="Print what would be timed on an H200.")
@side_by_side.timing_options
def main(
    records: Sequence[Path], listed: bool, share: slice, seconds: float, out: Path | None, shown: Path | None
) -> None:
    gpu = gpus.named("h200")
    problems = side_by_side.in_share(posed(read(records), gpu.arch), share)
    if shown is not None:
        calls = calls_of(shown)
        said = [*(line(name, call) for name, call in calls.items()), *ratios(calls), *taken(problems, calls, gpu)]
        click.echo("\n".join(said))
        return
    if listed:
        for name, problem in problems.items():
            click.echo(f"{name}: {predicted(problem, gpu)}")
        click.echo("\n".join(expectations(problems.values(), gpu)))
        return
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})
    expected = {name: predicted(problem, gpu) for name, problem in problems.items()}

    def one(problem: Problem) -> dict[str, Any]:
        found = workloads.measure(problem, PEERS)
        return {**found, "predicted": expected[workloads.described(problem)]}

    side_by_side.fill(record, problems, one, seconds, out, line)


if __name__ == "__main__":
    main()
