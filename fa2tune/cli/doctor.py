"""``fa2tune doctor``: can attention() run on this GPU, has it rows, and what to do next."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from fa2tune.calling.advice import NOTHING_TO_DO, refresh_command
from fa2tune.cli import _checks
from fa2tune.cli._checks import Check, RowClass
from fa2tune.cli._output import echo
from fa2tune.text import plain

if TYPE_CHECKING:
    from fa2tune.devices import Device, FoundDevices


TUNE_FOR_ANOTHER = "fa2tune tune --gpu a100 (tunes for an absent GPU; fa2tune gpus lists them)"


@dataclass
class Diagnosis:
    """Everything that was found."""

    findings: list[Check] = field(default_factory=list)
    seen: FoundDevices | None = None  #: what the driver says; None: not asked, as a package is missing
    rows: dict[int, list[RowClass]] = field(default_factory=dict)  #: GPU by number -> what the cache files hold for it
    triton: str = ""
    gpu_wanted: bool = True

    @property
    def broken(self) -> list[Check]:
        return [one for one in self.findings if one.fix and one.needed]

    @property
    def interpreted(self) -> bool:
        return os.environ.get("TRITON_INTERPRET", "0") == "1"

    @property
    def ready(self) -> bool:
        """Whether attention() runs here; with --no-gpu whether it could, on a GPU."""
        if any(not one.skipped for one in self.broken):
            return False
        return not self.gpu_wanted or self.interpreted or bool(self.seen and self.seen.devices)

    @property
    def status(self) -> int:
        """Exit status: 0 if it is ready and everything that is configured can be used."""
        return 0 if self.ready and not self.broken else 1

    @property
    def skipped(self) -> list[str]:
        """Files that attention() runs without, each with its reason."""
        return [one.skipped for one in self.broken if one.skipped]

    @property
    def verdict(self) -> str:
        """One line."""
        if missing := dict.fromkeys(one.subject for one in self.broken if not one.skipped):
            return f"Not ready: {', '.join(missing)}."
        skipped = "; ".join(self.skipped)
        if self.seen is not None and self.seen.devices:
            rows = _verdict_on(self.seen.devices[0], self.rows.get(0, []), self.triton)
            return f"Ready, but {skipped}. {rows}" if skipped else f"Ready: {rows}"
        why = plain(self.seen.why) if self.seen else "unknown"
        if self.interpreted:
            found = f"Ready, without a GPU ({why}): attention() takes CPU tensors, in Triton's interpreter, slowly."
        elif not self.gpu_wanted and self._no_triton:
            found = "Ready for calls whose machine code is in a file; nothing is compiled or tuned without Triton."
        elif not self.gpu_wanted:
            found = "Ready to compile, and to tune for an absent GPU. There is no GPU here, and --no-gpu needs none."
        else:
            found = f"No GPU ({why}): attention() does not run here."
        return f"{found} But {skipped}." if skipped else found

    @property
    def next(self) -> str:
        """A command, or "nothing to do"."""
        if self.broken:
            return min(self.broken, key=lambda one: bool(one.skipped)).fix
        there = self.seen is not None and self.seen.devices
        command = _next_for(self.rows.get(0, [])) if there else TUNE_FOR_ANOTHER
        return command if command == NOTHING_TO_DO else self._no_triton or command

    @property
    def _no_triton(self) -> str:
        """What mends a Triton that is missing or broken, where calls run without it; "": it is neither."""
        found = (one.fix.partition(";")[0] for one in self.findings if one.subject == "triton" and one.fix)
        return next(found, "")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        listed = [
            {"number": d.number, "name": d.name, "gpu": d.gpu.name, "arch": d.arch, "sm_count": d.sm_count,
             "rows": [one.as_dict() for one in self.rows.get(d.number, [])]}
            for d in (self.seen.devices if self.seen else ())
        ]  # fmt: skip
        return {
            "ready": self.ready, "skipped": self.skipped, "verdict": self.verdict, "next": self.next, "gpus": listed,
            "findings": [one.as_dict() for one in self.findings],
        }  # fmt: skip


def _verdict_on(device: Device, classes: Sequence[RowClass], triton: str) -> str:
    from fa2tune.compiling.measured_code import NO_TRITON

    name = plain(device.name)
    if not classes:
        return f"{name} has no rows, so attention() takes the default configs."
    best = classes[0]
    if best.fresh_keys == best.keys:
        fresh = f"for Triton {triton}" if triton != NO_TRITON else "without Triton"
        return f"{name} has {best.words(best.fresh)}, fresh {fresh}."
    reasons = "; ".join(best.stale[:3])
    if not best.fresh_keys:
        return f"{name} has {best.words()}. All are stale ({reasons}), and still serve."
    return f"{name} has {best.words()}. {best.keys - best.fresh_keys} of {best.keys} keys have only stale rows ({reasons})."


def _next_for(classes: Sequence[RowClass]) -> str:
    if not classes or (classes[0].on, classes[0].evidence) != ("exact", "measured"):
        return "fa2tune tune (measures on this GPU)"
    if classes[0].stale_files:
        return refresh_command(classes[0].stale_files[0])
    return NOTHING_TO_DO


def examine(gpu_wanted: bool) -> Diagnosis:
    """Look at everything. Imports no torch."""
    report = Diagnosis(gpu_wanted=gpu_wanted)
    report.findings += _checks.packages()
    complete = not report.broken  # the rest imports these packages
    if complete:
        from fa2tune import devices

        report.findings += _checks.tools()
        report.seen = devices.find()
        report.findings += _checks.gpus(report.seen)
    layers, found = _checks.cache_files()
    if complete:
        from fa2tune.compiling import measured_code

        toolchain = measured_code.toolchain()
        report.triton = toolchain.triton
        for device in report.seen.devices if report.seen else ():
            report.rows[device.number] = _checks.rows_for(device, layers, toolchain)
            report.findings += _row_lines(device, report.rows[device.number])
    report.findings += found
    if complete:
        report.findings += [*_checks.binaries_files(), *_checks.settings()]
    return report


def _row_lines(device: Device, classes: Sequence[RowClass]) -> Iterator[Check]:
    """What the cache files hold for a GPU, one line a class of evidence."""
    for one in classes:
        yield Check(f"gpu {device.number} rows", f"{one.words()}; {one.fresh} fresh, {one.rows - one.fresh} stale")
    if not classes:
        yield Check(f"gpu {device.number} rows", "none: default configs")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
@click.option("--no-gpu", is_flag=True, help="This machine need not have a GPU: a build machine, CI.")
def doctor(as_json: bool, no_gpu: bool) -> None:
    """Say whether attention() is ready on this GPU, which rows it has, and what to do next.

    Checks versions, GPU and driver, cache files, files of binaries (every hash) and settings.

    Exit status: 0 if attention() runs here and everything that is configured can be used; 1 if not, also without a GPU. With
    --no-gpu a machine without a GPU can be ready, too.
    """
    report = examine(not no_gpu)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        from fa2tune.cli.cache.common import console

        screen = console()
        for line in _lines(report, screen.width if screen.is_terminal else None):
            echo(line)
    if report.status:
        raise SystemExit(report.status)


def _lines(report: Diagnosis, width: int | None) -> Iterator[str]:
    """Verdict and next command, then every finding. ``width``: of the terminal, None for lines of any length."""
    yield from textwrap.wrap(report.verdict, width or len(report.verdict), break_on_hyphens=False)
    said = f"Next: {report.next}"
    yield from textwrap.wrap(
        said, width or len(said), subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )
    yield ""
    indent = " " * 24
    for one in report.findings:
        head = f"{one.mark:6}{one.subject:17} "
        yield from textwrap.wrap(
            head + one.found, width or len(head + one.found), subsequent_indent=indent, break_on_hyphens=False,
            break_long_words=False,
        )  # fmt: skip
        if one.fix:
            yield f"{indent}-> {one.fix}"
