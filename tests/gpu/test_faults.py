"""Kernels that go wrong on the GPU: each costs one candidate and seconds, and the next is measured by a fresh process."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fa2tune import gpus
from fa2tune.compiling.registry import portable_of
from fa2tune.measuring.worker import Crew, Job, wait
from fa2tune.rows import reader
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import Specialization
from fa2tune.tuning.request.plan import TuneRequest
from fa2tune.tuning.request.watcher import Watcher, WorkerFunctions
from fa2tune.tuning.run.tuner import tune
from fa2tune.tuning.search.status import status_of

FWD = portable_of("fwd")
SPEC = Specialization("bf16", 64, 64, "full")
FAULTS = {"no_memory": "out_of_memory", "illegal": "illegal_access", "asserts": "device_assert", "hangs": "timeout"}
RACE = "faulty_kernels:race"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(reader, "shipped_paths", list)


def test_each_fault_is_told_and_a_fresh_process_measures_the_next(monkeypatch):
    """One crew goes through all of them: a process that hung, or lost its context, holds nothing up."""
    monkeypatch.setenv("FA2TUNE_FAULTS", "[]")
    gpu = gpus.present()
    key = TuningKey(gpu.name, gpu.sm_count, gpu.arch, "fwd", "bf16", "ieee", 64, 64, "full", 512)
    anchor = dict(FWD.space.default(SPEC, gpu.arch))
    good = {**anchor, "num_stages": anchor["num_stages"] % 3 + 1}
    with Crew(1, spare="faulty_kernels") as crew:

        def race(*contenders):
            crew.submit(Job(RACE, (key, contenders, "screen"), 60.0))
            return wait([crew], 120.0)[0]

        clean = race(anchor, good)
        assert clean.failure is None and all(clean.result.times), clean.failure
        for fault, status in FAULTS.items():
            begun, processes = time.monotonic(), crew.started
            job = race(anchor, {**anchor, "FAULT": fault}, good)
            if fault == "no_memory":  # costs not even the process
                assert job.failure is None and "OutOfMemoryError" in job.result.failures[1], job.failure
                assert [bool(times) for times in job.result.times] == [True, False, True]
            else:
                assert job.died and not job.stuck and status_of(job) == status, job.failure
                assert job.notes[-1] == 1  # the culprit is known
            after = race(anchor, good)
            assert after.failure is None and all(after.result.times), (fault, after.failure)
            assert min(after.result.times[0]) < 1.5 * min(clean.result.times[0]), fault  # nothing else is on the GPU
            assert time.monotonic() - begun < 20, fault
            assert crew.started - processes == (fault != "no_memory")


class _Listener(Watcher):
    def __init__(self):
        self.lines = []

    def line(self, text):
        self.lines.append(text)


def test_three_poisoned_in_ten_lead_to_the_same_winner(tmp_path, monkeypatch):
    gpu = gpus.present()
    default = dict(FWD.space.default(SPEC, gpu.arch))
    dimensions = {name: (value,) for name, value in default.items()}
    dimensions |= {"BLOCK_M": (64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2,)}
    default |= {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    space = FWD.space
    object.__setattr__(FWD, "space", replace(space, dimensions=dimensions, default=lambda spec, arch: default))
    functions = WorkerFunctions(race=RACE, check="faulty_kernels:check")

    def text(config):
        return json.dumps(dict(config), sort_keys=True)

    def tuned(name, poison):
        monkeypatch.setenv("FA2TUNE_FAULTS", json.dumps(poison))
        listener = _Listener()
        request = TuneRequest(
            head_dims=(64,), dtypes=("bf16",), masks=("full",), pass_="fwd", buckets=(4096,), trials=100,
            cache=tmp_path / name / "cache.sqlite", record=tmp_path / f"{name}.jsonl",
        )  # fmt: skip
        report = tune(request, listener, functions)
        record = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        screened = {text(entry["config"]): entry["time_us"] for entry in record
                    if entry["stage"] == "screen" and "LOADS" in entry["config"]}  # fmt: skip
        (winner,) = (
            row for row in report.rows if not row.warp_specialized
        )  # poison is for the portable variant's few points
        return winner, screened, listener.lines

    try:
        best, times, _ = tuned("clean", [])
        healthy = (dict(default), dict(best.config))
        others = [found for one in sorted(times, key=times.get) if (found := json.loads(one)) not in healthy]
        count = max(3, round(0.3 * len(times)))
        poison = [[config, fault] for config, fault in zip(others[:count], [*reversed(FAULTS), *FAULTS], strict=False)]
        assert len(poison) >= 3
        winner, survivors, lines = tuned("sick", poison)
    finally:
        object.__setattr__(FWD, "space", space)
    # memory that is missing at a launch is held by somebody else, as far as the tuner knows
    counted = Counter("failed" if fault == "no_memory" else FAULTS[fault] for _, fault in poison)
    assert {status: winner.pruned.get(status, 0) for status in counted} == counted, (winner.pruned, lines)
    assert len(survivors) == len(times) - len(poison)
    # the very same config, unless two are so close that no race tells them apart
    near = times[text(winner.config)] / times[text(best.config)]
    assert winner.config == best.config or abs(near - 1) < 0.02, (winner.config, best.config, near)
