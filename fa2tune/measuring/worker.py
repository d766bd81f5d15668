"""Child processes that may crash, hang, eat memory or fail: each costs one job and is replaced by a fresh one.

A job names a function (``"module:name"``) and its arguments; a ``Crew`` runs jobs on up to ``size`` children, each with a
deadline. The child is started with ``subprocess``, not ``multiprocessing``: nothing of the caller's ``__main__`` runs again.

A child leads a process group of its own, so that what it started (ptxas) dies with it, and Ctrl-C reaches the parent alone.
A guardian, one small process a crew, kills the groups when the parent is gone, however it went; on Linux the kernel kills the
children themselves.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
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

_START = "import sys; sys.path[:] = {path!r}; from fa2tune.measuring.worker import serve; serve({fd}, {preload!r})"

#: Reads "+group" and "-group" until its pipe closes, which is when the parent closed it, or died.
_GUARD = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""

START_SECONDS = 180.0  #: for Python and the imports of a job's module, on a slow disk; its own deadline starts then
END_SECONDS = 5.0  #: for a process that has closed its pipe, until it is killed
GRACE_SECONDS = 30.0  #: a killed process takes a moment: the driver has to take its kernel off the GPU first
MEMORY_EVERY = 0.25  #: seconds between looks at a child's memory
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process gets when its parent dies

#: The line among a dead child's last that says most; LLVM, for one, goes on with a stack dump.
_TELLING = re.compile(r"assert|error|fatal|abort|terminate called|bad_alloc", re.IGNORECASE)

#: The pipe to the parent, in a child.
_parent: connection.Connection | None = None


@dataclass(eq=False)
class Job:
    """What to run, and afterwards what came of it: ``result``, or ``failure`` with the reason on one line."""

    function: str  #: "module:name"
    arguments: tuple[Any, ...]
    seconds: float  #: deadline; starts when its module is imported, and anew with every note
    tag: Any = None  #: the caller's own
    began: bool = False  #: its process and module were there, and the function was called
    notes: list[Any] = field(default_factory=list)  #: what the function reported on its way, see ``report``
    result: Any = None
    failure: str | None = None
    died: bool = False  #: it took its process with it
    stuck: bool = False  #: not even SIGKILL ended that process: what it held, it holds
    took: float = 0.0  #: seconds from its start to its end


def report(note: Any, seconds: float | None = None) -> None:
    """Called in a child, by the function of a job: still alive, and this far. ``seconds``: the next word comes within so
    many; None: within the job's own. Outside a child: nothing."""
    if _parent is not None:
        _parent.send(("note", (note, seconds)))


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


def serve(fd: int, preload: str) -> None:
    """The child's life: jobs in, answers out, until the pipe closes."""
    global _parent
    if sys.platform == "linux":  # at once: what it might still write would come behind what others read by then
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _parent = connection.Connection(fd)
    if preload:
        with suppress(Exception):  # a job will meet it again, and say so
            importlib.import_module(preload)
    while True:
        try:
            function, arguments = _parent.recv()
        except (EOFError, OSError):
            return
        module, _, name = function.partition(":")
        try:
            run = getattr(importlib.import_module(module), name)
            _parent.send(("started", None))
            answer = ("result", run(*arguments))
        except Exception as error:
            answer = ("broken" if _cuda_is_broken() else "failed", reason_of(error))
        try:
            _parent.send(answer)
        except OSError:
            return
        if answer[0] == "broken":
            os._exit(1)


def _held_bytes(pid: int) -> int:
    """Resident memory of a process and of what it started (its compiler's assembler, say)."""
    total, waiting = 0, [pid]
    while waiting:
        folder = f"/proc/{waiting.pop()}"
        with suppress(OSError, ValueError):  # it ended meanwhile
            total += int(_text(f"{folder}/statm").split()[1]) * _PAGE
            for task in os.listdir(f"{folder}/task"):
                waiting += map(int, _text(f"{folder}/task/{task}/children").split())
    return total


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


class _Child:
    """One process, one job at a time."""

    def __init__(self, environment: Mapping[str, str], preload: str) -> None:
        ours, theirs = connection.Pipe()
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the child
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=sys.path, fd=fd, preload=preload)], pass_fds=[fd],
                stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env={**os.environ, **environment},
                process_group=0,
            )  # fmt: skip
        self.pipe = ours
        self.job: Job | None = None
        self.given = self.begun = self.deadline = self.allowed = self.looked = 0.0

    def give(self, job: Job) -> None:
        self.job = job
        self.log.seek(0)  # the child's place in the file, too: what earlier jobs said is no part of this one's end
        self.log.truncate()
        self._extend(START_SECONDS)
        self.given = self.begun = time.monotonic()
        with suppress(OSError):  # a dead child's pipe reads as end of file next, and that says why
            self.pipe.send((job.function, job.arguments))

    def _extend(self, seconds: float) -> None:
        self.allowed, self.deadline = seconds, time.monotonic() + seconds

    def listen(self) -> Job | None:
        """Take one message; the job, if that was its last."""
        job = self.job
        try:
            kind, content = self.pipe.recv()
        except (EOFError, OSError):
            return self.bury(None)
        if job is None:
            return None
        if kind == "started":
            job.began = True
            self.begun = time.monotonic()
            self._extend(job.seconds)
            return None
        if kind == "note":
            note, seconds = content
            job.notes.append(note)
            self._extend(job.seconds if seconds is None else seconds)
            return None
        if kind == "result":
            job.result = content
        elif kind == "failed":
            job.failure = content
        else:
            return self.bury(content)
        job.took = time.monotonic() - self.begun
        self.job = None
        return job

    def overdrawn(self, memory: int | None) -> str | None:
        """Why its job must end here, or None."""
        now = time.monotonic()
        if now > self.deadline:
            return f"no answer within {self.allowed:.0f} s"
        if memory is None or now < self.looked + MEMORY_EVERY / 2:
            return None
        self.looked = now
        if (held := _held_bytes(self.process.pid)) > memory:
            return f"out of memory: it held {held / 2**30:.1f} GiB, {memory / 2**30:.1f} are allowed"
        return None

    def bury(self, reason: str | None) -> Job | None:
        """Kill (if need be), wait until it is gone, and give back its job, failed for ``reason`` or for what the process left
        behind."""
        job, self.job = self.job, None
        if reason is None:  # its pipe is closed, and it is about to end in its own way
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        code = self.process.returncode
        if job is not None:
            said = self._telling_line()
            why = reason or f"process died ({_cause(code)}): {said or 'no output'}"
            job.failure = (f"{why}; {said}" if reason and said else why)[:300]
            job.died, job.stuck = True, code is None
            job.took = time.monotonic() - self.begun
        self.pipe.close()
        self.log.close()
        return job

    def _telling_line(self) -> str:
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - 4000))
        lines = [line.strip() for line in self.log.read().decode(errors="replace").splitlines() if line.strip()]
        return next((line for line in lines if _TELLING.search(line)), lines[-1] if lines else "")


