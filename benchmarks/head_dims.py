"""Race the Hopper forward in two parts against columns padded to one power of two, head dims 40 to 192.

    python benchmarks/head_dims.py --out benchmarks/calls/head_dims.json.gz

Of each call: the row (or default) of the padded head dims as it is ("padded"), what the dispatcher makes of it ("parts"), and
changes to both. Each candidate is a CUDA graph; replays are interleaved in random order; the file holds every burst, in
microseconds a call, and their median. Binaries are compiled first, on all cores. A candidate whose result differs from the
first one's by more than bf16 allows is an error. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch

from fa2tune import gpus
from fa2tune.calling import choosing, dispatch
from fa2tune.compiling import compiler, limits, registry
from fa2tune.launching import passes
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Config, Problem, Specialization, padded_head_dim

#: batch, query heads, key heads, length, head dim, head dim of V; whether causal
CALLS = (
    ((4, 32, 32, 2048, 96, 96), True),
    ((4, 32, 32, 2048, 80, 80), True),
    ((2, 48, 8, 4096, 192, 192), True),
    ((1, 16, 16, 4096, 192, 128), True),
    ((2, 8, 8, 256, 160, 160), False),
    ((16, 16, 16, 729, 72, 72), False),
    ((2, 8, 8, 4096, 40, 40), False),
    ((32, 16, 16, 257, 80, 80), False),
)
_TWO_PROGRAMS = {"BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 3, "Q_STAGES": 1, "PINGPONG": False, "maxnreg": 128}
_LONGER = {"BLOCK_N": 128, "STAGES": 2, "Q_STAGES": 1}
_SHORTER = {"BLOCK_N": 64, "STAGES": 3, "Q_STAGES": 1, "O_THROUGH": "own"}
#: Changes to "parts"; those that are not legal for a call's head dims are left out.
TRIED: tuple[Config, ...] = (
    {"RESCALE": "never"}, {"RESCALE": "lazy"}, {"Q_STAGES": 1}, {"Q_STAGES": 2}, {"Q_STAGES": 2, "STAGES": 2},
    {"NUMBERED": True}, {"PINGPONG": True}, {"PINGPONG": False}, {"Q_IN_REGISTERS": True},
    {"BLOCK_M": 192, "BLOCK_N": 64, "STAGES": 3}, {**_LONGER, "O_THROUGH": "q"}, {**_LONGER, "O_THROUGH": "halves"},
    _SHORTER, {**_SHORTER, "STAGES": 2}, _TWO_PROGRAMS, {**_TWO_PROGRAMS, "STAGES": 2, "O_THROUGH": "q"},
)  # fmt: skip
PADDED: tuple[Config, ...] = ({"RESCALE": "lazy"}, {"RESCALE": "never"})
BURSTS, CALLS_A_BURST = 9, 3
WARM_SECONDS = 0.25
FORWARD = "sm90/fwd"


def posed(shape: tuple[int, ...], causal: bool) -> Problem:
    batch, heads_q, heads_kv, seqlen, dim, dim_v = shape
    return Problem("bf16", batch, heads_q, heads_kv, seqlen, seqlen, dim, dim_v, CAUSAL if causal else FULL)


def candidates(problem: Problem, gpu: gpus.Gpu) -> dict[str, Config]:
    """Name -> config, of those that are legal; "padded" first."""
    variant, spec = registry.variant_named(FORWARD), problem.specialization
    choice = choosing.choose(problem, "fwd", gpu, True)
    if choice.answer is None:
        dims = padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v)
        whole = variant.space.default(Specialization(spec.dtype, *dims, spec.mask), gpu.arch)
    else:
        whole = {**variant.space.completed(choice.answer.row.config), "IN_PARTS": "none"}
    wanted = {"padded": whole, "parts": choice.config}
    for base, changes in (("padded", PADDED), ("parts", TRIED)):
        for change in changes:
            wanted[f"{base} " + " ".join(f"{name}={value}" for name, value in change.items())] = {
                **wanted[base], **change,
            }  # fmt: skip
    found: dict[str, Config] = {}
    for name, config in wanted.items():
        if config not in found.values() and limits.before_compile(variant, spec, config, gpu) is None:
            found[name] = dict(config)
    return found


def build(job: tuple[Specialization, Config]) -> None:
    """Into Triton's cache on disk, with the kernels that run before and after."""
    spec, config = job
    variant = registry.variant_named(FORWARD)
    before, after = compiler.around(variant, spec, config, 90)
    for one, its_config in (*before, (variant, config), *after):
        compiler.compile_kernel(one, spec, its_config, 90)


def captured(
    problem: Problem, configs: Mapping[str, Config], calls: int
) -> dict[str, tuple[torch.cuda.CUDAGraph, Any]]:
    """Name -> (a graph of so many calls, what it reads and writes). RuntimeError: a result differs from the first."""

    def drawn(heads: int, seqlen: int, dim: int) -> torch.Tensor:
        return torch.randn(problem.batch, heads, seqlen, dim, device="cuda", dtype=torch.bfloat16)

    q = drawn(problem.heads_q, problem.seqlen_q, problem.head_dim)
    k = drawn(problem.heads_kv, problem.seqlen_k, problem.head_dim)
    v = drawn(problem.heads_kv, problem.seqlen_k, problem.head_dim_v)
    found: dict[str, tuple[torch.cuda.CUDAGraph, Any]] = {}
    first: torch.Tensor | None = None
    for name, config in configs.items():
        plan = passes.ForwardPlan(problem, q, k, v, problem.head_dim**-0.5, config)
        o = plan(q, k, v)[0].float()
        first = o if first is None else first
        if not (far := (o - first).abs().max().item()) < 0.05:
            raise RuntimeError(f"{problem}, {name}: differs from the first by {far:.3f}")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                plan(q, k, v)
        found[name] = graph, (plan, q, k, v)
    return found


def timed(problem: Problem, configs: Mapping[str, Config]) -> dict[str, list[float]]:
    """Name -> microseconds a call, of each burst."""
    calls = max(2, min(20, int(2e-3 / (problem.flops("fwd") / 400e12))))
    graphs = captured(problem, configs, calls)
    names, times = list(graphs), {name: list[float]() for name in graphs}
    until = time.monotonic() + WARM_SECONDS
    while time.monotonic() < until:
        for graph, _ in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    for _ in range(BURSTS):
        random.shuffle(names)
        for name in names:
            graph = graphs[name][0]
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS_A_BURST):
                graph.replay()
            end.record()
            end.synchronize()
            times[name].append(round(begin.elapsed_time(end) * 1e3 / CALLS_A_BURST / calls, 2))
    return times


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(out: Path) -> None:
    random.seed(1)
    gpu = dispatch.gpu_of(0)
    wanted = {(shape, causal): candidates(posed(shape, causal), gpu) for shape, causal in CALLS}
    jobs = [(posed(*call).specialization, config) for call, configs in wanted.items() for config in configs.values()]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(build, jobs))
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": choosing.toolchain().triton,
        "driver": choosing.toolchain().driver, "date": time.strftime("%Y-%m-%d"), "calls": [],
    }  # fmt: skip
    for (shape, causal), configs in wanted.items():
        times = timed(posed(shape, causal), configs)
        raced = [
            {"name": name, "config": config, "us": statistics.median(times[name]), "bursts": times[name]}
            for name, config in configs.items()
        ]
        facts["calls"].append({"shape": shape, "causal": causal, "raced": raced})
        print(shape, causal, {one["name"]: one["us"] for one in raced}, flush=True)
        torch.cuda.empty_cache()
    out.write_bytes(gzip.compress(json.dumps(facts, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
