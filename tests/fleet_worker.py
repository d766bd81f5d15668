"""Workers of tests/sharing/test_many_workers.py: whole tuning runs, in processes that may be killed at any moment, over a small
space and with fake functions that cost next to nothing. This process has imported everything and forks one worker a line that
it reads:
{"name", "folder", "request": fields of a TuneRequest, "environment"}; it answers with the worker's pid. A worker leaves its
report's rows and how it ended in ``<folder>/<name>.json``, and what it says, as it says it, in ``<folder>/<name>.lines``.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fake_log

from fa2tune.measuring import worker
from fa2tune.measuring.samples import Race
from fa2tune.spec.mask import ROW_MASKS

ERRORS = {"o": {"max": 0.1, "max_allowed": 1.0, "rms": 0.1, "rms_allowed": 1.0}}
DIMENSIONS = {
    "BLOCK_M": (64, 128), "BLOCK_N": (32, 64), "LOADS": ("pointer", "descriptor"), "MASKED": ("last",),
    "HEADS_PER_WAVE": (1, 4), "num_warps": (4,), "num_stages": (2,), "maxnreg": (0,),
}  # fmt: skip


# ---- functions: light, as children import this module alone


@dataclass(frozen=True)
class CompileResult:
    status: str = ""
    why: str = ""
    binary: dict[str, int] = field(default_factory=dict)
    predicted_us: tuple[float, ...] = ()


def true_time(config: Any, bucket: int) -> float:
    """Microseconds; no two configs are alike."""
    return bucket / 10 * (1 + zlib.crc32(repr(sorted(config.items())).encode()) % 1000 / 1000)


def _log(*what: Any) -> None:
    fake_log.write(os.environ["FA2TUNE_FAKE_LOG"], os.environ["FA2TUNE_WORKER"], *what)


RACES = itertools.count(1)  #: of this process


def _pause() -> None:
    """As long as a race takes; and from the ``FA2TUNE_FAKE_FREE``th on, until the test makes the file ``FA2TUNE_FAKE_GATE``."""
    time.sleep(float(os.environ.get("FA2TUNE_FAKE_SECONDS", 0)))
    gate = os.environ.get("FA2TUNE_FAKE_GATE")
    if gate and next(RACES) > int(os.environ.get("FA2TUNE_FAKE_FREE", 0)):
        while not os.path.exists(gate):
            worker.report(-1)  # it lives
            time.sleep(0.02)


def compile_check(kernel: str, spec: Any, config: Any, gpu: Any, problems: Any) -> CompileResult:
    return CompileResult(binary={"registers": 128, "spills": 0, "shared_bytes": 1000})


def race(key: Any, contenders: Any, effort: str, best: Any = None) -> Race:
    _pause()
    for index in range(len(contenders)):
        worker.report(index)
    _log(effort, key.head_dim, key.mask, key.bucket, list(contenders))
    return Race([[true_time(c, key.bucket) * (1 + 0.001 * r) for r in range(9)] for c in contenders], {}, 1980, 700)


def check(*arguments: Any) -> Any:
    worker.report("launch")
    return ERRORS


# ---- workers


def prepare() -> Any:
    """Import and patch what every worker needs; ``work``."""
    import torch

    from fa2tune import gpus
    from fa2tune.compiling import compiler, fingerprint, registry
    from fa2tune.rows import reader
    from fa2tune.rows.row import MEASURED
    from fa2tune.sharing import leases, storage
    from fa2tune.spec.problem import KERNELS
    from fa2tune.tuning.request import plan
    from fa2tune.tuning.request.plan import Target, TuneRequest, make_plan
    from fa2tune.tuning.request.watcher import Watcher, WorkerFunctions
    from fa2tune.tuning.run.tuner import Run

    here = gpus.named("h200")
    plan.resolve_target = lambda name: Target(here, MEASURED, here)
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H200"
    fingerprint.driver_version = lambda: os.environ.get("FA2TUNE_FAKE_DRIVER", "580.1")
    registry.variants_of = lambda kernel: (registry.portable_of(kernel),)
    reader.shipped_paths = list
    leases.BEAT_S, storage.HURRY_S = 0.5, 1.0
    fwd = registry.portable_of("fwd")
    default = {name: values[0] for name, values in DIMENSIONS.items()}
    object.__setattr__(fwd, "space", replace(fwd.space, dimensions=DIMENSIONS, default=lambda spec, arch: default))
    compiler.runtime_names(fwd)
    hashed = fingerprint.kernel_hash
    for kernel in KERNELS:
        for mask in ROW_MASKS:
            hashed(registry.portable_of(kernel), mask)
        fingerprint.space_hash(registry.portable_of(kernel))
    changed = {"": hashed, "newer": lambda variant, mask: hashed(variant, mask)[::-1]}
    fingerprint.kernel_hash = lambda *of: changed[os.environ.get("FA2TUNE_FAKE_KERNELS", "")](*of)
    with tempfile.TemporaryDirectory() as folder:  # what Optuna imports when it first meets a database
        storage.Storage.of_studies(Path(folder) / "studies.sqlite").optuna()
    functions = WorkerFunctions(*(f"fleet_worker:{name}" for name in ("compile_check", "race", "check", "check")))

    class Lines(Watcher):
        def __init__(self, path: Path) -> None:
            self.file = path.open("a", buffering=1)

        def line(self, text: str) -> None:
            self.file.write(f"{text}\n")

    def work(name: str, request: dict[str, Any], folder: Path) -> None:
        if "place" in request:  # another host: its pids mean nothing to the others
            place = request.pop("place")
            leases._place = lambda: place
        values = {"dtypes": ("bf16",), "pass_": "fwd", "trials": 1000, "workers": 1, "sampler": "random"}
        values |= {key: tuple(value) if isinstance(value, list) else value for key, value in request.items()}
        if "cache" in values:
            values["cache"] = Path(values["cache"])
        watcher, said, rows = Lines(folder / f"{name}.lines"), "", []
        try:
            run = Run(make_plan(TuneRequest(**values)), watcher, functions)
            report = run.go()
            rows = [
                [r.key.head_dim, r.key.mask, r.key.bucket, r.filed_as, dict(r.config), r.created] for r in report.rows
            ]
        except Exception as error:
            said = repr(error)
        left = folder / f".{name}.json"
        left.write_text(json.dumps({"rows": rows, "error": said}))
        left.rename(folder / f"{name}.json")

    return work


def main() -> None:
    work = prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # who is started in the background ignores it
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            folder = Path(asked["folder"])
            os.environ.update(asked["environment"])
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            with open(folder / f"{asked['name']}.log", "w") as log:
                os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            try:
                work(asked["name"], asked["request"], folder)
            finally:
                os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
