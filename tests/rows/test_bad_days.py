"""What happens to cache files on a bad day: processes killed at every step of a write, full disks, two writers, files that
change under a reader, 64 readers at once. Nothing that was reported as saved is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from cache_rows import BARE, FULL, row

from fa2tune.rows import reader, record, store
from fa2tune.rows.reader import CacheFileError
from fa2tune.rows.store import Store

ROOT = Path(__file__).parents[2]
PATHS = (ROOT, ROOT / "tests", ROOT / "tests" / "fleet")  #: of test_upkeep.py

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals, limits and forks of POSIX"),
    pytest.mark.usefixtures("quick_starts"),
]


def python(code: str, *arguments: object, **environment: str) -> str:
    """What ``code`` prints in a process of its own, which may fork: pytest has threads."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], capture_output=True, text=True,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS)), **environment}, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


#: Runs ``work`` over and over, each time killed by signal 9 before another of the steps it takes (a file opened, renamed,
#: removed, a database connected), until it comes to its end; ``after`` looks at what each left.
KILLED_AT_EVERY_STEP = """
import os, shutil, sys
from cache_rows import BARE, FULL, row
from fa2tune.rows import reader, record, store
from fa2tune.fleet import repair
from fa2tune.fleet.finding import FAILS, Finding

def killed_at_every_step(before, work, after):
    for moment in range(1, 1000):
        before()
        pid = os.fork()
        if pid == 0:
            seen = 0
            def hook(event, arguments):
                nonlocal seen
                if event.split(".")[0] in ("open", "os", "sqlite3", "shutil", "tempfile"):
                    seen += 1
                    if seen == moment:
                        os.kill(os.getpid(), 9)
            sys.addaudithook(hook)
            work()
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        after(os.WIFEXITED(status))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            print(moment)
            return
"""


@pytest.mark.parametrize("work", ["put", "merge", "remove", "export"])
def test_killed_at_any_moment_a_file_is_the_old_one_or_the_new_one(work: str, tmp_path: Path) -> None:
    code = KILLED_AT_EVERY_STEP + textwrap.dedent("""
        from pathlib import Path
        folder, what = Path(sys.argv[1]), sys.argv[2]
        path, other, third = folder / "c.sqlite", folder / "other.sqlite", folder / "third.sqlite"
        old = [row({"bucket": bucket}) for bucket in range(1, 30)]
        store.Store(folder / "base.sqlite").put(old)
        store.Store(other).put([BARE, row({"bucket": 1}, samples=999)])
        store.Store(third).put([row({"bucket": 100})])
        works = {
            "put": (lambda: store.Store(path).put([BARE, FULL]), old + [BARE, FULL]),
            "merge": (lambda: store.Store(path).merge(other, third),
                      old[1:] + [BARE, row({"bucket": 1}, samples=999), row({"bucket": 100})]),
            "remove": (lambda: store.Store(path).remove(old[:5]), old[5:]),
            "export": (lambda: store.export(old[:5], path), old[:5]),
        }
        work, new = works[what]
        states = [sorted(rows, key=record.identity) for rows in (old, new)]

        def after(ended):
            rows = reader.read(path)
            assert rows in states
            assert rows == states[1] or not ended
            store.Store(path).put([row({"bucket": 7777})])  # no lock is left, and no rubbish but an export's own
            if what != "export":
                assert not list(folder.glob(".c.sqlite.*.tmp"))

        killed_at_every_step(lambda: shutil.copy(folder / "base.sqlite", path), work, after)
    """)
    assert int(python(code, tmp_path, work)) > 10, "steps"


