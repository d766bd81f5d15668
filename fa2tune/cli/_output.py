"""How a command ends when its output cannot be written or the user stops it: one line on standard error, no traceback.

Output that cannot be written raises a KeyboardInterrupt at the write that failed, so a command keeps its work as after Ctrl-C.
Later output is dropped.
"""

from __future__ import annotations

import _thread
import errno
import io
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from fa2tune.text import plain

INTERRUPTED = 130  #: exit status after Ctrl-C: 128 + SIGINT, as shells have it
READER_GONE = 141  #: where the reader of a pipe went away: 128 + SIGPIPE, as of `yes | head -1`
WIDTH_OF_A_FILE = 160  #: columns, where the output is no terminal
NOT_WRITTEN = 1  #: any other reason, a full disk for one

_notes: list[str] = []  #: what to print about a command that was stopped


def echo(text: object = "") -> None:
    """Print one line that may quote something from elsewhere: a file's name, a value of a cache file, an error.
    What a terminal would act on is escaped."""
    click.echo(plain(text, None))


def echo_all(lines: Iterable[str]) -> None:
    """``echo`` of each, in one piece, as click takes long to begin one."""
    click.echo("\n".join(plain(line, None) for line in lines))


class OutputLost(KeyboardInterrupt):
    """Standard output cannot be written."""


class Guarded:
    """A text stream that raises ``OutputLost`` at the first write that fails, and drops everything after that."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.error: OSError | None = None
        buffer = getattr(stream, "buffer", None)
        #: set with PYTHONUNBUFFERED, with which Python silently drops what one system call does not write
        self.raw = buffer if isinstance(buffer, io.RawIOBase) and os.linesep == "\n" else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stream)

    def write(self, text: str) -> int:
        if self.error is None:
            try:
                if self.raw is None:
                    return int(self.stream.write(text))
                self._write_raw(text.encode(self.stream.encoding, self.stream.errors))
            except OSError as error:
                self._lose(error)
        elif not isinstance(text, str):  # click asks so whether a stream is binary
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        return len(text)

    def _write_raw(self, content: bytes) -> None:
        self.stream.flush()
        rest = memoryview(content)
        while rest:
            rest = rest[self.raw.write(rest) or 0 :]  # type: ignore[union-attr]

    def flush(self) -> None:
        if self.error is None and self.stream is not None:
            try:
                self.stream.flush()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.error = error
        with suppress(OSError, ValueError):  # what is buffered is flushed at the exit, and would fail once more
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
        if threading.current_thread() is threading.main_thread():
            raise OutputLost
        _thread.interrupt_main()  # an error in a progress display's thread would end only that thread


@contextmanager
def guarded() -> Iterator[Guarded]:
    """Standard output, guarded."""
    _notes.clear()
    before, guard = sys.stdout, Guarded(sys.stdout)
    if before is not None:  # None: it was closed before Python began, and print() does nothing
        sys.stdout = guard
    try:
        yield guard
    finally:
        if sys.stdout is guard:
            sys.stdout = before


def if_stopped(note: str) -> None:
    """What to print if this command is stopped: what was kept, and how to continue."""
    _notes[:] = [note]


def stopped(guard: Guarded) -> int:
    """Print why a command was stopped; returns its exit status."""
    after = "".join(f". {note}" for note in _notes)
    if guard.error is None:
        closed = (
            "\n" if sys.stderr is not None and sys.stderr.isatty() else ""
        )  # the line on which the terminal shows ^C
        _say(f"{closed}fa2tune: interrupted{after}")
        return INTERRUPTED
    if guard.error.errno == errno.EPIPE:
        if after:  # otherwise quiet, as other tools are
            _say(f"fa2tune: the reader of the output is gone{after}")
        return READER_GONE
    _say(f"fa2tune: standard output: {plain(guard.error.strerror or guard.error)}{after}")
    return NOT_WRITTEN


def _say(text: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
