"""100 random dense calls beside the best peer of each, drawn after the code was frozen: the seed is the commit's hash.

    python benchmarks/ahead.py benchmarks/random_calls.py --seed HASH            # compiles on all cores; no GPU
    python benchmarks/random_calls.py --seed HASH --out r.json [--seconds 480]   # resumes from the file
    python benchmarks/random_calls.py --seed HASH --list                         # what is drawn; no GPU
    python benchmarks/random_calls.py --table r.json [--page docs/benchmarks.md] # a file, as Markdown

Peers, checks and times are those of benchmarks/workloads.py. Where no peer runs a call, the portable kernels are the peer. The
kinds of calls are in random order, so that the calls that one run reaches are a sample of all.
"""

from __future__ import annotations

import functools
import json
import math
import random
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import marked
import side_by_side
import workloads

from fa2tune import gpus
from fa2tune.calling import backward_plans, merging, unseen
from fa2tune.calling.choosing import Chooser, choose_backward
from fa2tune.calling.kinds import PORTABLE_ROWS
from fa2tune.calling.schedules import in_place_schedule
from fa2tune.compiling.support import companion
from fa2tune.gpus import Gpu
from fa2tune.launching import key_splits, passes
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import BACKWARD, ITEMSIZE, SPLIT, STRATEGIES, Config, Problem

#: Bytes of all tensors of a backward, and time of both passes at 250 TFLOP/s.
MOST_BYTES, MOST_MS, ASSUMED_TFLOPS = 8 << 30, 20.0, 250.0
#: Ratios to the best peer: no call may be below the first; a share of calls must reach the second, where 1 % counts as level.
LEAST, LEVEL, SHARE = 0.9, 0.99, 0.95
PORTABLE = "portable"


# ---- what is drawn


