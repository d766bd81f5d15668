"""Short words for what became of a job that failed, to be counted."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fa2tune.measuring import worker
from fa2tune.measuring.samples import CRAWLING

#: What a failure says -> the short word for it. Of a process that lived on, only the first two are the candidate's.
_WORDS = (
    ("out_of_memory", r"out of memory|OutOfMemory|MemoryError|bad_alloc"),
    ("wrong_result", r"WrongResult"),
    ("failed", r"uncorrectable ECC|fallen off the bus|device is lost|no CUDA-capable"),  # the GPU's own fault
    ("killed", r"process died \((SIGKILL|SIGTERM|SIGHUP|SIGINT|SIGQUIT)\)"),  # from outside
    ("timeout", r"^no answer within|launch timed out"),
    ("device_assert", r"device-side assert"),
    ("illegal_access", r"illegal memory access|misaligned address|illegal address|illegal instruction|invalid program"),
)


def status_of(job: worker.Job) -> str:
    """The short word for a job that failed. "failed": not the candidate's doing, as far as anyone knows."""
    if not job.began or (job.failure or "").startswith("MemoryError"):  # Python's own: this host has no more to give
        return "failed"
    return word_for(job.failure or "", _WORDS if job.died else _WORDS[:2], "crash" if job.died else "failed")


def word_for(reason: str, words: Sequence[tuple[str, str]] = _WORDS[:1], otherwise: str = "launch_error") -> str:
    """The short word for a reason; by default, for that of a launch which failed and left its process alive."""
    return next((word for word, says in words if re.search(says, reason)), otherwise)


def launch_status(job: worker.Job) -> str:
    """The short word for a launch that failed. Kernels allocate nothing, so other processes hold the missing memory."""
    status = status_of(job)
    return "failed" if status == "out_of_memory" and not job.died else status


def refusal_status(why: str) -> str:
    """The same for a contender that a race left out."""
    word = CRAWLING if why.startswith(CRAWLING) else word_for(why)
    return "failed" if word == "out_of_memory" else word
