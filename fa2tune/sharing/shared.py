"""The rows of a fleet in the database that its workers share: a cache that is written by all of them, and read out into a file.

Nodes serve from files (``store.py``): a call to attention opens no connection. The rows of a slot stand here together, each
as a cache file's record, in JSON, beside the version of their schema, so that no release has to change the table, and rows of
an earlier one are upgraded when they are read. Up to schema version 2 a slot was a row.
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

ROWS = sa.Table(
    "rows", sa.MetaData(),
    sa.Column("identity", sa.TEXT, primary_key=True),  # record.SLOT, as a JSON list
    sa.Column("version", sa.INTEGER, nullable=False),  # of the record's schema
    sa.Column("record", sa.TEXT, nullable=False),
)  # fmt: skip


class SharedStore:
    """What ``Store`` is for a cache file."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.name = storage.name
        storage.create(ROWS)

    def rows(self) -> list[Row]:
        """Every row, sorted as in a file. StorageError: one was made by a later fa2tune, or is none."""
        held = self.storage.select(sa.select(ROWS))
        found = [row for each in held for row in self._decoded(each.identity, each.version, each.record)]
        return sorted(found, key=record.identity)

    def _decoded(self, identity: str, version: int, text: str) -> list[Row]:
        if version > record.SCHEMA_VERSION:
            raise StorageError(
                f"storage: {self.name}: a row has schema version {version}, this fa2tune reads up to "
                f"{record.SCHEMA_VERSION}: upgrade fa2tune"
            )
        try:
            held = json.loads(text)
            held = [held] if isinstance(held, dict) else held
            if not isinstance(held, list) or not all(isinstance(one, dict) for one in held):
                raise ValueError("must be an object or a list of objects")
            rows = [record.decode(record.upgrade(one, version)) for one in held]
        except (ValueError, KeyError, RecursionError) as error:
            raise StorageError(f"storage: {self.name}: row {identity[:200]}: {error}") from error
        return rows

    def write(self, connection: sa.Connection, rows: Sequence[Row]) -> None:
        """Add ``rows``, as a part of a transaction; those of a slot take the place of all that it held. ValueError names a
        value that no cache file may hold; then nothing is written."""
        insert = postgresql.insert if self.storage.shared else sqlite.insert
        slots = record.by_slot({record.identity(row): row for row in map(record.checked, rows)}.values())
        values: list[dict[str, Any]] = [
            {
                "identity": json.dumps(slot),
                "version": record.SCHEMA_VERSION,
                "record": json.dumps([record.encode(row) for row in filling], sort_keys=True),
            }
            for slot, filling in slots.items()
        ]
        if not values:
            return
        older = [json.dumps(record.identity_2(filling[0])) for filling in slots.values()]
        connection.execute(sa.delete(ROWS).where(ROWS.c.identity.in_(older)))
        statement = insert(ROWS)
        new = {name: statement.excluded[name] for name in ("version", "record")}
        statement = statement.on_conflict_do_update(index_elements=["identity"], set_=new)
        connection.execute(statement, values)
