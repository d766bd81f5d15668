"""Triton compiles for any target, GPU present or not: (variant, specialization, config, arch) -> Binary.

Triton's own on-disk cache (``TRITON_CACHE_DIR``) holds the results, so a config compiled once is never compiled again, by
this process or another.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

from fa2tune import versions
from fa2tune.compiling import hostside, trimmed
from fa2tune.compiling.debuginfo import no_line_numbers
from fa2tune.compiling.fingerprint import triton_version
from fa2tune.compiling.registry import variant_named
from fa2tune.logs import warn_once
from fa2tune.spec.extent import DENSE, OFFSETS, PACKED, PACKED_ROWS_OF, RAGGED
from fa2tune.spec.maskfile import hooks_of, mask_named
from fa2tune.spec.problem import ITEMSIZE, Config, Specialization, padded_head_dim
from fa2tune.spec.scorefile import score_named
from fa2tune.spec.stated import PARSING
from fa2tune.spec.variant import (
    HOOKS,
    OPTIONAL_HOOKS,
    OPTIONS,
    POINTER,
    SCORE,
    SCORE_HOOKS,
    WINDOW,
    Used,
    Variant,
    implementation_of,
)

log = logging.getLogger("fa2tune")


class CompileError(RuntimeError):
    """Triton or ptxas refused a config. The message is the reason, on one line."""


class HostTrouble(RuntimeError):
    """ptxas was killed in the midst of a compile (by the OOM killer, say), which says nothing of the config."""


class NoTritonError(ImportError):
    """A kernel has to be compiled, and Triton cannot be imported, or is too old."""

    def __init__(self, cause: BaseException, kernel: str = "a kernel", why: str = "") -> None:
        super().__init__(
            f"fa2tune has no machine code of {kernel}{why and f' ({why})'}, and to compile it takes Triton, which cannot be "
            f"used here ({type(cause).__name__}: {str(cause)[:200]}). Install a Triton that works: pip install triton",
            name="triton",
        )
        self.cause = cause

    def of(self, kernel: str, spec: Specialization, arch: int, why: str) -> NoTritonError:
        """The same with the kernel that is wanted, and why no file of binaries brings it."""
        dims = f"{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"{spec.head_dim}/{spec.head_dim_v}"
        return NoTritonError(
            self.cause, f"{kernel} for {spec.dtype}, head dim {dims}, mask {spec.mask}, sm_{arch}", why
        )


def _hook(folder: str, value: Any) -> Any:
    """The device function that ``constexprs`` has named; anything else as it is."""
    if not isinstance(value, str) or ":" not in value:
        return value
    file, _, name = value.partition(":")
    return getattr(importlib.import_module(f"fa2tune.kernels.{folder}.{file}"), name)


def with_hooks(values: Mapping[str, Any]) -> dict[str, Any]:
    """Constexprs with device functions in place of their names."""
    folders = dict.fromkeys(HOOKS | OPTIONAL_HOOKS, "masks") | dict.fromkeys(SCORE_HOOKS, "scores")
    return {name: _hook(folders[name], value) if name in folders else value for name, value in values.items()}


@dataclass(frozen=True)
class Binary:
    """One compiled kernel and what the hardware limits and the model need to know of it."""

    kernel: str  #: name of its Variant
    spec: Specialization
    config: Mapping[str, Any]
    arch: int
    shared_bytes: int  #: per block
    num_warps: int  #: per block: of all partitions, where warps are specialised
    registers: int  #: per thread
    stack_bytes: int  #: per thread; spilled registers lie here
    cubin_path: str

    @property
    def spills(self) -> int:
        """32-bit words of stack per thread: what the driver reports as spills."""
        return self.stack_bytes // 4


@cache
def runtime_names(variant: Variant) -> frozenset[str]:
    """The dimensions of the search that a launch chooses: configs that differ there alone share a binary."""
    arguments = frozenset(variant.parameters) - variant.constexpr_names | frozenset(variant.grid_dimensions)
    return frozenset(variant.space.dimensions) & arguments - frozenset(OPTIONS)


def binary_config(variant: Variant, config: Config) -> dict[str, Any]:
    """The part of a config that its binary depends on."""
    runtime = runtime_names(variant)
    return {name: value for name, value in config.items() if name not in runtime}


def _compiled_in(spec: Specialization) -> dict[str, Any]:
    """Parameters that are compiled in: for a mask without run-time integers, for no score term, for sequences of one length."""
    found: dict[str, Any] = {} if mask_named(spec.mask).values else dict.fromkeys(WINDOW, 0)
    found |= dict.fromkeys(PACKED, 0) if spec.extent == DENSE else {}
    return found if score_named(spec.score).values else {**found, **dict.fromkeys(SCORE, 0.0)}


def _known(variant: Variant, spec: Specialization, config: Config) -> dict[str, Any]:
    """What is known by name at compile time, whether the kernel has such a parameter or not. Hooks by name, "file:function"."""
    mask, config = mask_named(spec.mask), variant.space.completed(config)
    return {
        **{parameter: f"{mask.name}:{function}" for parameter, function in HOOKS.items()},
        **{
            parameter: f"{mask.name}:{function}" if function in hooks_of(mask.name) else None
            for parameter, function in OPTIONAL_HOOKS.items()
        },
        **mask.bounded,
        "RAGGED": spec.extent == RAGGED,
        "SCORED": spec.scored,
        **{parameter: f"{spec.score}:{function}" for parameter, function in SCORE_HOOKS.items()},
        **_compiled_in(spec),
        "HEAD_DIM": spec.head_dim,
        "HEAD_DIM_V": spec.head_dim_v,
        "BLOCK_D": padded_head_dim(spec.head_dim),
        "BLOCK_DV": padded_head_dim(spec.head_dim_v),
        "PRECISION": spec.precision,
        **config,
        **variant.constants(spec, config),
    }


def constexprs(variant: Variant, spec: Specialization, config: Config) -> dict[str, Any]:
    """Every constexpr of the kernel, by name. ValueError names what the config lacks."""
    try:
        known = _known(variant, spec, config)
        absent = _absent(variant, spec, config)
        return absent | {
            name: known[name]
            for name in variant.parameters
            if name in variant.constexpr_names or name in _compiled_in(spec)
        }
    except KeyError as missing:
        raise ValueError(f"config: {variant.short_name} needs {missing}, got {sorted(config)}") from None


def block_of(variant: Variant, spec: Specialization, config: Config, name: str) -> list[int]:
    """Shape of the block that the descriptor of a tensor addresses."""
    known = _known(variant, spec, config)
    block = [known[side] if isinstance(side, str) else side for side in variant.descriptors[name]]
    packed = spec.ragged and variant.rest_of.get(name, name) in PACKED_ROWS_OF
    return [*[1] * (3 if packed else 2), *block] if len(block) == 2 else block


def _absent(variant: Variant, spec: Specialization, config: Config) -> dict[str, None]:
    """Descriptors of columns that there are not: compiled in as None."""
    return {name: None for name in variant.rest_of if 0 in block_of(variant, spec, config, name)}


def passed(variant: Variant, spec: Specialization, config: Config) -> dict[str, str]:
    """Tensor parameter that a launch passes -> the tensor whose memory it is."""
    absent = _absent(variant, spec, config)
    return {name: variant.rest_of.get(name, name) for name in variant.tensors if name not in absent}


def described(variant: Variant, spec: Specialization, config: Config) -> list[str]:
    """The parameters that are descriptors, in their order."""
    if not uses_descriptors(variant, config):
        return []
    there = passed(variant, spec, config)
    return [name for name in variant.parameters if name in variant.descriptors and name in there]


def uses_descriptors(variant: Variant, config: Config) -> bool:
    """Whether what a Variant says a descriptor may read is read, and written, by one."""
    return bool(variant.descriptors) and implementation_of(config) != POINTER


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (on CPU tensors), as ``TRITON_INTERPRET=1`` asks."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def is_gluon(variant: Variant) -> bool:
    """Whether the kernel is written in Gluon, which has layouts in its types, and no interpreter."""
    return bool(getattr(variant.kernel, "is_gluon", lambda: False)())


@cache
def _shared_layout(block: tuple[int, ...], dtype: str) -> str:
    """How Gluon types the shared memory that a descriptor fills: swizzled as widely as the block allows."""
    from triton.experimental.gluon import language as gl

    elements = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32, "i32": gl.int32}
    return repr(gl.NVMMASharedLayout.get_default_for(list(block), elements[dtype]))


def _type(variant: Variant, spec: Specialization, config: Config, name: str, layouts: bool) -> str:
    if name in variant.constexpr_names or name in _compiled_in(spec):
        return "constexpr"
    if name in variant.tensors:
        dtype = variant.tensors[name] or spec.dtype
        if uses_descriptors(variant, config) and name in variant.descriptors:
            block = block_of(variant, spec, config, name)
            if 0 in block:
                return "constexpr"  # as _absent has it
            layout = f",{_shared_layout(tuple(block), dtype)}" if layouts and is_gluon(variant) else ""
            return f"tensordesc<{dtype}{block}{layout}>"
        return f"*{dtype}"
    if name in variant.floats:
        return "fp32"
    divisor = name.startswith("by_")  # kernels/lib/division.py
    return "i64" if divisor or (name.startswith("stride_") and spec.wide) else "i32"


def _divisibility(variant: Variant, spec: Specialization, name: str, kind: str) -> int:
    """What the compiler may assume an argument to be a multiple of; 1: nothing."""
    if not spec.aligned or kind.startswith("tensordesc") or name in OFFSETS:
        return 1
    if kind.startswith("*"):
        return 16  # bytes
    if name.startswith("stride_") and "lse" not in name:
        return 16 // ITEMSIZE[spec.dtype]  # elements
    return 1


def _gluon_source() -> Any:
    """Gluon's ASTSource, which another Triton may have elsewhere: no portable kernel is to need it."""
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def signature(variant: Variant, spec: Specialization, config: Config, layouts: bool = True) -> dict[str, str]:
    """Every parameter of the kernel, in order, with its type as Triton writes it. ``layouts``: with those of Gluon's
    descriptors, which follow from the rest and take Gluon to know."""
    return {name: _type(variant, spec, config, name, layouts) for name in variant.parameters}