def test_killed_at_any_moment_of_a_repair_no_row_is_lost(tmp_path: Path) -> None:
    code = KILLED_AT_EVERY_STEP + textwrap.dedent("""
        from pathlib import Path
        from dataclasses import replace
        path = Path(sys.argv[1]) / "c.sqlite"
        good, wrong = row({"bucket": 512}), row({"bucket": 1024})
        fresh = replace(good, created="2026-03-01T00:00:00Z")

        def before():
            for file in (path, repair.withdrawn_path(path)):
                file.unlink(missing_ok=True)
            store.Store(path).put([good, wrong])

        def work():
            refresher = repair.Refresher(path)
            refresher(Finding(good, "holds", fresh=fresh))
            refresher.flush()
            repair._settle(store.Store(path), [Finding(wrong, FAILS, "wrong", dangerous=True)], [], "", repair.Repaired())

        def after(ended):
            rows, gone = reader.read(path), repair.withdrawn_path(path)
            withdrawn = reader.read(gone) if gone.exists() else []
            assert good in rows or fresh in rows
            assert wrong in rows or wrong in withdrawn
            if ended:
                assert (rows, withdrawn) == ([fresh], [wrong])

        killed_at_every_step(before, work, after)
    """)
    assert int(python(code, tmp_path)) > 10, "steps"


def test_a_verify_that_repairs_may_be_killed_and_goes_on_from_there(tmp_path: Path) -> None:
    """The whole of it, child processes and searches included, killed at some of its steps."""
    code = """
        import json, os, sys
        from dataclasses import replace
        from pathlib import Path
        import torch
        from test_upkeep import GPU, FUNCTIONS, KEY, config, made
        from fa2tune.compiling import fingerprint, registry
        from fa2tune.fleet import finding, repair
        from fa2tune.tuning.request import plan
        from fa2tune.tuning.run import tuner
        from fa2tune.rows import reader, record
        from fa2tune.tuning.request.watcher import Watcher
        from fa2tune.tuning.request.plan import Target
        from fa2tune.rows.store import Store
        from fa2tune.fleet.upkeep import Verification

        os.environ["FA2TUNE_FAKE_FAULTS"] = json.dumps(
            [["slow at", {"bucket": 1024}, 1.5], ["wrong", {"BLOCK_N": 16}, 1]]
        )
        plan.resolve_target = lambda name: Target(GPU.gpu, "measured", GPU.gpu)
        torch.cuda.get_device_name = lambda: GPU.name
        fingerprint.driver_version = lambda: GPU.driver
        registry.variants_of = lambda kernel: (registry.portable_of(kernel),)  # less to search
        reader.shipped_paths = list
        folder = Path(sys.argv[1])

        def run(path):
            rows = [row for row in reader.read(path) if finding.toolchain_here(GPU).stale(row)]
            look = Verification(rows, reader.read(path), GPU, FUNCTIONS, 1)
            look.found = repair.Refresher(path)
            repair.repair(path, look.go(), look, lambda r: tuner.tune(r, Watcher(), FUNCTIONS), trials=2, workers=1)

        def start(name):
            path = folder / name / "cache.sqlite"
            path.parent.mkdir()
            Store(path).put(old)
            return path

        def killed_at(path, moment):
            pid = os.fork()
            if pid == 0:
                seen, me = 0, os.getpid()
                def hook(event, arguments):
                    nonlocal seen
                    mine = os.getpid() == me and event != "os.listdir"  # that goes by the clock: children's memory
                    if mine and event.split(".")[0] in ("os", "sqlite3", "shutil"):
                        seen += 1
                        if seen == moment:
                            os.kill(me, 9)
                sys.addaudithook(hook)
                run(path)
                (folder / "steps").write_text(str(seen))
                os._exit(0)
            return os.waitpid(pid, 0)[1]

        old = [made(replace(KEY, bucket=512), triton="3.5.1"), made(replace(KEY, bucket=1024), triton="3.5.1"),
               made(replace(KEY, bucket=2048), triton="3.5.1", config=config(BLOCK_N=16))]
        identities = {record.slot(row) for row in old}
        assert killed_at(start("whole"), 0) == 0
        steps = int((folder / "steps").read_text())
        for share in (0.3, 0.7):
            path = start(str(share))
            assert killed_at(path, int(share * steps)) == 9
            gone = repair.withdrawn_path(path)
            left = {record.slot(row) for file in (path, gone) if file.exists() for row in reader.read(file)}
            assert identities <= left
        assert killed_at(path, 0) == 0
        here = finding.toolchain_here(GPU)
        stale = [(row.key.bucket, row.filed_as, here.stale(row)) for row in reader.read(path) if here.stale(row)]
        assert not stale, stale
        assert {row.key.bucket for row in reader.read(path)} == {512, 1024, 2048}
        print("mended after", steps)
    """
    log = {"FA2TUNE_FAKE_LOG": str(tmp_path / "log")}
    assert "mended" in python(code, tmp_path, **log)


