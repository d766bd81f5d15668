"""Times forms of the Hopper forward in bands of heads of other widths, under a causal mask, next to what serves.

    python benchmarks/ahead.py benchmarks/band_forwards.py --drawn HASH                     # first: every binary; no GPU
    python benchmarks/band_forwards.py --drawn HASH --out band_forwards.json [--seconds 60] # resumes from the file
    python benchmarks/band_forwards.py --call "1 17 17 3372 3372 192 16 causal" --out band_forwards.json
    python benchmarks/band_forwards.py --table band_forwards.json                           # a file, as text, with estimates

--drawn: forwards that benchmarks/random_calls.py draws by that seed, for which some form of few_tiles.configs is estimated to
take up to SHARE of the time of what serves. --call: as benchmarks/dense_forwards.py has it, whose measuring this is. Of each
call the FORMS forms that are estimated to be the fastest in their best band, in each band that is estimated within NEAR of
that, and in band 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import click
import dense_forwards
import few_tiles_fit

from fa2tune import gpus
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.kinds import WARP_SPECIALIZED_ROWS
from fa2tune.calling.schedules import few_tiles
from fa2tune.calling.schedules.tile_order import TILE_ORDERS
from fa2tune.gpus import Gpu
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Config, Problem

FORMS, NEAR, SHARE = 3, 0.06, 0.985


def estimated(problem: Problem, config: Config, gpu: Gpu) -> dict[int, float]:
    """Band -> microseconds."""
    times = {
        band: few_tiles.expected_us(problem, {**config, "HEADS_PER_WAVE": band}, gpu.sm_count) for band in TILE_ORDERS
    }
    return {band: us for band, us in times.items() if us is not None}


def candidates(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """Name -> config; the first is the row's."""
    row = choosing.choose(problem, "fwd", gpu, WARP_SPECIALIZED_ROWS).config
    lose = few_tiles.norms_lose(problem, gpu.sm_count)
    forms = [
        (min(times.values()), times, config)
        for config in few_tiles.configs(problem.specialization, gpu.arch)
        if (times := estimated(problem, config, gpu)) and not (lose and config["RESCALE"] == "never")
    ]
    forms = sorted(forms, key=lambda one: one[0])[:FORMS]
    made = [row]
    for _, times, config in forms:
        least = min(times.values())
        seen = set[float]()
        for band, us in times.items():
            if band == 0 or (us <= (1 + NEAR) * least and us not in seen):
                made.append({**config, "HEADS_PER_WAVE": band})
            seen.add(us)
    if row.get("DIVISORS"):
        made = [{**one, "DIVISORS": True} for one in made]
    return {dense_forwards.label(one): one for one in made}


def wanted(problem: Problem, gpu: Gpu) -> bool:
    """Whether a drawn call is timed."""
    if problem.mask == FULL:
        return False
    row = choosing.choose(problem, "fwd", gpu, WARP_SPECIALIZED_ROWS).config
    now = few_tiles.expected_us(problem, row, gpu.sm_count)
    made = [few_tiles.expected_us(problem, one, gpu.sm_count) for one in list(candidates(problem, gpu).values())[1:]]
    return now is not None and min(filter(None, made), default=now) <= SHARE * now


def line(name: str, call: Mapping[str, Any]) -> str:
    problem, gpu = few_tiles_fit.posed(call["call"]), gpus.named("h200")
    made = candidates(problem, gpu) if problem else {}

    def said(which: str) -> str:
        us = few_tiles.expected_us(problem, made[which], gpu.sm_count) if problem and which in made else None
        return "" if us is None else f" ({us:.1f})"

    return f"{name}: {call['call']}: " + "; ".join(f"{which}: {us}{said(which)}" for which, us in call["us"].items())


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@dense_forwards.drawn_options
def main(**given: Any) -> None:
    def measure(problem: Problem) -> dict[str, Any]:
        return dense_forwards.compared((problem, {}), lambda ours: candidates(ours, dispatch.gpu_of(0)))

    dense_forwards.time_drawn(partial(wanted, gpu=gpus.named("h200")), measure, line, **given)


if __name__ == "__main__":
    main()
