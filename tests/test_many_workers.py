"""Any number of workers on one storage: a real PostgreSQL, whole tuning runs in processes that are killed by signal 9, cut off,
stopped, and started late. Nothing is lost, nothing is tuned twice, and the rows come out whole."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from cache_rows import BARE, FULL, row
from click.testing import CliRunner
from fleet_worker import true_time
from postgres_server import PASSWORD, Server, server

from fa2tune import leases, reader, storage
from fa2tune.cli import main
from fa2tune.leases import Leases, board
from fa2tune.plan import TuneRequest, make_plan
from fa2tune.shared import TABLE, SharedStore
from fa2tune.storage import Storage, StorageError, parsed

__all__ = ["server"]  # a fixture
TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and forks of POSIX")

BUCKETS, HEAD_DIMS, MASKS = (512, 1024), (64, 128), (False, True)
KEYS = {(dim, causal, bucket) for dim in HEAD_DIMS for causal in MASKS for bucket in BUCKETS}
NUMBERS = itertools.count()


@pytest.fixture
def url(server: Server) -> str:
    """A database of this test's own."""
    return server.create(f"t{next(NUMBERS)}")


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
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
        values = {"head_dims": HEAD_DIMS, "causal": MASKS, "buckets": BUCKETS, "storage": url, **request}
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

    def report(self, name: str, seconds: float = 60.0) -> dict[str, Any]:
        until(lambda: self.ended(name), seconds)
        found: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        assert not found["error"], found
        return found

    def did(self, effort: str) -> list[tuple[str, tuple[int, bool, int], list[dict[str, Any]]]]:
        """(worker, key, contenders) of each race."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [(name, (dim, causal, bucket), c) for name, kind, dim, causal, bucket, c in lines if kind == effort]

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


def assert_whole(url: str, studies: dict[str, Counter[str]]) -> None:
    """Every key has its rows, and they name the best there is; every study has every config."""
    rows = rows_of(url)
    expected = {(*key, way) for key in KEYS for way in ("pointer", "descriptor")}
    assert {(r.key.head_dim, r.key.causal, r.key.bucket, r.variant) for r in rows} == expected and len(rows) == len(
        expected
    )
    assert len(studies) == len(KEYS) and len({len(study) for study in studies.values()}) == 1
    configs = [json.loads(text) for text in next(iter(studies.values()))]
    for found in rows:
        own = [config for config in configs if config["LOADS"] == found.variant]
        best = min(true_time(config, found.key.bucket) for config in own)
        assert len(own) == 16 and true_time(found.config, found.key.bucket) == best and found.tried == 32


def test_workers_that_join_late_and_are_killed_at_any_moment(fleet: Fleet, url: str) -> None:
    chance = random.Random(0)
    slow = {"FA2TUNE_FAKE_SECONDS": "0.04"}
    fleet.start("w0", url, slow)
    fleet.start("w1", url, slow, place="another host")
    names, before = ["w0", "w1"], {}
    held = Storage(parsed(url))
    until(lambda: fleet.did("screen"))
    for number in range(2, 7):  # five deaths; each is replaced by one that joins late
        time.sleep(chance.uniform(0.6, 1.6))
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
    who = [(name, key) for name, key, configs in fleet.did("screen") for c in configs if dumped(c) in twice]
    assert not twice, f"filed twice: {twice}, raced by {who}"
    assert sum(map(len, before.values())) > 0


def test_two_hosts_share_the_work_and_each_shows_the_whole_table(fleet: Fleet, url: str) -> None:
    slow = {"FA2TUNE_FAKE_SECONDS": "0.1"}
    for name in ("a", "b"):
        fleet.start(name, url, slow, place=f"host {name}")
    tables = [sorted(fleet.report(name)["rows"], key=repr) for name in ("a", "b")]
    assert tables[0] == tables[1] and len(tables[0]) == 2 * len(KEYS)
    proofs = fleet.did("proof")
    assert Counter(key for _, key, _ in proofs) == Counter(KEYS), "one final a key, on one host"
    assert {name for name, _, _ in proofs} == {"a", "b"}
    timed = Counter((key, dumped(c)) for _, key, configs in fleet.did("screen") for c in configs[1:])
    assert set(timed.values()) == {1}, "no candidate is timed twice"
    assert_whole(url, trials(url))
    assert board(Storage(parsed(url))) == [], "nobody is left"
    fleet.start("c", url)  # the same command, later
    again = fleet.report("c")
    assert len(fleet.did("screen")) == len([one for one in fleet.did("screen") if one[0] != "c"])
    assert sorted(again["rows"], key=repr) == tables[0]


def test_two_workers_want_one_key_and_one_gets_it(fleet: Fleet, url: str) -> None:
    little = {"head_dims": [64], "causal": [True], "buckets": [512]}
    for name in ("a", "b"):
        fleet.start(name, url, {"FA2TUNE_FAKE_SECONDS": "0.1"}, **little)
    reports = [fleet.report(name) for name in ("a", "b")]
    assert len({name for name, _, _ in fleet.did("screen")}) == 1
    tables = [sorted(report["rows"], key=repr) for report in reports]
    assert tables[0] == tables[1] and len(tables[0]) == 2
    assert sum(any("wait for other workers: fwd 64 causal" in line for line in r["lines"]) for r in reports) == 1


def test_another_driver_shares_nothing(fleet: Fleet, url: str) -> None:
    little = {"head_dims": [64], "causal": [True], "buckets": [512]}
    fleet.start("a", url, **little)
    fleet.start("b", url, {"FA2TUNE_FAKE_DRIVER": "590.1"}, **little)
    for name in ("a", "b"):
        fleet.report(name)
    assert {name for name, _, _ in fleet.did("proof")} == {"a", "b"} and len(trials(url)) == 2


def test_a_database_that_is_away_for_seconds_costs_nothing(fleet: Fleet, url: str, server: Server) -> None:
    fleet.start("a", url, {"FA2TUNE_FAKE_SECONDS": "0.05"})
    until(lambda: len(fleet.did("screen")) > 4)
    server.stop()
    time.sleep(2.0)
    server.start()
    assert len(fleet.report("a")["rows"]) == 2 * len(KEYS)
    studies = trials(url)
    assert_whole(url, studies)
    timed = Counter((key, dumped(c)) for _, key, configs in fleet.did("screen") for c in configs[1:])
    assert set(timed.values()) == {1}


def test_who_was_stopped_for_too_long_files_nothing_of_what_is_anothers(fleet: Fleet, url: str) -> None:
    little = {"head_dims": [64], "causal": [True]}
    fleet.start("a", url, {"FA2TUNE_FAKE_SECONDS": "0.1"}, place="host a", **little)
    until(lambda: len(fleet.did("screen")) > 1)
    os.kill(fleet.pids["a"], signal.SIGSTOP)
    held = Storage(parsed(url))
    held.execute(leases.WORKERS.update().values(until=held.now - 1.0))  # a minute later
    fleet.start("b", url, place="host b", **little)
    took_over = sorted(fleet.report("b")["rows"], key=repr)
    os.kill(fleet.pids["a"], signal.SIGCONT)
    report = fleet.report("a")
    assert any("taken for dead" in line for line in report["lines"])
    assert sorted(report["rows"], key=repr) == took_over, "the other one's"
    assert {name for name, _, _ in fleet.did("proof")} == {"b"}
    held.engine.dispose()


# ---- leases, on both kinds of storage


@pytest.fixture(params=["postgresql", "sqlite"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    url = parsed(request.getfixturevalue("url")) if request.param == "postgresql" else None
    found = Storage(url) if url is not None else Storage.of_studies(tmp_path / "studies.sqlite")
    yield found
    found.engine.dispose()


LOT_NAMES = [f"lot {number}" for number in range(6)]


def expire(held: Storage, one: Leases) -> None:
    held.execute(leases.WORKERS.update().where(leases.WORKERS.c.worker == one.worker).values(until=held.now - 0.1))


def on(held: Storage) -> str:
    """The beginning of a program that has the same storage."""
    url = held.url.render_as_string(hide_password=False) if held.shared and held.url else ""
    file = "" if held.shared else str(held.file)
    return (
        f"import os, sys; sys.path[:] = {sys.path!r}\n"
        "import sqlalchemy as sa\nfrom pathlib import Path\n"
        "from fa2tune.leases import Leases\nfrom fa2tune.storage import Storage\n"
        f"held = Storage(sa.make_url({url!r})) if {url!r} else Storage.of_file(Path({file!r}))\n"
    )


def test_lots_are_shared_by_gpus_and_given_back_to_who_joins(held: Storage) -> None:
    one, two = Leases(held, "campaign", "request", gpus=1), Leases(held, "campaign", "request", gpus=2)
    assert one.meet(LOT_NAMES).held == {*LOT_NAMES} and one.standing.excess == 0
    assert two.meet(LOT_NAMES).held == frozenset() and two.standing.others == 1
    assert one.meet(LOT_NAMES).excess == 4
    for lot in LOT_NAMES[2:]:
        one.give(lot)
    assert one.standing.held == {*LOT_NAMES[:2]}
    assert two.meet(LOT_NAMES).held == {*LOT_NAMES[2:]} and two.standing.excess == 0
    two.settle("lot 2")
    assert "lot 2" in one.meet(LOT_NAMES).settled and one.standing.held == {*LOT_NAMES[:2]}
    assert two.holds("lot 3") and not two.holds("lot 2") and not two.holds("lot 0")
    other = Leases(held, "campaign", "another request")
    assert "lot 2" not in other.meet(LOT_NAMES).settled, "it asks for something else"
    assert Leases(held, "another campaign", "request").meet(LOT_NAMES).held == {*LOT_NAMES}
    two.leave()
    assert {*LOT_NAMES[3:]} <= one.meet(LOT_NAMES).held | other.meet(LOT_NAMES).held


def test_an_expired_lease_goes_to_the_next_and_its_holder_notices(
    held: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_place", lambda: "host one")
    one, two = Leases(held, "campaign", "request"), Leases(held, "campaign", "request")
    one.meet(LOT_NAMES[:1])
    monkeypatch.setattr(leases, "_place", lambda: "host two")
    assert two.meet(LOT_NAMES[:1]).held == frozenset()
    expire(held, one)
    assert two.meet(LOT_NAMES[:1]).held == {"lot 0"} and two.standing.others == 0
    assert not one.holds("lot 0")
    one.settle("lot 0")  # too late: it is not its own
    standing = one.meet(LOT_NAMES[:1])
    assert standing.lost and standing.held == frozenset() and standing.settled == frozenset()
    assert two.holds("lot 0")
    expire(held, two)  # late, but nobody came
    assert not two.meet(LOT_NAMES[:1]).lost and two.holds("lot 0")


def test_who_was_killed_on_this_host_need_not_expire(held: Storage) -> None:
    code = (
        "print(sorted(Leases(held, 'campaign', 'request').meet(['lot 0']).held), flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", on(held) + code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['lot 0']" and done.returncode == -signal.SIGKILL, done.stderr
    [line] = board(held)
    assert line.lot == "lot 0" and line.left_s > 30
    assert Leases(held, "campaign", "request").meet(["lot 0"]).held == {"lot 0"}


def test_what_was_settled_is_looked_at_again_when_nobody_is_left(held: Storage) -> None:
    one = Leases(held, "campaign", "request")
    one.meet(LOT_NAMES)
    one.settle("lot 0")
    one.leave()
    assert Leases(held, "campaign", "request").meet(LOT_NAMES).held == {*LOT_NAMES}


def test_no_clock_of_a_host_counts(held: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that jumps by a day neither loses its leases nor takes another's."""
    one, two = Leases(held, "campaign", "request"), Leases(held, "campaign", "request")
    one.meet(LOT_NAMES)
    for jump in (86400.0, -86400.0):
        now = time.time()
        monkeypatch.setattr(time, "time", lambda now=now, jump=jump: now + jump)
        assert two.meet(LOT_NAMES).held == frozenset() and not one.meet(LOT_NAMES).lost
        monkeypatch.undo()
    assert one.standing.held == {*LOT_NAMES}


