"""``fa2tune tune``: search configs, and write the selected ones to the cache."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from fa2tune.cli import _output, _tables
from fa2tune.cli._options import check_folder, comma_separated, masks, said
from fa2tune.rows import pruned
from fa2tune.spec.mask import ROW_MASKS
from fa2tune.spec.problem import BACKWARD, BUCKETS, DTYPES, KERNELS
from fa2tune.text import count, plain

if TYPE_CHECKING:
    from fa2tune.rows.row import Row
    from fa2tune.tuning.select.report import Report

PROGRESS_EVERY_S = 30.0  #: between two lines on progress, where the output is no terminal
HOW = {
    "measured": "Present: candidates are measured on it.",
    "sibling": "Candidates are measured on another GPU of the same silicon, and the rows say so.",
    "ported": "Not present: its code, assembled for the GPU that is here, is measured on that one, and the rows say so.",
    "predicted": "Not present: candidates are compiled for it, a model predicts their times, and Triton's interpreter checks "
    "the results of those that are selected. It does not run kernels in Gluon: of these the default "
    "and configs that a GPU has proved are tried.",
}
LEGEND = (
    "x port. default: speed relative to the portable default config. x portable: relative to the best portable config. config: "
    "block sizes, loads, w: warps, s: stages, r: registers per thread, then other dimensions of the search space."
)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_output.WIDTH_OF_A_FILE)


def _print(console: Console, text: str, indent: str = "  ") -> None:
    """A line, on a terminal folded at its width. It may quote a compiler, a database or a path: what a terminal would act on is
    escaped."""
    text = plain(text, None)
    if console.is_terminal:
        text = textwrap.fill(
            text, max(40, console.width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    console.print(text, markup=False, soft_wrap=True)


class _Screen:
    """Progress bar on a terminal; elsewhere one line per key and a line on progress now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.begun = self.said = time.monotonic()
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(12), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            # takes what space is left over, so that it alone is cut on a narrow terminal
            TextColumn("{task.fields[now]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=console, transient=True, expand=True,
        )  # fmt: skip
        self.task = self.bar.add_task("candidates tried", total=None, left="", now="")

    def planned(self, plan: Any, jobs: Sequence[Any]) -> None:
        gpu, devices = plan.target.gpu, len(plan.devices)
        self.line(
            f"{gpu.name}, {gpu.sm_count} SMs, compute capability {gpu.capability}. {HOW[plan.target.obtained]}"
            + (f" {devices} GPUs measure." if devices > 1 else "")
        )
        if gpu.note:
            self.line(f"{gpu.name} is {gpu.note}")
        budget = "" if plan.time_budget_s is None else f" Time budget: {plan.time_budget_s:.0f} s."
        self.line(
            f"Tuning jobs (one per pass, head dim and mask): {len(jobs)}. Sequence lengths: {len(plan.request.buckets)}. "
            f"Compiles at a time: {plan.workers}.{budget}"
        )

    def opened(self, job: Any, tasks: Sequence[Any]) -> None:
        searches = [
            f"{f.variant.name} {f.spec.dtype} {f.trials} (from {count(len(f.space.legal.configs), 'legal config')})"
            for f in tasks
        ]
        self.line(f"{job.name}: candidates to compile: {', '.join(searches)}")

    def progress(self, done: int, total: int, left_s: float | None, now: str, statuses: Mapping[str, int]) -> None:
        # of all jobs together; how many there will be is an estimate, since configs may share a binary
        failed = pruned.counted(statuses)
        left = "" if left_s is None else f"about {left_s:.0f} s left"
        self.bar.update(self.task, completed=done, total=total, left=left, now=now)
        if not self.console.is_terminal and time.monotonic() - self.said > PROGRESS_EVERY_S:
            self.said = time.monotonic()
            self.line(
                f"{done} of {'about ' * (done < total)}{count(total, 'candidate')} tried after {self.said - self.begun:.0f} s"
                + (f", {left}" if left else "")
                + (f"; not timed: {failed}" if failed else "")
            )

    def line(self, text: str) -> None:
        _print(self.console, text)


