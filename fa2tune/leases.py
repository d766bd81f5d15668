"""Who works on what: workers, and their leases on the lots (``lots.py``) that they tune.

A worker says now and then that it lives; its leases expire with it, and others take them over. Whoever holds no lease on a lot
tunes nothing of it. Everything is one small transaction at a time, under one lock and by one clock, the database's, so that
no two workers ever disagree and no host's clock counts.

Workers share a lot only within a campaign: the same GPU model, measured or predicted alike, with the same Triton and driver. A
lot settled by one is settled for all of the campaign that ask for the same; a campaign is over when none of its workers lives,
and the next one looks at every lot anew (which costs nothing where the trials are all there).
"""

from __future__ import annotations

import math
import os
import socket
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import sqlalchemy as sa

from fa2tune.storage import Storage

EXPIRY_S = 60.0  #: by the database's clock, since a worker's last word: then it counts as gone
BEAT_S = 2.0  #: between two words

_META = sa.MetaData()
WORKERS = sa.Table(
    "workers", _META,
    sa.Column("worker", sa.TEXT, primary_key=True),
    sa.Column("campaign", sa.TEXT, nullable=False),
    sa.Column("place", sa.TEXT, nullable=False),  # host, boot and process namespace: where pid means something
    sa.Column("pid", sa.INTEGER, nullable=False),
    sa.Column("born", sa.TEXT, nullable=False),  # when that process began: a pid is used again
    sa.Column("gpus", sa.INTEGER, nullable=False),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("until", sa.Double, nullable=False),
)  # fmt: skip
LEASES = sa.Table(
    "leases", _META,
    sa.Column("campaign", sa.TEXT, primary_key=True),
    sa.Column("lot", sa.TEXT, primary_key=True),
    sa.Column("worker", sa.TEXT, nullable=False),  # who holds it, or settled it
    sa.Column("settled", sa.TEXT, nullable=False),  # "": held; else the request it was settled for
    sa.Column("since", sa.Double, nullable=False),
)  # fmt: skip


@dataclass(frozen=True)
class Standing:
    """How things are, after a meeting."""

    held: frozenset[str] = frozenset()  #: lots that this worker holds
    settled: frozenset[str] = frozenset()  #: lots that need no more work for this request
    others: int = 0  #: workers of this campaign beside this one
    excess: int = 0  #: held lots above this worker's part: it should give back as many
    lost: bool = False  #: this worker had been taken for dead; what it held before is not its own


@dataclass(frozen=True)
class Lease:
    """One line for whoever looks."""

    campaign: str
    lot: str
    worker: str
    gpus: int
    held_s: float
    left_s: float  #: until it expires, unless its worker says another word; below 0: expired


def _place() -> str:
    """Where a pid means something: this host, since it was booted, in this process's namespace."""
    boot, namespace = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot} {namespace}"


def _born(pid: int) -> str:
    """When a process began, in ticks since the host was booted; "" if it is gone, or a zombie."""
    with suppress(OSError, IndexError):
        about = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if about[0] in "ZX" else about[19]
    return ""


