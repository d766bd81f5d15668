"""Times a window against its share of the tiles that a causal mask visits.

    python benchmarks/windows.py [--shape 1x16/16x16384x128:1024 ...] [--seconds 0.3] [--out benchmarks/calls/windows.json]
    python benchmarks/windows.py --fit benchmarks/calls/windows.json    (no GPU: what a tile costs besides its products)

A shape is batch x query heads / key heads x length x head dim : keys of the window, itself included. Causal, bf16. Of each
shape the forward and the backward are timed, with the configs that serve the window: portable, and where there is a
warp-specialised one that. ``ratio``: (time of the window / time of the causal mask, same config) over (tiles that the window
visits / tiles that the causal mask visits): 1 where a window costs exactly its share. Calls are interleaved on a warm GPU, back
to back, nothing flushed; the median of the rounds counts. Needs a GPU.

    python benchmarks/windows.py --race [--shape 1x64/8x16384x64:128 ...] [--seconds 0.05] [--out FILE]

races the forms of the Hopper forward that a window may take instead (rows and keys of a tile, Q_STAGES, programs that share a
multiprocessor): of each form the config of a shipped row where there is one, else one legal config. Microseconds beside what
``fa2tune/calling/schedules/window_schedule.py`` predicts of rows; ``*`` is what serves. A result that
differs from the first one's by more than bf16 allows is an error.

The fit takes a tile's time for a + b * keys that it visits (queries, where a tile owns keys), from its time under the causal
mask and under the window: a / b are the keys whose products take as long as what does not depend on how many there are.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import torch

from fa2tune import gpus
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.kinds import PORTABLE_ROWS, WARP_SPECIALIZED_ROWS, kind_of
from fa2tune.calling.schedules import window_schedule
from fa2tune.compiling import compiler, registry
from fa2tune.gpus import Gpu
from fa2tune.launching import passes
from fa2tune.measuring import timing
from fa2tune.rows import lookup
from fa2tune.rows.row import Row
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.mask import CAUSAL, Mask, mask_of
from fa2tune.spec.problem import STRATEGIES, Config, Problem
from fa2tune.spec.variant import WARP_SPECIALIZED, implementation_of

HOPPER = registry.variant_named("sm90/fwd")
SHAPES = (
    "1x16/16x16384x128:1024", "1x32/32x16384x64:1024", "2x32/8x8192x128:1024", "1x64/8x16384x64:128",
    "1x32/8x32768x128:4096",
)  # fmt: skip
#: Raced where none is named: the narrow windows of head dim 64.
RACED = ("1x64/8x16384x64:128", "1x32/32x16384x64:1024")
#: Of candidates: by how much two results in bf16 may differ, of values of about 1.
RACE_TOLERANCE = 0.03
#: Products of a kernel of the backward, which weigh the tiles that it visits
PRODUCTS = {"fwd": 2, "bwd_dkdv": 4, "bwd_dq": 3, "bwd_fused": 5}


@dataclass(frozen=True)
class Contender:
    """One implementation of a pass, with the configs of its kernels."""

    name: str
    strategy: str  #: "": it is the forward
    configs: Mapping[str, Config]


def shape_of(text: str) -> tuple[Problem, int]:
    """(the causal problem, keys of the window). BadParameter: it is written otherwise."""
    found = re.fullmatch(r"(\d+)x(\d+)/(\d+)x(\d+)x(\d+):(\d+)", text)
    if found is None:
        raise click.BadParameter(f"--shape: got {text!r:.60}, must be like {SHAPES[0]}")
    batch, heads_q, heads_kv, length, dim, window = map(int, found.groups())
    return Problem("bf16", batch, heads_q, heads_kv, length, length, dim, dim, CAUSAL), window


@cache
def tiles(mask: Mask, problem: Problem, rows: int, columns: int) -> int:
    """Tiles [rows, columns] of a head with a visible pair."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    keys = torch.arange(-(-problem.seqlen_k // columns) * columns, device=device)
    found = 0
    for start in range(0, problem.seqlen_q, rows):
        queries = torch.arange(start, min(start + rows, problem.seqlen_q), device=device)[:, None]
        seen = mask.visible(queries, keys, problem.seqlen_q, problem.seqlen_k) & (keys < problem.seqlen_k)
        found += int(seen.any(0).reshape(-1, columns).any(1).sum())
    return found


