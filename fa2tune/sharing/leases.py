"""Workers, and their leases on the tuning jobs (``tuning/request/jobs.py``).

A worker renews its leases every few seconds. Those of a worker that stops doing so expire, and others take them over. A worker
tunes only what it holds a lease on. Each step is one small transaction under one lock and by one clock, the database's, so
workers always agree and the clocks of the hosts do not count.

Workers share jobs only within a campaign (``jobs.campaign``). A job settled by one worker is settled for all of the campaign
that ask for the same. A campaign ends with its last worker; the next one looks at every job again, at no cost where all its
trials are stored.
"""

from __future__ import annotations

import math
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import sqlalchemy as sa

from fa2tune.sharing.storage import OUTAGE_S, Storage

#: Seconds by the database's clock since a worker's last renewal: then it counts as gone. The first worker to come back after
#: an outage must not remove the others.
EXPIRY_S = OUTAGE_S + 60.0
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
    "held", _META,
    sa.Column("campaign", sa.TEXT, primary_key=True),
    sa.Column("lot", sa.TEXT, key="job", primary_key=True),
    sa.Column("worker", sa.TEXT, nullable=False),
    sa.Column("since", sa.Double, nullable=False),
)  # fmt: skip
SETTLED = sa.Table(
    "settled", _META,
    sa.Column("campaign", sa.TEXT, primary_key=True),
    sa.Column("lot", sa.TEXT, key="job", primary_key=True),
    sa.Column("request", sa.TEXT, primary_key=True),  # that it was settled for; or RETRIED
)  # fmt: skip
WANTED = sa.Table(  # jobs that a worker has been asked for, and that are not settled for it
    "wanted", _META,
    sa.Column("campaign", sa.TEXT, primary_key=True),
    sa.Column("worker", sa.TEXT, primary_key=True),
    sa.Column("lot", sa.TEXT, key="job", primary_key=True),
)  # fmt: skip
RETRIED = "retried"  #: a mark: what had failed before was struck out, once


@dataclass(frozen=True)
class LeaseState:
    """How things are, after a meeting."""

    held: frozenset[str] = frozenset()  #: jobs that this worker holds
    settled: frozenset[str] = frozenset()  #: jobs that need no more work for this request
    excess: int = 0  #: held jobs above this worker's part: it should give back as many of those sought
    sought: frozenset[str] = frozenset()  #: held jobs that others want as well
    lost: bool = False  #: this worker had been removed; what it held before is no longer its own


@dataclass(frozen=True)
class Lease:
    """One line of ``fa2tune leases``."""

    campaign: str
    job: str
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
    """When a process began, in ticks since the host was booted; "" if nothing can be read of it, "dead" of a zombie."""
    with suppress(OSError, IndexError):
        about = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "dead" if about[0] in "ZX" else about[19]
    return ""


def _ended(pid: int, born: str) -> bool:
    """Whether a process of this place is known to be no more. /proc may hide those of other users: that proves nothing."""
    if os.name != "posix":
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # another user's
        pass
    return "" != born != _born(pid) != ""


