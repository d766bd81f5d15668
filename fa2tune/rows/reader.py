"""Finds and reads the cache files that serve, before the first launch.

Only the standard library's ``sqlite3``: SQLAlchemy, which owns every write (``store.py``), costs 0.25 s to import.
Files are opened read-only and immutable, without lock and journal, so they may be on read-only and network disks. That is safe
because fa2tune replaces a cache file as a whole and never writes into one.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fa2tune.rows import record
from fa2tune.rows.row import Row
from fa2tune.text import plain

logger = logging.getLogger("fa2tune")

#: SQLite's ``application_id`` of a cache file: "fa2t".
APPLICATION_ID = 0x66613274
TWIN = b'{"schema": '  #: the beginning of a JSON twin
#: Bytes; ten thousand rows take some 10 MB.
MAX_FILE = 256 << 20
#: Steps of SQLite's virtual machine that reading may take: for any file, and for each of its bytes. A row takes about 45 steps
#: and has more bytes than that, so a file that takes more steps leads in a circle, or to the same pages again and again.
STEPS, STEPS_A_BYTE = 1_000_000, 4
#: How often a file that changes while it is read is read again, and the pause in between.
ATTEMPTS, PAUSE_S = 4, 0.05
#: Environment variable that names fleet files, separated as PATH is.
FLEET_VARIABLE = "FA2TUNE_CACHE"


class CacheFileError(ValueError):
    """A cache file that cannot be used. The message names the file and the reason."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        reason = plain(reason)  # it may quote the file
        super().__init__(f"cache file {plain(os.fspath(path), None)}: {reason}")
        self.path, self.reason = Path(path), reason


@dataclass(frozen=True, eq=False)
class Layer:
    """One cache file and its rows."""

    name: str  #: "named" (asked for by path), "user", "fleet" or "shipped"
    path: Path
    rows: Sequence[Row]


@dataclass(frozen=True)
class _Held:
    """The content of a file, values not checked yet."""

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


class ShippedRows(Sequence[Row]):
    """The rows of a file that came with fa2tune, each checked when it is asked for: checking all of them takes 0.1 s, which a
    first call would wait for. The first bad row is logged as a warning, and the file counts as empty from then on."""

    def __init__(self, held: _Held) -> None:
        self._held, self._count = held, len(held.records)
        self._decoded: dict[int, Row] = {}
        #: (arch, kernel) as the file has them -> numbers
        self._by_kernel: dict[tuple[Any, Any], list[int]] | None = None

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

    def of(self, arch: int, kernel: str, **wanted: Container[Any]) -> list[Row]:
        """Those of a kernel and compute capability that hold one of these values in each of these columns."""
        held, place_of = self._held.records, self._held.names.index
        if self._by_kernel is None:  # a first call looks up five kernels, in every file
            found: dict[tuple[Any, Any], list[int]] = {}
            columns = place_of("arch"), place_of("kernel")
            for number, values in enumerate(held):
                found.setdefault((values[columns[0]], values[columns[1]]), []).append(number)
            self._by_kernel = found
        numbers = self._by_kernel.get((arch, kernel), ()) if self._count else ()
        places = [(place_of(name), values) for name, values in wanted.items()]
        return self._at(n for n in numbers if all(held[n][place] in values for place, values in places))

    def __iter__(self) -> Iterator[Row]:
        return iter(self._at(range(self._count)))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


def _schema_version(path: Path) -> int:
    """Schema version, from the file's header (sqlite.org/fileformat.html), without SQLite."""
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
        raise CacheFileError(path, "is an SQLite database, but not a fa2tune cache")
    version = int.from_bytes(header[60:64], "big")
    if version > record.SCHEMA_VERSION:
        raise CacheFileError(path, record.NEWER.format(version=version))
    if header[18:20] != b"\1\1":  # rows that are still in the log would be missed
        raise CacheFileError(path, "is in WAL mode: run PRAGMA journal_mode=DELETE on it")
    if path.with_name(path.name + "-journal").exists():
        raise CacheFileError(
            path, "has the journal of an unfinished write next to it: open it once with sqlite3 to roll that back"
        )
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
    """The identity of the file at ``path``, and what changes when it is written into; None: no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns)


def read(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a cache file or of its JSON twin, of this or an older schema version, every value checked.

    CacheFileError names the file and what is wrong with it. If the file is replaced meanwhile, these are the rows of the old
    file or of the new one; on a network disk the old one may disappear, and the file is read again.
    """
    return _of_twin(Path(path)) if is_twin(path) else _decoded(_held(path))


def is_twin(path: str | os.PathLike[str]) -> bool:
    """Whether a file is the readable twin of a cache file (``record.to_json``). False where there is none."""
    try:
        if not os.path.isfile(path):  # a pipe would be waited for
            return False
        with open(path, "rb") as file:
            return file.read(len(TWIN)) == TWIN
    except OSError:
        return False


def _of_twin(path: Path) -> list[Row]:
    try:
        if path.stat().st_size > MAX_FILE:
            raise ValueError(f"is larger than {MAX_FILE >> 20} MiB")
        return _distinct(record.of_json(path.read_text(encoding="utf-8")), path)
    except (OSError, ValueError) as error:  # among them what is no JSON
        raise error if isinstance(error, CacheFileError) else CacheFileError(path, str(error)) from error


def _decoded(held: _Held) -> list[Row]:
    """Every row, checked."""
    return _distinct([held.row(number) for number in range(len(held.records))], held.path)


def _distinct(rows: list[Row], path: Path) -> list[Row]:
    if len({record.identity(row) for row in rows}) != len(rows):
        raise CacheFileError(path, "holds two rows with the same key, implementation, workload, origin and config")
    return rows


def _held(path: str | os.PathLike[str]) -> _Held:
    """The content of a cache file at one moment. CacheFileError."""
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
            failure = CacheFileError(path, "was written into while it was read: replace a file by a copy and a rename")
            time.sleep(PAUSE_S)
    if failure is not None or found is None:
        raise failure or CacheFileError(path, "cannot be read")
    return found


def _read(path: Path) -> _Held:
    """The content of the file at an absolute path, read once."""
    try:
        version = _schema_version(path)
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4 * record.MAX_JSON)
            database.set_progress_handler(lambda: 1, STEPS + STEPS_A_BYTE * path.stat().st_size)  # 1: stop
            for pragma in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON"):
                database.execute(f"PRAGMA {pragma}")
            names = _checked_columns(database, path, version)
            return _Held(path, version, names, database.execute(f"SELECT {', '.join(names)} FROM rows").fetchall())
    except UnicodeDecodeError as error:  # the text of SQLite's own error, which quotes the damaged schema
        raise CacheFileError(path, "is damaged: its schema is not valid UTF-8") from error
    except (sqlite3.Error, OSError) as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise CacheFileError(path, "is damaged: it has more to read than fits in a file of its size") from error
        raise CacheFileError(path, str(error)) from error


#: Environment variables by which the user's folder is found.
HOME_VARIABLES = ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME", "USERPROFILE")


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
    """(layer, path) of every file that may serve without being named, in lookup order."""
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
            held = _held(path)
            one_by_one = name == "shipped" and held.version == record.SCHEMA_VERSION
            found.append(Layer(name, path, ShippedRows(held) if one_by_one else _decoded(held)))
        except CacheFileError as error:
            logger.warning("%s layer skipped: %s", name, error)
    return found
