"""What ``fa2tune doctor`` looks at: packages, tools, GPUs and their rows, cache files, files of binaries, settings. Imports no
torch."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa2tune import versions
from fa2tune.text import plain

if TYPE_CHECKING:
    from fa2tune.compiling.binaries import FilePlace
    from fa2tune.devices import Device, FoundDevices
    from fa2tune.measuring.clock_monitor import Reading
    from fa2tune.rows.lookup import Toolchain
    from fa2tune.rows.reader import Layer

#: package -> lowest version that works; a test holds this to pyproject.toml
PACKAGES = {**versions.REQUIRED, "optuna": (0,), "sqlalchemy": (2,)}
#: Of them, those that a call needs; the others are for tuning and for writing cache files.
FOR_CALLS = ("torch", "triton")
#: Where there is a file of binaries.
WITHOUT_TRITON = "calls whose machine code is in a file of binaries run without it, others and fa2tune tune do not"


@dataclass(frozen=True)
class Check:
    """One line of the report. ``fix`` is set where something is wrong; ``needed``: attention() cannot run here until it is
    fixed, or something that was configured cannot be used."""

    subject: str
    found: str
    fix: str = ""
    needed: bool = True
    #: of a file that attention() runs without: which, and why it is skipped, for the verdict
    skipped: str = ""

    @property
    def mark(self) -> str:
        return "ok" if not self.fix else "FAIL" if self.needed else "note"

    def as_dict(self) -> dict[str, Any]:
        return {"mark": self.mark, **asdict(self)}


def packages() -> Iterator[Check]:
    python = (3, 11)
    yield Check(
        "python", platform.python_version(), "" if sys.version_info >= python else "install Python 3.11 or newer"
    )
    for package, lowest in PACKAGES.items():
        wanted = f"pip install --upgrade '{package}>={'.'.join(map(str, lowest))}'"
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield _package(package, "not installed", wanted)
            continue
        numbers = tuple(int(n) for n in re.findall(r"\d+", version)[: len(lowest)])
        yield _package(package, version, "" if numbers >= lowest else wanted)


def _package(package: str, found: str, fix: str) -> Check:
    if fix and package == "triton" and _machine_code():
        return Check(package, found, f"{fix}; {WITHOUT_TRITON}", needed=False)
    if package in FOR_CALLS or not fix:
        return Check(package, found, fix)
    return Check(package, found, f"{fix}; attention() runs without it, fa2tune tune does not", needed=False)


def _machine_code() -> bool:
    from fa2tune.compiling import binaries

    return bool(binaries.trusted().files)


def tools() -> Iterator[Check]:
    """The programs that compile for a GPU and read its machine code. They come with the Triton wheel. A call needs no
    disassembler, but runs code unchecked without."""
    from fa2tune.compiling import compiler

    try:
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "triton":
            return  # ``packages`` has said so
        yield _broken_triton(error)
        return
    except Exception as error:  # a broken Triton raises what it likes
        yield _broken_triton(error)
        return

    found = []
    for name in ("ptxas", "cuobjdump", "nvdisasm"):
        try:
            compiler.tool(name)
            found.append(name)
        except FileNotFoundError as error:
            fix = "pip install --force-reinstall --no-deps triton"
            if name == "nvdisasm":
                fix += "; without it Hopper kernels are launched without a check of their machine code, and fa2tune tune fails"
            yield Check(name, str(error), fix, needed=name != "nvdisasm")
    if found:
        yield Check("CUDA tools", f"{', '.join(found)}")


def _broken_triton(error: Exception) -> Check:
    return _package("triton", f"does not import: {plain(error)}", "pip install --force-reinstall triton")


@dataclass(frozen=True)
class TorchBuild:
    """What torch was built for, read from its version.py."""

    cuda: str = ""  #: "13.0"; "" for none
    hip: str = ""


def torch_build() -> TorchBuild | None:
    """None: version.py cannot be read."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return None
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    values = dict(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE))
    return TorchBuild(**values)


def torch_check(seen: FoundDevices) -> Check | None:
    """Why torch cannot use the driver that is here, or None."""
    build = torch_build()
    if build is None or not seen.cuda:
        return None
    if build.hip:
        return Check(
            "torch build", f"for ROCm {build.hip}", "install the CUDA build of torch: fa2tune needs an NVIDIA GPU"
        )
    if not build.cuda:
        return Check("torch build", "without CUDA", "install the CUDA build of torch")
    if int(build.cuda.split(".")[0]) > int(seen.cuda.split(".")[0]):
        fix = "update the driver, or install a torch for an older CUDA"
        return Check("torch build", f"for CUDA {build.cuda}; the driver supports CUDA {seen.cuda} at most", fix)
    return Check("torch build", f"for CUDA {build.cuda}; the driver supports CUDA {seen.cuda}")


