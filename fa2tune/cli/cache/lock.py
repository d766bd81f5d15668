"""``fa2tune cache lock`` and ``check``: does every node serve what was shipped?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fa2tune.cli._options import check_folder, shown_errors
from fa2tune.cli._output import echo
from fa2tune.cli.cache.common import FILE
from fa2tune.rows import reader
from fa2tune.text import count

SUFFIX, OLD_SUFFIX = ".lock.json", ".manifest.json"  #: of the name of a lock file


def _write(files: Sequence[Path], out: Path | None, suffix: str) -> None:
    if out is not None:
        check_folder(out, "--out")
    with shown_errors():
        from fa2tune.compiling import measured_code
        from fa2tune.fleet import manifests
        from fa2tune.rows import store

        if files:
            made = manifests.shipment(files, measured_code.toolchain(driver=""))
            out = out or files[0].with_suffix(suffix)
        else:
            made = manifests.of(reader.layers(), measured_code.toolchain(), manifests.trusted_binaries())
        if out is None:
            click.echo(made.to_json(), nl=False)
            return
        store.write_text(out, made.to_json())
    compiled = "".join(f", {part.binaries} binaries in {part.file}" for part in made.binaries)
    rows = sum(part.rows for part in made.layers)
    echo(f"{out}: {count(rows, 'row')} in {count(len(made.layers), 'file')}{compiled}, hash {made.hash[:16]}")


_FILES = click.argument("files", type=FILE, nargs=-1)


@click.command(short_help="Write a lock file: hashes of what nodes are to serve.")
@_FILES
@click.option("--out", type=FILE, help=f"[default: next to the first of FILES, ending in {SUFFIX}]")
def lock(files: Sequence[Path], out: Path | None) -> None:
    """Write a lock file: the hashes of the cache FILES that the nodes of a fleet are to serve from, in this order, together
    with the versions of fa2tune and Triton and the hashes of the kernel sources. Files of binaries next to them
    (`cache precompile`) are included; a node names those in FA2TUNE_KERNELS. `cache check` compares a node with the lock file.

    Without FILES: of everything that serves on this machine, with the user's file; printed unless --out is given. The driver
    is included only if a file holds rows of one key that were timed under different drivers: then it decides between them.

    A lock file is not signed. docs/fleet.md shows how to sign it with minisign or sigstore.
    """
    _write(files, out, SUFFIX)


@click.command(hidden=True, deprecated="It signs nothing; its new name is `fa2tune cache lock`.")
@_FILES
@click.option("--out", type=FILE, help=f"[default: next to the first of FILES, ending in {OLD_SUFFIX}]")
def sign(files: Sequence[Path], out: Path | None) -> None:
    """The old name of `cache lock`."""
    _write(files, out, OLD_SUFFIX)


@click.command(short_help="Compare what serves here with a lock file.")
@click.argument("lock_file", metavar="LOCK", type=FILE)
def check(lock_file: Path) -> None:
    """Compare what serves on this machine with a file LOCK that `cache lock` wrote. Each difference is one line; the exit
    status is 1 if there is one.

    The last line is the hash of this machine, which a program gets as fa2tune.manifest().hash. Machines with equal hashes and
    equal GPUs make equal decisions.
    """
    with shown_errors():
        from fa2tune.compiling import measured_code
        from fa2tune.fleet import manifests

        locked = manifests.read(lock_file)
        here = manifests.of(reader.layers(), measured_code.toolchain(), manifests.trusted_binaries())
    found = manifests.differences(locked, here)
    for line in found:
        echo(line)
    echo(f"{'differs from' if found else 'same as'} {lock_file}")
    echo(f"hash {here.hash}")
    if found:
        raise SystemExit(1)
