"""The contract of a storage, which SQLite and PostgreSQL both keep: trials, studies, failures, leases.
That of its rows, which cache files keep, too: test_row_stores.py."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from cache_rows import FULL
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from postgres_server import server

from fa2tune.compiling.registry import portable_of
from fa2tune.sharing import leases, storage, trials
from fa2tune.sharing.leases import Leases, board
from fa2tune.sharing.shared import ROWS, SharedStore
from fa2tune.sharing.storage import Storage, StorageError, parsed
from fa2tune.sharing.study_writer import StudyWriter
from fa2tune.spec.problem import Specialization
from fa2tune.tuning.search.failures import COMPILE, LAUNCH, FailureRecord, FailureScope

__all__ = ["server"]  # a fixture
pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="forks of POSIX"),
    pytest.mark.usefixtures("quick_starts"),
]
NUMBERS = itertools.count()
DISTRIBUTIONS = {
    "BLOCK_M": CategoricalDistribution((64, 128)), "LOADS": CategoricalDistribution(("pointer", "descriptor")),
    "PERSISTENT": CategoricalDistribution((False, True)), "warps": IntDistribution(4, 8), "cap": FloatDistribution(0.0, 1.0),
}  # fmt: skip


@pytest.fixture(params=["postgresql", "sqlite"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """An empty storage of each kind."""
    if request.param == "postgresql":
        found = Storage(parsed(request.getfixturevalue("server").create(f"stores{next(NUMBERS)}")))
    else:
        found = Storage.of_studies(tmp_path / "studies.sqlite")
    yield found
    found.engine.dispose()


def again(held: Storage) -> Storage:
    """The same storage, as another process opens it."""
    return Storage(held.url, held.file)


def until(condition: Callable[[], Any], seconds: float = 150.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    assert found, "took too long"
    return found


# ---- trials: many in one transaction are what Optuna makes of them one by one


def trial(value: float | None) -> FrozenTrial:
    chosen = int(value) if value is not None and math.isfinite(value) else 1
    return create_trial(
        state=TrialState.PRUNED if value is None else TrialState.COMPLETE, value=value, distributions=DISTRIBUTIONS,
        params={"BLOCK_M": 64 << chosen % 2, "LOADS": "pointer", "PERSISTENT": chosen % 3 == 0, "warps": 4 + chosen % 5,
                "cap": chosen % 7 / 7},
        user_attrs={"outcome": {"fate": "spills" if value is None else "", "binary": {"registers": 168}}, "seed": 3},
    )  # fmt: skip


def study(optunas: optuna.storages.BaseStorage, name: str) -> int:
    return optunas.create_new_study([optuna.study.StudyDirection.MINIMIZE], name)


def all_of(optunas: optuna.storages.BaseStorage, number: int) -> list[dict[str, Any]]:
    """Every field of every trial, but for ids, which are the storage's."""
    return [{**vars(found), "_trial_id": None} for found in optunas.get_all_trials(number)]


def test_they_are_optunas(held: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    optunas = held.optuna()
    assert trials.together(optunas), "this Optuna's tables are known"
    made = [trial(value) for value in (3.5, None, 0.0, 12.25, math.inf, None, 1e9)]
    one_by_one, at_once, other, plainly = (
        study(optunas, name) for name in ("one by one", "at once", "other", "plainly")
    )
    for each in made:
        optunas.create_new_trial(one_by_one, each)
    trials.store(optunas, [(number, each) for each in made[:4] for number in (at_once, other)])
    trials.store(optunas, [(at_once, each) for each in made[4:]])
    monkeypatch.setattr(trials, "models", None)
    assert not trials.together(optunas)
    trials.store(optunas, [(plainly, each) for each in made])
    assert all_of(optunas, at_once) == all_of(optunas, one_by_one) == all_of(optunas, plainly)
    assert all_of(optunas, other) == all_of(optunas, one_by_one)[:4]
    assert [each["_number"] for each in all_of(optunas, at_once)] == [*range(len(made))]


def test_two_writers_give_each_trial_a_number_of_its_own(held: Storage) -> None:
    number = study(held.optuna(), "study")

    def write(writer: int) -> None:
        own = held.optuna()
        for batch in range(5):
            first = 1000 * writer + 10 * batch
            trials.store(own, [(number, trial(float(value))) for value in range(first, first + 10)])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(2)))
    found = held.optuna().get_all_trials(number)
    assert sorted(each.number for each in found) == [*range(100)]
    assert {each.value for each in found} == {1000.0 * writer + value for writer in range(2) for value in range(50)}


