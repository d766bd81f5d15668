"""``fa2tune cache verify``: do the rows of a cache file still hold?"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa2tune.cli._options import told
from fa2tune.cli.cache.common import (
    FILE,
    KEY_TITLES,
    cells,
    console,
    figure,
    filters,
    rich_table,
    selector,
    title,
)
from fa2tune.rows import reader

if TYPE_CHECKING:
    from fa2tune.fleet.finding import Finding
    from fa2tune.fleet.repair import Repaired

SAY_EVERY = 30.0  #: seconds, where the output is no terminal


class _Progress:
    """A line that is written over on a terminal; elsewhere one now and then."""

    def __init__(self) -> None:
        self.console = console()
        self.said = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self.console.is_terminal:
            click.echo(f"\r{what}: {done} of {total}    ", nl=done >= total)
        elif time.monotonic() - self.said > SAY_EVERY:
            self.said = time.monotonic()
            click.echo(f"{what}: {done} of {total}")


@click.command(short_help="Verify that rows still hold; with --repair, mend.")
@click.option("--cache", "file", type=FILE, help="The file to verify.  [default: the user's]")
@click.option(
    "--stale", "only_stale", is_flag=True, help="Only rows made with another Triton, driver or kernel source."
)
@click.option("--repair", is_flag=True, help="File what holds with today's evidence; tune anew what lost or fails.")
@click.option("--all", "everything", is_flag=True, help="List every row, not only those that do not hold.")
@click.option("--trials", type=click.IntRange(min=1), help="Of a repair, as for `fa2tune tune`.")
@click.option("--time-budget", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="Of each search of a repair, as for `fa2tune tune`.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), help="Compiles at a time. Default: one per core.")
@filters
def verify(
    file: Path | None, only_stale: bool, repair: bool, everything: bool, trials: int | None, time_budget: float | None,
    workers: int | None, **wanted: Any,
) -> None:  # fmt: skip
    """Recompile, check and time every row of a cache file on this toolchain, and say which hold, which lost more than 3 %, and
    which fail.

    Numerics are checked on a GPU of the row's architecture, those of predicted rows else in Triton's interpreter. Times are
    taken on the GPU that measured the row; where it is not here, the row is compiled and held to the limits, and listed as not
    timed. Nothing is written without --repair, which files every row as it is done: after an interruption, --stale --repair
    goes on from there.

    Exit code 1 if a row lost, fails or cannot be told, 2 if there is no row to verify.
    """
    if not repair and (trials is not None or time_budget is not None):
        raise click.UsageError("--trials and --time-budget are of a search, and only --repair searches")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from fa2tune.fleet import finding, upkeep
    from fa2tune.fleet import repair as mending
    from fa2tune.tuning.books import Watcher

    with told():
        path = reader.user_path() if file is None else file
        held = reader.read(path)
        card = finding.card_here()
        here = finding.toolchain_here(card)
        chosen = selector(held, wanted)
        asked = [row for row in held if chosen(row)]
        if not asked:
            passed = f": the options let none of its {len(held)} rows pass" if held else ""
            raise click.UsageError(f"{path}: no row to verify{passed}")
        rows = [row for row in asked if not only_stale or here.stale(row)]
        if not rows:
            click.echo(f"{path}: no row to verify is stale")
            return
        if repair:
            from fa2tune.rows.store import Store

            Store(path)  # before anything is compiled: can it be written?
    where = f"{card.name}, driver {card.driver}" if card else "no GPU here: nothing can be timed"
    stale = sum(bool(here.stale(row)) for row in rows)
    click.echo(f"{path}: {len(rows)} of {len(held)} rows, {stale} stale; Triton {here.triton}; {where}")
    look = upkeep.Verification(rows, held, card, _hands(), workers, _Progress())
    if repair:
        look.found = mending.Refresher(path)
    with told(". What was done is kept; --stale --repair goes on from here" if repair else ""):
        found = look.go()
        _tell(found, everything)
        bad = {id(one.row) for one in found if one.state in (finding.LOST, finding.FAILS, finding.UNTOLD)}
        if repair:
            from fa2tune.tuning import tuner

            class Lines(Watcher):
                def line(self, text: str) -> None:
                    click.echo(f"  {text}")

            done = mending.repair(
                path, found, look, lambda request: tuner.tune(request, Lines(), _hands()), click.echo, trials=trials,
                time_budget_s=time_budget, workers=workers,
            )  # fmt: skip
            _tell_repair(done, mending.withdrawn_path(path))
            bad = {id(row) for row, _ in [*done.kept, *done.withdrawn]}
    if bad:
        raise SystemExit(1)


def _hands() -> Any:
    """What child processes run; a test has its own."""
    from fa2tune.tuning.books import Hands

    return Hands()


def _tell(found: Sequence[Finding], everything: bool) -> None:
    from fa2tune.fleet.finding import HOLDS, STATES, UNTIMED

    listed = [one for one in found if everything or one.state not in (HOLDS, UNTIMED)]
    if listed:
        table = rich_table(*KEY_TITLES, "variant", "state", "then us", "now us", "loss", "why, and what is not as then",
                           right=("length", "then us", "now us", "loss"))  # fmt: skip
        for one in listed:
            then, now = (figure(time_us) if time_us else "" for time_us in (one.row.time_us, one.time_us))
            loss = "" if one.loss is None else f"{100 * one.loss:+.1f} %"
            why = "; ".join([*([one.why] if one.why else []), *one.stale])
            table.add_row(*cells(one.row.key), one.row.variant, one.state, then, now, loss, why)
        console().print(table)
    counted = Counter(one.state for one in found)
    click.echo(", ".join(f"{counted[state]} {_verb(state, counted[state])}" for state in STATES if counted[state]))
    for why, count in Counter(one.why for one in found if one.state == UNTIMED).most_common(3):
        click.echo(f"  not timed, {count} rows: {why}")


def _verb(state: str, rows: int) -> str:
    """One row holds, two hold."""
    from fa2tune.fleet.finding import FAILS, HOLDS

    return state.removesuffix("s") if rows > 1 and state in (HOLDS, FAILS) else state


def _tell_repair(done: Repaired, withdrawn: Path) -> None:
    for row, why in done.kept:
        click.echo(f"not mended: {title(row)}: {why}")
    for row, why in done.withdrawn:
        click.echo(f"withdrawn to {withdrawn}: {title(row)}: {why}")
    click.echo(
        f"repaired: {len(done.refreshed)} rows fresh again, {len(done.retuned)} made anew, {len(done.kept)} not mended, "
        f"{len(done.withdrawn)} withdrawn"
    )
