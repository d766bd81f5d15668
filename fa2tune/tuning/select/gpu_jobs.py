"""Jobs on a GPU that is present, as steps of a procedure: each is tried again where it failed before its first note, and what
was checked once is not checked again.

A procedure (``Steps``) is a generator: it yields a job for a GPU's process, and is sent the job when it ended.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from fa2tune.measuring.worker import Job
from fa2tune.tuning.search.status import launch_status, status_of
from fa2tune.tuning.select.log import Log

Steps = Generator[Job, Job, Any]

DEADLINE = 60.0  #: seconds without a word from the GPU's process, before it counts as hung
STARTS = 3  #: failures before the first candidate, in a row, until the GPU is given up


class GpuLost(RuntimeError):
    """The GPU's process fails before it comes to a candidate: nothing can be said of any candidate."""


def run(function: str, arguments: tuple[Any, ...]) -> Generator[Job, Job, Job]:
    """A job on the GPU; tried again where it failed before its first note, which is no candidate's fault."""
    for _ in range(STARTS):
        job = yield Job(function, arguments, DEADLINE)
        if job.stuck:
            raise GpuLost(f"{function}: {job.failure}; its process cannot be killed and may keep the GPU busy")
        if job.failure is None or job.notes:
            return job
    raise GpuLost(f"{function} failed {STARTS} times before its first launch: {job.failure}")


def check(
    log: Log, function: str, arguments: tuple[Any, ...], key: Any, what: str
) -> Generator[Job, Job, Mapping[str, Any] | str]:
    """The errors that a numerics check finds, or why it failed. ``key``: what is checked; a key is checked once in a run.
    ``what``: the same for people."""
    if key not in log.checked:
        job = yield from run(function, arguments)
        if status_of(job) == "timeout":  # perhaps the GPU was busy
            log.watcher.line(f"{what}: {job.failure}; checking again")
            job = yield from run(function, arguments)
        log.report.checked += 1
        if job.failure:
            log.watcher.line(f"{what}: {job.failure}")
        log.checked[key] = f"{launch_status(job)}: {job.failure}" if job.failure else job.result
    return log.checked[key]
