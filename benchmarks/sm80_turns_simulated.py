"""Plays through the tiles of the fused sm80 backward that add to dQ in turns: its speed over that in any order.

    python benchmarks/sm80_turns_simulated.py --only 128 --record benchmarks/calls/sm80_calls_shipped.json

The calls are those of sm80_calls.py, with the configs, parts of groups and bands that they have on an A100. Tiles go in the
order of their numbers to as many programs as --gpu runs at once (two of one multiprocessor at half of its speed each, also
where one is alone). A tile takes a step for each query block, START to begin and END to pass on its last turn. --lag is the
time in steps from a tile's addition to a block until the next tile may add to it. In any order: the same in the row's bands.
Columns: bands of 16, 32 and 64 heads; the band that is taken, and what ``ampere_turns`` expects of it; with a --record, the
speed over SDPA's, if --cost of the simulated one is left by fences and longer loops. No GPU.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import click
import numpy as np
import sm80_calls

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.calling.schedules import ampere_turns, group_parts_schedule, ordered
from fa2tune.launching import group_parts
from fa2tune.rows import lookup
from fa2tune.spec.problem import Config, Problem

START, END = 1.5, 0.3
A100 = gpus.named("a100-sxm-80gb")


@cache
def steps(
    rows: tuple[int, ...], heads: int, group: int, block: int, programs: int, band: int, lag: float | None
) -> float:
    """Until the last tile is done. ``rows``: query rows that each tile meets; ``lag``: None for any order."""
    free, last = [0.0] * programs, 0.0
    for first in range(0, heads, band):
        added: dict[tuple[int, int], np.ndarray] = {}
        for met in rows:
            blocks = np.arange(max(1, -(-met // block)))
            for head in range(first, min(heads, first + band)):
                now = free[0] + START
                for query_head in range(group):
                    if lag is not None:
                        able = np.full(len(blocks), now + 1)
                        if (before := added.get((head, query_head))) is not None:
                            able = np.maximum(able, before[: len(blocks)] + lag - blocks)
                        added[head, query_head] = np.maximum.accumulate(able) + blocks
                        now = added[head, query_head][-1]
                    else:
                        now += len(blocks)
                heapq.heapreplace(free, now + (0.0 if lag is None else END))
                last = max(last, now)
    return last


def _shape(problem: Problem, config: Config, gpu: gpus.Gpu, parts: int) -> tuple[tuple[int, ...], int, int, int, int]:
    """Of ``steps``, but for the band and the lag."""
    ours = group_parts.split(problem, parts)
    programs = ampere_turns.programs_at_once(config, problem.specialization, gpu) * gpu.sm_count
    rows = group_parts_schedule.rows_of_tiles(ours.seqlen_q, ours.seqlen_k, config["BLOCK_N"], ours.mask)
    return rows, ours.batch * ours.heads_kv, ours.group, config["BLOCK_M"], programs


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--gpu", default="h200", show_default=True, help="Whose multiprocessors there are.")
@click.option("--lag", default=1.2, show_default=True)
@click.option(
    "--cost", default=0.95, show_default=True, help="Share of the speed that is left by what is not simulated."
)
@click.option("--only", default="", help="Calls whose name has this text.")
@click.option("--record", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Of sm80_calls.py.")
def main(gpu: str, lag: float, cost: float, only: str, record: Path | None) -> None:
    here, node = gpus.named(gpu), lookup.Toolchain(triton="3.6.0")
    timed = json.loads(record.read_text("utf-8"))["calls"] if record else {}
    for name, problem in sm80_calls.calls().items():
        if only not in name:
            continue
        free = choosing.choose_backward(choosing.Chooser(problem, A100, node=node), False)[1][ordered.KERNEL]
        config, expected = ordered.in_turns(problem, free.config, A100)
        turns = replace(free, config=config)
        parts, own = (group_parts_schedule.parts_of(problem, ordered.KERNEL, one, A100) for one in (turns, free))
        rows, heads, *rest = _shape(problem, free.config, here, own)
        before = steps(rows, heads, *rest, min(heads, free.config["HEADS_PER_WAVE"]), None)  # type: ignore[arg-type]
        rows, heads, *rest = _shape(problem, config, here, parts)
        found = {
            band: before / steps(rows, heads, *rest, min(heads, band), lag)  # type: ignore[arg-type]
            for band in ampere_turns.BANDS
        }
        line = f"{name:24} {' '.join(f'{speed:.2f}' for speed in found.values())}, {config['HEADS_PER_WAVE']}: {expected:.2f}"
        if name in timed:
            us = timed[name]["bwd"]["us"]
            line += f", x SDPA {us['fa2'] / us['fa2tune'] * found[config['HEADS_PER_WAVE']] * cost:.2f}"
        click.echo(line)


if __name__ == "__main__":
    main()
