"""Whether a kernel need not be compiled: (variant, specialization, config, arch) -> its image, out of a trusted file.

A binary fits where everything that Triton would compile it from is the same: Triton's build, the kernel's source, its
signature, constants, assumptions on its arguments, options, and the architecture. All of it is hashed into the key.
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

from fa2tune.compiling import binaries, compiler, fingerprint
from fa2tune.compiling.binaries import BinariesError, Entry
from fa2tune.compiling.fingerprint import triton_version
from fa2tune.launching.cuda import Image, MapFormat
from fa2tune.problem import Config, Specialization
from fa2tune.variant import Variant

log = logging.getLogger("fa2tune")

#: How the variables begin by which Triton and its LLVM compile otherwise.
TRITONS = (
    "TRITON_", "ALLOW_LHS_", "DISABLE_LLVM_OPT", "DISABLE_MMA_", "DISABLE_PTXAS_OPT", "LLVM_ENABLE_TIMING", "LLVM_IR_ENABLE_",
    "LLVM_PASS_PLUGIN_PATH", "MLIR_DUMP_PATH", "MLIR_ENABLE_", "NVPTX_ENABLE_", "PTXAS_OPTIONS", "USE_IR_LOC",
)  # fmt: skip
#: Of them, those that change no instruction, or name another assembler for the same program.
HARMLESS = {f"TRITON_{name}" for name in (
    "CACHE_DIR", "CACHE_MANAGER", "CUDACRT_PATH", "CUDART_PATH", "CUOBJDUMP_PATH", "CUPTI_INCLUDE_PATH", "CUPTI_LIB_PATH",
    "DISABLE_LINE_INFO", "DUMP_DIR", "HOME", "INTERPRET", "LIBCUDA_PATH", "LIBDEVICE_PATH", "NVDISASM_PATH", "OVERRIDE_DIR",
    "PRINT_AUTOTUNING", "PTXAS_BLACKWELL_PATH", "PTXAS_PATH", "REPRODUCER_PATH", "STORE_BINARY_ONLY",
)}  # fmt: skip


#: What a program may ask of Triton that changes what it compiles, by group.
KNOBS = {
    "compilation": ("always_compile", "override", "instrumentation_mode", "enable_asan"),
    "nvidia": ("disable_ptxas_opt", "ptxas_options"),
}


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
    beside = [os.path.dirname(os.path.dirname(found.origin))] if found is not None and found.origin else []
    for folder in (*beside, *sys.path):  # an editable install leaves its own elsewhere
        names = list[str]()
        with suppress(OSError, TypeError):  # as Python's own importer passes by what it cannot read
            names = os.listdir(folder)
        if "triton" in names and folder not in beside:
            continue  # speaks for that one
        builds = {match[1] for match in map(_INSTALLED.fullmatch, names) if match}
        builds = {build for build in builds if re.fullmatch(rf"{re.escape(version)}(\.(post|dev)\d+)?(\+.*)?", build)}
        if builds:
            return " or ".join(sorted(builds))
    return ""


def about(variant: Variant, spec: Specialization, config: Config, arch: int) -> dict[str, Any]:
    """What a binary is made from, for people. ``config``: a ``compiler.binary_config``."""
    return {
        "triton": triton_build(), "kernel": variant.name, "source": fingerprint.kernel_hash(variant), "arch": arch,
        "spec": asdict(spec), "config": dict(config),
    }  # fmt: skip


def key_of(variant: Variant, spec: Specialization, config: Config, arch: int) -> str:
    """sha256 of all that a binary is made from, 64 hexadecimal digits."""
    made_from = [
        triton_build(), variant.name, fingerprint.kernel_hash(variant), arch,
        compiler.signature(variant, spec, config, layouts=False), repr(compiler.constexprs(variant, spec, config)),
        repr(compiler.attributes(variant, spec, config)), repr(sorted(compiler.options(config).items())),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def launch_of(image: Image) -> dict[str, Any]:
    """All of an image but its code, for a file."""
    return {name: value for name, value in asdict(image).items() if name != "cubin"}


def image_of(launch: Mapping[str, Any], cubin: bytes) -> Image:
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
        raise BinariesError("is damaged: what a launch must know makes no sense")
    if not all(type(count) is int and low <= count <= high for count, low, high in counts):
        raise BinariesError("is damaged: what a launch must know is out of bounds")
    return image


def overruled() -> str | None:
    """Why binaries are left aside, where Triton is not known or asked for something out of the ordinary. By the names of its
    variables, since it may not be imported yet: one that is not known here counts."""
    if not triton_build():
        return "nothing says which build of Triton this is"
    named = [name for name in os.environ if name.startswith(TRITONS) and name not in HARMLESS]
    found = [f"{name} is set" for name in sorted(named) if os.environ[name] not in ("", "0")]
    knobs = sys.modules.get("triton.knobs")
    for group, names in KNOBS.items():
        for name in names:
            if getattr(getattr(knobs, group, None), name, None) and not found:
                found.append(f"Triton is asked for {name}")
    return ", ".join(found) or None


def find(variant: Variant, spec: Specialization, config: Config, arch: int) -> tuple[Image | None, str]:
    """(image, the file it comes from), or (None, why there is none). ``config``: a ``compiler.binary_config``."""
    held = binaries.trusted()
    if not held.files:
        return None, _no_files(held)
    if (why := overruled()) is not None:
        _warn_once(f"binaries are left aside: {why}")
        return None, why
    key, damaged = key_of(variant, spec, config, arch), []
    for place, file in held.files:
        entry = file.entries.get(key)
        if entry is not None:
            try:
                return image_of(entry.launch, file.cubin(entry)), str(place.path)
            except BinariesError as error:
                log.warning("%s kernels: %s %s", place.layer, place.path, error)
                damaged.append(f"{place.path} {error}")
    if damaged:
        return None, "; ".join(damaged)
    wanted = about(variant, spec, config, arch)
    near = [_difference(wanted, entry) for _, file in held.files for entry in file.entries.values()]
    fitting = sorted({why for why in near if why})
    return None, fitting[0] if fitting else "no file of binaries has this kernel, config and kind of tensors"


@cache
def _warn_once(message: str) -> None:
    log.warning("fa2tune: %s", message)


def _no_files(held: binaries.Trusted) -> str:
    if held.refused:
        return "; ".join(f"{place.path} {why}" for place, why in held.refused)
    return "there is no file of binaries"


def _difference(wanted: Mapping[str, Any], entry: Entry) -> str | None:
    """What keeps an entry for the same kernel, config and tensors from fitting; None: it is of others."""
    has = entry.about
    if any(has.get(name) != wanted[name] for name in ("kernel", "spec", "config")):
        return None
    names = {"triton": "Triton", "arch": "compute capability", "source": "kernel source"}
    found = [
        f"{said} {has.get(name)}, here {wanted[name]}" for name, said in names.items() if has.get(name) != wanted[name]
    ]
    return "binary made with " + ", ".join(found) if found else "binary made with other options"
