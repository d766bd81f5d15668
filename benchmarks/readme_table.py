"""Turns what ``fa2tune bench`` measured into tables and plots of the documentation.

    fa2tune bench --dtype bf16,fp16 --out results --resume --time-budget 480     # until it says that every cell is measured
    python benchmarks/readme_table.py results/bench.json --plots docs/bench --page docs/benchmarks.md --readme README.md

Of several results files (one for each GPU of a host, say) the last that holds a cell counts; --into keeps the merged file.
--page gets the runs, every cell and the plots, --readme the table of medians; each replaces what stands between its two
marker lines. Without both the Markdown goes to the screen.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import marked

from fa2tune.bench import comparison, plotting, tables
from fa2tune.bench.peers import PEERS, SUBJECT
from fa2tune.spec.mask import ROW_MASKS

SCRIPT = "readme_table"
PART, MEDIANS = "bench", "medians"  #: what the marker lines name


def merged(files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One results file of several; of a cell that more than one has, the last."""
    cells: dict[tuple[Any, ...], Any] = {}
    runs: list[Any] = []
    for data in files:
        for record in data["cells"]:
            what = tuple(value for name, value in sorted(record.items()) if name not in ("peers", "run"))
            cells[what] = {**record, "run": len(runs) + record["run"]}
        runs += data["runs"]
    used = sorted({record["run"] for record in cells.values()})
    kept = [{**record, "run": used.index(record["run"])} for record in cells.values()]
    complete = all(data["complete"] for data in files)
    return {"schema": files[0]["schema"], "complete": complete, "runs": [runs[run] for run in used], "cells": kept}


def medians(data: Mapping[str, Any], dtype: str = "bf16") -> str:
    """The README's table: per pass and head dim the median of fa2tune's speed over each peer's, over lengths and masks; with
    the least and the greatest over the best peer. Only peers that ran in every interleaved cell have a column."""
    cells = tables.records(data, "time", dtype=dtype)
    full = [name for name in tables.peers_of(cells) if all("ratio" in cell["peers"].get(name, {}) for cell in cells)]
    names = [name for name in full if name != SUBJECT]
    header = [
        "pass",
        "head dim",
        *(f"x {PEERS[name].label}" for name in names),
        "x best peer",
        "x best peer, sustained",
    ]
    header += ["cells (sustained)"]
    lines = ["| " + " | ".join(header) + " |", "|--|" + "--:|" * (len(header) - 1)]
    for pass_, title in tables.PASS_TITLES.items():
        for dim in sorted({cell["head_dim"] for cell in cells if cell["pass"] == pass_}):
            timed, sustained = (
                tables.records(data, kind, dtype=dtype, head_dim=dim, **{"pass": pass_})
                for kind in ("time", "sustained")
            )
            row = [title, str(dim)]
            row += [f"{statistics.median(cell['peers'][name]['ratio'] for cell in timed):.2f}" for name in names]
            row += [_against_best(timed), _against_best(sustained), f"{len(timed)} ({len(sustained)})"]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _against_best(cells: Sequence[Mapping[str, Any]]) -> str:
    ratios = [best[0] for cell in cells if (best := tables.ratio_to_best(cell))]
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def runs(data: Mapping[str, Any]) -> tuple[str, str]:
    """Two tables: what all runs have in common; when each took which cells, and on what where that differs."""
    facts = (("GPU", "gpu"), ("driver", "driver"), ("torch", "torch"), ("Triton", "triton"), ("cuDNN", "cudnn"),
             ("FlashAttention-4", "flash-attn-4"), ("power limit, W", "power_limit_w"))  # fmt: skip
    present = [(title, field) for title, field in facts if any(run.get(field) for run in data["runs"])]
    common = [fact for fact in present if len({run.get(fact[1]) for run in data["runs"]}) == 1]
    varying = [fact for fact in present if fact not in common]
    shared = ["| all runs | |", "|--|--|"]
    shared += [f"| {title} | {_plain(data['runs'][0][field])} |" for title, field in common]
    header = ["started (UTC)", "pass", "timing", "head dim", "mask", "lengths", *(title for title, _ in varying)]
    lines = ["| " + " | ".join(header) + " |", "|" + "--|" * len(header)]
    rows = []
    for number, run in sorted(enumerate(data["runs"]), key=lambda one: str(one[1]["date"])):
        found: dict[tuple[Any, ...], set[int]] = {}
        for cell in data["cells"]:
            if cell["run"] == number and cell["kind"] in tables.KIND_TITLES:
                found.setdefault(
                    (cell["pass"], cell["kind"], cell["head_dim"], ROW_MASKS.index(tables.mask_label(cell))), set()
                ).add(cell["seqlen"])
        for (pass_, kind, dim, mask), lengths in sorted(found.items()):
            row = [run["date"][:16].replace("T", " "), tables.PASS_TITLES[pass_], tables.KIND_TITLES[kind], str(dim),
                   ROW_MASKS[mask], ", ".join(map(tables.length_name, sorted(lengths))),
                   *(_plain(run.get(field)) for _, field in varying)]  # fmt: skip
            rows.append("| " + " | ".join(row) + " |")
    return "\n".join(shared) + "\n", "\n".join([*lines, *rows]) + "\n"


def _plain(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def section(data: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """Markdown: per dtype, pass and timing mode the plot, the averages and the table; then the runs. ``plots``: file name
    -> address as seen from the page."""
    shared, each = runs(data)
    parts = [shared]
    if (overview := f"{plotting.OVERVIEW}.png") in plots:
        parts += [f"![Forward and backward: TFLOP/s by sequence length and head dim]({plots[overview]})"]
    for dtype, pass_, kind in tables.sections(data):
        title = tables.title_of(dtype, pass_, kind)
        averages = tables.sentence(tables.records(data, kind, dtype=dtype, **{"pass": pass_}))
        plot = f"{plotting.plot_name(dtype, pass_, kind)}.png"
        parts += [
            f"### {title}", f"![{title}: TFLOP/s by sequence length, head dim and mask]({plots[plot]})", averages,
            tables.markdown(data, dtype, pass_, kind),
        ]  # fmt: skip
    if (memory := f"{plotting.MEMORY_PLOT}.png") in plots:
        parts += ["### Memory", f"![Peak memory by sequence length]({plots[memory]})"]
    parts += [f"- {objection}" for objection in tables.objections(data)]
    parts += ["### Runs", each]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


@click.command(help=__doc__)
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.option("--into", type=click.Path(dir_okay=False, path_type=Path), help="File for the results, merged.")
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for the plots.")
@click.option(
    "--page", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Page of every cell to rewrite."
)
@click.option(
    "--readme", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Page of medians to rewrite."
)
def main(results: Sequence[Path], into: Path | None, plots: Path, page: Path | None, readme: Path | None) -> None:
    try:
        data = merged([comparison.load(path) for path in results])
        if into:
            into.write_text(json.dumps(data, indent=1) + "\n")
        plots.mkdir(parents=True, exist_ok=True)
        seen_from = page.parent if page else Path()
        addresses = {
            path.name: Path(os.path.relpath(path, seen_from)).as_posix() for path in plotting.plots(data, plots)
        }
        every_cell = section(data, addresses)
        if page:
            marked.write(page, PART, SCRIPT, every_cell)
        if readme:
            marked.write(readme, MEDIANS, SCRIPT, f"{tables.setting(data)}, bfloat16.\n\n{medians(data)}")
        if not page and not readme:
            click.echo(f"{medians(data)}\n{every_cell}")
    except ValueError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
