"""``fa2tune cache export``, ``merge``, ``diff``: write, combine and compare cache files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fa2tune.cli import _tables
from fa2tune.cli._options import check_folder, shown_errors
from fa2tune.cli._output import echo
from fa2tune.cli.cache.common import FILE, KEY_TITLES, cells, figure, filters, selector
from fa2tune.rows import reader, record
from fa2tune.rows.row import Row, precedence
from fa2tune.text import count

LISTED_ROWS = 10  #: rows of each kind that ``diff`` lists without --all
KIND_OF_SUFFIX = {".sqlite": "sqlite", ".json": "json"}


@click.command(short_help="Write rows to a file that can be shipped.")
@click.argument("out", type=FILE, required=False)
@click.option("--cache", "file", type=FILE, help="The file to export from.  [default: the user's]")
@click.option("--storage", envvar="FA2TUNE_STORAGE",
              help="URL of the database to export from, as for `fa2tune tune --storage`.")  # fmt: skip
@click.option("--format", "kind", type=click.Choice(("sqlite", "json")), help="[default: as OUT ends]")
@click.option("--twin", is_flag=True, help="With an .sqlite file, also write the rows as .json for review.")
@filters
def export(
    out: Path | None, file: Path | None, storage: str | None, kind: str | None, twin: bool, **wanted: Any
) -> None:  # fmt: skip
    """Write rows to the file OUT: .sqlite to ship, or .json to read. The same rows always give the same bytes.

    Without OUT, --format json prints.
    """
    if kind is None:
        kind = KIND_OF_SUFFIX.get(out.suffix, "") if out else ""
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
            raise click.UsageError("--cache and --storage: got both, one is allowed")
        storage = None
    with shown_errors():
        source: Path | str = reader.user_path() if file is None else file
        if storage is not None:
            from fa2tune.sharing.shared import SharedStore
            from fa2tune.sharing.storage import Storage, parsed

            database = Storage.at(parsed(storage))
            if not database.shared:
                raise ValueError(
                    "storage: got an SQLite file, which holds no rows; give the cache file of that run with --cache"
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
            echo(f"{each}: {count(len(rows), 'row')}, digest {record.digest(rows)}")


@click.command(short_help="Merge other cache files into one.")
@click.argument("files", type=FILE, nargs=-1, required=True)
@click.option("--cache", "into", type=FILE, help="The file to merge into.  [default: the user's]")
@click.option("--dry-run", is_flag=True, help="Only print what would be done.")
def merge(files: Sequence[Path], into: Path | None, dry_run: bool) -> None:
    """Merge the rows of FILES into the user's cache file: all files or, if one of them cannot be read, none.

    Where two files have rows of the same key, implementation, workload and origin (measured, sibling, ported, predicted),
    the newer ones are kept, whatever the order of the files. Where their configs or times differ, both are shown.
    """
    if into is not None:
        check_folder(into, "--cache")
    with shown_errors():
        from fa2tune.rows import store

        path = reader.user_path() if into is None else into
        if dry_run:
            reports = store.merge(reader.read(path) if path.exists() else [], files)[1]
        else:
            reports = store.Store(path).merge(*files)
    # a difference in anything but the config and the time is not worth a line
    conflicts = [one for r in reports for one in r.conflicts if _said(one.kept) != _said(one.left)]
    if conflicts:
        table = [
            (
                *cells(one.kept[0].key),
                one.kept[0].filed_as,
                _brief(one.kept),
                _brief(one.left),
                _change(one.left, one.kept),
            )
            for one in conflicts
        ]
        titles = (*KEY_TITLES, "implementation", "kept", "left", "left -> kept")
        _tables.show(titles, table, right=("length",), below=("gpu", *titles[-3:]))
    would = "would be " if dry_run else ""
    for report in reports:
        _tables.say(
            f"{report.path}: {count(report.added, 'row')} {would}added, {report.replaced} {would}replaced, "
            f"{report.left} left as they were in {path}"
        )


def _said(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    return [(row.config, row.time_us) for row in rows]


def _best(rows: Sequence[Row]) -> Row:
    """Of the rows of a slot."""
    return min(rows, key=precedence)


def _brief(rows: Sequence[Row]) -> str:
    """The best row of a slot."""
    row = _best(rows)
    time = "no time" if row.time_us is None else f"{figure(row.time_us)} us"
    others = f", {len(rows)} configs" if len(rows) > 1 else ""
    return f"{time}, {row.created or 'undated'}{others}"


def _part(parts: dict[tuple[str, str], list[tuple[str, ...]]], row: Row) -> list[tuple[str, ...]]:
    """The table that a row belongs in."""
    return parts.setdefault((row.key.gpu, row.obtained), [])


def _time(row: Row) -> str:
    return "" if row.time_us is None else figure(row.time_us)


def _ratio(one: Row, other: Row) -> str:
    return f"{other.time_us / one.time_us:.3f}" if one.time_us and other.time_us else ""


#: field of a row -> the name of its group in a listing of differences
_TOGETHER = {
    **dict.fromkeys(("time_us", "time_low_us", "time_high_us", "samples", "default_time_us", "tflops"), "times"),
    **dict.fromkeys(("gain", "gain_low", "gain_high"), "gain"),
    **dict.fromkeys(("registers", "spills", "shared_bytes", "binary_hash"), "binary"),
    **dict.fromkeys(("tried", "pruned"), "search"),
    **dict.fromkeys(("clock_mhz", "power_limit_w", "throttled"), "clocks"),
    "kernel_hash": "kernel source", "space_hash": "search space", "obtained_on": "GPU", "errors": "errors",
}  # fmt: skip


def _change(ours: Sequence[Row], theirs: Sequence[Row]) -> str:
    """The differences of what two files have in a slot, by the best rows: config values in full, of other fields only the name
    of the group."""
    one, other = _best(ours), _best(theirs)
    rest = dict.fromkeys(_TOGETHER.get(name, name) for name in _differing(one, other) if name != "config")
    number = f"configs {len(ours)} -> {len(theirs)}" if len(ours) != len(theirs) else ""
    found = ", ".join([*rest, *([number] if number else [])])
    return "; ".join(part for part in (_config_change(one, other), found) if part) or "other configs than the best"


def _differing(one: Row, other: Row) -> list[str]:
    """Names of the fields, other than the key, in which two rows differ."""
    return [f.name for f in fields(Row) if f.name != "key" and getattr(one, f.name) != getattr(other, f.name)]


def _config_change(one: Row, other: Row) -> str:
    names = [name for name in {**one.config, **other.config} if one.config.get(name) != other.config.get(name)]
    return ", ".join(f"{name} {one.config.get(name, '-')} -> {other.config.get(name, '-')}" for name in names)


@click.command(short_help="Compare the rows of two cache files.")
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@click.option("--brief", is_flag=True, help="Print only the counts.")
@click.option("--all", "everything", is_flag=True, help=f"List every row, not only {LISTED_ROWS} of each kind.")
@filters
def diff(a: Path, b: Path, brief: bool, everything: bool, **wanted: Any) -> None:
    """Compare the rows of two cache files, A and B: the counts, then the rows. Exit status 1 if they differ."""
    if brief and everything:
        raise click.UsageError("--brief and --all: got both, one is allowed")
    with shown_errors():
        held = [reader.read(path) for path in (a, b)]
    chosen = selector([row for rows in held for row in rows], wanted)
    ours, theirs = (record.by_slot(filter(chosen, rows)) for rows in held)
    gone = [row for slot, rows in ours.items() if slot not in theirs for row in rows]
    new = [row for slot, rows in theirs.items() if slot not in ours for row in rows]
    both = [(rows, theirs[slot]) for slot, rows in ours.items() if slot in theirs]
    changed = [(mine, other) for mine, other in both if mine != other]
    configs = sum([row.config for row in mine] != [row.config for row in other] for mine, other in changed)
    _tables.say(
        f"{count(len(gone), 'row')} only in A (-), {len(new)} only in B (+), {len(changed)} in both but different (~), "
        f"{configs} of them in the config; {len(both) - len(changed)} the same"
    )
    if not brief:
        most = None if everything else LISTED_ROWS
        parts: dict[tuple[str, str], list[tuple[str, ...]]] = {}
        for sign, rows in (("-", gone[:most]), ("+", new[:most])):
            for row in rows:
                times = (_time(row), "") if sign == "-" else ("", _time(row))
                _part(parts, row).append((sign, *cells(row.key)[1:], row.filed_as, *times, "", ""))
        for mine, others in changed[:most]:
            one, other = _best(mine), _best(others)
            about = (_time(one), _time(other), _ratio(one, other), _change(mine, others))
            _part(parts, one).append(("~", *cells(one.key)[1:], one.filed_as, *about))
        titles = ("", *KEY_TITLES[1:], "implementation", "A us", "B us", "B / A", "A -> B")
        for (gpu, obtained), table in parts.items():
            echo()
            echo(f"{gpu}, {obtained}:")
            _tables.show(titles, table, right=("length", "A us", "B us", "B / A"), below=titles[-2:])
        if most and max(len(gone), len(new), len(changed)) > most:
            echo()
            echo(f"{most} rows of each kind are listed at most; --all lists every row")
    if gone or new or changed:
        raise SystemExit(1)
