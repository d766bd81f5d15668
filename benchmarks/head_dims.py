"""Race the Hopper kernels in two parts against columns padded to one power of two, head dims 40 to 192.

    python benchmarks/head_dims.py --out benchmarks/calls/head_dims.json.gz
    python benchmarks/head_dims.py --pass bwd --out benchmarks/calls/head_dims_bwd.json.gz

Of each call: the rows (or defaults) of the padded head dims as they are ("padded"), what the dispatcher makes of them
("parts"), and changes to both. A backward's kernels are timed together; a change is of those that have the dimension. Each
candidate is a CUDA graph; replays are interleaved in random order; the file holds every burst, in microseconds a call, and
their median. Binaries are compiled first, on all cores. A candidate whose result differs from the first one's by more than
bf16 allows is an error. Needs a GPU of compute capability 9.0.
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
from fa2tune.calling.kinds import WARP_SPECIALIZED_ROWS
from fa2tune.compiling import compiler, limits, registry
from fa2tune.launching import passes
from fa2tune.measuring.timing import in_a_row
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import BACKWARD, FUSED, SPLIT, STRATEGIES, Config, Problem, Specialization, padded_head_dim
from fa2tune.spec.variant import WARP_SPECIALIZED, Variant

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
#: The same for the backward, and whether it is the split one where the fused kernel has room, too.
BACKWARD_CALLS = (
    ((4, 32, 32, 2048, 96, 96), True, False),
    ((4, 32, 32, 2048, 80, 80), True, False),
    ((2, 48, 8, 4096, 192, 192), True, False),
    ((1, 16, 16, 4096, 192, 128), True, False),
    ((4, 12, 12, 4096, 160, 160), True, False),
    ((16, 16, 16, 729, 72, 72), False, False),
    ((32, 16, 16, 257, 80, 80), False, False),
    ((2, 16, 16, 8192, 96, 96), False, False),
    ((2, 20, 20, 8192, 80, 80), False, False),
    ((2, 10, 10, 8192, 192, 192), False, False),
    ((4, 32, 32, 2048, 96, 96), True, True),
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
#: Dimensions that a launch chooses, so that nothing more is compiled.
BACKWARD_PADDED: tuple[Config, ...] = ({"HEADS_PER_WAVE": 8},)
BACKWARD_TRIED: tuple[Config, ...] = ({"HEADS_PER_WAVE": 4}, {"HEADS_PER_WAVE": 8}, {"HEADS_PER_WAVE": 32})
BURSTS, CALLS_A_BURST = 9, 3
WARM_SECONDS = 0.25
#: Kernel -> its config.
Configs = dict[str, dict[str, Any]]


def posed(shape: tuple[int, ...], causal: bool) -> Problem:
    batch, heads_q, heads_kv, seqlen, dim, dim_v = shape
    return Problem("bf16", batch, heads_q, heads_kv, seqlen, seqlen, dim, dim_v, CAUSAL if causal else FULL)


def hopper(kernel: str) -> Variant:
    return next(
        one for one in registry.variants_of(kernel) if WARP_SPECIALIZED in one.implementations and one.runs_on(90)
    )


def kernels_of(problem: Problem, pass_: str, split: bool, gpu: gpus.Gpu) -> tuple[str, ...]:
    """The Hopper kernels of a pass: of the backward those of the fused strategy, where its kernel has room for the columns and
    split is not asked for."""
    if pass_ != BACKWARD:
        return (pass_,)
    fused, spec = hopper("bwd_fused"), problem.specialization
    fits = limits.before_compile(fused, spec, fused.space.default(spec, gpu.arch), gpu) is None
    return STRATEGIES[FUSED if fits and not split else SPLIT]


def candidates(problem: Problem, pass_: str, split: bool, gpu: gpus.Gpu) -> dict[str, Configs]:
    """Name -> configs, of those that are legal; "padded" first."""
    spec, wanted = problem.specialization, dict[str, Configs]({"padded": {}, "parts": {}})
    for kernel in kernels_of(problem, pass_, split, gpu):
        choice, variant = choosing.choose(problem, kernel, gpu, WARP_SPECIALIZED_ROWS), hopper(kernel)
        if choice.answer is None:
            dims = padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v)
            whole = variant.space.default(Specialization(spec.dtype, *dims, spec.mask), gpu.arch)
        else:
            whole = {**variant.space.completed(choice.answer.row.config)}
        nothing = "none" if kernel == "fwd" else False
        wanted["padded"][kernel] = {**whole, "IN_PARTS": nothing}
        wanted["parts"][kernel] = dict(choice.config)
    padded, tried = (BACKWARD_PADDED, BACKWARD_TRIED) if pass_ == BACKWARD else (PADDED, TRIED)
    for base, changes in (("padded", padded), ("parts", tried)):
        for change in changes:
            name = f"{base} " + " ".join(f"{name}={value}" for name, value in change.items())
            wanted[name] = {
                kernel: {**config, **change} if change.keys() <= config.keys() else config
                for kernel, config in wanted[base].items()
            }
    found: dict[str, Configs] = {}
    for name, configs in wanted.items():
        refused = (limits.before_compile(hopper(kernel), spec, config, gpu) for kernel, config in configs.items())
        if configs not in found.values() and not any(refused):
            found[name] = configs
    return found


def build(job: tuple[str, Specialization, Config]) -> None:
    """Into Triton's cache on disk, with the kernels that run before and after."""
    kernel, spec, config = job
    for one, its_config in passes.runs(kernel, spec, config, 90):
        compiler.compile_kernel(one, spec, its_config, 90)


