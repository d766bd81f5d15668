"""Compiles what a script for a GPU would launch, on all cores and without a GPU, into Triton's own cache.

    TRITON_CACHE_DIR=DIR python benchmarks/ahead.py [--count] SCRIPT [ARGUMENT]...

The script runs to its end against a stand-in for an H200 (benchmarks/no_gpu.py). What it prints and writes is dropped, as it
means nothing. Its pools of processes do nothing, and a millisecond passes whenever it looks at the clock, so that a limit of
seconds leaves no call out. On the GPU's host, with the same Python, Triton and sources, it then compiles nothing, if DIR has
the same absolute path there: Triton's cache holds the paths of its files.
"""

from __future__ import annotations

import io
import itertools
import os
import runpy
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

import click

from fa2tune.compiling import compiler
from fa2tune.fleet import precompile
from fa2tune.fleet.precompile import BinaryJob
from fa2tune.gpus import Gpu
from fa2tune.launching import ported


def compile_all(jobs: Iterable[BinaryJob], gpu: Gpu) -> None:
    """Each binary once; prints how many there are, and which do not compile and why."""
    todo = list(dict.fromkeys(jobs))
    done = _ported(todo, gpu) if ported.running() else precompile.compile_all(todo, gpu.arch)
    click.echo(f"{len(todo)} binaries for {gpu.name}, {len(done.failures)} of which do not compile")
    for (variant, spec, _), why in done.failures:
        click.echo(f"{variant.short_name}, head dim {spec.head_dim}/{spec.head_dim_v}, {spec.mask}: {why}")


def _ported(jobs: Iterable[BinaryJob], gpu: Gpu) -> precompile.CompiledBinaries:
    """The code of another GPU, assembled for this one."""
    done = precompile.CompiledBinaries()

    def build(job: BinaryJob) -> None:
        variant, spec, config = job
        try:
            ported.assembled(compiler.compile_kernel(variant, spec, dict(config), ported.CODE), gpu.arch)
        except compiler.CompileError as error:
            done.failures.append((job, str(error)))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(build, jobs))
    return done


class NoProcesses:
    """A pool of processes that does nothing. Scripts compile in one before they launch; what they launch is known here."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> NoProcesses:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, _: Any, each: Iterable[Any], chunksize: int = 1) -> list[None]:
        return [None for _ in each]


def launches(script: Path, arguments: Iterable[str]) -> list[BinaryJob]:
    """What a script launches."""
    import no_gpu

    from fa2tune.rows import whole

    no_gpu.launched.clear()
    argv = sys.argv
    nothing: Any = lambda *_, **__: None  # noqa: E731
    looked = itertools.count()
    replaced: list[tuple[Any, str, Any]] = [
        (Path, "write_text", nothing), (whole, "publish", nothing), (BaseContext, "Pool", NoProcesses),
        (time, "monotonic", lambda: next(looked) / 1e3),
    ]  # fmt: skip
    try:
        with no_gpu.gpu(), no_gpu.tensors(), redirect_stdout(io.StringIO()), ExitStack() as stack:
            for of, name, value in replaced:
                stack.enter_context(mock.patch.object(of, name, value))
            sys.argv = [str(script), *arguments]
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.argv = argv
    return list(no_gpu.launched)


@click.command(help=(__doc__ or "").partition("\n\n")[0], context_settings={"ignore_unknown_options": True})
@click.option("--count", is_flag=True, help="Only say how many binaries there are.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(count: bool, script: Path, arguments: tuple[str, ...]) -> None:
    import no_gpu

    found = launches(script, arguments)
    if count:
        click.echo(f"{len(found)} binaries")
    else:
        compile_all(found, no_gpu.GPU)


if __name__ == "__main__":
    main()