def _order(row: Row) -> tuple[Any, ...]:
    key = row.key
    kernels = (*KERNELS, BACKWARD)
    about = (
        key.head_dim,
        DTYPES.index(key.dtype),
        ROW_MASKS.index(key.mask),
        key.family,
        kernels.index(key.kernel),
        key.bucket,
    )
    return *about, row.time_us or 0.0


def _table(rows: Sequence[Row], width: int | None) -> Iterator[str]:
    """Line by line; ``width``: of the terminal, None where there is none."""
    from fa2tune.rows.describe import described_row
    from fa2tune.rows.row import PORTED, over_portable

    figures = ("TFLOP/s", "x port. default", "x portable", "tried", "pruned")
    titles = ("kernel", "dtype", "dim", "mask", "length", "config", *figures, "obtained, proof")
    table = []
    for row in sorted(rows, key=_order):
        key = row.key
        dim = f"{key.head_dim}" if key.head_dim == key.head_dim_v else f"{key.head_dim}/{key.head_dim_v}"
        gain = "" if row.gain is None else f"{row.gain:.2f}"
        if row.gain_low is not None and row.gain_high is not None:
            gain += f" [{row.gain_low:.2f}, {row.gain_high:.2f}]"
        rate = "" if row.tflops is None else f"{row.tflops:.0f}"
        lead = over_portable(row, rows)
        table.append([
            key.kernel, key.dtype, dim, key.kind, str(key.bucket), described_row(row), rate, gain,
            "" if lead is None else f"{lead:.2f}", str(row.tried or ""), str(sum(row.pruned.values()) or ""),
            f"{row.obtained}{f' ({row.obtained_on})' if row.obtained == PORTED else ''}, {row.proof}"
            + (", not served" if row.barred else ""),
        ])  # fmt: skip
    return _tables.lines(
        titles, table, width, right=("length", *figures), below=("config", "obtained, proof"), spare=("tried", "pruned")
    )


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Per implementation, how many points each constraint or failure excluded: the largest number over the lengths."""
    from fa2tune.compiling.registry import implementations

    found: dict[str, dict[str, int]] = {}
    for row in rows:
        if row.pruned:
            mine = found.setdefault(implementations(row.key.kernel)[row.implementation].name, {})
            for reason, times in row.pruned.items():
                mine[reason] = max(mine.get(reason, 0), times)
    return [f"{path}: {pruned.counted(reasons)}" for path, reasons in found.items()]


def _without_a_row(report: Report) -> Iterator[str]:
    """Which keys of the request have no row, and why."""
    from fa2tune.tuning.select.completeness import described_keys

    for why in dict.fromkeys(report.failed.values()):
        for keys in described_keys([key for key, reason in report.failed.items() if reason == why]):
            yield f"no row: {keys}: {why}"
    budget = report.plan.time_budget_s
    over = budget is not None and report.seconds > budget
    for keys in described_keys(report.missing):
        yield f"not tuned: {keys}" + (f": the time budget of {budget:.0f} s was used up" if over else "")
    if report.missing:
        yield "The same command goes on from here."


def _rows(report: Report) -> str:
    return count(len(report.rows), "row")


def _close(console: Console, report: Report) -> None:
    """The final table and what was done."""
    from fa2tune.rows.row import PREDICTED

    if report.rows:
        click.echo()
        for line in _table(report.rows, console.width if console.is_terminal else None):
            click.echo(line)
        _print(console, LEGEND)
        for why in sorted({row.barred for row in report.rows if row.barred}):
            _print(console, f"not served: it {why}")
        _print(console, "pruned: candidates that were never timed, by reason (the most at any length)")
        for line in _reasons(report.rows):
            _print(console, "  " + line, "    ")
    rate = f" in {report.compile_seconds:.0f} s" if report.compiled else ""
    _print(
        console,
        f"{count(report.compiled, 'candidate')} compiled{rate}, {count(report.checked, 'result')} checked, {_rows(report)}, "
        f"{report.seconds:.0f} s in all"
        + (f" (time budget {report.plan.time_budget_s:.0f} s)" if report.plan.time_budget_s else ""),
    )
    predicted = report.plan.target.obtained == PREDICTED
    launching = "/".join(f"{100 * share:.0f}" for share in report.launching)
    _print(
        console,
        f"in use, of that time: {'interpreter' if predicted else 'GPU'} {launching} %, "
        f"compile processes {100 * report.compiling:.0f} %, search {100 * report.bookkeeping:.0f} %",
    )
    _print(console, f"cache: {report.plan.where}")
    if predicted and report.rows:
        name = report.plan.target.gpu.name
        _print(
            console, f"Measured and ported rows of these keys serve before predicted ones: fa2tune explain --gpu {name}"
        )
    for line in _without_a_row(report):
        _print(console, line)


def _numbers(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...] | str | None:
    if text is None or text == "all":
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"got {text!r}, allowed are all, or numbers such as 0,2") from error


def _file_machine_code(console: Console, report: Report) -> None:
    """Keep the binaries next to the rows: a call that such a row serves loads them. A failure is said, and costs no row."""
    from fa2tune.compiling import binaries
    from fa2tune.fleet.precompile import file_rows

    if report.plan.cache is None or not report.rows:  # a database holds rows only
        return
    path = binaries.companion(report.plan.cache)
    try:
        filed, failures = file_rows(report.rows, path, report.plan.workers)
    except Exception as error:  # the rows are there, whatever this meets
        filed, failures = 0, [said(error)]
    if failures:
        _print(console, f"machine code not kept in {path}, so that calls compile it: {'; '.join(failures[:3])}")
    if filed:
        trusted = path in [place.path for place in binaries.places()]
        how = "" if trusted else f"; calls load it where {binaries.VARIABLE}={path}"
        _print(console, f"machine code: {count(filed, 'kernel')} added to {path}{how}")


@click.command()
@click.option("--gpu", metavar="NAME", help="The GPU to tune for, present or not: a name that `fa2tune gpus` lists, or the "
              "driver's (\"NVIDIA H200\").  [default: the GPU that is present]")  # fmt: skip
@click.option("--headdim", metavar="N,...", multiple=True, callback=comma_separated(int),
              help="Head dims. Here and below, N,... and NAME,... take one value or several; the option may also be "
              "repeated.  [default: 128]")  # fmt: skip
@click.option("--headdim-v", type=int, metavar="N", help="Head dim of V.  [default: as --headdim]")
@click.option("--dtype", metavar="NAME,...", multiple=True, callback=comma_separated(str),
              help=f"Of {', '.join(DTYPES)}.  [default: bf16,fp16]")  # fmt: skip
@masks("both masks")
@click.option("--both", is_flag=True, help="The causal mask and no mask.  [default]")
@click.option("--family", type=click.Choice(("dense", "banded", "ragged")), default="dense", show_default=True,
              help="What candidates are timed on: whole tensors; a causal window of an eighth of the length; packed sequences "
              "up to the length. Calls with windows, and packed ones, take rows of theirs before dense ones.")  # fmt: skip
@click.option("--pass", "pass_", type=click.Choice(("fwd", "bwd", "both")), default="both", show_default=True)
@click.option("--kernel", metavar="NAME,...", multiple=True, callback=comma_separated(str),
              help=f"Of {', '.join(KERNELS)}.  [default: all of the pass]")  # fmt: skip
@click.option("--seqlen", metavar="N,...", multiple=True, callback=comma_separated(int),
              help=f"Sequence lengths, of {', '.join(map(str, BUCKETS))}.  [default: all]")  # fmt: skip
@click.option("--trials", type=int, metavar="N", help="Candidates that a search task compiles; a task is one kernel, dtype, "
              "head dim and mask. With bf16, fp16 starts from the configs selected for bf16 and compiles a third as many.  "
              "[default: 48; for a GPU that is not present 12]")  # fmt: skip
@click.option("--portable-trials", type=int, metavar="N", help="The same for the portable implementation of kernels that "
              "also have a specialised one.  [default: as --trials]")  # fmt: skip
@click.option("--time-budget", type=float, metavar="SECONDS", help="Stop proposing candidates after so long. Part of "
              "it, at most half, is kept for the final races, which may run past it. What is left undone is listed, with "
              "exit status 1.  [default: none; for a GPU that is not present 240 per head dim]")  # fmt: skip
@click.option("--sampler", type=click.Choice(("guided", "tpe", "random", "grid", "gp", "cmaes")), default="guided",
              show_default=True,
              help="What proposes candidates: tpe, gp and cmaes are Optuna's, the others the project's own.")  # fmt: skip
@click.option("--cache", type=click.Path(dir_okay=False, path_type=Path),
              help="SQLite file for the rows.  [default: the user's cache]")  # fmt: skip
@click.option("--studies", type=click.Path(dir_okay=False, path_type=Path),
              help="SQLite file for the Optuna studies.  [default: studies.sqlite next to the cache]")  # fmt: skip
@click.option("--record", type=click.Path(dir_okay=False, path_type=Path),
              help="Append the times of every candidate to this file, as JSON lines.")  # fmt: skip
@click.option("--retry-failed", is_flag=True, help="Try candidates again that crashed, hung or did not compile in an earlier "
              "run with the same Triton, driver and kernels.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sampler.")
@click.option("--workers", type=int, metavar="N", help="Compile so many candidates at a time.  [default: one per core]")
@click.option("--devices", metavar="all|N,...", callback=_numbers,
              help="GPUs that measure, by CUDA device number; all of one model.  [default: the current one]")  # fmt: skip
@click.option("--storage", metavar="URL", envvar="FA2TUNE_STORAGE", help="A database that several workers share: "
              "postgresql+psycopg://user@host/database for studies and rows, or sqlite:///file for studies. A URL with a "
              "password belongs into the environment variable FA2TUNE_STORAGE.")  # fmt: skip
def tune(
    gpu: str | None, headdim: list[int] | None, headdim_v: int | None, dtype: list[str] | None, mask: str | None,
    both: bool, family: str, pass_: str, kernel: list[str] | None, seqlen: list[int] | None, trials: int | None,
    portable_trials: int | None, time_budget: float | None, sampler: str,
    cache: Path | None, studies: Path | None, record: Path | None, retry_failed: bool, seed: int,
    workers: int | None, devices: Any, storage: str | None,
) -> None:  # fmt: skip
    """Search the fastest configs for a GPU, present or not, and write them to the cache.

    Ctrl-C keeps what is finished. The same command goes on from there and compiles and times nothing twice.
    """
    for path, option in ((record, "--record"), (cache, "--cache"), (studies, "--studies")):
        if path is not None:
            check_folder(path, option)
    if both and mask is not None:
        raise click.UsageError("--both: not with --causal or --full, which ask for one mask only")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the search's small matrices: every core compiles
    from fa2tune.sharing.storage import StorageError
    from fa2tune.tuning.request.plan import TuneRequest, make_plan
    from fa2tune.tuning.request.watcher import WorkerFunctions
    from fa2tune.tuning.run.tuner import Run
    from fa2tune.tuning.select.gpu_jobs import GpuLost

    asked = {"head_dims": headdim, "dtypes": dtype, "kernels": kernel, "buckets": seqlen and sorted(seqlen)}
    lists: dict[str, Any] = {name: tuple(values) for name, values in asked.items() if values is not None}
    request = TuneRequest(
        gpu=gpu, head_dim_v=headdim_v, masks=ROW_MASKS if mask is None else (mask,), family=family, pass_=pass_,
        trials=trials, portable_trials=portable_trials,
        time_budget_s=time_budget, sampler=sampler, seed=seed, cache=cache, studies=studies, record=record,
        retry_failed=retry_failed, workers=workers, devices=devices, storage=storage, **lists,
    )  # fmt: skip
    try:
        plan = make_plan(request)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    console = _console()
    screen = _Screen(console)
    _output.if_stopped(f"Rows that were finished, if any, are in {plan.where}; the same command goes on from there")
    try:
        with screen.bar if console.is_terminal else nullcontext():
            report = Run(plan, screen, WorkerFunctions()).go()  # type: ignore[arg-type]  # a Watcher by shape
    except (GpuLost, StorageError, OSError) as error:
        raise click.ClickException(
            f"{said(error)}. What was done is kept; the same command goes on from here."
        ) from error
    if report.interrupted:
        _output.if_stopped(f"{_rows(report)} kept in {plan.where}; the same command goes on from there")
        raise KeyboardInterrupt
    if not report.missing:
        _output.if_stopped(f"All rows are in {plan.where}")
    _close(console, report)
    _file_machine_code(console, report)
    if report.missing:
        raise SystemExit(1)