def gpus(seen: FoundDevices) -> Iterator[Check]:
    """One line a GPU, one on its clock monitor, and the driver."""
    from fa2tune import devices
    from fa2tune.compiling import fingerprint
    from fa2tune.gpus import MIN_ARCH
    from fa2tune.measuring.clock_monitor import ClockMonitor

    if (about := torch_check(seen)) is not None:
        yield about
    for device in seen.devices:
        found = f"{plain(device.name)}, {device.sm_count} SMs, sm_{device.arch}: {plain(device.gpu.note or device.gpu.name)}"
        fix = "" if device.arch >= MIN_ARCH else "fa2tune needs compute capability 8.0 (A100) or newer"
        yield Check(f"gpu {device.number}", found, fix)
        monitor = ClockMonitor(devices.bus_id(device.number))
        fix = (
            "pip install nvidia-ml-py; without it tuning works, and rows do not record throttling"
            if monitor.why
            else ""
        )
        clock = plain(monitor.why) or f"by NVML: {_clock(monitor.read())}"
        yield Check(f"gpu {device.number} clock", clock, fix, needed=False)
    if seen.cuda:
        yield Check("driver", fingerprint.driver_version() or "version unknown")


def _clock(reading: Reading) -> str:
    if reading.reasons is None:
        return f"{reading.clock_mhz} MHz, throttling unknown"
    return f"{reading.clock_mhz} MHz, {'throttled now' if reading.throttled else 'not throttled'}"


@dataclass(frozen=True)
class RowClass:
    """The rows of one class of evidence that can serve a GPU."""

    evidence: str  #: one of ``rows.row.OBTAINED``
    on: str  #: one of lookup.GPU_STEPS: of which GPU
    filed_under: tuple[str, ...]  #: names of these GPUs
    rows: int
    fresh: int  #: of the rows
    keys: int  #: distinct tuning keys
    fresh_keys: int  #: of which a row is fresh
    stale: tuple[str, ...]  #: what the rows were made with that differs today, most frequent first
    stale_files: tuple[Layer, ...]  #: files that hold rows of keys without a fresh one

    def words(self, count: int | None = None) -> str:
        """Half a sentence. ``count``: None for all of the rows."""
        count = self.rows if count is None else count
        names = ", ".join(plain(name) for name in self.filed_under)
        where = {"exact": "on this GPU", "same silicon": f"on {names} (same silicon)"}.get(
            self.on, f"on {names} (same architecture)"
        )
        if self.evidence == "sibling":
            where = f"on other GPUs of the same silicon, for {names}"
        if self.evidence == "ported":
            where = f"as code of this architecture on another one, for {names}"
        if self.evidence == "predicted":
            where = "for this GPU, not measured" if self.on == "exact" else f"for {names}, not measured"
        how = "predicted" if self.evidence == "predicted" else "measured"
        return f"{count} row{'s' * (count != 1)} {how} {where}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "stale_files": [str(layer.path) for layer in self.stale_files]}


def rows_for(device: Device, layers: Sequence[Layer], toolchain: Toolchain) -> list[RowClass]:
    """What the cache files hold for a GPU, in the order in which the lookup prefers it."""
    from fa2tune.rows import lookup

    gpu = device.gpu
    classes: dict[tuple[str, str], list[tuple[Any, Layer]]] = {}
    for layer in layers:
        for row in layer.rows:
            if row.key.arch == gpu.arch and not row.barred:
                asked = row.key.with_(gpu=gpu.name, sm_count=gpu.sm_count)
                on = lookup.gpu_step(asked, gpu.silicon, row.key)
                classes.setdefault((on, row.obtained), []).append((row, layer))
    found = []
    for standing in lookup.STANDING:
        held = classes.get(standing, [])
        if held:
            found.append(_class(standing, held, toolchain))
    return found


def _class(standing: tuple[str, str], held: Sequence[tuple[Any, Layer]], toolchain: Toolchain) -> RowClass:
    on, evidence = standing
    stale = [(row, layer, parts) for row, layer in held if (parts := toolchain.stale(row))]
    old = {id(row) for row, _, _ in stale}
    keys = {row.key for row, _ in held}
    fresh_keys = {row.key for row, _ in held if id(row) not in old}
    waiting = [(layer, parts) for row, layer, parts in stale if row.key not in fresh_keys]
    reasons = Counter(_short(part) for _, parts in waiting for part in parts)
    files = {layer.path: layer for layer, _ in waiting}
    return RowClass(
        evidence, on, tuple(sorted({row.key.gpu for row, _ in held})), len(held), len(held) - len(old), len(keys),
        len(fresh_keys), tuple(reason for reason, _ in reasons.most_common()), tuple(files.values()),
    )  # fmt: skip


def _short(part: str) -> str:
    """A reason why a row is stale, without hashes."""
    return "another kernel source" if part.startswith("kernel source") else plain(part)


