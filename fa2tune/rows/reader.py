"""Reads cache files on the way to the first launch, and finds those that serve.

Only the standard library's ``sqlite3``: SQLAlchemy, which owns every write (``store.py``), costs 0.25 s to import.
Files are opened read-only and immutable: no lock and no journal, so that they may lie on read-only and network disks.
That is safe because fa2tune replaces a cache file whole and never writes into one.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fa2tune.rows import record
from fa2tune.rows.row import Row

logger = logging.getLogger("fa2tune")

#: SQLite's ``application_id`` of a cache file: "fa2t".
APPLICATION_ID = 0x66613274
#: Bytes; ten thousand rows take some 10 MB.
MAX_FILE = 256 << 20
#: How often a file that changes under the reader is looked at, and how long to wait in between.
ATTEMPTS, PAUSE_S = 4, 0.05
#: Environment variable that names fleet files, separated as PATH is.
FLEET_VARIABLE = "FA2TUNE_CACHE"


class CacheFileError(ValueError):
    """A cache file that cannot be used. The message names the file and the reason."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"cache file {os.fspath(path)}: {reason}")
        self.path, self.reason = Path(path), reason


@dataclass(frozen=True, eq=False)
class Layer:
    """One cache file and its rows."""

    name: str  #: "named" (asked for by path), "user", "fleet" or "shipped"
    path: Path
    rows: Sequence[Row]


@dataclass(frozen=True)
class _Held:
    """What a file holds, not looked at."""

    path: Path
    version: int
    names: tuple[str, ...]
    records: Sequence[tuple[Any, ...]]

    def row(self, number: int) -> Row:
        """Every value checked; CacheFileError."""
        values = dict(zip(self.names, self.records[number], strict=True))
        try:
            return record.decode(record.upgrade(values, self.version))
        except ValueError as error:
            raise CacheFileError(self.path, f"row {number + 1}, {error}") from None


class Rows(Sequence[Row]):
    """The rows of a file that came with fa2tune, each checked when it is asked for: all of them take 0.1 s, which a first
    call would wait for. One that is not as it must be empties the whole, with a warning, when it is met."""

    def __init__(self, held: _Held) -> None:
        self._held, self._count = held, len(held.records)
        self._decoded: dict[int, Row] = {}

    def _at(self, numbers: Iterable[int]) -> list[Row]:
        found = []
        try:
            for number in numbers:
                if number not in self._decoded:
                    self._decoded[number] = self._held.row(number)
                found.append(self._decoded[number])
        except CacheFileError as error:
            logger.warning("shipped layer skipped: %s", error)
            self._count, found = 0, []
        return found

    def of(self, **wanted: Any) -> list[Row]:
        """Those that hold these values in these columns."""
        places = [(self._held.names.index(name), value) for name, value in wanted.items()]
        records = self._held.records[: self._count]
        return self._at(n for n, held in enumerate(records) if all(held[place] == value for place, value in places))

    def __iter__(self) -> Iterator[Row]:
        return iter(self._at(range(self._count)))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


def _schema_version(path: Path) -> int:
    """Schema version by the file's header (sqlite.org/fileformat.html), which SQLite need not be asked for."""
    if not path.exists():
        raise CacheFileError(path, "no such file")
    if not path.is_file():
        raise CacheFileError(path, "is not a regular file")
    if path.stat().st_size > MAX_FILE:
        raise CacheFileError(path, f"is larger than {MAX_FILE >> 20} MiB")
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        raise CacheFileError(path, "is not an SQLite database")
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise CacheFileError(path, "is an SQLite database, but no fa2tune cache")
    version = int.from_bytes(header[60:64], "big")
    if version > record.SCHEMA_VERSION:
        raise CacheFileError(
            path, f"has schema version {version}, this fa2tune reads up to {record.SCHEMA_VERSION}: upgrade fa2tune"
        )
    if header[18:20] != b"\1\1":  # what is still in the log would be missed
        raise CacheFileError(path, "is in WAL mode: run PRAGMA journal_mode=DELETE on it")
    if path.with_name(path.name + "-journal").exists():
        raise CacheFileError(path, "was left in the middle of a write: open it once with sqlite3 to roll that back")
    return version


def _checked_columns(database: sqlite3.Connection, path: Path, version: int) -> tuple[str, ...]:
    """Column names, once the file is known to hold one plain table of them and nothing that computes (views, triggers,
    virtual tables, generated columns)."""
    objects = database.execute("SELECT type, name, rootpage > 0 FROM sqlite_master ORDER BY type, name").fetchmany(9)
    if objects != [("table", "rows", 1)]:
        found = ", ".join(f"{kind} {name}" for kind, name, _ in objects)
        raise CacheFileError(path, f"must hold one table, rows, and nothing else; it holds {found!a}")
    names = record.columns(version)
    held = [(name, hidden) for _, name, _, _, _, _, hidden in database.execute("PRAGMA table_xinfo(rows)")]
    if held != [(name, 0) for name in names]:
        raise CacheFileError(path, f"its columns are not those of schema version {version}")
    return names


