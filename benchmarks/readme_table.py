"""Turns what ``fa2tune bench`` measured into the README's figures: plots, averages, and every cell as a Markdown table.

    fa2tune bench --dtype bf16,fp16 --out results --resume --time-budget 480     # until it says that every cell is measured
    python benchmarks/readme_table.py results/bench.json --plots docs/bench --readme README.md

Of several results files (one for each GPU of a host, say) the last that holds a cell counts; --into keeps what came of it.
Without --readme the Markdown goes to the screen. In the README it replaces what stands between the two marker lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fa2tune.bench import comparison, report

BEGIN, END = "<!-- bench: begin, written by benchmarks/readme_table.py -->", "<!-- bench: end -->"


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


def section(data: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """Markdown: the machine, then per dtype, pass and way of timing the plot, the averages and the folded table. ``plots``:
    file name -> address as seen from the README."""
    parts = [f"Measured on {report.setting(data)}."]
    for dtype, pass_, kind in report.sections(data):
        title = report.title_of(dtype, pass_, kind)
        averages = report.sentence(report.records(data, kind, dtype=dtype, **{"pass": pass_}))
        plot = report.plot_name(dtype, pass_, kind)
        parts += [
            f"### {title}", f"![{title}: TFLOP/s by sequence length, head dim and mask]({plots[plot]})", averages,
            f"<details><summary>Every cell, TFLOP/s</summary>\n\n{report.markdown(data, dtype, pass_, kind)}\n</details>",
        ]  # fmt: skip
    if report.MEMORY_PLOT in plots:
        parts += ["### Memory", f"![Peak memory by sequence length]({plots[report.MEMORY_PLOT]})"]
    parts += [f"- {objection}" for objection in report.objections(data)]
    return "\n\n".join(part for part in parts if part) + "\n"


def replaced(readme: str, text: str) -> str:
    """The README with ``text`` between the markers. ValueError if they are not there, once each and in order."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"readme: needs the lines {BEGIN!r} and {END!r}, in this order")
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


@click.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.option("--into", type=click.Path(dir_okay=False, path_type=Path), help="File for the results, merged.")
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for the PNGs.")
@click.option(
    "--readme", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Rewrite between its markers."
)
def main(results: Sequence[Path], into: Path | None, plots: Path, readme: Path | None) -> None:
    """README figures from results files of fa2tune bench."""
    try:
        data = merged([comparison.load(path) for path in results])
        if into:
            into.write_text(json.dumps(data, indent=1) + "\n")
        plots.mkdir(parents=True, exist_ok=True)
        seen_from = readme.parent if readme else Path()
        addresses = {path.name: Path(os.path.relpath(path, seen_from)).as_posix() for path in report.plots(data, plots)}
        text = section(data, addresses)
        if readme:
            readme.write_text(replaced(readme.read_text(), text))
        else:
            click.echo(text)
    except ValueError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