def block_of(kernel: str, config: Config) -> tuple[int, int]:
    """(queries, keys) of a kernel's tile."""
    if implementation_of(config) == WARP_SPECIALIZED and kernel == "bwd_fused":
        return config["BLOCK_M"], bwd_fused.GROUPS * bwd_fused.KEYS
    return config.get("BLOCK_M") or 64 * config["GROUPS"], config["BLOCK_N"]


def share(mask: Mask, problem: Problem, configs: Mapping[str, Config]) -> float:
    """Of the tiles that the causal mask visits."""
    work = {CAUSAL: 0, mask: 0}
    for kernel, config in configs.items():
        rows, columns = block_of(kernel, config)
        for one in work:
            work[one] += PRODUCTS[kernel] * rows * columns * tiles(one, problem, rows, columns)
    return work[mask] / work[CAUSAL]


def contenders(problem: Problem, gpu: Gpu | None = None) -> Iterator[Contender]:
    """What could serve a window: of each implementation the configs that its rows give it. ``gpu``: None for this one."""
    gpu = gpu or dispatch.gpu_of(0)
    for name, kind in (("portable", PORTABLE_ROWS), ("hopper", WARP_SPECIALIZED_ROWS)):
        for strategy, kernels in (("", ("fwd",)), *STRATEGIES.items()):
            choices = [choosing.choose(problem, kernel, gpu, kind).config for kernel in kernels]
            if all(kind_of(implementation_of(config)) == kind for config in choices):
                yield Contender(name, strategy, dict(zip(kernels, choices, strict=True)))


def call_of(one: Contender, problem: Problem, tensors: Mapping[str, torch.Tensor]) -> Callable[[], Any]:
    """Its pass over these tensors; the plan is made and has run once."""
    q, k, v, o, do = (tensors[name] for name in ("q", "k", "v", "o", "do"))
    scale = problem.head_dim**-0.5
    if not one.strategy:
        forward = passes.ForwardPlan(problem, q, k, v, scale, one.configs["fwd"])
        forward(q, k, v)
        return lambda: forward(q, k, v)
    lse = tensors["lse"]
    backward = passes.BackwardPlan(problem, do, None, q, k, v, o, scale, one.strategy, one.configs)
    backward(do, None, q, k, v, o, lse)
    return lambda: backward(do, None, q, k, v, o, lse)


def times(calls: list[Callable[[], Any]], seconds: float, rounds: int = 5) -> list[float]:
    """Milliseconds of each, medians of interleaved rounds."""
    counts = [max(1, int(1e6 * seconds / rounds / timing.in_a_row(call, 2))) for call in calls]
    found = [[timing.in_a_row(call, count) for call, count in zip(calls, counts, strict=True)] for _ in range(rounds)]
    return [statistics.median(column) / 1e3 for column in zip(*found, strict=True)]


def measured(
    shape: str, seconds: float, of: Callable[[Problem], Iterator[Contender]] = contenders
) -> Iterator[dict[str, Any]]:
    """One entry for each contender of a shape."""
    causal, keys = shape_of(shape)
    window = replace(causal, mask=mask_of(True, (keys - 1, 0)).fitted(causal.seqlen_q, causal.seqlen_k))
    able = list(of(window))

    def random(heads: int) -> torch.Tensor:
        return torch.randn(
            causal.batch, heads, causal.seqlen_q, causal.head_dim, device="cuda", dtype=torch.bfloat16
        )  # fmt: skip

    tensors = {"q": random(causal.heads_q), "k": random(causal.heads_kv), "v": random(causal.heads_kv),
               "do": random(causal.heads_q)}  # fmt: skip
    calls = []
    for problem in (causal, window):
        forward = next(one for one in able if not one.strategy)
        plan = passes.ForwardPlan(
            problem, tensors["q"], tensors["k"], tensors["v"], causal.head_dim**-0.5, forward.configs["fwd"]
        )
        o, lse = plan(tensors["q"], tensors["k"], tensors["v"])
        calls += [call_of(one, problem, {**tensors, "o": o, "lse": lse}) for one in able]
    found = times(calls, seconds)
    for one, whole, part in zip(able, found[: len(able)], found[len(able) :], strict=True):
        visible = share(window.mask, causal, one.configs)
        yield {
            "shape": shape, "pass": one.strategy or "forward", "name": one.name, "causal_ms": whole, "window_ms": part,
            "share": visible, "ratio": part / whole / visible, "configs": one.configs,
        }  # fmt: skip


