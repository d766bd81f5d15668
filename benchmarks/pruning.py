"""What the search never compiles, on exhaustive tables (see tables.py): how good the best of it would have been. No GPU needed.

    python benchmarks/pruning.py benchmarks/tables/*.gz benchmarks/tables/blind/*.gz [--page docs/search.md]

Per key and load variant, with the shipped constants: the share of configs whose estimate (prior.py) is more than PRUNED_BEYOND
times the variant's lowest one; the estimate of the config that is measured best, and the largest one of those within 10 % of
it, both over the lowest; the time of the best config that is compiled over the variant's best, which is what the rule costs if
the search misses nothing else; and the time of the best one that is never compiled over the key's best.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import marked
import numpy as np
import tables

from fa2tune import gpus
from fa2tune.compiling import registry
from fa2tune.predicting import prior
from fa2tune.tuning.search.candidates import point
from fa2tune.tuning.search.guided import PRUNED_BEYOND, hopeful

SCRIPT, PART = "pruning", "pruning"
NEAR = 1.1  #: times the best: close enough to matter


def figures(table: tables.Table) -> list[tuple[str, float, float, float, float, float]]:
    """Per load variant, the columns of the table. The last is infinite where nothing that runs is pruned."""
    key = table.key
    configs = [dict(where) for where in sorted([*table.times, *table.statuses], key=repr)]
    variant = registry.portable_of(key.kernel)
    estimates = np.array(prior.estimates(variant, key.specialization(), configs, gpus.named(key.gpu), key.workload()))
    times = np.array([table.times.get(point(config), np.inf) for config in configs])
    loads = np.array([config["LOADS"] for config in configs])
    compiled = np.zeros(len(configs), dtype=bool)
    compiled[hopeful([estimates.tolist()], loads.tolist())] = True
    found = []
    for load in sorted(set(loads.tolist())):
        own = loads == load
        over = estimates / estimates[own].min()
        best = times[own].min()
        kept, lost = (times[own & these].min(initial=np.inf) for these in (compiled, ~compiled))
        found.append((
            load, float(1 - compiled[own].mean()), float(over[own & (times == best)].min()),
            float(over[own & (times <= NEAR * best)].max()), float(kept / best), float(lost / times.min()),
        ))  # fmt: skip
    return found


def markdown(read: Sequence[tables.Table]) -> str:
    lines = ["| key | loads by | never compiled | estimate of the best | of those within 10 % | best compiled, "
             "x the variant's best | best never compiled, x the key's best |", "|---|---|--:|--:|--:|--:|--:|"]  # fmt: skip
    for table in read:
        key = table.key
        name = f"{key.kernel} {key.head_dim} {key.mask} {key.bucket}"
        for load, share, best, near, kept, lost in figures(table):
            lines.append(f"| {name} | {load} | {share:.0%} | {best:.2f} | {near:.2f} | {kept:.2f} | {lost:.2f} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@marked.page_option
def main(paths: tuple[Path, ...], page: Path | None) -> None:
    text = f"Estimates over the lowest of their load variant; the limit is {PRUNED_BEYOND:g}.\n\n"
    text += markdown([tables.load(path) for path in paths])
    marked.publish(page, PART, SCRIPT, text)


if __name__ == "__main__":
    main()
