"""The rows of a fleet in the database that its workers share: a cache that is written by all of them, and read out into a file.

Nodes serve from files (``store.py``): a call to attention opens no connection. A row stands here as a cache file's record, in
JSON, beside the version of its schema, so that no release has to change the table, and rows of an earlier one are upgraded
when they are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from fa2tune.rows import record
from fa2tune.rows.row import Row
from fa2tune.sharing.storage import Storage, StorageError

TABLE = sa.Table(
    "rows", sa.MetaData(),
    sa.Column("identity", sa.TEXT, primary_key=True),  # record.IDENTITY, as a JSON list
    sa.Column("version", sa.INTEGER, nullable=False),  # of the record's schema
    sa.Column("record", sa.TEXT, nullable=False),
)  # fmt: skip


class SharedStore:
    """What ``Store`` is for a cache file."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.name = storage.name
        storage.create(TABLE)

    def rows(self) -> list[Row]:
        """Every row, sorted as in a file. StorageError: one was made by a later fa2tune, or is none."""
        found = [
            self._decoded(each.identity, each.version, each.record) for each in self.storage.select(sa.select(TABLE))
        ]
        return sorted(found, key=record.identity)

    def _decoded(self, identity: str, version: int, text: str) -> Row:
        if version > record.SCHEMA_VERSION:
            raise StorageError(
                f"storage: {self.name}: a row has schema version {version}, this fa2tune reads up to "
                f"{record.SCHEMA_VERSION}: upgrade fa2tune"
            )
        try:
            held = json.loads(text)
            if not isinstance(held, dict):
                raise ValueError("must be an object")
            row = record.decode(record.upgrade(held, version))
        except (ValueError, KeyError, RecursionError) as error:
            raise StorageError(f"storage: {self.name}: row {identity[:200]}: {error}") from error
        return row

    def write(self, connection: sa.Connection, rows: Sequence[Row]) -> None:
        """Add ``rows``, as a part of a transaction; each takes the place of the one with its key, variant and way of being
        obtained. ValueError names a value that no cache file may hold; then nothing is written."""
        insert = postgresql.insert if self.storage.shared else sqlite.insert
        values: list[dict[str, Any]] = [
            {
                "identity": json.dumps([*record.identity(row)]),
                "version": record.SCHEMA_VERSION,
                "record": json.dumps(record.encode(row), sort_keys=True),
            }
            for row in map(record.checked, rows)
        ]
        if not values:
            return
        statement = insert(TABLE)
        new = {name: statement.excluded[name] for name in ("version", "record")}
        statement = statement.on_conflict_do_update(index_elements=["identity"], set_=new)
        connection.execute(statement, values)
