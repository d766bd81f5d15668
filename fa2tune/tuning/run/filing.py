"""Filing rows that are still this worker's to file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from fa2tune.rows.row import Row
from fa2tune.rows.store import Store
from fa2tune.sharing.leases import Leases
from fa2tune.sharing.shared import SharedStore
from fa2tune.sharing.storage import Storage
from fa2tune.tuning.request.jobs import TuningJob


@dataclass
class Filing:
    storage: Storage
    leases: Leases
    jobs: Mapping[str, TuningJob]
    store: Store | SharedStore

    def file(self, rows: Sequence[Row]) -> Sequence[Row]:
        """File those of ``rows`` whose jobs this worker still holds; which these are. In a database it is one step. A file
        makes its writers wait for their turn: a worker that loses a job just then writes its rows all the same."""
        store = self.store

        def ours(connection: sa.Connection) -> list[Row]:
            held = [self.jobs[name] for name in self.leases.holding(connection) & self.jobs.keys()]
            found = [row for row in rows if any(job.covers(row.key) for job in held)]
            if isinstance(store, SharedStore):
                store.write(connection, found)
            return found

        found = self.storage.do(ours)
        if not isinstance(store, SharedStore):
            store.put(found)
        return found
