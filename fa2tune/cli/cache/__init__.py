"""``fa2tune cache``: list, compare, merge, lock, verify and precompile cache files."""

from __future__ import annotations

import click

from fa2tune.cli.cache.common import describe_row as describe_row
from fa2tune.cli.cache.coverage import coverage as _coverage
from fa2tune.cli.cache.files import diff, export, merge
from fa2tune.cli.cache.lock import check, lock, sign
from fa2tune.cli.cache.look import list_, path, show
from fa2tune.cli.cache.precompile import precompile as _precompile
from fa2tune.cli.cache.renew import renew as _renew
from fa2tune.cli.cache.verify import verify as _verify


class _Cache(click.Group):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands:
            shown = (name for name, command in sorted(self.commands.items()) if not command.hidden)
            ctx.fail(f"no such command {cmd_name!r}; there are {', '.join(shown)}")
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Cache)
def cache() -> None:
    """List, compare, merge, lock, verify and renew cache files."""


for _command in (path, list_, show, _coverage, diff, merge, export, lock, sign, check, _verify, _renew, _precompile):
    cache.add_command(_command)
