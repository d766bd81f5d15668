"""Commands whose output cannot be written, or that the user stops: one line, a status, no traceback. test_tune_output.py has
the same for `tune`."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fa2tune import __version__
from fa2tune.cli import _output

ROOT = Path(__file__).parents[2]
FULL_DISK = Path("/dev/full")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes and signals of POSIX")

#: Runs a command after ``prelude``, as the script ``fa2tune`` does.
RUN = """
import os, signal, sys
{prelude}
from fa2tune.__main__ import main
main()
"""


def run(
    *arguments: object, prelude: str = "", unbuffered: bool = False, **more: Any
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **more.pop("env", {}), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    environment.pop("PYTHONUNBUFFERED", None)
    if unbuffered:
        environment["PYTHONUNBUFFERED"] = "1"
    return subprocess.run(
        [sys.executable, "-c", RUN.format(prelude=prelude), *map(str, arguments)],
        text=True, stderr=subprocess.PIPE, cwd=ROOT, env=environment, timeout=300, **more,
    )  # fmt: skip


def run_without_reader(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """As ``run``, with a pipe for output whose reader has gone away."""
    theirs, ours = os.pipe()
    os.close(theirs)
    try:
        return run(*arguments, stdout=ours, **more)
    finally:
        os.close(ours)


COMMANDS = ["--help", "gpus", "cache list", "cache show", "cache diff cache/h100.sqlite cache/h200.sqlite"]


@pytest.mark.parametrize("unbuffered", [False, True], ids=["", "unbuffered"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_is_gone_ends_a_command_quietly(command: str, unbuffered: bool) -> None:
    done = run_without_reader(*command.split(), unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not FULL_DISK.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", COMMANDS)
def test_output_to_a_full_disk_is_one_line_and_status_1(command: str) -> None:
    with FULL_DISK.open("w") as full:
        done = run(*command.split(), stdout=full)
    assert (done.returncode, done.stderr) == (1, "fa2tune: standard output: No space left on device\n")


@pytest.mark.parametrize("unbuffered", [False, True], ids=["", "unbuffered"])
def test_a_reader_that_goes_away_half_way_is_seen(unbuffered: bool) -> None:
    """More than a pipe holds, in one write: with PYTHONUNBUFFERED, Python forgets what did not go through."""
    theirs, ours = os.pipe()
    reads = subprocess.Popen(["head", "-c", "1"], stdin=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    arguments = ["cache", "export", "--format", "json", "--cache", "cache/h200.sqlite"]
    done = run(*arguments, stdout=ours, unbuffered=unbuffered)
    os.close(ours)
    reads.wait()
    assert (done.returncode, done.stderr) == (141, "")
    whole = run(*arguments, stdout=subprocess.PIPE, unbuffered=unbuffered)
    assert whole.returncode == 0 and whole.stdout == (ROOT / "cache" / "h200.json").read_text()


def test_no_output_at_all_is_no_error() -> None:
    done = run("gpus", stdout=None, prelude="os.close(1); sys.stdout = None")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("gpus", "fa2tune.cli"), ("gpus", "click"), ("gpus", "fa2tune.text"),
        ("tune --gpu a100", "fa2tune.cli.tune"), ("tune --gpu a100", "torch"), ("tune --gpu a100", "optuna"),
        ("explain --gpu h200", "triton"), ("cache list", "fa2tune.cli.cache.look"), ("report", "fa2tune.report.contents"),
    ],
)  # fmt: skip
def test_ctrl_c_while_a_module_is_imported(command: str, module: str, tmp_path: Path) -> None:
    prelude = f"""
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, CtrlC())
"""
    done = run(*command.split(), prelude=prelude, stdout=subprocess.PIPE, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert (done.returncode, done.stderr) == (130, "fa2tune: interrupted\n")


def test_the_module_and_the_script_start_in_the_same_place() -> None:
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert names == {"fa2tune": "fa2tune.__main__:main"}
    done = subprocess.run([sys.executable, "-m", "fa2tune", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"fa2tune {__version__}\n", "")


class Broken(io.StringIO):
    """A stream that takes ``most`` characters."""

    def __init__(self, most: int = 0) -> None:
        super().__init__()
        self.left = most

    def write(self, text: str) -> int:
        if len(text) > self.left:
            raise OSError(28, "No space left on device")
        self.left -= len(text)
        return super().write(text)


def test_output_fails_once_and_is_dropped_from_then_on() -> None:
    guard = _output.Guarded(stream := Broken(5))
    guard.write("12345")
    with pytest.raises(_output.OutputLost):
        guard.write("6")
    guard.write("7")
    guard.flush()
    assert stream.getvalue() == "12345" and guard.error is not None and guard.error.errno == 28


def test_output_that_fails_in_a_thread_stops_the_main_one() -> None:
    """Seen by a handler of its own: a KeyboardInterrupt that strikes within a finalizer is lost."""
    guard, seen = _output.Guarded(Broken()), threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.set())
    try:
        thread = threading.Thread(target=guard.write, args=("x",))
        thread.start()
        thread.join()
        assert seen.wait(10)
    finally:
        signal.signal(signal.SIGINT, before)
    assert guard.error is not None
