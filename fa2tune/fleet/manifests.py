"""Whether every rank and node makes the same decisions: a manifest of everything that decides which row serves, and its hash.

Equal hashes mean equal decisions on equal GPUs. Nothing here talks to another process: a program compares hashes itself, once,
at start-up. A lock file is a manifest written to a file. It proves that files are the same, not where they come from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fa2tune
from fa2tune.compiling import binaries
from fa2tune.rows import lookup, reader, record
from fa2tune.rows.reader import Layer
from fa2tune.text import MOST_CHARACTERS, plain

FORMAT = 1
MAX_FILE = 1 << 20  #: bytes
DIGITS = 64  #: of a digest, hexadecimal


class ManifestError(ValueError):
    """A file that is not a lock file. The message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(plain(reason, 10 * MOST_CHARACTERS))  # it may quote the file


@dataclass(frozen=True)
class Part:
    """One cache file that serves."""

    layer: str  #: "user", "fleet" or "shipped"
    file: str  #: its name, without folders, which differ between nodes
    rows: int
    digest: str  #: of the content of its rows, see ``record.digest``


@dataclass(frozen=True)
class KernelFile:
    """One file of binaries that a process may load kernels from."""

    file: str  #: its name, without folders
    binaries: int
    digest: str  #: sha256 of its header, which holds those of all its binaries


@dataclass(frozen=True)
class Manifest:
    """Everything that decides which row serves a call, except the GPU and the call itself."""

    layers: tuple[Part, ...]  #: strongest first
    fa2tune: str  #: version
    triton: str  #: version
    #: version of the NVIDIA driver, if it decides between rows of a file; else "", also where there is none
    driver: str
    kernels: Mapping[str, str] = field(default_factory=dict)  #: kernel -> hash of its source
    binaries: tuple[KernelFile, ...] = ()  #: in lookup order

    @property
    def hash(self) -> str:
        """64 hexadecimal digits, of the content of the files, not of their names."""
        about = self._fields()
        about["layers"] = [[part.layer, part.digest] for part in self.layers]
        if self.binaries:
            about["binaries"] = [part.digest for part in self.binaries]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def _fields(self) -> dict[str, Any]:
        return {
            "fa2tune": self.fa2tune,
            "triton": self.triton,
            "driver": self.driver,
            "kernels": dict(self.kernels),
            "layers": [dict(vars(part)) for part in self.layers],
            **({"binaries": [dict(vars(part)) for part in self.binaries]} if self.binaries else {}),
        }

    def to_json(self) -> str:
        """The text of a lock file; ``parse`` reads it."""
        return json.dumps({"manifest": FORMAT, "hash": self.hash, **self._fields()}, indent=1) + "\n"


def manifest() -> Manifest:
    """What this process serves from: the cache files as it read them, and the toolchain it compiles with.

    Compare its ``hash`` across the ranks of a job, once, before the first step::

        hashes = [None] * dist.get_world_size()
        dist.all_gather_object(hashes, fa2tune.manifest().hash)
        assert len(set(hashes)) == 1, hashes

    Files that change later do not change what the process serves, nor its manifest."""
    from fa2tune.calling import choosing

    return of(choosing.layers(), choosing.toolchain(), trusted_binaries())


def trusted_binaries() -> list[KernelFile]:
    """The files of binaries that this process may load from."""
    return [_kernels(file) for _, file in binaries.trusted().files]


def _kernels(file: binaries.File) -> KernelFile:
    return KernelFile(file.path.name, len(file.entries), file.digest)


def of(layers: Iterable[Layer], toolchain: lookup.Toolchain, kernels: Iterable[KernelFile] = ()) -> Manifest:
    """The manifest of these layers, strongest first, under a toolchain, with these files of binaries."""
    layers = list(layers)
    driver = toolchain.driver if any(lookup.driver_decides(layer.rows) for layer in layers) else ""
    parts = [Part(layer.name, layer.path.name, len(layer.rows), record.digest(layer.rows, DIGITS)) for layer in layers]
    return Manifest(
        tuple(parts), fa2tune.__version__, toolchain.triton, driver, dict(toolchain.kernel_hashes), tuple(kernels)
    )


def shipment(files: Sequence[Path], toolchain: lookup.Toolchain) -> Manifest:
    """The manifest of a node that has ``files`` as its fleet layers and no user's file, with the files of binaries beside them,
    which the node names in FA2TUNE_KERNELS in this order. CacheFileError, BinariesError."""
    fleet = [Layer("fleet", path, reader.read(path)) for path in files]
    shipped = [Layer("shipped", path, reader.read(path)) for path in reader.shipped_paths()]
    kernels = [path for path in map(binaries.companion, files) if path.exists()]
    kernels += [place.path for place in binaries.shipped_files()]
    return of([*fleet, *shipped], toolchain, [_kernels(binaries.File(path, believed=True)) for path in kernels])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= record.MAX_TEXT and value.isprintable()


