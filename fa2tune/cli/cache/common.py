"""Shared by the ``fa2tune cache`` commands: filters on rows, the GPU asked for, how rows are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa2tune import gpus
from fa2tune.cli import _output
from fa2tune.cli._options import Command, head_dim_list, masks, shown_errors
from fa2tune.rows import pruned, reader
from fa2tune.rows.reader import Layer
from fa2tune.rows.row import OBTAINED, Row
from fa2tune.spec.key import FAMILIES, TuningKey
from fa2tune.spec.problem import BACKWARD, BUCKETS, DTYPES, KERNELS
from fa2tune.text import count

if TYPE_CHECKING:
    from rich.console import Console

    from fa2tune.gpus import Gpu
    from fa2tune.rows.lookup import Toolchain

EVIDENCE_INDENT = 12  #: columns before the values in a line of ``describe_row`` that is itself indented by two


FILE = click.Path(path_type=Path, dir_okay=False)

#: option -> the value of a row that must equal it, or be in it if it is a list; one that is not given lets every row pass
FILTERS: dict[str, Callable[[Row], Any]] = {
    "gpu": lambda row: row.key.gpu,
    "kernel": lambda row: row.key.kernel,
    "dtype": lambda row: row.key.dtype,
    "headdim": lambda row: row.key.head_dim,
    "mask": lambda row: row.key.mask,
    "family": lambda row: row.key.family,
    "bucket": lambda row: row.key.bucket,
    "obtained": lambda row: row.obtained,
}


def filters(command: Command) -> Command:
    for option in (
        click.option("--obtained", type=click.Choice(OBTAINED), help="How the row was obtained."),
        click.option("--family", type=click.Choice(FAMILIES), help="What rows were tuned on."),
        click.option("--bucket", type=click.Choice(BUCKETS), help="Length bucket."),
        masks("both masks"),
        click.option(
            "--headdim",
            metavar="N,...",
            multiple=True,
            callback=head_dim_list,
            help="Head dims of Q and K: one, or several with commas.",
        ),
        click.option("--dtype", type=click.Choice(DTYPES)),
        click.option("--kernel", type=click.Choice((*KERNELS, BACKWARD))),
        click.option("--gpu", help="Name as `fa2tune gpus` or `fa2tune cache list` has it."),
    ):
        command = option(command)
    return command


def selector(rows: Sequence[Row], wanted: dict[str, Any]) -> Callable[[Row], bool]:
    """A predicate: whether a row passes the filters."""
    asked = {name: value for name, value in wanted.items() if value is not None}
    if "gpu" in asked and asked["gpu"] not in {
        row.key.gpu for row in rows
    }:  # else the name as given: it may be unlisted
        asked["gpu"] = _gpu(asked["gpu"], "; no row is filed under that name").name
    allowed = {name: value if isinstance(value, list) else [value] for name, value in asked.items()}
    return lambda row: all(FILTERS[name](row) in values for name, values in allowed.items())


def rows_asked(path: Path, wanted: dict[str, Any], to: str) -> tuple[list[Row], list[Row]]:
    """(all rows of a file, those that pass the filters). UsageError: there are none ``to`` do it with."""
    held = reader.read(path)
    chosen = selector(held, wanted)
    asked = [row for row in held if chosen(row)]
    if not asked:
        passed = f": it has {count(len(held), 'row')}, none passes the filters" if held else ""
        raise click.UsageError(f"{path}: no row to {to}{passed}")
    return held, asked


def layers_of(path: Path | None) -> list[Layer]:
    with shown_errors():
        return reader.layers() if path is None else [Layer("named", path, reader.read(path))]


def gpu_asked(name: str | None) -> Gpu:
    """The GPU that --gpu names, or the one that is present."""
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


def is_here(gpu: Gpu) -> bool:
    """Whether this machine has such a GPU."""
    from fa2tune import devices

    return any(device.gpu == gpu for device in devices.find().devices)


def console() -> Console:
    """For tables; wide where the output is not a terminal."""
    from rich.console import Console

    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=_output.WIDTH_OF_A_FILE)


#: Titles of the columns that ``cells`` fills.
KEY_TITLES = ("gpu", "kernel", "dtype", "dim", "mask", "length")


def head_dims(key: TuningKey) -> str:
    return str(key.head_dim) if key.head_dim == key.head_dim_v else f"{key.head_dim}/{key.head_dim_v}"


def cells(key: TuningKey) -> list[str]:
    """A key as the first columns of a table."""
    dtype = f"{key.dtype} {key.precision}" if key.dtype == "fp32" else key.dtype
    return [key.gpu, key.kernel, dtype, head_dims(key), key.kind, str(key.bucket)]


def title(row: Row) -> str:
    """A short name of a row."""
    return " ".join([*cells(row.key), row.filed_as, row.obtained])


def _known(pairs: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} {figure(value)}" for name, value in pairs if value not in (None, ""))


def figure(value: Any) -> str:
    """A value of a row, short."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def describe_row(row: Row, here: Toolchain) -> Iterator[str]:
    """A row and its evidence, line by line; unknown values are left out. ``here``: of this machine, for the driver."""
    key = row.key
    yield f"key       {_known([(name, getattr(key, name)) for name in key.__slots__])}"
    yield f"config    {row.filed_as}" + (f": {_known(list(row.config.items()))}" if row.config else "")
    on = f" on {row.obtained_on}" if row.obtained_on else ""
    yield f"obtained  {row.obtained}{on}, numerics checked on {row.proof}, {row.created or 'time unknown'}"
    if row.barred:
        yield f"served    never: it {row.barred}"
    if row.time_us is not None:
        spread = "" if row.time_low_us is None else f" ({figure(row.time_low_us)} to {figure(row.time_high_us)})"
        size = [("TFLOP/s", row.tflops), ("samples", row.samples or None), ("batch", row.batch), ("heads", row.heads_q)]
        size += [("kv heads", row.heads_kv), ("queries", row.seqlen_q), ("keys", row.seqlen_k)]
        yield f"time      {figure(row.time_us)} us{spread}, {_known(size)}"
    if row.gain is not None:
        interval = [("from", row.gain_low), ("to", row.gain_high), ("default us", row.default_time_us)]
        yield f"gain      {row.gain:.3f} over the portable default config, {_known(interval)}".rstrip(", ")
    if row.errors:
        yield "errors    " + "; ".join(f"{tensor}: {_known(list(e.items()))}" for tensor, e in row.errors.items())
    elif row.key.kernel != BACKWARD:  # a whole backward has none: its kernels have them
        yield "errors    none on record"
    binary = [("registers", row.registers), ("spills", row.spills), ("shared bytes", row.shared_bytes),
              ("hash", row.binary_hash)]  # fmt: skip
    yield f"binary    {_known(binary) or 'unknown'}"
    searched = f"{row.tried} candidate{'s' * (row.tried != 1)} tried" if row.tried else "none on record"
    yield f"search    {searched}" + (f"; not timed: {pruned.counted(row.pruned)}" if row.pruned else "")
    made_with = [(name, getattr(row, name)) for name in ("triton", "torch", "driver", "kernel_hash", "space_hash")]
    made_with += [
        ("clock MHz", row.clock_mhz),
        ("power limit W", row.power_limit_w),
        ("throttled launches", row.throttled),
    ]
    yield f"made with {_known(made_with)}"
    if other := here.other_driver(row):
        yield f"driver    {other}"
