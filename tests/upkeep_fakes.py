"""What child processes run in tests of upkeep and repair: the GPU of tuner_fakes, whose clocks stand still, with faults that a
test chooses: FA2TUNE_FAKE_FAULTS holds a JSON list of [kind, entries of a config, figure]."""

import json
import os

import tuner_fakes
from tuner_fakes import check_backward  # noqa: F401  # one of the functions

from fa2tune.measuring import worker
from fa2tune.measuring.samples import Race
from fa2tune.tuning.search.compile_check import CompileResult


def _fault(kind, config):
    """The figure of the first fault of that kind that a config has, or None."""
    for name, entries, figure in json.loads(os.environ.get("FA2TUNE_FAKE_FAULTS", "[]")):
        if name == kind and entries.items() <= config.items():
            return figure
    return None


def _slowness(key, config):
    return (_fault("slow", config) or 1.0) * (_fault("slow at", {**config, "bucket": key.bucket}) or 1.0)


def compile_check(kernel, spec, config, gpu, problems):
    tuner_fakes._log("compile", kernel, spec.dtype, spec.mask, config)
    if _fault("compile", config):
        return CompileResult("compile_error", "CompilationError: no")
    if _fault("killed", config):
        os.kill(os.getpid(), 9)
    slow = _fault("slow", config) or 1.0
    times = tuple(tuner_fakes.true_time(config, problem.bucket) * slow for problem in problems)
    return CompileResult(binary={"registers": 128, "spills": 0, "shared_bytes": 1000}, predicted_us=times)


def race(key, contenders, effort, best_ratios=None):
    tuner_fakes._log(effort, key.kernel, key.bucket, list(contenders))
    for index, config in enumerate(contenders):
        worker.report(index)
        if _fault("crash", config):
            os.kill(os.getpid(), 11)
    times = []
    for contender in contenders:
        configs = contender["configs"].values() if key.kernel == "bwd" else [contender]
        time_us = sum(tuner_fakes.true_time(c, key.bucket) * _slowness(key, c) for c in configs)
        times.append([time_us * (1 + 0.001 * turn) for turn in range(9)])
    tainted = 3 if _fault("throttled", {}) else 0
    return Race(times, {}, int(1980 / (_fault("clock", {}) or 1)), 700, tainted, tainted)


def check(kernel, config, spec, arch, device, small=False):
    worker.report("launch")
    tuner_fakes._log("check", kernel, device, config)
    if _fault("wrong", config):
        from fa2tune.measuring.verify import WrongResult

        raise WrongResult("o: max error 1, allowed 0.1")
    return tuner_fakes.ERRORS


def machine_code(kernel, spec, config, arch):
    tuner_fakes._log("machine code", kernel, arch, config, os.environ["TRITON_CACHE_DIR"])
    if _fault("compile", config):
        return "", "CompilationError: no"
    if _fault("killed", config):
        os.kill(os.getpid(), 9)
    return digest(_fault("ptx", config) or "a", _fault("code", config) or "b"), ""


def digest(ptx="a", code="b"):
    """A hash of machine code; what a config compiles to, but for faults."""
    return "00000001" + 28 * ptx + 28 * code
