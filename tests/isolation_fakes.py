"""What child processes run in tests/measuring/test_isolation.py: jobs that go wrong in every way, and the functions of
``tuner_fakes`` with some candidates poisoned.

``FA2TUNE_FAULTS`` names a JSON file: {"faults": [[config, fault]...], "log": path}.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import fake_log
import tuner_fakes

from fa2tune.measuring import worker
from fa2tune.tuning.search.compile_check import CompileResult

COMPILING = ("abort", "segfault", "stall", "eat", "refuse")
LAUNCHING = ("illegal", "assert", "hang", "crash", "no_room", "late_hang")
STATUS = {
    "abort": "crash", "segfault": "crash", "stall": "timeout", "eat": "out_of_memory", "refuse": "compile_error",
    "illegal": "illegal_access", "assert": "device_assert", "hang": "timeout", "crash": "crash",
    "no_room": "launch_error", "late_hang": "timeout", "check_hang": "timeout",
}  # fmt: skip
QUICK = ("abort", "segfault", "refuse", "illegal", "crash", "no_room")  #: those that need no deadline to end
SECONDS = 1.0  #: until a launch counts as hung here


# ---- jobs


def pid():
    return os.getpid()


def abort():
    print(
        "python: Layout.cpp:123: void convert(): Assertion `order.size() == rank' failed.", file=sys.stderr, flush=True
    )
    print("Stack dump:\n0. Program arguments: python", file=sys.stderr, flush=True)
    os.abort()


def segfault():
    ctypes.string_at(0)


def spin():
    while True:
        pass


def stall():
    """As good as ``spin`` for a waiting process, and the cores are free."""
    time.sleep(3600)


def eat(most=2 << 30):
    """16 MiB at a time, each page touched, and then it holds them."""
    held = []
    while len(held) << 24 < most:
        held.append(b"x" * (1 << 24))
        time.sleep(0.02)
    stall()


def spawn(kind, path, seconds=None):
    """As ptxas would: a process of its own, which stalls or eats; its pid is left at ``path``. ``seconds`` are what it is
    given from then on."""
    code = f"import isolation_fakes as f; f.{kind}()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    )
    with open(path + ".tmp", "w") as file:
        file.write(f"{process.pid} {os.getpid()}")
    os.rename(path + ".tmp", path)
    worker.report("started", seconds)
    process.wait()


def broken(what):
    """As a CUDA error that leaves no usable context."""
    print(f"kernel.py:7: block [0,0,0]: Assertion `in bounds' failed: {what}", file=sys.stderr, flush=True)
    worker._cuda_is_broken = lambda: True
    raise RuntimeError(f"CUDA error: {what}")


def patient(seconds, sleep):
    worker.report("launch", seconds)
    time.sleep(sleep)
    return "done"


def unspeakable():
    return lambda: None


def leave():
    sys.exit(3)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


# ---- functions


def _table():
    with open(os.environ["FA2TUNE_FAULTS"]) as file:
        return json.load(file)


def binary_of(config):
    return {name: value for name, value in config.items() if name != "HEADS_PER_WAVE"}


def fault_of(config, table=None):
    """How a config goes wrong, or None. What goes wrong in the compiler goes wrong for all that share the binary."""
    for poisoned, fault in (table or _table())["faults"]:
        if poisoned == config or (fault in COMPILING and binary_of(poisoned) == binary_of(config)):
            return fault
    return None


def _note(kind, config):
    fake_log.write(_table()["log"], kind, config)


def compile_check(kernel, spec, config, gpu, problems):
    fault = fault_of(config)
    if fault in COMPILING:
        _note(fault, config)
        if fault == "refuse":
            return CompileResult("compile_error", "CompilationError: no")
        {"abort": abort, "segfault": segfault, "stall": stall, "eat": eat}[fault]()
    return tuner_fakes.compile_check(kernel, spec, config, gpu, problems)


def race(key, contenders, effort, *more):
    missing = {}
    for index, config in enumerate(contenders):
        fault = fault_of(config)
        if fault not in LAUNCHING:
            continue
        _note(fault, config)
        hangs = fault in ("hang", "late_hang")
        worker.report(-1 if fault == "late_hang" else index, SECONDS if hangs else None)
        if hangs:
            stall()
        elif fault == "crash":
            segfault()
        elif fault == "illegal":
            broken("an illegal memory access was encountered")
        elif fault == "assert":
            broken("device-side assert triggered")
        else:
            missing[index] = "OutOfResources: out of resource: shared memory, Required: 999999"
    found = tuner_fakes.race(key, contenders, effort, *more)
    times = [[] if index in missing else times for index, times in enumerate(found.times)]
    return replace(found, times=times, failures=missing)


def check(kernel, config, spec, arch, device, small=False):
    if fault_of(config) == "check_hang":
        _note("check_hang", config)
        worker.report("launched", SECONDS)
        stall()
    return tuner_fakes.check(kernel, config, spec, arch, device, small)