def attributes(variant: Variant, spec: Specialization, config: Config) -> dict[tuple[int], list[list[Any]]]:
    """What the compiler may assume of arguments, by their places."""
    found = {}
    for index, (name, kind) in enumerate(signature(variant, spec, config, layouts=False).items()):
        divisor = _divisibility(variant, spec, name, kind)
        if divisor > 1:
            found[(index,)] = [["tt.divisibility", divisor]]
    return found


def _parsing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def in_turn(*arguments: Any, **options: Any) -> Any:
        with PARSING:
            return method(*arguments, **options)

    return in_turn


def used(variant: Variant, spec: Specialization, config: Config) -> Used:
    """Which columns of its products a kernel uses, where those are fewer than its tiles have."""
    return variant.used(spec, variant.space.completed(config))


def source(variant: Variant, spec: Specialization, config: Config) -> Any:
    """Triton's ASTSource of one config, or Gluon's. Threads may compile theirs at once."""
    from triton.compiler import ASTSource

    values = with_hooks(constexprs(variant, spec, config))
    language = _gluon_source() if is_gluon(variant) else ASTSource
    kinds, assumed = signature(variant, spec, config), attributes(variant, spec, config)
    kernel = variant.kernel.real() if isinstance(variant.kernel, hostside.Kernel) else variant.kernel
    found = language(fn=kernel, signature=kinds, constexprs=values, attrs=assumed)
    hashed, more = _parsing(found.hash), trimmed.suffix(used(variant, spec, config))
    found.make_ir = _parsing(found.make_ir)
    found.hash = (lambda: hashlib.sha256(f"{hashed()}{more}".encode()).hexdigest()) if more else hashed
    return found