def test_many_meet_at_once_and_no_lot_has_two_holders(held: Storage) -> None:
    code = (
        "one = Leases(held, 'campaign', 'request')\n"
        "lots = [f'lot {n}' for n in range(12)]\n"
        "for _ in range(15):\n"
        "    back = sorted(one.meet(lots).held)[:one.standing.excess]\n"
        "    [one.give(lot) for lot in back]\n"
        "    for lot in sorted(one.standing.held)[:1]:\n"
        "        print(lot, flush=True)\n"
        "        one.settle(lot)\n"
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
        until(lambda: len(keeper.meet([f"lot {n}" for n in range(12)][:0]).settled) == 12)
    finally:
        said = [process.communicate("\n")[0].split("\n") for process in running]
    settled = [line for lines in said for line in lines if line]
    assert sorted(settled) == sorted(f"lot {n}" for n in range(12)), "each once"


# ---- rows, URLs, and what is printed


def test_the_rows_of_the_database_are_exported_as_a_file(url: str, tmp_path: Path) -> None:
    store = SharedStore(Storage(parsed(url)))
    store.put([FULL, BARE, row({"bucket": 512})])
    store.put([row({"bucket": 512}, samples=99)])
    result = CliRunner().invoke(main, ["cache", "export", "--storage", url, str(tmp_path / "fleet.sqlite"), "--twin"])
    assert result.exit_code == 0 and "3 rows" in result.output and PASSWORD not in result.output, result.output
    assert reader.read(tmp_path / "fleet.sqlite") == store.rows()
    assert {held.samples for held in store.rows() if held.key.bucket == 512} == {99}
    newer = TABLE.update().values(version=99)
    store.storage.execute(newer)
    result = CliRunner().invoke(main, ["cache", "export", "--storage", url, str(tmp_path / "new.sqlite")])
    assert result.exit_code == 1 and "upgrade fa2tune" in result.output and not (tmp_path / "new.sqlite").exists()
    store.storage.execute(TABLE.update().values(version=2, record='{"gpu": 3}'))
    with pytest.raises(StorageError, match=r"row .*bf16"):
        store.rows()
    with pytest.raises(ValueError, match="gain"):
        store.put([replace(FULL, gain=float("nan"))])
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
    assert "nobody" in CliRunner().invoke(main, ["leases", "--storage", url]).output
    held.engine.dispose()


def test_a_password_is_never_printed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "OUTAGE_S", 0.0)
    wrong = server.url(password="other-" + PASSWORD)
    for text in (
        wrong, f"{server.url()}x", f"mysql://u:{PASSWORD}@h/d", f"postgresql+psycopg://u:{PASSWORD}@h:port/d",
        f"{PASSWORD}", f"postgresql+psycopg://u@h?password={PASSWORD}", server.url("no_such_database"),
        f"postgresql+asyncpg://u:{PASSWORD}@h/d",
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
