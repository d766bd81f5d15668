"""Times backwards by tiles of queries: kernels/sm90/bwd_query_tiles.py with keys in several numbers of parts, beside what
serves without it.

    python benchmarks/ahead.py benchmarks/query_tiles.py --drawn HASH                     # first: every binary; no GPU
    python benchmarks/query_tiles.py --drawn HASH --out query_tiles.json [--seconds 60]   # resumes from the file
    python benchmarks/query_tiles.py --call "3 2 2 140 1317 192 192 causal" --out query_tiles.json
    python benchmarks/query_tiles.py --table query_tiles.json                             # a file, as text, with estimates

--drawn: backwards that benchmarks/random_calls.py draws by that seed, of up to MOST_QUERIES queries, of more than MOST_HEADS
heads only those of up to FEW_QUERIES. --call: batch, heads of queries and of keys, lengths of queries and of keys, head dims of
Q and of V, mask.
Each result is compared with float32 arithmetic; a wrong one is an error. Each candidate is a CUDA graph; replays are
interleaved; the file holds medians of seven bursts in microseconds a call. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import click
import dense_forwards
import torch
import workloads
from dense_backwards import posed, shape_of
from launch_choices import race
from one_key_tile import forward

from fa2tune import gpus
from fa2tune.calling import backward_plans, choosing, dispatch
from fa2tune.calling.schedules import query_tiles_schedule
from fa2tune.gpus import Gpu
from fa2tune.launching import passes, query_tiles
from fa2tune.spec.problem import Config, Problem

#: (call as tensors pose it, GPU, what else a plan takes) -> names and plans.
Plans = Callable[[Problem, Gpu, Mapping[str, Any]], Iterator[tuple[str, Any]]]

SERVED = "served"
BURST_MS = 2.0
#: Queries of a drawn call at most; those of more than FEW_QUERIES, which are a tile, have up to MOST_HEADS heads.
MOST_QUERIES, FEW_QUERIES, MOST_HEADS = 512, 128, 132
#: Programs, in turns of as many as there are multiprocessors.
TURNS = (0.5, 1, 2, 4)


def wanted(problem: Problem, arch: int) -> bool:
    """Whether a drawn call is timed."""
    most = MOST_QUERIES if problem.batch * problem.heads_q <= MOST_HEADS else FEW_QUERIES
    return problem.seqlen_q <= most and query_tiles.able(problem, arch)


def candidates(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """Tiles of each size, keys in one part, and in as many as TURNS asks for."""
    spec, space, found = problem.specialization, query_tiles.space_of(problem, gpu.arch), dict[str, Config]()
    for rows in space.rows_of(spec):
        whole = space.config_of(spec, rows, 1)
        programs = query_tiles.tiles(problem, whole) * problem.batch * problem.heads_kv
        most = query_tiles.most_splits(problem, whole, gpu.arch)
        counts = {max(1, min(most, int(turns * gpu.sm_count) // programs)) for turns in TURNS}
        found |= {f"{rows} rows, {count} parts": space.config_of(spec, rows, count) for count in sorted(counts | {1})}
    return found


def without(problem: Problem, gpu: Gpu, given: Mapping[str, Any]) -> Any:
    """The plan of what serves without it."""
    with mock.patch.object(query_tiles_schedule, "QUERY_TILES", False):
        strategy, choices = choosing.choose_backward(choosing.Chooser(problem, gpu), False)
        return backward_plans.backward_plan(problem, strategy, choices, gpu, given, True)


def plans(ours: Problem, gpu: Gpu, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is timed: name and plan."""
    yield SERVED, without(ours, gpu, given)
    for name, config in candidates(ours, gpu).items():
        yield name, query_tiles.QueryTilesPlan(ours, **given, config=config)


def raced(problem: Problem, plans: Plans) -> dict[str, float]:
    """Name -> microseconds of a backward by each plan."""
    q, k, v, do = workloads.inputs(problem)
    want, gpu = workloads.expected(problem, q, k, v, do), dispatch.gpu_of(0)
    q, k, v, do = (one.transpose(1, 2) for one in (q, k, v, do))
    scale = problem.head_dim**-0.5
    o, lse = forward(problem, q, k, v, scale)
    ours = passes.describe(q, k, v, problem.mask, scale, o=o, do=do)
    given = {"do": do, "dlse": None, "q": q, "k": k, "v": v, "o": o, "softmax_scale": scale}
    calls: dict[str, Callable[[], Sequence[torch.Tensor]]] = {}

    for name, plan in plans(ours, gpu, given):
        calls[name] = partial(plan, do, None, q, k, v, o, lse)
        found = dict(zip(("dq", "dk", "dv"), (one.transpose(1, 2) for one in calls[name]()), strict=True))
        if (why := workloads.wrong(found, want, problem.group)) is not None:
            raise click.ClickException(f"{workloads.described(problem)}, {name}: {why}")
    times = race(list(calls.values()), torch.cuda.Stream(), BURST_MS)
    return dict(zip(calls, (round(us, 2) for us in times), strict=True))


def recorded(problem: Problem, plans: Plans) -> dict[str, Any]:
    return {**shape_of(problem), "us": raced(problem, plans)}


def line(name: str, call: Mapping[str, Any]) -> str:
    problem, gpu = posed(call), gpus.named("h200")

    def estimated(which: str) -> str:
        if which == SERVED:
            return ""
        rows, splits = (int(one.split()[0]) for one in which.split(", "))
        config = query_tiles.space_of(problem, gpu.arch).config_of(problem.specialization, rows, splits)
        return f" ({query_tiles_schedule.query_tiles_us(problem, config, gpu):.1f})"

    said = "; ".join(f"{which} {us}{estimated(which)}" for which, us in call["us"].items())
    return f"{name}: {workloads.described(problem)}: {said}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@dense_forwards.drawn_options
def main(**given: Any) -> None:
    dense_forwards.time_drawn(partial(wanted, arch=90), partial(recorded, plans=plans), line, **given)


if __name__ == "__main__":
    main()
