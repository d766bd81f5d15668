"""Times backwards with dS in memory whose programs take one key tile, and tile after tile, next to what serves.

    python benchmarks/ahead.py benchmarks/stored_tiles.py --drawn HASH                      # first: every binary; no GPU
    python benchmarks/stored_tiles.py --drawn HASH --out stored_tiles.json [--seconds 60]   # resumes from the file
    python benchmarks/stored_tiles.py --call "58 2 2 170 32444 192 192 full" --out stored_tiles.json
    python benchmarks/stored_tiles.py --table stored_tiles.json                             # a file, as text, with estimates

--drawn: backwards that benchmarks/random_calls.py draws by that seed, of one head dim above 128, in up to MOST_US microseconds
by the estimate. --call: as benchmarks/query_tiles.py has it, whose measuring this is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import click
import dense_forwards
import query_tiles
import workloads
from dense_backwards import posed

from fa2tune import gpus
from fa2tune.calling import backward_plans, choosing
from fa2tune.calling.schedules import stored_ds_schedule
from fa2tune.gpus import Gpu
from fa2tune.launching import stored_ds
from fa2tune.launching.overlapped import DKDV
from fa2tune.search_spaces.sm90 import bwd_dkdv_ds
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Config, Problem

MOST_US = 6000.0
BANDS = (1, 4, 8, 16, 64)  #: of heads, under a causal mask


def candidates(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """Name -> config: one tile a program or tile after tile, blocks of Q and dO and of P under way, and bands of heads; slices
    as they have to be."""
    _, choices = choosing.choose_backward(choosing.Chooser(problem, gpu), False)
    usual = bwd_dkdv_ds.of_row(problem, choices[DKDV].of_row.config)
    usual["SLICES"] = slices(problem, gpu)
    band, found = usual["HEADS_PER_WAVE"], {named(usual): usual}
    spec, space = problem.specialization, stored_ds.kernel(problem, gpu.arch).space
    has_room = bwd_dkdv_ds.tile_after_tile(spec, usual) is not None
    for stages, p_stages, persistent in product((2, 3, 4), (1, 2), (False, True)):
        if not persistent and (stages, p_stages) not in ((3, 1), (4, 1)) and has_room:
            continue
        bands = BANDS if persistent and problem.mask != FULL else [4] if persistent else [band]
        for heads in bands:
            one = {**usual, "PERSISTENT": persistent, "STAGES": stages, "P_STAGES": p_stages, "HEADS_PER_WAVE": heads}
            if space.broken(one, spec, gpu.arch) is None:
                found[named(one)] = one
    return found


def slices(problem: Problem, gpu: Gpu) -> int:
    """Fewest that memory allows."""
    return stored_ds.fewest_slices(problem, int(gpu.hbm_bytes * stored_ds_schedule.MOST_MEMORY), gpu.arch)


def named(config: Config) -> str:
    numbers = (str(config[name]) for name in ("STAGES", "P_STAGES", "HEADS_PER_WAVE"))
    return " ".join(("tiles" if config["PERSISTENT"] else "one", *numbers))


def wanted(problem: Problem, gpu: Gpu) -> bool:
    """Whether a drawn call is timed."""
    if problem.head_dim != problem.head_dim_v or not stored_ds_schedule.asked(problem, gpu):
        return False
    _, choices = choosing.choose_backward(choosing.Chooser(problem, gpu), False)
    if DKDV not in choices or not slices(problem, gpu):
        return False
    made = candidates(problem, gpu).values()
    return (
        any(one["PERSISTENT"] for one in made)
        and stored_ds_schedule.stored_us(problem, next(iter(made)), gpu) < MOST_US
    )


def plans(ours: Problem, gpu: Gpu, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is timed: name and plan."""
    strategy, choices = choosing.choose_backward(choosing.Chooser(ours, gpu), False)
    yield query_tiles.SERVED, backward_plans.backward_plan(ours, strategy, choices, gpu, given, True)
    for name, config in candidates(ours, gpu).items():
        yield name, stored_ds.StoredDsPlan(ours, **given, config=config)


def line(name: str, call: Mapping[str, Any], asked: Callable[[Problem, Gpu], Mapping[str, Config]] = candidates) -> str:
    """Of a call in a file, with the estimates of what ``asked`` names."""
    problem, gpu = posed(call), gpus.named("h200")
    made = asked(problem, gpu)

    def estimated(which: str) -> str:
        if which not in made:
            return ""
        return f" ({stored_ds_schedule.stored_us(problem, made[which], gpu):.1f})"

    said = "; ".join(f"{which}: {us}{estimated(which)}" for which, us in call["us"].items())
    return f"{name}: {workloads.described(problem)}: {said}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@dense_forwards.drawn_options
def main(**given: Any) -> None:
    measure = partial(query_tiles.recorded, plans=plans)
    dense_forwards.time_drawn(partial(wanted, gpu=gpus.named("h200")), measure, line, **given)


if __name__ == "__main__":
    main()