def drawn(seed: str, count: int = 100) -> dict[str, Problem]:
    """Random calls: batch 1 to 64, heads 1 to 96 and lengths 64 to 32k log-uniform, head dims 16 to 256 in steps of 8, both
    masks. A fifth have unequal lengths, three in ten grouped heads, a tenth another head dim for V, at least."""
    source = random.Random(seed)
    kinds = ["unequal"] * (count // 5) + ["grouped"] * (3 * count // 10) + ["V apart"] * (count // 10)
    kinds += ["any"] * (count - len(kinds))
    source.shuffle(kinds)
    return {f"{place} {kind}": _draw(source, kind) for place, kind in enumerate(kinds)}


def _draw(source: random.Random, kind: str) -> Problem:
    def logarithmic(low: int, high: int) -> int:
        return round(math.exp(source.uniform(math.log(low), math.log(high))))

    def head_dim() -> int:
        return 8 * source.randint(2, 32)

    while True:
        heads_kv, seqlen, dim = logarithmic(1, 96), logarithmic(64, 32768), head_dim()
        group = source.randint(2, 96) if kind == "grouped" else 1
        problem = Problem(
            "bf16", logarithmic(1, 64), heads_kv * group, heads_kv, seqlen,
            logarithmic(64, 32768) if kind == "unequal" else seqlen, dim, head_dim() if kind == "V apart" else dim,
            source.choice((FULL, CAUSAL)),
        )  # fmt: skip
        if (kind == "unequal" and problem.seqlen_k == seqlen) or (kind == "V apart" and problem.head_dim_v == dim):
            continue
        fits = problem.heads_q <= 96 and bytes_of(problem) <= MOST_BYTES
        if (
            fits
            and (workloads.operations(problem, "fwd") + workloads.operations(problem, "bwd")) / ASSUMED_TFLOPS / 1e9
            <= MOST_MS
        ):
            return problem


def bytes_of(problem: Problem) -> int:
    """Of all tensors of a backward: q, dq; k, dk; v, dv; o, do."""
    queries = problem.heads_q * problem.seqlen_q * (problem.head_dim + problem.head_dim_v)
    keys = problem.heads_kv * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    return 2 * problem.batch * (queries + keys) * ITEMSIZE[problem.dtype]


# ---- measuring


def portable_configs(chooser: Chooser) -> dict[str, Config]:
    """By kernel, the portable config that would serve if there were no others: of a row, or the default."""
    found = {}
    for kernel in ("fwd", *STRATEGIES[SPLIT]):
        choice = chooser.choose(kernel, PORTABLE_ROWS)  # where no portable row serves, the default of any kind
        if not choice.variant.name.startswith(f"{PORTABLE}/"):
            choice = chooser.portable_default(kernel)
        found[kernel] = choice.config
    return found


def portable(problem: Problem) -> side_by_side.Attention:
    """The portable kernels."""
    import torch

    configs = portable_configs(Chooser(problem, gpus.device(0)))
    forward = configs.pop("fwd")
    scale, mask = problem.head_dim**-0.5, problem.mask

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:  # (batch, heads, seqlen, dim)
            o, lse = passes.forward(q, k, v, mask=mask, softmax_scale=scale, config=forward)
            ctx.save_for_backward(q, k, v, o, lse)
            return o

        @staticmethod
        def backward(ctx: Any, do: Any) -> Any:
            saved = ctx.saved_tensors
            return passes.backward(do, None, *saved, mask=mask, softmax_scale=scale, strategy=SPLIT, configs=configs)

    def attention(q: Any, k: Any, v: Any) -> Any:
        tensors = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return Attend.apply(*tensors).transpose(1, 2)  # type: ignore[no-untyped-call]

    return attention


STAND_IN = side_by_side.Peer(portable)


def measure(
    problem: Problem, peers: Mapping[str, side_by_side.Peer], stand_in: side_by_side.Peer = STAND_IN, device: str = "cuda"
) -> dict[str, Any]:  # fmt: skip
    """As ``workloads.measure``; a pass that no peer runs is timed again beside the portable kernels."""
    found = workloads.measure(problem, peers, device)
    alone = [name for name in ("fwd", "bwd") if name in found and found[name]["best_peer"] is None]
    if alone:
        ours = {side_by_side.SUBJECT: peers[side_by_side.SUBJECT], PORTABLE: stand_in}
        again = workloads.measure(problem, ours, device)
        found |= {name: again[name] for name in alone if name in again}
        found["missing"] |= again["missing"]
    return found


def served(problem: Problem, gpu: Gpu) -> dict[str, dict[str, Any]]:
    """By pass, what serves: the config and parts of groups of each kernel that is chosen, the queries that are filled in, the
    order in which both kernels of a split backward run at a time, if they do, and whether query heads are taken as one.
    A model of times is fitted to what ran."""
    whole, found = Chooser(workloads.as_called(problem), gpu), dict[str, dict[str, Any]]()
    for pass_ in ("fwd", BACKWARD):
        rows = unseen.filled_in(problem, gpu, pass_)
        chooser = whole.of(unseen.behind(whole.problem, rows))
        one_head = merging.merging(chooser, pass_)
        chooser = one_head or chooser
        kernels = {}
        choices = {"fwd": chooser.choose("fwd")} if pass_ == "fwd" else choose_backward(chooser, False)[1]
        divided = backward_plans.division(chooser.problem, choices, gpu)
        for kernel, choice in choices.items():
            split = None
            if kernel == "fwd":
                split = in_place_schedule.instead_of(chooser.problem, choice.config, gpu, choice.row)
            variant = key_splits.splitting(split) if split else choice.variant
            kernels[variant.short_name] = {
                "config": dict(split or choice.config),
                "parts": divided.parts.get(kernel, 1),
            }
        order = divided.order
        one, refused = backward_plans.whole(chooser.problem, choices, divided, gpu)
        if one is not None and not refused:
            name = companion(one.role, chooser.problem.specialization, gpu.arch).short_name
            kernels, order = {name: {"config": dict(one.config), "parts": one.config.get("PARTS", 1)}}, ""
        found[pass_] = {"kernels": kernels, "filled in": rows} | ({"order": order} if order else {})
        found[pass_] |= {"one head": True} if one_head is not None else {}
    return found


def measured_and_served(problem: Problem, peers: Mapping[str, side_by_side.Peer]) -> dict[str, Any]:
    """``measure``, and ``served`` by pass."""
    found = measure(problem, peers)
    for pass_, what in served(problem, gpus.device(0)).items():
        if pass_ in found:
            found[pass_]["served"] = what
    return found


# ---- the record and the table


def summary(calls: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Per pass, whether what has been measured meets the bars, and the calls below the lower one."""
    for pass_ in ("fwd", "bwd"):
        found = {name: call[pass_]["ratio"] for name, call in calls.items() if pass_ in call}
        ratios = {name: ratio for name, ratio in found.items() if ratio is not None}
        if not ratios:
            continue
        level = sum(ratio >= LEVEL for ratio in ratios.values())
        below = sorted((ratio, name) for name, ratio in ratios.items() if ratio < LEAST)
        mean = math.exp(statistics.fmean(math.log(max(ratio, 0.01)) for ratio in ratios.values()))
        met = not below and level >= SHARE * len(ratios)
        without = f", {len(found) - len(ratios)} without any peer" if len(found) > len(ratios) else ""
        yield (
            f"{pass_}: {'met' if met else 'not met'}: {level} of {len(ratios)} level with the best peer or ahead ({SHARE:.0%} "
            f"are asked for), {len(below)} below {LEAST} (none may be), geometric mean {mean:.3f}{without}"
        )
        yield from (f"{pass_}: {ratio} {name}" for ratio, name in below)


def report(record: Mapping[str, Any]) -> Iterator[str]:
    yield from (*workloads.setting(record), "", *workloads.table(record), "")
    yield from (f"- {line}" for line in summary(record["calls"]))


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--seed", default="", help="The commit's hash.")
@click.option("--list", "listed", is_flag=True, help="Print what is drawn, measure nothing.")
@click.option("--peers", help=f"{', '.join(workloads.PEERS)}.  [default: those that are here]")
@side_by_side.share_option
@click.option("--seconds", type=float, default=480.0, show_default=True, help="Begins no call after so long.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON; calls that it has are not measured again.")
@marked.page_option
@click.option(
    "--table", "shown", type=click.Path(path_type=Path, exists=True), help="Print this file's table, measure nothing."
)
def main(seed: str, listed: bool, peers: str | None, share: slice, seconds: float, out: Path | None,
         shown: Path | None, page: Path | None) -> None:  # fmt: skip
    if shown is not None:
        record = json.loads(shown.read_text("utf-8"))
        marked.publish(page, "random_calls", "random_calls", "\n".join(report(record)))
        return
    if not seed:
        raise click.BadParameter("is missing: the hash of the commit that is measured", param_hint="--seed")
    problems = side_by_side.in_share(drawn(seed), share)
    if listed:
        click.echo("\n".join(f"{name}: {workloads.described(problem)}" for name, problem in problems.items()))
        return
    here = side_by_side.asked(peers, workloads.PEERS)
    record = side_by_side.begun(out, {"environment": side_by_side.environment(), "peers": list(here), "seed": seed})
    side_by_side.fill(record, problems, functools.partial(workloads.recorded, measured_and_served, here), seconds, out)
    click.echo("\n".join(summary(record["calls"])))


if __name__ == "__main__":
    main()