def forms(problem: Problem, rows: Iterable[Row]) -> dict[tuple[int, ...], tuple[Config, Row | None]]:
    """``window_schedule.form`` -> a legal config for a window, and its row: of ``rows``, else the first config of the space."""
    found: dict[tuple[int, ...], tuple[Config, Row | None]] = {}
    for row in rows:
        config = HOPPER.suited(problem, HOPPER.space.completed(row.config))
        found.setdefault(window_schedule.form(config), (config, row))
    wanted: dict[str, tuple[Any, ...]] = {
        "BLOCK_M": (64, 128, 192), "BLOCK_N": (64, 128), "Q_STAGES": (1, 2), "maxnreg": (0, 80, 128), "O_THROUGH": ("own", "q"),
        "STAGES": (3, 2), "PINGPONG": (True, False), "NUMBERED": (True, False), "Q_IN_REGISTERS": (False, True),
        "IN_PARTS": ("none",), "RESCALE": ("lazy",), "HEADS_PER_WAVE": (0,), "num_warps": (4,),
    }  # fmt: skip
    for values in itertools.product(*wanted.values()):
        config = dict(zip(wanted, values, strict=True))
        if window_schedule.form(config) not in found and not HOPPER.space.broken(config, problem.specialization, 90):
            found[window_schedule.form(config)] = config, None
    return found


def rows_of(problem: Problem, gpu: Gpu) -> list[Row]:
    """Those that could serve the forward, the one that does first."""
    chooser = choosing.Chooser(problem, gpu)
    answer, _ = chooser.find("fwd", WARP_SPECIALIZED_ROWS)
    if answer is None:
        return []
    serves = chooser.suited(answer).row
    others = (answer.row, *lookup.of_other_lengths(answer, chooser.node))
    return sorted(others, key=lambda row: row is not serves)


def raced(shape: str, seconds: float, gpu: Gpu, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """One entry for each form, the fastest first."""
    causal, keys = shape_of(shape)
    problem = replace(causal, mask=mask_of(True, (keys - 1, 0)).fitted(causal.seqlen_q, causal.seqlen_k))
    candidates = forms(problem, rows_of(problem, gpu))
    build = partial(compiler.compile_kernel, HOPPER, problem.specialization, arch=90)
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, (compiler.binary_config(HOPPER, config) for config, _ in candidates.values())))
    q, k, v = (
        torch.randn(problem.batch, heads, problem.seqlen_q, problem.head_dim, device=device, dtype=torch.bfloat16)
        for heads in (problem.heads_q, problem.heads_kv, problem.heads_kv)
    )
    calls, first = list[Callable[[], Any]](), None
    for form, (config, _) in candidates.items():
        plan = passes.ForwardPlan(problem, q, k, v, problem.head_dim**-0.5, config)
        o, _lse = plan(q, k, v)
        first = o if first is None else first
        if not float((o.float() - first.float()).abs().max()) <= RACE_TOLERANCE:
            raise click.ClickException(f"{shape}: the result of {form} differs")
        calls.append(partial(plan, q, k, v))
    chosen = choosing.choose(problem, "fwd", gpu).config
    found = [
        {
            "shape": shape, "form": form, "us": 1e3 * time, "chosen": config == chosen, "config": config,
            "predicted_us": None if row is None else window_schedule.predicted_us(problem, row, gpu.sm_count),
        }
        for (form, (config, row)), time in zip(candidates.items(), times(calls, seconds), strict=True)
    ]  # fmt: skip
    yield from sorted(found, key=lambda entry: entry["us"])


def race_line(entry: Mapping[str, Any]) -> str:
    predicted = "" if entry["predicted_us"] is None else f"{entry['predicted_us']:9.0f}"
    mark = "*" if entry["chosen"] else ""
    return f"{entry['shape']:26} {'x'.join(map(str, entry['form'])):16} {entry['us']:9.1f} {predicted:>9} {mark}"


