"""Makes the machine code that a release carries for its rows: sm_<capability>.kernels. ``make release`` calls it.

    python benchmarks/ship_binaries.py FOLDER            # half an hour of one core or more, on all cores; no GPU
    python benchmarks/ship_binaries.py FOLDER --check    # what is there against the rows; some binaries are compiled again
    python benchmarks/ship_binaries.py --estimate 1      # how many, and how large by one of each kernel and head dim

For each GPU with shipped rows, the dispatcher's own lookup tells which binaries calls load that those rows serve: every length,
both masks and sliding windows, 16-byte aligned tensors. They are compiled by the Triton that the rows were measured with,
which has to be the one installed. The same rows and sources give the same bytes.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from fa2tune import gpus
from fa2tune.compiling import binaries, fingerprint
from fa2tune.compiling.binaries import BinariesError, File, New
from fa2tune.compiling.compiler import CompileError
from fa2tune.fleet import precompile
from fa2tune.launching import precompiled
from fa2tune.rows import reader
from fa2tune.rows.reader import Layer

WANTED = precompile.Wanted(windows=True)
LARGEST = 40_000_000  #: bytes of a file; a wheel is to stay below 60 MB


def jobs(only: int | None = None) -> dict[int, dict[precompile.BinaryJob, None]]:
    """Compute capability (all, or one) -> what to compile for the shipped rows. Files of rows that another Triton made
    (h200-triton3.9) are for those whose machine code is not here, so they are left out; any other row of another Triton is an
    error."""
    found: dict[int, dict[precompile.BinaryJob, None]] = {}
    here = fingerprint.triton_version()
    for path in reader.shipped_paths():
        if "-triton" in path.stem:
            continue
        rows = reader.read(path)
        if others := sorted({row.triton for row in rows} - {here}):
            raise click.ClickException(
                f"{path}: rows of Triton {', '.join(others)}, and here is {here or 'none'}: install theirs"
            )
        for name in sorted({row.key.gpu for row in rows}):
            gpu = gpus.named(name)
            if only not in (None, gpu.arch):
                continue
            todo, _ = precompile.jobs(gpu, [Layer("shipped", path, rows)], WANTED)
            found.setdefault(gpu.arch, {}).update(dict.fromkeys(todo))
    return found


def path_of(folder: Path, arch: int) -> Path:
    return folder / f"sm_{arch}{binaries.SUFFIX}"


_todo: list[tuple[precompile.BinaryJob, int]] = []  #: for the processes that are forked


def _built(number: int) -> tuple[str, New]:
    job, arch = _todo[number]
    try:
        return precompile.build(job, arch)
    except CompileError as error:
        variant, spec, _ = job
        raise RuntimeError(f"{variant.short_name}, {spec}: {error}") from None


def compiled(todo: Iterable[precompile.BinaryJob], arch: int, workers: int | None) -> dict[str, New]:
    """Key -> binary. In processes, since Triton's own part of a compile holds Python's lock, and those that take long first.
    They are forked: what to compile holds functions, which cannot be pickled."""
    precompile.check_host()
    _todo[:] = [(job, arch) for job in sorted(todo, key=_longest_first)]
    found: dict[str, New] = {}
    with multiprocessing.get_context("fork").Pool(workers or len(os.sched_getaffinity(0))) as pool:
        try:
            for key, new in pool.imap_unordered(_built, range(len(_todo))):
                found[key] = new
                if len(found) % 20 == 0:
                    click.echo(f"sm_{arch}: {len(found)} of {len(_todo)}", err=True)
        except RuntimeError as error:
            raise click.ClickException(str(error)) from None
    return found


def _longest_first(job: precompile.BinaryJob) -> tuple[bool, bool, int]:
    variant, spec, _ = job
    return variant.portable, variant.serves == "fwd", -spec.head_dim


def make(folder: Path, workers: int | None, only: int | None = None) -> None:
    for arch, todo in jobs(only).items():
        path = path_of(folder, arch)
        found = compiled(todo, arch, workers)
        binaries.save(path, binaries.file_bytes(found, precompile.sources()))
        click.echo(f"{path}: {len(found)} binaries, {path.stat().st_size / 1e6:.1f} MB")


def check(folder: Path, sample: int, seed: int, only: int | None = None) -> Iterable[str]:
    """What is wrong with the files of a folder."""
    for arch, todo in jobs(only).items():
        path = path_of(folder, arch)
        try:
            file = File(path, believed=True)
        except BinariesError as error:
            yield f"{path}: {error}"
            continue
        if (size := path.stat().st_size) > LARGEST:
            yield f"{path}: {size / 1e6:.1f} MB, allowed are {LARGEST / 1e6:.0f}"
        if damaged := file.damaged():
            yield f"{path}: {len(damaged)} damaged, as {damaged[0].about}"
        if fingerprint.source_digest() not in file.sources:
            yield f"{path}: of other sources than these"
        by_key = distinct(todo, arch)
        lacking, surplus = sorted(by_key.keys() - file.entries.keys()), sorted(file.entries.keys() - by_key.keys())
        if lacking:
            variant, spec = by_key[lacking[0]][:2]
            yield f"{path}: lacks {len(lacking)} of {len(by_key)}, as {variant.short_name}, {spec}"
        if surplus:
            yield f"{path}: no call loads {len(surplus)} of {len(file.entries)}, as {file.entries[surplus[0]].about}"
        there = sorted(by_key.keys() & file.entries.keys())
        for key in random.Random(seed).sample(there, min(sample, len(there))):
            with compiled_anew():
                _, new = precompile.build(by_key[key], arch)
            entry = file.entries[key]
            if precompiled.stored_image(new.launch, new.cubin) != precompiled.stored_image(
                entry.launch, file.cubin(entry)
            ):
                yield f"{path}: compiled again, another binary: {entry.about}"


def distinct(todo: Iterable[precompile.BinaryJob], arch: int) -> dict[str, precompile.BinaryJob]:
    """Key -> one job: several jobs may be of the same binary."""
    build, found = precompiled.triton_build(), dict[str, precompile.BinaryJob]()
    for job in todo:
        variant, spec, point = job
        found[precompiled.file_key(precompiled.code_of(variant, spec, dict(point), arch), build)] = job
    return found


def estimate(sample: int, seed: int, workers: int | None, only: int | None = None) -> Iterator[str]:
    """Lines of a table: how many binaries of each kernel a release has, and how large they are by as many of each kernel and
    head dim as ``sample`` says; 0: their number alone."""
    chosen, whole = random.Random(seed), 0.0
    yield f"Triton {precompiled.triton_build()}, sample of {sample} of each kernel and head dim, seed {seed}"
    for arch, todo in jobs(only).items():
        groups: dict[tuple[str, int], list[precompile.BinaryJob]] = {}
        for _, job in sorted(distinct(todo, arch).items()):
            groups.setdefault((job[0].short_name, job[1].head_dim), []).append(job)
        some = {group: chosen.sample(them, min(sample, len(them))) for group, them in groups.items()}
        made = compiled([job for them in some.values() for job in them], arch, workers)
        listed: dict[tuple[str, int], list[int]] = {}
        for key, new in made.items():  # with its part of the header
            size = len(binaries.file_bytes({key: new}, {})) - len(binaries.file_bytes({}, {}))
            listed.setdefault((str(new.about["kernel"]), new.about["spec"]["head_dim"]), []).append(size)
        bytes_of = {
            group: len(them) * sum(listed[group]) / len(listed[group]) for group, them in groups.items() if sample
        }
        for name in dict.fromkeys(name for name, _ in groups):
            mine = [group for group in groups if group[0] == name]
            size = f"{sum(bytes_of[group] for group in mine) / 1e6:9.2f} MB" if sample else ""
            yield f"sm_{arch} {name:18} {sum(len(groups[group]) for group in mine):5} binaries{size}"
        total = sum(bytes_of.values()) + (len(binaries.file_bytes({}, precompile.sources())) if sample else 0)
        whole += total
        number = sum(map(len, groups.values()))
        yield f"sm_{arch} {'all':18} {number:5} binaries{f'{total / 1e6:9.2f} MB, by {len(made)} of them' if sample else ''}"
    if sample:
        yield f"all files: {whole / 1e6:.1f} MB"


@contextmanager
def compiled_anew() -> Iterator[None]:
    """With an empty cache of Triton's."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        yield


@click.command(help=__doc__.partition("\n\n")[0])
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option(
    "--check", "only_check", is_flag=True, help="Make nothing; compare what is there. Exit status 1: it differs."
)
@click.option(
    "--sample", type=click.IntRange(min=0), default=6, show_default=True, help="Binaries a check compiles again."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), help="Compiling at a time.  [default: one per core]")
@click.option("--arch", type=int, help="Of this compute capability only, as 90.")
@click.option(
    "--estimate", "of_each", type=click.IntRange(min=0), metavar="N",
    help="Make nothing; count the binaries, and tell their size by N of each kernel and head dim. 0: compile nothing.",
)  # fmt: skip
def main(
    folder: Path | None, only_check: bool, sample: int, seed: int, workers: int | None, arch: int | None, of_each: int | None
) -> None:  # fmt: skip
    if of_each is not None:
        for line in estimate(of_each, seed, workers, arch):
            click.echo(line)
        return
    if folder is None:
        raise click.UsageError("FOLDER: got none; it may be left out with --estimate alone")
    if not only_check:
        make(folder, workers, arch)
        return
    found = list(check(folder, sample, seed, arch))
    for line in found:
        click.echo(line)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
