"""Writes cache files: SQLAlchemy owns their schema and every write.

A file is never written into: put, merge and export read the existing rows and publish a new file by write, fsync and rename.
So a reader, which takes no lock, sees the old file or the new one, also when a writer is killed. Every file is sorted,
vacuumed, in rollback-journal mode, and has the same bytes for the same rows. A file of an older schema is upgraded by the
next write. Writers take turns through a lock file beside the cache file.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from fa2tune.rows import reader, record, whole
from fa2tune.rows.row import Row
from fa2tune.rows.turns import in_turn

#: How long a writer waits for its turn.
LOCK_TIMEOUT_S = 120.0

FILE_KINDS = ("sqlite", "json")

HALF_DONE = ".rows.tmp"  #: suffix of a file that a Store is writing

#: Of a file being written. No journal on disk and no syncs: the file is not used until it is fsynced and renamed. The
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
    """``fill`` a file that then appears whole, in a folder that is made if needed. OSError names ``path``."""
    Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
    try:
        whole.publish(path, fill, suffix=suffix)
    except (sa.exc.DBAPIError, sqlite3.Error) as error:
        raise OSError(f"cache file {path} cannot be written: {getattr(error, 'orig', error)}") from error


@dataclass(frozen=True)
class Conflict:
    """What two files have in one slot, where it is not the same."""

    kept: Sequence[Row]
    left: Sequence[Row]
    replaced: bool  #: whether what is kept came from the other file


@dataclass(frozen=True)
class Merged:
    """What was done with the rows of one file."""

    path: Path
    added: int  #: to slots that were empty
    replaced: int  #: took the place of others
    left: int
    conflicts: tuple[Conflict, ...] = ()


def _age(rows: Sequence[Row]) -> tuple[str, int, str]:
    """Sort key for what two files have in a slot: the newest evidence wins; of the same second that with more samples, then a
    fixed one, so that the order in which files are merged does not matter."""
    newest = max(row.created[:19] for row in rows)  # to the second, whichever way UTC is written
    return newest, sum(row.samples for row in rows), record.digest(rows)


def merge(rows: Iterable[Row], files: Iterable[str | os.PathLike[str]]) -> tuple[list[Row], list[Merged]]:
    """``rows`` and those of cache files: each slot as a whole from where its evidence is newest, since times of two machines do
    not compete; and what was done with each file. CacheFileError: a file cannot be read."""
    merged = record.by_slot(rows)
    reports = []
    for path, held in [(Path(file), reader.read(file)) for file in files]:  # all of them, or nothing
        added = replaced = 0
        conflicts = []
        for slot, theirs in record.by_slot(held).items():
            mine = merged.setdefault(slot, theirs)
            if mine is theirs:
                added += len(theirs)
            elif theirs != mine:
                newer = _age(theirs) > _age(mine)
                replaced += newer * len(theirs)
                conflicts.append(Conflict(theirs, mine, True) if newer else Conflict(mine, theirs, False))
                merged[slot] = theirs if newer else mine
        reports.append(Merged(path, added, replaced, len(held) - added - replaced, tuple(conflicts)))
    return [row for found in merged.values() for row in found], reports


class Store:
    """A cache file to write to.

    The constructor raises CacheFileError if the file there is not a cache, and OSError if the place cannot be written.
    Processes and threads may share a path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(Path(path).expanduser()))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if reader.is_twin(self.path):
            raise reader.CacheFileError(self.path, "is the JSON twin of a cache file, which is only read")
        with self._turn():
            self.rows()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One writer at a time, first come, first served. SQLite's own lock on an empty database of its own: it works on
        every platform, waits, and is released when a process dies. The file stays: removing it would race."""
        lock = self.path.with_name(f".{self.path.name}.lock")
        with in_turn(self.path, LOCK_TIMEOUT_S) as left_s:
            connection = None
            try:
                connection = sqlite3.connect(lock, timeout=left_s, isolation_level=None, check_same_thread=False)
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
        """The rows, in the order of the file; none if there is no file yet."""
        return reader.read(self.path) if os.path.lexists(self.path) else []

    def put(self, rows: Iterable[Row]) -> None:
        """Add ``rows``: those of a slot take the place of all that it held. Of two with the same config the last counts.

        ValueError names a value that no cache file may hold; then nothing is written.
        """
        added = {record.identity(row): row for row in map(record.checked, rows)}
        filled = {record.slot(row) for row in added.values()}
        with self._turn():
            kept = [row for row in self.rows() if record.slot(row) not in filled]
            self._replace([*kept, *added.values()])

    def renew(self, rows: Iterable[Row]) -> None:
        """Each of ``rows`` takes the place of the one in its slot that has its config; the others stay. ValueError: as put."""
        renewed = {record.identity(row): row for row in map(record.checked, rows)}
        with self._turn():
            current = {record.identity(row): row for row in self.rows()}
            self._replace((current | renewed).values())

    def remove(self, rows: Iterable[Row]) -> None:
        """Remove the rows that have slot and config of one of ``rows``."""
        gone = {record.identity(row) for row in rows}
        with self._turn():
            current = self.rows()
            kept = [row for row in current if record.identity(row) not in gone]
            if len(kept) < len(current):
                self._replace(kept)

    def merge(self, *others: str | os.PathLike[str]) -> list[Merged]:
        """Merge the rows of other cache files: all files, or none if one cannot be read. Each slot is taken as a
        whole from where its evidence is newest. Returns what was done with each file."""
        with self._turn():
            rows, reports = merge(self.rows(), others)
            if any(report.added or report.replaced for report in reports):
                self._replace(rows)
        return reports

    def _replace(self, rows: Iterable[Row]) -> None:
        """Write the file again, with the lock held: unfinished files are those of killed writers."""
        left_over = f".{self.path.name}.fa2tune-"
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
    that is already there is replaced by a rename."""
    if kind not in FILE_KINDS:
        raise ValueError(f"kind: got {kind!r}, allowed are {', '.join(FILE_KINDS)}")
    rows = [record.checked(row) for row in rows]
    if kind == "json":
        write_text(path, record.to_json(rows))
    else:
        _publish(Path(path), lambda temporary: _write(temporary, rows))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file; it appears whole, by a rename."""

    def fill(temporary: Path) -> None:
        temporary.write_bytes(text.encode())

    _publish(Path(path), fill)
