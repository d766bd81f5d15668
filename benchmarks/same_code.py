"""Renew the kernel hash of cache rows after an edit of kernel sources that changes no machine code.

    python benchmarks/same_code.py OLD_TREE cache/h200.sqlite [cache/h100.sqlite ...]
    python benchmarks/same_code.py OLD_TREE cache/h200.sqlite --lacking BESIDE=false

OLD_TREE: a checkout whose hashes the rows carry. Every binary that a row of an edited kernel names, those that run around it,
and bwd_delta's, are compiled from both trees, each in a process of its own. Only if the machine code of all of them is the
same, instruction by instruction, are the files written anew (with their JSON twins): a measurement belongs to the code that
ran. Compiled without line numbers: where an edit elsewhere has moved them, ptxas may order the same instructions otherwise.
Needs no GPU, but the Triton that the rows were made with: files of another one are for a run of their own.

--lacking: a dimension that the search has had since, and its value that stands for what these rows ran.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from fa2tune.compiling import compiler
from fa2tune.compiling.fingerprint import triton_version
from fa2tune.problem import BACKWARD
from fa2tune.rows import reader
from fa2tune.rows.row import Row, hashed_as
from fa2tune.rows.store import Store

HERE = Path(__file__).parent.parent

# In a child, with a tree on sys.path: jobs on stdin -> hashes of sources, and of the machine code of each job, on stdout.
CHILD = """
import hashlib, json, subprocess, sys
from fa2tune.compiling import compiler, fingerprint
from fa2tune.problem import Specialization
hashes = {name: fingerprint.kernel_hash(variant) for name, variant in compiler.variants().items()}
hashes |= fingerprint.kernel_hashes()
code = []
for kernel, spec, config, arch in json.load(sys.stdin):
    variant, spec = compiler.variant_named(kernel), Specialization(**spec)
    config = config or variant.space.default(spec, arch)
    before, after = compiler.around(variant, spec, config, arch)
    listings = ""
    for one, its_config in [*before, (variant, config), *after]:
        binary = compiler.build(one, spec, its_config, arch)
        command = [compiler.tool("cuobjdump"), "-sass", binary.cubin_path]
        listings += subprocess.run(command, capture_output=True, check=True, text=True).stdout
    code.append(hashlib.sha256(listings.encode()).hexdigest())
print(json.dumps([hashes, code]))
"""


def _of(tree: Path, jobs: list[Any]) -> tuple[dict[str, str], list[str]]:
    """(kernel -> hash of its source, hash of each job's machine code), as ``tree`` has them."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "TRITON_DISABLE_LINE_INFO": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(jobs), cwd=tree, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise click.ClickException(f"{tree}: {done.stderr.strip().splitlines()[-1]}")
    hashes, code = json.loads(done.stdout.splitlines()[-1])
    return hashes, code


def _jobs(rows: list[Row], edited: set[str], lacking: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Each distinct binary once, for the old tree and for this one: (kernel, specialization, config or None for the default,
    architecture)."""
    found: dict[str, tuple[Any, Any]] = {}
    for row in rows:
        spec = asdict(row.key.specialization())
        variant = None if row.key.kernel == BACKWARD else compiler.variant_of(row.key.kernel, row.config)
        if variant is not None and variant.name in edited:
            whole = compiler.binary_config(variant, _completed(row, lacking).config)
            config = {name: value for name, value in whole.items() if name in row.config}
            job, new = [variant.name, spec, config, row.key.arch], [variant.name, spec, whole, row.key.arch]
        elif row.key.kernel == BACKWARD and "bwd_delta" in edited:
            job = new = ["bwd_delta", spec, None, row.key.arch]
        else:
            continue
        found[json.dumps(job, sort_keys=True)] = job, new
    return list(found.values())


def _completed(row: Row, lacking: dict[str, Any]) -> Row:
    """With what its config lacks of its kernel's dimensions."""
    if row.key.kernel == BACKWARD:
        return row
    named = compiler.variant_of(row.key.kernel, row.config).space.dimensions
    return replace(row, config={**{name: value for name, value in lacking.items() if name in named}, **row.config})


def _entry(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    return {name: json.loads(value) for name, _, value in (text.partition("=") for text in given)}


@click.command(help=__doc__)
@click.argument("old_tree", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--lacking", multiple=True, metavar="NAME=JSON", callback=_entry)
def main(old_tree: Path, files: tuple[Path, ...], lacking: dict[str, Any]) -> None:
    tables = {path: reader.read(path) for path in files}
    rows = [row for found in tables.values() for row in found]
    others = {row.triton for row in rows} - {triton_version()}
    if others:
        raise click.BadParameter(f"files: rows of Triton {', '.join(sorted(others))}, but here is {triton_version()}")
    before, after = (_of(tree, [])[0] for tree in (old_tree.absolute(), HERE))
    edited = {name for name in after if before.get(name) != after[name]}
    click.echo(f"edited: {', '.join(sorted(edited)) or 'none'}")
    jobs = _jobs(rows, edited, lacking)
    old, new = _of(old_tree.absolute(), [job for job, _ in jobs])[1], _of(HERE, [job for _, job in jobs])[1]
    changed = [job for (job, _), a, b in zip(jobs, old, new, strict=True) if a != b]
    click.echo(f"{len(jobs) - len(changed)} of {len(jobs)} binaries have the same machine code")
    if changed:
        raise click.ClickException(f"not the same, so nothing was written: {changed[0]}")
    for path, found in tables.items():
        kept = [
            replace(_completed(row, lacking), kernel_hash=after[name]) if row.kernel_hash == before.get(name) else row
            for row in found
            for name in (hashed_as(row.key.kernel, row.variant),)
        ]
        with tempfile.TemporaryDirectory() as folder:
            store = Store(Path(folder) / "rows.sqlite")
            store.put(kept)
            store.export(path, "sqlite")
            store.export(path.with_suffix(".json"), "json")
        renewed = sum(a != b for a, b in zip(kept, found, strict=True))
        click.echo(f"{path}: {renewed} of {len(found)} rows renewed")


if __name__ == "__main__":
    main()
