"""Times backwards whose keys are one tile: kernels/sm90/bwd_one_tile.py in several forms, beside what serves without it.

    python benchmarks/ahead.py benchmarks/one_key_tile.py                   # first: every binary, on all cores; no GPU
    python benchmarks/one_key_tile.py --out one_key_tile.json [--seconds 60]    # resumes from the file
    python benchmarks/one_key_tile.py --list                                # what would be timed; no GPU
    python benchmarks/one_key_tile.py --table one_key_tile.json             # a file, as text

Each result is compared with float32 arithmetic; a wrong one is an error. Each candidate is a CUDA graph; replays are
interleaved; the file holds medians of seven bursts in microseconds a call. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import dense_backwards
import side_by_side
import torch
import workloads
from launch_choices import race

from fa2tune import gpus
from fa2tune.calling import dispatch
from fa2tune.compiling import compiler
from fa2tune.compiling.registry import variant_named
from fa2tune.gpus import Gpu
from fa2tune.launching import one_key_tile, passes
from fa2tune.search_spaces.sm90 import bwd_one_tile
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import STRATEGIES, Config, Problem, Specialization

SERVED = "served"
BURST_MS = 2.0
#: Name -> call, and microseconds in benchmarks/calls/ or docs/bench/h200_workloads.json, if it is there.
CALLS: dict[str, tuple[Problem, dict[str, float]]] = {
    "91 keys": (Problem("bf16", 1, 9, 9, 222, 91, 120, 120, FULL), {"fa2tune": 18.0, "fa4": 15.9}),
    "104 keys, grouped": (Problem("bf16", 29, 4, 1, 104, 104, 96, 96, FULL), {"fa2tune": 23.5, "fa4": 23.2}),
    "107 keys": (Problem("bf16", 8, 5, 5, 107, 107, 200, 200, FULL), {"fa2tune": 17.6, "fa4": 17.2}),
    "87 keys, V apart": (Problem("bf16", 29, 10, 10, 87, 87, 48, 80, FULL), {"fa2tune": 39.0, "cudnn": 33.7}),
    "66 keys": (Problem("bf16", 23, 17, 17, 66, 66, 24, 24, CAUSAL), {"fa2tune": 19.9, "fa4": 18.4}),
    "68 keys": (Problem("bf16", 3, 31, 31, 68, 68, 208, 208, FULL), {"fa2tune": 28.3, "fa4": 27.1}),
    "67 keys, V apart": (Problem("bf16", 10, 5, 5, 67, 67, 192, 64, FULL), {"fa2tune": 14.6, "fa4": 12.6}),
    "92 keys": (Problem("bf16", 2, 5, 5, 92, 92, 240, 240, FULL), {"fa2tune": 14.7, "fa4": 12.9}),
    "sdxl cross": (Problem("bf16", 2, 20, 20, 1024, 77, 64, 64, FULL), {"fa2tune": 34.2, "fa4": 30.6}),
    "125 keys, grouped": (Problem("bf16", 13, 45, 9, 125, 125, 24, 24, FULL), {"fa2tune": 25.7, "fa4": 40.4}),
    "110 keys, one key head": (Problem("bf16", 6, 27, 1, 110, 110, 40, 40, CAUSAL), {"fa2tune": 24.1, "cudnn": 33.5}),
    "6726 queries": (Problem("bf16", 2, 2, 2, 6726, 100, 16, 16, FULL), {"fa2tune": 91.9, "cudnn": 169.7}),
    "118 keys": (Problem("bf16", 33, 19, 19, 668, 118, 192, 192, FULL), {"fa2tune": 466.6, "fa4": 702.4}),
    "medium, 64": (Problem("bf16", 10, 20, 20, 4096, 96, 64, 64, FULL), {}),
    "medium, 128": (Problem("bf16", 16, 32, 32, 500, 128, 128, 128, FULL), {}),
    "medium, 128, causal": (Problem("bf16", 50, 40, 40, 128, 128, 128, 128, CAUSAL), {}),
    "64 keys": (Problem("bf16", 16, 16, 16, 1024, 64, 128, 128, FULL), {}),
    "50 keys": (Problem("bf16", 40, 16, 16, 300, 50, 64, 64, FULL), {}),
    "65 keys": (Problem("bf16", 9, 92, 92, 117, 65, 16, 16, FULL), {"fa2tune": 48.9, "cudnn": 46.9}),
    "74 keys": (Problem("bf16", 24, 14, 14, 74, 74, 184, 184, FULL), {"fa2tune": 76.5, "fa4": 69.6}),
    "84 keys": (Problem("bf16", 35, 12, 12, 84, 84, 136, 136, CAUSAL), {"fa2tune": 79.7, "cudnn": 96.1}),
    "105 keys": (Problem("bf16", 12, 28, 28, 105, 105, 128, 128, FULL), {"fa2tune": 47.5, "cudnn": 57.1}),
    "93 keys": (Problem("bf16", 7, 31, 31, 93, 93, 48, 48, FULL), {"fa2tune": 19.1, "cudnn": 21.4}),
    "97 keys": (Problem("bf16", 7, 11, 11, 178, 97, 120, 120, FULL), {"fa2tune": 22.8, "cudnn": 23.8}),
}  # fmt: skip


def parts_of(problem: Problem, halves: int, gpu: Gpu) -> list[int]:
    """Numbers of parts: one, and those that are one or two programs a multiprocessor, or half a one."""
    blocks, heads = bwd_one_tile.blocks(problem), problem.batch * problem.heads_kv * halves
    found = {max(1, min(round(gpu.sm_count * turns) // heads, blocks)) for turns in (0.5, 1, 2)}
    return sorted(one for one in found | {1} if one <= bwd_one_tile.MOST_PARTS)


def candidates(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    spec = problem.specialization
    found = {}
    for halves in bwd_one_tile.halves_of(spec):
        said = "halves" if halves == 2 else "whole"
        for parts in parts_of(problem, halves, gpu):
            found[f"{said}, {parts} parts"] = bwd_one_tile.config_of(spec, parts, halves)
    if bwd_one_tile.can_take_turns(spec):
        found["in turns, 1 parts"] = bwd_one_tile.config_of(spec, 1, turns=True)
    return found


#: Kernel, specialization and the part of a config that its binary depends on.
Job = tuple[str, Specialization, tuple[tuple[str, Any], ...]]


def compile_one(job: Job) -> None:
    name, spec, binary = job
    try:
        compiler.compile_kernel(variant_named(name), spec, dict(binary), 90)
    except compiler.CompileError as error:
        click.echo(f"{name} {spec} {binary}: {error}")


def binaries(problem: Problem, gpu: Gpu, served: bool) -> Iterator[Job]:
    needed = [one for config in candidates(problem, gpu).values() for one in one_key_tile.kernels(problem, config, 90)]
    if served:
        for kernel, (choice, _) in dense_backwards.chosen(problem, gpu).items():
            needed += [(*one, problem) for one in passes.runs(kernel, problem.specialization, choice, 90)]
    for variant, config, posed in needed:
        yield variant.name, posed.specialization, tuple(sorted(compiler.binary_config(variant, config).items()))


def compile_all(names: Sequence[str], served: bool) -> None:
    h200 = gpus.named("h200")
    jobs = dict.fromkeys(job for name in names for job in binaries(CALLS[name][0], h200, served))
    with multiprocessing.get_context("spawn").Pool(min(15, max(1, len(jobs)))) as pool:
        pool.map(compile_one, sorted(jobs, key=lambda job: not job[0].startswith("sm90/bwd_f")), chunksize=1)


def measured(problem: Problem, served: bool) -> dict[str, Any]:
    """Candidate -> microseconds, or why it cannot be launched."""
    q, k, v, do = workloads.inputs(problem)
    want, gpu = workloads.expected(problem, q, k, v, do), dispatch.gpu_of(0)
    q, k, v, do = (one.transpose(1, 2) for one in (q, k, v, do))
    scale = problem.head_dim**-0.5
    o, lse = forward(problem, q, k, v, scale)
    ours = passes.describe(q, k, v, problem.mask, scale, o=o, do=do)
    calls: dict[str, Callable[[], Sequence[torch.Tensor]]] = {}
    failed: dict[str, str] = {}

    def taken(name: str, make: Callable[[], Any]) -> None:
        try:
            plan = make()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:80]
            return
        calls[name] = lambda: plan(do, None, q, k, v, o, lse)
        found = dict(zip(("dq", "dk", "dv"), (one.transpose(1, 2) for one in calls[name]()), strict=True))
        if (why := workloads.wrong(found, want, problem.group)) is not None:
            raise click.ClickException(f"{workloads.described(problem)}, {name}: {why}")

    if served:
        named = dense_backwards.chosen(ours, gpu)
        strategy = next(one for one, kernels in STRATEGIES.items() if set(kernels) == set(named))
        configs, parts = {one: its[0] for one, its in named.items()}, {one: its[1] for one, its in named.items()}
        order = dense_backwards.order_of(ours, named, gpu)
        taken(SERVED, lambda: passes.BackwardPlan(ours, do, None, q, k, v, o, scale, strategy, configs, parts, order))
    for name, config in candidates(ours, gpu).items():
        taken(name, lambda config=config: one_key_tile.OneTilePlan(ours, do, None, q, k, v, o, scale, config))
    times = race(list(calls.values()), torch.cuda.Stream(), BURST_MS)
    return {**dict(zip(calls, (round(us, 2) for us in times), strict=True)), **failed}


def forward(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o in the dtype and memory order of q, lse), in float32, a batch entry at a time."""
    from fa2tune.measuring import reference

    found = [
        reference.attention(q[at, None].float(), k[at, None].float(), v[at, None].float(), mask=problem.mask)
        for at in range(problem.batch)
    ]
    o = torch.cat([one for one, _ in found]).to(q.dtype)
    return o.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([one for _, one in found])


