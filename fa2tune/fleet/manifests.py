"""Whether every rank and node would serve alike: a manifest of all that decides which row serves, and its hash.

Equal hashes mean equal decisions on equal GPUs. Nothing here talks to another process: a program compares hashes itself, once,
at start-up. A manifest proves that files are the same, not who made them.
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

FORMAT = 1
MAX_FILE = 1 << 20  #: bytes
DIGITS = 64  #: of a digest, hexadecimal


class ManifestError(ValueError):
    """A file that is no manifest. The message says why."""


@dataclass(frozen=True)
class Part:
    """One cache file that serves."""

    layer: str  #: "user", "fleet" or "shipped"
    file: str  #: its name, without folders: nodes keep their copies where they like
    rows: int
    digest: str  #: of what its rows say, see ``record.digest``


@dataclass(frozen=True)
class Kernels:
    """One file of binaries that a process may load kernels from."""

    file: str  #: its name, without folders
    binaries: int
    digest: str  #: sha256 of its header, which holds those of all its binaries


@dataclass(frozen=True)
class Manifest:
    """All that decides which row serves a call, beside the GPU and the call itself."""

    layers: tuple[Part, ...]  #: strongest first
    fa2tune: str  #: version
    triton: str  #: version
    driver: str  #: version of the NVIDIA driver; "" where there is none
    kernels: Mapping[str, str] = field(default_factory=dict)  #: kernel -> hash of its source
    binaries: tuple[Kernels, ...] = ()  #: in the order in which they are asked

    @property
    def hash(self) -> str:
        """64 hexadecimal digits. File names do not count, what is in the files does."""
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
        """For a file that is shipped beside the cache files; ``parse`` reads it."""
        return json.dumps({"manifest": FORMAT, "hash": self.hash, **self._fields()}, indent=1) + "\n"


def manifest() -> Manifest:
    """What this process serves from: the cache files as it read them, and the toolchain it compiles with.

    Compare its ``hash`` across the ranks of a job, once, before the first step::

        hashes = [None] * dist.get_world_size()
        dist.all_gather_object(hashes, fa2tune.manifest().hash)
        assert len(set(hashes)) == 1, hashes

    Files that change later do not change what the process serves, nor its manifest."""
    from fa2tune.calling import dispatch

    return of(dispatch.layers(), dispatch.toolchain(), trusted_binaries())


def trusted_binaries() -> list[Kernels]:
    """The files of binaries that this process may load from."""
    return [_kernels(file) for _, file in binaries.trusted().files]


def _kernels(file: binaries.File) -> Kernels:
    return Kernels(file.path.name, len(file.entries), file.digest)


def of(layers: Iterable[Layer], toolchain: lookup.Toolchain, kernels: Iterable[Kernels] = ()) -> Manifest:
    """The manifest of these layers, strongest first, under a toolchain, with these files of binaries."""
    parts = [Part(layer.name, layer.path.name, len(layer.rows), record.digest(layer.rows, DIGITS)) for layer in layers]
    return Manifest(
        tuple(parts), fa2tune.__version__, toolchain.triton, toolchain.driver, dict(toolchain.kernel_hashes),
        tuple(kernels),
    )  # fmt: skip


def shipment(files: Sequence[Path], toolchain: lookup.Toolchain) -> Manifest:
    """What a node serves from that reads ``files`` as its fleet layers and has no file of its own; with the files of binaries
    that lie beside them, which the node is to name in FA2TUNE_KERNELS in this order. CacheFileError, BinariesError."""
    fleet = [Layer("fleet", path, reader.read(path)) for path in files]
    shipped = [Layer("shipped", path, reader.read(path)) for path in reader.shipped_paths()]
    beside = [path for path in map(binaries.companion, (layer.path for layer in (*fleet, *shipped))) if path.exists()]
    return of([*fleet, *shipped], toolchain, [_kernels(binaries.File(path, believed=True)) for path in beside])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= record.MAX_TEXT and value.isprintable()


def parse(text: str) -> Manifest:
    """The manifest that ``to_json`` wrote. ManifestError: it is none, or somebody has changed it."""
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"is no JSON: {error}"[:200]) from error
    if not isinstance(held, dict) or held.get("manifest") != FORMAT:
        raise ManifestError(f"is no manifest of format {FORMAT}")
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
        files.append(Kernels(**part))
    found = Manifest(tuple(parts), held["fa2tune"], held["triton"], held["driver"], kernels, tuple(files))
    if found.hash != held["hash"]:
        raise ManifestError("its hash does not fit what it says: it was changed after it was signed")
    return found


def read(path: Path) -> Manifest:
    """The manifest in a file; ManifestError names it."""
    try:
        if not path.is_file():
            raise ManifestError("no such file")
        if path.stat().st_size > MAX_FILE:
            raise ManifestError(f"is larger than {MAX_FILE >> 20} MiB")
        return parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ManifestError(f"manifest {path}: is no text; `fa2tune cache sign` writes manifests") from error
    except OSError as error:
        raise ManifestError(f"manifest {path}: {error.strerror or error}") from error
    except ManifestError as error:
        raise ManifestError(f"manifest {path}: {error}") from error


def differences(signed: Manifest, here: Manifest) -> list[str]:
    """In what this place differs from what was signed, one line each; none: it serves as it should. A driver is compared
    only where the manifest names one: who signed it may have had no GPU."""
    found = []
    theirs, ours = [[(part.layer, part.digest) for part in m.layers] for m in (signed, here)]
    for part in signed.layers:
        if (part.layer, part.digest) in ours:
            continue
        namesake = next((p for p in here.layers if (p.layer, p.file) == (part.layer, part.file)), None)
        what = f"{part.layer} layer {part.file} ({part.rows} rows, digest {part.digest[:16]})"
        found.append(
            f"{what}: holds other rows here ({namesake.rows} rows, digest {namesake.digest[:16]})"
            if namesake
            else f"{what}: does not serve here"
        )
    names = {(part.layer, part.file) for part in signed.layers}
    for part in here.layers:
        if (part.layer, part.digest) not in theirs and (part.layer, part.file) not in names:
            found.append(f"{part.layer} layer {part.file} ({part.rows} rows, digest {part.digest[:16]}): not signed")
    if not found and theirs != ours:
        found.append("the layers stand in another order")
    signed_for, have = [{part.digest for part in m.binaries} for m in (signed, here)]
    for one in signed.binaries:
        if one.digest not in have:
            found.append(f"binaries {one.file} ({one.binaries}, sha256 {one.digest[:16]}): not loaded from here")
    for one in here.binaries:
        if one.digest not in signed_for:
            found.append(f"binaries {one.file} ({one.binaries}, sha256 {one.digest[:16]}): not signed")
    for name in ("fa2tune", "triton", "driver"):
        then, now = getattr(signed, name), getattr(here, name)
        if then != now and not (name == "driver" and not then):
            found.append(f"{name}: signed with {then or 'none'}, here {now or 'none'}")
    for kernel in sorted(signed.kernels.keys() | here.kernels.keys()):
        then, now = signed.kernels.get(kernel, "none"), here.kernels.get(kernel, "none")
        if then != now:
            found.append(f"source of kernel {kernel}: signed with {then}, here {now}")
    return found