def _cause(code: int | None) -> str:
    if code is None:
        return "and cannot be killed"
    try:
        return signal.Signals(-code).name if code < 0 else f"exit {code}"
    except ValueError:
        return f"signal {-code}"


class Crew:
    """Up to ``size`` children that work through a queue of jobs, in order.

    environment: added to the children's.
    memory: bytes that a child and what it started may hold; more costs its job.
    spare: a module; one more child, which has imported it, stands by for the next that dies."""

    def __init__(
        self, size: int, environment: Mapping[str, str] | None = None, memory: int | None = None, spare: str = ""
    ) -> None:
        self.size = size
        self.environment = dict(environment or {})
        self.memory = memory
        self.spare = spare
        self.queue: deque[Job] = deque()
        self.children: list[_Child] = []
        self.started = 0  #: children ever, to see how many were lost
        self.worked = 0.0  #: seconds, of all jobs that ended
        self._guardian: subprocess.Popen[str] | None = None

    def submit(self, job: Job) -> None:
        self.queue.append(job)
        self._hand_out()

    @property
    def load(self) -> int:
        """Jobs queued or running."""
        return len(self.queue) + sum(child.job is not None for child in self.children)

    def _hand_out(self) -> None:
        while self.queue and sum(child.job is not None for child in self.children) < self.size:
            idle = next((child for child in self.children if child.job is None), None)
            (idle or self._start()).give(self.queue.popleft())
        if self.spare and self.children and len(self.children) <= self.size:
            self._start()

    def prepare(self) -> None:
        """Start the first child, which imports ``spare``, before there is a job for it."""
        if self.spare and not self.started:
            self._start()

    def _start(self) -> _Child:
        self.started += 1
        child = _Child(self.environment, self.spare)
        self.children.append(child)
        self._guard("+", child)
        return child

    def _guard(self, sign: str, child: _Child) -> None:
        if self._guardian is None:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD], stdin=subprocess.PIPE, text=True, process_group=0
            )
        assert self._guardian.stdin is not None
        with suppress(OSError):  # it was killed: then only the pipes tell children that this process has ended
            self._guardian.stdin.write(f"{sign}{child.process.pid}\n")
            self._guardian.stdin.flush()

    def pipes(self) -> dict[connection.Connection, _Child]:
        return {child.pipe: child for child in self.children}

    def next_look(self) -> float:
        """When a child may have to be stopped."""
        soon = time.monotonic() + MEMORY_EVERY if self.memory is not None else float("inf")
        return min((min(child.deadline, soon) for child in self.children if child.job), default=float("inf"))

    def collect(self, ready: Iterable[Any]) -> list[Job]:
        """Jobs that ended: their pipe is among ``ready``, or their time is up."""
        ended = []
        for pipe, child in self.pipes().items():
            idle, job = child.job is None, None
            if pipe in ready:
                job = child.listen()
                if idle and pipe.closed:
                    self.spare = ""  # it died by itself: so would the next
            elif pipe.poll():
                pass  # its message is read next time
            elif child.job is not None and (reason := child.overdrawn(self.memory)) is not None:
                job = child.bury(reason)
            if job is not None:
                self.worked += time.monotonic() - child.given
                ended.append(job)
        self._dismiss([child for child in self.children if child.pipe.closed])
        self._hand_out()
        return ended

    def _dismiss(self, dead: list[_Child]) -> None:
        for child in dead:
            self.children.remove(child)
            self._guard("-", child)

    def close(self) -> None:
        """Kill every child; queued and running jobs are forgotten."""
        self.queue.clear()
        for child in self.children:
            child.bury("closed")
        self._dismiss(list(self.children))
        if self._guardian is not None:
            with suppress(OSError):
                self._guardian.communicate()
            self._guardian = None

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
        deadline = min([until, *(crew.next_look() for crew in crews)])
        ready = connection.wait(pipes, max(0.0, deadline - time.monotonic()))
        ended = [job for crew in crews for job in crew.collect(ready)]
        if ended or time.monotonic() >= until:
            return ended