def options(config: Config) -> dict[str, Any]:
    """Compile options of a config. FP fusion is set explicitly: Triton 3.10 turns it off by default."""
    chosen = {name: config[name] for name in OPTIONS if name in config}
    if not chosen.get("maxnreg"):
        chosen["maxnreg"] = None
    return {**chosen, "enable_fp_fusion": True}


#: How Triton words the end of a ptxas that got SIGKILL or SIGTERM.
_PTXAS_KILLED = re.compile(r"ptxas\W+failed with error code (-9|-15|137|143)\b")


def compile_kernel(variant: Variant, spec: Specialization, config: Config, arch: int) -> Any:
    """Triton's CompiledKernel. Raises CompileError with the compiler's reason; HostTrouble, OSError or MemoryError where the
    host is to blame; NoTritonError."""
    try:
        versions.check("triton", triton_version())
        import triton
        from triton.backends.compiler import GPUTarget
    except Exception as error:  # a broken Triton raises what it likes
        raise NoTritonError(error, variant.short_name) from error

    try:
        asked = source(variant, spec, config)  # ValueError: the config does not fit the kernel
    except (ImportError, AttributeError) as error:
        raise CompileError(
            f"{variant.short_name} uses something that this Triton does not have: {error}"[:300]
        ) from error
    try:
        columns = used(variant, spec, config)
        with no_line_numbers(), trimmed.products(columns):
            compiled = triton.compile(asked, target=GPUTarget("cuda", arch, 32), options=options(config))
    except (OSError, MemoryError):
        raise
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        kind = HostTrouble if _PTXAS_KILLED.search(str(error)) else CompileError
        raise kind(f"{type(error).__name__}: {reason.strip()}"[:300]) from error
    if any(columns) and trimmed.edited(compiled.asm["ptx"], columns) != compiled.asm["ptx"]:
        if columns.rows:
            raise CompileError(f"{variant.short_name} reads behind its tiles where Triton runs no hook for PTX")
        warn_once(
            "kernels for head dims that do not fill their tiles are slower than they could be: Triton ran no hook for PTX"
        )
    if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
        raise CompileError(f"{variant.short_name} needs scratch memory, which is not supported")
    return compiled