def line(entry: Mapping[str, Any]) -> str:
    return (
        f"{entry['shape']:26} {entry['pass']:8} {entry['name']:9} {entry['causal_ms']:9.3f} {entry['window_ms']:9.3f} "
        f"{entry['share']:6.3f} {entry['ratio']:6.2f}"
    )


def fixed_cost(entry: Mapping[str, Any], most: float = 1.15) -> tuple[float, float]:
    """(a / b of an entry, and that with which its ratio would be ``most``), in keys. Causal tiles visit half of all keys on
    average, the window's ``share`` of that."""
    causal, _ = shape_of(entry["shape"])
    keys, part = causal.seqlen_k / 2, entry["share"]

    def solved(ratio: float) -> float:
        return part * keys * (ratio - 1) / (1 - ratio * part)

    return solved(entry["window_ms"] / entry["causal_ms"] / part), solved(most)


def width(one: Contender) -> int | None:
    """Keys, or queries, of one trip through the loop; None: its two kernels have loops of their own."""
    if len(one.configs) > 1:
        return None
    ((kernel, config),) = one.configs.items()
    return block_of(kernel, config)[kernel == "fwd"]


def fits(record: Mapping[str, Any], gpu: Gpu) -> Iterator[str]:
    """A line for each entry. ValueError: its shares are not those of the rows that are here."""
    for entry in record["entries"]:
        causal, keys = shape_of(entry["shape"])
        window = mask_of(True, (keys - 1, 0)).fitted(causal.seqlen_q, causal.seqlen_k)
        own = entry["name"], entry["pass"]
        one = next(one for one in contenders(causal, gpu) if (one.name, one.strategy or "forward") == own)
        if abs(share(window, causal, one.configs) - entry["share"]) > 0.0006:
            raise ValueError(f"{entry['shape']}, {' '.join(own)}: its share is of other tiles than today's row has")
        found, allowed = fixed_cost(entry)
        trips = f" = {found / trip:.1f} trips of {trip}" if (trip := width(one)) else ""
        yield f"{entry['shape']:26} {own[1]:8} {own[0]:9} {found:4.0f} keys{trips}; {allowed:.0f} would give 1.15"


@click.command(help=__doc__)
@click.option("--shape", "shapes", multiple=True, metavar="BxHQ/HKVxLENGTHxDIM:KEYS")
@click.option("--race", is_flag=True, help="Race the forms of the Hopper forward.")
@click.option("--seconds", type=float, default=0.3, show_default=True, help="Of launches of each.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Every figure, as JSON.")
@click.option("--fit", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A record; nothing is timed.")
def main(shapes: tuple[str, ...], race: bool, seconds: float, out: Path | None, fit: Path | None) -> None:
    if fit is not None:
        record = json.loads(fit.read_text(encoding="utf-8"))
        click.echo("\n".join(fits(record, gpus.named(record["gpu"]))))
        return
    if not torch.cuda.is_available():
        raise click.ClickException("needs a CUDA GPU that torch can use")
    here, entries = choosing.toolchain(), []
    if race:
        click.echo(f"{'shape':26} {'rows x keys ...':16} {'us':>9} {'predicted':>9}")
        for shape in shapes or RACED:
            for entry in raced(shape, seconds, dispatch.gpu_of(0)):
                click.echo(race_line(entry))
                entries.append({**entry, "config": dict(entry["config"])})
    else:
        click.echo(f"{'shape':26} {'pass':8} {'kernels':9} {'causal ms':>9} {'window ms':>9} {'share':>6} {'ratio':>6}")
        for shape in shapes or SHAPES:
            for entry in measured(shape, seconds):
                click.echo(line(entry))
                configs = {kernel: dict(config) for kernel, config in entry["configs"].items()}
                entries.append({**entry, "configs": configs})
    if out is not None:
        facts = {
            "gpu": torch.cuda.get_device_name(), "driver": here.driver, "torch": torch.__version__, "triton": here.triton,
            "date": time.strftime("%Y-%m-%d"), "entries": entries,
        }  # fmt: skip
        out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
