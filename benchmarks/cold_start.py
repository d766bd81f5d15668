"""Times the first calls of a process: from precompiled kernels, from a warm Triton cache, and with a cold compile.

    python benchmarks/cold_start.py [--kernels FILE] [--starts 5]

Each start is a fresh process of release_child.py. Its Triton cache is empty, except for the warm starts. It imports torch,
makes q, k and v on the GPU and synchronises. Then the clock runs over ``import fa2tune``, the first forward and the
first backward, each up to a synchronisation. Precompiled starts have a PATH without compilers; one that runs a program or
writes to Triton's cache is an error. Needs a GPU. Without --kernels, the file is first made for this GPU, head dim and
dtype.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from release_check import ran, without_compilers
from release_child import SHAPE

DTYPE = "bf16"  #: of release_child.py's call


def start(environment: dict[str, str]) -> tuple[list[float], list[str]]:
    """Seconds of each part of one start, as ``release_child.first_call`` has them, and the programs that it ran."""
    found = ran("start", environment)
    if "error" in found:
        raise click.ClickException(f"{found['error']}\n{found['said'][-2000:]}")
    return found["seconds"], found["programs"]


def _seconds(name: str, found: list[list[float]]) -> str:
    def column(values: list[float]) -> str:
        return f"{statistics.median(values):7.3f} ({min(values):.3f} to {max(values):.3f})"

    import_, forward, backward = ([seconds[part] for seconds in found] for part in (2, 3, 4))
    first = [a + b for a, b in zip(import_, forward, strict=True)]
    return f"{name:22}{column(import_):28}{column(first):28}{column(backward):28}"


@click.command(help=__doc__)
@click.option(
    "--kernels", type=click.Path(path_type=Path, exists=True), help="A file of binaries that holds these kernels."
)
@click.option("--starts", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--cold-starts", type=click.IntRange(min=1), default=1, show_default=True, help="With a cold compile.")
def main(kernels: Path | None, starts: int, cold_starts: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        base = {**os.environ, "XDG_CACHE_HOME": f"{folder}/xdg", "FA2TUNE_KERNELS": "off"}
        if kernels is None:
            kernels = Path(folder, "here.kernels")
            command = [
                sys.executable,
                "-m",
                "fa2tune",
                "cache",
                "precompile",
                "--headdim",
                str(SHAPE[3]),
                "--dtype",
                DTYPE,
            ]
            subprocess.run(
                [*command, "--out", str(kernels)], env={**base, "TRITON_CACHE_DIR": f"{folder}/made"}, check=True
            )
        precompiled = {**base, "FA2TUNE_KERNELS": str(kernels), "PATH": without_compilers(base["PATH"])}
        click.echo("seconds, median (and range); without the import of torch and the CUDA context")
        click.echo(f"{'':22}{'import fa2tune':28}{'and the first forward':28}{'then the first backward':28}")
        found = []
        for turn in range(starts + 1):
            cache = Path(folder, f"empty-{turn}")
            seconds, programs = start({**precompiled, "TRITON_CACHE_DIR": str(cache)})
            if programs or cache.exists():
                raise click.ClickException(
                    f"a precompiled start ran {programs} or compiled: {sorted(cache.rglob('*'))[:4]}"
                )
            found.append(seconds)
        click.echo(_seconds("precompiled", found[1:]))  # the first fills the page cache
        made = [start({**base, "TRITON_CACHE_DIR": f"{folder}/{turn}"}) for turn in range(cold_starts)]
        click.echo(_seconds("cold Triton compile", [seconds for seconds, _ in made]))
        programs = sorted({Path(program).name for _, started in made for program in started})
        click.echo(
            _seconds(
                "warm Triton cache", [start({**base, "TRITON_CACHE_DIR": f"{folder}/0"})[0] for _ in range(starts)]
            )
        )
        click.echo(f"programs that a cold compile ran: {', '.join(programs) or 'none'}")


if __name__ == "__main__":
    main()
