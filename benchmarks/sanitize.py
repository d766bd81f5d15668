"""Runs compute-sanitizer (memcheck, racecheck, synccheck) over small shapes of every warp-specialised variant.

    python benchmarks/sanitize.py [--tool racecheck] [--kernel fwd] [--seconds 600]

Needs a Hopper GPU and compute-sanitizer (on PATH, in CUDA_HOME, or named by CUDA_SANITIZER). The kernels are those that
tests/gpu/hopper_cases.py runs as `small`: the default and enough other configs to cover every compiled-in value, both
masks, head dims 64 and 128, lengths that no tile divides; and the persistent kernels named there, on more tiles than
programs.

racecheck only sees shared memory accesses of threads. What the copy engine and the tensor cores do is ordered by barriers
that it does not follow. Hazards of Triton's own dispatch of partitions (state bytes and captures, see dispatch_phases.py)
are left out where they are proven harmless: each pair of addresses that racecheck names is looked up in the SASS of the
binaries that ran, and left out only if barriers of the whole block separate the read from the write on every path. Every
other hazard is printed in full. Why racecheck reports them is not known; it does so for kernels that have a partition of
one warp, and not for one whose partitions have four.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from dispatch_phases import Accesses, Unproven, accesses, excused

from fa2tune.compiling import sass
from fa2tune.spec.problem import KERNELS

TOOLS = ("memcheck", "racecheck", "synccheck")
#: A hazard's first line, each line that names what else it is with, and how many there are
HAZARD = re.compile(r"Race reported between (\w+) access at (\w+)\+0x([0-9a-f]+)")
OTHER, DISPLAYED = re.compile(r"\band (\w+) access at (\w+)\+0x([0-9a-f]+)"), re.compile(r"(\d+) hazards? displayed")
TROUBLE = re.compile(r"=+ (Error|Warning|Internal)")  #: whatever else the sanitizer says that is not well
FAILED = 86  #: exit status asked of the sanitizer where it has found something
CASES = Path(__file__).parent.parent / "tests" / "gpu" / "hopper_cases.py"


def sanitizer() -> str | None:
    """Path of compute-sanitizer, or None."""
    places = [os.environ.get("CUDA_SANITIZER"), shutil.which("compute-sanitizer")]
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        places += [f"{root}/bin/compute-sanitizer", f"{root}/compute-sanitizer/compute-sanitizer"] if root else []
    return next((place for place in places if place and Path(place).is_file()), None)


def launches(said: str) -> int:
    """How many launches tests/gpu/hopper_cases.py says it ran."""
    return sum(line.startswith("ran ") for line in said.splitlines())


def hazards(said: Sequence[str]) -> list[list[str]]:
    """The lines of each hazard in a racecheck report."""
    found: list[list[str]] = []
    within = False
    for line in said:
        if HAZARD.search(line):
            found.append([])
            within = True
        within = within and bool(line.strip("= "))
        if within:
            found[-1].append(line)
    return found


def is_dispatch(hazard: Sequence[str], binaries: Mapping[str, Sequence[Accesses]]) -> bool:
    """Whether each pair a hazard names is a read and a write of one kernel that barriers of the whole block keep apart."""
    first = HAZARD.search(hazard[0])
    others = [OTHER.search(line) for line in hazard[1:] if " access at " in line]
    if first is None or not others:
        return False
    for other in others:
        if other is None or {first[1], other[1]} != {"Read", "Write"} or other[2] != first[2]:
            return False
        read, write = (first, other) if first[1] == "Read" else (other, first)
        if not excused(binaries.get(first[2], ()), int(read[3], 16), int(write[3], 16)):
            return False
    return True


def binaries_in(cache: Path, kernels: set[str]) -> dict[str, list[Accesses]]:
    """Every binary of these kernels in a Triton cache; none of a kernel that has one whose dispatch is not understood."""
    found: dict[str, list[Accesses]] = {}
    for kernel in sorted(kernels):
        try:
            found[kernel] = [accesses(sass.disassembly(path)) for path in sorted(cache.rglob(f"{kernel}.cubin"))]
        except Unproven as error:
            click.echo(f"  {kernel}: its barriers are not understood, so every hazard counts: {error}")
    return found


def check_races(said: Sequence[str], cache: Path) -> bool:
    """Print every hazard that is not excused, and how many are. Whether all are."""
    found = hazards(said)
    binaries = binaries_in(cache, {match[2] for lines in found for line in lines if (match := HAZARD.search(line))})
    kept = [hazard for hazard in found if not is_dispatch(hazard, binaries)]
    if len(found) > len(kept):
        click.echo(
            f"  {len(found) - len(kept)} of {len(found)} hazards left out: Triton's dispatch of partitions (state bytes,"
            " captures), where a barrier of the whole block separates read and write on every path"
        )
    for hazard in kept:
        click.echo("\n".join(hazard))
    trouble = [line for line in said if TROUBLE.match(line) and not HAZARD.search(line)]
    click.echo("\n".join(trouble), nl=bool(trouble))
    counts = [int(count[1]) for line in said if (count := DISPLAYED.search(line))]
    if counts != [len(found)]:
        click.echo(f"  {len(found)} hazards read from this report, {counts} by its summary")
    return not kept and not trouble and counts == [len(found)]


def check(program: str, kernel: str, tools: Sequence[str], seconds: float, cache: Path) -> bool:
    """Run the small shapes of a kernel under each tool, with this Triton cache. Whether all found nothing."""
    clean, environment = True, {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    cases = [sys.executable, str(CASES), "small", kernel]
    # first without it: binaries are compiled into Triton's cache, and a kernel that hangs is not the sanitizer's fault
    alone = subprocess.run(cases, check=True, timeout=seconds, stdout=subprocess.PIPE, text=True, env=environment)
    for tool in tools:
        begun = time.monotonic()
        # not the driver's own answers: loading a kernel asks for its parameters until there is no more
        quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
        command = [program, "--tool", tool, *quiet, "--error-exitcode", str(FAILED), "--print-limit", "0",  # 0: print all
                   "--kernel-name", "kernel_substring=hopper", *cases]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environment)
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("=====")]
        ran = launches(done.stdout)
        summary = next((line for line in reversed(said) if "SUMMARY" in line), f"exit {done.returncode}, no summary")
        click.echo(f"{kernel} {tool}: {ran} launches, {summary.strip('= ')}, {time.monotonic() - begun:.0f} s")
        complete = ran == launches(alone.stdout) and done.returncode in (0, FAILED)
        if hazards(said):
            clean &= check_races(said, cache) and complete
        elif done.returncode or not complete:
            clean = False
            click.echo("\n".join(said[:40] or (done.stdout + done.stderr).splitlines()[-20:]))
    return clean


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
        with tempfile.TemporaryDirectory() as cache:  # so that its binaries are those that ran
            clean &= check(program, one, tool, seconds, Path(cache))
    if not clean:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
