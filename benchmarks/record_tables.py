"""Records exhaustive tables on this machine's GPU: every legal config of a key is compiled and raced against the default.

    python benchmarks/record_tables.py --out DIR --time-budget 540 [kernel:head dim:causal|full:length[:dtype] ...]

Without keys: the six that benchmarks/search_quality.py and benchmarks/model_quality.py read. All cores but one compile
ahead; one process measures. Results are written at once, and the same command resumes a run that was stopped. A complete
key is packed as soon as it is done; the others are packed when the budget ends and marked incomplete.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import tables

from fa2tune import gpus
from fa2tune.compiling import compiler, fingerprint, limits, registry, sass
from fa2tune.gpus import Gpu
from fa2tune.measuring import worker
from fa2tune.measuring.worker import Crew, Job
from fa2tune.rows.record import key_record
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import Config, Specialization
from fa2tune.tuning.search.candidates import legal, point
from fa2tune.tuning.search.status import status_of

KEYS = ("fwd:128:causal:4096", "bwd_dkdv:128:causal:4096", "fwd:64:causal:4096", "bwd_dkdv:64:causal:4096",
        "fwd:256:causal:4096", "bwd_dkdv:256:causal:4096")  # fmt: skip
BINARIES_A_HEAT = 8
ROUNDS, SLOW_ROUNDS, FINAL_ROUNDS = 5, 2, 21
SLOW = 1.5  #: times the best so far: two samples are enough
CLOSE, CLOSE_AT_MOST, FINAL_HEAT = 1.05, 60, 12  #: those within 5 % of the best race again, at leisure
FLUSH_BYTES = 256 << 20
COMPILE_DEADLINE, RACE_DEADLINE = 120.0, 30.0
CHECK, RACE = "record_tables:checked", "record_tables:race"  #: what child processes run
STARTS = 3  #: races in a row that fail before any candidate is launched, until the GPU is given up
CLOSING_SECONDS = 15.0  #: of the budget, to pack what there is


# --- what child processes run


def checked(kernel: str, spec: Specialization, config: Config, gpu: Gpu) -> dict[str, Any]:
    """A table's line for one binary, without runs."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 10)  # the process that measures must not wait for a core
    begun = time.monotonic()
    line = {"fate": "", "why": "", "r": 0, "s": 0, "m": 0, "w": config["num_warps"], "loops": []}
    try:
        binary = compiler.build(registry.portable_of(kernel), spec, config, gpu.arch)
    except compiler.CompileError as error:
        return {**line, "fate": "compile_error", "why": str(error), "compile_s": round(time.monotonic() - begun, 3)}
    line |= {"r": binary.registers, "s": binary.spills, "m": binary.shared_bytes, "w": binary.num_warps}
    line["compile_s"] = round(time.monotonic() - begun, 3)
    refusal = limits.after_compile(binary, gpu)
    if refusal is not None:
        return {**line, "fate": refusal.name, "why": refusal.why}
    line["loops"] = [list(astuple(loop)) for loop in sass.counts(binary.cubin_path)]
    return line


_staged: dict[TuningKey, tuple[dict[str, Any], Any]] = {}
_last_race = [0.0]


def _stage(key: TuningKey) -> tuple[dict[str, Any], Any]:
    """(the tensors a kernel of this key reads and writes, a buffer that flushes L2). Of one key at a time."""
    import torch

    if key in _staged:
        return _staged[key]
    _staged.clear()

    from fa2tune.launching import passes
    from fa2tune.measuring import reference

    problem = key.workload()
    inputs = reference.make_inputs(problem, "cuda", on_device=True)
    q, k, v = inputs.q, inputs.k, inputs.v
    config = registry.portable_of("fwd").space.default(problem.specialization, key.arch)
    o, lse = passes.forward(q, k, v, mask=problem.mask, softmax_scale=key.head_dim**-0.5, config=config)
    stage = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
    if key.kernel != "fwd":
        delta = (o.float() * inputs.do.float()).sum(-1)
        empty = {f"d{name}": torch.empty_like(stage[name]) for name in ("q", "k", "v")}
        stage = {"q": q, "k": k, "v": v, "o": o, "do": inputs.do, "lse": lse, "delta": delta, **empty}
    _staged[key] = stage, torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    return _staged[key]


TENSORS = {
    "fwd": ("q", "k", "v", "o", "lse"),
    "bwd_dkdv": ("q", "k", "v", "do", "lse", "delta", "dk", "dv"),
}