def line(name: str, call: Mapping[str, Any]) -> str:
    in_order = sorted(call["us"].items(), key=lambda one: (isinstance(one[1], str), one[1]))
    return f"{name} ({call['when drawn']}): " + "; ".join(f"{us} {which}" for which, us in in_order)


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--list", "listed", is_flag=True, help="Print what would be timed on an H200.")
@click.option("--only", multiple=True, help="The call of this name, and no others.")
@click.option(
    "--served/--without", default=True, show_default=True, help="With what serves, whose kernels compile longer."
)
@click.option("--seconds", type=float, default=300.0, show_default=True, help="Begins no call after so long.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON; its calls are not measured again.")
@click.option("--table", "shown", type=click.Path(exists=True, path_type=Path), help="Print this file's times.")
def main(
    listed: bool, only: tuple[str, ...], served: bool, seconds: float, out: Path | None, shown: Path | None
) -> None:
    if shown is not None:
        click.echo("\n".join(line(*one) for one in json.loads(shown.read_text("utf-8"))["calls"].items()))
        return
    if listed:
        for name, (problem, _) in CALLS.items():
            click.echo(f"{name}: {workloads.described(problem)}: {'; '.join(candidates(problem, gpus.named('h200')))}")
        return
    record, started = side_by_side.begun(out, {"environment": side_by_side.environment()}), time.monotonic()
    asked = {name: call for name, call in CALLS.items() if not only or name in only}
    compile_all([name for name in asked if name not in record["calls"]], served)
    compiled_s = time.monotonic() - started
    click.echo(f"compiled: {compiled_s:.0f} s")

    def one(call: tuple[Problem, Any]) -> dict[str, Any]:
        return {"us": measured(call[0], served), "when drawn": call[1]}

    side_by_side.fill(record, asked, one, seconds - compiled_s, out, line)


if __name__ == "__main__":
    main()