class _Skipped(logging.Handler):
    """Collects the reader's warnings: one for each file that it skips."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def _skipped(record: logging.LogRecord) -> Check:
    """A file that serves no call, and what to do about it."""
    from fa2tune.rows.reader import FLEET_VARIABLE, CacheFileError

    error = record.args[-1] if isinstance(record.args, tuple) and record.args else None
    if not isinstance(error, CacheFileError):  # no home directory to look in
        said = record.getMessage()
        return Check("cache", said, f"set HOME or XDG_CACHE_HOME, or correct {FLEET_VARIABLE}", skipped=said)
    layer = record.getMessage().partition(" ")[0]
    path, missing = plain(error.path, None), error.reason == "no such file"
    if missing:
        what = "missing"
    elif "upgrade fa2tune" in error.reason:
        what = "too new for this fa2tune"
    elif isinstance(error.__cause__, OSError):
        what = "not readable"
    else:
        what = "damaged"
    fix = {
        "user": f"mv {shlex.quote(path)} {shlex.quote(path + '.bad')} (or restore it from a copy)",
        "fleet": f"restore {path} from a copy, or remove it from {FLEET_VARIABLE}",
    }.get(layer, f"install fa2tune again: {path} came with it")
    return Check(f"{layer} cache", f"{path}: {error.reason}", fix, skipped=f"{layer} file {path} is {what} and skipped")


def cache_files() -> tuple[list[Layer], list[Check]]:
    """The cache files that serve, strongest first; a line for each, and for each that cannot be read."""
    from fa2tune.rows import reader

    layers, skipped = list[reader.Layer](), _Skipped()
    reader.logger.addHandler(skipped)
    try:
        layers = reader.layers()
        found = [Check(f"{one.name} cache", f"{plain(one.path, None)}, {len(list(one.rows))} rows") for one in layers]
    finally:
        reader.logger.removeHandler(skipped)
    if not layers:
        found.append(Check("cache", "no file: every call takes the default config", "fa2tune tune", needed=False))
    return layers, [*found, *map(_skipped, skipped.records)]


def _restored(place: FilePlace, otherwise: str) -> str:
    """What makes a file of binaries whole."""
    return "install fa2tune again, which it came with" if place.layer == "shipped" else otherwise


def binaries_files() -> Iterator[Check]:
    """The files of binaries: which are trusted, which not and why, what is in them, and whether it is intact."""
    from fa2tune.compiling import binaries, fingerprint, overrules

    held = binaries.trusted()
    then = "compile" if fingerprint.triton_version() else "are an error, as there is no Triton to compile"
    for place, file in held.files:
        subject, path = f"{place.layer} kernels", plain(file.path, None)
        if damaged := len(file.damaged()):
            fix = _restored(place, "fa2tune cache precompile, or ship the file again")
            found = f"{path}, {len(file.entries)} binaries, {damaged} damaged"
            yield Check(subject, found, f"{fix}; until then calls {then} those kernels")
            continue
        made = Counter(
            f"sm_{entry.about.get('arch')} by Triton {entry.about.get('triton')}" for entry in file.entries.values()
        )
        found = f"{path}, {len(file.entries)} binaries: " + ", ".join(
            f"{n} for {plain(for_)}" for for_, n in sorted(made.items())
        )
        other = file.sources and fingerprint.source_digest() not in file.sources
        yield Check(
            subject, f"{found}; other kernel sources than here" if other else found,
            f"fa2tune cache precompile; until then calls whose kernels differ {then}" if other else "", needed=False,
        )  # fmt: skip
    for place, why in held.refused:
        missing = place.layer == "named" and not os.path.lexists(place.path)  # as a cache file that FA2TUNE_CACHE names
        fix = f"ship that file, or remove it from {binaries.VARIABLE}"
        fix = fix if missing else _restored(place, "fix that, or delete the file")
        yield Check(
            f"{place.layer} kernels", f"{plain(place.path, None)}: {'no such file' if missing else plain(why)}",
            f"{fix}; until then calls {then}", needed=missing,
        )  # fmt: skip
    if not held.files and not held.refused:
        off = os.environ.get(binaries.VARIABLE) == binaries.OFF
        yield Check("kernels", f"off, by {binaries.VARIABLE}" if off else "no file of binaries: first calls compile")
    if held.files and (overruled := overrules.found()) is not None:
        yield Check("kernels", f"not used: {plain(overruled)}")


def settings() -> Iterator[Check]:
    """Variables of the environment with a value that a call would refuse."""
    from fa2tune.calling.settings import CAPTURE_MISS, RAISE, TAKE_DEFAULT

    setting, allowed = os.environ.get(CAPTURE_MISS), (RAISE, TAKE_DEFAULT)
    if setting is not None and setting not in allowed:
        fix = f"set it to {' or '.join(allowed)}, or remove it from the environment"
        yield Check(CAPTURE_MISS, plain(repr(setting)), fix)