def test_all_or_none(held: Storage) -> None:
    optunas = held.optuna()
    number = study(optunas, "study")
    wrong = trial(2.0)
    wrong.user_attrs = {"outcome": object()}  # no JSON
    with pytest.raises(TypeError):
        trials.store(optunas, [(number, trial(1.0)), (number, wrong)])
    assert optunas.get_all_trials(number) == []


# ---- studies, through the processes that write them


def test_a_study_finds_what_was_written_in_order(held: Storage) -> None:
    writer = StudyWriter(held)
    writer.study("s")
    for value in range(3):
        writer.add("s", trial(float(value)))
    writer.keep("s", "disqualified", "[]")
    writer.keep("s", "disqualified", "[1]")
    mark = writer.mark()
    writer.close()
    assert writer.stored(mark) and writer.left == 0
    reopened = StudyWriter(again(held)).study("s")
    assert [found.value for found in reopened.get_trials()] == [0.0, 1.0, 2.0]
    assert reopened.user_attrs["disqualified"] == "[1]"


# ---- failures

FWD = portable_of("fwd")
SPEC = Specialization("bf16", 128, 128, "causal")
CONFIG = dict(FWD.space.default(SPEC, 90))
SCOPE = FailureScope("3.6.0", "NVIDIA H200", "580.1")


def test_a_failure_is_found_by_the_next_run_and_replaced_by_a_later_one(held: Storage) -> None:
    first = FailureRecord(held, SCOPE).of_kernel(FWD, SPEC, 90)
    assert first.of(CONFIG) is None
    first.add(LAUNCH, CONFIG, "crash", "process died (SIGABRT)")
    first.add(LAUNCH, CONFIG, "illegal_access", "CUDA error")
    found = FailureRecord(again(held), SCOPE).of_kernel(FWD, SPEC, 90)
    failure = found.of(CONFIG)
    assert failure is not None and (failure.status, failure.why) == ("illegal_access", "CUDA error")
    other = FailureRecord(again(held), replace(SCOPE, driver="590.1")).of_kernel(FWD, SPEC, 90)
    assert other.of(CONFIG) is None
    assert found.forget() == 1
    assert FailureRecord(again(held), SCOPE).of_kernel(FWD, SPEC, 90).of(CONFIG) is None


def test_a_compile_that_took_too_long_counts_in_the_second_run(held: Storage) -> None:
    for expected in (None, "timeout"):
        FailureRecord(held, SCOPE).of_kernel(FWD, SPEC, 90).add(COMPILE, CONFIG, "timeout", "no answer within 30 s")
        failure = FailureRecord(again(held), SCOPE).of_kernel(FWD, SPEC, 90).of(CONFIG)
        assert (failure and failure.status) == expected


# ---- rows


def test_rows_of_a_later_fa2tune_are_not_read(held: Storage) -> None:
    store = SharedStore(held)
    store.storage.do(lambda connection: store.write(connection, [FULL]))
    store.storage.execute(ROWS.update().values(version=99))
    with pytest.raises(StorageError, match="upgrade fa2tune"):
        store.rows()


def test_a_transaction_that_fails_writes_nothing(held: Storage) -> None:
    store = SharedStore(held)

    def fails(connection: Any) -> None:
        store.write(connection, [FULL])
        raise KeyError("in the midst")

    with pytest.raises(KeyError):
        held.do(fails)
    assert store.rows() == []


# ---- leases

JOBS = [f"job {number}" for number in range(6)]


def holds(one: Leases, job: str) -> bool:
    return job in one.storage.do(one.holding)


def expire(held: Storage, one: Leases) -> None:
    held.execute(leases.WORKERS.update().where(leases.WORKERS.c.worker == one.worker).values(until=held.now - 0.1))


