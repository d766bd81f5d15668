"""Time forwards of few queries: the tuned kernel, keys split among programs in every number of parts, and SDPA.

    python benchmarks/few_queries.py --out benchmarks/calls/few_queries.json
    python benchmarks/few_queries.py --tiles --out benchmarks/calls/few_queries_tiles.json
    python benchmarks/few_queries.py --hopper --out benchmarks/calls/few_queries_hopper.json
    python benchmarks/few_queries.py --grouped --out benchmarks/calls/grouped_heads.json

Calls: one query (decoding) at batch 1, 8 and 64 with 1k, 8k and 32k keys, speculative decoding, a chunk of a long prompt,
short prompts. Of each: the tuned kernel that would serve otherwise, what the dispatcher chooses, and around it other numbers
of parts, in microseconds and bytes of K and V a second. With --tiles: other tiles, stages and loads in place of other numbers
of parts. With --hopper: chunks of a prompt, and other calls of few tiles, by the warp-specialised kernel that splits keys
(kernels/sm90/fwd_split.py), beside the fastest split of the portable one as it is estimated. With --grouped: calls of grouped
query heads, by the kernel whose tiles have several (kernels/sm90/fwd_grouped.py), beside what serves otherwise. cuDNN and
FlashAttention-2 come from torch's SDPA; where the mask is causal and there are several queries, the latter aligns it at the
bottom right and cuDNN is left out. Each candidate is a CUDA graph of up to 16 calls; replays are interleaved in random order;
medians of seven bursts. Every result is first compared with float32 attention; memory that is allocated is filled with NaN.
Binaries that Triton's cache lacks are compiled first.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from launch_choices import race
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from fa2tune.calling import choosing, dispatch
from fa2tune.calling.kinds import WARP_SPECIALIZED_ROWS
from fa2tune.calling.schedules import grouped_schedule, in_place_schedule, key_splits_schedule
from fa2tune.compiling import compiler, operandcheck, registry
from fa2tune.gpus import Gpu
from fa2tune.launching import key_splits, passes
from fa2tune.measuring import reference
from fa2tune.search_spaces.lib import hopper_key_parts
from fa2tune.search_spaces.portable import fwd_split
from fa2tune.search_spaces.sm90 import fwd_split as hopper_split
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import ITEMSIZE, Config, Problem
from fa2tune.spec.roles import FWD_SPLIT
from fa2tune.spec.variant import Variant

#: name -> (batch, query heads, key heads, queries, keys, head dim, mask)
CALLS = {
    **{f"decode {b} x {k}k": (b, 32, 8, 1, 1024 * k, 128, FULL) for b in (1, 8, 64) for k in (1, 8, 32)},
    "decode 16 x 4k": (16, 32, 8, 1, 4096, 128, FULL),
    "decode 64 x 2k, 8 / 1 heads": (64, 8, 1, 1, 2048, 128, FULL),
    "decode 1 x 8k, 16 / 16 heads": (1, 16, 16, 1, 8192, 128, FULL),
    "decode 8 x 4k, head dim 64": (8, 32, 8, 1, 4096, 64, FULL),
    "decode 8 x 4k, head dim 256": (8, 16, 8, 1, 4096, 256, FULL),
    "4 queries, 8 x 4k": (8, 32, 8, 4, 4096, 128, CAUSAL),
    "8 queries, 8 x 8k": (8, 32, 8, 8, 8192, 128, CAUSAL),
    "16 queries, 1 x 8k": (1, 32, 8, 16, 8192, 128, CAUSAL),
    "64 queries, 1 x 16k": (1, 32, 8, 64, 16384, 128, CAUSAL),
    "256 queries, 1 x 32k": (1, 32, 8, 256, 32768, 128, CAUSAL),
    **{
        f"{queries} queries, {b} x {k}k": (b, 32, 8, queries, 1024 * k, 128, CAUSAL)
        for queries, b, k in ((128, 1, 32), (256, 1, 8), (256, 2, 16), (512, 1, 32))
    },
    "256 queries, 1 x 32k, head dim 64": (1, 32, 8, 256, 32768, 64, CAUSAL),
    "prompt of 128": (1, 32, 8, 128, 128, 128, CAUSAL),
    "prompt of 256": (1, 32, 8, 256, 256, 128, CAUSAL),
    "prompt of 512": (1, 32, 8, 512, 512, 128, CAUSAL),
    "prompt of 777": (1, 32, 8, 777, 777, 128, CAUSAL),
}
#: Of few tiles: 64 to 1024 queries, 4k to 32k keys, 1 to 38 heads, groups of 1, 4 and 8.
HOPPER_CALLS = {
    f"{queries} queries, {b} x {keys // 1024}k, {hq} / {hk} heads, head dim {dim}, {mask}": (
        b, hq, hk, queries, keys, dim, mask
    )
    for b, hq, hk, queries, keys, dim, mask in (
        (1, 32, 8, 256, 32768, 128, CAUSAL), (1, 32, 8, 128, 32768, 128, CAUSAL), (1, 32, 8, 64, 16384, 128, CAUSAL),
        (1, 32, 8, 512, 32768, 128, CAUSAL), (1, 32, 8, 1024, 8192, 128, CAUSAL), (1, 32, 8, 256, 8192, 128, CAUSAL),
        (2, 32, 8, 256, 16384, 128, CAUSAL), (1, 64, 8, 256, 4096, 128, CAUSAL), (1, 8, 1, 512, 16384, 128, FULL),
        (1, 38, 38, 84, 18106, 200, FULL), (1, 3, 3, 1024, 32768, 64, FULL), (1, 32, 8, 256, 32768, 64, CAUSAL),
        (1, 1, 1, 1024, 32768, 128, FULL), (1, 16, 2, 256, 16384, 192, CAUSAL), (1, 16, 16, 256, 16384, 256, FULL),
        (1, 3, 3, 4096, 4096, 128, FULL),
    )
}  # fmt: skip
#: Of grouped query heads, where FlashAttention-4, or -3, was faster (docs/experiments/few-queries.md), and some more.
GROUPED_CALLS = {
    f"grouped {b} x {hq} / {hk}, {queries} queries, {keys} keys, head dim {dim}, {mask}": (
        b, hq, hk, queries, keys, dim, mask
    )
    for b, hq, hk, queries, keys, dim, mask in (
        (2, 65, 5, 136, 136, 56, FULL), (2, 20, 5, 291, 291, 160, FULL), (21, 8, 2, 131, 131, 64, CAUSAL),
        (9, 22, 2, 376, 376, 32, FULL), (17, 90, 2, 94, 94, 24, FULL), (10, 84, 1, 66, 66, 56, CAUSAL),
        (23, 92, 23, 303, 303, 120, FULL), (3, 66, 2, 410, 410, 224, CAUSAL), (10, 21, 1, 178, 178, 184, CAUSAL),
        (4, 32, 8, 256, 256, 128, CAUSAL), (8, 32, 8, 512, 512, 128, CAUSAL), (16, 32, 4, 40, 1024, 128, FULL),
    )
}  # fmt: skip
#: Of these other tiles are tried.
TILES = (
    "decode 1 x 8k", "decode 8 x 8k", "decode 64 x 2k, 8 / 1 heads", "8 queries, 8 x 8k", "64 queries, 1 x 16k",
    "256 queries, 1 x 32k", "decode 8 x 4k, head dim 64", "decode 8 x 4k, head dim 256",
)  # fmt: skip
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
SHAPE = ("dtype", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
BURST_MS = 3.0
ALL_CALLS = CALLS | HOPPER_CALLS | GROUPED_CALLS
SHOWN = 6

Calls = dict[str, Callable[[], torch.Tensor]]


def posed(name: str) -> Problem:
    batch, heads_q, heads_kv, queries, keys, dim, mask = ALL_CALLS[name]
    return Problem("bf16", batch, heads_q, heads_kv, queries, keys, dim, dim, mask)


def label(config: Config) -> str:
    if key_splits.has_longer_blocks(config):
        return f"80 keys{' in turn' if config['PINGPONG'] else ''}"
    if key_splits.is_in_shares(config):
        forms = ("PINGPONG", "in turn"), ("Q_IN_REGISTERS", "Q kept")
        found = [f"shares N{config['BLOCK_N']}", *(said for name, said in forms if config[name])]
        return f"{' '.join(found)} s{config['STAGES']}, {config['ROUNDS']} rounds"
    if key_splits.is_one_tile(config):
        return f"one tile M{config['BLOCK_M']} N{config['KEYS']}"
    if key_splits.is_multistage(config):
        return f"multistage M{config['BLOCK_M']} N{config['STAGE_KEYS']} s{config['STAGES']}"
    if key_splits.is_grouped(config):
        size = f"M{config['BLOCK_M']} N{config['BLOCK_N']} of {config['MEMBERS']} heads"
        return f"grouped {size}{', in turn' if config['PINGPONG'] else ''} s{config['STAGES']}"
    if key_splits.role_of(config) == FWD_SPLIT:
        forms = ("PINGPONG", "in turn"), ("NUMBERED", "numbered"), ("Q_IN_REGISTERS", "Q kept")
        found = [f"hopper M{config['BLOCK_M']} N{config['BLOCK_N']}", *(said for name, said in forms if config[name])]
        return f"{' '.join(found)} s{config['STAGES']} x{config['SPLITS']}"
    return (
        f"M{config['BLOCK_M']} N{config['BLOCK_N']} {config['LOADS'][:4]} w{config['num_warps']} s{config['num_stages']} "
        f"x{config['SPLITS']}"
    )


def other_splits(problem: Problem, chosen: Config) -> Iterator[Config]:
    """Other numbers of parts, with the chosen tile and the next ones."""
    spec, sizes = problem.specialization, fwd_split.tiles(problem.specialization, 90)
    place = sizes.index(chosen["BLOCK_M"])
    for rows in sizes[max(0, place - 1) : place + 2]:
        if rows > 16 and rows >= 2 * problem.seqlen_q * problem.group:
            continue
        own = chosen["SPLITS"]
        counts = {own // 2, own, 2 * own}
        if rows == chosen["BLOCK_M"]:
            counts |= {1, own // 4, own // 3, 2 * own // 3, own + 1, 3 * own // 2, 3 * own, 4 * own}
        for splits in sorted(counts - {0}):
            config = fwd_split.config_of(spec, 90, problem.tma, rows, splits)
            if splits == 1 or splits * config["BLOCK_N"] <= problem.seqlen_k:
                yield config


def other_tiles(problem: Problem, chosen: Config) -> Iterator[Config]:
    """Other tiles at the chosen number of parts."""
    sizes = fwd_split.tiles(problem.specialization, 90)
    place = sizes.index(chosen["BLOCK_M"])
    for rows in sizes[place : place + 2]:
        if rows > 16 and rows >= 4 * problem.seqlen_q * problem.group:
            continue
        many = rows >= 64
        kinds = itertools.product(
            (64, 128) if many else (32, 64, 128), (1, 2, 3) if many else (2, 3, 4),
            ("descriptor",) if many else ("pointer", "descriptor"), (4, 8) if many else (4,),
        )  # fmt: skip
        for block_n, stages, loads, warps in kinds:
            yield {
                **chosen, "BLOCK_M": rows, "BLOCK_N": block_n, "LOADS": loads, "num_warps": warps, "num_stages": stages,
            }  # fmt: skip


def hopper_splits(problem: Problem, fastest: Config) -> Iterator[Config]:
    """Of the warp-specialised kernel: other numbers of parts than the estimated fastest, the other tile, other forms."""
    spec, own = problem.specialization, fastest["SPLITS"]
    for rows in key_splits.split_tiles(problem, 90):
        near = {own} if rows != fastest["BLOCK_M"] else {own // 2, own - 1, own, own + 1, 3 * own // 2, 2 * own}
        for splits in sorted(near):
            config = hopper_split.config_of(spec, rows, max(splits, 2))
            if splits * config["BLOCK_N"] <= problem.seqlen_k:
                yield config
    if fastest["BLOCK_M"] > hopper_split.ROWS[0]:
        forms = ({**fastest, name: not fastest[name]} for name in ("PINGPONG", "NUMBERED", "Q_IN_REGISTERS"))
        yield from (form for form in forms if hopper_key_parts.fits(spec, form))


def grouped_tiles(problem: Problem, gpu: Gpu) -> list[Config]:
    """Tiles of several heads: the one that would serve, the estimated fastest of each size, the four estimated fastest; and
    what serves otherwise, if its keys are split."""
    choice = choosing.choose(problem, "fwd", gpu, WARP_SPECIALIZED_ROWS)
    split = key_splits_schedule.config_of(problem, choice.config, gpu, choice.row)
    best = grouped_schedule.best(problem, gpu)
    ordered = sorted(
        grouped_schedule.candidates(problem, gpu.arch), key=lambda one: grouped_schedule.grouped_us(problem, one, gpu)
    )
    fastest = {(one["BLOCK_M"], one["BLOCK_N"]): one for one in reversed(ordered)}  # of each size
    found = [best[1]] if best else []
    return [*found, *fastest.values(), *ordered[:4], *([split] if split else [])]


def kernels_of(name: str, config: Config) -> list[tuple[Variant, Config, Problem]]:
    """What runs for a config of a kernel that runs in place of the tuned one, or of a tuned one."""
    problem = posed(name)
    if in_place(config):
        return key_splits.kernels(problem, config, 90)
    return [(*one, problem) for one in passes.runs("fwd", problem.specialization, config, 90)]


def in_place(config: Config) -> bool:
    """Whether a config is of a kernel that runs in place of the tuned one."""
    return "SPLITS" in config or key_splits.role_in_place(config) is not None


def compile_one(job: tuple[str, Config]) -> None:
    """Into Triton's cache on disk; a config that does not compile is refused again when it is made a plan."""
    for variant, its_config, what in kernels_of(*job):
        try:
            operandcheck.compile_kernel(variant, what.specialization, compiler.binary_config(variant, its_config), 90)
        except compiler.CompileError:
            continue