def test_a_full_disk_costs_the_write_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    Store(path).put([FULL])
    held = path.read_bytes()
    code = """
        import resource, signal, sys
        from cache_rows import BARE, row
        from fa2tune.rows import store
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sys.dont_write_bytecode = True  # of modules that are first imported here half would be written, and stay
        for room in (0, 1, 4096, 10000, 30000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            for work in (
                lambda cache: cache.put([row({"bucket": bucket}) for bucket in range(1, 200)]),
                lambda cache: store.write_text(sys.argv[1], "x" * 100_000),
            ):
                try:
                    work(store.Store(sys.argv[1]))
                except OSError as error:
                    print(error)
                else:
                    raise AssertionError("no error")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        store.Store(sys.argv[1]).put([BARE])
    """
    said = python(code, path).splitlines()
    assert len(said) == 10
    assert all(str(path) in line for line in said), said
    assert reader.read(path) == [BARE, FULL]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".c.sqlite.lock", ".c.sqlite.queue", "c.sqlite"]
    assert held != path.read_bytes()


def test_a_full_disk_under_the_studies_names_their_file(tmp_path: Path) -> None:
    """Written by the process that stores trials, and at once; the file with leases and failures has room."""
    code = """
        import resource, signal, sys
        from pathlib import Path
        import optuna
        from fa2tune.sharing.study_writer import StudyWriter
        from fa2tune.sharing.storage import Storage, StorageError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sys.dont_write_bytecode = True  # of modules that are first imported here half would be written, and stay
        path = Path(sys.argv[1])
        writer = StudyWriter(Storage.of_studies(path))
        writer.now(optuna.create_study, storage=writer.optuna, study_name="s")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, resource.RLIM_INFINITY))
        trial = optuna.trial.create_trial(value=1.0, user_attrs={"a": "x" * 1000})
        works = (
            lambda: [writer.add("s", trial) for _ in range(200)],
            lambda: writer.keep("s", "large", "x" * 100_000),
            lambda: [writer.now(optuna.create_study, storage=writer.optuna, study_name=f"s{n}{'y' * 400}") for n in range(999)],
        )
        for work in works:
            try:
                work()
                writer.flush()
            except StorageError as error:
                print(error)
            else:
                raise AssertionError("no error")
    """
    studies = tmp_path / "studies.sqlite"
    said = python(code, studies).splitlines()
    assert len(said) == 3
    for line in said:
        assert line.startswith(f"storage: {studies}: ") and line.endswith(("disk I/O error", "disk is full")), line
        assert "ledger.sqlite" not in line and "move the file away" not in line


def test_what_dead_writers_left_is_swept_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    left = tmp_path / f".c.sqlite.fa2tune-123-456{store.HALF_DONE}"
    others = [
        tmp_path / f".d.sqlite.fa2tune-123-456{store.HALF_DONE}",
        tmp_path / f".c.sqlite.123-456{store.HALF_DONE}",
    ]
    for file in (left, *others):
        file.write_text("half")
    Store(path).put([FULL])
    assert not left.exists()
    assert all(other.exists() for other in others), "another file's, another program's"


