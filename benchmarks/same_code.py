"""Renews the kernel hash of cache rows after an edit of kernel sources that changes no machine code.

    python benchmarks/same_code.py OLD_TREE cache/h200.sqlite [cache/h100.sqlite ...]

    python benchmarks/same_code.py OLD_TREE cache/h200.sqlite --lacking BESIDE=false

OLD_TREE is a checkout whose hashes the rows carry. Of every row whose hash differs between the trees, the binary that it
names, the kernels that run before and after it, and bwd_delta are compared, each tree in processes and with a Triton cache of
its own: Triton's key holds no fields of named tuples. What the first passes make of a kernel, which inline all device
functions, is compared first: where that is the same, so is what follows from it. Everything else is compiled from both trees.
The files and their JSON copies are rewritten only if the machine code of all binaries is the same, instruction by instruction:
a measurement belongs to the code that ran. Rows then have the hash of the new machine code, too: it covers what a launch
passes. The same PTX counts as the same code, because on a busy host ptxas assigned the spill slots of one and the same PTX
differently. Line numbers are left out, because ptxas may order the same instructions differently when they move, and a kernel
may have another name. Needs no GPU, but the Triton that made the rows; run it once per version.

`fa2tune cache renew` does without OLD_TREE, by the hash of machine code that rows keep.

--lacking names a dimension that the search has gained since without saying what describes configs from before (``added`` in
fa2tune/spec/variant.py), and the value that describes these rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import click

from fa2tune.compiling import compiler, registry
from fa2tune.compiling.fingerprint import triton_version
from fa2tune.launching import machine_code
from fa2tune.rows import reader, record
from fa2tune.rows.row import Row
from fa2tune.rows.store import Store
from fa2tune.spec.problem import BACKWARD, Specialization

HERE = Path(__file__).parent.parent

# In a child, with a tree on sys.path: what is asked for, jobs, and sources of rows, on stdin -> hashes of sources; then of each
# job's inlined code, or of its machine code and its PTX.
CHILD = """
import dataclasses, hashlib, json, re, subprocess, sys
from fa2tune.compiling import compiler, fingerprint
try:
    from fa2tune.compiling import registry
except ImportError:  # a tree from before it
    registry = compiler
from fa2tune.spec.problem import Specialization
def inlined(source, options, arch):
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    stages = {}
    backend.add_stages(stages, parsed, source.language)
    text = next(iter(stages.values()))(made, {}).str_nodebug()
    places = {}  # values are called after variables
    return re.sub(r"%\\w+", lambda name: places.setdefault(name[0], f"%{len(places)}"), text)
asked, jobs, sources = json.load(sys.stdin)
found = []
def named(kernel):  # a path, which older trees shorten
    return registry.variants().get(kernel) or registry.variants()[kernel.removeprefix("portable/")]
known = {field.name for field in dataclasses.fields(Specialization)}
for kernel, spec, config, arch in jobs:
    spec = Specialization(**{name: value for name, value in spec.items() if name in known})
    variant = registry.variant_of(kernel, config) if config else named(kernel)
    config = config or variant.space.default(spec, arch)
    before, after = compiler.around(variant, spec, config, arch)
    texts = ["", ""]
    for one, its_config in [*before, (variant, config), *after]:
        called = re.compile(rf"\\b{one.kernel.fn.__name__}\\b")  # a kernel may be called otherwise
        if asked == "inlined":
            options = compiler.options(its_config)
            made = inlined(compiler.source(one, spec, its_config), options, arch)
            texts[0] += called.sub("kernel", made) + repr(sorted(options.items()))
            continue
        binary = compiler.build(one, spec, its_config, arch)
        command = [compiler.tool("cuobjdump"), "-sass", binary.cubin_path]
        said = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        texts[0] += called.sub("kernel", said)
        texts[1] += called.sub("kernel", compiler.compile_kernel(one, spec, its_config, arch).asm["ptx"])
    found.append([hashlib.sha256(text.encode()).hexdigest() for text in texts if text])
