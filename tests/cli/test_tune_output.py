"""A tune whose output cannot be written, or that is stopped, keeps what was done and says so in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fa2tune.rows import reader

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="pipes and signals of POSIX"),
    pytest.mark.usefixtures("quick_starts"),
]

#: The command with fake functions: no compiler. The name of an A100 means a prediction wherever this runs.
COMMAND = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
from fa2tune import gpus
from fa2tune.cli import main
from fa2tune.compiling import registry
from fa2tune.rows import reader
from fa2tune.rows.row import PREDICTED
from fa2tune.tuning.request import plan
from fa2tune.tuning.request import watcher
from fa2tune.tuning.select import log
functions = watcher.WorkerFunctions(
    "tuner_fakes:compile_check", "tuner_fakes:race",
    "tuner_fakes:check", "tuner_fakes:check_backward",
)
watcher.WorkerFunctions = lambda: functions
plan.resolve_target = lambda name: plan.Target(gpus.named("a100"), PREDICTED, None)
registry.variants_of = lambda kernel: (registry.portable_of(kernel),)
reader.shipped_paths = list
tell = log.Log._tell
def told_at_leisure(*of):  # or all is done before a busy host lets the test look
    tell(*of)
    time.sleep(float(os.environ.get("PAUSE_AFTER_A_ROW", "0")))
log.Log._tell = told_at_leisure
main(sys.argv[1:], prog_name="fa2tune")
"""
WHOLE = {(dtype, bucket) for dtype in ("bf16", "fp16") for bucket in (512, 1024)}


class Tune:
    def __init__(self, folder: Path) -> None:
        self.cache, self.command = folder / "c.sqlite", folder / "command.py"
        self.command.write_text(COMMAND)
        self.environment = {
            **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "XDG_CACHE_HOME": str(folder),
            "FA2TUNE_FAKE_LOG": str(folder / "log"), "PYTHONUNBUFFERED": "",
        }  # fmt: skip

    def start(self, *more: str, stdout: Any = subprocess.PIPE, pause: float = 0.0) -> subprocess.Popen[str]:
        arguments = ["tune", "--gpu", "a100", "--headdim", "64", "--pass", "fwd", "--causal", "--seqlen", "512,1024",
                     "--trials", "4", "--workers", "1", "--cache", str(self.cache), *more]  # fmt: skip
        return subprocess.Popen(
            [sys.executable, str(self.command), *arguments], cwd=ROOT, text=True, stdout=stdout,
            stderr=subprocess.PIPE, process_group=0, env={**self.environment, "PAUSE_AFTER_A_ROW": str(pause)},
        )  # fmt: skip

    def stopped(self, process: subprocess.Popen[str]) -> str:
        """Its one line on standard error."""
        assert process.stderr is not None
        said = process.stderr.read()
        process.wait(300)
        assert said.count("\n") == 1 and "Traceback" not in said, said
        return said

    def rows(self) -> set[tuple[str, int]]:
        return {(row.key.dtype, row.key.bucket) for row in reader.read(self.cache)} if self.cache.exists() else set()

    def goes_on(self) -> None:
        """The same command ends with every row, and lost no row that was there."""
        before = self.rows()
        done = self.start()
        output, said = done.communicate(timeout=300)
        assert done.returncode == 0, said
        assert before <= self.rows() == WHOLE
        assert output.count("(kept)") >= len(before)


@pytest.fixture
def tune(tmp_path: Path) -> Tune:
    return Tune(tmp_path)


def line(process: subprocess.Popen[str], wanted: Callable[[str], bool]) -> str:
    assert process.stdout is not None
    return next(text for text in process.stdout if wanted(text))


def is_row(text: str) -> bool:
    return "TFLOP/s" in text


@pytest.mark.parametrize("upto", [lambda text: True, is_row], ids=["first line", "first row"])
def test_a_reader_that_goes_away_costs_nothing_that_was_done(tune: Tune, upto: Callable[[str], bool]) -> None:
    process = tune.start(pause=1.0)
    seen = line(process, upto)
    assert process.stdout is not None
    process.stdout.close()
    said = tune.stopped(process)
    assert process.returncode == 141
    assert "the reader of the output is gone" in said and str(tune.cache) in said and "goes on from there" in said
    if is_row(seen):
        assert tune.rows()
    tune.goes_on()


def test_output_onto_a_full_disk_costs_nothing_that_was_done(tune: Tune) -> None:
    with open("/dev/full", "w") as full:
        process = tune.start(stdout=full)
        said = tune.stopped(process)
    assert process.returncode == 1
    assert said.startswith("fa2tune: standard output: No space left on device. ") and "goes on from there" in said
    tune.goes_on()


def test_ctrl_c_is_one_line_and_status_130(tune: Tune) -> None:
    process = tune.start(pause=20.0)
    line(process, is_row)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: child processes get it, too
    said = tune.stopped(process)
    assert process.returncode == 130
    assert said.startswith("fa2tune: interrupted. ") and str(tune.cache) in said and "goes on from there" in said
    assert tune.rows()
    tune.goes_on()


def test_a_record_on_a_full_disk_is_named(tune: Tune) -> None:
    process = tune.start("--record", "/dev/full")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1 and "Traceback" not in said
    assert said.startswith("Error: /dev/full: No space left on device. What was done is kept"), said
    tune.goes_on()


def test_a_reader_that_goes_away_when_all_is_done_is_told_that_it_is(tune: Tune) -> None:
    tune.goes_on()
    process = tune.start()
    assert process.stdout is not None
    end = time.monotonic() + 120
    text = ""
    while "candidates compiled" not in text and time.monotonic() < end:
        text = process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.wait(300) in (0, 141) and "Traceback" not in said and tune.rows() == WHOLE
