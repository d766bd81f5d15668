"""README table of what the warp-specialised kernels add, from the rows of a shipped cache file.

    python benchmarks/specialized_table.py cache/h200.sqlite --readme README.md

Each time was measured by the tuner in one race with the best portable config of its key, whose ratio is shown beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import click

from fa2tune.problem import BACKWARD, BUCKETS
from fa2tune.rows import reader
from fa2tune.rows.row import Row, over_portable

BEGIN, END = "<!-- rows: begin, written by benchmarks/specialized_table.py -->", "<!-- rows: end -->"
PASSES = (("forward", "fwd"), ("backward", BACKWARD))


def best(rows: Sequence[Row], kernel: str, dim: int, causal: bool, bucket: int) -> Row | None:
    own = [
        row
        for row in rows
        if (row.key.kernel, row.key.head_dim, row.key.head_dim_v, row.key.causal, row.key.bucket)
        == (kernel, dim, dim, causal, bucket)
        and row.key.dtype == "bf16"
    ]
    return min(own, key=lambda row: row.rank_us, default=None)


def cell(row: Row | None, rows: Sequence[Row]) -> tuple[str, float | None]:
    """TFLOP/s and how many times the portable winner, 1 where that is the best row; (s) or (f): the road of a backward."""
    if row is None:
        return "-", None
    assert row.tflops is not None
    road = f" ({row.road[0]})" if row.key.kernel == BACKWARD else ""
    ratio = over_portable(row, rows)
    return f"{row.tflops:.0f}{road}, {'portable' if ratio is None else f'{ratio:.2f} x'}", ratio or 1.0


def table(rows: Sequence[Row]) -> list[str]:
    ratios: dict[str, list[float]] = {name: [] for name, _ in PASSES}
    lines = ["| head dim | mask | pass | " + " | ".join(f"{n // 1024}k" if n >= 1024 else str(n) for n in BUCKETS) + " |",
             "|--:|--|--|" + "--:|" * len(BUCKETS)]  # fmt: skip
    for dim in sorted({row.key.head_dim for row in rows}):
        for causal in (False, True):
            for name, kernel in PASSES:
                cells = [cell(best(rows, kernel, dim, causal, bucket), rows) for bucket in BUCKETS]
                ratios[name] += [ratio for _, ratio in cells if ratio]
                mask = "causal" if causal else "full"
                lines.append(f"| {dim} | {mask} | {name} | " + " | ".join(text for text, _ in cells) + " |")
    means = ", ".join(
        f"{name} {statistics.geometric_mean(found):.2f} x ({len(found)} cells)" for name, found in ratios.items()
    )
    return [f"Over the portable winner, geometric mean: {means}.", "", *lines]


@click.command(help=__doc__)
@click.argument("cache", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--readme", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Write it between its marks."
)
def main(cache: Path, readme: Path | None) -> None:
    rows = list(reader.read(cache))
    newest = max((row for row in rows if row.specialized), key=lambda row: row.created)
    where = f"{newest.obtained_on}, driver {newest.driver}, torch {newest.torch}, Triton {newest.triton}, {newest.created[:10]}"
    text = "\n".join([f"Measured on {where}, bf16, TFLOP/s.", "", *table(rows)])
    if readme is None:
        click.echo(text)
        return
    before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
