"""Does the order of the candidates decide which one wins? Tunes five keys twice from the same candidates, in both orders.

    python benchmarks/order_reversal.py order_reversal.json

The two winners of a key are then timed in one race. A GPU that is cool at first runs faster at first: if times were
compared instead of interleaved ratios, early candidates would win. Heats, final and the last comparison are the tuner's own
(fa2tune/tuning/select/heats.py, final.py), in its worker process; numerics are not checked. Needs a GPU. Exit status 1: two
winners of a key were more than 1 % apart.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from fa2tune.compiling import fingerprint
from fa2tune.compiling.registry import portable_of
from fa2tune.measuring import worker
from fa2tune.measuring.samples import Race, median_interval, ratios
from fa2tune.measuring.worker import Crew, Job
from fa2tune.rows import reader
from fa2tune.rows.describe import describe
from fa2tune.rows.row import Row
from fa2tune.rows.store import Store
from fa2tune.sharing.storage import Storage
from fa2tune.sharing.study_writer import StudyWriter
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import Config
from fa2tune.tuning.request.plan import TuneRequest, TuningPlan, make_plan
from fa2tune.tuning.request.provenance import Provenance
from fa2tune.tuning.request.watcher import Watcher, WorkerFunctions
from fa2tune.tuning.search.candidates import point
from fa2tune.tuning.search.compile_check import CompileResult
from fa2tune.tuning.search.failures import FailureRecord, FailureScope
from fa2tune.tuning.search.task import SearchTask
from fa2tune.tuning.select import finalists
from fa2tune.tuning.select.gpu_jobs import Steps
from fa2tune.tuning.select.log import Log
from fa2tune.tuning.select.measured import Measured
from fa2tune.tuning.select.report import Report

#: (kernel, head dim, mask, length)
KEYS = (
    ("fwd", 64, "causal", 2048),
    ("fwd", 128, "full", 4096),
    ("fwd", 256, "causal", 8192),
    ("bwd_dkdv", 128, "causal", 4096),
    ("bwd_dq", 64, "full", 4096),
)
CANDIDATES = 12  #: a key
COOL_SECONDS = 8.0  #: of idling before the first key's first order
WITHIN = 0.01
FUNCTIONS = WorkerFunctions()


@dataclass(frozen=True)
class Tuned:
    """What came of one order."""

    winner: Row  #: the row that serves
    seconds: float


def plan_for(kernel: str, head_dim: int, mask: str, length: int, cache: Path) -> TuningPlan:
    return make_plan(
        TuneRequest(
            head_dims=(head_dim,),
            dtypes=("bf16",),
            masks=(mask,),
            pass_="fwd" if kernel == "fwd" else "bwd",
            kernels=(kernel,),
            buckets=(length,),
            cache=cache,
        )
    )


def task_of(kernel: str, plan: TuningPlan) -> SearchTask:
    failures = FailureRecord(Storage(), FailureScope(fingerprint.triton_version()))
    return SearchTask(
        portable_of(kernel), plan.specializations()[0], plan, StudyWriter(Storage()), "order reversal", failures
    )


def candidates(task: SearchTask, known: Sequence[Row], most: int = CANDIDATES) -> list[Config]:
    """The defaults, what won this kernel's keys at any length, and neighbours of the default; legal ones, each once."""
    spec, arch = task.spec, task.plan.target.gpu.arch
    defaults = [
        finalists.rival(task.variant.space, spec, arch, name) for name in reversed(task.space.implementations())
    ]
    wanted = (task.kernel, spec.dtype, spec.head_dim, spec.head_dim_v, spec.mask)
    won = [
        dict(row.config)
        for row in known
        if (row.key.kernel, row.key.dtype, row.key.head_dim, row.key.head_dim_v, row.key.mask) == wanted
    ]
    around = [
        {**task.default, name: value} for name, values in task.variant.space.dimensions.items() for value in values
    ]
    found = {point(config): config for config in (*defaults, *won, *around) if point(config) in task.space.points}
    return list(found.values())[:most]


def tuned(
    task: SearchTask, configs: Sequence[Config], perform: Callable[[Job], Job], cache: Path, provenance: Provenance
) -> Tuned:
    """The tuner's heats, final and proof, with candidates that come in this order. ``perform`` does a job."""
    begun = time.monotonic()
    store = Store(cache)

    def file(rows: Sequence[Row]) -> Sequence[Row]:
        store.put(rows)
        return rows  # no other worker files here

    method = Measured(Log(task.plan, Watcher(), FUNCTIONS, store, provenance, Report(task.plan), file))
    task.ready = [(config, CompileResult()) for config in configs]
    while (found := method.search([task])) is not None:
        carry_out(found[1], perform)
    for steps in method.select([task]):
        carry_out(steps, perform)
    method.log.file(at_once=True)
    for crew in method.crews:
        crew.close()
    rows = method.log.report.rows
    if not rows:
        raise click.ClickException(f"{task.title}: no candidate ran")
    return Tuned(min(rows, key=lambda row: row.rank_us), time.monotonic() - begun)


def carry_out(steps: Steps, perform: Callable[[Job], Job]) -> None:
    with suppress(StopIteration):
        job = next(steps)
        while True:
            job = steps.send(perform(job))


