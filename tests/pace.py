"""How long something takes, as on an idle core: CI's cores are slower, and busy with the rest of the suite."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import Any

#: CPU seconds of ``_unit`` on an idle core (3 GHz, CPython 3.11).
UNIT_S = 0.05
#: A program of the kind that ``timed`` times: it starts, imports modules, and sorts, encodes and decodes records. What slows
#: one down, as a cache that others fill, slows the other down too.
REFERENCE = """
import asyncio, email.message, json, logging, sqlite3, tempfile
records = [{"number": number, "name": f"row {number}", "values": [number, None, 1.5]} for number in range(4000)]
for _ in range(5):
    records = json.loads(json.dumps(sorted(records, key=lambda record: record["name"])))
"""
#: CPU seconds of it on such a core.
REFERENCE_S = 0.14


def _unit() -> float:
    started = time.process_time()
    sum(n * n for n in range(1_000_000))
    return time.process_time() - started


def slowness() -> float:
    """How many times as long something takes here, now, as on an idle core; no less than one."""
    return max(1.0, _unit() / UNIT_S)


def _run(command: list[str], **options: Any) -> tuple[subprocess.CompletedProcess[str], float]:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return done, after.ru_utime + after.ru_stime - spent.ru_utime - spent.ru_stime


def timed(command: list[str], **options: Any) -> tuple[subprocess.CompletedProcess[str], float]:
    """Runs a command that is expected to succeed: what it printed, and its CPU seconds over how slow this machine is now, by
    REFERENCE before and after it."""
    reference = [sys.executable, "-c", REFERENCE]
    _, before = _run(reference)
    done, seconds = _run(command, **options)
    _, after = _run(reference)
    return done, seconds / max(1.0, (before + after) / 2 / REFERENCE_S)
