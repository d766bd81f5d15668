"""Times backwards with dS in memory whose kernels start before the one before them has ended, and one after the other.

    python benchmarks/ahead.py benchmarks/early_stored.py --drawn HASH                      # first: every binary; no GPU
    python benchmarks/early_stored.py --drawn HASH --out early_stored.json [--seconds 60]   # resumes from the file
    python benchmarks/early_stored.py --call "3 2 2 140 1317 192 192 causal" --out early_stored.json
    python benchmarks/early_stored.py --table early_stored.json                             # a file, as text, with estimates

--drawn: backwards that benchmarks/random_calls.py draws by that seed, in up to MOST_US microseconds by the estimate. --call: as
benchmarks/query_tiles.py has it, whose measuring this is. What serves is timed next to both, and what would without dS in
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import click
import dense_forwards
import query_tiles
import stored_tiles
import workloads
from dense_backwards import posed

from fa2tune import gpus
from fa2tune.calling import backward_plans, choosing
from fa2tune.calling.schedules import stored_ds_schedule
from fa2tune.gpus import Gpu
from fa2tune.launching import cuda, stored_ds
from fa2tune.launching.overlapped import DKDV
from fa2tune.search_spaces.sm90 import bwd_dkdv_ds
from fa2tune.spec.problem import Config, Problem

MOST_US = 600.0
EARLY, AFTER, OTHERWISE = "started early", "one after the other", "without dS in memory"


def best(problem: Problem, gpu: Gpu) -> Config | None:
    """That is expected to be the fastest, in slices as they have to be."""
    _, choices = choosing.choose_backward(choosing.Chooser(problem, gpu), False)
    count = stored_tiles.slices(problem, gpu)
    if DKDV not in choices or not count:
        return None
    several = problem.key_tiles(bwd_dkdv_ds.BLOCK) * problem.heads_kv > gpu.sm_count  # tiles a program
    found = [
        {**one, "SLICES": count}
        for one in stored_ds_schedule.configs(problem, choices[DKDV].of_row.config)
        if several or not one["PERSISTENT"]
    ]
    return min(found, key=lambda one: stored_ds_schedule.stored_us(problem, one, gpu))


def wanted(problem: Problem, gpu: Gpu) -> bool:
    """Whether a drawn call is timed."""
    config = best(problem, gpu) if stored_ds_schedule.asked(problem, gpu) else None
    return config is not None and stored_ds_schedule.stored_us(problem, config, gpu) < MOST_US


def plans(ours: Problem, gpu: Gpu, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is timed: name and plan."""
    strategy, choices = choosing.choose_backward(choosing.Chooser(ours, gpu), False)
    yield query_tiles.SERVED, backward_plans.backward_plan(ours, strategy, choices, gpu, given, True)
    with mock.patch.object(stored_ds_schedule, "STORED_DS", False):
        yield OTHERWISE, backward_plans.backward_plan(ours, strategy, choices, gpu, given, True)
    config = best(ours, gpu)
    assert config is not None
    yield EARLY, stored_ds.StoredDsPlan(ours, **given, config=config)
    with mock.patch.object(cuda, "may_start_early", lambda: False):
        after = stored_ds.StoredDsPlan(ours, **given, config=config)
    yield AFTER, after


def line(name: str, call: Mapping[str, Any]) -> str:
    problem, gpu = posed(call), gpus.named("h200")
    config = best(problem, gpu)
    assert config is not None
    us, said = stored_ds_schedule.stored_us(problem, config, gpu), (f"{one} {us}" for one, us in call["us"].items())
    return f"{name}: {workloads.described(problem)}: {', '.join(said)}; estimated {us:.1f}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@dense_forwards.drawn_options
def main(**given: Any) -> None:
    measure = partial(query_tiles.recorded, plans=plans)
    dense_forwards.time_drawn(partial(wanted, gpu=gpus.named("h200")), measure, line, **given)


if __name__ == "__main__":
    main()
