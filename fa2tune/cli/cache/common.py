"""What the ``fa2tune cache`` commands share: which rows, which GPU, how rows are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa2tune import gpus
from fa2tune.cli._options import Command, head_dim, masks, told
from fa2tune.problem import BACKWARD, BUCKETS, DTYPES, KERNELS, TuningKey
from fa2tune.rows import reader, record
from fa2tune.rows.reader import Layer
from fa2tune.rows.row import OBTAINED, Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fa2tune.gpus import Gpu

WIDTH_OF_A_FILE = 160  #: columns, where the output is no terminal


FILE = click.Path(path_type=Path, dir_okay=False)

#: option -> what of a row it must equal; an option that is not given lets every row pass
FILTERS: dict[str, Callable[[Row], Any]] = {
    "gpu": lambda row: row.key.gpu,
    "kernel": lambda row: row.key.kernel,
    "dtype": lambda row: row.key.dtype,
    "headdim": lambda row: row.key.head_dim,
    "causal": lambda row: row.key.causal,
    "bucket": lambda row: row.key.bucket,
    "obtained": lambda row: row.obtained,
}


def filters(command: Command) -> Command:
    for option in (
        click.option("--obtained", type=click.Choice(OBTAINED), help="How the row was obtained."),
        click.option("--bucket", type=click.Choice(BUCKETS), help="Length bucket."),
        masks("both masks"),
        click.option("--headdim", type=int, callback=head_dim, help="Head dim of Q and K."),
        click.option("--dtype", type=click.Choice(DTYPES)),
        click.option("--kernel", type=click.Choice((*KERNELS, BACKWARD))),
        click.option("--gpu", help="Name as `fa2tune gpus` or `fa2tune cache list` has it."),
    ):
        command = option(command)
    return command


def selector(rows: Sequence[Row], wanted: dict[str, Any]) -> Callable[[Row], bool]:
    """Whether a row is one of those asked for."""
    asked = {name: value for name, value in wanted.items() if value is not None}
    if "gpu" in asked and asked["gpu"] not in {row.key.gpu for row in rows}:  # else as it stands: it may be unlisted
        asked["gpu"] = _gpu(asked["gpu"], "; no row is filed under that name").name
    return lambda row: all(FILTERS[name](row) == value for name, value in asked.items())


def layers_of(path: Path | None) -> list[Layer]:
    with told():
        return reader.layers() if path is None else [Layer("named", path, reader.read(path))]


def gpu_asked(name: str | None) -> Gpu:
    """The GPU that --gpu names, or else the one that is here."""
    if name is None:
        here = gpus.present()
        if here is None:
            raise click.UsageError(f"no GPU is present, so --gpu is needed ({gpus.LISTED})")
        return here
    return _gpu(name)


def _gpu(name: str, after: str = "") -> Gpu:
    try:
        return gpus.named(name)
    except ValueError as error:
        raise click.BadParameter(str(error).removeprefix("gpu: ") + after, param_hint="--gpu") from error


def console() -> Console:
    """For tables; as wide as they need where the output is no terminal."""
    from rich.console import Console

    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=WIDTH_OF_A_FILE)


def rich_table(*titles: str, right: Sequence[str] = ()) -> Table:
    """An empty table in the house's style; ``right``: columns of figures."""
    from rich.table import Table

    found = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        found.add_column(title, justify="right" if title in right else "left", overflow="fold")
    return found


#: Titles of the columns that ``cells`` fills.
KEY_TITLES = ("gpu", "kernel", "dtype", "dim", "mask", "length")


def head_dims(key: TuningKey) -> str:
    return str(key.head_dim) if key.head_dim == key.head_dim_v else f"{key.head_dim}/{key.head_dim_v}"


def cells(key: TuningKey) -> list[str]:
    """A key as the first columns of a table."""
    dtype = f"{key.dtype} {key.precision}" if key.dtype == "fp32" else key.dtype
    mask = "causal" if key.causal else "full"
    return [key.gpu, key.kernel, dtype, head_dims(key), mask, str(key.bucket)]


def title(row: Row) -> str:
    """A row on half a line."""
    return " ".join([*cells(row.key), row.variant, row.obtained])


def _known(pairs: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} {figure(value)}" for name, value in pairs if value not in (None, ""))


def figure(value: Any) -> str:
    """A value of a row, short."""
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
    if row.barred:
        yield f"served    never: it {row.barred}"
    if row.time_us is not None:
        spread = "" if row.time_low_us is None else f" ({figure(row.time_low_us)} to {figure(row.time_high_us)})"
        size = [("TFLOP/s", row.tflops), ("samples", row.samples or None), ("batch", row.batch), ("heads", row.heads_q)]
        yield f"time      {figure(row.time_us)} us{spread}, {_known([*size, ('kv heads', row.heads_kv)])}"
    if row.gain is not None:
        interval = [("from", row.gain_low), ("to", row.gain_high), ("default us", row.default_time_us)]
        yield f"gain      {row.gain:.3f} over the default config, {_known(interval)}".rstrip(", ")
    if row.errors:
        yield "errors    " + "; ".join(f"{tensor}: {_known(list(e.items()))}" for tensor, e in row.errors.items())
    elif row.key.kernel != BACKWARD:  # a whole backward's are its kernels'
        yield "errors    none on record"
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
