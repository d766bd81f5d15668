"""``fa2tune cache path``, ``list``, ``show``: the cache files and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fa2tune.cli import _tables
from fa2tune.cli._options import shown_errors
from fa2tune.cli._output import echo, echo_all
from fa2tune.cli.cache.common import EVIDENCE_INDENT, FILE, cells, describe_row, filters, layers_of, selector
from fa2tune.rows import lookup, reader, record
from fa2tune.rows.row import Row
from fa2tune.text import count


@click.command(short_help="Print the path of the user's cache file.")
def path() -> None:
    """Print the path of the user's cache file, whether or not it exists."""
    with shown_errors():
        click.echo(reader.user_path())


def _cells(row: Row) -> tuple[str, ...]:
    """kernel, dtype, head dim, mask."""
    _, *found, _ = cells(row.key)
    return tuple(found)


@click.command("list", short_help="List the cache files that serve and their rows.")
@click.option("--cache", "file", type=FILE, help="This file only.  [default: every layer that serves]")
@filters
def list_(file: Path | None, **wanted: Any) -> None:
    """List the cache files that serve, in lookup order, and the rows in them. A line of a table means every combination of its
    values.

    Files with the same digest hold the same rows: compare it to see whether two machines use the same cache.
    """
    layers = layers_of(file)
    if not layers:
        echo("No cache file: every call takes the default config. `fa2tune tune` makes one.")
        return
    files = [(layer.name, str(len(layer.rows)), record.digest(layer.rows), str(layer.path)) for layer in layers]
    _tables.show(("layer", "rows", "digest", "file"), files, right=("rows",), below=("file",))
    every = [row for layer in layers for row in layer.rows]
    chosen = selector(every, wanted)
    if every and not any(map(chosen, every)):
        echo()
        echo("no row matches")
    for layer in layers:
        parts: dict[tuple[str, int, str], list[Row]] = {}
        for row in filter(chosen, layer.rows):
            parts.setdefault((row.key.gpu, row.key.sm_count, row.obtained), []).append(row)
        for (gpu, sms, obtained), rows in parts.items():
            echo()
            echo(f"{gpu}, {sms} SMs, {obtained}, {count(len(rows), 'row')}, {layer.name} layer, {layer.path.name}")
            _tables.show(("kernel", "dtype", "dim", "mask", "length"), _combined(rows))


def _combined(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    lengths: dict[tuple[str, ...], set[int]] = {}
    for row in rows:
        lengths.setdefault(_cells(row), set()).add(row.key.bucket)
    table = [(*about, " ".join(_tables.spans(found))) for about, found in lengths.items()]
    return _tables.merged(table, (3, 2, 1))  # masks, then head dims, then dtypes


@click.command(short_help="Show rows with all their evidence.")
@click.option("--cache", "file", type=FILE, help="This file only.  [default: every layer that serves]")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON, as `cache export` writes them.")
@filters
def show(file: Path | None, as_json: bool, **wanted: Any) -> None:
    """Show rows with all their evidence, from every layer or from one file."""
    layers = layers_of(file)
    rows = [row for layer in layers for row in layer.rows]
    chosen = selector(rows, wanted)
    if not any(map(chosen, rows)):
        raise click.ClickException("no row matches; `fa2tune cache list` lists what there is")
    if as_json:
        click.echo(record.to_json(filter(chosen, rows)), nl=False)
        return
    from fa2tune.compiling import fingerprint

    here = lookup.Toolchain(driver=fingerprint.driver_version())
    for layer in layers:
        for row in filter(chosen, layer.rows):
            parts = (part for line in describe_row(row, here) for part in _tables.folded(f"  {line}", EVIDENCE_INDENT))
            echo_all([f"{layer.name}: {layer.path}", *parts, ""])
