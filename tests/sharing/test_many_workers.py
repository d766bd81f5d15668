"""Any number of workers on one storage: a real PostgreSQL, whole tuning runs in processes that are killed by signal 9, cut off,
stopped, and started late. Nothing is lost, nothing is tuned twice, and the rows come out whole."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_log
import optuna
import pytest
from cache_rows import BARE, FULL, row
from click.testing import CliRunner
from fleet_worker import DIMENSIONS, true_time
from postgres_server import PASSWORD, Server, server

from fa2tune.cli import main
from fa2tune.compiling.registry import portable_of
from fa2tune.measuring.worker import Job
from fa2tune.rows import reader, record
from fa2tune.rows.row import PREDICTED
from fa2tune.sharing import leases, storage
from fa2tune.sharing.leases import Leases, board
from fa2tune.sharing.shared import ROWS, SharedStore
from fa2tune.sharing.storage import Storage, StorageError, parsed
from fa2tune.sharing.study_writer import StudyWriter, write
from fa2tune.tuning.request import jobs
from fa2tune.tuning.request.jobs import TuningJob
from fa2tune.tuning.request.plan import TuneRequest, make_plan
from fa2tune.tuning.request.provenance import Provenance
from fa2tune.tuning.request.watcher import Watcher, WorkerFunctions
from fa2tune.tuning.run import open_jobs
from fa2tune.tuning.run.filing import Filing
from fa2tune.tuning.run.tuner import Run
from fa2tune.tuning.search.failures import COMPILE
from fa2tune.tuning.select.log import Log
from fa2tune.tuning.select.report import Report

__all__ = ["server"]  # a fixture
TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and forks of POSIX")

BUCKETS, HEAD_DIMS, MASKS = (512, 1024), (64, 128), ("full", "causal")
KEYS = {(dim, mask, bucket) for dim in HEAD_DIMS for mask in MASKS for bucket in BUCKETS}
NUMBERS = itertools.count()
JOBS = [f"job {number}" for number in range(6)]


@pytest.fixture
def url(server: Server) -> str:
    """A database of this test's own."""
    return server.create(f"t{next(NUMBERS)}")


