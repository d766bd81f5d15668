"""Child processes that may crash, hang or fail: each costs one job and is replaced by a fresh one.

A job names a function (``"module:name"``) and its arguments; a ``Crew`` runs jobs on up to ``size`` children, each with a
deadline. The child is started with ``subprocess``, not ``multiprocessing``: nothing of the caller's ``__main__`` runs again.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import IO, Any

_START = "import sys; sys.path[:] = {path!r}; from fa2tune.worker import serve; serve({fd})"

#: The pipe to the parent, in a child.
_parent: connection.Connection | None = None


@dataclass(eq=False)
class Job:
    """What to run, and afterwards what came of it: ``result``, or ``failure`` with the reason on one line."""

    function: str  #: "module:name"
    arguments: tuple[Any, ...]
    seconds: float  #: deadline; starts anew with every note
    tag: Any = None  #: the caller's own
    notes: list[Any] = field(default_factory=list)  #: what the function reported on its way, see ``report``
    result: Any = None
    failure: str | None = None
    died: bool = False  #: it took its process with it


def report(note: Any) -> None:
    """Called in a child, by the function of a job: still alive, and this far. Outside a child: nothing."""
    if _parent is not None:
        _parent.send(("note", note))


def reason_of(error: BaseException) -> str:
    """Type and first line of a message."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300]


def _cuda_is_broken() -> bool:
    """Whether an error has left this process without a usable CUDA context (an illegal address, a device assert)."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def serve(fd: int) -> None:
    """The child's life: jobs in, answers out, until the pipe closes."""
    global _parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    _parent = connection.Connection(fd)
    while True:
        try:
            function, arguments = _parent.recv()
        except EOFError:
            return
        module, _, name = function.partition(":")
        try:
            answer = ("result", getattr(importlib.import_module(module), name)(*arguments))
        except Exception as error:
            answer = ("broken" if _cuda_is_broken() else "failed", reason_of(error))
        try:
            _parent.send(answer)
        except BrokenPipeError:
            return
        if answer[0] == "broken":
            os._exit(1)


class _Child:
    """One process, one job at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = connection.Pipe()
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the child
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=sys.path, fd=fd)], pass_fds=[fd], stdin=subprocess.DEVNULL,
                stdout=self.log, stderr=self.log, env={**os.environ, **environment},
            )  # fmt: skip
        self.pipe = ours
        self.job: Job | None = None
        self.deadline = 0.0

    def give(self, job: Job) -> None:
        self.job = job
        self.deadline = time.monotonic() + job.seconds
        with suppress(OSError):  # a dead child's pipe reads as end of file next, and that says why
            self.pipe.send((job.function, job.arguments))

    def listen(self) -> Job | None:
        """Take one message; the job, if that was its last."""
        job = self.job
        try:
            kind, content = self.pipe.recv()
        except (EOFError, OSError):
            return self.bury(None)
        if job is None:
            return None
        if kind == "note":
            job.notes.append(content)
            self.deadline = time.monotonic() + job.seconds
            return None
        if kind == "result":
            job.result = content
        elif kind == "failed":
            job.failure = content
        else:
            return self.bury(content)
        self.job = None
        return job

    def bury(self, reason: str | None) -> Job | None:
        """Kill (if need be) and give back its job, failed for ``reason`` or for what the process left behind."""
        job, self.job = self.job, None
        self.process.kill()
        code = self.process.wait()
        if job is not None:
            job.died = True
            job.failure = reason or f"process died ({_cause(code)}): {self._last_line()}"[:300]
        self.pipe.close()
        self.log.close()
        return job

    def _last_line(self) -> str:
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read()[-4000:].decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "it said nothing")


def _cause(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit {code}"
    except ValueError:
        return f"signal {-code}"


class Crew:
    """Up to ``size`` children that work through a queue of jobs, in order. ``environment``: added to the children's."""

    def __init__(self, size: int, environment: Mapping[str, str] | None = None) -> None:
        self.size = size
        self.environment = dict(environment or {})
        self.queue: deque[Job] = deque()
        self.children: list[_Child] = []
        self.started = 0  #: children ever, to see how many were lost

    def submit(self, job: Job) -> None:
        self.queue.append(job)
        self._hand_out()

    @property
    def load(self) -> int:
        """Jobs queued or running."""
        return len(self.queue) + sum(child.job is not None for child in self.children)

    def _hand_out(self) -> None:
        for child in self.children:
            if child.job is None and self.queue:
                child.give(self.queue.popleft())
        while self.queue and len(self.children) < self.size:
            self.started += 1
            self.children.append(_Child(self.environment))
            self.children[-1].give(self.queue.popleft())

    def pipes(self) -> dict[connection.Connection, _Child]:
        return {child.pipe: child for child in self.children}

    def next_deadline(self) -> float:
        return min((child.deadline for child in self.children if child.job), default=float("inf"))

    def collect(self, ready: Iterable[Any]) -> list[Job]:
        """Jobs that ended: their pipe is among ``ready``, or their time is up."""
        ended = []
        for pipe, child in self.pipes().items():
            job = None
            if pipe in ready:
                job = child.listen()
            elif child.job is not None and time.monotonic() > child.deadline:
                job = child.bury(f"no answer within {child.job.seconds:.0f} s")
            if job is not None:
                ended.append(job)
        self.children = [child for child in self.children if not child.pipe.closed]
        self._hand_out()
        return ended

    def close(self) -> None:
        """Kill every child; queued and running jobs are forgotten."""
        self.queue.clear()
        for child in self.children:
            child.bury(None)
        self.children = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def wait(crews: Iterable[Crew], seconds: float) -> list[Job]:
    """Sleep until a job of one of the crews ends, at most ``seconds``. The jobs that ended."""
    crews = list(crews)
    until = time.monotonic() + seconds
    while True:
        pipes = [pipe for crew in crews for pipe in crew.pipes()]
        deadline = min([until, *(crew.next_deadline() for crew in crews)])
        ready = connection.wait(pipes, max(0.0, deadline - time.monotonic()))
        ended = [job for crew in crews for job in crew.collect(ready)]
        if ended or time.monotonic() >= until:
            return ended
