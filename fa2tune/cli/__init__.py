"""The command line. One module per command, imported only when that command is named: help starts in a blink.

A command ``name`` is the attribute ``name`` of the module ``fa2tune.cli.name``.
"""

from __future__ import annotations

import importlib

import click

from fa2tune import __version__

#: command -> its line in the help listing
COMMANDS = {
    "tune": "Search the best configs for a GPU, present or not, and file them in the cache.",
    "gpus": "List the GPUs that --gpu knows.",
    "report": "Write an HTML page on a cache file and the searches behind it.",
    "explain": "Show which cache row would serve a problem, and why.",
    "cache": "List, compare, merge, sign and verify cache files.",
    "leases": "Show which workers share a storage, and what each of them tunes.",
    "bench": "Time fa2tune against its peers on this GPU.",
    "doctor": "Check GPU, driver, compiler, versions and cache files.",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            ctx.fail(f"no such command {cmd_name!r}; there are {', '.join(COMMANDS)}")
        command: click.Command = getattr(importlib.import_module(f"fa2tune.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="fa2tune", message="%(prog)s %(version)s")
def main() -> None:
    """FlashAttention-2, tuned once per GPU and shipped as a SQLite file."""
