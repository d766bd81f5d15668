"""``fa2tune cache path``, ``list``, ``show``: what cache files there are, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fa2tune.cli._options import told
from fa2tune.cli.cache.common import FILE, describe, filters, head_dims, layers_of, selector
from fa2tune.rows import reader, record
from fa2tune.rows.row import Row


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    for line in (head, *lines):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


@click.command(short_help="Print where the user's cache file lies.")
def path() -> None:
    """Print where the user's cache file lies, whether or not there is one yet."""
    with told():
        click.echo(reader.user_path())


def _kind_of_row(row: Row) -> tuple[str, ...]:
    key = row.key
    dtype = f"{key.dtype} {key.precision}" if key.dtype == "fp32" else key.dtype
    return (
        key.gpu,
        str(key.sm_count),
        key.kernel,
        dtype,
        head_dims(key),
        "causal" if key.causal else "full",
        row.obtained,
    )


@click.command("list", short_help="List the cache files that serve, and what they hold.")
@click.option("--cache", "file", type=FILE, help="This file only.  [default: every layer that serves]")
@filters
def list_(file: Path | None, **wanted: Any) -> None:
    """List the cache files that serve, strongest first, and what they hold.

    Files with the same digest hold the same rows: compare it to know that two machines use the same cache.
    """
    layers = layers_of(file)
    if not layers:
        click.echo("No cache file: every call takes the default config. `fa2tune tune` makes one.")
        return
    lines = [(layer.name, str(len(layer.rows)), record.digest(layer.rows), str(layer.path)) for layer in layers]
    _table(("layer", "rows", "digest", "file"), lines)
    chosen = selector([row for layer in layers for row in layer.rows], wanted)
    kinds: dict[tuple[str, ...], list[int]] = {}
    for layer in layers:
        for row in filter(chosen, layer.rows):
            kinds.setdefault((*_kind_of_row(row), layer.name), []).append(row.key.bucket)
    if kinds:
        click.echo()
        head = ("gpu", "SMs", "kernel", "dtype", "head dim", "mask", "obtained", "layer", "rows", "buckets")
        _table(head, [(*kind, str(len(b)), " ".join(map(str, sorted(set(b))))) for kind, b in kinds.items()])


@click.command(short_help="Show rows with all their evidence.")
@click.option("--cache", "file", type=FILE, help="This file only.  [default: every layer that serves]")
@click.option("--json", "as_json", is_flag=True, help="The rows as the JSON twin of a cache file has them.")
@filters
def show(file: Path | None, as_json: bool, **wanted: Any) -> None:
    """Show rows with all their evidence, those of every layer or of one file."""
    layers = layers_of(file)
    rows = [row for layer in layers for row in layer.rows]
    chosen = selector(rows, wanted)
    if not any(map(chosen, rows)):
        raise click.ClickException("no row matches; `fa2tune cache list` lists what there is")
    if as_json:
        click.echo(record.to_json(filter(chosen, rows)), nl=False)
        return
    for layer in layers:
        for row in filter(chosen, layer.rows):
            click.echo(f"{layer.name}: {layer.path}")
            for line in describe(row):
                click.echo(f"  {line}")
            click.echo()
