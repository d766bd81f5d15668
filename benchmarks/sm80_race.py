"""Races the kernels of kernels/sm80 as sm_80 code on a Hopper GPU against SDPA's FlashAttention-2, which is mma.sync code, too.

    python benchmarks/sm80_race.py --headdim 64,128 --configs 6 --out race.json

The sm_80 PTX that Triton makes is assembled by ptxas for this GPU: the same instructions, barriers and traffic as on an A100.
--gpu says whose limits and defaults count; with --crowd, blocks ask for so much shared memory that no more of them share a
multiprocessor than there. What does not carry over: an A100's float32 rate is half of Hopper's, its mma.sync takes 8 clocks
where Hopper takes some 6.2, and so on for the others.
Per cell (pass, head dim, mask, length; 16k tokens, hidden size 2048, bf16): the default config, those of --try and so many
legal ones drawn at random, each checked by the error rule and compared with SDPA's result, then timed in turns. Figures: SDPA's
time divided by this one, median over rounds. Tensors are (batch, seqlen, heads, dim) in memory, and seen as SDPA asks for them.

    python benchmarks/sm80_race.py --pass fwd --configs 0 --try '{"SCHEDULE": "double", "BLOCK_N": 32}' --every

With --in-order every backward config also races with dQ summed in a fixed order: "turns", one sum, key tiles after each other
in the bands that suit this GPU, or "turns16" in bands of 16 heads; or by so many programs a head with sums of their own
(kernels/sm80/bwd_ordered.py), or (0) as many as suit this GPU. That two calls have equal bits is checked before. SDPA's
deterministic backward is raced with them. With --rows the shipped rows' configs race, not the default.

    python benchmarks/sm80_race.py --pass bwd --configs 0 --rows --headdim 96,128 --in-order turns,turns16,0 --out found.json

With --forms the configs of the shipped rows and forms that no search has (sm80_candidates.py) race with the default, where
there are such forms. --state keeps binaries; with --build they are only compiled, which needs no GPU.

    python benchmarks/sm80_race.py --forms --headdim 96,128,256 --configs 0 --state STATE --build
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import click
import sm80_on_hopper
from sm80_candidates import FORMS
from sm80_on_hopper import ARCH
from sm80_rows import Images

from fa2tune import gpus
from fa2tune.calling.schedules import ordered
from fa2tune.cli._options import comma_separated
from fa2tune.compiling import compiler, registry
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import cuda, launch, passes
from fa2tune.launching.image import Image
from fa2tune.measuring import timing, verify
from fa2tune.rows import reader
from fa2tune.rows.describe import describe
from fa2tune.spec.mask import Mask, row_mask_named
from fa2tune.spec.problem import FUSED, WORKLOAD_HIDDEN, WORKLOAD_TOKENS, Config, Problem, Specialization
from fa2tune.spec.variant import Variant
from fa2tune.tuning.search.candidates import legal, point

KERNELS = {"fwd": "sm80/fwd", "bwd": "sm80/bwd_fused"}
#: Largest difference from SDPA's result, as a share of its largest magnitude: both round P and dS to bf16.
TOLERANCE = 0.03
CACHE = Path(__file__).parent.parent / "cache"
RESERVED = 1024  #: bytes of shared memory a block, beside its own
#: Variant's name, specialization, what a binary depends on.
Asked = tuple[str, Specialization, tuple[tuple[str, Any], ...]]


@dataclass(frozen=True)
class Cell:
    """One problem, and the configs that are raced on it."""

    pass_: str
    head_dim: int
    mask: Mask
    length: int
    configs: Sequence[Config]
    in_order: Sequence[int] = ()  #: how each config races with dQ summed in a fixed order: as ``in_order`` has it


PEER, STEADY_PEER = "SDPA FlashAttention-2", "SDPA FlashAttention-2, deterministic"
IN_ORDER = "in order"  #: how the names of such methods begin
TURNS = -1  #: of --in-order: in turns, in bands that suit; below: of so many heads


def in_order(text: str) -> int:
    """Of --in-order: so many programs a head, 0 for as many as suit, or TURNS and below."""
    if text.startswith("turns"):
        return -int(text.removeprefix("turns")) if text != "turns" else TURNS
    return int(text)


def ordered_kernel(free: Variant) -> Variant:
    """The one with dQ summed in a fixed order."""
    found = registry.ordered_form(free)
    assert found is not None
    return found


def ordered_choice(problem: Problem, config: Config, gpu: Gpu, buffers: int = 0) -> Choice:
    """The config with dQ summed in a fixed order, by so many programs a head, or by as many as suit ``gpu``; or in turns."""
    if buffers < 0:
        asked = ordered.in_turns(problem, config, gpu)[0]
        return Choice(
            registry.variant_of("bwd_fused", config),
            asked if buffers == TURNS else {**asked, "HEADS_PER_WAVE": -buffers},
        )
    buffers = buffers or ordered.buffers_of(problem, config, gpu)[0]
    free = registry.variant_of("bwd_fused", config)
    return Choice(ordered_kernel(free), {**config, "DQ_BUFFERS": buffers})


def _asked(variant: Variant, spec: Specialization, config: Config) -> Asked:
    return variant.name, spec, tuple(sorted(compiler.binary_config(variant, config).items()))


def crowded(image: Image, gpu: Gpu, here: Gpu) -> Image:
    """Asks for so much shared memory that a multiprocessor of ``here`` holds as many blocks as one of ``gpu`` does, or more
    where even the most that a block may have leaves room for them. That leaves less of it as L1, too: 28 KiB here."""
    blocks = gpu.shared_per_sm // (image.shared + RESERVED)
    room = min(here.shared_per_sm // max(1, blocks) - RESERVED, here.shared_per_block)
    return replace(image, shared=max(image.shared, room))


def images(wanted: Sequence[Asked], cores: int, state: Path) -> dict[Asked, Image]:
    """What compiles of them, on so many cores, unless it is in ``state``; the rest is named."""
    kept = Images(state)
    kept.compile(wanted, cores)
    found = {asked: kept.known[asked] for asked in wanted}
    return {asked: one[0] for asked, one in found.items() if not isinstance(one, str)}


def loader(known: Mapping[Asked, Image]) -> Callable[..., cuda.Function]:
    """Stands in for ``launch.load``."""
    loaded: dict[tuple[Asked, int], cuda.Function] = {}

    def load(
        variant: Variant, spec: Specialization, config: tuple[tuple[str, Any], ...], device_index: int, _measured: str = ""
    ) -> cuda.Function:  # fmt: skip
        asked = (variant.name, spec, config)
        if asked not in known:  # the kernels around a checked one
            return sm80_on_hopper.load(variant, spec, config, device_index)
        if (asked, device_index) not in loaded:
            kinds = launch.kinds(variant, spec, dict(config))
            loaded[asked, device_index] = cuda.Function(known[asked], kinds, device_index, "sm_80 PTX")
        return loaded[asked, device_index]

    return load


def shipped(variant: Variant, spec: Specialization, length: int, gpu: Gpu) -> list[dict[str, Any]]:
    """The config of the row in cache/ of a kernel of kernels/sm80, if there is one."""
    rows = [row for path in CACHE.glob("*.sqlite") if path.stem in gpu.name for row in reader.read(path)]
    return [
        variant.space.completed(row.config)
        for row in rows
        if row.key.gpu == gpu.name and row.key.kernel == variant.serves and row.key.specialization() == spec
        and row.key.bucket == length and registry.variant_of(variant.serves, row.config) is variant
    ]  # fmt: skip


def cells(
    wanted: Sequence[str], dims: Sequence[int], masks: Sequence[str], lengths: Sequence[int], count: int, gpu: str, seed: int,
    tried: Sequence[tuple[int, Config]] = (), in_order: Sequence[int] = (), forms: bool = False, rows: bool = False,
) -> Iterator[Cell]:  # fmt: skip
    """Every combination, with the default, the legal ones of those that differ from it by a member of ``tried`` (for one head
    dim, or 0: for all), and ``count`` other legal configs, the same at every length. ``forms``: only where there are some, next
    to the shipped row's config. ``rows``: this in place of the default, where there is one."""
    card = gpus.named(gpu)
    for pass_ in wanted:
        variant = registry.variant_named(KERNELS[pass_])
        for dim in dims:
            for mask in masks:
                spec = Specialization("bf16", dim, dim, mask)
                default = dict(variant.space.default(spec, card.arch))
                changes = [change for only, change in tried if only in (0, dim) and change.keys() <= default.keys()]
                if forms:
                    changes += FORMS.get((variant.serves, dim), ())
                named = [{**default, **change} for change in changes]
                named = [config for config in named if variant.space.broken(config, spec, card.arch) is None]
                others = (
                    [config for config in legal(variant, spec, card).configs if config not in (default, *named)]
                    if count
                    else []
                )
                if forms and not named:
                    continue
                drawn = random.Random(f"{seed} {pass_} {dim} {mask}").sample(others, min(count, len(others)))
                for length in lengths:
                    own = shipped(variant, spec, length, card) if forms or rows else []
                    raced = [*(own if rows and own else (default, *own)), *named, *drawn]
                    distinct = [dict(where) for where in dict.fromkeys(map(point, raced))]
                    yield Cell(pass_, dim, row_mask_named(mask), length, distinct, in_order)