def parse(text: str) -> Manifest:
    """The manifest that ``to_json`` wrote. ManifestError: it is not one, or it was changed."""
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"is not JSON: {error}") from error
    if not isinstance(held, dict) or held.get("manifest") != FORMAT:
        raise ManifestError(f"is not a lock file of format {FORMAT}")
    kernels, layers = held.get("kernels"), held.get("layers")
    texts = [held.get(name) for name in ("fa2tune", "triton", "driver", "hash")]
    if not isinstance(kernels, dict) or not all(map(_is_text, [*texts, *kernels, *kernels.values()])):
        raise ManifestError("its versions and hashes must be text")
    if not isinstance(layers, list):
        raise ManifestError("its layers must be a list")
    parts = []
    for part in layers:
        if not isinstance(part, dict) or set(part) != {"layer", "file", "rows", "digest"}:
            raise ManifestError("each of its layers must have layer, file, rows and digest")
        if not all(_is_text(part[name]) for name in ("layer", "file", "digest")) or type(part["rows"]) is not int:
            raise ManifestError("layer, file and digest must be text, rows an integer")
        parts.append(Part(**part))
    kept = held.get("binaries", [])
    if not isinstance(kept, list):
        raise ManifestError("its binaries must be a list")
    files = []
    for part in kept:
        if not isinstance(part, dict) or set(part) != {"file", "binaries", "digest"}:
            raise ManifestError("each of its files of binaries must have file, binaries and digest")
        if not all(_is_text(part[name]) for name in ("file", "digest")) or type(part["binaries"]) is not int:
            raise ManifestError("file and digest must be text, binaries an integer")
        files.append(KernelFile(**part))
    found = Manifest(tuple(parts), held["fa2tune"], held["triton"], held["driver"], kernels, tuple(files))
    if found.hash != held["hash"]:
        raise ManifestError("its hash does not match its content: it was changed after it was written")
    return found


def read(path: Path) -> Manifest:
    """The manifest in a lock file; ManifestError names it."""
    try:
        if not path.is_file():  # a pipe would keep its reader waiting
            raise ManifestError("is not a regular file" if path.exists() else "no such file")
        if path.stat().st_size > MAX_FILE:
            raise ManifestError(f"is larger than {MAX_FILE >> 20} MiB")
        return parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ManifestError(f"lock file {path}: is not text; `fa2tune cache lock` writes lock files") from error
    except OSError as error:
        raise ManifestError(f"lock file {path}: {error.strerror or error}") from error
    except ManifestError as error:
        raise ManifestError(f"lock file {path}: {error}") from error


def differences(locked: Manifest, here: Manifest) -> list[str]:
    """How this machine differs from a lock file, one line for each difference. The driver is compared only where both name
    one. A lock file names none if it was written without a GPU, or for given files; this machine none if no driver decides
    here."""
    found = []
    theirs, ours = [[(part.layer, part.digest) for part in m.layers] for m in (locked, here)]
    for part in locked.layers:
        if (part.layer, part.digest) in ours:
            continue
        namesake = next((p for p in here.layers if (p.layer, p.file) == (part.layer, part.file)), None)
        what = f"{part.layer} layer {part.file} ({part.rows} rows, digest {part.digest[:16]})"
        found.append(
            f"{what}: holds other rows here ({namesake.rows} rows, digest {namesake.digest[:16]})"
            if namesake
            else f"{what}: is not served here"
        )
    names = {(part.layer, part.file) for part in locked.layers}
    for part in here.layers:
        if (part.layer, part.digest) not in theirs and (part.layer, part.file) not in names:
            found.append(
                f"{part.layer} layer {part.file} ({part.rows} rows, digest {part.digest[:16]}): not in the lock file"
            )
    if not found and theirs != ours:
        found.append("the layers are in another order")
    expected, have = [{part.digest for part in m.binaries} for m in (locked, here)]
    for one in locked.binaries:
        if one.digest not in have:
            found.append(f"binaries {one.file} ({one.binaries}, sha256 {one.digest[:16]}): not loaded from here")
    for one in here.binaries:
        if one.digest not in expected:
            found.append(f"binaries {one.file} ({one.binaries}, sha256 {one.digest[:16]}): not in the lock file")
    for name in ("fa2tune", "triton"):
        then, now = getattr(locked, name), getattr(here, name)
        if then != now:
            found.append(f"{name}: locked with {then or 'none'}, here {now or 'none'}")
    if locked.driver and here.driver and locked.driver != here.driver:
        found.append(
            f"driver: locked with {locked.driver}, here {here.driver}; a file holds rows of one key that were timed under "
            "different drivers, so other ones serve here"
        )
    for kernel in sorted(locked.kernels.keys() | here.kernels.keys()):
        then, now = locked.kernels.get(kernel, "none"), here.kernels.get(kernel, "none")
        if then != now:
            found.append(f"source of kernel {kernel}: locked with {then}, here {now}")
    return found
