"""``fa2tune cache``: what the cache files hold; bringing them together, and shipping them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from fa2tune import gpus, reader, record
from fa2tune.problem import BACKWARD, BUCKETS, DTYPES, KERNELS
from fa2tune.reader import CacheFileError, Layer
from fa2tune.row import OBTAINED, Row

Command = TypeVar("Command", bound=Callable[..., Any])


@contextmanager
def _told() -> Iterator[None]:
    """What is wrong with a file, as a message and exit code 1."""
    try:
        yield
    except (CacheFileError, OSError, ValueError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error


_FILE = click.Path(path_type=Path, dir_okay=False)

#: option -> what of a row it must equal; an option that is not given lets every row pass
_FILTERS: dict[str, Callable[[Row], Any]] = {
    "gpu": lambda row: row.key.gpu,
    "kernel": lambda row: row.key.kernel,
    "dtype": lambda row: row.key.dtype,
    "headdim": lambda row: row.key.head_dim,
    "causal": lambda row: row.key.causal,
    "bucket": lambda row: row.key.bucket,
    "obtained": lambda row: row.obtained,
}


def _filters(command: Command) -> Command:
    for option in (
        click.option("--obtained", type=click.Choice(OBTAINED), help="How the row was obtained."),
        click.option("--bucket", type=int, help=f"Length bucket: {', '.join(map(str, BUCKETS))}."),
        click.option("--causal/--full", default=None, help="Mask.  [default: both]"),
        click.option("--headdim", type=int, help="Head dim of Q and K."),
        click.option("--dtype", type=click.Choice(DTYPES)),
        click.option("--kernel", type=click.Choice((*KERNELS, BACKWARD))),
        click.option("--gpu", help="Name as `fa2tune gpus` or `fa2tune cache list` has it."),
    ):
        command = option(command)
    return command


def _selector(rows: Sequence[Row], wanted: dict[str, Any]) -> Callable[[Row], bool]:
    """Whether a row is one of those asked for."""
    asked = {name: value for name, value in wanted.items() if value is not None}
    if "gpu" in asked and asked["gpu"] not in {row.key.gpu for row in rows}:  # else as it stands: it may be unlisted
        try:
            asked["gpu"] = gpus.named(asked["gpu"]).name
        except ValueError as error:
            raise click.BadParameter(f"{error}; no row is filed under that name", param_hint="--gpu") from error
    return lambda row: all(_FILTERS[name](row) == value for name, value in asked.items())


def _layers(path: Path | None) -> list[Layer]:
    with _told():
        return reader.layers() if path is None else [Layer("named", path, reader.read(path))]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    for line in (head, *lines):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


@click.group()
def cache() -> None:
    """List, show, export and merge cache files."""


@cache.command()
def path() -> None:
    """Print where the user's cache file lies, whether or not there is one yet."""
    with _told():
        click.echo(reader.user_path())


def _kind_of_row(row: Row) -> tuple[str, ...]:
    key = row.key
    dims = str(key.head_dim) if key.head_dim == key.head_dim_v else f"{key.head_dim}/{key.head_dim_v}"
    dtype = f"{key.dtype} {key.precision}" if key.dtype == "fp32" else key.dtype
    return key.gpu, str(key.sm_count), key.kernel, dtype, dims, "causal" if key.causal else "full", row.obtained


@cache.command("list")
@click.option("--cache", "file", type=_FILE, help="This file only.  [default: every layer that serves]")
@_filters
def list_(file: Path | None, **wanted: Any) -> None:
    """List the cache files that serve, strongest first, and what they hold.

    Files with the same digest hold the same rows: compare it to know that two machines use the same cache.
    """
    layers = _layers(file)
    if not layers:
        click.echo("No cache file: every call takes the default config. `fa2tune tune` makes one.")
        return
    lines = [(layer.name, str(len(layer.rows)), record.digest(layer.rows), str(layer.path)) for layer in layers]
    _table(("layer", "rows", "digest", "file"), lines)
    chosen = _selector([row for layer in layers for row in layer.rows], wanted)
    kinds: dict[tuple[str, ...], list[int]] = {}
    for layer in layers:
        for row in filter(chosen, layer.rows):
            kinds.setdefault((*_kind_of_row(row), layer.name), []).append(row.key.bucket)
    if kinds:
        click.echo()
        head = ("gpu", "SMs", "kernel", "dtype", "head dim", "mask", "obtained", "layer", "rows", "buckets")
        _table(head, [(*kind, str(len(b)), " ".join(map(str, sorted(set(b))))) for kind, b in kinds.items()])