def _state(path: Path) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Which file lies at ``path``, and what changes when it is written into; None: there is none to be seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns)


def read(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a cache file, of this or an older schema version, every value checked.

    CacheFileError names the file and what is wrong with it. A file that is replaced meanwhile is the old one or the new
    one; on a network disk the old one may vanish under the reader, who then looks again.
    """
    held = _held(path)
    rows = [held.row(number) for number in range(len(held.records))]
    if len({record.identity(row) for row in rows}) != len(rows):
        raise CacheFileError(held.path, "holds a key, variant and way of obtaining it twice")
    return rows


def _held(path: str | os.PathLike[str]) -> _Held:
    """What a cache file holds, read at one moment. CacheFileError."""
    try:
        path = Path(path).absolute()
    except OSError as error:  # a relative path, and the working directory is gone
        raise CacheFileError(path, str(error)) from error
    found, failure = None, None
    for _ in range(ATTEMPTS):
        before = _state(path)
        try:
            found, failure = _read(path), None
        except CacheFileError as error:
            found, failure = None, error
        after = _state(path)
        if before == after or not (before and after):
            break
        if before[0] != after[0]:  # replaced
            if failure is None:
                break
        else:  # written into: what was read may be half the one and half the other
            failure = CacheFileError(path, "was written into while it was read: ship a file by a copy and a rename")
            time.sleep(PAUSE_S)
    if failure is not None or found is None:
        raise failure or CacheFileError(path, "cannot be read")
    return found


def _read(path: Path) -> _Held:
    """What the file that lies there, absolutely, holds at this moment."""
    try:
        version = _schema_version(path)
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4 * record.MAX_JSON)
            for pragma in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON"):
                database.execute(f"PRAGMA {pragma}")
            names = _checked_columns(database, path, version)
            return _Held(path, version, names, database.execute(f"SELECT {', '.join(names)} FROM rows").fetchall())
    except (sqlite3.Error, OSError) as error:
        raise CacheFileError(path, str(error)) from error


def user_path() -> Path:
    """The user's own cache file, under the platform's cache directory; it need not exist.

    XDG_CACHE_HOME where set; else ~/.cache, ~/Library/Caches (macOS) or %LOCALAPPDATA% (Windows). RuntimeError without
    a home directory.
    """
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification has relative ones ignored
        folder = Path(xdg, "fa2tune")
    elif sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local", "fa2tune", "Cache")
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches" / "fa2tune"
    else:
        folder = Path.home() / ".cache" / "fa2tune"
    return folder / "cache.sqlite"


def _discovered() -> Iterator[tuple[str, Path]]:
    """(layer, path) of every file that may serve unasked, first come first served."""
    try:
        user = user_path()
    except RuntimeError as error:
        logger.warning("no user cache file: %s", error)
    else:
        if os.path.lexists(user):
            yield "user", user
    for entry in os.environ.get(FLEET_VARIABLE, "").split(os.pathsep):
        if entry:
            try:
                yield "fleet", Path(entry).expanduser()
            except RuntimeError as error:  # the home of a user who is not known here
                logger.warning("fleet layer skipped: cache file %s: %s", entry, error)
    yield from (("shipped", path) for path in shipped_paths())


def shipped_paths() -> list[Path]:
    """The cache files that came with fa2tune, by name."""
    try:
        folder = resources.files("fa2tune.cache")
        return sorted(Path(str(file)) for file in folder.iterdir() if file.name.endswith(".sqlite"))
    except (ModuleNotFoundError, OSError):  # a checkout with no cache files yet: git keeps no empty folder
        return []


def layers(named: Sequence[str | os.PathLike[str]] = ()) -> list[Layer]:
    """Every cache file that serves, strongest first: ``named`` by the caller, the user's, the fleet's (FA2TUNE_CACHE),
    those shipped, whose rows are checked when they are asked for.

    A named file that cannot be read raises CacheFileError; of the others each unreadable one is skipped, with one
    warning (logger "fa2tune") that names file and reason. That the user's does not exist is normal.
    """
    found = [Layer("named", Path(path), read(path)) for path in named]
    for name, path in _discovered():
        try:
            found.append(Layer(name, path, Rows(_held(path)) if name == "shipped" else read(path)))
        except CacheFileError as error:
            logger.warning("%s layer skipped: %s", name, error)
    return found