def race(key: TuningKey, contenders: Sequence[Config], rounds: int, best_ratio: float) -> Any:
    """(microseconds by contender and round, contender -> why it cannot be launched). Contender 0 is the anchor. One that is
    behind ``best_ratio`` times the anchor by SLOW leaves early. Reports the index of each before its first launch."""
    import torch
    from triton.runtime.errors import OutOfResources

    from fa2tune.launching import launch
    from fa2tune.measuring import timing

    stage, flush = _stage(key)
    own = {name: stage[name] for name in TENSORS[key.kernel]}
    variant, problem = registry.portable_of(key.kernel), key.workload()
    runners, failures = {}, {}
    strides = {name: launch.strides_of(tensor) for name, tensor in own.items() if tensor.dim() == 4}
    scale, device = key.head_dim**-0.5, torch.cuda.current_device()
    for index, config in enumerate(contenders):
        worker.report(index)
        try:
            run = partial(launch.bind(variant, problem, config, strides, scale, tuple(own), device), *own.values())
            run()
            torch.cuda.synchronize()
        except (compiler.CompileError, OutOfResources, torch.cuda.OutOfMemoryError) as error:
            failures[index] = worker.reason_of(error)
            continue
        runners[index] = run
    if 0 not in runners:
        raise RuntimeError(f"the anchor cannot be launched: {failures[0]}")
    worker.report(-1)
    if time.monotonic() - _last_race[0] > 1.0:  # warm the GPU
        square = torch.randn(4096, 4096, dtype=torch.float16, device="cuda")
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            for _ in range(8):
                square @ square
            torch.cuda.synchronize()
    times: list[list[float]] = [[] for _ in contenders]
    alive = list(runners)
    for done in range(rounds):
        turn = done % len(alive)
        order = alive[turn:] + alive[:turn]
        # lead: a millisecond of work, so that the queue never runs dry while the host fills it
        events = timing.submit([runners[index] for index in order], flush.zero_, lead=16)
        for index, us in zip(order, timing.finish(events), strict=True):
            times[index].append(round(us, 2))
        if done + 1 == SLOW_ROUNDS:
            ratios = {index: min(times[index]) / min(times[0]) for index in alive}
            limit = SLOW * min(best_ratio, *ratios.values())
            alive = [index for index in alive if index == 0 or ratios[index] <= limit]
    _last_race[0] = time.monotonic()
    return times, failures


# --- one key


def key_named(text: str, gpu: Gpu) -> TuningKey:
    kernel, dim, mask, bucket, *dtype = tables.named(text)
    if kernel not in TENSORS or mask not in ("causal", "full"):
        raise ValueError(f"key: got {text!r}, kernels are {', '.join(TENSORS)}, masks causal and full")
    head_dim = int(dim)
    return TuningKey(gpu.name, gpu.sm_count, gpu.arch, kernel, *(dtype or ["bf16"]), "ieee", head_dim, head_dim,
                     mask, int(bucket))  # fmt: skip


