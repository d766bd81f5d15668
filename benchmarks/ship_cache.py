"""Makes the shipped cache files from measured rows.

    python benchmarks/ship_cache.py measured.sqlite cache/h200.sqlite

    python benchmarks/ship_cache.py cache/h200.sqlite later.sqlite cache/h200.sqlite

    python benchmarks/ship_cache.py cache/h200.sqlite cache/h100.sqlite --sibling h100-sxm

The first form writes the rows as they are, sorted and vacuumed, with their JSON copy. The second merges several runs. The
third files the rows under a GPU of the same silicon; these rows name obtained "sibling", proof "sibling" and the GPU that
measured them.

Merging: times of different GPUs do not compare, so the rows of a key stay together. They are those of the run whose winner
gained most over the default; an earlier file's are kept where the next gains less than half a percent more. Implementations
that the chosen run lacks are taken from another run if they are slower than the winner. A run whose winner was measured
with other than the present kernel sources is ignored, and a key with no other run is left out: a neighbour's row serves it.

--newest takes the rows of the run that measured a key's winner last. It is for runs that started from the earlier file's
rows: they raced those rows against new candidates on one GPU, and at the power limit they timed each one alone, which gains
do not show.

--raced-only leaves out fp16 rows whose key was never raced with the warp-specialised kernels although these won in bf16:
the lookup then takes the bf16 row instead of a portable one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from fa2tune import gpus
from fa2tune.compiling import fingerprint
from fa2tune.rows import reader, record
from fa2tune.rows.lookup import Toolchain
from fa2tune.rows.row import MEASURED, SIBLING, Row, precedence
from fa2tune.rows.store import Store
from fa2tune.spec.key import TuningKey

NOTEWORTHY = 1.005  #: a later run's row has to be ahead by this factor


def best_of(runs: Sequence[Sequence[Row]], toolchain: Toolchain, newest: bool = False) -> list[Row]:
    """The rows to ship of several runs, earlier ones first. ``newest``: those measured last, whatever they gained."""
    ahead = _measured_later if newest else _gained_more
    best: dict[tuple[TuningKey, str], list[Row]] = {}
    spare: dict[tuple[TuningKey, str], list[list[Row]]] = {}  # of each run
    for rows in runs:
        keys: dict[tuple[TuningKey, str], list[Row]] = {}
        for row in rows:
            keys.setdefault((row.key, row.obtained), []).append(row)
        for key, found in keys.items():
            fresh = [row for row in found if not toolchain.stale(row)]
            spare.setdefault(key, []).append(fresh)
            if _winner(found) in fresh and (key not in best or ahead(fresh, best[key])):
                best[key] = fresh
    for key, chosen in best.items():
        others: dict[tuple[Any, ...], list[Row]] = {}
        for fresh in spare[key]:
            slower = (row for row in fresh if row.rank_us > _winner(chosen).rank_us)
            others |= record.by_slot(slower)
        filled = record.by_slot(chosen)
        best[key] = [*chosen, *(row for slot, rows in others.items() if slot not in filled for row in rows)]
    return [row for chosen in best.values() for row in chosen]


def _winner(rows: Sequence[Row]) -> Row:
    return min(rows, key=precedence)


def _gain(rows: Sequence[Row]) -> float:
    return _winner(rows).gain or 0.0


def _gained_more(these: Sequence[Row], those: Sequence[Row]) -> bool:
    return _gain(these) > NOTEWORTHY * _gain(those)


def _measured_later(these: Sequence[Row], those: Sequence[Row]) -> bool:
    return _winner(these).created > _winner(those).created


def raced(rows: list[Row]) -> list[Row]:
    """Without those that --raced-only leaves out."""
    specialized = {row.key for row in rows if row.warp_specialized}
    return [row for row in rows if row.key.dtype != "fp16" or row.key in specialized or not _leader_won(row, rows)]


def _leader_won(row: Row, rows: list[Row]) -> bool:
    """Whether a warp-specialised row is the best of the same key in bf16."""
    leading = [other for other in rows if other.key == row.key.with_(dtype="bf16")]
    return bool(leading) and _winner(leading).warp_specialized


@click.command(help=__doc__)
@click.argument("measured", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.argument("shipped", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--sibling", metavar="GPU", help="File the rows under this GPU, of the same silicon.")
@click.option("--newest", is_flag=True, help="Take the rows that were measured last, of several runs.")
@click.option(
    "--raced-only", is_flag=True, help="Leave out fp16 rows that were not raced with the warp-specialised kernels."
)
def main(measured: tuple[Path, ...], shipped: Path, sibling: str | None, newest: bool, raced_only: bool) -> None:
    if newest and len(measured) == 1:
        raise click.UsageError("--newest: got one file of rows, it chooses among several")
    runs = [list(reader.read(run)) for run in measured]
    present = Toolchain(kernel_hashes=fingerprint.kernel_hashes())
    rows = runs[0] if len(runs) == 1 else best_of(runs, present, newest)
    if raced_only:
        kept = raced(rows)
        click.echo(f"{len(rows) - len(kept)} rows left out")
        rows = kept
    if sibling is not None:
        target = gpus.named(sibling)
        wrong = {row.key.gpu for row in rows if gpus.named(row.key.gpu).silicon != target.silicon}
        if wrong or target.sm_count != rows[0].key.sm_count:
            raise click.BadParameter(
                f"got {target.name}, not the silicon and SM count of {', '.join(wrong) or measured[0]}"
            )
        rows = [
            replace(row, key=row.key.with_(gpu=target.name), obtained=SIBLING, proof=SIBLING)
            for row in rows
            if row.obtained == MEASURED
        ]
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "rows.sqlite")
        store.put(rows)
        store.export(shipped, "sqlite")
        store.export(shipped.with_suffix(".json"), "json")
    click.echo(f"{shipped}: {len(rows)} rows")


if __name__ == "__main__":
    main()
