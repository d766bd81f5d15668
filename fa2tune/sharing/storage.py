"""The database that workers share: its URL, our own tables in it, and waiting while it does not answer.

Optuna keeps the studies there and owns their table names. What is ours (failures, leases, and the rows where no
cache file holds them) stands in PostgreSQL in a schema of its own, and with SQLite in a file of its own beside the studies.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy as sa
from sqlalchemy.pool import NullPool, StaticPool

from fa2tune.rows.turns import in_turn

POSTGRES_SCHEMA = "fa2tune"  #: of our tables in PostgreSQL
OWN_FILE = "ledger.sqlite"  #: with SQLite, the file with our tables, beside the studies
DRIVER = "postgresql+psycopg"
EXTRA = "storage: PostgreSQL needs the package psycopg: pip install 'fa2tune[postgresql]'"
LOCK_TIMEOUT_S = 60  #: how long a writer to an SQLite file waits for its turn
#: Seconds that a PostgreSQL may be away in the midst of a run, and between two tries.
OUTAGE_S, RETRY_S = 120.0, 0.5
HURRY_S = 10.0  #: the same after Ctrl-C
CONNECT_S = 10  #: for one connection attempt
#: Seconds after which the server ends a transaction whose client is silent: a worker that is stopped or cut off in the middle
#: of one would otherwise keep its locks, and all others would wait.
SILENT_S = 10.0
#: SQLite's result codes that say nothing against the file itself.
UNHARMED = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
}  # fmt: skip

T = TypeVar("T")


class StorageError(RuntimeError):
    """The database is damaged, or does not answer. The message names it, without a password."""


def shown(url: sa.URL) -> str:
    """``url`` for people: no password, nor any option, of which one may be a password."""
    return url.set(password=None, query={}).render_as_string()


def parsed(text: str) -> sa.URL:
    """The URL of a storage. ValueError says what is allowed, and never repeats what came: it may hold a password."""
    allowed = f"sqlite:///file and {DRIVER}://user@host/database"
    try:
        url = sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError):
        raise ValueError(f"storage: got something that is no database URL, allowed are {allowed}") from None
    backend = url.get_backend_name()
    if backend == "postgresql" and text.count("@") != (
        url.username is not None
    ):  # a part of it passes for something else
        raise ValueError("storage: user name or password: @ must be written as %40, / as %2F, ? as %3F")
    if backend == "sqlite" and url.database not in (None, "", ":memory:"):
        return url
    if backend != "postgresql" or (url.drivername != "postgresql" and url.drivername != DRIVER) or not url.database:
        raise ValueError(f"storage: got {shown(url)}, allowed are {allowed}")
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise ValueError(EXTRA) from error
    return url.set(drivername=DRIVER)


def _gone(error: BaseException | None) -> bool:
    """Whether an error says that the database was not there, and not that it refused."""
    while error is not None:
        if isinstance(error, (sa.exc.OperationalError, sa.exc.InterfaceError)):
            return True
        if isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated:
            return True
        error = error.__cause__
    return False


def _driver_error(error: BaseException) -> BaseException:
    """The database driver's own error behind ``error``, which Optuna and SQLAlchemy wrap; ``error`` if there is none."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, sa.exc.DBAPIError) and found.orig is not None:
            return found.orig
        found = found.__cause__
    return error


def _first_line(error: BaseException) -> str:
    """What the database's driver says."""
    cause = _driver_error(error)
    said = str(cause).strip().splitlines()
    return said[0] if said else repr(cause)


def _sound(error: BaseException) -> bool:
    """Whether an SQLite error says nothing against the file: the disk is full, or the file is locked or cannot be written."""
    code = getattr(_driver_error(error), "sqlite_errorcode", None)
    return code is not None and code & 0xFF in UNHARMED


