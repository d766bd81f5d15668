"""First come, first served: the order of the writers of one file, among the processes of all hosts that share it.

SQLite makes a writer that finds a file locked sleep and try again. Which of several busy writers gets the lock is then a
matter of luck: measured with four of them, one had 83 turns in 15 s and the other three had one each. Here a writer draws a
ticket and waits until no lower ticket is held.

The queue only orders. What excludes other writers is still SQLite's own lock, taken when the turn has come. So nothing is lost
where the queue is of no use: on a platform or file system without record locks, in a folder that cannot be written, next to a
release of fa2tune without the queue. There, writers compete for SQLite's lock.

How it works. The queue file holds the number of the last ticket and that of the ticket served last, 8 bytes each.
Ticket n is a POSIX record lock on byte ``FIRST + n``, which lies beyond the end of the file. A turn has come when bytes below
the ticket's own can be locked for reading, that is, when no process holds one for writing. The system releases the locks of a
process that dies, in the queue or in its turn, so a crash leaves nothing to clean up. A process that is stopped (SIGSTOP) keeps
its place: if no turn begins within ``STALLED_S``, those behind it compete for SQLite's lock.

On NFS, record locks are kept by the server (NFSv4, or NFSv3 with its lock service), and the order holds across hosts. Mounted
with ``nolock`` or ``local_lock=posix`` each host has a queue of its own, and hosts compete. Tickets of a host that crashed are
held until the server drops its lease (NFSv4: 90 s by default); ``STALLED_S`` bounds what that costs the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]

FIRST = 16  #: byte of ticket 0
TICKETS = 1 << 48  #: then they begin anew
POLL_S = 0.005  #: between two looks at the tickets before one's own
STALLED_S = 5.0  #: without a new turn, until writers no longer wait for the ticket that is served

#: Record locks belong to a process, and closing any descriptor of a file drops all that the process holds on it. So of each
#: queue file one thread at a time has one open.
_threads: dict[str, threading.Lock] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.clear)  # another thread's lock is never released there


@contextmanager
def in_turn(path: str | os.PathLike[str], timeout_s: float) -> Iterator[float]:
    """Wait until it is this writer's turn to write ``path``, or until ``timeout_s`` have passed, or it is known that the queue
    cannot be used. Yields the seconds that are left for SQLite's own lock. Not reentrant."""
    real = Path(os.path.realpath(path))
    end = time.monotonic() + timeout_s
    with ExitStack() as place:
        if fcntl is not None:
            with suppress(OSError):
                _queue(real.with_name(f".{real.name}.queue"), end, place)
        yield max(0.0, end - time.monotonic())


def _queue(path: Path, end: float, place: ExitStack) -> None:
    """Come to the front of the queue, where ``place`` keeps this writer until its turn is over. OSError: there is no queue
    here, or it took too long."""
    lock = _threads.setdefault(str(path), threading.Lock())
    if not lock.acquire(timeout=max(0.0, end - time.monotonic())):
        raise TimeoutError
    place.callback(lock.release)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    place.callback(os.close, file)  # which gives the ticket back
    _wait(lambda: _locked(file, fcntl.LOCK_EX, 0, 1), end)
    try:
        ticket = 1 + _number(file, 0) % (TICKETS - 1)
        os.pwrite(file, ticket.to_bytes(8, "little"), 0)
        _locked(file, fcntl.LOCK_EX, FIRST + ticket, 1)
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, 0)
    _wait(_at_front(file, ticket), end)
    os.pwrite(file, ticket.to_bytes(8, "little"), 8)


def _at_front(file: int, ticket: int) -> Callable[[], bool]:
    """Whether a ticket's turn has come, or none has begun for long."""
    turn, since = _number(file, 8), time.monotonic()

    def come() -> bool:
        nonlocal turn, since
        if _locked(file, fcntl.LOCK_SH, FIRST, ticket):  # all tickets below this one
            fcntl.lockf(file, fcntl.LOCK_UN, ticket, FIRST)
            return True
        now, last = time.monotonic(), turn
        turn = _number(file, 8)
        since = since if turn == last else now
        return now >= since + STALLED_S

    return come


def _wait(condition: Callable[[], bool], end: float) -> None:
    while not condition():
        if time.monotonic() >= end:
            raise TimeoutError
        time.sleep(POLL_S)


def _locked(file: int, kind: int, start: int, length: int) -> bool:
    """Take a record lock, if it is free."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB, length, start)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        return False
    return True


def _number(file: int, offset: int) -> int:
    return int.from_bytes(os.pread(file, 8, offset), "little")
