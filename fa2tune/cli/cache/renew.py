"""``fa2tune cache renew``: rows whose sources were edited and whose machine code was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa2tune.cli import _output, _tables
from fa2tune.cli._options import shown_errors
from fa2tune.cli._output import echo
from fa2tune.cli._progress import StepsBar
from fa2tune.cli.cache.common import FILE, KEY_TITLES, cells, filters, rows_asked
from fa2tune.rows import reader

if TYPE_CHECKING:
    from fa2tune.fleet.renewal import RenewalResult


@click.command(short_help="Call rows fresh whose machine code is still the same.")
@click.option("--cache", "file", type=FILE, help="The file to renew.  [default: the user's]")
@click.option("--check", is_flag=True, help="Compare every row that has a hash, fresh ones too; write nothing.")
@click.option("--time-budget", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="For compiles; what is left is done by the next run.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), help="Compiles at a time.  [default: one per core]")
@filters
def renew(
    file: Path | None, check: bool, time_budget: float | None, workers: int | None, **wanted: Any
) -> None:  # fmt: skip
    """Compile the stale rows of a cache file again, which takes no GPU. A row whose machine code is what its hash says was
    measured is fresh again; the others stay as they are. Fresh rows without a hash get one.

    The file is written every ten seconds and at the end, as a whole, and so is its JSON twin, if it has one. Rows of another
    Triton are passed over: run this where that is installed. For rows whose machine code did change, see `fa2tune cache verify
    --stale --repair`, which takes a GPU.

    Exit status 1 if a row of this Triton is not fresh afterwards (with --check: differs, or has no
    hash), 2 if there is no row.
    """
    from fa2tune.fleet import precompile, renewal

    with shown_errors():
        path = reader.user_path() if file is None else file
        held, rows = rows_asked(path, wanted, "compare")
        precompile.check_host()
        look = renewal.Renewal(rows, held, check, _functions(), workers, time_budget)
        writer = None if check else renewal.Writer(path)
        steps = StepsBar()
        look.progress = steps
        if writer is not None:
            look.found = writer
            _output.if_stopped("What was done is kept; run it again to continue")
        try:
            with steps:
                found = look.go()
        finally:
            if writer is not None:
                writer.flush()
    _tell(path, found)
    if any(one.state in renewal.NOT_RENEWED for one in found):
        raise SystemExit(1)


def _functions() -> Any:
    """What child processes run; tests replace it."""
    from fa2tune.tuning.request.watcher import WorkerFunctions

    return WorkerFunctions()


def _tell(path: Path, found: Sequence[RenewalResult]) -> None:
    from fa2tune.fleet.finding import UNTOLD
    from fa2tune.fleet.renewal import NOT_COMPILED, OTHER_CODE, RENEWAL_STATES

    table = [
        (*cells(one.row.key), one.row.filed_as, one.state, one.why)
        for one in found
        if one.state in (OTHER_CODE, NOT_COMPILED, UNTOLD)
    ]
    if table:
        _tables.show((*KEY_TITLES, "implementation", "state", "why"), table, right=("length",), below=("gpu", "why"))
    counted = Counter(one.state for one in found)
    echo(f"{path}: {', '.join(f'{counted[state]} {state}' for state in RENEWAL_STATES if counted[state])}")
