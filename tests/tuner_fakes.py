"""What child processes run in tests of the tuner: a GPU made of arithmetic, with candidates that crash, hang and lie."""

import json
import os
import time
import zlib

import fake_log

from fa2tune.measuring import worker
from fa2tune.measuring.samples import Race
from fa2tune.tuning.search.compile_check import CompileResult

ERRORS = {"o": {"max": 0.1, "max_allowed": 1.0, "rms": 0.1, "rms_allowed": 1.0}}


def _log(kind, *what):
    """What was done, for the test to read."""
    fake_log.write(os.environ["FA2TUNE_FAKE_LOG"], kind, *what)


def logged(path, kind):
    """What was done of a kind, up to now."""
    return [entry for entry in fake_log.read(path) if entry[0] == kind]


def _logged(kind):
    return logged(os.environ["FA2TUNE_FAKE_LOG"], kind)


def true_time(config, bucket):
    """Microseconds. Best at BLOCK_M 128, BLOCK_N 64, 8 warps, 3 stages; whatever else there is matters less. No two configs
    take the same, or the winner would hang on which came first, which differs from run to run."""
    noise = {n: zlib.crc32(f"{n} {v}".encode()) for n, v in config.items()}
    apart = 1e-12 * sum(noise.values())
    if "LOADS" not in config:  # warp-specialised: best of all, but where a length is short
        off = abs(config["GROUPS"] - 2) + 0.1 * abs(config["STAGES"] - 3) + 0.01 * (config["HEADS_PER_WAVE"] != 16)
        return bucket / 10 * (0.8 + off + apart) * (1 if bucket > 512 else 10)
    off = abs(config["BLOCK_M"] - 128) / 64 + abs(config["BLOCK_N"] - 64) / 64 + (config["num_warps"] == 4)
    off += 0.3 * abs(config["num_stages"] - 3)
    named = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    off += sum(0.05 * (value % 5) for n, value in noise.items() if n not in named)
    return bucket / 10 * (1 + off + apart)


def hangs(config):
    """Where it is told to: the default for tensors without descriptors is among these."""
    return (config.get("BLOCK_M"), config.get("BLOCK_N"), config.get("LOADS")) == (64, 64, "pointer")


def _meet(device):
    """A GPU that has raced three times waits for each of ``FA2TUNE_FAKE_TOGETHER`` to begin: all take part."""
    wanted, end = set(os.environ.get("FA2TUNE_FAKE_TOGETHER", "").split()), time.monotonic() + 120
    while wanted:
        if time.monotonic() > end:
            raise TimeoutError(f"not all of GPUs {wanted} came to race")
        on = [entry[1] for entry in _logged("on")]
        if on.count(device) < 3 or wanted <= {*on}:
            return
        worker.report(-1)  # it lives
        time.sleep(0.02)


def compile_check(kernel, spec, config, gpu, problems):
    _log("compile", kernel, spec.dtype, spec.mask, config)
    binary = {"registers": 128, "spills": 0, "shared_bytes": 1000, "binary_hash": "0123456789abcdef" * 4}
    if config.get("num_stages") == 4 or os.environ.get("FA2TUNE_FAKE_REFUSE"):
        return CompileResult("shared_memory", "too much", binary)
    if os.environ.get("FA2TUNE_FAKE_ABORT") and config["BLOCK_N"] == 16:
        os.abort()
    return CompileResult(binary=binary, predicted_us=tuple(true_time(config, problem.bucket) for problem in problems))


def _kernel_time(key, contender):
    if key.kernel != "bwd":
        return true_time(contender, key.bucket)
    return sum(true_time(config, key.bucket) for config in contender["configs"].values())


def race(key, contenders, effort, best_ratio=1.0):
    _log(effort, key.kernel, key.bucket, list(contenders))
    poison = os.environ.get("FA2TUNE_FAKE_POISON", "")
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if "lost" in poison or device in os.environ.get("FA2TUNE_FAKE_LOST", "").split():
        raise RuntimeError("no CUDA-capable device is detected")
    _meet(device)
    _log("on", device, effort, key.kernel, key.mask, list(contenders))
    for index, config in enumerate(contenders):
        worker.report(index)
        if "shy" in poison and effort == "screen" and config == json.loads(os.environ["FA2TUNE_FAKE_SHY"]):
            raise RuntimeError("busy")
        if "fused" in poison and config.get("strategy") == "fused":
            os.kill(os.getpid(), 11)
        if "whole" in poison and key.kernel == "bwd":
            raise RuntimeError("busy")
        if "crash" in poison and config.get("BLOCK_N") == 128:
            os.kill(os.getpid(), 11)
        if "hang" in poison and hangs(config):
            time.sleep(3600)
    if (
        effort == "proof"
        and len(contenders) > 1
        and len(_logged("together")) < int(os.environ.get("FA2TUNE_FAKE_QUARRELS", 0))
    ):
        _log("together")
        worker.report(-1)
        os.kill(os.getpid(), 11)
    drift = 1 + 0.3 * (os.getpid() % 7)  # every process has clocks of its own: only ratios may count
    hungry = effort == "sustained" and "FA2TUNE_FAKE_HUNGRY" in os.environ
    power = -1 if hungry else 1  # alone with its power, the faster one is slower
    times = [[drift * _kernel_time(key, c) ** power * (1 + 0.001 * r) for r in range(9)] for c in contenders]
    capped = 0.0 if os.environ.get("FA2TUNE_FAKE_COOL") else None
    return Race(times, {}, 1980, 700, power_capped=capped)


def check(kernel, config, spec, arch, device, small=False):
    worker.report("launch")
    _log("check", kernel, spec.dtype, spec.mask, config)
    if "specialized" in os.environ.get("FA2TUNE_FAKE_POISON", "") and "LOADS" not in config:
        raise ArithmeticError("o: NaN in 3 of 9 elements")
    if "never" in os.environ.get("FA2TUNE_FAKE_POISON", ""):
        raise ValueError("fwd: got a parameter heads_query")
    if "wrong" in os.environ.get("FA2TUNE_FAKE_POISON", "") and config["HEADS_PER_WAVE"] == 1:
        raise ArithmeticError("o: NaN in 3 of 9 elements")
    return ERRORS


def check_backward(configs, spec, strategy, device, small=False):
    _log("check", strategy, spec.dtype, spec.mask, configs)
    return ERRORS