def test_what_killed_exports_left_is_removed_by_a_later_one_in_the_folder(tmp_path: Path) -> None:
    old, young = tmp_path / ".a.sqlite.fa2tune-123-456.tmp", tmp_path / ".b.json.fa2tune-123-456.tmp"
    others = [tmp_path / ".notes.tmp", tmp_path / "b.fa2tune-123-456.tmp", tmp_path / ".c.sqlite.lock"]
    others.append(tmp_path / ".a.sqlite.123-456.tmp")  # another program may call its own files so
    for file in (old, young, *others):
        file.write_text("half")
    for file in (old, *others):
        os.utime(file, (1e9, 1e9))
    store.export([FULL], tmp_path / "x.sqlite")
    assert sorted(tmp_path.iterdir()) == sorted([young, *others, tmp_path / "x.sqlite"])


def test_a_lock_file_of_rubbish_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / ".c.sqlite.lock").write_bytes(b"rubbish" * 1000)
    with pytest.raises(OSError, match=r"\.c\.sqlite\.lock"):
        Store(tmp_path / "c.sqlite").put([FULL])


def test_a_folder_that_cannot_be_synced_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def no_folders(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(22, "Invalid argument")
        sync(fd)

    monkeypatch.setattr(os, "fsync", no_folders)
    Store(tmp_path / "c.sqlite").put([FULL])
    assert reader.read(tmp_path / "c.sqlite") == [FULL]


def test_a_file_of_a_later_schema_or_of_something_else_is_never_written_over(tmp_path: Path) -> None:
    path, mine = tmp_path / "c.sqlite", tmp_path / "mine.sqlite"
    Store(mine).put([FULL])
    Store(path).put([BARE])
    later = bytearray(path.read_bytes())
    later[60:64] = (record.SCHEMA_VERSION + 1).to_bytes(4, "big")
    path.write_bytes(later)
    for work in (lambda: Store(path), lambda: Store(mine).merge(path)):
        with pytest.raises(CacheFileError, match="upgrade fa2tune"):
            work()
    assert path.read_bytes() == bytes(later)
    assert reader.read(mine) == [FULL]


def test_a_file_spoilt_between_two_writes_stops_the_second(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    cache = Store(path)
    cache.put([FULL])
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CacheFileError):
        cache.put([BARE])
    assert path.stat().st_size == 5000, "it can still be rescued"


# --- files that change under a reader


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.sqlite"
    Store(path).put([FULL])
    read, looks = reader._read, []

    def stale_handle(where: Path) -> list[object]:
        looks.append(where)
        if len(looks) == 1:  # as a network disk does with a file that was removed elsewhere
            Store(path).put([BARE])
            raise CacheFileError(path, "disk I/O error")
        return read(where)

    monkeypatch.setattr(reader, "_read", stale_handle)
    assert reader.read(path) == [BARE, FULL]
    assert len(looks) > 1


def test_a_file_that_is_written_into_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.sqlite"
    Store(path).put([FULL])
    read, looks = reader._read, []

    def overwritten(where: Path) -> list[object]:
        looks.append(where)
        found = read(where)
        os.utime(path, ns=(len(looks), len(looks)))
        return found

    monkeypatch.setattr(reader, "_read", overwritten)
    monkeypatch.setattr(reader, "PAUSE_S", 0.0)
    with pytest.raises(CacheFileError, match="written into while it was read"):
        reader.read(path)
    assert len(looks) == reader.ATTEMPTS


def test_odd_surroundings_skip_a_layer_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = tmp_path / "loop.sqlite"
    loop.symlink_to(loop)
    Store(tmp_path / "good.sqlite").put([FULL])
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    names = ["~no-such-user/x.sqlite", loop, "relative.sqlite", "/dev/zero", "/proc/self/mem", tmp_path, "x" * 5000]
    monkeypatch.setenv("FA2TUNE_CACHE", os.pathsep.join(map(str, [*names, tmp_path / "good.sqlite"])))
    monkeypatch.setattr(reader, "shipped_paths", list)
    assert [layer.path.name for layer in reader.layers()] == ["good.sqlite"]
    assert len(caplog.records) == len(names)


def test_64_processes_start_at_once_on_a_file_that_is_being_replaced(tmp_path: Path) -> None:
    code = """
        import os, sys
        from cache_rows import row
        from fa2tune.rows import reader, store
        path = sys.argv[1]
        old = [row({"bucket": bucket}) for bucket in range(1, 31)]
        store.Store(path).put(old)
        os.environ["FA2TUNE_CACHE"] = path
        reader.shipped_paths = list
        gate, start = os.pipe()
        children = []
        for _ in range(64):
            pid = os.fork()
            if pid == 0:
                os.close(start)
                os.read(gate, 1)  # until it closes
                [fleet] = [layer for layer in reader.layers() if layer.name == "fleet"]
                os._exit(0 if len(fleet.rows) in range(30, 46) else 1)
            children.append(pid)
        os.close(gate)
        os.close(start)
        for number in range(15):
            store.Store(path).put([row({"bucket": 1000 + number})])
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 64
        print("all")
    """
    assert python(code, tmp_path / "fleet.sqlite") == "all\n"


def test_a_node_local_copy_on_a_read_only_folder_serves_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path / "shared.sqlite").put([FULL, BARE])
    node = tmp_path / "node"
    node.mkdir()
    (node / "copy.sqlite").write_bytes((tmp_path / "shared.sqlite").read_bytes())
    (node / "copy.sqlite").chmod(0o444)
    node.chmod(0o555)
    try:
        assert reader.read(node / "copy.sqlite") == reader.read(tmp_path / "shared.sqlite")
        if os.geteuid():  # root may write anywhere
            with pytest.raises(OSError, match="write"):
                Store(node / "copy.sqlite").put([FULL])
        assert reader.read(node / "copy.sqlite") == [BARE, FULL]
    finally:
        node.chmod(0o755)


