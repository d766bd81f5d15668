"""Times calls whose first queries see no key: with these filled in, and computed like others (fa2tune/calling/unseen.py).

    python benchmarks/ahead.py benchmarks/filled_in.py --drawn HASH                     # first: every binary; no GPU
    python benchmarks/filled_in.py --drawn HASH --out filled_in.json [--seconds 60]     # resumes from the file
    python benchmarks/filled_in.py --call "6 8 8 5425 1503 176 176 causal" --out filled_in.json
    python benchmarks/filled_in.py --table filled_in.json                               # a file, as text, with estimates

--drawn: calls that benchmarks/random_calls.py draws by that seed, of more queries than keys and under a causal mask. --call: as
benchmarks/query_tiles.py has it.
Each result is compared with float32 arithmetic; a wrong one is an error. Each pass is a CUDA graph; replays are interleaved;
the file holds medians of seven bursts in microseconds a pass. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import click
import dense_forwards
import torch
import workloads
from dense_backwards import posed, shape_of
from launch_choices import race

from fa2tune import gpus
from fa2tune.calling import dispatch, unseen
from fa2tune.gpus import Gpu
from fa2tune.spec.problem import BACKWARD, Problem
from fa2tune.spec.score import NONE

BURST_MS = 2.0
#: Name -> how many queries are filled in.
WAYS: dict[str, Callable[[Problem, Gpu, str], int]] = {
    "filled in": lambda problem, gpu, pass_: 0 if problem.wide else unseen.count(problem),
    "computed": lambda problem, gpu, pass_: 0,
}


def planned(plans: dict[tuple[Any, ...], Any], call: Callable[[], Any]) -> tuple[Any, Any]:
    """(The plan that a call makes first, which is its own, what it gives)."""
    plans.clear()
    given = call()
    return next(iter(plans.values())), given


def measured(problem: Problem) -> dict[str, Any]:
    """What a file holds of a call."""
    q, k, v, do = workloads.inputs(problem)
    want = workloads.expected(problem, q, k, v, do)
    q, k, v, do = (one.transpose(1, 2) for one in (q, k, v, do))
    scale, passes = problem.head_dim**-0.5, {"fwd": dict[str, Callable[[], Any]](), BACKWARD: {}}
    for name, filled_in in WAYS.items():
        with mock.patch.object(unseen, "filled_in", filled_in):
            plan, (o, lse) = planned(
                dispatch.FORWARD_PLANS, lambda: dispatch.forward(q, k, v, problem.mask, scale, NONE)
            )
            passes["fwd"][name] = partial(plan, q, k, v)
            given = do, None, q, k, v, o, lse
            plan, gradients = planned(
                dispatch.BACKWARD_PLANS, lambda given=given: dispatch.backward(*given, problem.mask, scale, False, NONE)
            )
            passes[BACKWARD][name] = partial(plan, *given)
            results = dict(zip(("o", "dq", "dk", "dv"), (one.transpose(1, 2) for one in (o, *gradients)), strict=True))
            if (why := workloads.wrong(results, want, problem.group)) is not None:
                raise click.ClickException(f"{workloads.described(problem)}, {name}: {why}")
    found = shape_of(problem)
    for pass_, calls in passes.items():
        times = race(list(calls.values()), torch.cuda.Stream(), BURST_MS)
        found[pass_] = dict(zip(calls, (round(us, 1) for us in times), strict=True))
    return found


def wanted(problem: Problem) -> bool:
    """Whether a drawn call is timed."""
    return unseen.count(problem) > 0


def line(name: str, call: Mapping[str, Any]) -> str:
    problem, gpu = posed(call), gpus.named("h200")

    def said(pass_: str) -> str:
        saved, added = unseen.estimate(problem, gpu, pass_)
        chosen = "filled in" if unseen.filled_in(problem, gpu, pass_) else "computed"
        times = ", ".join(f"{way} {us}" for way, us in call[pass_].items())
        return f"{pass_} {times} (saves {saved:.1f} for {added:.1f}: {chosen})"

    return f"{name}: {workloads.described(problem)}: {'; '.join(map(said, ('fwd', BACKWARD)))}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@dense_forwards.drawn_options
def main(**given: Any) -> None:
    dense_forwards.time_drawn(wanted, measured, line, **given)


if __name__ == "__main__":
    main()
