"""``fa2tune cache sign`` and ``check``: does every node serve what was shipped?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fa2tune.cli._options import check_folder, told
from fa2tune.cli.cache.common import FILE
from fa2tune.rows import reader


@click.command(short_help="Write a manifest of what a fleet is to serve from.")
@click.argument("files", type=FILE, nargs=-1)
@click.option("--out", type=FILE, help="[default: beside the first of FILES, ending in .manifest.json]")
def sign(files: Sequence[Path], out: Path | None) -> None:
    """Write a manifest of the cache FILES that a fleet is to serve from: what is in them, in this order, and the fa2tune,
    Triton and kernel sources they go with; and of the files of binaries beside them (`cache precompile`), which a node is to
    name in FA2TUNE_KERNELS. `cache check` holds a node to it.

    Without FILES: of all that serves here, the user's file and the driver included; printed, unless --out is given.
    """
    if out is not None:
        check_folder(out, "--out")
    with told():
        from fa2tune.compiling import fingerprint
        from fa2tune.fleet import manifests
        from fa2tune.rows import store

        if files:
            made = manifests.shipment(files, fingerprint.toolchain(driver=""))
            out = out or files[0].with_suffix(".manifest.json")
        else:
            made = manifests.of(reader.layers(), fingerprint.toolchain(), manifests.trusted_binaries())
        if out is None:
            click.echo(made.to_json(), nl=False)
            return
        store.write_text(out, made.to_json())
    compiled = "".join(f", {part.binaries} binaries in {part.file}" for part in made.binaries)
    rows = sum(part.rows for part in made.layers)
    click.echo(f"{out}: {rows} rows in {len(made.layers)} files{compiled}, hash {made.hash[:16]}")


@click.command(short_help="Hold what serves here to a manifest.")
@click.argument("manifest", type=FILE)
def check(manifest: Path) -> None:
    """Hold what serves here to a MANIFEST that `cache sign` wrote. Exit code 1, and what differs, if they are not alike.

    The last line is this node's own hash, as fa2tune.manifest().hash gives it to programs: equal on nodes that decide alike.
    """
    with told():
        from fa2tune.compiling import fingerprint
        from fa2tune.fleet import manifests

        signed = manifests.read(manifest)
        here = manifests.of(reader.layers(), fingerprint.toolchain(), manifests.trusted_binaries())
    found = manifests.differences(signed, here)
    for line in found:
        click.echo(line)
    click.echo(f"{'differs from' if found else 'as signed in'} {manifest}")
    click.echo(f"hash {here.hash}")
    if found:
        raise SystemExit(1)
