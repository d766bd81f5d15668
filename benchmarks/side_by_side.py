"""What benchmarks of calls beside peers share: peers, CUDA graphs raced in rounds, a record that is resumed.

Every call is timed as replays of a CUDA graph, so that host time does not hide it; short ones stand several times in a graph.
Peers take turns in random order. The ratio of a call is the median over rounds of the fastest peer's time over fa2tune's: above
1, fa2tune is faster. A call that fa2tune cannot run, or whose result is wrong, counts as 0.

    python benchmarks/side_by_side.py OUT RECORD...     # records of shares (--share 1/4, ...) of one run, as one file
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from fa2tune.rows import whole

SUBJECT = "fa2tune"
ROUNDS, BURST_MS, GRAPH_MS = 7, 12.0, 0.3

#: (q, k, v) -> o
Attention = Callable[[Any, Any, Any], Any]


class Unfit(Exception):
    """A peer does not take this call."""


@dataclass(frozen=True)
class Peer:
    make: Callable[[Any], Attention]
    here: Callable[[], bool] = lambda: True
    backward: bool = True
    forward: bool = True


def fa4_is_here() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def asked(peers: str | None, known: Mapping[str, Peer]) -> dict[str, Peer]:
    """fa2tune and the peers of ``--peers`` (names with commas); None: those that are here. BadParameter: there is no such peer,
    or it is not installed here."""
    names = list(known) if peers is None else [SUBJECT, *peers.split(",")]
    for name in names:
        if name not in known:
            raise click.BadParameter(f"got {name!r}, known are {', '.join(known)}", param_hint="--peers")
        if peers is not None and not known[name].here():
            raise click.BadParameter(f"{name} is not installed here", param_hint="--peers")
    return {name: peer for name, peer in known.items() if name in names and peer.here()}


def graphed(call: Callable[[], object], stream: Any) -> tuple[Callable[[], None], int]:
    """(replay of a graph of several calls, how many)."""
    import torch

    def captured(count: int) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                call()
        torch.cuda.synchronize()
        return graph.replay  # type: ignore[no-any-return]

    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    replay = captured(1)
    replay()
    count = min(20, math.ceil(GRAPH_MS / max(milliseconds(replay, 5), 0.015)))
    return (replay, 1) if count == 1 else (captured(count), count)


def milliseconds(call: Callable[[], object], times: int) -> float:
    from fa2tune.measuring import timing

    return timing.in_a_row(call, times) / 1e3


def raced(graphs: Mapping[str, tuple[Callable[[], None], int]]) -> dict[str, list[float]]:
    """name -> ms a call, one per round."""
    bursts, samples = {}, {name: list[float]() for name in graphs}
    for name, (replay, _) in graphs.items():
        replay()
        bursts[name] = max(2, min(300, int(BURST_MS / max(1e-3, milliseconds(replay, 3)))))
    for _ in range(ROUNDS):
        for name in random.sample(list(graphs), len(graphs)):
            replay, calls = graphs[name]
            replay()
            samples[name].append(milliseconds(replay, bursts[name]) / calls)
    return samples


def verdict(samples: Mapping[str, list[float]], done: float) -> dict[str, Any]:
    """Of one pass: times, TFLOP/s of fa2tune, the fastest peer and the ratio to it; None: there is no peer. ``done``:
    floating-point operations."""
    medians = {name: statistics.median(times) for name, times in samples.items()}
    rivals = {name: ms for name, ms in medians.items() if not name.startswith(SUBJECT)}  # its other forms are none
    best = min(rivals, key=rivals.__getitem__, default=None)
    found: dict[str, Any] = {"us": {name: round(1e3 * ms, 1) for name, ms in medians.items()}, "best_peer": best}
    if SUBJECT not in samples:  # where no implementation is within the tolerance, it decides nothing
        return {**found, "tflops": 0.0, "ratio": 0.0 if samples else None}
    found["tflops"] = round(done / medians[SUBJECT] / 1e9, 1)
    pairs = zip(samples[best], samples[SUBJECT], strict=True) if best else ()
    found["ratio"] = round(statistics.median(theirs / ours for theirs, ours in pairs), 3) if best else None
    return found


@dataclass(frozen=True)
class Graphs:
    """What was captured of one call."""

    of: Mapping[str, Mapping[str, tuple[Callable[[], None], int]]]  #: pass -> peer -> as ``graphed`` has it
    missing: Mapping[str, str]  #: peer -> why it is not among them
    kept: tuple[Any, ...]  #: what a graph reads must outlive it: a peer's offsets, too


def captured(
    problem: Any, peers: Mapping[str, Peer], inputs: tuple[Any, Any, Any], do: Any,
    check: Callable[[dict[str, Any]], str | None], done: Mapping[str, float],
) -> Graphs:  # fmt: skip
    """Graphs of every peer whose results are right. ``problem``: what peers make their call of; ``inputs``: q, k and v;
    ``check``: what is wrong with results by name, or None; ``done``: operations of the passes, "fwd" and maybe "bwd"."""
    import torch

    stream, missing = torch.cuda.Stream(), dict[str, str]()
    graphs: dict[str, dict[str, Any]] = {"fwd": {}, "bwd": {}}
    kept: list[Any] = []
    for name, peer in peers.items():
        try:
            attention = peer.make(problem)
            call = functools.partial(attention, *inputs)
            with torch.no_grad():
                problem_with_it = check({"o": call()})
                if problem_with_it is None and peer.forward:
                    graphs["fwd"][name] = graphed(call, stream)
                    kept.append(call)
            if problem_with_it is None and peer.backward and "bwd" in done:
                leaves = [tensor.detach().requires_grad_() for tensor in inputs]
                with torch.cuda.stream(stream):
                    gradients = functools.partial(
                        torch.autograd.grad, attention(*leaves), leaves, do, retain_graph=True
                    )
                    problem_with_it = check(dict(zip(("dq", "dk", "dv"), gradients(), strict=True)))
                if problem_with_it is None:
                    graphs["bwd"][name] = graphed(gradients, stream)
                    kept.append(gradients)
        except Exception as error:  # a peer that cannot take this call raises what it likes
            problem_with_it = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]
            )
        if problem_with_it is not None:
            missing[name] = problem_with_it
    return Graphs(graphs, missing, tuple(kept))


def beside(
    problem: Any, peers: Mapping[str, Peer], inputs: tuple[Any, Any, Any], do: Any,
    check: Callable[[dict[str, Any]], str | None], done: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Pass -> its ``verdict``, and "missing". Arguments as ``captured`` has them."""
    found = captured(problem, peers, inputs, do, check, done)
    timed = {name: verdict(raced(found.of[name]), done[name]) for name in done}
    return {**timed, "missing": dict(found.missing)}


