"""Child processes that crash, hang, eat memory or cannot be killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child_processes import ROOM, outcome, resident, until

from fa2tune.measuring import worker
from fa2tune.measuring.worker import Crew, Job, wait
from fa2tune.tuning.search.failures import BLAMELESS, FAULTS
from fa2tune.tuning.search.status import status_of
from fa2tune.tuning.select.gpu_jobs import GpuLost

HERE = str(Path(__file__).parents[1])


def alive(pid):
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.parametrize(
    ("function", "arguments", "status", "says"),
    [
        ("abort", (), "crash", "process died (SIGABRT): python: Layout.cpp:123: void convert(): Assertion"),
        ("segfault", (), "crash", "process died (SIGSEGV)"),
        ("leave", (), "crash", "process died (exit 3)"),
        ("spin", (), "timeout", "no answer within 1 s"),
        ("eat", (), "out_of_memory", "out of memory: it held"),
        ("broken", ("an illegal memory access was encountered",), "illegal_access", "Assertion `in bounds' failed"),
        ("broken", ("device-side assert triggered",), "device_assert", "CUDA error: device-side assert"),
        ("broken", ("uncorrectable ECC error encountered",), "failed", "ECC"),
        ("unspeakable", (), "crash", "process died (exit 1)"),
        ("kill_itself", (), "killed", "SIGKILL"),
    ],
)
def test_each_fault_costs_one_job_and_seconds_and_has_a_word(function, arguments, status, says):
    with Crew(1, memory=resident() + ROOM) as crew:
        first = outcome(crew, "pid").result
        begun = time.monotonic()
        job = outcome(crew, function, *arguments, seconds=1.0 if function == "spin" else 20.0)
        assert job.died and says in job.failure, job.failure
        assert status_of(job) == status and status in FAULTS | BLAMELESS
        assert not alive(first)
        second = outcome(crew, "pid")
        assert second.result != first and crew.started == 2 and time.monotonic() - begun < 60


def test_a_child_says_how_long_it_needs():
    with Crew(1) as crew:
        assert outcome(crew, "patient", 60.0, 3.0, seconds=2.0).result == "done"
        hung = outcome(crew, "patient", 0.5, 60.0, seconds=60.0)
        assert hung.failure == "no answer within 0 s" or hung.failure == "no answer within 1 s"
        assert hung.took < 50 and status_of(hung) == "timeout"


def test_an_answer_that_waited_for_the_parent_is_not_late():
    """The parent may be busy burying another child while a deadline passes."""
    with Crew(1) as crew:
        outcome(crew, "pid")
        crew.submit(Job("isolation_fakes:patient", (0.5, 0.1), 0.5))
        time.sleep(3.0)
        while crew.load:
            ended = crew.collect([]) or wait([crew], 30)  # the first knows of no pipe that is ready
        assert [job.result for job in ended] == ["done"]


def test_imports_are_no_part_of_a_deadline(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(3.5)\ndef answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Crew(1) as crew:
        crew.submit(Job("slow_to_import:answer", (), 3.0))
        (job,) = wait([crew], 60)
        assert job.result == 42 and job.took < 3.0
        job = Job("no_such_module:answer", (), 20)
        crew.submit(job)
        wait([crew], 60)
        assert "ModuleNotFoundError" in job.failure and status_of(job) == "failed"  # no candidate's fault


@pytest.mark.parametrize("kind", ["stall", "eat"])
def test_what_a_compiler_started_ends_with_it(kind, tmp_path):
    """ptxas is a process of its own: it must not outlive its compile, and its memory counts."""
    with Crew(1, memory=2 * resident() + ROOM) as crew:
        hung_after = 3.0 if kind == "stall" else None
        job = outcome(crew, "spawn", kind, str(tmp_path / "pids"), hung_after, seconds=60.0)
        assert status_of(job) == {"stall": "timeout", "eat": "out_of_memory"}[kind]
        started, child = map(int, (tmp_path / "pids").read_text().split())
        assert until(lambda: not alive(started) and not alive(child))


def test_no_child_survives_a_parent_that_is_killed(tmp_path):
    """kill -9 on the tuner in the midst of a compile: neither the compiling child nor what it started goes on."""
    code = (
        f"import sys; sys.path[:0] = {[HERE, *sys.path]!r}\n"
        "from fa2tune.measuring.worker import Crew, Job, wait\n"
        "crew = Crew(2)\n"
        f"crew.submit(Job('isolation_fakes:spawn', ('stall', {str(tmp_path / 'pids')!r}), 600))\n"
        "crew.submit(Job('isolation_fakes:stall', (), 600))\n"
        f"open({str(tmp_path / 'children')!r}, 'w').write(' '.join(str(c.process.pid) for c in crew.children))\n"
        "wait([crew], 600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert until((tmp_path / "pids").exists, 60)
        family = [int(pid) for name in ("pids", "children") for pid in (tmp_path / name).read_text().split()]
        assert all(alive(pid) for pid in family) and len(set(family)) == 3
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert until(lambda: not any(alive(pid) for pid in family)), "orphans go on"


def test_a_spare_stands_by_and_takes_over():
    with Crew(1, spare="isolation_fakes") as crew:
        first = outcome(crew, "pid").result
        spare = next(child.process.pid for child in crew.children if child.process.pid != first)
        assert outcome(crew, "pid").result == first  # the spare replaces the dead only
        assert outcome(crew, "segfault").died
        assert outcome(crew, "pid").result == spare and crew.load == 0
        assert len(crew.children) == 2


def test_a_child_that_was_prepared_gets_the_first_job():
    with Crew(1, spare="isolation_fakes") as crew:
        crew.prepare()
        crew.prepare()
        [child] = crew.children
        assert crew.load == 0 and outcome(crew, "pid").result == child.process.pid
        assert crew.started == 2, "and the spare"
    with Crew(1) as crew:  # nothing is known that it could import
        crew.prepare()
        assert not crew.children


def test_a_spare_that_cannot_live_is_not_started_for_ever(monkeypatch):
    with Crew(1, spare="isolation_fakes") as crew:
        outcome(crew, "pid")
        crew.children[1].process.kill()
        until(lambda: wait([crew], 0.2) or len(crew.children) == 1)
        assert len(crew.children) == 1 and crew.started == 2


def test_a_process_that_cannot_be_killed_ends_the_run(monkeypatch):
    """In the driver's functions a process may outlive SIGKILL: then the GPU is not free, and nothing may be measured on it."""
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.2)
    with Crew(1) as crew:
        crew.submit(Job("isolation_fakes:stall", (), 0.5))
        (child,) = crew.children
        real = child.process.wait

        def never(timeout=None):
            raise subprocess.TimeoutExpired("child", timeout)

        child.process.wait = never
        (job,) = wait([crew], 60)
        assert job.stuck and job.died
        real(30)
    from fa2tune.tuning.select import gpu_jobs

    steps = gpu_jobs.run("fa2tune.measuring.measure:race", ())
    next(steps)
    with pytest.raises(GpuLost, match="cannot be killed"):
        steps.send(job)