def on(held: Storage) -> str:
    """The beginning of a program that has the same storage."""
    url = held.url.render_as_string(hide_password=False) if held.shared and held.url else ""
    file = "" if held.shared else str(held.file)
    return (
        f"import os, sys; sys.path[:] = {sys.path!r}\n"
        "import sqlalchemy as sa\nfrom pathlib import Path\n"
        "from fa2tune.sharing.leases import Leases\nfrom fa2tune.sharing.storage import Storage\n"
        f"held = Storage(sa.make_url({url!r})) if {url!r} else Storage(None, Path({file!r}))\n"
    )


def test_jobs_are_shared_by_gpus_and_given_back_to_a_worker_that_joins(held: Storage) -> None:
    one, two = Leases(held, "campaign", "request", gpus=1), Leases(held, "campaign", "request", gpus=2)
    assert one.meet(JOBS).held == {*JOBS} and one.standing.excess == 0
    assert two.meet(JOBS).held == frozenset()
    assert one.meet(JOBS).excess == 4
    for job in JOBS[2:]:
        one.give(job)
    assert one.standing.held == {*JOBS[:2]}
    assert two.meet(JOBS).held == {*JOBS[2:]} and two.standing.excess == 0
    two.gpus = 1  # one of them failed
    two.meet(JOBS)
    assert one.meet(JOBS).excess == 0 and two.standing.excess == 1
    two.settle("job 2")
    assert "job 2" in one.meet(JOBS).settled and one.standing.held == {*JOBS[:2]}
    assert holds(two, "job 3") and not holds(two, "job 2") and not holds(two, "job 0")
    other = Leases(held, "campaign", "another request")
    assert "job 2" not in other.meet(JOBS).settled, "it asks for something else"
    assert Leases(held, "another campaign", "request").meet(JOBS).held == {*JOBS}
    two.leave()
    assert {*JOBS[3:]} <= one.meet(JOBS).held | other.meet(JOBS).held


def test_a_worker_that_wants_none_of_them_has_no_part_in_them(held: Storage) -> None:
    """Two hosts, each asked for other head dims; and a third that wants what one of them does."""
    one, two, three = (Leases(held, "campaign", f"request {number}") for number in range(3))
    for _ in range(3):
        assert one.meet(JOBS[:4]).held == {*JOBS[:4]} and one.standing.excess == 0
        assert two.meet(JOBS[4:]).held == {*JOBS[4:]} and two.standing.excess == 0
    three.meet(JOBS[2:4])
    assert one.meet(JOBS[:4]).excess == 1, "its part is two, and half of the other two"
    assert one.standing.sought == {*JOBS[2:4]}
    assert two.meet(JOBS[4:]).excess == 0
    one.give("job 3")
    assert three.meet(JOBS[2:4]).held == {"job 3"}
    three.settle("job 3")
    assert one.meet(JOBS[:4]).held == {*JOBS[:4]}, "it is not settled for this request"
    three.leave()
    assert one.meet(JOBS[:4]).excess == 0
    one.leave()
    four = Leases(held, "campaign", "request 3")
    for job in four.meet(JOBS[2:4]).held:
        four.give(job)
    assert one.meet(JOBS[2:4] + JOBS[:2]).held == {"job 0", "job 1", "job 2"}, "what no other wants first"


def test_no_worker_idles_while_another_holds_several(held: Storage) -> None:
    """Rounded up, the part of the larger one is all there is."""
    many, few = Leases(held, "campaign", "request", gpus=8), Leases(held, "campaign", "request", gpus=1)
    jobs = JOBS[:4]
    assert many.meet(jobs).held == {*jobs} and few.meet(jobs).held == frozenset()
    assert many.meet(jobs).excess == 1
    many.give(jobs[0])
    assert few.meet(jobs).held == {jobs[0]} and many.meet(jobs).excess == 0
    for job in jobs[1:3]:
        many.settle(job)
    few.settle(jobs[0])
    assert few.meet(jobs).held == frozenset() and many.meet(jobs).excess == 0, "the last job stays where it is"


