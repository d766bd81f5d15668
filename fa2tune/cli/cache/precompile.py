"""``fa2tune cache precompile``: a file of compiled kernels for the rows of a cache file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fa2tune.cli import _output, _tables
from fa2tune.cli._options import CannotUseError, check_folder, head_dim, shown_errors
from fa2tune.cli._output import echo
from fa2tune.cli._progress import StepsBar
from fa2tune.cli.cache.common import FILE, gpu_asked
from fa2tune.rows import reader
from fa2tune.spec.problem import DTYPES
from fa2tune.text import plain

if TYPE_CHECKING:
    from fa2tune.fleet.precompile import BinaryJob

SAVE_EVERY_S = 30.0  #: seconds; a killed process loses at most what it compiled in that time


def _head_dims(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """128, or 192/128 where V has another; with commas, or repeated."""
    found = []
    for text in ",".join(given).split(",") if given else ():
        parts = text.strip().split("/")
        dims = [int(part) for part in parts if part.isdecimal()]
        if len(dims) != len(parts) or len(dims) > 2:
            raise click.BadParameter(
                f"got {text!r}, must be a number, or two with a slash between (192/128); several with commas"
            )
        for dim in dims:
            head_dim(ctx, param, dim)
        found.append((dims[0], dims[-1]))
    return tuple(found)


@click.command(short_help="Compile the rows' kernels into a file of binaries.")
@click.option("--gpu", help="Name as `fa2tune gpus` has it; it need not be here.  [default: the GPU present]")
@click.option(
    "--cache", "file", type=FILE,
    help="The file whose rows to compile, with the shipped ones.  [default: all that serve here]",
)  # fmt: skip
@click.option("--out", type=FILE, help="[default: next to the --cache file, or the user's, ending in .kernels]")
@click.option(
    "--headdim", "head_dims", multiple=True, callback=_head_dims, metavar="N[/N],...",
    help="Head dims, or of Q and K / of V: 64,192/128.  [default: those of the rows]",
)  # fmt: skip
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="[default: those of the rows]")
@click.option("--views", is_flag=True, help="Also for tensors whose rows are expanded, or not aligned to 16 bytes.")
@click.option("--windows", is_flag=True, help="Also for sliding windows (window=) of any size.")
@click.option("--packed", is_flag=True, help="Also for sequences of their own lengths (attention_varlen).")
@click.option("--one-key-head", is_flag=True, help="Also for causal calls of one key head, query heads as one.")
@click.option("--workers", type=click.IntRange(min=1), help="Compiling at a time.  [default: one per core]")
@click.option("--dry-run", is_flag=True, help="Only print what would be compiled.")
def precompile(
    gpu: str | None, file: Path | None, out: Path | None, head_dims: tuple[tuple[int, int], ...], dtypes: tuple[str, ...],
    views: bool, windows: bool, packed: bool, one_key_head: bool, workers: int | None, dry_run: bool,
) -> None:  # fmt: skip
    """Compile the kernels that the rows of a cache file name into a file of binaries, for a GPU that need not be present.

    A node that trusts the file needs no compiler for its first call. Trusted are the user's own file
    (~/.cache/fa2tune/cache.kernels) and those that FA2TUNE_KERNELS names; a file next to a cache file of FA2TUNE_CACHE must be
    named, too. `fa2tune explain -v` says whether a call would find its binary.

    Binaries that the file has are not compiled again. Ctrl-C keeps what is compiled; the same command continues from there.
    """
    from fa2tune.compiling import binaries
    from fa2tune.fleet import precompile
    from fa2tune.launching import precompiled

    target = gpu_asked(gpu)
    if out is not None:
        check_folder(out, "--out")
    with shown_errors():
        if file is None:
            layers = reader.layers()
        else:
            shipped = [reader.Layer("shipped", path, reader.read(path)) for path in reader.shipped_paths()]
            layers = [reader.Layer("named", file, reader.read(file)), *shipped]
        out = out or binaries.companion(file or reader.user_path())
        wanted = precompile.Wanted(head_dims, dtypes, views, windows, packed, one_key_head)
        todo, keys = precompile.jobs(target, layers, wanted)
        if not todo:
            raise click.ClickException(
                f"no row serves {target.name} with these head dims and dtypes: nothing to compile"
            )
        with _naming(out):
            lacking = precompile.missing(out, todo, target.arch)
    echo(
        f"{len(todo)} binaries for {keys} keys on {target.name} (sm_{target.arch}), Triton {precompiled.triton_build()}"
    )
    echo("  for every length, layout, batch and number of heads, up to 2^31 elements a tensor")
    echo("  for softmax_scale >= 0")
    echo(
        f"  for {'any tensors' if views else 'tensors aligned to 16 bytes, rows not expanded (--views: for others, too)'}"
    )
    echo(f"  for {'sliding windows, too' if windows else 'calls without a window (--windows: with one, too)'}")
    echo(f"  for {'packed sequences, too' if packed else 'sequences of one length (--packed: for packed ones, too)'}")
    one_by_one = "causal calls of one key head with their heads one by one (--one-key-head: as one, too)"
    echo(f"  for {'causal calls of one key head, too' if one_key_head else one_by_one}")
    if there := len(todo) - len(lacking):
        echo(f"{out} has {there} of them")
    if dry_run:
        return
    kept = f"{out} keeps the binaries that were saved; the same command continues from here"
    _output.if_stopped(kept)
    run = _Run(out, lacking)
    with shown_errors(f". {kept}"), _naming(out):
        precompile.check_host()
        with binaries.turn(out):
            pass  # fails now, not after the compiles, if the file cannot be written
        run.go(target.arch, workers)
    for (variant, spec, _), why in run.outcome.failures:
        _tables.say(f"not compiled, so a call takes the next row: {variant.short_name}, {spec}: {plain(why)}")
    for kernel, number in sorted(run.outcome.kernels.items()):
        echo(f"  {kernel:20}{number:5}")
    with shown_errors(), _naming(out):
        held = binaries.File(out, believed=True)
    removed = f", {run.removed} outdated or damaged ones removed" if run.removed else ""
    _tables.say(
        f"{out}: {len(run.outcome.entries)} binaries compiled in {run.seconds:.0f} s, {len(held.entries)} in all{removed}, "
        f"{out.stat().st_size / 1e6:.1f} MB; sha256 of its header {held.digest}"
    )
    try:
        binaries.File(out)
    except binaries.BinariesError as error:
        _tables.say(f"{out}: {error}; to load from it, name it with its hash: {binaries.VARIABLE}={out}@{held.digest}")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error about a file of binaries names it."""
    from fa2tune.compiling.binaries import BinariesError

    try:
        yield
    except BinariesError as error:
        raise CannotUseError(f"{path}: {error}") from error


