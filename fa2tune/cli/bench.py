"""``fa2tune bench``: options in; table, JSON and plots out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from fa2tune.bench import comparison
from fa2tune.bench.peers import PEERS, SUBJECT, select
from fa2tune.cli._options import masks, told
from fa2tune.problem import BUCKETS


def _list(convert: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], list[Any] | None]:
    """A click callback: comma-separated, each once, converted."""

    def parse(context: click.Context, parameter: click.Parameter, value: str | None) -> list[Any] | None:
        if value is None:
            return None
        try:
            return list(dict.fromkeys(convert(part.strip()) for part in value.split(",")))
        except ValueError:
            raise click.BadParameter(f"got {value!r}, expected numbers with commas between") from None

    return parse


def _text(values: tuple[Any, ...]) -> str:
    return ",".join(map(str, values))


@click.command()
@click.option("--peers", callback=_list(str), help=f"Comma-separated, of {', '.join(n for n in PEERS if n != SUBJECT)}. "
              "fa2tune is always measured.  [default: all that are installed]")  # fmt: skip
@click.option(
    "--headdim", callback=_list(int), default=_text(comparison.HEAD_DIMS), show_default=True, help="Head dims."
)
@click.option("--seqlen", callback=_list(int), default=_text(BUCKETS), show_default=True, help="Sequence lengths.")
@masks("both masks")
@click.option("--pass", "passes", callback=_list(str), default=_text(comparison.PASSES), show_default=True,
              help="fwd without gradients, bwd alone, both together.")  # fmt: skip
@click.option("--timing", "timings", callback=_list(str), default="interleaved", show_default=True,
              help="interleaved: each launch behind another peer's, out of a cold L2; sustained: each peer for turns alone, at "
                   "the clock that its own power allows (1.5 s a peer and cell).")  # fmt: skip
@click.option("--dtype", callback=_list(str), default="bf16", show_default=True, help="bf16, fp16.")
@click.option("--memory-seqlen", callback=_list(int), default=_text(comparison.MEMORY_SEQLENS), show_default=True,
              help="Lengths at which peak memory is measured.")  # fmt: skip
@click.option("--no-memory", is_flag=True, help="Leave peak memory out.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=0.15, show_default=True,
              help="GPU time per peer and interleaved cell; 10 to 100 samples whatever it is.")  # fmt: skip
@click.option("--time-budget", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="Stop before a cell that would likely pass it; --resume goes on.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on from OUT/bench.json if it exists.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("bench"), show_default=True,
              help="Folder for bench.json and the plots.")  # fmt: skip
def bench(
    peers: list[str] | None, headdim: list[int], seqlen: list[int], causal: bool | None, passes: list[str],
    timings: list[str], dtype: list[str], memory_seqlen: list[int], no_memory: bool, seconds: float,
    time_budget: float | None, resume: bool, out: Path,
) -> None:  # fmt: skip
    """Time fa2tune against other exact attention on this GPU, in the FlashAttention-2 paper's settings.

    Each cell (dtype, head dim, mask, length, pass) compares every peer's result with a float32 reference, and times those
    that are right. bench.json is written after each cell.
    """
    try:
        chosen, absent = select(peers)
        grid = comparison.Grid(
            dtypes=dtype, head_dims=headdim, causals=(False, True) if causal is None else (causal,), seqlens=seqlen,
            passes=passes, timings=timings, memory_seqlens=() if no_memory else memory_seqlen,
        )  # fmt: skip
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    file = out / "bench.json"
    if file.exists() and not resume:  # said before torch is imported
        raise click.UsageError(f"--out: {file} exists; --resume goes on from it, or name another folder")

    from rich.console import Console

    from fa2tune.bench import report
    from fa2tune.bench.card import Card
    from fa2tune.calling.dispatch import SERVED

    console = Console()
    with told():
        card = Card()
        out.mkdir(parents=True, exist_ok=True)
        results = comparison.Results(file, card.environment(), resume)
        results.save()  # an unwritable folder is said now
    for name, why in absent.items():
        console.print(f"{name} is left out: {why}")

    def progress(done: int, total: int, record: Mapping[str, Any]) -> None:
        results.data["runs"][-1]["served"] = dict(SERVED)
        results.save()
        console.print(f"[{done}/{total}] {_line(record)}", markup=False, soft_wrap=True)

    try:
        complete = comparison.run(
            grid.cells(), chosen, card, results, seconds=seconds, time_budget=time_budget, progress=progress
        )
    except comparison.BenchError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        complete = False

    for table in report.tables(results.data):
        console.print(table)
    for objection in report.objections(results.data):
        console.print(objection, markup=False, soft_wrap=True)
    rungs = ", ".join(f"{rung}: {count}" for rung, count in SERVED.most_common()) or "none"
    console.print(f"fa2tune's configs in this run, by rung of the lookup: {rungs}", markup=False, soft_wrap=True)
    for path in [file, *report.plots(results.data, out)]:
        console.print(f"wrote {path}", soft_wrap=True)
    if not complete:
        console.print("Not every cell is measured yet: the same command with --resume goes on.")


def _line(record: Mapping[str, Any]) -> str:
    """A cell in one line, as it is finished."""
    from fa2tune.bench import report

    entries = record["peers"]
    what = f"{record['pass']} {record['dtype']} head dim {record['head_dim']} {report.mask_name(record['causal'])}"
    own = entries[SUBJECT]
    if own["status"] != "ok":
        figure = f"fa2tune {own['status']}: {own['why']}"
    elif record["kind"] == "memory":
        figure = f"fa2tune {own['peak_bytes'] / 2**20:.0f} MiB"
    else:
        best = report.ratio_to_best(record)
        figure = f"fa2tune {own['tflops']:.0f} TFLOP/s" + (
            f", {best[0]:.2f} x the best peer ({best[1]})" if best else ""
        )
    if own.get("kernels"):
        figure += f" by {', '.join(f'{kernel} {way}' for kernel, way in own['kernels'].items())}"
    odd = [
        f"{name} {entry['status']}" for name, entry in entries.items() if name != SUBJECT and entry["status"] != "ok"
    ]
    return f"{report.KIND_TITLES.get(record['kind'], record['kind'])} {what} length {record['seqlen']}: " + "; ".join(
        [figure, *odd]
    )
