"""Child processes that tests start and watch."""

import subprocess
import time
from functools import cache

from fa2tune.measuring import worker
from fa2tune.measuring.worker import Crew, Job, wait

ROOM = 200 << 20  #: bytes that a child may take beyond what it needs to be there


def outcome(crew, function, *arguments, seconds=20.0):
    """The ended job of one function of isolation_fakes."""
    crew.submit(Job(f"isolation_fakes:{function}", arguments, seconds))
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if ended := wait([crew], 1.0):
            return ended[0]
    raise AssertionError(f"{function} never ended")


def resident():
    """Bytes that a child holds which has imported isolation_fakes and done nothing yet: it depends on the libraries, and on
    how it is started."""
    return resident_of(subprocess.Popen)


@cache
def resident_of(_start):
    with Crew(1) as crew:
        return worker._held_bytes(outcome(crew, "pid").result)


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()
