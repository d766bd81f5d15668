"""``fa2tune tune``: search, and file the winners."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fa2tune.cli import _tables
from fa2tune.cli._options import check_folder, masks, said
from fa2tune.problem import BACKWARD, BUCKETS, DTYPES, KERNELS

if TYPE_CHECKING:
    from fa2tune.rows.row import Row
    from fa2tune.tuning.books import Report

WIDTH_OF_A_FILE = 160  #: columns, where the output is no terminal
HOW = {
    "measured": "measured on this GPU",
    "sibling": "measured here on other silicon of the same design, and marked so",
    "predicted": "absent: compiled, limit-checked and predicted by the model; winners proved in Triton's interpreter",
}


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH_OF_A_FILE)


class _Screen:
    """Progress bar on a terminal; elsewhere one line per key and a line on progress now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.begun = self.said = time.monotonic()
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"), console=console, transient=True,
        )  # fmt: skip
        self.task = self.bar.add_task("candidates", total=None, now="")

    def planned(self, plan: Any, lots: Sequence[Any]) -> None:
        gpu, count = plan.target.gpu, len(plan.devices)
        self.console.print(
            f"{gpu.name}, {gpu.sm_count} SMs, capability {gpu.arch // 10}.{gpu.arch % 10}: {HOW[plan.target.obtained]}"
            + (f", on {count} GPUs" if count > 1 else "")
        )
        self.console.print(
            f"lots to tune (pass x head dim x mask): {len(lots)}, lengths: {len(plan.request.buckets)}, compiling at a time: "
            f"{plan.workers}"
        )

    def opened(self, lot: Any) -> None:
        searches = [f"{f.variant.name} {f.spec.dtype} {f.trials} of {len(f.legal.configs)}" for f in lot.families]
        self.line(f"{lot.lot.name}: candidates, out of the legal configs: {', '.join(searches)}")

    def progress(self, done: int, total: int, now: str, fates: Mapping[str, int]) -> None:
        failed = ", ".join(f"{reason} {count}" for reason, count in fates.items())
        self.bar.update(self.task, completed=done, total=total, now=f"{now}  {failed}")
        if not self.console.is_terminal and time.monotonic() - self.said > 30:
            self.said = time.monotonic()
            spent = self.said - self.begun
            left = f", about {spent / done * (total - done):.0f} s left" if done else ""
            self.line(
                f"{done} of {total} candidates after {spent:.0f} s{left}"
                + (f"; without a time: {failed}" if failed else "")
            )

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


def _order(row: Row) -> tuple[Any, ...]:
    key = row.key
    kernels = (*KERNELS, BACKWARD)
    return key.head_dim, DTYPES.index(key.dtype), key.causal, kernels.index(key.kernel), key.bucket, row.time_us or 0.0


def _table(rows: Sequence[Row], width: int | None) -> Iterator[str]:
    """Line by line; ``width``: of the terminal, None where there is none."""
    from fa2tune.rows.row import over_portable
    from fa2tune.tuning.books import described

    figures = ("TFLOP/s", "x default", "x portable", "tried", "pruned")
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
            key.kernel, key.dtype, dim, "causal" if key.causal else "full", str(key.bucket), described(row), rate, gain,
            "" if lead is None else f"{lead:.2f}", str(row.tried or ""), str(sum(row.pruned.values()) or ""),
            f"{row.obtained}, {row.proof}" + (", not served" if row.barred else ""),
        ])  # fmt: skip
    return _tables.lines(
        titles, table, width, right=("length", *figures), below=("config", "obtained, proof"), spare=("tried", "pruned")
    )


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Per kernel, how many points fell to which rule: at the most, over the lengths."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        mine = found.setdefault(row.key.kernel, {})
        for reason, count in row.pruned.items():
            mine[reason] = max(mine.get(reason, 0), count)
    return [
        f"{kernel}: "
        + ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))
        for kernel, reasons in found.items()
        if reasons
    ]


def _close(console: Console, report: Report) -> None:
    """The final table and what was done."""
    if report.rows:
        for line in _table(report.rows, console.width if console.is_terminal else None):
            click.echo(line)
        for why in sorted({row.barred for row in report.rows if row.barred}):
            console.print(f"not served: it {why}", soft_wrap=True)
        console.print("points pruned, by reason (arithmetic before, limits after the compile, failures):")
        for line in _reasons(report.rows):
            console.print("  " + line, markup=False, soft_wrap=True)
    rate = f" in {report.compile_seconds:.0f} s" if report.compiled else ""
    console.print(
        f"{report.compiled} candidates compiled{rate}, {report.checked} numerics checks, {len(report.rows)} rows, "
        f"{report.seconds:.0f} s in all"
        + (f" (time budget {report.plan.time_budget_s:.0f} s)" if report.plan.time_budget_s else "")
    )
    launching = "/".join(f"{100 * share:.0f}" for share in report.launching)
    console.print(
        f"busy: {'checks' if report.plan.target.obtained == 'predicted' else 'GPU'} {launching} % of that time, compilers "
        f"{100 * report.compiling:.0f} %, bookkeeping {100 * report.bookkeeping:.0f} %"
    )
    console.print(f"cache: {report.plan.where}", soft_wrap=True, markup=False)
    if report.interrupted:
        console.print("interrupted: the same command goes on from here")


def _numbers(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...] | str | None:
    if text is None or text == "all":
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"got {text!r}, allowed are all, or numbers such as 0,2") from error