def environment() -> dict[str, str]:
    """What a record is of. ClickException: there is no GPU to measure on."""
    import torch

    from fa2tune.compiling import fingerprint

    if not torch.cuda.is_available():
        raise click.ClickException("needs a CUDA GPU that torch can use")
    fa4 = [found for found in metadata.distributions() if found.name.lower().replace("_", "-") == "flash-attn-4"]
    return {
        "gpu": torch.cuda.get_device_name(), "driver": fingerprint.driver_version(), "torch": torch.__version__,
        "triton": fingerprint.triton_version(), "cudnn": str(torch.backends.cudnn.version()),
        "sources": fingerprint.source_digest()[:16], "flash-attn-4": fa4[0].version if fa4 else "",
        "fa3": os.path.basename(os.environ.get("FA3_LIBRARY", "")),
    }  # fmt: skip


def begun(out: Path | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """The record in a file, or a new one. BadParameter: that file's is about something else."""
    record = {**about, "date": time.strftime("%Y-%m-%d", time.gmtime()), "calls": {}}
    if out is not None and out.exists():
        before: dict[str, Any] = json.loads(out.read_text("utf-8"))
        for part in about:
            if before[part] != record[part]:
                raise click.BadParameter(f"{out} has {part} {before[part]}, here {record[part]}", param_hint="--out")
        return before
    return record


def _share(_context: click.Context, _parameter: click.Parameter, text: str) -> slice:
    place, _, count = text.partition("/")
    if not (place.isdecimal() and count.isdecimal() and 1 <= int(place) <= int(count)):
        raise click.BadParameter(f"got {text!r}; K/N, as 2/4, is the second of four shares")
    return slice(int(place) - 1, None, int(count))


share_option = click.option(
    "--share", default="1/1", show_default=True, callback=_share,
    help="K/N: every N-th call from the K-th on, so that each of N GPUs has a process and an --out of its own.",
)  # fmt: skip


def timing_options(command: Callable[..., None]) -> Callable[..., None]:
    """--share, --seconds, --out and --table of a script that times calls and keeps a record of them."""
    for option in (
        click.option("--table", "shown", type=click.Path(exists=True, path_type=Path), help="Print this file's times."),
        click.option(
            "--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON; its calls are not measured again."
        ),
        click.option("--seconds", type=float, default=300.0, show_default=True, help="Begins no call after so long."),
        share_option,
    ):
        command = option(command)
    return command


def of_drawings(forms: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """FORM and RECORD... before ``timing_options``, of a script that times drawn calls in one of several forms; without --table
    both must be there."""
    names = list(forms)

    def given(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def checked(form: str | None, records: tuple[Path, ...], shown: Path | None, **others: Any) -> None:
            if shown is None and (form is None or not records):
                raise click.UsageError(
                    f"got no form or no record, wanted one of {', '.join(names)}, and files of drawings"
                )
            command(form=form, records=records, shown=shown, **others)

        taken = click.argument("records", nargs=-1, type=click.Path(exists=True, path_type=Path))(
            timing_options(checked)
        )
        return click.argument("form", type=click.Choice(names), required=False)(taken)

    return given


def in_share(problems: Mapping[str, Any], share: slice) -> dict[str, Any]:
    """Those of one share."""
    return dict(list(problems.items())[share])


def merged(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of all calls. BadParameter: the records are not of one run."""
    first, *others = records
    calls = dict(first["calls"])
    for record in others:
        for part in first.keys() - {"calls"}:
            if record[part] != first[part]:
                raise click.BadParameter(f"{part} is {record[part]} in one record, {first[part]} in another")
        calls |= record["calls"]
    return {**first, "calls": calls}


def _line(name: str, call: Mapping[str, Any]) -> str:
    said = "  ".join(f"{p} {call[p]['ratio']} ({call[p]['best_peer']})" for p in ("fwd", "bwd") if p in call)
    return f"{name:44} {said}  {call['missing'] or ''}"


def fill(
    record: dict[str, Any], problems: Mapping[str, Any], one: Callable[[Any], dict[str, Any]], seconds: float,
    out: Path | None, line: Callable[[str, Mapping[str, Any]], str] = _line,
) -> None:  # fmt: skip
    """Measure what the record lacks, and write it after each; begin none after so many seconds. ``line``: printed of one."""
    import torch

    begin = time.monotonic()
    warm()
    for name, problem in problems.items():
        if name in record["calls"]:
            continue
        if time.monotonic() - begin > seconds:
            click.echo(f"not reached: {name}")
            continue
        record["calls"][name] = call = one(problem)
        click.echo(line(name, call))
        if out is not None:
            whole.publish(out, lambda path: path.write_text(json.dumps(record, indent=1), "utf-8"))
        torch.cuda.empty_cache()


def warm() -> None:
    """Two seconds of matrix products: a cool GPU clocks 10 % higher."""
    import torch

    matrix, until = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), time.monotonic() + 2
    while time.monotonic() < until:
        matrix @ matrix
        torch.cuda.synchronize()


@click.command(help="Joins records of shares of one run into one file.")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("records", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(out: Path, records: tuple[Path, ...]) -> None:
    whole_record = merged([json.loads(path.read_text("utf-8")) for path in records])
    whole.publish(out, lambda path: path.write_text(json.dumps(whole_record, indent=1), "utf-8"))


if __name__ == "__main__":
    main()
