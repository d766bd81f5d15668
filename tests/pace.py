"""How long a command takes, as on an idle core of today: CI's cores are slower, and busy with the rest of the suite."""

from __future__ import annotations

import resource
import subprocess
import time
from typing import Any

#: CPU seconds of ``_unit`` on such a core (3 GHz, CPython 3.11).
UNIT_S = 0.05


def _unit() -> float:
    started = time.process_time()
    sum(n * n for n in range(1_000_000))
    return time.process_time() - started


def slowness() -> float:
    """How many times as long something takes here, now, as on such a core; no less than one."""
    return max(1.0, _unit() / UNIT_S)


def timed(command: list[str], **options: Any) -> tuple[subprocess.CompletedProcess[str], float]:
    """Runs a command that is expected to succeed: what it printed, and its CPU seconds over how slow this machine is now."""
    before = _unit()
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    seconds = after.ru_utime + after.ru_stime - spent.ru_utime - spent.ru_stime
    return done, seconds / max(1.0, (before + _unit()) / 2 / UNIT_S)