@dataclass
class Leases:
    """The leases of one worker. ``request``: what it was asked for, so that a settled lot is so for others that were asked
    for the same; ``gpus``: its part of the work."""

    storage: Storage
    campaign: str
    request: str
    gpus: int = 1
    worker: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}")
    standing: Standing = Standing()
    met: float = -math.inf  #: time.monotonic() of the last meeting

    def __post_init__(self) -> None:
        self.storage.create(WORKERS, LEASES)

    def due(self) -> bool:
        return time.monotonic() >= self.met + BEAT_S

    def meet(self, wanted: Sequence[str]) -> Standing:
        """Say that this worker lives, bury who does not, and take what is free, up to this worker's part: by its GPUs, of all
        that work on this. ``wanted``: every lot of the request, the largest first."""
        joined = self.met > -math.inf

        def meeting(connection: sa.Connection) -> Standing:
            self.storage.alone(connection)
            self._bury(connection)
            present = self._breathe(connection)
            table = connection.execute(sa.select(LEASES).where(LEASES.c.campaign == self.campaign)).all()
            settled = {row.lot for row in table if row.settled == self.request}
            held = {row.lot for row in table if row.worker == self.worker and not row.settled}
            taken = {row.lot for row in table if not row.settled}
            free = [lot for lot in wanted if lot not in taken and lot not in settled]
            living = connection.execute(sa.select(WORKERS.c.gpus).where(WORKERS.c.campaign == self.campaign)).scalars()
            weights = list(living)
            open_ = sum(lot not in settled for lot in wanted)
            part = max(1, -(-open_ * self.gpus // sum(weights)))
            new = free[: max(0, part - len(held))]
            self._release(connection, new)  # one may have been settled for another request
            for lot in new:
                values = {"campaign": self.campaign, "lot": lot, "worker": self.worker, "settled": ""}
                connection.execute(LEASES.insert().values(**values, since=self.storage.now))
            return Standing(
                frozenset(held | {*new}), frozenset(settled), len(weights) - 1, max(0, len(held) - part),
                joined and not present,
            )  # fmt: skip

        self.standing = self.storage.do(meeting)
        self.met = time.monotonic()
        return self.standing

    def _bury(self, connection: sa.Connection) -> None:
        """Take out who has said no word for long, and who was killed on this host. Of a campaign that nobody works on, forget
        what was settled."""
        place = _place()
        for row in connection.execute(sa.select(WORKERS, (WORKERS.c.until < self.storage.now).label("late"))).all():
            gone = row.place == place and _born(row.pid) != row.born
            if row.worker != self.worker and (gone or row.late):
                connection.execute(LEASES.delete().where(LEASES.c.worker == row.worker, LEASES.c.settled == ""))
                connection.execute(WORKERS.delete().where(WORKERS.c.worker == row.worker))
        connection.execute(LEASES.delete().where(LEASES.c.campaign.not_in(sa.select(WORKERS.c.campaign))))

    def _breathe(self, connection: sa.Connection) -> bool:
        """Live on until ``EXPIRY_S`` from now; False: it had been buried, or never lived."""
        until = self.storage.now + EXPIRY_S
        mine = WORKERS.c.worker == self.worker
        if connection.execute(WORKERS.update().where(mine).values(until=until)).rowcount:
            return True
        pid = os.getpid()
        about = {"worker": self.worker, "campaign": self.campaign, "place": _place(), "pid": pid, "born": _born(pid)}
        connection.execute(WORKERS.insert().values(**about, gpus=self.gpus, since=self.storage.now, until=until))
        return False

    def _release(self, connection: sa.Connection, lots: Collection[str]) -> None:
        ours = sa.or_(LEASES.c.worker == self.worker, LEASES.c.settled != "")
        connection.execute(LEASES.delete().where(LEASES.c.campaign == self.campaign, LEASES.c.lot.in_(lots), ours))

    def give(self, lot: str) -> None:
        """Give back a lease: whoever takes it finds what is stored by now."""

        def given(connection: sa.Connection) -> None:
            self.storage.alone(connection)
            self._release(connection, [lot])

        self.storage.do(given)
        self.standing = replace(self.standing, held=self.standing.held - {lot})

    def holds(self, lot: str) -> bool:
        """Whether the lease is still ours: who was stopped for a while may have been taken for dead."""

        def look(connection: sa.Connection) -> bool:
            here = (LEASES.c.campaign == self.campaign, LEASES.c.lot == lot, LEASES.c.settled == "")
            return connection.execute(sa.select(LEASES.c.worker).where(*here)).scalar() == self.worker

        return self.storage.do(look)

    def settle(self, lot: str) -> None:
        """Everything of a lot is done, and stored."""

        def settled(connection: sa.Connection) -> None:
            self.storage.alone(connection)
            mine = (LEASES.c.campaign == self.campaign, LEASES.c.lot == lot, LEASES.c.worker == self.worker)
            connection.execute(LEASES.update().where(*mine).values(settled=self.request, since=self.storage.now))

        self.storage.do(settled)
        held, done = self.standing.held - {lot}, self.standing.settled | {lot}
        self.standing = replace(self.standing, held=held, settled=done)

    def leave(self) -> None:
        """Give back everything. What was settled stays so for those who are left."""

        def left(connection: sa.Connection) -> None:
            self.storage.alone(connection)
            connection.execute(LEASES.delete().where(LEASES.c.worker == self.worker, LEASES.c.settled == ""))
            connection.execute(WORKERS.delete().where(WORKERS.c.worker == self.worker))

        self.storage.do(left)
        self.standing, self.met = Standing(), -math.inf


def board(storage: Storage) -> list[Lease]:
    """Every lease, and every worker that holds none, by campaign."""
    storage.create(WORKERS, LEASES)
    held = sa.and_(LEASES.c.worker == WORKERS.c.worker, LEASES.c.settled == "")
    query = sa.select(WORKERS, LEASES.c.lot, (storage.now - sa.func.coalesce(LEASES.c.since, WORKERS.c.since)).label("held"),
                      (WORKERS.c.until - storage.now).label("left")).select_from(
        WORKERS.outerjoin(LEASES, held)).order_by(WORKERS.c.campaign, WORKERS.c.worker, LEASES.c.lot)  # fmt: skip
    rows = storage.select(query)
    return [Lease(row.campaign, row.lot or "", row.worker, row.gpus, row.held, row.left) for row in rows]
