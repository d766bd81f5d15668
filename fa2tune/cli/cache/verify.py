"""``fa2tune cache verify``: check the rows of a cache file on this machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa2tune.cli import _output, _tables
from fa2tune.cli._options import shown_errors
from fa2tune.cli._output import echo
from fa2tune.cli._progress import StepsBar
from fa2tune.cli.cache.common import (
    FILE,
    KEY_TITLES,
    cells,
    figure,
    filters,
    rows_asked,
    title,
)
from fa2tune.rows import reader
from fa2tune.text import count

if TYPE_CHECKING:
    from fa2tune.fleet.finding import Finding
    from fa2tune.fleet.repair import Repaired


@click.command(short_help="Check that rows still hold; --repair updates them.")
@click.option("--cache", "file", type=FILE, help="The file to check.  [default: the user's]")
@click.option("--stale", "only_stale", is_flag=True, help="Only rows made with another Triton or kernel source.")
@click.option(
    "--repair", is_flag=True, help="Update the evidence of rows that hold; tune again those that lost or fail."
)
@click.option("--all", "everything", is_flag=True, help="List the rows that hold, too.")
@click.option("--trials", type=click.IntRange(min=1), help="Of each search of a repair, as for `fa2tune tune`.")
@click.option("--time-budget", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="Of each search of a repair, as for `fa2tune tune`.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), help="Compiles at a time.  [default: one per core]")
@filters
def verify(
    file: Path | None, only_stale: bool, repair: bool, everything: bool, trials: int | None, time_budget: float | None,
    workers: int | None, **wanted: Any,
) -> None:  # fmt: skip
    """Compile, check and time every row of a cache file with the Triton, driver and kernels of this machine. Each row holds,
    lost more than 3 % of its speed, or fails.

    Numerics are checked on a GPU of the row's architecture; without one, those of predicted rows in Triton's interpreter. Times
    are measured on the GPU that measured the row. Without that GPU the row is compiled, checked against the GPU's limits and
    listed as not timed. Rows that were timed under another driver are counted, and are not stale for that: the driver
    compiles nothing. Nothing is written without --repair, which writes each row as soon as it is done: after an
    interruption, --stale --repair continues.

    Exit status 1 if a row lost, fails or could not be checked, 2 if there is no row to check.
    """
    if not repair and (trials is not None or time_budget is not None):
        raise click.UsageError("--trials and --time-budget need --repair: nothing is searched without it")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from fa2tune.fleet import finding, upkeep
    from fa2tune.fleet import repair as mending
    from fa2tune.tuning.request.watcher import Watcher

    with shown_errors():
        path = reader.user_path() if file is None else file
        held, asked = rows_asked(path, wanted, "check")
        present = finding.present_gpu()
        here = finding.toolchain_here(present)
        rows = [row for row in asked if not only_stale or here.stale(row)]
        if not rows:
            echo(f"{path}: none of the rows to check is stale")
            return
        if repair:
            from fa2tune.rows.store import Store

            Store(path)  # before anything is compiled: can it be written?
    where = f"{present.name}, driver {present.driver}" if present else "no GPU, so nothing is timed"
    stale = sum(bool(here.stale(row)) for row in rows)
    _tables.say(f"{path}: {len(rows)} of {len(held)} rows, {stale} stale; Triton {here.triton}; {where}")
    steps = StepsBar()
    look = upkeep.Verification(rows, held, present, _functions(), workers, steps)
    if repair:
        look.found = mending.Refresher(path)
        _output.if_stopped("What was done is kept; --stale --repair continues from here")
    with shown_errors(". What was done is kept; --stale --repair continues from here" if repair else ""):
        with steps:
            found = look.go()
        _tell(found, everything)
        bad = {id(one.row) for one in found if one.state in (finding.LOST, finding.FAILS, finding.UNTOLD)}
        if repair:
            from fa2tune.tuning.run import tuner

            class Lines(Watcher):
                def line(self, text: str) -> None:
                    echo(f"  {text}")

            done = mending.repair(
                path, found, look, lambda request: tuner.tune(request, Lines(), _functions()), echo, trials=trials,
                time_budget_s=time_budget, workers=workers,
            )  # fmt: skip
            _tell_repair(done, mending.withdrawn_path(path))
            bad = {id(row) for row, _ in [*done.kept, *done.withdrawn]}
    if bad:
        raise SystemExit(1)


def _functions() -> Any:
    """What child processes run; tests replace it."""
    from fa2tune.tuning.request.watcher import WorkerFunctions

    return WorkerFunctions()


def _tell(found: Sequence[Finding], everything: bool) -> None:
    from fa2tune.fleet.finding import HOLDS, STATES, UNTIMED

    listed = [one for one in found if everything or one.state not in (HOLDS, UNTIMED)]
    if listed:
        figures = ("then us", "now us", "loss")
        table = []
        for one in listed:
            then, now = (figure(time_us) if time_us else "" for time_us in (one.row.time_us, one.time_us))
            loss = "" if one.loss is None else f"{100 * one.loss:+.1f} %"
            why = "; ".join(filter(None, (one.why, *one.stale, one.driver)))
            table.append((*cells(one.row.key), one.row.filed_as, one.state, then, now, loss, why))
        titles = (*KEY_TITLES, "implementation", "state", *figures, "why")
        _tables.show(titles, table, right=("length", *figures), below=("gpu", *figures, "why"))
    counted = Counter(one.state for one in found)
    echo(", ".join(f"{counted[state]} {_verb(state, counted[state])}" for state in STATES if counted[state]))
    for why, times in Counter(one.why for one in found if one.state == UNTIMED).most_common(3):
        _tables.say(f"  not timed, {count(times, 'row')}: {why}")
    for note, times in Counter(one.driver for one in found if one.driver).most_common(3):
        _tables.say(f"  note, {count(times, 'row')}: {note}; that makes no row stale")


def _verb(state: str, rows: int) -> str:
    """One row holds, two hold."""
    from fa2tune.fleet.finding import FAILS, HOLDS

    return state.removesuffix("s") if rows > 1 and state in (HOLDS, FAILS) else state


def _tell_repair(done: Repaired, withdrawn: Path) -> None:
    for row, why in done.kept:
        _tables.say(f"not repaired: {title(row)}: {why}")
    for row, why in done.withdrawn:
        _tables.say(f"withdrawn to {withdrawn}: {title(row)}: {why}")
    _tables.say(
        f"repaired: {count(len(done.refreshed), 'row')} updated, {len(done.retuned)} tuned again, "
        f"{len(done.kept)} not repaired, {len(done.withdrawn)} withdrawn"
    )
