"""Race the shipped Hopper configs of a head dim and mask, in several tile orders, on calls they were not tuned on.

    python benchmarks/launch_choices.py --seed 1 --shapes 72 --seconds 240 --out launch_choices_fwd.json
    python benchmarks/launch_choices.py --backward --seed 1 --shapes 36 --seconds 200 --out launch_choices_bwd.json
    python benchmarks/launch_choices.py --small --shapes 12 --out launch_choices_small.json
    python benchmarks/launch_choices.py --few --shapes 90 --out launch_choices_few.json

Each shape is drawn from the seed: head dim 64, 128 or 256, either mask, batch x heads and both lengths log-uniform, a key/value
group in half of the calls. Candidates are every distinct warp-specialised config that h200.sqlite has for that head dim and
mask, forward ones in tile orders 0, 1, 4, 22 and 64 (HEADS_PER_WAVE). With --small: prompts, then drawn forward calls of 0.1
to 30 GFLOP; candidates are the whole search space with RESCALE "lazy" and order 0. With --few: calls of few tiles that were
behind a peer or near it, then drawn ones of all head dims up to 256; candidates are one config for each tile, number of Q
stages and programs a multiprocessor, "lazy". Each candidate is a CUDA graph of up to 16 calls; replays are interleaved in
random order; the file holds the median of seven bursts, in microseconds a call, and what the dispatcher would have chosen. A
candidate that differs from the first by more than bf16 allows is an error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import click
import torch

from fa2tune.calling import choosing, dispatch
from fa2tune.compiling import compiler, registry
from fa2tune.launching import passes
from fa2tune.measuring.timing import in_a_row
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Specialization

ORDERS = (0, 1, 4, 22, 64)
MOST_FLOP = 2.5e12  #: of a forward: about 5 ms
MOST_BYTES = 6 << 30
SMALL_FLOP = (1e8, 3e10)
#: (batch, query heads, key heads, queries, keys, head dim unless another is asked for, causal) of the first --small calls:
#: prompts of a Llama, and others of few tiles.
PROMPTS = (
    (1, 32, 8, 128, 128, 128, True), (1, 32, 8, 256, 256, 128, True), (1, 32, 8, 512, 512, 128, True),
    (1, 32, 8, 777, 777, 128, True), (1, 32, 8, 1024, 1024, 128, True), (1, 32, 8, 1536, 1536, 128, True),
    (4, 32, 8, 128, 128, 128, True), (1, 32, 8, 256, 4096, 128, True), (8, 16, 16, 256, 256, 128, False),
)  # fmt: skip
#: The first calls of --few, likewise.
FEW = (
    (2, 65, 5, 136, 136, 56, False), (2, 20, 20, 1024, 1024, 64, False), (2, 20, 20, 1024, 77, 64, False),
    (29, 3, 3, 898, 898, 64, False), (1, 5, 5, 538, 538, 32, False), (9, 22, 2, 376, 376, 32, False),
    (17, 90, 2, 94, 94, 24, False), (7, 31, 31, 93, 93, 48, False), (1, 61, 61, 1099, 1099, 40, False),
    (16, 16, 16, 512, 512, 64, False), (21, 8, 2, 131, 131, 64, True), (6, 12, 4, 2607, 2607, 24, True),
    (10, 84, 1, 66, 66, 56, True),
)  # fmt: skip
NAMES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "causal")
#: The others of --few: head dims, and up to so many tiles of 128 rows a multiprocessor of an H200.
FEW_DIMS, FEW_TILES, SM_COUNT = (32, 48, 64, 80, 96, 128, 160, 192, 256), 8, 132
#: What differs between the candidates of --few.
FORM = ("BLOCK_M", "BLOCK_N", "Q_STAGES", "maxnreg")


def drawn(seed: int, count: int, backward: bool) -> list[dict[str, Any]]:
    """Shapes, the same ones for the same seed."""
    rng = random.Random(seed)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        dim = rng.choice((64, 128, 256))
        causal = rng.random() < 0.6
        seqlen_q = int(math.exp(rng.uniform(math.log(128), math.log(24000))))
        seqlen_k = seqlen_q
        if rng.random() < 0.25:
            seqlen_k = int(math.exp(rng.uniform(math.log(128), math.log(24000))))
        group = rng.choice((1, 1, 1, 2, 4, 8)) if not backward else rng.choice((1, 1, 1, 1, 2, 4))
        heads_kv = rng.choice((1, 2, 4, 8, 10, 16, 20, 32))
        batch = int(math.exp(rng.uniform(0, math.log(32))))
        heads = heads_kv * group
        flop = 4 * batch * heads * seqlen_q * seqlen_k * dim * (0.5 if causal else 1)
        tensors = 2 * dim * batch * (2 * heads * seqlen_q + 2 * heads_kv * seqlen_k)
        if heads > 96 or flop > MOST_FLOP or flop < 2e9 or tensors > MOST_BYTES or (causal and seqlen_q > seqlen_k):
            continue
        found.append({
            "batch": batch, "heads_q": heads, "heads_kv": heads_kv, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
            "head_dim": dim, "causal": causal,
        })  # fmt: skip
    return found


def _mask(shape: dict[str, Any]) -> Mask:
    return CAUSAL if shape["causal"] else FULL


def drawn_small(seed: int, count: int, dim: int) -> list[dict[str, Any]]:
    """Few tiles: prompts and short sequences, batch 1 to 8; ``dim``: the head dim."""
    rng = random.Random(seed)
    found: list[dict[str, Any]] = [
        {**dict(zip(NAMES, one, strict=True)), "head_dim": dim, "space": True} for one in PROMPTS[:count]
    ]
    while len(found) < count:
        seqlen, batch = int(math.exp(rng.uniform(math.log(64), math.log(4000)))), rng.choice((1, 1, 1, 2, 4, 8))
        heads_kv, group, causal = rng.choice((2, 4, 8, 16)), rng.choice((1, 4)), rng.random() < 0.6
        flop = 4 * batch * heads_kv * group * seqlen * seqlen * dim * (0.5 if causal else 1)
        if SMALL_FLOP[0] <= flop <= SMALL_FLOP[1]:
            found.append({
                "batch": batch, "heads_q": heads_kv * group, "heads_kv": heads_kv, "seqlen_q": seqlen, "seqlen_k": seqlen,
                "head_dim": dim, "causal": causal, "space": True,
            })  # fmt: skip
    return found


def drawn_few(seed: int, count: int) -> list[dict[str, Any]]:
    """Calls of few tiles: FEW, then drawn ones, head dims in turn and three of five without a mask."""
    rng = random.Random(seed)
    found = [{**dict(zip(NAMES, one, strict=True)), "few": True} for one in FEW[:count]]

    def logarithmic(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    while len(found) < count:
        batch, heads_kv, group = logarithmic(1, 48), logarithmic(1, 96), rng.choice((1, 1, 1, 2, 4, 16))
        seqlen_q = seqlen_k = logarithmic(64, 2500)
        if rng.random() < 0.3:
            seqlen_k = logarithmic(64, 2500)
        causal = rng.random() < 0.4 and seqlen_q <= seqlen_k
        tiles = batch * heads_kv * group * -(-seqlen_q // 128)
        if heads_kv * group <= 96 and SM_COUNT / 16 <= tiles <= FEW_TILES * SM_COUNT:
            found.append({
                "batch": batch, "heads_q": heads_kv * group, "heads_kv": heads_kv, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
                "head_dim": FEW_DIMS[len(found) % len(FEW_DIMS)], "causal": causal, "few": True,
            })  # fmt: skip
    return found


def space_of(dim: int, mask: str) -> list[dict[str, Any]]:
    """Legal configs of the Hopper forward, "lazy", in the order 0."""
    space, spec = registry.variant_named("sm90/fwd").space, Specialization("bf16", dim, dim, mask)
    fixed = {"HEADS_PER_WAVE": 0, "RESCALE": "lazy"}
    points = (point for point in space.points() if all(point[name] == value for name, value in fixed.items()))
    return [point for point in points if space.broken(point, spec, 90) is None]


@functools.cache
def forms_of(dim: int, mask: str) -> list[dict[str, Any]]:
    """One config for each FORM: of the rows of 64 columns under either mask, else the last of the space, which has the most
    stages, keeps Q where it fits and has head dims in parts."""
    space = registry.variant_named("sm90/fwd").space
    known = [config for one in (FULL, CAUSAL) for config in configs_of("fwd", 64, one.name)]
    found = {tuple(config[name] for name in FORM): config for config in space_of(dim, mask)}
    spec = Specialization("bf16", dim, dim, mask)
    for row in known:
        config = space.completed({**row, "RESCALE": "lazy", "HEADS_PER_WAVE": 0})
        if space.broken(config, spec, 90) is None:
            found[tuple(config[name] for name in FORM)] = dict(config)
    return list(found.values())


def configs_of(kernel: str, dim: int, mask: str) -> list[dict[str, Any]]:
    """Distinct configs of the measured warp-specialised rows."""
    found: dict[str, dict[str, Any]] = {}
    for layer in choosing.layers():
        for row in layer.rows:
            key = row.key
            if layer.path.name == "h200.sqlite" and (key.kernel, key.dtype, key.head_dim, key.mask) == (
                kernel, "bf16", dim, mask,
            ) and row.warp_specialized:  # fmt: skip
                found.setdefault(json.dumps(row.config, sort_keys=True), dict(row.config))
    return list(found.values())


def candidates(shape: dict[str, Any], backward: bool) -> list[dict[str, dict[str, Any]]]:
    """kernel -> config, of each candidate."""
    dim, mask = shape["head_dim"], _mask(shape).name
    if shape.get("few"):
        made = [{"fwd": config} for config in forms_of(dim, mask)]
    elif shape.get("space"):
        made = [{"fwd": config} for config in space_of(dim, mask)]
    elif not backward:
        made = [
            {"fwd": {**config, "HEADS_PER_WAVE": order}} for config in configs_of("fwd", dim, mask) for order in ORDERS
        ]
    elif dim < 256:
        made = [
            {"bwd_fused": {**config, "HEADS_PER_WAVE": order}}
            for config in configs_of("bwd_fused", dim, mask)
            for order in (1, 4, 8)
        ]
    else:
        made = [
            {"bwd_dq": dq, "bwd_dkdv": dkdv}
            for dq in configs_of("bwd_dq", dim, mask)[:3]
            for dkdv in configs_of("bwd_dkdv", dim, mask)[:4]
        ]
    return list({json.dumps(one, sort_keys=True): one for one in made}.values())


def compile_one(job: tuple[str, int, str, dict[str, Any]]) -> None:
    """Into Triton's cache on disk; a config that does not compile is left for the race to refuse."""
    kernel, dim, mask, config = job
    spec = Specialization("bf16", dim, dim, mask)
    variant = registry.variant_of(kernel, config)
    before, after = compiler.around(variant, spec, config, 90)
    for one, its_config in [*before, (variant, config), *after]:
        with contextlib.suppress(compiler.CompileError):
            compiler.compile_kernel(one, spec, compiler.binary_config(one, its_config), 90)


