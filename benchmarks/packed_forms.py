"""Times packed forwards by the form of their tiles, beside the dense call of the same shape: what packing and maxima cost.

    python benchmarks/ahead.py benchmarks/packed_forms.py                         # first: every binary; no GPU
    python benchmarks/packed_forms.py --out benchmarks/calls/packed_forms.json    # half a minute
    python benchmarks/packed_forms.py --served                                    # as served alone, to compare trees by

Causal, bf16: calls of benchmarks/calls/random_packings_2.json, by their number there, and of benchmarks/packed.py. Each call as
it is served, and in FORMS of its head dim, each with RESCALE "lazy" and "never"; of sequences of one length also the dense
call, as served and in the same forms. Results are compared with float32 arithmetic as benchmarks/random_packings.py does; a
wrong one is an error. Each candidate is a CUDA graph; replays are interleaved; microseconds, medians of seven bursts. Needs a
GPU of compute capability 9.0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import packed
import packed_choices
import random_packings
import side_by_side
import torch
from launch_choices import race
from random_packings import Packing

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.launching import passes
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import Config, Problem

DRAWN = Path(__file__).parent / "calls/random_packings_2.json"
#: By their number: those whose forwards were the furthest behind, and one of each kind.
CALLS = (24, 20, 52, 54, 28, 45, 1, 6, 81, 95, 38, 19, 93)
#: Of benchmarks/packed.py.
EQUAL = ("16 of 1024", "4 of 4096", "16 of 1024, 32 heads of 64", "4 of 4096, 32 heads of 64")
MIXED = ("300 of 1 to 109", "32k in 20, the longest 5067", "16k in 57, the longest 1820, 32 heads of 64")
#: Of these the forms are timed, too.
IN_FORMS = (24, 20, 1, 6)
ONE_Q = {
    "PINGPONG": True,
    "Q_STAGES": 1,
    "HEADS_PER_WAVE": 0,
    "O_THROUGH": "own",
    "IN_PARTS": "none",
    "maxnreg": 0,
    "num_warps": 4,
}
#: Head dim -> name of a form that rows have -> config, but for RESCALE.
FORMS: Mapping[int, Mapping[str, Config]] = {
    64: {
        "192 x 128": {**ONE_Q, "BLOCK_M": 192, "BLOCK_N": 128, "STAGES": 3, "NUMBERED": True, "Q_IN_REGISTERS": False},
        "192 x 64": {**ONE_Q, "BLOCK_M": 192, "BLOCK_N": 64, "STAGES": 3, "NUMBERED": False, "Q_IN_REGISTERS": True},
    },
    128: {
        "128 x 128": {**ONE_Q, "BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 2, "NUMBERED": True, "Q_IN_REGISTERS": False},
        "Q in registers": {**ONE_Q, "BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 2, "NUMBERED": False, "Q_IN_REGISTERS": True},
    },
}  # fmt: skip
BURST_MS = 4.0


def packings() -> Iterator[tuple[str, Packing, bool]]:
    """(name, packing, whether its forms are timed)."""
    drawn = json.loads(DRAWN.read_text("utf-8"))["calls"]
    named = {int(name.split()[0]): (name, call) for name, call in drawn.items()}
    for number in CALLS:
        name, call = named[number]
        heads = (call[side] for side in ("heads_q", "heads_kv", "head_dim"))
        yield name, Packing(tuple(call["of_q"]), tuple(call["of_k"]), *heads, CAUSAL), number in IN_FORMS
    for name in (*EQUAL, *MIXED):
        lengths, *shape = packed.PACKINGS[name]
        yield name, Packing(lengths, lengths, *shape, CAUSAL), False


def dense(packing: Packing) -> Problem | None:
    """The dense call of as many sequences, if they are of one length."""
    if len(set(packing.of_q)) > 1 or len(set(packing.of_k)) > 1:
        return None
    dim = packing.head_dim
    return Problem(
        "bf16", len(packing.of_q), packing.heads_q, packing.heads_kv, packing.of_q[0], packing.of_k[0], dim, dim, CAUSAL
    )  # fmt: skip


def candidates(packing: Packing, in_forms: bool, served: bool, gpu: gpus.Gpu) -> dict[str, tuple[Problem, Config]]:
    """Name -> (problem, packed or dense, and config). ``served``: the packed call as it is served alone."""
    posed = {"packed": packed_choices.posed(packing)}
    if not served and (whole := dense(packing)) is not None:
        posed["dense"] = whole
    found = {f"{kind}, served": (one, choosing.choose(one, "fwd", gpu).config) for kind, one in posed.items()}
    for form, config in FORMS[packing.head_dim].items() if in_forms and not served else ():
        for rescale in ("lazy", "never"):
            found |= {
                f"{kind}, {form}, {rescale}": (one, {**config, "RESCALE": rescale}) for kind, one in posed.items()
            }
    return found


def measured(
    packing: Packing, named: Mapping[str, tuple[Problem, Config]], stream: torch.cuda.Stream
) -> dict[str, float]:
    """Microseconds by candidate."""
    q, do = (
        torch.randn(sum(packing.of_q), packing.heads_q, packing.head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    k, v = (
        torch.randn(sum(packing.of_k), packing.heads_kv, packing.head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    want = {"o": random_packings.expected(packing, q, k, v, do)["o"]}
    views, scale = [passes.in_one_batch(one) for one in (q, k, v)], packing.head_dim**-0.5
    starts = [torch.tensor([0, *side]).cumsum(0).to("cuda", torch.int32) for side in (packing.of_q, packing.of_k)]
    calls: dict[str, Callable[[], Any]] = {}
    for name, (problem, config) in named.items():
        ragged = problem.extent.ragged
        given = views if ragged else [one.unflatten(0, (problem.batch, -1)).transpose(1, 2) for one in (q, k, v)]
        asked = passes.describe(*given, CAUSAL, scale, extent=problem.extent)
        plan, offsets = passes.ForwardPlan(asked, *given, scale, config), starts if ragged else []
        calls[name] = lambda plan=plan, given=given, offsets=offsets: plan(*given, *offsets)
        o = calls[name]()[0]
        wrong = random_packings.wrong({"o": o if ragged else o.transpose(1, 2).flatten(0, 1)}, want, packing.group)
        if wrong is not None:
            raise click.ClickException(f"{packing}, {name}: {wrong}")
    times = race(list(calls.values()), stream, BURST_MS)
    return dict(zip(calls, (round(us, 1) for us in times), strict=True))


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--served", is_flag=True, help="Packed calls as they are served alone.")
@click.option("--list", "listed", is_flag=True, help="Print what would be timed on an H200.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Every figure, as JSON.")
def main(served: bool, listed: bool, out: Path | None) -> None:
    gpu = gpus.named("h200")
    if listed:
        for name, packing, in_forms in packings():
            click.echo(f"{name}: {'; '.join(candidates(packing, in_forms, served, gpu))}")
        return
    if not torch.cuda.is_available():
        raise click.ClickException("needs a CUDA GPU that torch can use")
    side_by_side.warm()
    record: dict[str, Any] = {"environment": side_by_side.environment(), "date": time.strftime("%Y-%m-%d"), "calls": {}}
    stream = torch.cuda.Stream()
    for name, packing, in_forms in packings():
        found = measured(packing, candidates(packing, in_forms, served, gpu), stream)
        tflops = packing.operations("fwd") / found["packed, served"] / 1e6
        record["calls"][name] = {"us": found, "tflops": round(tflops, 1)}
        click.echo(f"{name}: {tflops:.0f} TFLOP/s, {found}")
        torch.cuda.empty_cache()
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