def until(condition: Callable[[], Any], seconds: float = 150.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    assert found, "took too long"
    return found


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """The process that forks workers, see fleet_worker.py."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "fleet_worker.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


class Fleet:
    """Workers, by name."""

    def __init__(self, nursery: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder, self.log = nursery, folder, folder / "log.jsonl"
        self.pids: dict[str, int] = {}

    def start(self, name: str, url: str, environment: dict[str, str] | None = None, **request: Any) -> None:
        values = {"head_dims": HEAD_DIMS, "masks": MASKS, "buckets": BUCKETS, "storage": url, **request}
        about = {"FA2TUNE_FAKE_LOG": str(self.log), "FA2TUNE_WORKER": name, **(environment or {})}
        asked = {"name": name, "folder": str(self.folder), "request": values, "environment": about}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        self.pids[name] = int(self.process.stdout.readline())

    def kill(self, name: str) -> None:
        with suppress(ProcessLookupError):  # it is done
            os.kill(self.pids[name], signal.SIGKILL)

    def ended(self, name: str) -> bool:
        return (self.folder / f"{name}.json").exists()

    def report(self, name: str, seconds: float = 150.0) -> dict[str, Any]:
        until(lambda: self.ended(name), seconds)
        found: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        assert not found["error"], found
        return found

    def said(self, name: str) -> str:
        """The lines of a worker, up to now."""
        path = self.folder / f"{name}.lines"
        return path.read_text() if path.exists() else ""

    def gated(self, free: int = 0) -> dict[str, str]:
        """For a worker's environment: after so many races it waits for ``open``."""
        return {"FA2TUNE_FAKE_GATE": str(self.folder / "gate"), "FA2TUNE_FAKE_FREE": str(free)}

    def open(self) -> None:
        (self.folder / "gate").touch()

    def did(self, effort: str) -> list[tuple[str, tuple[int, bool, int], list[dict[str, Any]]]]:
        """(worker, key, contenders) of each race."""
        done = fake_log.read(self.log)
        return [(name, (dim, mask, bucket), c) for name, kind, dim, mask, bucket, c in done if kind == effort]

    def close(self) -> None:
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def fleet(nursery: subprocess.Popen[str], tmp_path: Path) -> Iterator[Fleet]:
    found = Fleet(nursery, tmp_path)
    yield found
    found.close()


def dumped(config: Any) -> str:
    return json.dumps(config, sort_keys=True)


def trials(url: str) -> dict[str, Counter[str]]:
    """Study -> how often each config stands in it."""
    held = optuna.storages.RDBStorage(url)
    found = {
        study.study_name: Counter(dumped(t.params) for t in held.get_all_trials(study._study_id))
        for study in held.get_all_studies()
    }
    held.engine.dispose()
    return found


def rows_of(url: str) -> list[Any]:
    store = SharedStore(Storage(parsed(url)))
    found = store.rows()
    store.storage.engine.dispose()
    return found


def assert_whole(
    url: str, studies: dict[str, Counter[str]], keys: Collection[tuple[int, bool, int]] = frozenset(KEYS)
) -> None:
    """Every key has its rows, and they name the best there is; every study has every config."""
    rows = rows_of(url)
    expected = {(*key, implementation) for key in keys for implementation in ("pointer", "descriptor")}
    assert {(r.key.head_dim, r.key.mask, r.key.bucket, r.implementation) for r in rows} == expected and len(
        rows
    ) == len(expected)
    assert len(studies) == len(keys) and len({len(study) for study in studies.values()}) == 1
    configs = [json.loads(text) for text in next(iter(studies.values()))]
    for found in rows:
        own = [config for config in configs if config["LOADS"] == found.implementation]
        best = min(true_time(config, found.key.bucket) for config in own)
        assert len(own) == 8 and true_time(found.config, found.key.bucket) == best and found.tried == 16


def test_workers_that_join_late_and_are_killed_at_any_moment(fleet: Fleet, url: str) -> None:
    chance = random.Random(0)
    slow = {"FA2TUNE_FAKE_SECONDS": "0.05"}
    fleet.start("w0", url, slow)
    fleet.start("w1", url, slow, place="another host")
    names, before = ["w0", "w1"], {}
    held = Storage(parsed(url))
    for number in range(2, 7):  # five deaths; each is replaced by one that joins late
        more = len(fleet.did("screen")) + chance.randint(1, 3)
        until(lambda more=more: len(fleet.did("screen")) >= more or any(map(fleet.ended, fleet.pids)))
        if number == 6:  # on a busy host those before it may have died before their first trial was stored
            until(lambda: any(trials(url).values()))
        time.sleep(chance.uniform(0.0, 0.1))  # anywhere in a race, or between two
        victim = chance.choice([name for name in names[-2:] if not fleet.ended(name)] or names[-1:])
        fleet.kill(victim)
        late = leases.WORKERS.update().where(leases.WORKERS.c.pid == fleet.pids[victim])
        held.execute(late.values(until=held.now - 1.0))  # a minute later: the others wait no longer
        seen = trials(url)
        for study, configs in before.items():
            assert configs <= seen[study], "a trial that was stored is gone"
        before = seen
        names.append(f"w{number}")
        fleet.start(names[-1], url, slow if number < 5 else {})
    fleet.report(names[-1])
    held.engine.dispose()
    studies = trials(url)
    for study, configs in before.items():
        assert configs <= studies[study]
    assert_whole(url, studies)
    twice = {text for study in studies.values() for text, count in study.items() if count > 1}
    racers = [(name, key) for name, key, configs in fleet.did("screen") for c in configs if dumped(c) in twice]
    assert not twice, f"filed twice: {twice}, raced by {racers}"
    assert any(before.values())


def test_two_hosts_share_the_work_and_each_shows_the_whole_table(fleet: Fleet, url: str) -> None:
    held = Storage(parsed(url))
    for name in ("a", "b"):
        fleet.start(name, url, fleet.gated(), place=f"host {name}")
    until(lambda: len({line.worker for line in board(held) if line.job}) == 2)  # the first has given back some
    fleet.open()
    tables = [sorted(fleet.report(name)["rows"], key=repr) for name in ("a", "b")]
    assert tables[0] == tables[1] and len(tables[0]) == 2 * len(KEYS)
    proofs = fleet.did("proof")
    assert Counter(key for _, key, _ in proofs) == Counter(KEYS), "one final a key, on one host"
    assert {name for name, _, _ in proofs} == {"a", "b"}
    timed = Counter((key, dumped(c)) for _, key, configs in fleet.did("screen") for c in configs[1:])
    assert set(timed.values()) == {1}, "no candidate is timed twice"
    assert_whole(url, trials(url))
    assert board(held) == [], "no worker is left"
    held.engine.dispose()
    fleet.start("c", url)  # the same command, later
    again = fleet.report("c")
    assert len(fleet.did("screen")) == len([one for one in fleet.did("screen") if one[0] != "c"])
    assert sorted(again["rows"], key=repr) == tables[0]


def test_two_workers_want_one_key_and_one_gets_it(fleet: Fleet, url: str) -> None:
    little = {"head_dims": [64], "masks": ["causal"], "buckets": [512]}
    for name in ("a", "b"):
        fleet.start(name, url, fleet.gated(), **little)
    until(lambda: "hold the last jobs: fwd 64 causal" in fleet.said("a") + fleet.said("b"))
    fleet.open()
    reports = [fleet.report(name) for name in ("a", "b")]
    assert len({name for name, _, _ in fleet.did("screen")}) == 1
    tables = [sorted(report["rows"], key=repr) for report in reports]
    assert tables[0] == tables[1] and len(tables[0]) == 2
    assert sum("waiting for other workers" in fleet.said(name) for name in ("a", "b")) == 1


def test_another_driver_or_kernel_shares_nothing(fleet: Fleet, url: str) -> None:
    little = {"head_dims": [64], "masks": ["causal"], "buckets": [512]}
    others = {"a": {}, "b": {"FA2TUNE_FAKE_DRIVER": "590.1"}, "c": {"FA2TUNE_FAKE_KERNELS": "newer"}}
    for name, environment in others.items():
        fleet.start(name, url, environment, **little)
    reports = {name: fleet.report(name) for name in others}
    assert {name for name, _, _ in fleet.did("proof")} == {*others} and len(trials(url)) == 3
    fleet.start("d", url, {"FA2TUNE_FAKE_KERNELS": "newer"}, **little)
    assert len(fleet.report("d")["rows"]) == len(reports["c"]["rows"]) == 2


def test_what_is_settled_in_one_cache_is_not_so_in_another(fleet: Fleet, tmp_path: Path) -> None:
    little = {"head_dims": [64], "masks": ["causal"], "buckets": [512]}
    for name in ("a", "b"):
        cache = str(tmp_path / f"{name}.sqlite")
        fleet.start(name, f"sqlite:///{tmp_path}/studies.sqlite", cache=cache, **little)
    for name in ("a", "b"):
        assert len(fleet.report(name)["rows"]) == len(reader.read(tmp_path / f"{name}.sqlite")) == 2


def test_what_workers_must_have_in_common(tmp_path: Path) -> None:
    def asked(**change: Any) -> tuple[str, str]:
        values = {"gpu": "a100", "cache": tmp_path / "c.sqlite", **change}
        made = make_plan(TuneRequest(**values))
        return jobs.campaign(made, Provenance(PREDICTED)), jobs.request_token(made)

    assert asked(workers=2) == asked(workers=8), "hosts differ"
    (campaign, token), other = asked(), asked(cache=tmp_path / "d.sqlite")
    assert campaign == other[0] and token != other[1]
    assert campaign != asked(studies=tmp_path / "s.sqlite")[0]
    assert asked(pass_="fwd")[0] == campaign and asked(pass_="fwd")[1] != token


@contextmanager
def away(server: Server) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.start()


def test_a_database_that_is_away_for_seconds_costs_nothing(fleet: Fleet, url: str, server: Server) -> None:
    keys = {key for key in KEYS if key[0] == 64}
    fleet.start("a", url, fleet.gated(free=3), head_dims=[64])
    until(lambda: len(fleet.did("screen")) > 2)
    with away(server):
        until(lambda: "does not answer" in fleet.said("a"))
    fleet.open()
    assert len(fleet.report("a")["rows"]) == 2 * len(keys)
    studies = trials(url)
    assert_whole(url, studies, keys)
    timed = Counter((key, dumped(c)) for _, key, configs in fleet.did("screen") for c in configs[1:])
    assert set(timed.values()) == {1}


def test_ctrl_c_while_the_database_is_away(fleet: Fleet, url: str, server: Server) -> None:
    """Its patience is short then, and what was stored stays."""
    little = {"head_dims": [64], "masks": ["causal"]}
    fleet.start("a", url, fleet.gated(free=2), **little)
    until(lambda: len(fleet.did("screen")) > 1)
    until(lambda: (found := trials(url)) and all(map(len, found.values())))
    before = trials(url)
    with away(server):
        until(lambda: "does not answer" in fleet.said("a"))
        os.kill(fleet.pids["a"], signal.SIGINT)
        until(lambda: fleet.ended("a"), 90.0)  # less than the patience without it
    assert "cannot be reached" in json.loads((fleet.folder / "a.json").read_text())["error"]
    after = trials(url)
    assert before and all(configs <= after[study] for study, configs in before.items())
    fleet.open()
    fleet.start("b", url, **little)
    fleet.report("b")
    assert_whole(url, trials(url), {key for key in KEYS if key[:2] == (64, "causal")})


def test_what_is_given_up_in_a_hurry_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setattr(storage, "HURRY_S", 0.2)
    away = Storage(parsed("postgresql://u:pw@127.0.0.1:1/d"), reached=True)
    away.hurry = True
    monkeypatch.setattr(away, "optuna", lambda: None)
    writer, messages = StudyWriter(away, 2), list[str]()
    for number in range(5):
        writer.keep(f"study {number}", "attribute", number)
    assert writer.left == 5
    with pytest.raises(StorageError, match=r"no answer; 5 writes are given up"):
        writer.close()
    watcher = Watcher()
    watcher.line = messages.append  # type: ignore[method-assign]
    run: Any = SimpleNamespace(writer=writer, log=SimpleNamespace(unfiled=[("fwd 512", [FULL])], watcher=watcher))
    Run._tell_left(run)
    assert messages == ["not written: the rows of fwd 512, 5 trials or study attributes; the next run does this again"]


def test_a_writer_process_that_dies_writes_nothing_twice(tmp_path: Path) -> None:
    held = Storage.of_studies(tmp_path / "studies.sqlite")
    writer = StudyWriter(held)
    number = writer.optuna.create_new_study([optuna.study.StudyDirection.MINIMIZE], "study")
    batch = [("study", "", optuna.trial.create_trial(value=float(value))) for value in range(20)]
    [process] = writer.processes
    process.taken = len(batch)
    write(held.url, held.file, batch[:3])  # so far it came
    job = Job(
        "", (), 1.0, notes=[1, 2, 3], failure="process died", died=True, tag=partial(writer._wrote, process, batch)
    )
    process.job = job  # its reader was interrupted
    assert writer.left == 17
    writer.close()
    assert writer.left == 0
    writer._wrote(process, batch, job)
    assert writer.left == 0, "it counts once"
    assert sorted(trial.value for trial in writer.optuna.get_all_trials(number)) == [*range(20)]


def test_what_a_writer_process_was_never_given_is_sent_again(tmp_path: Path) -> None:
    """An interrupt as it was handed over."""
    writer = StudyWriter(Storage.of_studies(tmp_path / "studies.sqlite"))
    number = writer.optuna.create_new_study([optuna.study.StudyDirection.MINIMIZE], "study")
    batch = [("study", "", optuna.trial.create_trial(value=float(value))) for value in range(4)]
    [process] = writer.processes
    process.taken = len(batch)
    process.job = Job("", (), 1.0, tag=partial(writer._wrote, process, batch))  # no crew has it
    writer.close()
    assert writer.left == 0
    assert sorted(trial.value for trial in writer.optuna.get_all_trials(number)) == [0, 1, 2, 3]


def test_a_worker_that_was_stopped_for_too_long_files_nothing_of_what_is_anothers(fleet: Fleet, url: str) -> None:
    little = {"head_dims": [64], "masks": ["causal"]}
    fleet.start("a", url, fleet.gated(free=2), place="host a", **little)
    until(lambda: len(fleet.did("screen")) > 1)
    os.kill(fleet.pids["a"], signal.SIGSTOP)
    held = Storage(parsed(url))
    held.execute(leases.WORKERS.update().values(until=held.now - 1.0))  # a minute later
    fleet.start("b", url, place="host b", **little)
    took_over = sorted(fleet.report("b")["rows"], key=repr)
    os.kill(fleet.pids["a"], signal.SIGCONT)
    fleet.open()
    report = fleet.report("a")
    assert "other workers took over" in fleet.said("a")
    assert sorted(report["rows"], key=repr) == took_over, "the other one's"
    assert {name for name, _, _ in fleet.did("proof")} == {"b"}
    held.engine.dispose()


# ---- one storage


def put(store: SharedStore, rows: Sequence[Any]) -> None:
    store.storage.do(lambda connection: store.write(connection, rows))


def test_a_worker_that_waits_for_its_turn_sees_what_was_done(url: str) -> None:
    """Whatever isolation the database has by default, and without the right to make anything in it."""
    held = Storage(parsed(url))
    one = Leases(held, "campaign", "request")
    one.meet(JOBS)
    with held.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as admin:
        name = parsed(url).database
        admin.exec_driver_sql(f"alter database {name} set default_transaction_isolation to 'repeatable read'")
        admin.exec_driver_sql("drop role if exists looker")
        admin.exec_driver_sql(f"create role looker login password '{PASSWORD}'")
        admin.exec_driver_sql(f"grant connect on database {name} to looker")
        admin.exec_driver_sql(f"grant usage on schema {storage.POSTGRES_SCHEMA} to looker")
        admin.exec_driver_sql(f"grant select on all tables in schema {storage.POSTGRES_SCHEMA} to looker")
    held.engine.dispose()
    level = held.do(lambda connection: connection.exec_driver_sql("show transaction_isolation").scalar())
    assert level == "read committed"
    looker = Storage(parsed(url).set(username="looker"))
    assert {line.job for line in board(looker)} == {*JOBS}
    for each in (held, looker):
        each.engine.dispose()


def test_rows_of_a_lost_job_are_not_filed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are ours is asked in the transaction that writes them."""
    held, key = Storage(parsed(url)), FULL.key
    job = TuningJob("fwd", key.head_dim, key.head_dim_v, key.mask)
    assert job.covers(key)
    one, two, store = Leases(held, "campaign", "request"), Leases(held, "campaign", "request"), SharedStore(held)
    filing = Filing(held, one, {job.name: job}, store)
    one.meet([job.name])
    transactions, do = [], held.do
    monkeypatch.setattr(held, "do", lambda work: transactions.append(work) or do(work))
    assert filing.file([FULL]) == [FULL] and len(transactions) == 1
    held.execute(leases.LEASES.update().values(worker=two.worker))
    assert filing.file([replace(FULL, samples=99)]) == [] and store.rows() == [FULL]
    held.engine.dispose()


def test_retry_failed_forgets_once_whichever_worker_has_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fwd, default = portable_of("fwd"), {name: values[0] for name, values in DIMENSIONS.items()}
    small = replace(fwd, space=replace(fwd.space, dimensions=DIMENSIONS, default=lambda spec, arch: default))
    monkeypatch.setattr(open_jobs, "_variants", lambda job, plan: [small])
    asked = {
        "head_dims": (64,),
        "masks": ("causal",),
        "dtypes": ("bf16",),
        "pass_": "fwd",
        "gpu": "a100",
        "buckets": (512,),
    }
    request = TuneRequest(**asked, cache=tmp_path / "c.sqlite", sampler="random", trials=8)  # type: ignore[arg-type]

    def working(**change: Any) -> Run:
        run = Run(make_plan(replace(request, **change)), Watcher(), WorkerFunctions())
        run.held.meet()
        run._begin_next()
        return run

    def task(run: Run) -> Any:
        [found] = run.held.tasks
        return found

    earlier = working()
    for config in task(earlier).space.legal.configs[:2]:
        task(earlier).failures.add(COMPILE, config, "crash", "before")
    earlier.leases.leave()
    one, two = working(retry_failed=True), working(retry_failed=True)
    assert not task(one).space.failed_before and not two.held.tasks
    task(one).failures.add(COMPILE, task(one).space.legal.configs[2], "crash", "today")
    one.held.drop([*one.held.open])  # given back, and taken again
    one._begin_next()
    assert {failure.why for failure in task(one).space.failed_before.values()} == {"today"}
    one.leases.leave()  # or dead
    two.held.meet()
    two._begin_next()
    assert {failure.why for failure in task(two).space.failed_before.values()} == {"today"}
    two.leases.leave()
    assert not task(working(retry_failed=True)).space.failed_before, "another day"


def test_rows_outlive_a_ctrl_c_in_the_midst_of_filing() -> None:
    tries, filed, messages = [KeyboardInterrupt, None], [], []

    def file_ours(rows: Sequence[Any]) -> Sequence[Any]:
        if error := tries.pop(0):
            raise error
        filed.extend(rows)
        return rows[:1]

    watcher = Watcher()
    watcher.line = messages.append  # type: ignore[method-assign]
    other = row({"bucket": 512})
    nothing: Any = None
    log = Log(nothing, watcher, WorkerFunctions(), nothing, nothing, Report(nothing), file_ours)
    log.put(FULL.key, [FULL], "mine", "")
    log.put(other.key, [other], "another's", "")
    with pytest.raises(KeyboardInterrupt):
        log.file(at_once=True)
    log.file(at_once=True)
    assert filed == [FULL, other] and log.report.rows == [FULL] and not log.unfiled
    assert (
        messages[0].startswith("mine: ")
        and messages[1] == "another's: another worker has taken this job over; its rows count"
    )


def test_a_database_that_is_gone_for_good_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setattr(storage, "OUTAGE_S", 1.0)
    held, said = Storage(parsed("postgresql://u:pw@127.0.0.1:1/d"), reached=True), list[str]()
    held.say = said.append
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot be reached"):
            held.do(lambda connection: None)
    assert len(said) == 1 and "does not answer" in said[0] and "pw" not in said[0]


def test_leases_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["leases", "--storage", f"sqlite:///{tmp_path}/typo/x.sqlite"])
    assert result.exit_code == 2 and not (tmp_path / "typo").exists()
    assert f"storage: {tmp_path}/typo/x.sqlite: no such file" in result.output
    (tmp_path / "x.sqlite").touch()
    result = CliRunner().invoke(main, ["leases", "--storage", f"sqlite:///{tmp_path}/x.sqlite"])
    assert result.exit_code == 2 and f"{tmp_path}/x.sqlite: not used by a tune yet" in result.output


# ---- rows, URLs, and what is printed


def test_the_rows_of_the_database_are_exported_as_a_file(url: str, tmp_path: Path) -> None:
    store = SharedStore(Storage(parsed(url)))
    put(store, [FULL, BARE, row({"bucket": 512})])
    put(store, [row({"bucket": 512}, samples=99)])
    result = CliRunner().invoke(main, ["cache", "export", "--storage", url, str(tmp_path / "fleet.sqlite"), "--twin"])
    assert result.exit_code == 0 and "3 rows" in result.output and PASSWORD not in result.output, result.output
    assert reader.read(tmp_path / "fleet.sqlite") == store.rows()
    assert {held.samples for held in store.rows() if held.key.bucket == 512} == {99}
    newer = ROWS.update().values(version=99)
    store.storage.execute(newer)
    result = CliRunner().invoke(main, ["cache", "export", "--storage", url, str(tmp_path / "new.sqlite")])
    assert result.exit_code == 1 and "upgrade fa2tune" in result.output and not (tmp_path / "new.sqlite").exists()
    store.storage.execute(ROWS.update().values(version=2, record='{"gpu": 3}'))
    with pytest.raises(StorageError, match=r"row .*bf16"):
        store.rows()
    with pytest.raises(ValueError, match="gain"):
        put(store, [replace(FULL, gain=float("nan"))])
    store.storage.engine.dispose()


def test_a_database_holds_slots_and_upgrades_what_an_earlier_release_wrote(url: str) -> None:
    older = Path(__file__).parents[1] / "fixtures" / "schema_2_backward.sqlite"
    with closing(sqlite3.connect(older)) as database:
        database.row_factory = sqlite3.Row
        held = [dict(each) for each in database.execute("SELECT * FROM rows")]
    store = SharedStore(Storage(parsed(url)))
    fields = ("gpu", "sm_count", "arch", "kernel", "dtype", "precision", "head_dim", "head_dim_v", "causal", "bucket")
    for each in held:  # as fa2tune filed them at schema version 2
        identity = json.dumps(
            [*({**each, "causal": bool(each["causal"])}[name] for name in (*fields, "variant", "obtained"))]
        )
        store.storage.execute(ROWS.insert().values(identity=identity, version=2, record=json.dumps(each)))
    rows = reader.read(older)
    assert store.rows() == sorted(rows, key=record.identity)
    [old] = [each for each in rows if (each.filed_as, each.key.mask) == ("split portable", "causal")]
    new = [
        replace(old, config={"bwd_dq": name, "bwd_dkdv": "pointer"}, created="2026-03-01T00:00:00Z") for name in "ab"
    ]
    for again in (new, new[1:], new):  # each time all that the slot held goes
        put(store, again)
        assert store.rows() == sorted([*(each for each in rows if each != old), *again], key=record.identity)
    store.storage.engine.dispose()


def test_leases_can_be_looked_at(url: str) -> None:
    held = Storage(parsed(url))
    one = Leases(held, "h200 132 SMs measured", "request", gpus=4)
    one.meet(["fwd 64 causal", "bwd 128 full"])
    result = CliRunner().invoke(main, ["leases", "--storage", url])
    assert result.exit_code == 0 and PASSWORD not in result.output, result.output
    for word in (one.worker, "fwd 64 causal", "bwd 128 full", "h200 132 SMs measured", "4"):
        assert word in result.output
    one.leave()
    assert "no worker" in CliRunner().invoke(main, ["leases", "--storage", url]).output
    held.engine.dispose()


def test_a_password_is_never_printed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "OUTAGE_S", 0.0)
    wrong = server.url(password="other-" + PASSWORD)
    for text in (
        wrong, f"{server.url()}x", f"mysql://u:{PASSWORD}@h/d", f"postgresql+psycopg://u:{PASSWORD}@h:port/d",
        f"{PASSWORD}", f"postgresql+psycopg://u@h?password={PASSWORD}", server.url("no_such_database"),
        f"postgresql+asyncpg://u:{PASSWORD}@h/d", f"postgresql+psycopg://u:x@{PASSWORD}@h/d",
        f"postgresql+psycopg://u:1/{PASSWORD}@h/d", f"postgresql+psycopg://u:1?{PASSWORD}@h/d",
    ):  # fmt: skip
        result = CliRunner().invoke(main, ["tune", "--gpu", "a100", "--storage", text])
        assert result.exit_code in (1, 2) and "storage: " in result.output, (text, result.output, result.exception)
        assert PASSWORD not in result.output + repr(result.exception) and "Traceback" not in result.output
    request = TuneRequest(gpu="a100", storage=server.url())
    assert PASSWORD not in repr(request) + repr(make_plan(request)) + make_plan(request).where


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    result = CliRunner().invoke(main, ["tune", "--gpu", "a100", "--storage", "postgresql+psycopg://u:pw@h/d"])
    assert result.exit_code == 2 and "pip install 'fa2tune[postgresql]'" in result.output and "pw@" not in result.output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cache": Path("c.sqlite")}, "cache: not with a PostgreSQL storage"),
        ({"studies": Path("s.sqlite")}, "studies: not with storage"),
        ({"storage": "sqlite:///:memory:"}, "storage: got sqlite:///.*memory.*, allowed are sqlite:///file and"),
        ({"storage": "sqlite://"}, "allowed are sqlite:///file"),
    ],
)
def test_storages_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, says: str
) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        make_plan(TuneRequest(**{"gpu": "a100", "storage": "postgresql+psycopg://u@h/d", **change}))


def test_an_sqlite_storage_is_the_file_with_the_studies(tmp_path: Path) -> None:
    plan = make_plan(TuneRequest(gpu="a100", storage=f"sqlite:///{tmp_path}/s.sqlite", cache=tmp_path / "c.sqlite"))
    assert plan.storage.file == tmp_path / "ledger.sqlite" and plan.where == str(tmp_path / "c.sqlite")
    assert plan.storage.url is not None and plan.storage.url.database == str(tmp_path / "s.sqlite")
