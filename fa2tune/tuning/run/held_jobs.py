"""The tuning jobs that this worker holds leases on: taking them, opening them, giving them back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from fa2tune.compiling import fingerprint
from fa2tune.rows import pruned, reader
from fa2tune.sharing.leases import RETRIED, Leases
from fa2tune.sharing.study_writer import StudyWriter
from fa2tune.tuning.request.jobs import TuningJob
from fa2tune.tuning.run import open_jobs
from fa2tune.tuning.run.open_jobs import OpenJob
from fa2tune.tuning.search.failures import FailureRecord
from fa2tune.tuning.search.task import SearchTask
from fa2tune.tuning.select import completeness
from fa2tune.tuning.select.log import Log

IDLE_BEAT_S = 1.0  #: between two meetings, of a worker that has nothing to do


class HeldJobs:
    """``jobs``: every job of the request, by name; ``stamp``: of the studies, see ``KeyStudy``."""

    def __init__(
        self, jobs: Mapping[str, TuningJob], log: Log, leases: Leases, writer: StudyWriter, failure_record: FailureRecord,
        stamp: str,
    ) -> None:  # fmt: skip
        self.jobs, self.log, self.leases, self.writer = jobs, log, leases, writer
        self.failure_record, self.stamp = failure_record, stamp
        self.plan = log.plan
        self.open: dict[str, OpenJob] = {}  #: what is worked on here
        self.tasks: list[SearchTask] = []  #: of those jobs, and of those that were settled here
        self.known = [row for layer in reader.layers() for row in layer.rows]
        #: leases to give back as soon as the trials up to a mark are stored
        self.returning: list[tuple[str, tuple[int, ...], Callable[[str], None]]] = []
        self.waits = False

    def open_tasks(self) -> list[SearchTask]:
        """What is searched just now."""
        return [task for opened in self.open.values() for task in opened.tasks]

    def unsettled(self) -> list[str]:
        return [name for name in self.jobs if name not in self.leases.standing.settled]

    def unopened(self) -> list[str]:
        """What is ours to begin."""
        busy = {*self.open, *(name for name, *_ in self.returning)}
        return [name for name in self.unsettled() if name in self.leases.standing.held and name not in busy]

    def meet(self) -> None:
        """Renew the leases; take jobs that are free, give back what is above our part, drop what was lost."""
        standing = self.leases.meet([*self.jobs])
        if standing.lost:
            self.log.watcher.line("other workers took over the jobs of this one, which was silent for too long")
            self.drop([*self.open])
            self.writer.flush()  # what is opened again should find every trial of its own
        self.drop([name for name in self.open if name not in standing.held])
        if not standing.excess:
            return
        idle = {name: sum(len(f.tried()) for f in o.tasks) for name, o in self.open.items() if o.idle}
        excess = max(0, standing.excess - len(self.returning))
        back = [*reversed(self.unopened()), *sorted(idle, key=idle.__getitem__)]
        back = [name for name in back if name in standing.sought][:excess]
        self.drop([name for name in back if name in self.open])
        self.returning += [(name, self.writer.mark(), self.leases.give) for name in back]

    def begin(self, name: str) -> None:
        """Open a job that is held and not open: its search tasks, with every trial there is of them."""
        self.waits = False
        known = [*self.known, *self.log.store.rows()]
        # once: what has crashed since, here or where this job was before, is not tried again
        retry = self.plan.request.retry_failed and not self.leases.marked(name, RETRIED)
        opened = open_jobs.opened(
            self.jobs[name],
            self.plan,
            self.writer,
            self.stamp,
            self.failure_record,
            known,
            self.log.watcher.line,
            retry,
        )
        if retry:
            self.leases.mark(name, RETRIED)
        self.open[name] = opened
        self.tasks = [task for task in self.tasks if not opened.job.covers(task.keys[0])] + opened.tasks
        open_jobs.connect_neighbours(self.tasks)
        for key, why in opened.refused.items():
            self.log.fail([key], why)
        self.log.watcher.opened(opened.job, opened.tasks)
        self._tell_left_out(opened)

    def _tell_left_out(self, opened: OpenJob) -> None:
        left_out = Counter[str]()
        for task in opened.tasks:
            for name, count in task.space.left_out(task.tried()).items():
                left_out[name.removesuffix(pruned.BEFORE)] += count
        if left_out:
            self.log.watcher.line(
                f"{opened.job.name}: candidates left out, as they failed in an earlier run (--retry-failed tries them again): "
                f"{pruned.counted(left_out)}"
            )

    def drop(self, names: Iterable[str]) -> None:
        """Work no more on these: they are others', or will be."""
        for name in names:
            opened = self.open.pop(name)
            opened.dropped = True
            for task in opened.tasks:
                task.dropped = True
        self.tasks = [task for task in self.tasks if not task.dropped]
        open_jobs.connect_neighbours(self.tasks)

    def settle(self) -> None:
        """Give leases back: of what is done, for good. The next worker of a job finds every trial of it."""
        for name in [name for name, opened in self.open.items() if opened.settled]:
            self.log.file(at_once=True)
            del self.open[name]
            self.returning.append((name, self.writer.mark(), self._end))
        for entry in [entry for entry in self.returning if self.writer.stored(entry[1])]:
            self.returning.remove(entry)
            entry[2](entry[0])

    def _end(self, name: str) -> None:
        """A job is done, and stored. If it was lost meanwhile, what is shown of it are its new holder's rows."""
        if not self.leases.settle(name):
            self.tasks = [task for task in self.tasks if not self.jobs[name].covers(task.keys[0])]

    def wait_for_others(self) -> bool:
        """Whether there are jobs that other workers hold; if they die, or have too many, they are ours."""
        held = self.leases.standing.held
        theirs = [name for name in self.unsettled() if name not in held]
        if theirs and not self.waits:
            self.waits = True
            self.log.watcher.line(f"waiting for other workers, which hold the last jobs: {', '.join(theirs)}")
        if theirs and time.monotonic() >= self.leases.met + IDLE_BEAT_S:
            self.meet()
        return bool(theirs)

    def take_from_others(self) -> None:
        """Into the report, the rows of what others settled."""
        mine = {name for name, job in self.jobs.items() for task in self.tasks if job.covers(task.keys[0])}
        theirs = [self.jobs[name] for name in self.leases.standing.settled & self.jobs.keys() - mine]
        if not theirs:
            return
        request, gpu, made = self.plan.request, self.plan.target.gpu, self.log.provenance.stamp()
        self.log.report.take(
            row for row in self.log.store.rows()
            if any(job.covers(row.key) for job in theirs)
            and (row.key.gpu, row.key.sm_count) == (gpu.name, gpu.sm_count)
            and row.key.bucket in request.buckets and row.key.dtype in request.dtypes
            and all(getattr(row, name) == made[name] for name in ("obtained", "obtained_on", "triton", "driver"))
            and row.kernel_hash == fingerprint.kernel_hashes().get(row.source)
        )  # fmt: skip
        settled = (key for key in completeness.requested(self.plan) if any(job.covers(key) for job in theirs))
        self.log.fail(settled, "another worker ended its search without a row")