def apart(race: Race) -> tuple[float, float, float]:
    """Of the contenders 1 and 2, winner and winner reversed: the median of the second's time over the first's, and its
    interval."""
    pairs = ratios(race.times[2], race.times[1])
    return median(pairs), *median_interval(pairs)


def performed(crew: Crew, job: Job) -> Job:
    if job.function == FUNCTIONS.check:
        job.result = {}
        return job
    crew.submit(job)
    while True:
        for ended in worker.wait([crew], 600.0):
            return ended


def compiled(tasks: Sequence[SearchTask], wanted: Sequence[Sequence[Config]]) -> list[list[Config]]:
    """Those that compile and keep the limits, compiled on every core."""
    gpu = tasks[0].plan.target.gpu
    jobs = [
        [Job(FUNCTIONS.compile_check, (task.kernel, task.spec, config, gpu), 120.0) for config in configs]
        for task, configs in zip(tasks, wanted, strict=True)
    ]
    with Crew(tasks[0].plan.workers, {"OMP_NUM_THREADS": "1"}) as crew:
        for job in (job for mine in jobs for job in mine):
            crew.submit(job)
        while crew.load:
            worker.wait([crew], 1.0)
    return [
        [config for config, job in zip(configs, mine, strict=True) if job.failure is None and not job.result.status]
        for configs, mine in zip(wanted, jobs, strict=True)
    ]


def report(key: TuningKey, forward: Tuned, reverse: Tuned, joint: Race) -> dict[str, Any]:
    """One key's record, for the table and the JSON."""
    ratio, low, high = apart(joint)
    one, other = forward.winner, reverse.winner
    same = point(one.config) == point(other.config)
    return {
        "kernel": key.kernel, "head_dim": key.head_dim, "causal": key.mask == "causal", "length": key.bucket,
        "winner": dict(one.config), "winner_reversed": dict(other.config), "same": same, "ratio": ratio, "low": low,
        "high": high, "passed": same or max(ratio, 1 / ratio) <= 1 + WITHIN, "gain": [one.gain, one.gain_low, one.gain_high],
        "gain_reversed": [other.gain, other.gain_low, other.gain_high], "time_us": [one.time_us, other.time_us],
        "clock_mhz": [one.clock_mhz, other.clock_mhz], "throttled": [one.throttled, other.throttled],
        "power_limit_w": one.power_limit_w, "power_capped": joint.power_capped, "seconds": [forward.seconds, reverse.seconds],
    }  # fmt: skip


def line(found: dict[str, Any]) -> str:
    mask = "causal" if found["causal"] else "full"
    return (
        f"{found['kernel']:9}{found['head_dim']:4} {mask:7}{found['length']:6}  {describe(found['winner']):58}"
        f"{'the same' if found['same'] else describe(found['winner_reversed']):58}"
        f"{found['ratio']:.4f} [{found['low']:.4f}, {found['high']:.4f}]  {'PASS' if found['passed'] else 'FAIL'}"
    )


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
def main(out: Path) -> None:
    """Tune five keys from candidates in both orders; table on screen, figures into OUT (JSON)."""
    import torch

    from fa2tune.rows.row import MEASURED

    if not torch.cuda.is_available():
        raise click.ClickException("needs a CUDA GPU that torch can use")
    begun = time.monotonic()
    provenance = Provenance(MEASURED, torch.cuda.get_device_name(), fingerprint.driver_version())
    known = [row for layer in reader.layers() for row in layer.rows]
    with tempfile.TemporaryDirectory() as folder, Crew(1) as crew:
        plans = [plan_for(*key, Path(folder, f"{number}.sqlite")) for number, key in enumerate(KEYS)]
        tasks = [task_of(kernel, plan) for (kernel, *_), plan in zip(KEYS, plans, strict=True)]
        chosen = compiled(tasks, [candidates(task, known) for task in tasks])
        click.echo(f"{sum(map(len, chosen))} candidates compiled after {time.monotonic() - begun:.0f} s")
        time.sleep(COOL_SECONDS)
        records = []
        for task, plan, configs in zip(tasks, plans, chosen, strict=True):
            found = []
            for number, order in enumerate((configs, configs[::-1])):
                fresh = task_of(task.kernel, plan)
                cache = Path(folder, f"{task.title} {number}.sqlite")
                found.append(tuned(fresh, order, lambda job: performed(crew, job), cache, provenance))
            key = task.keys[0]
            contenders = [task.default, *(one.winner.config for one in found)]
            joint = performed(crew, Job(FUNCTIONS.race, (key, contenders, "proof"), 60.0))
            if joint.failure is not None or joint.result.failures:
                raise click.ClickException(f"{task.title}: {joint.failure or joint.result.failures}")
            records.append({**report(key, *found, joint.result), "candidates": [dict(config) for config in configs]})
            click.echo(line(records[-1]))
    passed = sum(record["passed"] for record in records)
    about = {
        "gpu": provenance.obtained_on, "driver": provenance.driver, "within": WITHIN, "cooled_s": COOL_SECONDS,
        "seconds": time.monotonic() - begun, **{name: provenance.stamp()[name] for name in ("triton", "torch", "created")},
    }  # fmt: skip
    out.write_text(json.dumps({**about, "keys": records}, indent=1) + "\n", encoding="utf-8")
    click.echo(f"{passed} of {len(records)} keys: both orders end within {WITHIN:.0%}; {about['seconds']:.0f} s")
    if passed < len(records):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
