"""The studies' way to the storage: read at once, written by processes of their own, for which neither the GPUs nor the search
should wait.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy as sa

from fa2tune.measuring import worker
from fa2tune.measuring.worker import Crew, Job
from fa2tune.sharing import storage as storages
from fa2tune.sharing import trials
from fa2tune.sharing.storage import Storage, StorageError

BATCH = 128  #: writes a job
DEADLINE_S = 600.0  #: of a write: a database may be away for a while
TRIES = 3  #: of a job whose process dies

T = TypeVar("T")
Write = tuple[str, str, Any]  #: study, attribute, its value; a trial has no attribute


@cache
def _optuna(url: sa.URL | None, file: Path | None) -> tuple[Storage, optuna.storages.BaseStorage]:
    storage = Storage(url, file, reached=True)
    return storage, storage.optuna()


@cache
def _study(held: optuna.storages.BaseStorage, name: str) -> int:
    return held.get_study_id_from_name(name)


def write(url: sa.URL | None, file: Path | None, writes: Sequence[Write]) -> None:
    """In a process, with a note of how many are done. Some are done twice where the connection is lost on its way back: a study
    may have a trial twice."""
    storage, held = _optuna(url, file)
    done = 0
    for attribute, found in groupby(writes, key=lambda write: write[1]):  # trials that follow each other go together
        group = [(storage.on_studies(partial(_study, held, study)), value) for study, _, value in found]
        if attribute:
            for number, value in group:
                storage.on_studies(partial(held.set_study_user_attr, number, attribute, value), writes=True)
        else:
            storage.on_studies(partial(trials.store, held, group), writes=True)
        done += len(group)
        worker.report(done)


def _done(job: Job | None) -> int:
    """How many writes of a job are done."""
    return int(job.notes[-1]) if job is not None and job.notes else 0


@dataclass(eq=False)
class WriterProcess:
    """Writes for some of the studies, in order."""

    crew: Crew = field(default_factory=lambda: Crew(1))
    waiting: deque[Write] = field(default_factory=deque)
    job: Job | None = None  #: under way
    failures: int = 0  #: in a row
    taken: int = 0  #: writes, ever
    stored: int = 0  #: of them, by jobs that ended

    @property
    def left(self) -> int:
        """Writes that are not stored."""
        return self.taken - self.stored - _done(self.job)


class StudyWriter:
    """The studies in a storage. One in memory is forgotten at the end."""

    def __init__(self, storage: Storage, processes: int = 1) -> None:
        self.storage = storage
        self.optuna = storage.optuna()
        self.processes = [WriterProcess() for _ in range(processes)]

    @property
    def crews(self) -> list[Crew]:
        """For ``worker.wait``, beside others; each of their jobs has a ``tag`` to call when it ended."""
        return [process.crew for process in self.processes]

    def study(self, name: str) -> optuna.Study:
        """The stored study of that name, made if need be."""
        return self.storage.on_studies(
            lambda: optuna.create_study(
                storage=self.optuna, study_name=name, load_if_exists=True, direction="minimize"
            ),
            writes=True,
        )

    def now(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """What Optuna answers."""
        return self.storage.on_studies(lambda: function(*arguments, **named))

    def add(self, study: str, trial: optuna.trial.FrozenTrial) -> None:
        """Store a finished trial, soon."""
        self._write(study, "", trial)

    def keep(self, study: str, attribute: str, value: Any) -> None:
        """Store something about a study, soon, and after what was added to it before."""
        self._write(study, attribute, value)

    def _write(self, study: str, attribute: str, value: Any) -> None:
        if self.storage.url is None:
            number = self.optuna.get_study_id_from_name(study)
            if attribute:
                self.optuna.set_study_user_attr(number, attribute, value)
            else:
                self.optuna.create_new_trial(number, value)
            return
        process = self.processes[zlib.crc32(study.encode()) % len(self.processes)]
        process.waiting.append((study, attribute, value))
        process.taken += 1
        self._send(process)

    def _send(self, process: WriterProcess) -> None:
        if process.crew.load:
            return
        if process.job is not None:  # it has ended, and its result has not been looked at yet
            process.job.tag(process.job)
        if process.crew.load or not process.waiting:
            return
        batch = [process.waiting.popleft() for _ in range(min(BATCH, len(process.waiting)))]
        arguments = (self.storage.url, self.storage.file, batch)
        process.job = Job(
            "fa2tune.sharing.study_writer:write", arguments, DEADLINE_S, tag=partial(self._wrote, process, batch)
        )
        process.crew.submit(process.job)

    def _wrote(self, process: WriterProcess, batch: Sequence[Write], job: Job) -> None:
        if process.job is not job:
            return
        process.job, done = None, _done(job)
        process.stored += done
        process.failures = 0 if job.failure is None else process.failures + 1
        if job.failure is not None and (not job.died or process.failures >= TRIES):
            process.waiting.clear()  # the run ends here, and need not try once more
            where = f"storage: {self.storage.studies}: "
            why = job.failure.removeprefix(f"{StorageError.__name__}: ").removeprefix(where)
            raise StorageError(f"{where}studies cannot be written: {why}")
        process.waiting.extendleft(reversed(batch[done:]))
        self._send(process)

    def mark(self) -> tuple[int, ...]:
        """Stands for everything that was written up to now, see ``stored``."""
        return tuple(process.taken for process in self.processes)

    def stored(self, mark: tuple[int, ...]) -> bool:
        """Whether all of it is in the storage."""
        return all(process.stored >= taken for process, taken in zip(self.processes, mark, strict=True))

    @property
    def left(self) -> int:
        """Trials and study attributes that are not stored."""
        return sum(process.left for process in self.processes)

    def flush(self) -> None:
        """Wait until everything is stored; in a hurry, as long as anything is. StorageError, after the other processes have
        stored what they can."""
        failed: StorageError | None = None

        def go_on(step: Callable[[T], None], with_: T) -> None:
            nonlocal failed
            try:
                step(with_)
            except StorageError as error:
                failed = failed or error

        left, since = self.left, time.monotonic()
        while any(process.waiting or process.job for process in self.processes):
            for process in self.processes:
                go_on(self._send, process)
            for job in worker.wait(self.crews, 1.0):
                go_on(job.tag, job)
            if self.left < left:
                left, since = self.left, time.monotonic()
            elif self.storage.shared and self.storage.hurry and time.monotonic() > since + storages.HURRY_S:
                failed = StorageError(f"storage: {self.storage.studies}: no answer; {left} writes are given up")
                for process in self.processes:
                    process.crew.close()
                    process.waiting.clear()
                    process.stored, process.job = process.taken - process.left, None
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Store what is left, and end."""
        try:
            self.flush()
        finally:
            for crew in self.crews:
                crew.close()
