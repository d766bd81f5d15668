"""``fa2tune doctor``: is everything here that fa2tune needs, and if not, what mends it."""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from fa2tune.measuring.witness import Reading

#: package -> lowest version that works; a test holds this to pyproject.toml
REQUIRED = {"torch": (2, 11), "triton": (3, 6), "optuna": (0,), "sqlalchemy": (2,)}


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``mend`` is set where something is wrong; ``needed`` says that fa2tune fails without it."""

    subject: str
    found: str
    mend: str = ""
    needed: bool = True

    @property
    def mark(self) -> str:
        return "ok" if not self.mend else "FAIL" if self.needed else "note"


def packages() -> Iterator[Finding]:
    python = (3, 11)
    yield Finding(
        "python", platform.python_version(), "" if sys.version_info >= python else "install Python 3.11 or newer"
    )
    for package, lowest in REQUIRED.items():
        wanted = f"pip install --upgrade '{package}>={'.'.join(map(str, lowest))}'"
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield Finding(package, "not installed", wanted)
            continue
        numbers = tuple(int(n) for n in re.findall(r"\d+", version)[: len(lowest)])
        yield Finding(package, version, "" if numbers >= lowest else wanted)


def tools() -> Iterator[Finding]:
    """The binaries that compile for a GPU and read its machine code. They come inside the triton wheel."""
    from fa2tune.compiling import compiler

    for name in ("ptxas", "cuobjdump", "nvdisasm"):
        try:
            yield Finding(name, compiler.tool(name))
        except FileNotFoundError as error:
            yield Finding(name, str(error), "pip install --force-reinstall --no-deps triton")
        except ImportError as error:
            yield Finding(name, f"triton does not import: {error}", "pip install --force-reinstall triton")


def gpu() -> Iterator[Finding]:
    import torch

    from fa2tune import gpus
    from fa2tune.compiling import fingerprint
    from fa2tune.measuring import witness

    driver = fingerprint.driver_version()
    if not torch.cuda.is_available():
        if not driver:
            yield Finding(
                "gpu", "none: fa2tune can compile for and predict any GPU that `fa2tune gpus` lists, not run on one"
            )
        else:
            mend = (
                "this torch is built without CUDA: install the CUDA build of torch"
                if torch.version.cuda is None
                else f"torch is built for CUDA {torch.version.cuda} and cannot use driver {driver}: update the driver, "
                "install a torch for an older CUDA, or check CUDA_VISIBLE_DEVICES"
            )
            yield Finding("gpu", f"driver {driver} is here, torch sees no GPU", mend)
        return
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        arch = 10 * seen.major + seen.minor
        known = gpus.identify(seen.name, arch, seen.multi_processor_count)
        found = f"{seen.name}, {seen.multi_processor_count} SMs, sm_{arch}: {known.name}"
        mend = "fa2tune needs compute capability 8.0 (A100) or newer" if arch < 80 else ""
        yield Finding(f"gpu {index}", found, mend)
        seen_by = witness.of_device(index)
        yield Finding(
            f"gpu {index} watched", seen_by.why or f"by NVML: {_reading(seen_by.read())}",
            "pip install nvidia-ml-py; without it tuning goes on, and its rows say that nobody watched for throttling"
            if seen_by.why else "", needed=False,
        )  # fmt: skip
    yield Finding("driver", driver or "unknown")


def _reading(reading: Reading) -> str:
    if reading.reasons is None:
        return f"{reading.clock_mhz} MHz, throttling not told"
    return f"{reading.clock_mhz} MHz, {'throttled now' if reading.throttled else 'not throttled'}"


def layers() -> Iterator[Finding]:
    """The cache files that serve, strongest first, and those that were meant to and cannot be read."""
    from fa2tune.rows import reader

    found, skipped = [], _Skipped()
    reader.logger.addHandler(skipped)
    try:
        found = reader.layers()
    finally:
        reader.logger.removeHandler(skipped)
    for layer in found:
        yield Finding(f"{layer.name} cache", f"{layer.path}, {len(layer.rows)} rows")
    if not found:
        yield Finding("cache", "no file: every call takes the default config", "fa2tune tune", needed=False)
    for reason in skipped.reasons:
        yield Finding("cache", reason, "restore that file, delete it, or take it out of FA2TUNE_CACHE")


def kernels() -> Iterator[Finding]:
    """The files of binaries: which are trusted, which not and why, and what in them fits here."""
    from fa2tune.compiling import binaries
    from fa2tune.launching import precompiled

    held = binaries.trusted()
    for place, file in held.files:
        version = precompiled.triton_build()
        fitting = Counter(
            f"sm_{e.about.get('arch')}" for e in file.entries.values() if e.about.get("triton") == version
        )
        fits = ", ".join(f"{count} for {arch}" for arch, count in sorted(fitting.items())) or "none"
        found = f"{file.path}, {len(file.entries)} binaries; for Triton {version or 'of no known build'}: {fits}"
        yield Finding(
            f"{place.layer} kernels", found, "" if fitting else "fa2tune cache precompile; until then calls compile",
            needed=False,
        )  # fmt: skip
    for place, why in held.refused:
        missing = place.layer == "named" and not os.path.lexists(place.path)  # as a cache file that FA2TUNE_CACHE names
        mend = f"ship that file, or take it out of {binaries.VARIABLE}" if missing else "mend that, or delete the file"
        yield Finding(
            f"{place.layer} kernels", f"{place.path}: {'no such file' if missing else why}",
            f"{mend}; until then calls compile", needed=missing,
        )  # fmt: skip
    if not held.files and not held.refused:
        off = os.environ.get(binaries.VARIABLE) == binaries.OFF
        yield Finding("kernels", f"off, by {binaries.VARIABLE}" if off else "no file of binaries: first calls compile")
    if held.files and (overruled := precompiled.overruled()) is not None:
        yield Finding("kernels", f"left aside: {overruled}")


def settings() -> Iterator[Finding]:
    """Variables of the environment that a call would refuse, at the worst of times."""
    from fa2tune.calling import dispatch

    setting, allowed = os.environ.get(dispatch.CAPTURE_MISS), (dispatch.ERROR, dispatch.DEFAULT)
    if setting is not None and setting not in allowed:
        mend = f"set it to {' or '.join(allowed)}, or take it out of the environment"
        yield Finding(dispatch.CAPTURE_MISS, repr(setting), mend)


class _Skipped(logging.Handler):
    """Collects the reader's warnings: one for each file that it skips."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.reasons.append(record.getMessage())


@click.command()
def doctor() -> None:
    """Check GPU, driver, versions, cache files, files of binaries and settings. Exit code 1 if something needed is missing."""
    findings = list(packages())
    complete = not any(f.mend for f in findings)
    if complete:  # the rest imports them
        findings += [*tools(), *gpu()]
    findings += layers()
    if complete:
        findings += [*kernels(), *settings()]
    for finding in findings:
        click.echo(f"{finding.mark:8}{finding.subject:15} {finding.found}")
        if finding.mend:
            click.echo(f"{'':24}-> {finding.mend}")
    missing = [finding.subject for finding in findings if finding.mend and finding.needed]
    if missing:
        click.echo(f"\nNot ready: {', '.join(missing)}.")
        sys.exit(1)
    click.echo("\nEverything needed is here.")
