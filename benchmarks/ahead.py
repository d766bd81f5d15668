"""Compiles what a script for a GPU would launch, on all cores and without a GPU, into Triton's own cache.

    TRITON_CACHE_DIR=DIR python benchmarks/ahead.py [--count] SCRIPT [ARGUMENT]...

The script runs to its end against a stand-in for an H200 (benchmarks/no_gpu.py), so what it prints means nothing, and it should
write nothing. On the GPU's host, with the same Python, Triton and sources, it then compiles nothing.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from fa2tune.fleet import precompile
from fa2tune.fleet.precompile import BinaryJob
from fa2tune.gpus import Gpu


def compile_all(jobs: Iterable[BinaryJob], gpu: Gpu) -> None:
    """Each binary once; prints how many there are, and which do not compile and why."""
    todo = list(dict.fromkeys(jobs))
    done = precompile.compile_all(todo, gpu.arch)
    click.echo(f"{len(todo)} binaries for {gpu.name}, {len(done.failures)} of which do not compile")
    for (variant, spec, _), why in done.failures:
        click.echo(f"{variant.short_name}, head dim {spec.head_dim}/{spec.head_dim_v}, {spec.mask}: {why}")


def launches(script: Path, arguments: Iterable[str]) -> list[BinaryJob]:
    """What a script launches."""
    import no_gpu

    no_gpu.launched.clear()
    argv = sys.argv
    try:
        with no_gpu.gpu(), no_gpu.tensors():
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
