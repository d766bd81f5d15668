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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from fa2tune import reader, record
from fa2tune.row import Row

#: How long a writer waits for its turn.
LOCK_TIMEOUT_S = 120.0

KINDS = ("sqlite", "json")

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


def _publish(path: Path, fill: Callable[[Path], None]) -> None:
    """``fill`` a temporary file beside ``path``, then put it there at one stroke."""
    path = Path(os.path.realpath(path))  # a link stays, what it points to is replaced
    if path.exists() and not os.access(path, os.W_OK):  # renaming over it would not ask
        raise PermissionError(f"cache file {path} is write-protected")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        fill(temporary)
        if path.exists():
            shutil.copymode(path, temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


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
        except sqlite3.OperationalError as error:
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
            _publish(self.path, lambda path: _write(path, (current | added).values()))

    def merge(self, other: str | os.PathLike[str]) -> tuple[int, int, int]:
        """Take over the rows of another cache file. Where both have one, the later made stays; of two made in the same
        second, ours. Returns how many were added, replaced, and left."""
        theirs = reader.read(other)
        with self._turn():
            merged = {record.identity(row): row for row in self.rows()}
            added = replaced = 0
            for row in theirs:
                mine = merged.get(record.identity(row))
                if mine is None:
                    added += 1
                elif row.created[:19] > mine.created[:19]:  # to the second, whichever way UTC is written
                    replaced += 1
                else:
                    continue
                merged[record.identity(row)] = row
            if added or replaced:
                _publish(self.path, lambda path: _write(path, merged.values()))
        return added, replaced, len(theirs) - added - replaced

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
        _publish(Path(path), lambda temporary: _write_text(temporary, record.to_json(rows)))
    else:
        _publish(Path(path), lambda temporary: _write(temporary, rows))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