def compile_all(wanted: dict[str, list[Config]]) -> int:
    jobs: dict[str, tuple[str, Config]] = {}
    for name, configs in wanted.items():
        for config in configs:
            spec = posed(name).specialization
            variant = key_splits.splitting(config) if in_place(config) else registry.variant_of("fwd", config)
            binary = compiler.binary_config(variant, config)
            jobs.setdefault(
                repr((spec, variant.name, sorted(binary.items()), config.get("SPLITS", 1) > 4)), (name, config)
            )
    with multiprocessing.get_context("spawn").Pool(min(14, len(jobs))) as pool:
        pool.map(compile_one, jobs.values(), chunksize=2)
    return len(jobs)


def sdpa(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Calls:
    """Name -> call, of the backends that take this call."""
    several = problem.seqlen_q > 1 and problem.mask == CAUSAL
    bias = causal_lower_right(problem.seqlen_q, problem.seqlen_k) if several else None
    found: Calls = {}
    for name, backend in PEERS.items():
        square = several and problem.seqlen_q == problem.seqlen_k
        if name == "cudnn" and several and not square:
            continue

        def call(backend: SDPBackend = backend, square: bool = square) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q, k, v, attn_mask=None if square else bias, is_causal=square, enable_gqa=problem.group > 1
                )

        try:
            call()
        except Exception as error:  # whatever a backend says of a call that it does not take
            print(f"    {name}: {str(error).splitlines()[0]:.100}")
            continue
        found[name] = call
    return found