def compile_all(shapes: list[dict[str, Any]], backward: bool) -> int:
    jobs: dict[str, tuple[str, int, str, dict[str, Any]]] = {}
    for shape in shapes:
        for configs in candidates(shape, backward):
            for kernel, config in configs.items():
                binary = {**config, "HEADS_PER_WAVE": 1}
                job = (kernel, shape["head_dim"], _mask(shape).name, binary)
                jobs.setdefault(json.dumps(job, sort_keys=True), job)
    with multiprocessing.get_context("spawn").Pool(min(14, len(jobs))) as pool:
        pool.map(compile_one, jobs.values(), chunksize=1)
    return len(jobs)


def differing(config: dict[str, Any], chosen: dict[str, Any]) -> str:
    """What a config has that the chosen one has not."""
    other = {name: value for name, value in config.items() if chosen.get(name) != value}
    return " ".join(f"{name}={value}" for name, value in other.items()) or "the same"


def graphed(call: Any, count: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    return graph


def race(calls: list[Any], stream: torch.cuda.Stream, burst_ms: float) -> list[float]:
    """Median microseconds a call of each, interleaved."""
    replays = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        once = in_a_row(call, 3) / 1e3  # ms
        inner = max(1, min(16, int(0.3 / once)))
        graph = graphed(call, inner, stream)
        replays.append((graph.replay, inner, max(1, int(burst_ms / (once * inner)))))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(7):
        for index in random.sample(range(len(calls)), len(calls)):
            replay, inner, outer = replays[index]
            replay()
            samples[index].append(in_a_row(replay, outer) / inner)
    return [sorted(one)[3] for one in samples]


def measured(shape: dict[str, Any], backward: bool, stream: torch.cuda.Stream) -> dict[str, Any]:
    b, hq, hk, sq, sk, d = (shape[n] for n in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim"))
    q, do = (torch.randn(b, hq, sq, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(b, hk, sk, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    scale, mask = d**-0.5, _mask(shape)
    gpu = dispatch.gpu_of(0)
    problem = passes.describe(q, k, v, mask, scale)
    choice = choosing.choose(problem, "fwd", gpu)
    forward = passes.ForwardPlan(problem, q, k, v, scale, choice.config)
    o, lse = forward(q, k, v)
    chosen: dict[str, Any] = {"fwd": choice.config}
    if backward:
        problem = passes.describe(q, k, v, mask, scale, o=o, do=do)
        strategy, kinds = choosing.strategy_of(problem, gpu, False)
        chosen = {n: choosing.choose(problem, n, gpu, kinds.get(n)).config for n in passes.STRATEGIES[strategy]}
    plans, names, refused = [], [], []
    first = None
    for configs in [chosen, *candidates(shape, backward)]:
        try:
            if backward:
                strategy = "fused" if "bwd_fused" in configs else "split"
                plan = passes.BackwardPlan(problem, do, None, q, k, v, o, scale, strategy, configs)
                call = lambda plan=plan: plan(do, None, q, k, v, o, lse)  # noqa: E731
            else:
                plan = passes.ForwardPlan(problem, q, k, v, scale, configs["fwd"])
                call = lambda plan=plan: plan(q, k, v)  # noqa: E731
            result = call()
        except Exception as error:  # a config that this shape cannot have
            refused.append({"configs": configs, "why": repr(error)[:120]})
            continue
        first = first or result
        for a, b_ in zip(result, first, strict=True):
            a, b_ = a.float().nan_to_num(neginf=-1e4), b_.float().nan_to_num(neginf=-1e4)
            assert (a - b_).abs().max() <= 0.03 + 0.03 * b_.abs().max(), (shape, configs)
        plans.append(call)
        names.append(configs)
    times = race(plans, stream, 4.0)
    return {
        "shape": shape, "chosen_us": round(times[0], 2), "chosen": names[0], "refused": refused,
        "candidates": [{"us": round(t, 2), "configs": n} for t, n in zip(times[1:], names[1:], strict=True)],
    }  # fmt: skip


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--backward", is_flag=True)
@click.option("--small", is_flag=True)
@click.option("--few", is_flag=True)
@click.option("--dim", type=int, default=128, help="Head dim of --small calls.")
@click.option("--seed", type=int, default=1)
@click.option("--shapes", type=int, default=72)
@click.option("--seconds", type=float, default=240.0)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(backward: bool, small: bool, few: bool, dim: int, seed: int, shapes: int, seconds: float,
         out: Path) -> None:  # fmt: skip
    started, cases = time.monotonic(), []
    stream = torch.cuda.Stream()
    random.seed(seed)
    asked = drawn_small(seed, shapes, dim) if small else drawn(seed, shapes, backward)
    if few:
        asked = drawn_few(seed, shapes)
    print(f"{compile_all(asked, backward)} binaries after {time.monotonic() - started:.0f} s", flush=True)
    began = time.monotonic()
    warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    while time.monotonic() - began < 2:
        warm @ warm
        torch.cuda.synchronize()
    for shape in asked:
        if time.monotonic() - started > seconds:
            print(f"stopped after {len(cases)} of {shapes} shapes")
            break
        cases.append(measured(shape, backward, stream))
        first = sorted(cases[-1]["candidates"], key=lambda c: c["us"])[:3]
        best = first[0]
        print(f"{list(shape.values())} chosen {cases[-1]['chosen_us']} best {best['us']} "
              f"({cases[-1]['chosen_us'] / best['us']:.3f})", flush=True)  # fmt: skip
        if small or few:
            print(f"    chosen {cases[-1]['chosen']['fwd']}")
            for one in first:
                print(f"    {one['us']:7.2f} {differing(one['configs']['fwd'], cases[-1]['chosen']['fwd'])}")
        torch.cuda.empty_cache()
    facts = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "seed": seed,
        "triton": choosing.toolchain().triton, "driver": choosing.toolchain().driver,
        "date": time.strftime("%Y-%m-%d"), "cases": cases,
    }  # fmt: skip
    out.write_text(json.dumps(facts, indent=None, separators=(",", ":")))
    lost = sorted(c["chosen_us"] / min(x["us"] for x in c["candidates"]) for c in cases)
    print(f"{len(cases)} shapes: chosen / best, median {lost[len(lost) // 2]:.3f}, worst {lost[-1]:.3f}")


if __name__ == "__main__":
    main()
