"""Times backwards with dS in memory whose dQ has its keys in one part, and in several, next to what serves.

    python benchmarks/ahead.py benchmarks/stored_parts.py --drawn HASH                      # first: every binary; no GPU
    python benchmarks/stored_parts.py --drawn HASH --out stored_parts.json [--seconds 60]   # resumes from the file
    python benchmarks/stored_parts.py --call "6 1 1 393 17976 160 160 full" --out stored_parts.json
    python benchmarks/stored_parts.py --table stored_parts.json                             # a file, as text, with estimates

--drawn: backwards that benchmarks/random_calls.py draws by that seed, whose dQ has few tiles. --call: as
benchmarks/query_tiles.py has it, whose measuring this is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import click
import dense_forwards
import early_stored
import query_tiles
import stored_tiles

from fa2tune import gpus
from fa2tune.calling import backward_plans, choosing
from fa2tune.calling.schedules import stored_ds_schedule
from fa2tune.gpus import Gpu
from fa2tune.launching import stored_ds
from fa2tune.spec.problem import Config, Problem

MOST_US = 6000.0
#: Programs that make dQ, as many times as there are multiprocessors.
TURNS = (0.5, 1, 2, 4)


def candidates(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """Name -> config: of the form that is expected to be the fastest, keys in one part and in several."""
    usual = early_stored.best(problem, gpu)
    if usual is None:
        return {}
    programs = problem.query_tiles(stored_ds_schedule.BLOCK * usual["DQ_GROUPS"]) * problem.heads_q
    most = stored_ds.most_splits(problem, usual, gpu.arch)
    counts = sorted({1, *(max(1, min(most, int(turns * gpu.sm_count) // programs)) for turns in TURNS)})
    return {f"parts: {count}": {**usual, "DQ_SPLITS": count} for count in counts}


def wanted(problem: Problem, gpu: Gpu) -> bool:
    """Whether a drawn call is timed."""
    made = candidates(problem, gpu) if stored_ds_schedule.asked(problem, gpu) else {}
    return len(made) > 1 and stored_ds_schedule.stored_us(problem, made["parts: 1"], gpu) < MOST_US


def plans(ours: Problem, gpu: Gpu, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is timed: name and plan."""
    strategy, choices = choosing.choose_backward(choosing.Chooser(ours, gpu), False)
    with mock.patch.object(stored_ds_schedule, "STORED_DS", False):
        yield early_stored.OTHERWISE, backward_plans.backward_plan(ours, strategy, choices, gpu, given, True)
    yield query_tiles.SERVED, backward_plans.backward_plan(ours, strategy, choices, gpu, given, True)
    for name, config in candidates(ours, gpu).items():
        yield name, stored_ds.StoredDsPlan(ours, **given, config=config)


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@dense_forwards.drawn_options
def main(**given: Any) -> None:
    measure = partial(query_tiles.recorded, plans=plans)
    line = partial(stored_tiles.line, asked=candidates)
    dense_forwards.time_drawn(partial(wanted, gpu=gpus.named("h200")), measure, line, **given)


if __name__ == "__main__":
    main()