def exact(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """In float32, one batch entry after the other."""
    with torch.no_grad():
        parts = [
            reference.attention(q[b : b + 1].float(), k[b : b + 1].float(), v[b : b + 1].float(), mask=problem.mask)[0]
            for b in range(problem.batch)
        ]
    return torch.cat(parts)


def measured(name: str, configs: list[Config], gpu: Gpu, stream: torch.cuda.Stream) -> dict[str, Any]:
    problem = posed(name)
    b, hq, hk, sq, sk, d, _ = ALL_CALLS[name]
    q = torch.randn(b, hq, sq, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, hk, sk, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    scale = d**-0.5
    choice = choosing.choose(problem, "fwd", gpu, WARP_SPECIALIZED_ROWS)
    tuned = choice.config
    chosen = in_place_schedule.instead_of(problem, tuned, gpu, choice.row)
    predicted = {
        "tuned": key_splits_schedule.ordinary_us(problem, tuned, gpu, choice.row),
        "split": key_splits_schedule.best(problem, gpu)[0],
    }
    if hopper := key_splits_schedule.hopper_best(problem, gpu):
        predicted["hopper"] = hopper[0]
    if problem.group > 1 and (grouped := grouped_schedule.best(problem, gpu)):
        predicted["grouped"] = grouped[0]
    plan = passes.ForwardPlan(problem, q, k, v, scale, tuned)
    calls: Calls = {"tuned": lambda: plan(q, k, v)[0]}
    refused = 0
    for config in configs:
        try:
            made = key_splits.SplitPlan(problem, q, k, v, scale, config)
        except Exception as error:  # a config that this GPU cannot run
            refused += 1
            if refused == 1:
                print(f"    {label(config)}: {str(error)[:100]}")
            continue
        calls[label(config)] = lambda made=made: made(q, k, v)[0]
    calls |= sdpa(problem, q, k, v)
    oracle = exact(problem, q, k, v)
    for one, call in calls.items():
        torch.use_deterministic_algorithms(one not in PEERS)  # what is allocated is filled with NaN
        result = call()
        torch.use_deterministic_algorithms(False)
        error = (result.float() - oracle).abs().max().item()
        if not error <= 0.01 * max(1.0, oracle.abs().max().item()):
            raise RuntimeError(f"{name}, {one}: off by {error}")
    del oracle
    times = dict(zip(calls, (round(us, 2) for us in race(list(calls.values()), stream, BURST_MS)), strict=True))
    bytes_read = b * hk * sk * 2 * d * ITEMSIZE["bf16"]
    served = label(chosen) if chosen else "tuned"
    peers = {one: times[one] for one in PEERS if one in times}
    rest = sorted((us, one) for one, us in times.items() if one not in peers)
    ours = times[served]
    print(
        f"{name}: served {served} {ours} us ({bytes_read / ours / 1e3:.0f} GB/s), tuned {times['tuned']}, {peers}, "
        f"predicted { {one: round(us, 1) for one, us in predicted.items()} }"
    )
    print("    " + "; ".join(f"{one} {us}" for us, one in rest[:SHOWN]), flush=True)
    asked = {one: value for one, value in asdict(problem).items() if one in SHAPE} | {"mask": problem.mask.name}
    return {
        "call": name,
        "problem": asked,
        "served": served,
        "bytes": bytes_read,
        "us": times,
        "predicted": predicted,
        "refused": refused,
    }


def candidates(problem: Problem, gpu: Gpu, tiles: bool, hopper: bool, grouped: bool = False) -> list[Config]:
    """What is timed beside the tuned kernel; ``tiles``, ``hopper``, ``grouped``: as the options say."""
    if grouped:
        return list({label(one): one for one in grouped_tiles(problem, gpu)}.values())
    fastest, found = key_splits_schedule.best(problem, gpu)[1], list[Config]()
    if not hopper:
        found = [fastest, *(other_tiles if tiles else other_splits)(problem, fastest)]
    elif best := key_splits_schedule.hopper_best(problem, gpu):
        found = [fastest, best[1], *hopper_splits(problem, best[1])]
    return list({label(one): one for one in found}.values())


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--tiles", is_flag=True, help="Try other tiles, not other numbers of parts.")
@click.option("--hopper", is_flag=True, help="Calls of few tiles, by the warp-specialised kernel that splits keys.")
@click.option("--grouped", is_flag=True, help="Grouped query heads, by the kernel whose tiles have several.")
@click.option("--only", default="", help="Calls whose names contain this.")
@click.option("--seconds", type=float, default=55.0, help="Begin no call after so many.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(tiles: bool, hopper: bool, grouped: bool, only: str, seconds: float, out: Path) -> None:
    started, stream = time.monotonic(), torch.cuda.Stream()
    random.seed(1)
    torch.manual_seed(1)
    gpu = dispatch.gpu_of(0)
    wanted: dict[str, list[Config]] = {}
    for name in GROUPED_CALLS if grouped else HOPPER_CALLS if hopper else TILES if tiles else CALLS:
        if only in name:
            wanted[name] = candidates(posed(name), gpu, tiles, hopper, grouped)
    tuned = {name: [choosing.choose(posed(name), "fwd", gpu, WARP_SPECIALIZED_ROWS).config] for name in wanted}
    count = compile_all({name: [*tuned[name], *configs] for name, configs in wanted.items()})
    print(f"{count} binaries after {time.monotonic() - started:.0f} s", flush=True)
    cases = []
    for name, configs in wanted.items():
        if time.monotonic() - started > seconds:
            print(f"stopped after {len(cases)} of {len(wanted)} calls")
            break
        cases.append(measured(name, configs, gpu, stream))
        torch.cuda.empty_cache()
    node = choosing.toolchain()
    facts = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": node.triton, "driver": node.driver,
        "date": time.strftime("%Y-%m-%d"), "cases": cases,
    }  # fmt: skip
    out.write_text(json.dumps(facts, indent=None, separators=(",", ":")))


if __name__ == "__main__":
    main()