class Recording:
    """One key: its journal, what is compiled, what is measured, what is left."""

    def __init__(self, key: TuningKey, gpu: Gpu, folder: Path, facts: Mapping[str, str]) -> None:
        self.key, self.gpu = key, gpu
        self.packed, self.journal = (folder / (tables.stem(key) + suffix) for suffix in (tables.SUFFIX, tables.JOURNAL))
        variant = registry.portable_of(key.kernel)
        spec = key.specialization()
        (runtime,) = compiler.runtime_names(variant)
        header = {
            "key": key_record(key), **facts,
            "kernel_hash": fingerprint.kernel_hash(variant, spec.mask), "space_hash": fingerprint.space_hash(variant),
            "default": dict(variant.space.default(spec, gpu.arch)), "seconds": 0.0, "complete": False,
            "dimensions": [name for name in variant.space.dimensions if name != runtime], "runtime": runtime,
            "values": list(variant.space.dimensions[runtime]), "loop_fields": [f.name for f in fields(sass.Loop)],
        }  # fmt: skip
        self.table = self._resumed(header)
        configs = legal(variant, spec, gpu).configs
        self.wanted: dict[Any, set[Any]] = {}  #: binary -> values of the run-time dimension that are legal with it
        for config in configs:
            self.wanted.setdefault(point(compiler.binary_config(variant, config)), set()).add(config[runtime])
        order = sorted(self.wanted, key=repr)
        random.Random(0).shuffle(order)  # a good config comes early, and a cut-off leaves a fair sample
        default = point(compiler.binary_config(variant, self.table.default))
        order.sort(key=lambda where: where != default)
        stale = (
            self.table.header["loop_fields"] != header["loop_fields"]
        )  # sass.py has learnt more: compile, do not measure
        self.to_compile = [where for where in order if stale or self._lacks(where)]
        self.table.header["loop_fields"] = header["loop_fields"]
        self.ready: list[Any] = []  #: binaries compiled and not yet measured
        self.compiling = 0
        self.finals: list[list[Config]] | None = [] if self.table.complete else None
        self.racing = False
        self.heat = max(self.table.anchors, default=-1) + 1
        self.begun = time.monotonic()
        self.spent = self.table.header["seconds"]

    def _resumed(self, header: dict[str, Any]) -> tables.Table:
        """What an earlier call left, if it is of the same kernel, space and toolchain."""
        for path in (self.packed, self.journal):
            if path.exists():
                earlier = tables.load(path)
                same = ("key", "kernel_hash", "space_hash", "default", "triton", "gpu", "dimensions")
                if differ := [name for name in same if earlier.header.get(name) != header[name]]:
                    raise click.ClickException(f"{path} differs in {', '.join(differ)}: move it away")
                return earlier
        return tables.Table(header)

    def _lacks(self, where: Any) -> bool:
        built = self.table.binaries.get(where)
        return built is None or (not built.status and not self.wanted[where] <= built.runs.keys())

    def open(self) -> None:
        """Start the journal, with what is known so far."""
        self.packed.parent.mkdir(parents=True, exist_ok=True)
        self.begun = time.monotonic()
        text = "".join(json.dumps(line) + "\n" for line in self.table.lines())
        self.journal.write_text(text, encoding="utf-8")
        self.packed.unlink(missing_ok=True)

    def take(self, line: dict[str, Any]) -> None:
        """Into the table and the journal."""
        self.table.take(line)
        with self.journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pack(self) -> None:
        self.table.header["complete"] = self.done
        self.table.header["seconds"] = round(self.spent + time.monotonic() - self.begun, 1)
        for stale in ("times", "anchor_us", "fates"):
            self.table.__dict__.pop(stale, None)
        tables.pack(self.table, self.packed)
        self.journal.unlink(missing_ok=True)

    @property
    def measured_all(self) -> bool:
        return not (self.to_compile or self.compiling or self.ready)

    @property
    def done(self) -> bool:
        return self.measured_all and self.finals == [] and not self.racing

    def compiled(self, where: Any, job: Job) -> None:
        self.compiling -= 1
        values = [dict(where)[name] for name in self.table.header["dimensions"]]
        if job.failure is not None:
            line = {"fate": status_of(job), "why": job.failure, "r": 0, "s": 0, "m": 0, "w": dict(where)["num_warps"],
                    "loops": [], "compile_s": COMPILE_DEADLINE if status_of(job) == "timeout" else 0.0}  # fmt: skip
        else:
            line = job.result
        self.take({"c": values, **line})
        if self._lacks(where):
            self.ready.append(where)

    # ---- measuring

    def next_heat(self) -> Iterator[Job] | None:
        """The next races, as a task; None: nothing to measure yet."""
        if len(self.ready) >= BINARIES_A_HEAT or (self.ready and not self.to_compile and not self.compiling):
            batch, self.ready = self.ready[:BINARIES_A_HEAT], self.ready[BINARIES_A_HEAT:]
            configs = [
                self.table.config(self.table.binaries[where], value)
                for where in batch
                for value in sorted(self.wanted[where] - self.table.binaries[where].runs.keys())
            ]
            return self._race(configs, ROUNDS)
        if self.measured_all and self.finals is None:
            self.table.__dict__.pop("times", None)
            times = self.table.times
            best = min(times.values(), default=0.0)
            close = sorted(
                (where for where, time_us in times.items() if time_us <= CLOSE * best), key=times.__getitem__
            )
            close = close[:CLOSE_AT_MOST]
            heats = -(-len(close) // FINAL_HEAT)  # dealt out, each heat like the others
            self.finals = [[dict(where) for where in close[number::heats]] for number in range(heats)]
        if self.finals:
            return self._race(self.finals.pop(0), FINAL_ROUNDS)
        return None

    def _race(self, configs: Sequence[Config], rounds: int) -> Iterator[Job]:
        """Each group in a race of its own; a candidate that takes the process with it is filed, the others race again."""
        groups, starts, self.racing = [list(configs)], 0, True
        while groups:
            group = groups.pop(0)
            contenders = [self.table.default, *group]
            job = Job(RACE, (self.key, contenders, rounds, self._best()), RACE_DEADLINE)
            yield job
            if job.failure is None:
                starts = 0
                self._file(contenders, *job.result)
                continue
            click.echo(f"{tables.stem(self.key)}: {job.failure}", err=True)
            last = job.notes[-1] if job.notes else 0
            if last == 0:  # before any candidate
                starts += 1
                if starts == STARTS:
                    raise click.ClickException(f"the GPU fails before any candidate: {job.failure}")
                groups.insert(0, group)
            elif last < 0 and len(group) > 1:  # one of them: each by itself
                groups = [[config] for config in group] + groups
            else:
                culprit = group[max(0, last - 1)]
                self._lost(culprit, status_of(job))
                rest = [config for config in group if config is not culprit]
                groups = ([rest] if rest else []) + groups
        self.racing = False

    def _best(self) -> float:
        """The best time so far over the default's."""
        ratios = (self.table.ratio(run) for built in self.table.binaries.values() for run in built.runs.values())
        return min((ratio for ratio in ratios if ratio is not None), default=1.0)

    def _of(self, config: Config, status: str, samples: Sequence[float]) -> list[Any]:
        built = self.table.built(config)
        assert built is not None
        names = self.table.header["dimensions"]
        return [[built.config[name] for name in names], config[self.table.runtime], status, list(samples)]

    def _lost(self, config: Config, status: str) -> None:
        self.take({"heat": self.heat, "anchor": [], "of": [self._of(config, status, [])]})
        self.heat += 1

    def _file(
        self, contenders: Sequence[Config], times: Sequence[Sequence[float]], failures: Mapping[int, str]
    ) -> None:
        of = [
            self._of(config, "launch_error" if index in failures else "", times[index])
            for index, config in enumerate(contenders)
            if index
        ]
        self.take({"heat": self.heat, "anchor": list(times[0]), "of": of})
        self.heat += 1


# --- all of them


def record(recordings: Sequence[Recording], cores: int, budget: float) -> None:
    """Until everything is recorded or the budget is spent."""
    until = time.monotonic() + budget - CLOSING_SECONDS
    compilers, gpu_crew = Crew(max(1, cores - 1), {"OMP_NUM_THREADS": "1"}), Crew(1)
    current: tuple[Recording, Iterator[Job]] | None = None
    opened: list[Recording] = []
    said = 0.0
    try:
        while time.monotonic() < until and not all(recording.done for recording in recordings):
            for recording in recordings:
                while recording.to_compile and compilers.load < 2 * compilers.size:
                    if recording not in opened:
                        recording.open()
                        opened.append(recording)
                    where = recording.to_compile.pop(0)
                    recording.compiling += 1
                    arguments = (recording.key.kernel, recording.key.specialization(), dict(where), recording.gpu)
                    job = Job(CHECK, arguments, COMPILE_DEADLINE, tag=partial(recording.compiled, where))
                    compilers.submit(job)
            if current is None:
                for recording in recordings:
                    if recording.measured_all and not recording.done and recording not in opened:  # the finals are left
                        recording.open()
                        opened.append(recording)
                    task = recording.next_heat()
                    if task is not None:
                        current = recording, task
                        gpu_crew.submit(next(task))
                        break
            for job in worker.wait([compilers, gpu_crew], 0.2):
                if job.tag is not None:
                    job.tag(job)
                elif current is not None:
                    following = next(current[1], None)
                    if following is not None:
                        gpu_crew.submit(following)
                        continue
                    current = None
            for recording in opened:
                if recording.done and recording.journal.exists():
                    recording.pack()
                    click.echo(f"{tables.stem(recording.key)}: {summary(recording.table)}")
            if time.monotonic() - said > 15:
                said = time.monotonic()
                left = {tables.stem(r.key): (len(r.to_compile), len(r.ready)) for r in recordings if not r.done}
                click.echo(f"{until - said:.0f} s left; (to compile, to measure): {left}", err=True)
    finally:
        compilers.close()
        gpu_crew.close()
        for recording in opened:
            if recording.journal.exists():
                recording.pack()
                state = "whole" if recording.done else "incomplete"
                click.echo(f"{tables.stem(recording.key)}: {state}, {summary(recording.table)}")


def summary(table: tables.Table) -> str:
    best = min(table.times.values(), default=float("nan"))
    seconds = [built.compile_s for built in table.binaries.values()]
    return (
        f"{len(table.binaries)} binaries, {len(table.times)} times, best {best:.1f} us, default "
        f"{table.anchor_us if table.anchors else float('nan'):.1f} us, compile {median(seconds or [0.0]):.2f} s, "
        f"{table.header['seconds']} s in all"
    )


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--time-budget", type=float, default=540.0, help="Seconds, the packing included.")
@click.option("--cores", type=int, default=len(os.sched_getaffinity(0)), show_default="all")
@click.argument("keys", nargs=-1)
def main(out: Path, time_budget: float, cores: int, keys: tuple[str, ...]) -> None:
    """Record KEYS into tables in a folder, or go on with them."""
    import torch
    import triton

    gpu = gpus.present()
    if gpu is None:
        raise click.ClickException("no CUDA device that torch can use")
    facts = {
        "gpu": torch.cuda.get_device_name(), "driver": fingerprint.driver_version(), "triton": triton.__version__,
        "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    try:
        recordings = [Recording(key_named(text, gpu), gpu, out, facts) for text in keys or KEYS]
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    record(recordings, cores, time_budget)


if __name__ == "__main__":
    main()
