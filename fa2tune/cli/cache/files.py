"""``fa2tune cache export``, ``merge``, ``diff``: rows from file to file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fa2tune.cli._options import check_folder, told
from fa2tune.cli.cache.common import FILE, KEY_TITLES, cells, console, figure, filters, rich_table, selector
from fa2tune.rows import reader, record
from fa2tune.rows.row import Row

KINDS = {".sqlite": "sqlite", ".json": "json"}


@click.command(short_help="Write rows to a file to ship.")
@click.argument("out", type=FILE, required=False)
@click.option("--cache", "file", type=FILE, help="The file to export from.  [default: the user's]")
@click.option("--storage", envvar="FA2TUNE_STORAGE",
              help="URL of the database to export from, into which `fa2tune tune --storage` has put its rows.")  # fmt: skip
@click.option("--format", "kind", type=click.Choice(("sqlite", "json")), help="[default: as OUT ends]")
@click.option("--twin", is_flag=True, help="With an .sqlite file, also its .json twin for review.")
@filters
def export(
    out: Path | None, file: Path | None, storage: str | None, kind: str | None, twin: bool, **wanted: Any
) -> None:  # fmt: skip
    """Write rows to OUT, a file to ship: .sqlite, or .json to read. The same rows always give the same bytes.

    Without OUT, --format json prints.
    """
    if kind is None:
        kind = KINDS.get(out.suffix, "") if out else ""
    if not kind and out:
        raise click.BadParameter(
            f"got {out}, its name must end in .sqlite or .json, or --format must say which", param_hint="OUT"
        )
    if out is None and kind != "json":
        raise click.UsageError("OUT is missing; only --format json can be printed")
    if out is not None:
        check_folder(out, "OUT")
    if file is not None and storage is not None:
        if click.get_current_context().get_parameter_source("storage") is not ParameterSource.ENVIRONMENT:
            raise click.UsageError("--cache and --storage: rows are exported from one of them")
        storage = None
    with told():
        source: Path | str = reader.user_path() if file is None else file
        if storage is not None:
            from fa2tune.sharing.shared import SharedStore
            from fa2tune.sharing.storage import Storage, parsed

            database = Storage.at(parsed(storage))
            if not database.shared:
                raise ValueError(
                    "storage: got an SQLite file, beside which the rows are in a cache file: --cache names it"
                )
            store = SharedStore(database)
            source, held = store.name, store.rows()
        elif out and out.resolve() == Path(source).resolve():
            raise click.BadParameter(f"got {out}, which is the file to export from", param_hint="OUT")
        else:
            held = reader.read(source)
        rows = list(filter(selector(held, wanted), held))
        if not rows:
            raise click.ClickException(f"no row of {source} matches: nothing written")
        if out is None:
            click.echo(record.to_json(rows), nl=False)
            return
        from fa2tune.rows.store import export as write

        outs = [(out, kind), *([(out.with_suffix(".json"), "json")] if twin and kind == "sqlite" else [])]
        for each, its_kind in outs:
            write(rows, each, its_kind)
            click.echo(f"{each}: {len(rows)} rows, digest {record.digest(rows)}")


@click.command(short_help="Take rows of other cache files over.")
@click.argument("files", type=FILE, nargs=-1, required=True)
@click.option("--cache", "into", type=FILE, help="The file to merge into.  [default: the user's]")
@click.option("--dry-run", is_flag=True, help="Only say what would happen.")
def merge(files: Sequence[Path], into: Path | None, dry_run: bool) -> None:
    """Take the rows of FILES over into the user's cache file, all of them or, in case of an error, none.

    Where two files have a row for one key, variant and way of being obtained, the later made stays, whatever the order of the
    files. Where they name different configs or times, both are shown.
    """
    if into is not None:
        check_folder(into, "--cache")
    with told():
        from fa2tune.rows import store

        path = reader.user_path() if into is None else into
        if dry_run:
            reports = store.merge(reader.read(path) if path.exists() else [], files)[1]
        else:
            reports = store.Store(path).merge(*files)
    # of two rows that name one config and one time, nobody needs to hear
    conflicts = [
        one for r in reports for one in r.conflicts if {"config", "time_us"} & {*_differing(one.kept, one.left)}
    ]
    if conflicts:
        table = rich_table(*KEY_TITLES, "variant", "kept", "left", "differ in")
        for one in conflicts:
            kept, left = _brief(one.kept), _brief(one.left)
            names = [name for name in _differing(one.kept, one.left) if name != "config"]
            change = "; ".join(part for part in (_config_change(one.left, one.kept), ", ".join(names)) if part)
            table.add_row(*cells(one.kept.key), one.kept.variant, kept, left, change)
        console().print(table)
    would = "would be " if dry_run else ""
    for report in reports:
        click.echo(
            f"{report.path}: {report.added} rows {would}added, {report.replaced} {would}replaced, "
            f"{report.left} left as they were in {path}"
        )


def _brief(row: Row) -> str:
    time = "no time" if row.time_us is None else f"{figure(row.time_us)} us"
    return f"{time}, {row.created or 'undated'}"


def _differing(one: Row, other: Row) -> list[str]:
    """The fields beside the key in which two rows differ."""
    return [f.name for f in fields(Row) if f.name != "key" and getattr(one, f.name) != getattr(other, f.name)]


def _config_change(one: Row, other: Row) -> str:
    names = [name for name in {**one.config, **other.config} if one.config.get(name) != other.config.get(name)]
    return ", ".join(f"{name} {one.config.get(name, '-')} -> {other.config.get(name, '-')}" for name in names)


@click.command(short_help="Compare the rows of two cache files.")
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@click.option("--brief", is_flag=True, help="Only the counts.")
@filters
def diff(a: Path, b: Path, brief: bool, **wanted: Any) -> None:
    """Compare the rows of two cache files, A and B. Exit code 1 if they differ."""
    with told():
        held = [{record.identity(row): row for row in reader.read(path)} for path in (a, b)]
    chosen = selector([row for rows in held for row in rows.values()], wanted)
    ours, theirs = ({where: row for where, row in rows.items() if chosen(row)} for rows in held)
    gone = [row for where, row in ours.items() if where not in theirs]
    new = [row for where, row in theirs.items() if where not in ours]
    both = [(row, theirs[where]) for where, row in ours.items() if where in theirs]
    changed = [(one, other) for one, other in both if one != other]
    if not brief and (gone or new or changed):
        table = rich_table("", *KEY_TITLES, "variant", "obtained", "B / A", "what", right=("B / A",))
        for sign, rows in (("-", gone), ("+", new)):
            for row in rows:
                table.add_row(sign, *cells(row.key), row.variant, row.obtained, "", _brief(row))
        for one, other in changed:
            ratio = f"{other.time_us / one.time_us:.3f}" if one.time_us and other.time_us else ""
            names = [name for name in _differing(one, other) if name != "config"]
            what = "; ".join(part for part in (_config_change(one, other), ", ".join(names)) if part)
            table.add_row("~", *cells(one.key), one.variant, one.obtained, ratio, what)
        console().print(table)
    configs = sum(one.config != other.config for one, other in changed)
    click.echo(
        f"{len(gone)} rows only in A (-), {len(new)} only in B (+), {len(changed)} in both but different (~), "
        f"{configs} of them in their config; {len(both) - len(changed)} the same"
    )
    if gone or new or changed:
        raise SystemExit(1)