def captured(
    problem: Problem, pass_: str, candidates: Mapping[str, Configs], calls: int
) -> dict[str, tuple[torch.cuda.CUDAGraph, Any]]:
    """Name -> (a graph of so many calls, what it reads and writes). RuntimeError: a result differs from the first."""

    def drawn(heads: int, seqlen: int, dim: int) -> torch.Tensor:
        return torch.randn(problem.batch, heads, seqlen, dim, device="cuda", dtype=torch.bfloat16)

    q = drawn(problem.heads_q, problem.seqlen_q, problem.head_dim)
    k = drawn(problem.heads_kv, problem.seqlen_k, problem.head_dim)
    v = drawn(problem.heads_kv, problem.seqlen_k, problem.head_dim_v)
    scale = problem.head_dim**-0.5
    do = drawn(problem.heads_q, problem.seqlen_q, problem.head_dim_v)
    if pass_ == BACKWARD:
        forward = choosing.choose(problem, "fwd", dispatch.gpu_of(0), WARP_SPECIALIZED_ROWS).config
        o, lse = passes.ForwardPlan(problem, q, k, v, scale, forward)(q, k, v)
    found: dict[str, tuple[torch.cuda.CUDAGraph, Any]] = {}
    first: list[torch.Tensor] | None = None
    for name, configs in candidates.items():
        if pass_ == BACKWARD:
            strategy = next(name for name, kernels in STRATEGIES.items() if set(kernels) == set(configs))
            plan: Any = passes.BackwardPlan(problem, do, None, q, k, v, o, scale, strategy, configs)
            given = (do, None, q, k, v, o, lse)
        else:
            plan, given = passes.ForwardPlan(problem, q, k, v, scale, configs["fwd"]), (q, k, v)
        made = plan(*given)
        results = [one.float() for one in (made if pass_ == BACKWARD else made[:1])]
        first = results if first is None else first
        for one, other in zip(results, first, strict=True):
            limit = 0.05 if pass_ != BACKWARD else 0.02 * other.abs().max().item()
            if not (far := (one - other).abs().max().item()) < limit:
                raise RuntimeError(f"{problem}, {name}: differs from the first by {far:.3f}")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                plan(*given)
        found[name] = graph, (plan, given)
    return found


def timed(problem: Problem, pass_: str, candidates: Mapping[str, Configs]) -> dict[str, list[float]]:
    """Name -> microseconds a call, of each burst."""
    calls = max(2, min(20, int(2e-3 / (problem.flops(pass_) / 400e12))))
    graphs = captured(problem, pass_, candidates, calls)
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
            times[name].append(round(in_a_row(graph.replay, CALLS_A_BURST) / calls, 2))
    return times


def shown(problem: Problem, pass_: str, strategy: str, us: Mapping[str, float]) -> str:
    """The padded row's time, and how much faster each other candidate is, the fastest first."""
    base = us["padded"]
    others = sorted((name for name in us if name != "padded"), key=lambda name: us[name])
    rates = ", ".join(f"{base / us[name]:.3f} {name}" for name in others[:6])
    mine = f"parts {base / us['parts']:.3f}; " if "parts" in us else ""
    dims = (problem.head_dim, problem.head_dim_v, problem.batch, problem.heads_q, problem.heads_kv, problem.seqlen_q)
    rate = f"{problem.flops(pass_) / base * 1e-6:.0f} TFLOP/s"
    return f"{dims} {problem.mask.name} {strategy}: padded {base} us, {rate}; {mine}{rates}"


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--pass", "pass_", type=click.Choice(("fwd", BACKWARD)), default="fwd", show_default=True)
@click.option("--dim", "dims", type=int, multiple=True, help="Only the calls of these head dims.")
def main(out: Path, pass_: str, dims: tuple[int, ...]) -> None:
    random.seed(1)
    gpu = dispatch.gpu_of(0)
    calls = BACKWARD_CALLS if pass_ == BACKWARD else tuple((*call, False) for call in CALLS)
    wanted = {
        (shape, causal, split): candidates(posed(shape, causal), pass_, split, gpu)
        for shape, causal, split in calls if not dims or shape[4] in dims
    }  # fmt: skip
    jobs = list[tuple[str, Specialization, Config]]()
    for call, found in wanted.items():
        spec = posed(*call[:2]).specialization
        for configs in found.values():
            for kernel, config in configs.items():
                one = kernel, spec, compiler.binary_config(hopper(kernel), config)
                jobs += [] if one in jobs else [one]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(build, jobs))
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": choosing.toolchain().triton,
        "driver": choosing.toolchain().driver, "date": time.strftime("%Y-%m-%d"), "calls": [],
    }  # fmt: skip
    for (shape, causal, split), found in wanted.items():
        times = timed(posed(shape, causal), pass_, found)
        raced = [
            {
                "name": name, "us": statistics.median(times[name]), "bursts": times[name],
                **({"configs": configs} if pass_ == BACKWARD else {"config": configs["fwd"]}),
            }
            for name, configs in found.items()
        ]  # fmt: skip
        facts["calls"].append({"shape": shape, "causal": causal, "raced": raced} | ({"split": True} if split else {}))
        strategy = " + ".join(found["padded"])
        print(shown(posed(shape, causal), pass_, strategy, {one["name"]: one["us"] for one in raced}), flush=True)
        torch.cuda.empty_cache()
    out.write_bytes(gzip.compress(json.dumps(facts, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
