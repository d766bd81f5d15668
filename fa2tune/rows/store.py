"""Writes cache files: SQLAlchemy owns their schema and every write.

A file is never written into: put, merge and export read the rows there are, and publish a whole new file by write,
fsync and rename. So a reader, which takes no lock, sees the old file or the new one, also when a writer is killed
half-way; every file is sorted, vacuumed, in rollback-journal mode and the same bytes for the same rows; and a file of
an older schema is upgraded by the next write. Writers take turns through a lock file beside the cache file.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from fa2tune.rows import reader, record
from fa2tune.rows.row import Row

#: How long a writer waits for its turn.
LOCK_TIMEOUT_S = 120.0

KINDS = ("sqlite", "json")

HALF_DONE = ".rows.tmp"  #: ending of a file that a Store is writing

#: Of a file being written. No journal on disk and no syncs: the file is nobody's until it is fsynced and renamed. The
#: file itself comes out in rollback-journal mode, as every file that is not switched to WAL.
_PRAGMAS = ("page_size=4096", "auto_vacuum=NONE", "encoding='UTF-8'", "journal_mode=MEMORY", "synchronous=OFF")

_TYPES: dict[str, Any] = {"TEXT": sa.TEXT, "INTEGER": sa.INTEGER, "REAL": sa.REAL, "JSON": sa.TEXT}

TABLE = sa.Table(
    "rows",
    sa.MetaData(),
    *(
        sa.Column(c.name, _TYPES[c.kind], primary_key=c.name in record.IDENTITY, nullable=c.nullable)
        for c in record.COLUMNS
    ),
    sqlite_with_rowid=False,  # the table is its own primary key: sorted, and no second copy of the key in an index
)


def _write(path: Path, rows: Iterable[Row]) -> None:
    """A new cache file at ``path``, where none is, of rows that have been checked."""
    records = [record.encode(row) for row in sorted(rows, key=record.identity)]
    engine = sa.create_engine(
        "sqlite://", creator=lambda: sqlite3.connect(path, isolation_level=None), poolclass=NullPool
    )
    with engine.connect() as connection:
        for pragma in _PRAGMAS:
            connection.exec_driver_sql(f"PRAGMA {pragma}")
        connection.exec_driver_sql("BEGIN")
        TABLE.create(connection)
        if records:
            connection.execute(TABLE.insert(), records)
        connection.exec_driver_sql(f"PRAGMA application_id={reader.APPLICATION_ID}")
        connection.exec_driver_sql(f"PRAGMA user_version={record.SCHEMA_VERSION}")
        connection.exec_driver_sql("COMMIT")
        connection.exec_driver_sql("VACUUM")
    engine.dispose()
    with path.open("r+b") as file:
        # The header notes which release of SQLite wrote it (offset 96), for information only: held fixed, so that two
        # machines write the same bytes.
        file.seek(96)
        file.write((3_040_001).to_bytes(4, "big"))


def _publish(path: Path, fill: Callable[[Path], None], suffix: str = ".tmp") -> None:
    """``fill`` a temporary file beside ``path``, then put it there at one stroke. OSError, of a full disk too, leaves what
    was there."""
    path = Path(os.path.realpath(path))  # a link stays, what it points to is replaced
    if path.exists() and not os.access(path, os.W_OK):  # renaming over it would not ask
        raise PermissionError(f"cache file {path} is write-protected")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{suffix}")
    try:
        temporary.unlink(missing_ok=True)
        fill(temporary)
        if path.exists():
            shutil.copymode(path, temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (sa.exc.DBAPIError, sqlite3.Error) as error:
        raise OSError(f"cache file {path} cannot be written: {getattr(error, 'orig', error)}") from error
    except OSError as error:
        if error.errno is None:
            raise
        why = f"cannot be written: {error.strerror}"
        raise OSError(error.errno, why, str(path)) from error  # not the temporary, which nobody has named
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    if os.name == "posix":
        with suppress(OSError):  # the file is in place; some network disks sync no folders
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


@dataclass(frozen=True)
class Conflict:
    """Two rows for one key, variant and way of being obtained, that do not say the same."""

    kept: Row
    left: Row
    replaced: bool  #: whether the row kept came from the other file


@dataclass(frozen=True)
class Merged:
    """What became of the rows of one file."""

    path: Path
    added: int
    replaced: int
    left: int
    conflicts: tuple[Conflict, ...] = ()


def _age(row: Row) -> tuple[str, int, str]:
    """By which the newest evidence wins; of two made in the same second that with more samples, and then always the same
    one, so that files can be merged in any order."""
    return row.created[:19], row.samples, record.digest([row])  # to the second, whichever way UTC is written


def merge(rows: Iterable[Row], files: Iterable[str | os.PathLike[str]]) -> tuple[list[Row], list[Merged]]:
    """``rows`` and those of cache files, where two have one the later made; and what came of each file. CacheFileError: a
    file cannot be read."""
    merged = {record.identity(row): row for row in rows}
    reports = []
    for path, theirs in [(Path(file), reader.read(file)) for file in files]:  # all of them, or nothing
        added = replaced = 0
        conflicts = []
        for row in theirs:
            mine = merged.get(record.identity(row))
            if mine is None:
                added += 1
                merged[record.identity(row)] = row
            elif row != mine:
                newer = _age(row) > _age(mine)
                replaced += newer
                conflicts.append(Conflict(row, mine, True) if newer else Conflict(mine, row, False))
                merged[record.identity(row)] = conflicts[-1].kept
        reports.append(Merged(path, added, replaced, len(theirs) - added - replaced, tuple(conflicts)))
    return list(merged.values()), reports


class Store:
    """A cache file that is written to.

    Opening one checks that it can be: CacheFileError if the file there is no cache, OSError if the place cannot be
    written. Processes and threads may share a path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(Path(path).expanduser()))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._turn():
            self.rows()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One writer at a time. SQLite's own lock on an empty database of its own: it works on every platform, waits,
        and is let go by a process that dies. The file stays: removing it would race."""
        lock = self.path.with_name(f".{self.path.name}.lock")
        connection = None
        try:
            connection = sqlite3.connect(lock, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            if connection is not None:
                connection.close()
            raise OSError(f"cache file {self.path} cannot be written: {lock}: {error}") from error
        try:
            yield
        finally:
            connection.close()

    def rows(self) -> list[Row]:
        """The rows there are, in the order of the file; none where there is no file yet."""
        return reader.read(self.path) if os.path.lexists(self.path) else []

    def put(self, rows: Iterable[Row]) -> None:
        """Add ``rows``; each takes the place of the one with its key, variant and way of being obtained.

        ValueError names a value that no cache file may hold; then nothing is written.
        """
        added = {record.identity(row): record.checked(row) for row in rows}
        with self._turn():
            current = {record.identity(row): row for row in self.rows()}
            self._replace((current | added).values())

    def remove(self, rows: Iterable[Row]) -> None:
        """Take out the rows with the keys, variants and ways of being obtained of ``rows``."""
        gone = {record.identity(row) for row in rows}
        with self._turn():
            current = self.rows()
            kept = [row for row in current if record.identity(row) not in gone]
            if len(kept) < len(current):
                self._replace(kept)

    def merge(self, *others: str | os.PathLike[str]) -> list[Merged]:
        """Take over the rows of other cache files: all of them, or in case of an error none. Where two have one, the later
        made stays. Returns what came of each file."""
        with self._turn():
            rows, reports = merge(self.rows(), others)
            if any(report.added or report.replaced for report in reports):
                self._replace(rows)
        return reports

    def _replace(self, rows: Iterable[Row]) -> None:
        """The file anew, in our turn: nobody else writes, so what other writers left half done is nobody's."""
        left_over = f".{self.path.name}."
        with suppress(OSError), os.scandir(self.path.parent) as entries:
            for entry in entries:
                if entry.name.startswith(left_over) and entry.name.endswith(HALF_DONE):
                    os.unlink(entry)
        _publish(self.path, lambda path: _write(path, rows), HALF_DONE)

    def export(self, path: str | os.PathLike[str], kind: str = "sqlite") -> None:
        """Write what is here to another file, see ``export``."""
        if os.path.realpath(path) == str(self.path):
            raise ValueError(f"path: got {path}, which is the cache file itself")
        export(self.rows(), path, kind)


def export(rows: Iterable[Row], path: str | os.PathLike[str], kind: str = "sqlite") -> None:
    """A file of ``rows`` to ship: "sqlite", or "json", its readable twin. The same rows give the same bytes. A file
    that is already there is replaced at one stroke."""
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, allowed are {', '.join(KINDS)}")
    rows = [record.checked(row) for row in rows]
    if kind == "json":
        write_text(path, record.to_json(rows))
    else:
        _publish(Path(path), lambda temporary: _write(temporary, rows))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """A text file, put there at one stroke."""

    def fill(temporary: Path) -> None:
        temporary.write_bytes(text.encode())

    _publish(Path(path), fill)
