"""Whether a kernel need not be compiled: (variant, specialization, config, arch) -> its image, out of a trusted file.

A binary fits where everything that Triton would compile it from is the same: the kernel's source, its signature, constants,
assumptions on its arguments, options, and the architecture. All of it is hashed. The Triton that compiled it need not be the
one that is installed, nor need there be one: the driver runs it. A row's times hold for the machine code that was measured, so
a call that a row serves takes only what the row's Triton compiled.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import Any

from fa2tune import versions
from fa2tune.compiling import binaries, compiler, fingerprint, overrules, trimmed
from fa2tune.compiling.binaries import BinariesError, Entry
from fa2tune.compiling.fingerprint import triton_version
from fa2tune.launching.image import Image, MapFormat
from fa2tune.logs import warn_once
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import Variant
from fa2tune.text import plain

log = logging.getLogger("fa2tune")

#: The folder that an installer leaves beside Triton's own, by which name it ever comes.
_INSTALLED = re.compile(r"(?:pytorch[-_])?triton(?:[-_]nightly)?-([^-]+)\.dist-info")


@cache
def triton_build() -> str:
    """Triton's version with what tells its builds apart: PyPI's 3.6.0 and those of NGC and PyTorch (3.6.0+git...) call
    themselves 3.6.0, and compile differently. By the name of a folder, as importlib.metadata may cost 20 ms. "": nothing
    vouches for this build, say a checkout that is not installed."""
    version = triton_version()
    if "+" in version:
        return version
    found = importlib.util.find_spec("triton")
    triton_folders = [os.path.dirname(os.path.dirname(found.origin))] if found is not None and found.origin else []
    for folder in (*triton_folders, *sys.path):  # an editable install leaves its own elsewhere
        names = list[str]()
        with suppress(OSError, TypeError):  # as Python's own importer passes by what it cannot read
            names = os.listdir(folder)
        if "triton" in names and folder not in triton_folders:
            continue  # speaks for that one
        builds = {match[1] for match in map(_INSTALLED.fullmatch, names) if match}
        builds = {build for build in builds if re.fullmatch(rf"{re.escape(version)}(\.(post|dev)\d+)?(\+.*)?", build)}
        if builds:
            return " or ".join(sorted(builds))
    return ""


def about(variant: Variant, spec: Specialization, config: Config, arch: int) -> dict[str, Any]:
    """What a binary is made from, for people. ``config``: a ``compiler.binary_config``."""
    return {
        "triton": triton_build(), "kernel": variant.short_name,
        "source": fingerprint.kernel_hash(variant, spec.mask, spec.score), "arch": arch, "spec": asdict(spec),
        "config": dict(config),
    }  # fmt: skip


def code_of(variant: Variant, spec: Specialization, config: Config, arch: int) -> str:
    """sha256 of all that a binary is made from, 64 hexadecimal digits."""
    made_from = [
        variant.short_name, fingerprint.kernel_hash(variant, spec.mask, spec.score), arch,
        compiler.signature(variant, spec, config, layouts=False), repr(compiler.constexprs(variant, spec, config)),
        repr(compiler.attributes(variant, spec, config)), repr(sorted(compiler.options(config).items())),
        *filter(None, [trimmed.suffix(compiler.used(variant, spec, config))]),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def file_key(code: str, build: str) -> str:
    """What a binary is filed under: ``code_of`` it, and the build of Triton that compiled it; 64 hexadecimal digits."""
    return hashlib.sha256(f"{code} {build}".encode()).hexdigest()


def launch_of(image: Image) -> dict[str, Any]:
    """All of an image but its code, for a file."""
    return {name: value for name, value in asdict(image).items() if name != "cubin"}


def stored_image(launch: Mapping[str, Any], cubin: bytes) -> Image:
    """BinariesError: this is not what ``launch_of`` wrote."""
    try:
        maps = tuple(MapFormat(**{**one, "block": tuple(one["block"])}) for one in launch["maps"])
        image = Image(**{**launch, "maps": maps}, cubin=cubin)
    except (KeyError, TypeError) as error:
        raise BinariesError(f"is damaged: {error}") from error
    counts = [(image.shared, 0, 1 << 20), (image.warps, 1, 64), (image.ctas, 1, 16)]
    for one in maps:
        counts += [(one.swizzle, 0, 8), (one.element_bytes, 1, 16), (one.element_type, 0, 16), (len(one.block), 1, 5)]
        counts += [(side, 1, 256) for side in one.block]
    flags = (image.cooperative, image.programmatic)
    if (
        not isinstance(image.name, str)
        or not image.name.isidentifier()
        or not all(type(flag) is bool for flag in flags)
    ):
        raise BinariesError("is damaged: the launch parameters are not valid")
    if not all(type(count) is int and low <= count <= high for count, low, high in counts):
        raise BinariesError("is damaged: the launch parameters are out of bounds")
    return image


#: Images that the driver of this process did not take -> why.
_refused: dict[Image, str] = {}


def refuse(image: Image, why: str) -> None:
    """The driver does not take an image: ``find`` is to pass it by, and to say so."""
    _refused[image] = why


def find(
    variant: Variant, spec: Specialization, config: Config, arch: int, measured: str = ""
) -> tuple[Image | None, str]:
    """(image, the file it comes from), or (None, why there is none). ``config``: a ``compiler.binary_config``.

    ``measured``: the version of Triton that compiled what a row was measured with. Its code is taken, or that of the Triton
    here, which is what would be compiled otherwise. Where no row says so (""), or no Triton is installed, any code is taken."""
    held = binaries.trusted()
    if not held.files:
        return None, _no_files(held)
    if (why := overrules.found()) is not None:
        warn_once(f"precompiled binaries are not used: {why}")
        return None, why
    damaged, others = [], set[str]()
    for place, file, entry in _ordered(held, code_of(variant, spec, config, arch), measured):
        build = str(entry.about.get("triton"))
        if measured and triton_version() and not entry.compiled_by(measured) and build != triton_build():
            others.add(build)
            continue
        try:
            image = stored_image(entry.launch, file.cubin(entry))
            if image not in _refused:
                return image, str(place.path)
            damaged.append(f"{place.path}: {_refused[image]}")
        except BinariesError as error:
            log.warning("%s kernels: %s %s", place.layer, place.path, error)
            damaged.append(f"{place.path} {error}")
    if damaged:
        return None, "; ".join(damaged)
    if others:
        return (
            None,
            f"binary made with Triton {plain(' and '.join(sorted(others)))}, the row was measured with {measured}",
        )
    wanted = about(variant, spec, config, arch)
    near = [_difference(wanted, entry) for _, file in held.files for entry in file.entries.values()]
    fitting = sorted({why for why in near if why})
    return None, fitting[0] if fitting else "no file of binaries has this kernel, config and kind of tensors"


def _ordered(held: binaries.Trusted, code: str, measured: str) -> list[tuple[binaries.FilePlace, binaries.File, Entry]]:
    """The binaries of one code: first those that the row was measured with, then those that the Triton here compiled, then
    those of the newest one."""
    found = [(place, file, entry) for place, file in held.files for entry in file.by_code.get(code, ())]
    if len(found) < 2:
        return found
    build = triton_build()

    def order(one: tuple[binaries.FilePlace, binaries.File, Entry]) -> tuple[bool, bool, list[int]]:
        made = str(one[2].about.get("triton"))
        return not (measured and one[2].compiled_by(measured)), made != build, [-n for n in versions.numbers(made)]

    return sorted(found, key=order)


def _no_files(held: binaries.Trusted) -> str:
    if held.refused:
        return "; ".join(f"{place.path} {why}" for place, why in held.refused)
    return "there is no file of binaries"


def _difference(wanted: Mapping[str, Any], entry: Entry) -> str | None:
    """What keeps an entry for the same kernel, config and tensors from fitting; None: it is of others."""
    has = entry.about
    if any(has.get(name) != wanted[name] for name in ("kernel", "spec", "config")):
        return None
    names = {"arch": "compute capability", "source": "kernel source"}
    found = [
        f"{said} {has.get(name)}, here {wanted[name]}" for name, said in names.items() if has.get(name) != wanted[name]
    ]
    return "binary made with " + ", ".join(found) if found else "binary made with other options"