class _Run:
    """Compiles; saves the binaries now and then, and at the end, also after an error or Ctrl-C."""

    def __init__(self, out: Path, todo: Sequence[BinaryJob]) -> None:
        from fa2tune.fleet.precompile import CompiledBinaries

        self.out, self.todo = out, todo
        self.outcome = CompiledBinaries()
        self.removed = self.saved = 0
        self.seconds = 0.0

    def go(self, arch: int, workers: int | None) -> None:
        from fa2tune.fleet import precompile

        begun = last = time.monotonic()
        broken = False  # the file cannot be written
        with StepsBar() as steps:

            def progress(done: int) -> None:
                nonlocal last, broken
                steps("compiling", done, len(self.todo))
                if time.monotonic() - last > SAVE_EVERY_S:
                    broken = True
                    self._save()
                    last, broken = time.monotonic(), False

            try:
                precompile.compile_all(self.todo, arch, workers, progress, self.outcome)
            finally:
                if not broken:
                    self._save()
        self.seconds = time.monotonic() - begun
        if self.todo and not self.outcome.entries:
            raise click.ClickException(f"nothing compiles: {self.outcome.failures[0][1]}")

    def _save(self) -> None:
        from fa2tune.fleet import precompile

        if len(self.outcome.entries) > self.saved:
            self.removed += precompile.save(self.out, self.outcome).dropped
            self.saved = len(self.outcome.entries)
