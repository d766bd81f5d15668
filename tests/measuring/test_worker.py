"""A crew outlives whatever its jobs do: answer, raise, crash, abort, hang, talk."""

import os
import signal
import time

import pytest

from fa2tune.measuring import worker
from fa2tune.measuring.worker import Crew, Job, wait

HERE = "test_worker"


def add(a, b):
    return a + b


def fail():
    raise ValueError("the reason\nand more")


def crash(word):
    print(word, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hang():
    time.sleep(3600)


def notes(n):
    for i in range(n):
        worker.report(i)
        time.sleep(0.05)
    return n


def environment(name):
    return os.environ.get(name), os.getpid()


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


def finish(crew, count, seconds=60.0):
    ended = []
    until = time.monotonic() + seconds
    while len(ended) < count and time.monotonic() < until:
        ended += wait([crew], 1.0)
    return ended


def test_results_and_failures_come_back_and_the_process_lives_on():
    with Crew(1) as crew:
        crew.submit(Job(f"{HERE}:add", (2, 3), 20, tag="sum"))
        crew.submit(Job(f"{HERE}:fail", (), 20, tag="fail"))
        crew.submit(Job(f"{HERE}:add", ("a", "b"), 20, tag="text"))
        by_tag = {job.tag: job for job in finish(crew, 3)}
        assert by_tag["sum"].result == 5 and by_tag["text"].result == "ab"
        assert by_tag["fail"].failure == "ValueError: the reason" and not by_tag["fail"].died
        assert crew.started == 1 and crew.load == 0


def test_a_crash_costs_one_job_and_says_why():
    with Crew(1) as crew:
        crew.submit(Job(f"{HERE}:crash", ("LLVM ERROR: out of ideas",), 20))
        crew.submit(Job(f"{HERE}:add", (1, 1), 20))
        crashed, fine = finish(crew, 2)
        assert crashed.died and "SIGSEGV" in crashed.failure and "out of ideas" in crashed.failure
        assert fine.result == 2 and crew.started == 2


def test_a_hang_is_killed_at_its_deadline():
    with Crew(1) as crew:
        crew.submit(Job(f"{HERE}:hang", (), 1.5))
        crew.submit(Job(f"{HERE}:add", (1, 1), 20))
        begun = time.monotonic()
        hung, fine = finish(crew, 2)
        assert hung.died and "1.5" not in hung.failure and "no answer within 2 s" in hung.failure
        assert fine.result == 2 and time.monotonic() - begun < 60


def test_notes_prolong_the_deadline_and_are_kept():
    with Crew(1) as crew:
        crew.submit(Job(f"{HERE}:notes", (8,), 20))
        (job,) = finish(crew, 1)
        assert job.result == 8 and job.notes == list(range(8))


def test_environment_reaches_the_children_and_two_work_at_once():
    with Crew(2, {"FA2TUNE_TEST": "x"}) as crew:
        for _ in range(2):
            crew.submit(Job(f"{HERE}:environment", ("FA2TUNE_TEST",), 20))
        results = [job.result for job in finish(crew, 2)]
        assert {value for value, _ in results} == {"x"} and len({pid for _, pid in results}) == 2


def test_close_leaves_no_process():
    crew = Crew(1)
    crew.submit(Job(f"{HERE}:hang", (), 60))
    (child,) = crew.children
    crew.close()
    assert child.process.poll() is not None and crew.load == 0


def test_wait_returns_when_nothing_ends():
    with Crew(1) as crew:
        crew.submit(Job(f"{HERE}:hang", (), 60))
        begun = time.monotonic()
        assert wait([crew], 0.3) == []
        assert 0.2 < time.monotonic() - begun < 30
