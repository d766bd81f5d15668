"""Times what may serve the backward of a dense call: forms of the fused kernel, parts of query groups, split kernels at a time.

    python benchmarks/ahead.py benchmarks/dense_backwards.py                         # first: every binary, on all cores; no GPU
    python benchmarks/dense_backwards.py --out dense_backwards.json [--seconds 300]  # resumes from the file
    python benchmarks/dense_backwards.py --list                                      # what would be timed; no GPU
    python benchmarks/dense_backwards.py --table dense_backwards.json                # a file, as text
    python benchmarks/dense_backwards.py --split                                     # both split kernels at a time, predicted

The calls: of benchmarks/calls/random_calls.json.gz those that were behind a peer, those that are served otherwise since, and
every eighth of the others. Fused: the row's config, alone on the GPU ("apart"), with dQ finished after, in half blocks (64
columns; also with rows prepared and dQ finished beside), each in the number of parts that is chosen for it, and the choice in
neighbouring numbers of parts. Split: the choice, and dQ beside dK and dV on two streams, delta before them. Each result is
compared with float32 arithmetic; a wrong one is an error. Each candidate is a CUDA graph; replays are interleaved; the file
holds medians of seven bursts in microseconds a call, and what was recorded. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import side_by_side
import torch
import workloads
from launch_choices import race

from fa2tune import gpus
from fa2tune.calling import choosing, dispatch, fused_schedule, group_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.compiling.registry import variant_named
from fa2tune.gpus import Gpu
from fa2tune.launching import group_parts, passes
from fa2tune.search_spaces.lib.hopper import columns
from fa2tune.spec.mask import CAUSAL, row_mask_named
from fa2tune.spec.problem import STRATEGIES, Problem
from fa2tune.spec.variant import WARP_SPECIALIZED

RECORD = Path(__file__).parent / "calls/random_calls.json.gz"
FUSED_KERNEL, SPLIT_KERNEL = "bwd_fused", "bwd_dkdv"
BESIDE = "dQ beside dK and dV"
EVERY = 8
LEVEL = 0.99
BURST_MS = 4.0

#: Kernel -> its choice and the parts of its groups.
Candidate = Mapping[str, tuple[Choice, int]]


#: Of a recorded call, what Problem takes after its dtype.
SHAPE = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")


def posed(call: Mapping[str, Any]) -> Problem:
    return Problem(call["dtype"], *(call[name] for name in SHAPE), row_mask_named(call["mask"]))


def recorded() -> dict[str, tuple[Problem, Mapping[str, Any]]]:
    """Name -> (call, what was recorded of its backward), of all drawings; without those that were wrong then, and those whose
    first queries were filled in."""
    found = {}
    for place, run in enumerate(json.loads(gzip.decompress(RECORD.read_bytes()))["runs"]):
        for name, call in run["calls"].items():
            if "served" in call.get("bwd", {}) and "filled in" not in call["bwd"]["served"]:
                found[f"{'abc'[place]} {name}"] = posed(call), call["bwd"]
    return found


def chosen(problem: Problem, gpu: Gpu) -> Candidate:
    _, choices = choosing.choose_backward(choosing.Chooser(problem, gpu), False)
    return {name: (one, group_schedule.parts_of(problem, name, one, gpu)) for name, one in choices.items()}


def todo(gpu: Gpu) -> dict[str, tuple[Problem, Mapping[str, Any]]]:
    """Those of ``recorded`` that are timed."""
    found, others = {}, 0
    for name, (problem, call) in recorded().items():
        now = chosen(problem, gpu)
        kernel = FUSED_KERNEL if FUSED_KERNEL in now else SPLIT_KERNEL
        changed = now[kernel][0].otherwise is not None or now[kernel][1] != call["served"]["parts"]
        others += not changed and call["ratio"] >= LEVEL
        if changed or call["ratio"] < LEVEL or others % EVERY == 1:
            found[name] = problem, call
    return found


def _fused(problem: Problem, choice: Choice, gpu: Gpu) -> Iterator[tuple[str, Choice]]:
    """Forms."""
    own = choice.of_row
    yield "row", own
    config = own.config
    if config["FINISH_BESIDE"]:
        yield "dQ finished after", replace(own, config={**config, "FINISH_BESIDE": False})
    if config["BESIDE"]:
        yield "apart", replace(own, config=fused_schedule.apart(config))
    for form, _ in fused_schedule.forms(problem, own, gpu.arch):
        if form["BLOCK_M"] != config["BLOCK_M"]:
            yield "half blocks", replace(own, config=form)
            yield "half blocks, beside", replace(own, config={**form, "BESIDE": True, "FINISH_BESIDE": True})


def candidates(problem: Problem, gpu: Gpu) -> dict[str, Candidate]:
    """Name -> candidate; the choice is marked."""
    now, found = chosen(problem, gpu), dict[str, Candidate]()
    if FUSED_KERNEL not in now:
        found["row"] = now
        counts, kernel = group_parts.allowed(problem), SPLIT_KERNEL
        if all(WARP_SPECIALIZED in one.variant.implementations for one, _ in now.values()):
            found[BESIDE] = now
    else:
        kernel = FUSED_KERNEL
        for name, choice in _fused(problem, now[kernel][0], gpu):
            found[name] = {kernel: (choice, group_schedule.parts_of(problem, kernel, choice, gpu))}
        counts = group_parts.allowed(problem)
    choice, parts = now[kernel]
    at = counts.index(parts)
    for other in {counts[max(at - 1, 0)], counts[min(at + 1, len(counts) - 1)]} - {parts}:
        found[f"chosen, {other} parts"] = {**now, kernel: (choice, other)}
    same = next(name for name, one in found.items() if _alike(one, now))
    return {f"{name}, chosen" if name == same else name: one for name, one in found.items()}


def _alike(one: Candidate, other: Candidate) -> bool:
    return all(
        dict(one[name][0].config) == dict(other[name][0].config) and one[name][1] == other[name][1] for name in one
    )


# ---- both split kernels at a time, predicted


#: Microseconds of a block of the kernels of dQ and of dK and dV with 256 columns, of their tiles' ends, and of a call; how much
#: of the share of columns that are not computed a block saves. Fitted to every second recorded call of the Hopper kernels.
SPLIT_BLOCK_US, SPLIT_ENDS_US, SPLIT_CALL_US, COLUMNS_SAVE = (1.83, 1.81), (1.61, 5.30), 3.7, 0.83
BYTES_PER_US = 3.5e6  #: of what delta's rows and copies for parts of groups move
ROWS = KEYS = 64  #: of a block of queries, and of one of keys


def _done(costs: list[float], heads: int, sm_count: int) -> float:
    """When the last of every head's tiles is done."""
    if len(costs) * heads > fused_schedule.MOST_TILES:
        return heads * sum(costs) / sm_count + max(costs) / 2
    free = [0.0] * sm_count
    for cost in sorted(costs * heads, reverse=True):
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def split_us(problem: Problem, candidate: Candidate, gpu: Gpu) -> tuple[float, float, float, float]:
    """(all, dQ, dK and dV, all if both kernels shared the multiprocessors) of a split backward by the Hopper kernels."""
    (dq, _), (_, parts) = candidate["bwd_dq"], candidate[SPLIT_KERNEL]
    share = 1 - COLUMNS_SAVE * (1 - sum(columns(problem.specialization, dq.config)) / 512)
    own, causal = group_parts.split(problem, parts), problem.mask == CAUSAL
    rows, behind = ROWS * dq.config["GROUPS"], problem.seqlen_k - problem.seqlen_q
    seen = [problem.seqlen_k] * -(-problem.seqlen_q // rows)
    if causal:
        seen = [min(problem.seqlen_k, max(0, (nth + 1) * rows + behind)) for nth in range(len(seen))]
    of_dq = [-(-keys // dq.config["BLOCK_N"]) * SPLIT_BLOCK_US[0] * share + SPLIT_ENDS_US[0] for keys in seen]
    blocks = -(-problem.seqlen_q // ROWS)
    first = [
        min(max((nth * KEYS - behind) // ROWS, 0), blocks) if causal else 0 for nth in range(-(-own.seqlen_k // KEYS))
    ]
    of_dkdv = [own.group * (blocks - one) * SPLIT_BLOCK_US[1] * share + SPLIT_ENDS_US[1] for one in first]
    heads = problem.batch * problem.heads_q, own.batch * own.heads_kv
    times = _done(of_dq, heads[0], gpu.sm_count), _done(of_dkdv, heads[1], gpu.sm_count)
    delta = problem.batch * problem.heads_q * problem.seqlen_q * problem.head_dim_v * 4 / BYTES_PER_US
    rest = SPLIT_CALL_US + delta + fused_schedule.parts_us(problem, parts, gpu)
    busy = (heads[0] * sum(of_dq) + heads[1] * sum(of_dkdv)) / gpu.sm_count
    return rest + sum(times), *times, rest + max(busy, *of_dq, *of_dkdv)


def predictions(gpu: Gpu) -> Iterator[str]:
    """A line for each recorded call of the split Hopper kernels, and what they come to."""
    errors, gains = [], []
    for name, (problem, call) in recorded().items():
        named = chosen(problem, gpu)
        if FUSED_KERNEL in named or not all(
            WARP_SPECIALIZED in one.variant.implementations for one, _ in named.values()
        ):
            continue
        whole, dq, dkdv, both = split_us(problem, named, gpu)
        errors.append(math.log(whole / call["us"][side_by_side.SUBJECT]))
        gains.append(whole / both)
        yield (
            f"{name}: {workloads.described(problem)}: recorded {call['us'][side_by_side.SUBJECT]} us, ratio {call['ratio']}; "
            f"predicted {whole:.0f} (dQ {dq:.0f}, dK and dV {dkdv:.0f}), at a time {both:.0f}, ratio "
            f"{call['ratio'] * whole / both:.2f}"
        )
    fitted, held_out = (math.sqrt(statistics.fmean(e * e for e in errors[at::2])) for at in (0, 1))
    gained = sum(gain >= 1.05 for gain in gains)
    yield f"{len(errors)} calls: {fitted:.3f} off as fitted, {held_out:.3f} held out; {gained} gain 5 % or more"


# ---- measuring


def forward_choice(problem: Problem, gpu: Gpu) -> Choice:
    return choosing.Chooser(problem, gpu).choose("fwd")


def delta_of(problem: Problem, arch: int) -> tuple[Any, Any]:
    """The kernel that makes delta alone, and its config."""
    variant = variant_named("portable/bwd_delta")
    return variant, variant.space.default(problem.specialization, arch)


def beside(
    problem: Problem, tensors: Mapping[str, torch.Tensor], candidate: Candidate, scale: float, device: int, arch: int
) -> tuple[list[tuple[passes.Kernels, dict[str, torch.Tensor]]], list[torch.Tensor]]:
    """(kernels of ``Beside`` with their tensors, dq, dk and dv). ``tensors``: q, k, v, o, do, lse."""
    like = {f"d{name}": passes.empty_ordered(tensors[name], tensors[name].shape[3]) for name in "qkv"}
    delta, made = torch.empty_like(tensors["lse"]), (Choice(*delta_of(problem, arch)), 1)
    found = []
    for kernel, (choice, parts) in {"bwd_delta": made, **candidate}.items():
        given = {**tensors, **like, "delta": torch.empty_like(delta) if kernel == "bwd_dq" else delta}
        found.append((passes.Kernels({kernel: choice}, problem, given, scale, device, parts={kernel: parts}), given))
    return found, list(like.values())


class Beside:
    """The split backward with delta made before, then dQ on another stream beside dK and dV. dQ's kernel writes delta, too: to
    memory of its own. Its results are the same memory in each call."""

    def __init__(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], candidate: Candidate, scale: float
    ) -> None:
        """As ``beside`` has them."""
        place, index = tensors["q"].device, tensors["q"].get_device()
        made, self.results = beside(problem, tensors, candidate, scale, index, dispatch.gpu_of(index).arch)
        self.delta, self.dq, self.dkdv = (
            (kernels, (*given.values(), *passes.Fresh(place, *kernels.block())())) for kernels, given in made
        )
        self.other = torch.cuda.Stream()

    def __call__(self) -> list[torch.Tensor]:
        self.delta[0](self.delta[1])
        current = torch.cuda.current_stream()
        self.other.wait_stream(current)
        with torch.cuda.stream(self.other):
            self.dq[0](self.dq[1])
        self.dkdv[0](self.dkdv[1])
        current.wait_stream(self.other)
        return self.results


def measured(problem: Problem, stream: torch.cuda.Stream) -> dict[str, float]:
    """Candidate -> microseconds."""

    def new(length: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(problem.batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)

    q, do = (new(problem.seqlen_q, problem.heads_q, dim) for dim in (problem.head_dim, problem.head_dim_v))
    k, v = (new(problem.seqlen_k, problem.heads_kv, dim) for dim in (problem.head_dim, problem.head_dim_v))
    want, gpu = workloads.expected(problem, q, k, v, do), dispatch.gpu_of(0)
    q, k, v, do = (one.transpose(1, 2) for one in (q, k, v, do))
    scale = problem.head_dim**-0.5
    ours = passes.describe(q, k, v, problem.mask, scale)
    o, lse = passes.ForwardPlan(ours, q, k, v, scale, forward_choice(ours, gpu))(q, k, v)
    ours = passes.describe(q, k, v, problem.mask, scale, o=o, do=do)
    calls: dict[str, Callable[[], Sequence[torch.Tensor]]] = {}
    for name, named in candidates(ours, gpu).items():
        if name.startswith(BESIDE):
            calls[name] = Beside(ours, {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse}, named, scale)
        else:
            strategy = next(one for one, kernels in STRATEGIES.items() if set(kernels) == set(named))
            plan = passes.BackwardPlan(
                ours, do, None, q, k, v, o, scale, strategy, {kernel: choice for kernel, (choice, _) in named.items()},
                {kernel: parts for kernel, (_, parts) in named.items() if parts > 1},
            )  # fmt: skip
            calls[name] = lambda plan=plan: plan(do, None, q, k, v, o, lse)
        found = dict(zip(("dq", "dk", "dv"), (one.transpose(1, 2) for one in calls[name]()), strict=True))
        if (why := workloads.wrong(found, want, problem.group)) is not None:
            raise click.ClickException(f"{workloads.described(problem)}, {name}: {why}")
    return dict(zip(calls, (round(us, 1) for us in race(list(calls.values()), stream, BURST_MS)), strict=True))


def line(name: str, call: Mapping[str, Any]) -> str:
    times = ", ".join(f"{which} {us}" for which, us in call["us"].items())
    return f"{name}: {times}; when drawn {call['when drawn']}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--list", "listed", is_flag=True, help="Print what would be timed on an H200.")
@click.option(
    "--split", "predicted", is_flag=True, help="Print what an H200 would save with both split kernels at a time."
)
@click.option("--only", multiple=True, help="The call of this name (a 6), and no others.")
@click.option("--seconds", type=float, default=300.0, show_default=True, help="Begins no call after so long.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON; its calls are not measured again.")
@click.option("--table", "shown", type=click.Path(exists=True, path_type=Path), help="Print this file's times.")
def main(listed: bool, predicted: bool, only: tuple[str, ...], seconds: float, out: Path | None,
         shown: Path | None) -> None:  # fmt: skip
    if shown is not None:
        click.echo("\n".join(line(*one) for one in json.loads(shown.read_text("utf-8"))["calls"].items()))
        return
    h200 = gpus.named("h200")
    if listed:
        for name, (problem, _) in todo(h200).items():
            click.echo(f"{name}: {workloads.described(problem)}: {'; '.join(candidates(problem, h200))}")
        return
    if predicted:
        click.echo("\n".join(predictions(h200)))
        return
    if not torch.cuda.is_available():
        raise click.ClickException("needs a CUDA GPU that torch can use")
    side_by_side.warm()
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})
    stream, started = torch.cuda.Stream(), time.monotonic()
    for name, (problem, call) in todo(dispatch.gpu_of(0)).items():
        wanted = not only or " ".join(name.split()[:2]) in only
        if name in record["calls"] or not wanted or time.monotonic() - started > seconds:
            continue
        record["calls"][name] = found = {"us": measured(problem, stream), "when drawn": call["us"]}
        click.echo(line(name, found))
        torch.cuda.empty_cache()
        if out is not None:
            out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
