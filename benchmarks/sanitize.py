"""compute-sanitizer over small shapes of every warp-specialised variant: memcheck, racecheck, synccheck.

    python benchmarks/sanitize.py [--tool racecheck] [--kernel fwd] [--seconds 600]

Needs a Hopper GPU and compute-sanitizer (on PATH, in CUDA_HOME, or CUDA_SANITIZER names it). The kernels are those that
tests/gpu/hopper_cases.py runs as `small`: the default and two other configs, both masks, head dims 64 and 128, lengths that no
tile divides. racecheck looks at shared memory accesses of threads only: what the copy engine and the tensor cores do there is
ordered by barriers that it does not follow. Left out are hazards with the byte by which Triton tells a worker warp, at the
kernel's very start, which partition it is: in the SASS its one load and its two stores stand between barriers of the whole
block (BAR.SYNC 1, also of the warps of no partition), so that they cannot meet; why racecheck says otherwise is not known (it
says so of kernels with a partition of one warp, and not of one whose partitions are of four).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click

from fa2tune.problem import KERNELS

TOOLS = ("memcheck", "racecheck", "synccheck")
#: A hazard's first line, and how far into a kernel the dispatch of its warps reaches
HAZARD, DISPATCH = re.compile(r"Race reported between (?:Read|Write) access at \w+\+0x([0-9a-f]+)"), 0x400
CASES = Path(__file__).parent.parent / "tests" / "gpu" / "hopper_cases.py"


def sanitizer() -> str | None:
    """Path of compute-sanitizer, or None."""
    places = [os.environ.get("CUDA_SANITIZER"), shutil.which("compute-sanitizer")]
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        places += [f"{root}/bin/compute-sanitizer", f"{root}/compute-sanitizer/compute-sanitizer"] if root else []
    return next((place for place in places if place and Path(place).is_file()), None)


@click.command(help=__doc__)
@click.option("--tool", type=click.Choice(TOOLS), multiple=True, default=TOOLS, show_default=True)
@click.option("--kernel", type=click.Choice(KERNELS), multiple=True, default=KERNELS, help="[default: all]")
@click.option("--seconds", type=float, default=1800.0, show_default=True, help="For each tool and kernel.")
def main(tool: tuple[str, ...], kernel: tuple[str, ...], seconds: float) -> None:
    program = sanitizer()
    if program is None:
        raise click.ClickException("compute-sanitizer: not on PATH, nor in CUDA_HOME; CUDA_SANITIZER may name it")
    clean = True
    for one in kernel:
        # first without it: binaries are compiled into Triton's cache, and a kernel that hangs is not the sanitizer's fault
        subprocess.run(
            [sys.executable, str(CASES), "small", one], check=True, timeout=seconds, stdout=subprocess.DEVNULL
        )
        for each in tool:
            begun = time.monotonic()
            command = [program, "--tool", each, "--error-exitcode", "86", "--kernel-name", "kernel_substring=hopper",
                       sys.executable, str(CASES), "small", one]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
            said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("=====")]
            ran = done.stdout.count("\nran ") + done.stdout.startswith("ran ")
            summary = next(
                (line for line in reversed(said) if "SUMMARY" in line), f"exit {done.returncode}, no summary"
            )
            click.echo(f"{one} {each}: {ran} launches, {summary.strip('= ')}, {time.monotonic() - begun:.0f} s")
            hazards = [int(found[1], 16) for line in said if (found := HAZARD.search(line))]
            if hazards and all(where < DISPATCH for where in hazards):
                click.echo(f"  all {len(hazards)} hazards are with the dispatch of warps at the start of a kernel")
            elif done.returncode:
                clean = False
                click.echo("\n".join(said[:40] or (done.stdout + done.stderr).splitlines()[-20:]))
    if not clean:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