def _binaries(cell: Cell) -> Iterator[Asked]:
    kernel = registry.variant_named(KERNELS[cell.pass_]).serves
    spec = Specialization("bf16", cell.head_dim, cell.head_dim, cell.mask.name)
    if cell.pass_ == "bwd":  # the check's forward
        portable = registry.portable_of("fwd")
        yield _asked(portable, spec, portable.space.default(spec, ARCH))
    for config in cell.configs:
        forms: list[Config | Choice] = [config]
        if cell.in_order and cell.pass_ == "bwd":  # two sums: with one there is nothing to set to zero
            if max(cell.in_order) >= 0:
                ours = ordered_kernel(registry.variant_of(kernel, config))
                forms.append(Choice(ours, {**config, "DQ_BUFFERS": 2}))
            if min(cell.in_order) < 0:
                forms.append({**config, "IN_ORDER": True})
        for form in forms:
            for variant, its_config in passes.runs(kernel, spec, form, ARCH):
                yield _asked(variant, spec, its_config)


def _methods(cell: Cell) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """(SDPA, and every config that is right, as calls; how far each config is from SDPA)."""
    import torch

    aten = torch.ops.aten
    heads, scale, causal = WORKLOAD_HIDDEN // cell.head_dim, cell.head_dim**-0.5, cell.mask.name == "causal"
    shape = (WORKLOAD_TOKENS // cell.length, cell.length, heads, cell.head_dim)
    # as a model's projections leave them: of another layout SDPA's backward first copies O and dO, 0.18 ms here
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    forward = aten._scaled_dot_product_flash_attention
    o, lse, *rest = forward(q, k, v, 0.0, causal, False, scale=scale)
    sums_q, sums_k, longest_q, longest_k, seed, offset = rest[:6]

    def peer() -> Any:
        if cell.pass_ == "fwd":
            return forward(q, k, v, 0.0, causal, False, scale=scale)[:1]
        return aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, sums_q, sums_k, longest_q, longest_k, 0.0, causal, seed, offset, scale=scale
        )[:3]

    def steady_peer() -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            return peer()
        finally:
            torch.use_deterministic_algorithms(False)

    problem = passes.describe(q, k, v, cell.mask, scale, **({} if cell.pass_ == "fwd" else {"o": o, "do": do}))

    def own(config: Config | Choice) -> Callable[[], Any]:
        if cell.pass_ == "fwd":
            forwards = passes.ForwardPlan(problem, q, k, v, scale, config)
            return lambda: forwards(q, k, v)[:1]
        backwards = passes.BackwardPlan(problem, do, None, q, k, v, o, scale, FUSED, {"bwd_fused": config})
        return lambda: backwards(do, None, q, k, v, o, lse)

    forms: dict[str, Config | Choice] = {describe(config): config for config in cell.configs}
    found, off, wanted = {PEER: peer}, {}, peer()
    if cell.in_order and cell.pass_ == "bwd" and (here := gpus.present()) is not None:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no time for that
        found[STEADY_PEER] = steady_peer
        for config, buffers in product(cell.configs, cell.in_order):
            choice = ordered_choice(problem, config, here, buffers)
            how = (
                f"turns, bands of {choice.config['HEADS_PER_WAVE']}"
                if buffers < 0
                else f"{choice.config['DQ_BUFFERS']} sums"
            )
            forms[f"{IN_ORDER}, {how}: {describe(config)}"] = choice
    for name, form in forms.items():
        where = f"{cell.pass_} {cell.head_dim} {cell.mask} {cell.length} {name}"
        config = form.config if isinstance(form, Choice) else form
        if fault := wrong(cell.pass_, cell.head_dim, cell.mask.name, tuple(sorted(config.items()))):
            click.echo(f"wrong, not timed: {where}: {fault}", err=True)
            continue
        try:
            method = own(form)
            got = method()
        except (compiler.CompileError, cuda.CudaError) as error:
            click.echo(f"left out: {name}: {error}", err=True)
            continue
        if isinstance(form, Choice) and not all(map(torch.equal, got, method())):
            click.echo(f"not deterministic, not timed: {where}", err=True)
            continue
        off[name] = max(
            float((a.float() - b.float()).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True)
        )
        if off[name] < TOLERANCE:
            found[name] = method
        else:
            click.echo(f"wrong, not timed: {where}", err=True)
    return found, off