#: What is launched, in order, each with its own config.
KernelSequence = list[tuple[Variant, Config]]


def around(variant: Variant, spec: Specialization, config: Config, arch: int) -> tuple[KernelSequence, KernelSequence]:
    """The kernels that run right before a config's, and right after it, with their own configs."""
    passed = variant.passes_on(spec, config)

    def with_configs(names: list[str], more: Config) -> KernelSequence:
        found = map(variant_named, names)
        return [(one, {**one.space.default(spec, arch), **passed, **more}) for one in found]

    packed = variant.packed_before if spec.ragged else ()
    before, after = (variant.runs_with(config, names) for names in (variant.before, variant.after))
    return with_configs([*before, *packed], variant.passes_before(spec, config)), with_configs(after, {})


def tool(name: str) -> str:
    """Path of a CUDA binary tool, cuobjdump, nvdisasm or ptxas: what its variable of Triton (TRITON_NVDISASM_PATH) names, or
    what the Triton wheel carries, or what PATH has. FileNotFoundError: none of them."""
    import triton

    variable, wheel = f"TRITON_{name.upper()}_PATH", Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for place in (os.environ.get(variable), str(wheel / name), name):
        if place and (found := shutil.which(place)):
            return found
    raise FileNotFoundError(f"{name} is missing (looked at {variable}, in {wheel} of the Triton wheel and on PATH)")


_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


def resources(cubin_path: str) -> tuple[int, int]:
    """(registers, stack bytes) per thread, read off the cubin."""
    listing = subprocess.run(
        [tool("cuobjdump"), "--dump-resource-usage", cubin_path], capture_output=True, text=True, check=True
    ).stdout
    match = _RESOURCES.search(listing)
    if match is None:
        raise CompileError(f"cuobjdump printed no resource usage for {cubin_path}")
    return int(match[1]), int(match[2])


def build(variant: Variant, spec: Specialization, config: Config, arch: int) -> Binary:
    """Compile (or take from Triton's cache) and inspect. Needs no GPU. Raises as ``compile_kernel`` does."""
    compiled = compile_kernel(variant, spec, config, arch)
    cubin_path = next(path for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))
    registers, stack = resources(cubin_path)
    return Binary(
        kernel=variant.name, spec=spec, config=dict(config), arch=arch, shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps, registers=registers, stack_bytes=stack, cubin_path=str(cubin_path),
    )  # fmt: skip
