"""How far a command has come: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from fa2tune.cli._output import echo

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 30.0  #: seconds between two lines, where the output is not a terminal


class StepsBar:
    """Called as ``steps(what, done, total)``. A context manager, so that a bar never stays behind."""

    def __init__(self) -> None:
        self.what = ""
        self.said = time.monotonic()
        self.bar: Progress | None = None
        self.task: TaskID | None = None

    def __enter__(self) -> StepsBar:
        if sys.stdout is not None and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), transient=True
            )
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if self.bar is not None:
            if self.task is None or what != self.what:
                if self.task is not None:
                    self.bar.remove_task(self.task)
                self.task = self.bar.add_task(what, total=total)
            self.bar.update(self.task, completed=done, total=total)
        elif time.monotonic() - self.said >= LINE_EVERY_S:
            self.said = time.monotonic()
            echo(f"{what}: {done} of {total}")
        self.what = what