class Storage:
    """One database. ``url``: of PostgreSQL, or of the SQLite file with the studies; ``file``: with SQLite, the file with our
    own tables. Both None: nothing is kept beyond this object (for tests). ``reached``: it was there before, so it is waited
    for if it is not."""

    def __init__(self, url: sa.URL | None = None, file: Path | None = None, reached: bool = False) -> None:
        self.url, self.file = url, file
        self.shared = url is not None and url.get_backend_name() == "postgresql"
        self.name = shown(url) if url is not None and self.shared else str(file)
        #: what holds the studies: with SQLite another file than ours
        self.studies = self.name if self.shared or url is None else str(url.database)
        self._reached = reached
        self.hurry = False  #: whether to wait only a little
        self.say: Callable[[str], None] = lambda text: None  #: what is waited for
        for path in (file, Path(url.database or "") if url is not None and not self.shared else None):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)

    @classmethod
    def at(cls, url: sa.URL) -> Storage:
        """The storage behind a URL."""
        if url.get_backend_name() == "postgresql":
            return cls(url)
        return cls.of_studies(Path(url.database or ""))

    @classmethod
    def of_studies(cls, path: Path) -> Storage:
        """An SQLite file with studies, and beside it one with our own tables."""
        return cls(sa.URL.create("sqlite", database=str(path)), path.with_name(OWN_FILE))

    @cached_property
    def engine(self) -> sa.Engine:
        """Of our tables."""
        if self.shared:
            assert self.url is not None
            return sa.create_engine(
                self.url, pool_pre_ping=True, pool_size=1, connect_args=self._connect(),
                isolation_level="READ COMMITTED",  # a writer that waited must see what was done meanwhile
                execution_options={"schema_translate_map": {None: POSTGRES_SCHEMA}},
            )  # fmt: skip
        engine = sa.create_engine(
            f"sqlite:///{self.file}" if self.file is not None else "sqlite://",
            connect_args={"timeout": LOCK_TIMEOUT_S}, poolclass=NullPool if self.file is not None else StaticPool,
        )  # fmt: skip
        # Python's driver would begin a transaction with its first write: what was read before could have changed by then
        sa.event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        return engine

    def _connect(self) -> dict[str, Any]:
        """Of every connection to a PostgreSQL."""
        silent = f"-c idle_in_transaction_session_timeout={SILENT_S * 1000:.0f}"
        return {"connect_timeout": CONNECT_S, "options": silent}

    @property
    def now(self) -> sa.ColumnElement[float]:
        """Seconds since 1970 by the database's clock, the only one that counts: hosts' clocks differ, and jump."""
        if self.shared:
            return sa.extract("epoch", sa.func.clock_timestamp()).cast(sa.Double)
        return sa.literal_column("(julianday('now') - 2440587.5) * 86400.0", sa.Double)

    def patiently(self, work: Callable[[], T]) -> T:
        """``work``, tried again while a shared database that answered before does not. StorageError."""
        until = None
        while True:
            try:
                found = work()
            except Exception as error:
                if not self.shared or not _gone(error):
                    raise
                if until is None:
                    wait_s = 0.0 if not self._reached else min(HURRY_S, OUTAGE_S) if self.hurry else OUTAGE_S
                    until = time.monotonic() + wait_s
                    if wait_s:
                        self.say(f"storage: {self.name} does not answer; waiting up to {wait_s:.0f} s")
                if time.monotonic() >= until:
                    self._reached = False  # what is stored at the end need not wait again
                    raise StorageError(f"storage: {self.name} cannot be reached: {_first_line(error)}") from None
                time.sleep(RETRY_S)
            else:
                self._reached = True
                return found

    def do(self, work: Callable[[sa.Connection], T]) -> T:
        """One transaction on our own tables."""

        def once() -> T:
            with self._in_turn(self.file), self.engine.begin() as connection:
                return work(connection)

        try:
            return self.patiently(once)
        except sa.exc.DatabaseError as error:
            raise self._trouble(self.name, error) from error

    def _in_turn(self, file: str | os.PathLike[str] | None) -> AbstractContextManager[object]:
        """For a transaction on an SQLite file. A PostgreSQL, and what is in memory, need no queue."""
        return nullcontext() if self.shared or file is None else in_turn(file, LOCK_TIMEOUT_S)

    def on_studies(self, work: Callable[[], T], writes: bool = False) -> T:
        """``work`` on Optuna's tables. StorageError names what holds them."""

        def once() -> T:
            with self._in_turn(self.studies if writes and self.url is not None else None):
                return work()

        try:
            return self.patiently(once)
        except (sa.exc.DatabaseError, optuna.exceptions.StorageInternalError) as error:
            raise StorageError(f"storage: {self.studies}: {_first_line(error)}") from error

    def select(self, query: sa.Select[Any]) -> list[sa.Row[Any]]:
        """What a query finds in our own tables."""
        return self.do(lambda connection: list(connection.execute(query).all()))

    def execute(self, statement: sa.Executable, values: Sequence[Mapping[str, Any]] | None = None) -> None:
        """One statement on our own tables."""
        self.do(lambda connection: connection.execute(statement, values))

    def _trouble(self, name: str, error: sa.exc.DatabaseError) -> StorageError:
        remedy = "" if self.shared or _sound(error) else "; move the file away to start a new one"
        return StorageError(f"storage: {name}: {_first_line(error)}{remedy}")

    def alone(self, connection: sa.Connection) -> None:
        """Until this transaction ends, no other one that called this runs."""
        if self.shared:  # an SQLite file has one writer at a time as it is
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtext(POSTGRES_SCHEMA))))

    def create(self, *tables: sa.Table) -> None:
        """Make tables of ours, where they are not yet there."""

        def make(connection: sa.Connection) -> None:
            self.alone(connection)
            there, schema = sa.inspect(connection), POSTGRES_SCHEMA if self.shared else None
            if schema is not None and not there.has_schema(schema):  # IF NOT EXISTS asks for the right to make one
                connection.execute(sa.schema.CreateSchema(schema))
            for table in tables:
                if not there.has_table(table.name, schema=schema):
                    connection.execute(sa.schema.CreateTable(table))

        self.do(make)

    def optuna(self) -> optuna.storages.BaseStorage:
        """Optuna's own view of it, for the studies; its tables are made if need be."""
        if self.url is None:
            return optuna.storages.InMemoryStorage()
        options: dict[str, Any] = {"connect_args": {"timeout": LOCK_TIMEOUT_S}}
        if self.shared:
            options = {"pool_pre_ping": True, "connect_args": self._connect()}
        url = self.url.render_as_string(hide_password=False)

        def opened(connection: sa.Connection) -> optuna.storages.BaseStorage:
            self.alone(connection)  # Optuna makes its tables without a lock
            try:
                return optuna.storages.RDBStorage(url, engine_kwargs=options)
            except sa.exc.DatabaseError as error:
                if self.shared and _gone(error):
                    raise
                raise self._trouble(self.studies, error) from error

        return self.do(opened)