def test_an_expired_lease_goes_to_the_next_and_its_holder_notices(
    held: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_place", lambda: "host one")
    one, two = Leases(held, "campaign", "request"), Leases(held, "campaign", "request")
    one.meet(JOBS[:1])
    monkeypatch.setattr(leases, "_place", lambda: "host two")
    assert two.meet(JOBS[:1]).held == frozenset()
    expire(held, one)
    assert two.meet(JOBS[:1]).held == {"job 0"}
    assert not holds(one, "job 0")
    assert not one.settle("job 0")  # too late: it is not its own
    assert one.standing.settled == frozenset() and one.standing.held == frozenset() and one.due()
    standing = one.meet(JOBS[:1])
    assert standing.lost and standing.held == frozenset() and standing.settled == frozenset()
    assert holds(two, "job 0")
    expire(held, two)  # late, but no other came
    assert not two.meet(JOBS[:1]).lost and holds(two, "job 0")


def test_a_worker_that_was_killed_on_this_host_need_not_expire(held: Storage) -> None:
    code = (
        "print(sorted(Leases(held, 'campaign', 'request').meet(['job 0']).held), flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", on(held) + code], capture_output=True, text=True, timeout=150)
    assert done.stdout.strip() == "['job 0']" and done.returncode == -signal.SIGKILL, done.stderr
    [line] = board(held)
    assert line.job == "job 0" and line.left_s > 30
    assert Leases(held, "campaign", "request").meet(["job 0"]).held == {"job 0"}


def test_two_requests_on_the_same_jobs_both_end(held: Storage) -> None:
    one, two = Leases(held, "campaign", "request"), Leases(held, "campaign", "another request")
    for _ in range(4):
        for each in (one, two):
            for job in each.meet(JOBS[:2]).held:
                assert each.settle(job)
    assert one.standing.settled == two.standing.settled == {*JOBS[:2]}


def test_what_was_settled_is_looked_at_again_when_no_worker_is_left(held: Storage) -> None:
    one = Leases(held, "campaign", "request")
    one.meet(JOBS)
    one.settle("job 0")
    one.leave()
    assert Leases(held, "campaign", "request").meet(JOBS).held == {*JOBS}


def test_a_process_that_cannot_be_looked_at_is_not_dead(held: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc mounted with hidepid, and a worker of another user."""
    one, two = Leases(held, "campaign", "request"), Leases(held, "campaign", "request")
    one.meet(JOBS)
    monkeypatch.setattr(leases, "_born", lambda pid: "")
    assert two.meet(JOBS).held == frozenset() and not one.meet(JOBS).lost
    for born in ("dead", "1"):  # a zombie; another process with its number
        monkeypatch.setattr(leases, "_born", lambda pid, born=born: born)
        assert leases._ended(os.getpid(), "2") and not leases._ended(os.getpid(), "")
    with subprocess.Popen(["true"]) as process:
        pass
    assert leases._ended(process.pid, "")


def test_many_meet_at_once_and_no_job_has_two_holders(held: Storage) -> None:
    code = (
        "one = Leases(held, 'campaign', 'request')\n"
        "jobs = [f'job {n}' for n in range(12)]\n"
        "print('ready', flush=True), input()\n"
        "while len(one.meet(jobs).settled) < 12:\n"
        "    [one.give(job) for job in sorted(one.standing.held)[:one.standing.excess]]\n"
        "    for job in sorted(one.standing.held)[:1]:\n"
        "        print(job, flush=True)\n"
        "        one.settle(job)\n"
        "input()\n"
    )
    keeper = Leases(held, "campaign", "request")  # the campaign goes on while any of them is there
    keeper.meet([])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", on(held) + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    try:
        for process in running:
            assert process.stdout and process.stdout.readline() == "ready\n"
        for process in running:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        until(lambda: len(keeper.meet([]).settled) == 12)
        said = [process.communicate("\n", timeout=150)[0].split("\n") for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    settled = [line for lines in said for line in lines if line]
    assert sorted(settled) == sorted(f"job {n}" for n in range(12)), "each once"


def test_a_clock_that_jumps_buries_no_worker_of_this_host(tmp_path: Path) -> None:
    """An SQLite file has its host's clock: only the death of a process counts there."""
    held = Storage.of_studies(tmp_path / "studies.sqlite")
    one, two = Leases(held, "campaign", "request"), Leases(held, "campaign", "request")
    one.meet(JOBS)
    held.execute(leases.WORKERS.update().values(until=held.now - 86400.0))
    assert two.meet(JOBS).held == frozenset() and not one.meet(JOBS).lost
    assert one.standing.held == {*JOBS}


def test_an_outage_buries_no_worker() -> None:
    assert leases.EXPIRY_S > storage.OUTAGE_S + 2 * leases.BEAT_S