# --- two writers


def test_threads_share_a_file(tmp_path: Path) -> None:
    cache = Store(tmp_path / "c.sqlite")
    errors = []

    def work(number: int) -> None:
        try:
            for turn in range(5):
                cache.put([row({"bucket": 1 + 10 * number + turn})])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(cache.rows()) == 20


def test_two_tuners_on_one_file_lose_nothing(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        import torch
        from fa2tune import gpus
        from fa2tune.compiling import registry
        from fa2tune.tuning.request import plan
        from fa2tune.tuning.run import tuner
        from fa2tune.rows import reader
        from fa2tune.tuning.request.watcher import WorkerFunctions
        from fa2tune.tuning.request.plan import Target, TuneRequest
        h200 = gpus.named("h200")
        plan.resolve_target = lambda name: Target(h200, "measured", h200)
        torch.cuda.get_device_name = lambda: "NVIDIA H200"
        registry.variants_of = lambda kernel: (registry.portable_of(kernel),)  # less to search
        reader.shipped_paths = list
        functions = WorkerFunctions(
            "tuner_fakes:compile_check", "tuner_fakes:race",
            "tuner_fakes:check", "tuner_fakes:check_backward",
        )
        dims = tuple(map(int, sys.argv[2].split(",")))
        tuner.tune(TuneRequest(head_dims=dims, trials=3, buckets=(512, 4096), dtypes=("bf16",), masks=("causal",), pass_="fwd",
                               workers=1, cache=Path(sys.argv[1])), functions=functions)
    """
    path = tmp_path / "cache.sqlite"
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "FA2TUNE_FAKE_LOG": str(tmp_path / "log")
    }  # fmt: skip
    tuners = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(path), dim], cwd=ROOT, env=environment,
                         stderr=subprocess.PIPE, text=True)
        for dim in ("64,128", "128")
    ]  # fmt: skip
    for process in tuners:
        _, said = process.communicate(timeout=900)
        assert process.returncode == 0, said[-3000:]
    rows = reader.read(path)
    assert {(r.key.head_dim, r.key.bucket) for r in rows} == {
        (dim, bucket) for dim in (64, 128) for bucket in (512, 4096)
    }
    assert json.loads(record.to_json(rows))["rows"]