@click.command()
@click.option(
    "--gpu", metavar="NAME", help="GPU to tune for, present or not (see: fa2tune gpus). Default: the one present."
)
@click.option(
    "--headdim", type=int, multiple=True, default=(128,), show_default="128", help="Head dim; may be repeated."
)
@click.option("--headdim-v", type=int, help="Head dim of V. Default: as --headdim.")
@click.option("--dtype", type=click.Choice(DTYPES), multiple=True, default=("bf16", "fp16"), show_default="bf16 and fp16",
              help="May be repeated.")  # fmt: skip
@masks("both masks")
@click.option("--both", is_flag=True, help="Causal and full.  [default]")
@click.option("--pass", "pass_", type=click.Choice(("fwd", "bwd", "both")), default="both", show_default=True)
@click.option(
    "--kernel", type=click.Choice(KERNELS), multiple=True, help="Of the pass, these kernels only; may be repeated."
)
@click.option("--seqlen", type=click.Choice([str(bucket) for bucket in BUCKETS]), multiple=True,
              help="Length bucket; may be repeated. Default: all.")  # fmt: skip
@click.option("--trials", type=int, help="Binaries compiled per kernel, dtype, head dim and mask. Default: 48, or for an "
              "absent GPU 12. (fp16 starts from bf16's winners and takes a third, or as many as these are.)")  # fmt: skip
@click.option("--portable-trials", type=int, help="The same of the portable variant of kernels that have another, where its "
              "winners are known and need but be raced. Default: as --trials.")  # fmt: skip
@click.option("--time-budget", type=float, metavar="SECONDS", help="No new candidates when what is left of this is for "
              "finals, half at most; these may run past it. Default: none, or for an absent GPU 240 a head dim.")  # fmt: skip
@click.option(
    "--sampler",
    type=click.Choice(("guided", "tpe", "random", "grid", "gp", "cmaes")),
    default="guided",
    show_default=True,
)
@click.option(
    "--cache", type=click.Path(dir_okay=False, path_type=Path), help="SQLite file for the rows. Default: the user's."
)
@click.option("--studies", type=click.Path(dir_okay=False, path_type=Path),
              help="SQLite file for the Optuna studies. Default: studies.sqlite beside the cache.")  # fmt: skip
@click.option(
    "--record", type=click.Path(dir_okay=False, path_type=Path), help="Append every candidate's times, as JSON lines."
)
@click.option("--retry-failed", is_flag=True, help="Try again what crashed, hung or did not compile in an earlier run with the "
              "same Triton, driver and kernels.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--workers", type=int, help="Compiles at a time. Default: one per core.")
@click.option("--devices", metavar="all|0,2,...", callback=_numbers, help="GPUs that measure, by number; all of one model. "
              "Default: one, the current.")  # fmt: skip
@click.option("--storage", metavar="URL", envvar="FA2TUNE_STORAGE", help="Database shared by any number of workers: "
              "postgresql+psycopg://user@host/database takes studies and rows, sqlite:///file the studies. "
              "FA2TUNE_STORAGE, too, where it holds a password.")  # fmt: skip
def tune(
    gpu: str | None, headdim: tuple[int, ...], headdim_v: int | None, dtype: tuple[str, ...], causal: bool | None,
    both: bool, pass_: str, kernel: tuple[str, ...], seqlen: tuple[str, ...], trials: int | None,
    portable_trials: int | None, time_budget: float | None, sampler: str,
    cache: Path | None, studies: Path | None, record: Path | None, retry_failed: bool, seed: int,
    workers: int | None, devices: Any, storage: str | None,
) -> None:  # fmt: skip
    """Search the best configs for a GPU, present or not, and file them in the cache.

    Resumable: Ctrl-C keeps what was done, and the same command goes on from there without compiling or timing anything twice.
    """
    if record is not None:
        check_folder(record, "--record")
    if both and causal is not None:
        raise click.UsageError("--both: not with --causal or --full, which ask for one mask only")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the search's small matrices: every core compiles
    from fa2tune.sharing.storage import StorageError
    from fa2tune.tuning.books import Hands
    from fa2tune.tuning.measured import GpuLost
    from fa2tune.tuning.plan import TuneRequest, make_plan
    from fa2tune.tuning.tuner import Run

    request = TuneRequest(
        gpu=gpu, head_dims=tuple(dict.fromkeys(headdim)), head_dim_v=headdim_v, dtypes=tuple(dict.fromkeys(dtype)),
        causal=(False, True) if causal is None else (causal,), pass_=pass_, kernels=kernel or None,
        buckets=tuple(sorted({int(bucket) for bucket in seqlen})) or BUCKETS, trials=trials, portable_trials=portable_trials,
        time_budget_s=time_budget, sampler=sampler, seed=seed, cache=cache, studies=studies, record=record,
        retry_failed=retry_failed, workers=workers, devices=devices, storage=storage,
    )  # fmt: skip
    try:
        plan = make_plan(request)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    console = _console()
    screen = _Screen(console)
    try:
        with screen.bar if console.is_terminal else nullcontext():
            report = Run(plan, screen, Hands()).go()  # type: ignore[arg-type]  # a Watcher by shape
    except (GpuLost, StorageError, OSError) as error:
        raise click.ClickException(
            f"{said(error)}. What was done is kept; the same command goes on from here."
        ) from error
    _close(console, report)
    if report.interrupted:
        raise SystemExit(130)