@dataclass
class Leases:
    """The leases of one worker. ``request``: what it was asked for, so that a settled job is so for others that were asked
    for the same; ``gpus``: its part of the work."""

    storage: Storage
    campaign: str
    request: str
    gpus: int = 1
    worker: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}")
    standing: LeaseState = LeaseState()
    met: float = -math.inf  #: time.monotonic() of the last meeting; -inf: the next one is due
    enrolled: bool = False  #: the others know of this worker

    def __post_init__(self) -> None:
        self.storage.create(WORKERS, LEASES, SETTLED, WANTED)

    def due(self) -> bool:
        return time.monotonic() >= self.met + BEAT_S

    def meet(self, wanted: Sequence[str]) -> LeaseState:
        """Renew this worker's leases, remove expired workers, and take free jobs up to this worker's part: of each job by its
        GPUs, of those of all that want it. ``wanted``: every job of the request, the largest first."""

        def meeting(connection: sa.Connection) -> LeaseState:
            self.storage.alone(connection)
            self._bury(connection)
            present = self._breathe(connection)
            table = connection.execute(sa.select(LEASES).where(LEASES.c.campaign == self.campaign)).all()
            taken = {row.job for row in table}
            held = {row.job for row in table if row.worker == self.worker}
            done = (SETTLED.c.campaign == self.campaign, SETTLED.c.request == self.request)
            settled = {*connection.execute(sa.select(SETTLED.c.job).where(*done)).scalars()}
            open_ = [job for job in wanted if job not in settled]
            rivals = self._want(connection, open_)
            part = max(1, math.ceil(sum(Fraction(self.gpus, rivals[job]) for job in open_)))
            # what no other worker wants comes first, and is not given back
            free = sorted((job for job in open_ if job not in taken), key=rivals.__getitem__)
            new = free[: max(0, part - len(held))]
            for job in new:
                values = {"campaign": self.campaign, "job": job, "worker": self.worker}
                connection.execute(LEASES.insert().values(**values, since=self.storage.now))
            sought = frozenset(job for job in held if rivals[job] > self.gpus)
            excess = max(0, len(held) - part)
            if len(held) > 1 and self._without(connection, sought):
                excess = max(1, excess)  # parts are rounded up: the first worker would keep all
            excess = min(len(sought), excess)
            return LeaseState(
                frozenset(held | {*new}), frozenset(settled), excess, sought, self.enrolled and not present
            )

        self.standing = self.storage.do(meeting)
        self.met, self.enrolled = time.monotonic(), True
        return self.standing

    def _want(self, connection: sa.Connection, jobs: Sequence[str]) -> Counter[str]:
        """Say what this worker wants by now. Job -> the GPUs of all workers that want it."""
        mine = (WANTED.c.campaign == self.campaign, WANTED.c.worker == self.worker)
        before = {*connection.execute(sa.select(WANTED.c.job).where(*mine)).scalars()}
        if gone := before - {*jobs}:
            connection.execute(WANTED.delete().where(*mine, WANTED.c.job.in_(gone)))
        if new := [{"campaign": self.campaign, "worker": self.worker, "job": job} for job in {*jobs} - before]:
            connection.execute(WANTED.insert(), new)
        found = Counter[str]()
        of_all = sa.select(WANTED.c.job, WORKERS.c.gpus).join(WORKERS, WORKERS.c.worker == WANTED.c.worker)
        for job, gpus in connection.execute(of_all.where(WANTED.c.campaign == self.campaign)).all():
            found[job] += gpus
        return found

    def _without(self, connection: sa.Connection, jobs: frozenset[str]) -> bool:
        """Whether a worker that wants one of ``jobs`` has nothing to do."""
        holders = sa.select(LEASES.c.worker).where(LEASES.c.campaign == self.campaign)
        query = sa.select(WANTED.c.worker).where(
            WANTED.c.campaign == self.campaign, WANTED.c.job.in_(jobs), WANTED.c.worker.not_in(holders)
        )
        return connection.execute(query).first() is not None

    def _bury(self, connection: sa.Connection) -> None:
        """Remove workers whose renewal is overdue, and those that were killed on this host. Forget what was settled in
        campaigns without workers. An SQLite file has no clock but its host's, which may jump: there, no worker of this host is
        overdue."""
        place = _place()
        for row in connection.execute(sa.select(WORKERS, (WORKERS.c.until < self.storage.now).label("late"))).all():
            here = row.place == place
            late = row.late and (self.storage.shared or not here or not row.born)
            if row.worker != self.worker and (late or (here and _ended(row.pid, row.born))):
                self._strike(connection, row.worker)
        for table in (LEASES, SETTLED, WANTED):
            connection.execute(table.delete().where(table.c.campaign.not_in(sa.select(WORKERS.c.campaign))))

    @staticmethod
    def _strike(connection: sa.Connection, worker: str) -> None:
        for table in (LEASES, WANTED, WORKERS):
            connection.execute(table.delete().where(table.c.worker == worker))

    def _breathe(self, connection: sa.Connection) -> bool:
        """Renew until ``EXPIRY_S`` from now; False: this worker was removed, or is new."""
        until = self.storage.now + EXPIRY_S
        mine = WORKERS.c.worker == self.worker
        if connection.execute(WORKERS.update().where(mine).values(until=until, gpus=self.gpus)).rowcount:
            return True
        pid = os.getpid()
        about = {"worker": self.worker, "campaign": self.campaign, "place": _place(), "pid": pid, "born": _born(pid)}
        connection.execute(WORKERS.insert().values(**about, gpus=self.gpus, since=self.storage.now, until=until))
        return False

    def _release(self, connection: sa.Connection, job: str) -> bool:
        """Whether it was still ours."""
        self.storage.alone(connection)
        mine = (LEASES.c.campaign == self.campaign, LEASES.c.job == job, LEASES.c.worker == self.worker)
        return connection.execute(LEASES.delete().where(*mine)).rowcount == 1

    def give(self, job: str) -> None:
        """Give back a lease. The next holder finds what is stored by now."""
        self.storage.do(lambda connection: self._release(connection, job))
        self.standing = replace(self.standing, held=self.standing.held - {job})

    def holding(self, connection: sa.Connection) -> frozenset[str]:
        """The jobs that are still ours: a worker that was stopped for a while may have lost them. Until the transaction ends
        they stay ours."""
        self.storage.alone(connection)
        mine = (LEASES.c.campaign == self.campaign, LEASES.c.worker == self.worker)
        return frozenset(connection.execute(sa.select(LEASES.c.job).where(*mine)).scalars())

    def marked(self, job: str, what: str) -> bool:
        """Whether a worker of this campaign has marked a job."""
        query = sa.select(SETTLED).where(*self._mark(job, what))
        return bool(self.storage.select(query))

    def mark(self, job: str, what: str) -> None:
        """Note something about a job that we hold, for its later holders, until the campaign is over."""

        def marked(connection: sa.Connection) -> None:
            self.storage.alone(connection)
            connection.execute(SETTLED.delete().where(*self._mark(job, what)))
            connection.execute(SETTLED.insert().values(campaign=self.campaign, job=job, request=what))

        self.storage.do(marked)

    def _mark(self, job: str, what: str) -> tuple[sa.ColumnElement[bool], ...]:
        return SETTLED.c.campaign == self.campaign, SETTLED.c.job == job, SETTLED.c.request == what

    def settle(self, job: str) -> bool:
        """Everything of a job is done, and stored. False: it had been taken over, so that is for its holder to say."""

        def settled(connection: sa.Connection) -> bool:
            if not self._release(connection, job):
                return False
            mark = {"campaign": self.campaign, "job": job, "request": self.request}
            connection.execute(SETTLED.insert().values(**mark))
            mine = (WANTED.c.campaign == self.campaign, WANTED.c.worker == self.worker, WANTED.c.job == job)
            connection.execute(WANTED.delete().where(*mine))
            return True

        found = self.storage.do(settled)
        self.standing = replace(self.standing, held=self.standing.held - {job})
        if found:
            self.standing = replace(self.standing, settled=self.standing.settled | {job})
        else:
            self.met = -math.inf
        return found

    def leave(self) -> None:
        """Give back everything. What was settled stays so for the other workers."""

        def left(connection: sa.Connection) -> None:
            self.storage.alone(connection)
            self._strike(connection, self.worker)

        self.storage.do(left)
        self.standing, self.met, self.enrolled = LeaseState(), -math.inf, False


def board(storage: Storage) -> list[Lease]:
    """Every lease, and every worker that holds none, by campaign."""
    storage.create(WORKERS, LEASES, SETTLED)
    held = LEASES.c.worker == WORKERS.c.worker
    query = sa.select(WORKERS, LEASES.c.job, (storage.now - sa.func.coalesce(LEASES.c.since, WORKERS.c.since)).label("held"),
                      (WORKERS.c.until - storage.now).label("left")).select_from(
        WORKERS.outerjoin(LEASES, held)).order_by(WORKERS.c.campaign, WORKERS.c.worker, LEASES.c.job)  # fmt: skip
    rows = storage.select(query)
    return [Lease(row.campaign, row.job or "", row.worker, row.gpus, row.held, row.left) for row in rows]
