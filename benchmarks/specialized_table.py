"""Table of what the warp-specialised kernels add, from the rows of a shipped cache file, for docs/benchmarks.md.

    python benchmarks/specialized_table.py cache/h200.sqlite --page docs/benchmarks.md

Each time was measured by the tuner in one race with the best portable config of its key, whose ratio is shown next to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import click
import marked

from fa2tune.rows import reader
from fa2tune.rows.describe import PASSES
from fa2tune.rows.row import Row, over_portable
from fa2tune.spec.mask import ROW_MASKS
from fa2tune.spec.problem import BACKWARD, BUCKETS

SCRIPT, PART = "specialized_table", "rows"


def best(rows: Sequence[Row], kernel: str, dim: int, mask: str, bucket: int) -> Row | None:
    own = [
        row
        for row in rows
        if (row.key.kernel, row.key.head_dim, row.key.head_dim_v, row.key.mask, row.key.bucket)
        == (kernel, dim, dim, mask, bucket)
        and row.key.dtype == "bf16"
    ]
    return min(own, key=lambda row: row.rank_us, default=None)


def cell(row: Row | None, rows: Sequence[Row]) -> tuple[str, float | None]:
    """TFLOP/s and how many times the portable winner, 1 where that is the best row; (s) or (f): split or fused backward."""
    if row is None:
        return "-", None
    assert row.tflops is not None
    strategy = f" ({row.strategy[0]})" if row.key.kernel == BACKWARD else ""
    ratio = over_portable(row, rows)
    return f"{row.tflops:.0f}{strategy}, {'portable' if ratio is None else f'{ratio:.2f} x'}", ratio or 1.0


def table(rows: Sequence[Row]) -> list[str]:
    ratios: dict[str, list[float]] = {name: [] for name in PASSES.values()}
    lines = ["| head dim | mask | pass | " + " | ".join(f"{n // 1024}k" if n >= 1024 else str(n) for n in BUCKETS) + " |",
             "|--:|--|--|" + "--:|" * len(BUCKETS)]  # fmt: skip
    for dim in sorted({row.key.head_dim for row in rows}):
        for mask in ROW_MASKS:
            for kernel, name in PASSES.items():
                cells = [cell(best(rows, kernel, dim, mask, bucket), rows) for bucket in BUCKETS]
                ratios[name] += [ratio for _, ratio in cells if ratio]
                lines.append(f"| {dim} | {mask} | {name} | " + " | ".join(text for text, _ in cells) + " |")
    means = ", ".join(
        f"{name} {statistics.geometric_mean(found):.2f} x ({len(found)} cells)" for name, found in ratios.items()
    )
    return [f"Over the portable winner, geometric mean: {means}.", "", *lines]


@click.command(help=__doc__)
@click.argument("cache", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@marked.page_option
def main(cache: Path, page: Path | None) -> None:
    every = list(reader.read(cache))
    # head dims whose winners raced the portable ones in both passes, and rows of both kinds are shipped
    whole = {row.key.head_dim for row in every if row.key.kernel == BACKWARD}
    rows = [row for row in every if row.key.head_dim in whole]
    newest = max((row for row in rows if row.warp_specialized), key=lambda row: row.created)
    where = f"{newest.obtained_on}, driver {newest.driver}, torch {newest.torch}, Triton {newest.triton}, {newest.created[:10]}"
    text = "\n".join([f"{where}, bf16, TFLOP/s.", "", *table(rows)])
    marked.publish(page, PART, SCRIPT, text)


if __name__ == "__main__":
    main()
