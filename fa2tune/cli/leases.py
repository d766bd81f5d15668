"""``fa2tune leases``: the jobs that workers hold in a storage that they share."""

from __future__ import annotations

from pathlib import Path

import click

from fa2tune.cli import _tables
from fa2tune.cli._options import shown_errors
from fa2tune.cli._output import echo


@click.command()
@click.option(
    "--storage",
    required=True,
    envvar="FA2TUNE_STORAGE",
    show_envvar=True,
    help="URL of the database, as `fa2tune tune --storage` has it.",
)
def leases(storage: str) -> None:
    """Show the workers on a storage, the tuning jobs that they hold, and in how many seconds their leases expire if they are
    not renewed. Workers whose last column is the same share their jobs."""
    with shown_errors():
        from fa2tune.sharing.leases import board
        from fa2tune.sharing.storage import OWN_FILE, Storage, parsed

        url = parsed(storage)
        if url.get_backend_name() != "postgresql":
            studies = Path(url.database or "")
            if not studies.is_file():
                raise ValueError(f"storage: {studies}: no such file")
            if not studies.with_name(OWN_FILE).is_file():
                raise ValueError(f"storage: {studies}: not used by a tune yet: there is no {OWN_FILE} next to it")
        held = Storage.at(url)
        lines = board(held)
    if not lines:
        echo(f"no worker on {held.name}")
        return
    table = [
        (line.worker, str(line.gpus), line.job or "waits for one", f"{line.held_s:.0f}", f"{line.left_s:.0f}", line.campaign)
        for line in lines
    ]  # fmt: skip
    titles = ("worker", "GPUs", "job", "held, s", "expires in, s", "shared with")
    _tables.show(titles, table, right=("GPUs", "held, s", "expires in, s"), below=titles[-1:])