@cache
def wrong(pass_: str, dim: int, mask: str, config: tuple[tuple[str, Any], ...]) -> str:
    """By the error rule, with lengths that are multiples of nothing: what is wrong, or ""."""
    variant, spec, asked = registry.variant_named(KERNELS[pass_]), Specialization("bf16", dim, dim, mask), dict(config)
    try:
        if "DQ_BUFFERS" in asked:
            forward = registry.portable_of("fwd").space.default(spec, ARCH)
            in_order = Choice(ordered_kernel(variant), asked)
            configs = {"fwd": forward, variant.serves: in_order}
            verify.check_backward(configs, spec, FUSED, "cuda")  # type: ignore[arg-type]
        else:
            verify.check(variant.serves, asked, spec, ARCH, "cuda")
    except (verify.WrongResult, compiler.CompileError, cuda.CudaError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def race(cell: Cell, rounds: int) -> dict[str, Any]:
    """Times in turns. Milliseconds: of each method's calls in a row, as many as take about a millisecond."""
    methods, off = _methods(cell)
    flops = (4.0 if cell.pass_ == "fwd" else 10.0) * cell.length * WORKLOAD_TOKENS * WORKLOAD_HIDDEN
    flops *= 0.5 if cell.mask.name == "causal" else 1.0
    calls = max(1, round(1e-3 / (flops / 3e14)))
    times: dict[str, list[float]] = {name: [] for name in methods}
    order, dice = list(methods), random.Random(0)

    def repeated(method: timing.Timed) -> None:
        for _ in range(calls):
            method()

    for number in range(rounds + 1):
        dice.shuffle(order)
        bursts = [partial(repeated, methods[name]) for name in order]
        found = timing.finish(timing.submit(bursts, lambda: None, lead=0))
        for name, us in zip(order, found, strict=True) if number else ():  # the first warms up
            times[name].append(us / 1e3 / calls)
    peer = times[PEER]
    return {
        "pass": cell.pass_, "head_dim": cell.head_dim, "mask": cell.mask.name, "length": cell.length,
        "methods": {
            name: {
                "ms": statistics.median(own), "tflops": flops / statistics.median(own) / 1e9,
                "ratio": statistics.median(a / b for a, b in zip(peer, own, strict=True)), "off": off.get(name, 0.0),
            }
            for name, own in times.items()
        },
    }  # fmt: skip


def every(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each config of a pass, head dim and mask: its ratios by length."""
    table: dict[tuple[str, int, str], dict[str, dict[int, float]]] = {}
    for one in results:
        rows = table.setdefault((one["pass"], one["head_dim"], one["mask"]), {})
        for name, found in one["methods"].items():
            rows.setdefault(name, {})[one["length"]] = found["ratio"]
    for (pass_, dim, mask), rows in table.items():
        lengths = sorted({length for row in rows.values() for length in row})
        yield f"{pass_} {dim} {mask}: {' '.join(map(str, lengths))}"
        for name, row in sorted(rows.items(), key=lambda item: -sum(item[1].values())):
            yield "  " + " ".join(f"{row.get(length, math.nan):.3f}" for length in lengths) + f"  {name}"


def best(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line a cell, with the fastest config, and one a pass: the least and the geometric mean. Those in a fixed order have
    lines of their own, and so does SDPA's deterministic backward."""
    ratios: dict[str, list[float]] = {}
    for one in results:
        kinds: dict[str, dict[str, float]] = {}
        for name, found in one["methods"].items():
            kind = (
                f" {IN_ORDER}" if name.startswith(IN_ORDER) else ", SDPA deterministic" if name == STEADY_PEER else ""
            )
            if name != PEER:
                kinds.setdefault(f"{one['pass']}{kind}", {})[name] = found["ratio"]
        for kind, own in kinds.items():
            name = max(own, key=own.__getitem__)
            ratios.setdefault(kind, []).append(own[name])
            figures = one["methods"][name]
            yield (
                f"{kind} {one['head_dim']:3} {one['mask']:6} {one['length']:5}: {own[name]:.3f} x "
                f"({figures['tflops']:.0f} TFLOP/s)  {name}"
            )
    for kind, found in ratios.items():
        mean = math.exp(statistics.mean(map(math.log, found)))
        yield f"{kind}: at least {min(found):.3f} x, geometric mean {mean:.3f} x over {len(found)} cells"


def parsed(change: str) -> tuple[int, Config]:
    """Of --try: the head dim, or 0, and what is changed."""
    only, colon, rest = change.partition(":")
    return (int(only), json.loads(rest)) if colon and only.isdigit() else (0, json.loads(change))


@click.command(help=__doc__)
@click.option("--pass", "wanted", callback=comma_separated(str), default="fwd,bwd", show_default=True)
@click.option("--headdim", callback=comma_separated(int), default="64,128", show_default=True)
@click.option("--mask", "masks", callback=comma_separated(str), default="full,causal", show_default=True)
@click.option("--seqlen", callback=comma_separated(int), default="512,2048,8192,16384", show_default=True)
@click.option(
    "--configs", default=4, show_default=True, help="In addition to the default, per pass, head dim and mask."
)
@click.option(
    "--try",
    "tried",
    multiple=True,
    help="JSON: what else than the default's a config to race has; 64:JSON for one head dim.",
)
@click.option("--every", "all_of_them", is_flag=True, help="Print every config, not only the best.")
@click.option("--gpu", default="a100", show_default=True, help="Whose limits and defaults count.")
@click.option("--crowd", is_flag=True, help="As many blocks a multiprocessor as its shared memory holds.")
@click.option(
    "--in-order",
    callback=comma_separated(in_order),
    default="",
    help="Backward configs with dQ summed in a fixed order, too, in turns, or by so many programs a head; 0: as many as suit.",
)
@click.option("--rows", is_flag=True, help="The configs of shipped rows, not the default.")
@click.option("--forms", is_flag=True, help="What no search has, next to shipped rows.")
@click.option("--state", type=click.Path(file_okay=False, path_type=Path), help="Where binaries are kept.")
@click.option("--build", is_flag=True, help="Only compile.")
@click.option("--rounds", default=10, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--cores", default=len(os.sched_getaffinity(0)), show_default="all")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Every figure, as JSON.")
def main(
    wanted: list[str], headdim: list[int], masks: list[str], seqlen: list[int], configs: int, tried: tuple[str, ...],
    all_of_them: bool, gpu: str, crowd: bool, in_order: list[int] | None, forms: bool, state: Path | None, build: bool,
    rounds: int, seed: int, cores: int, out: Path | None, rows: bool,
) -> None:  # fmt: skip
    for pass_ in wanted:
        if pass_ not in KERNELS:
            raise click.UsageError(f"--pass: got {pass_!r}, allowed are {', '.join(KERNELS)}")
    found = list(
        cells(
            wanted,
            headdim,
            masks,
            seqlen,
            configs,
            gpu,
            seed,
            [parsed(one) for one in tried],
            in_order or (),
            forms,
            rows,
        )
    )
    here = gpus.present()
    if not build and (here is None or here.arch != 90):
        raise click.ClickException("needs a GPU of compute capability 9.0")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        wanted_images = list(dict.fromkeys(asked for cell in found for asked in _binaries(cell)))
        known = images(wanted_images, cores, state or Path(folder))
        if build or here is None:
            click.echo(f"{len(known)} of {len(wanted_images)} kernels compiled, {len(found)} cells")
            return
        if crowd:
            known = {asked: crowded(image, gpus.named(gpu), here) for asked, image in known.items()}
        launch.load = loader(known)  # type: ignore[assignment]
        results = []
        for cell in found:
            results.append(race(cell, rounds))
            if out is not None:
                out.write_text(json.dumps({"gpu": here.name, "limits": gpu, "cells": results}, indent=1) + "\n")
    for line in (*(every(results) if all_of_them else ()), *best(results)):
        click.echo(line)


if __name__ == "__main__":
    main()
