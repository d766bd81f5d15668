"""``fa2tune cache precompile``: the compiled kernels beside the rows."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fa2tune.cli._options import check_folder, head_dim, told
from fa2tune.cli.cache.common import FILE, gpu_asked
from fa2tune.problem import DTYPES
from fa2tune.rows import reader


def _head_dims(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """128, or 192/128 where V has another."""
    found = []
    for text in given:
        parts = text.split("/")
        dims = [int(part) for part in parts if part.isdecimal()]
        if len(dims) != len(parts) or len(dims) > 2:
            raise click.BadParameter(f"got {text!r}, must be a number, or two with a slash between, as 192/128")
        for dim in dims:
            head_dim(ctx, param, dim)
        found.append((dims[0], dims[-1]))
    return tuple(found)


@click.command(short_help="Compile the rows' kernels into a file of binaries.")
@click.option("--gpu", help="Name as `fa2tune gpus` has it; it need not be here.  [default: the GPU present]")
@click.option(
    "--cache", "file", type=FILE,
    help="The file whose rows to compile, together with the shipped ones.  [default: all that serve here]",
)  # fmt: skip
@click.option("--out", type=FILE, help="[default: beside the --cache file, or the user's, ending in .kernels]")
@click.option(
    "--headdim", "head_dims", multiple=True, callback=_head_dims, metavar="N or N/N",
    help="Head dim, or of Q and K / of V; may be repeated.  [default: those of the rows]",
)  # fmt: skip
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="[default: those of the rows]")
@click.option("--views", is_flag=True, help="Also for tensors that are expanded, or not aligned to 16 bytes.")
@click.option("--workers", type=click.IntRange(min=1), help="Compiling at a time.  [default: one per core]")
@click.option("--dry-run", is_flag=True, help="Only say what would be compiled.")
def precompile(
    gpu: str | None, file: Path | None, out: Path | None, head_dims: tuple[tuple[int, int], ...], dtypes: tuple[str, ...],
    views: bool, workers: int | None, dry_run: bool,
) -> None:  # fmt: skip
    """Compile the kernels that the rows of a cache file name, for a GPU here or elsewhere, into a file of binaries.

    A node that trusts the file runs its first call from it, without a compiler: the user's own is trusted
    (~/.cache/fa2tune/cache.kernels), so are those that FA2TUNE_KERNELS names. A file beside one that FA2TUNE_CACHE names is
    not, for that alone. Whether a call would find its binary says `fa2tune explain`.
    """
    from fa2tune.compiling import binaries
    from fa2tune.fleet import precompile
    from fa2tune.launching import precompiled

    target = gpu_asked(gpu)
    if out is not None:
        check_folder(out, "--out")
    with told():
        if file is None:
            layers = reader.layers()
        else:
            shipped = [reader.Layer("shipped", path, reader.read(path)) for path in reader.shipped_paths()]
            layers = [reader.Layer("named", file, reader.read(file)), *shipped]
        out = out or binaries.companion(file or reader.user_path())
        todo, keys = precompile.jobs(target, layers, precompile.Wanted(head_dims, dtypes, views))
        if not todo:
            raise click.ClickException(
                f"no row serves {target.name} with these head dims and dtypes: nothing to compile"
            )
        tensors = "any tensors" if views else "tensors that are aligned to 16 bytes and not expanded"
        click.echo(
            f"{len(todo)} binaries for {keys} keys on {target.name} (sm_{target.arch}), Triton {precompiled.triton_build()}: "
            f"every length, layout, batch and number of heads up to 2^31 elements a tensor; {tensors}; softmax_scale >= 0"
        )
        if dry_run:
            return
        precompile.check_host()
        if out.exists():
            binaries.File(out)  # what is damaged or not trusted is not built on, which is better said before than after
        started = time.monotonic()
        with click.progressbar(length=len(todo), label="compiling") as bar:
            outcome = precompile.compile_all(todo, target.arch, workers, lambda done: bar.update(1))
        if not outcome.entries:
            raise click.ClickException(f"nothing compiles: {outcome.failures[0][1]}")
        saved = precompile.save(out, outcome)
    for (variant, spec, _), why in outcome.failures:
        click.echo(f"not compiled, a call would take the next row: {variant.name}, {spec}: {why}")
    for kernel, number in sorted(outcome.kernels.items()):
        click.echo(f"  {kernel:20}{number:5}")
    beside = f", beside {saved.kept} that were there" if saved.kept else ""
    gone = f", {saved.dropped} of other kernel sources dropped" if saved.dropped else ""
    click.echo(
        f"{out}: {saved.binaries - saved.kept} binaries{beside}{gone}, {saved.size / 1e6:.1f} MB, in "
        f"{time.monotonic() - started:.0f} s; sha256 of its header {saved.digest}"
    )
    try:
        binaries.File(out)
    except binaries.BinariesError as error:
        click.echo(
            f"{error}; whoever is to load from it names it with its hash: {binaries.VARIABLE}={out}@{saved.digest}"
        )