hashes = fingerprint.kernel_hashes()
print(json.dumps([{**hashes, **{source: hashes.get(source) for source in sources}}, found]))
"""

Job = tuple[
    str, dict[str, Any], dict[str, Any] | None, int
]  #: kernel, specialization, config (None: the default), architecture


@cache
def _cache_of(tree: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="same_code-")


def _run(
    tree: Path, asked: str, jobs: list[Job], sources: Iterable[str] = ()
) -> tuple[dict[str, str], list[list[str]]]:
    """(row.source -> hash, what is asked of each job), as ``tree`` has them. ``sources``: of rows; a whole backward's names the
    kernels that it runs."""
    environment = {
        **os.environ, "PYTHONPATH": str(tree), "TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": _cache_of(tree).name
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps([asked, jobs, sorted(sources)]), cwd=tree, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise click.ClickException(f"{tree}: {done.stderr.strip().splitlines()[-1]}")
    hashes, found = json.loads(done.stdout.splitlines()[-1])
    return hashes, found


def _of(tree: Path, asked: str, jobs: list[Job]) -> list[list[str]]:
    """What is asked of each job, by as many processes as there are cores."""
    count = max(1, min(len(jobs), os.cpu_count() or 1))
    found: list[list[str]] = [[]] * len(jobs)
    with ThreadPoolExecutor(count) as pool:
        for start, part in enumerate(pool.map(lambda start: _run(tree, asked, jobs[start::count])[1], range(count))):
            found[start::count] = part
    return found


def _job(row: Row, lacking: dict[str, Any]) -> tuple[Job, Job]:
    """The binary of a row, for the old tree and for this one."""
    spec = asdict(row.key.specialization())
    if row.key.kernel == BACKWARD:  # its kernels have rows of their own, but for this one
        both = ("portable/bwd_delta", spec, None, row.key.arch)
        return both, both
    variant = registry.variant_of(row.key.kernel, row.config)
    whole = compiler.binary_config(variant, variant.space.completed(_completed(row, lacking).config))
    config = {name: value for name, value in whole.items() if name in row.config}
    return (row.key.kernel, spec, config, row.key.arch), (row.key.kernel, spec, whole, row.key.arch)


def _completed(row: Row, lacking: dict[str, Any]) -> Row:
    """With what its config lacks of its kernel's dimensions."""
    if row.key.kernel == BACKWARD:
        return row
    named = registry.variant_of(row.key.kernel, row.config).space.dimensions
    return replace(row, config={**{name: value for name, value in lacking.items() if name in named}, **row.config})


def _hash(hashes: dict[str, str], row: Row) -> str | None:
    older = f"{row.key.kernel} {record.variant_2(row)} {row.key.mask}"  #: in a tree whose rows had a variant
    return hashes.get(row.source, hashes.get(older))


def _binary_hash(row: Row) -> str:
    """As ``machine_code`` makes it of the row's config, with the sources that are here."""
    spec, arch = row.key.specialization(), machine_code.arch_of(row)
    return _binary_hash_of(row.key.kernel, spec, json.dumps(row.config, sort_keys=True), arch)


@cache
def _binary_hash_of(kernel: str, spec: Specialization, config: str, arch: int) -> str:
    found, why = machine_code.of_config(kernel, spec, json.loads(config), arch)
    if why:
        raise click.ClickException(f"{kernel}, {config}: {why}")
    return found


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
    before, after = (_run(tree, "inlined", [], {row.source for row in rows})[0] for tree in (old_tree.absolute(), HERE))
    fresh_then = [row for row in rows if row.kernel_hash == _hash(before, row) != _hash(after, row)]
    distinct = {json.dumps(job, sort_keys=True): job for job in (_job(row, lacking) for row in fresh_then)}
    jobs = list(distinct.values())
    click.echo(f"{len(fresh_then)} of {len(rows)} rows rest on edited sources, {len(jobs)} binaries")

    def compared(asked: str, jobs: list[tuple[Job, Job]]) -> list[tuple[Job, Job]]:
        """Those that differ."""
        old = _of(old_tree.absolute(), asked, [job for job, _ in jobs])
        new = _of(HERE, asked, [job for _, job in jobs])
        return [job for job, a, b in zip(jobs, old, new, strict=True) if not set(a) & set(b)]

    other = compared("inlined", jobs)
    click.echo(f"{len(jobs) - len(other)} of {len(jobs)} binaries have the same code once it is inlined")
    changed = compared("code", other)
    click.echo(f"{len(other) - len(changed)} of the {len(other)} others have the same machine code")
    if changed:
        raise click.ClickException(f"not the same, so nothing was written: {changed[0][0]}")
    renewed = {id(row) for row in fresh_then}

    def as_now(row: Row) -> Row:
        row = replace(_completed(row, lacking), kernel_hash=_hash(after, row) or "")
        return replace(row, binary_hash=_binary_hash(row)) if machine_code.known(row.binary_hash) else row

    for path, found in tables.items():
        kept = [as_now(row) if id(row) in renewed else row for row in found]
        with tempfile.TemporaryDirectory() as folder:
            store = Store(Path(folder) / "rows.sqlite")
            store.put(kept)
            store.export(path, "sqlite")
            store.export(path.with_suffix(".json"), "json")
        count = sum(a != b for a, b in zip(kept, found, strict=True))
        click.echo(f"{path}: {count} of {len(found)} rows renewed")


if __name__ == "__main__":
    main()