@cache.command()
@click.option("--cache", "file", type=_FILE, help="This file only.  [default: every layer that serves]")
@click.option("--json", "as_json", is_flag=True, help="The rows as the JSON twin of a cache file has them.")
@_filters
def show(file: Path | None, as_json: bool, **wanted: Any) -> None:
    """Show rows with all their evidence, those of every layer or of one file."""
    layers = _layers(file)
    rows = [row for layer in layers for row in layer.rows]
    chosen = _selector(rows, wanted)
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


def _known(pairs: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} {_figure(value)}" for name, value in pairs if value not in (None, ""))


def _figure(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def describe(row: Row) -> Iterator[str]:
    """A row and its evidence, line by line; what is not known is left out."""
    key = row.key
    yield f"key       {_known([(name, getattr(key, name)) for name in record.KEY_FIELDS])}"
    yield f"variant   {row.variant}: {_known(list(row.config.items()))}" if row.config else f"variant   {row.variant}"
    on = f" on {row.obtained_on}" if row.obtained_on else ""
    yield f"obtained  {row.obtained}{on}, numerics proved on {row.proof}, {row.created or 'time unknown'}"
    if row.time_us is not None:
        spread = "" if row.time_low_us is None else f" ({_figure(row.time_low_us)} to {_figure(row.time_high_us)})"
        size = [("TFLOP/s", row.tflops), ("samples", row.samples or None), ("batch", row.batch), ("heads", row.heads_q)]
        yield f"time      {_figure(row.time_us)} us{spread}, {_known([*size, ('kv heads', row.heads_kv)])}"
    if row.gain is not None:
        interval = [("from", row.gain_low), ("to", row.gain_high), ("default us", row.default_time_us)]
        yield f"gain      {row.gain:.3f} over the default config, {_known(interval)}".rstrip(", ")
    if row.errors:
        yield "errors    " + "; ".join(f"{tensor}: {_known(list(e.items()))}" for tensor, e in row.errors.items())
    binary = [("registers", row.registers), ("spills", row.spills), ("shared bytes", row.shared_bytes)]
    yield f"binary    {_known(binary) or 'unknown'}"
    yield f"search    {_known([('tried', row.tried), *((f'pruned by {why}', n) for why, n in row.pruned.items())])}"
    made_with = [(name, getattr(row, name)) for name in ("triton", "torch", "driver", "kernel_hash", "space_hash")]
    made_with += [
        ("clock MHz", row.clock_mhz),
        ("power limit W", row.power_limit_w),
        ("throttled launches", row.throttled),
    ]
    yield f"made with {_known(made_with)}"


@cache.command()
@click.argument("out", type=_FILE)
@click.option("--cache", "file", type=_FILE, help="The file to export from.  [default: the user's]")
@click.option("--twin", is_flag=True, help="With an .sqlite file, also its .json twin for review.")
@_filters
def export(out: Path, file: Path | None, twin: bool, **wanted: Any) -> None:
    """Write rows to OUT, a file to ship: .sqlite, or .json to read. The same rows always give the same bytes."""
    kinds = {".sqlite": "sqlite", ".json": "json"}
    if out.suffix not in kinds:
        raise click.BadParameter(f"got {out}, its name must end in .sqlite or .json", param_hint="OUT")
    with _told():
        source = reader.user_path() if file is None else file
        if out.resolve() == source.resolve():
            raise click.BadParameter(f"got {out}, which is the file to export from", param_hint="OUT")
        held = reader.read(source)
        rows = list(filter(_selector(held, wanted), held))
        if not rows:
            raise click.ClickException(f"no row of {source} matches: nothing written")
        from fa2tune import store

        outs = [out, out.with_suffix(".json")] if twin and out.suffix == ".sqlite" else [out]
        for each in outs:
            store.export(rows, each, kinds[each.suffix])
            click.echo(f"{each}: {len(rows)} rows, digest {record.digest(rows)}")


@cache.command()
@click.argument("files", type=_FILE, nargs=-1, required=True)
@click.option("--cache", "into", type=_FILE, help="The file to merge into.  [default: the user's]")
def merge(files: Sequence[Path], into: Path | None) -> None:
    """Take the rows of FILES over into the user's cache file. Where both have one, the later made stays."""
    with _told():
        from fa2tune import store

        for file in files:  # all of them read well, or nothing is written
            reader.read(file)
        target = store.Store(reader.user_path() if into is None else into)
        for file in files:
            added, replaced, left = target.merge(file)
            click.echo(f"{file}: {added} rows added, {replaced} replaced, {left} left as they were in {target.path}")
