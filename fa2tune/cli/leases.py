"""``fa2tune leases``: who works on what, in a storage that several workers share."""

from __future__ import annotations

from pathlib import Path

import click

from fa2tune.cli._options import told
from fa2tune.cli.cache.common import console, rich_table


@click.command()
@click.option(
    "--storage",
    required=True,
    envvar="FA2TUNE_STORAGE",
    help="URL of the database, as `fa2tune tune --storage` has it.",
)
def leases(storage: str) -> None:
    """Show the workers on a storage, the lots they hold, and when their leases expire unless they say another word."""
    with told():
        from fa2tune.sharing.leases import board
        from fa2tune.sharing.storage import OWN_FILE, Storage, parsed

        url = parsed(storage)
        if url.get_backend_name() != "postgresql":
            studies = Path(url.database or "")
            if not studies.is_file():
                raise ValueError(f"storage: {studies}: no such file")
            if not studies.with_name(OWN_FILE).is_file():
                raise ValueError(f"storage: {studies}: nobody has tuned with it: there is no {OWN_FILE} beside it")
        held = Storage.at(url)
        lines = board(held)
    if not lines:
        click.echo(f"nobody works on {held.name}")
        return
    table = rich_table(
        "campaign", "worker", "GPUs", "lot", "held, s", "expires in, s", right=("GPUs", "held, s", "expires in, s")
    )
    for line in lines:
        lot = line.lot or "waits for one"
        table.add_row(line.campaign, line.worker, str(line.gpus), lot, f"{line.held_s:.0f}", f"{line.left_s:.0f}")
    console().print(table)
