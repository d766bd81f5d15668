"""The command line. One module per command, imported only when that command is named: help starts in a blink.

A command ``name`` is the attribute ``name`` of the module ``fa2tune.cli.name``.
"""

from __future__ import annotations

import importlib
import io
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

from fa2tune import __version__
from fa2tune.cli import _output
from fa2tune.text import plain_lines
from fa2tune.versions import VersionError

#: command -> its line in the help listing
COMMANDS = {
    "tune": "Search the best configs for a GPU, present or not, and file them in the cache.",
    "gpus": "List the GPUs that --gpu knows.",
    "report": "Write an HTML page on a cache file and the searches behind it.",
    "explain": "Show which row (tuned config) would serve a call, and what would improve on it.",
    "cache": "List, compare, merge, lock and verify cache files.",
    "leases": "Show which workers share a storage, and what each of them tunes.",
    "bench": "Time fa2tune against its peers on this GPU.",
    "doctor": "Say whether attention() is ready on this GPU, and what to do next.",
}


class _StoppedError(Exception):
    """Ctrl-C, or output that cannot be written. click would catch KeyboardInterrupt and exit with 1."""


@contextmanager
def _past_click() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        raise _StoppedError from error


def _ended(run: Callable[[], Any], guard: _output.Guarded) -> int | str | None:
    """Run a command; its exit status."""
    status: int | str | None = 0
    try:
        done = run()
        if isinstance(done, int):  # what click makes of ``Context.exit``
            status = done
        guard.flush()
    except click.ClickException as error:
        error.show(said := io.StringIO())
        click.echo(plain_lines(said.getvalue()), err=True, nl=False)
        status = error.exit_code
    except VersionError as error:
        click.echo(f"Error: {error}", err=True)
        status = 1
    except SystemExit as error:
        status = error.code
    except (_StoppedError, KeyboardInterrupt, click.Abort):
        return _output.stopped(guard)
    return status if guard.error is None else _output.stopped(guard)


class _LazyGroup(click.Group):
    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
        standalone_mode: bool = True, **extra: Any,
    ) -> Any:  # fmt: skip
        """As click's ``main``, but a command that was stopped ends as ``_output`` describes."""
        run = partial(super().main, args, prog_name, complete_var, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        status: int | str | None
        try:
            with _output.guarded() as guard:
                status = _ended(run, guard)
            if args is None:  # this process does no more: nothing is left to be kept
                signal.signal(signal.SIGINT, signal.SIG_DFL)
        except KeyboardInterrupt:  # a second Ctrl-C
            status = _output.INTERRUPTED
        sys.exit(status)

    def make_context(self, *arguments: Any, **others: Any) -> click.Context:
        with _past_click():
            return super().make_context(*arguments, **others)

    def invoke(self, ctx: click.Context) -> Any:
        with _past_click():
            return super().invoke(ctx)

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
