"""Writers of one SQLite file come to their turn in the order in which they asked, whatever becomes of one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cache_rows import row

from fa2tune.rows import reader, turns
from fa2tune.rows.store import Store
from fa2tune.rows.turns import in_turn

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="record locks of POSIX"),
    pytest.mark.usefixtures("quick_starts"),
]

#: How each writer writes once; all of them start together and go on until the time is over.
WORKS = {
    "cache": "Store(path).put([row({'bucket': 1000 + number})])",
    "leases": "storage.execute(TABLE.insert().values(number=number))",
    "studies": "study_writer.write(storage.url, storage.file, [('s', 'a', 'x' * 1000)])",
}
WRITER = """
import json, sys, time
from pathlib import Path
import optuna, sqlalchemy as sa
from cache_rows import row
from fa2tune.measuring import worker
from fa2tune.rows.store import Store
from fa2tune.sharing import study_writer
from fa2tune.sharing.storage import Storage
optuna.logging.set_verbosity(optuna.logging.ERROR)
worker.report = lambda done: None
path, number, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
storage = Storage.of_studies(path.with_name("studies.sqlite"))
TABLE = sa.Table("turns", sa.MetaData(), sa.Column("number", sa.INTEGER))
storage.create(TABLE)
study_writer.StudyWriter(storage).study("s")
WORK
print("ready", flush=True)
sys.stdin.readline()
turns = [time.monotonic()]
while time.monotonic() < turns[0] + seconds:
    WORK
    turns.append(time.monotonic())
print(json.dumps(turns))
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def says(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stdout is not None and process.stdout.readline() == f"{wanted}\n"


@pytest.mark.parametrize("kind", WORKS)
def test_four_busy_writers_have_equal_turns(tmp_path: Path, kind: str) -> None:
    """As SQLite lets them compete, one has 83 turns in 15 s and three have one. Between two turns of a writer, each other
    one has one, or a few where the host does not run it at once, and now and then more. The bound in seconds is wide for the
    same reason."""
    path = tmp_path / "c.sqlite"
    Store(path).put([row({"bucket": bucket}) for bucket in range(1, 100)])
    writers = [python(WRITER.replace("WORK", WORKS[kind]), path, number, 6.0) for number in range(4)]
    for writer in writers:
        says(writer, "ready")
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    found = [json.loads(writer.communicate(timeout=120)[0]) for writer in writers]
    counts = [len(ends) - 1 for ends in found]
    assert min(counts) >= 3 and max(counts) <= 2 * min(counts), counts
    for ends in found:
        between = []
        for before, after in pairwise(ends):
            assert after - before < 10.0
            between.append(max(sum(before < end < after for end in other[1:]) for other in found if other is not ends))
        assert sum(most > 5 for most in between) <= 0.02 * len(between), (sorted(between)[-5:], counts)


#: Takes a place in the queue of argv[1], says when it asks and when its turn has come, and keeps it until a line comes.
ONE = """
import sys
from fa2tune.rows.turns import in_turn
print("asks", flush=True)
with in_turn(sys.argv[1], 60.0):
    print("has it", flush=True)
    sys.stdin.readline()
"""


def asks(path: Path) -> subprocess.Popen[str]:
    """It stands in the queue when this returns."""
    before = drawn(path)
    process = python(ONE, path)
    says(process, "asks")
    end = time.monotonic() + 60
    while drawn(path) == before and time.monotonic() < end:
        time.sleep(0.01)
    assert drawn(path) == before + 1
    return process


def drawn(path: Path) -> int:
    queue = path.with_name(f".{path.name}.queue")
    return int.from_bytes(queue.read_bytes()[:8], "little") if queue.exists() else 0


def ends(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.communicate("\n", timeout=60)
        assert process.returncode == 0


def test_the_order_is_that_of_asking(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    waiting = [asks(path) for _ in range(4)]
    for process in waiting:
        says(process, "has it")
        ends(process)


@pytest.mark.parametrize("dies", [0, 1, 2], ids=["the one whose turn it is", "the next one", "one in the midst"])
def test_a_process_that_is_killed_does_not_hold_up_the_others(tmp_path: Path, dies: int) -> None:
    path = tmp_path / "c.sqlite"
    waiting = [asks(path) for _ in range(4)]
    says(waiting[0], "has it")
    dead = waiting.pop(dies)
    dead.kill()
    dead.wait()
    begun = time.monotonic()
    for process in waiting:
        if process is not waiting[0] or dies == 0:
            says(process, "has it")
        ends(process)
    assert time.monotonic() < begun + turns.STALLED_S


def test_those_behind_one_that_is_stopped_go_on_after_a_while(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    first, stopped = asks(path), asks(path)
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        says(first, "has it")
        ends(first)
        begun = time.monotonic()
        last = asks(path)
        says(last, "has it")
        assert time.monotonic() < begun + 2 * turns.STALLED_S + 3
        ends(last)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    says(stopped, "has it")
    ends(stopped)


def test_threads_queue_as_well(tmp_path: Path) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(5):
            with in_turn(tmp_path / "c.sqlite", 60.0):
                with guard:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.002)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


@pytest.mark.parametrize("broken", ["garbage", "a folder", "no locks", "no module"])
def test_where_there_can_be_no_queue_writers_write_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "c.sqlite"
    queue = tmp_path / ".c.sqlite.queue"

    def refuses(*arguments: Any) -> None:
        raise OSError(37, "No locks available")

    if broken == "garbage":
        queue.write_bytes(b"\xff" * 999)
    elif broken == "a folder":
        queue.mkdir()
    elif broken == "no locks":
        monkeypatch.setattr(turns.fcntl, "lockf", refuses)
    else:
        monkeypatch.setattr(turns, "fcntl", None)
    for number in range(3):
        Store(path).put([row({"bucket": 1000 + number})])
    assert {found.key.bucket for found in reader.read(path)} == {1000, 1001, 1002}


def test_a_place_that_does_not_come_in_time_is_no_error_of_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    holder = asks(path)
    says(holder, "has it")
    begun = time.monotonic()
    with in_turn(path, 0.2) as left_s:
        assert left_s == 0.0 and 0.2 <= time.monotonic() - begun < 2.0
    ends(holder)
