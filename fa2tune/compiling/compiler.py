"""Triton compiles for any target, GPU present or not: (variant, specialization, config, arch) -> Binary.

Triton's own on-disk cache (``TRITON_CACHE_DIR``) holds the results, so a config compiled once is never compiled again, by
this process or another.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import pkgutil
import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

from fa2tune.compiling import binaries, hostside
from fa2tune.problem import ITEMSIZE, Config, Specialization, padded_head_dim
from fa2tune.variant import OPTIONS, POINTER, Variant, way_of

log = logging.getLogger("fa2tune")

#: How the modules of fa2tune.kernels end that hold other ways of kernels, in a language that is no stable part of Triton.
OTHER_WAYS = "hopper"
#: Modules that hold kernels of other names than their own. (A test holds this against the modules.)
SHARED = {"bwd_keys": ("bwd_dkdv", "bwd_fused")}


#: Held by whoever has Python parse sources, as Triton does to hash a kernel and again to translate it. CPython (3.11 at least)
#: counts the depth of a syntax tree for all threads together, so two that parse at once may be refused by a SystemError
#: (python/cpython issue 106905), and Triton would keep its half of a hash for the whole.
PARSING = threading.RLock()


class CompileError(RuntimeError):
    """Triton or ptxas refused a config. The message is the reason, on one line."""


class HostTrouble(RuntimeError):
    """ptxas was killed in the midst of a compile (by the OOM killer, say), which says nothing of the config."""


class Variants(Mapping[str, Variant]):
    """Every kernel variant, by name: whatever ``VARIANT`` or ``VARIANTS`` the modules of fa2tune.kernels hold. A module is
    imported when it is needed: all of them take 0.1 s, for which a first call would wait.

    Where this Triton lacks what another way of a kernel is written with, that way is absent, and a log line says so."""

    def __init__(self) -> None:
        package = importlib.import_module("fa2tune.kernels")
        self._modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
        self._imported: dict[str, tuple[Variant, ...]] = {}

    def _of(self, module_name: str) -> tuple[Variant, ...]:
        """What one module holds."""
        if module_name not in self._imported:
            found = self._without_triton(module_name)
            self._imported[module_name] = self._with_triton(module_name) if found is None else found
        return self._imported[module_name]

    @staticmethod
    def _without_triton(module_name: str) -> tuple[Variant, ...] | None:
        """Where kernels may be found compiled; None: this one takes Triton."""
        if not binaries.trusted().files or os.environ.get("TRITON_INTERPRET", "0") == "1":
            return None
        try:
            return hostside.variants(module_name)
        except Exception as error:  # whatever a kernel file does with a stand-in
            log.info("kernels.%s cannot be read without Triton: %s", module_name, error)
            return None

    @staticmethod
    def _with_triton(module_name: str) -> tuple[Variant, ...]:
        try:
            module = importlib.import_module(f"fa2tune.kernels.{module_name}")
        except (ImportError, AttributeError) as error:
            if not module_name.endswith(OTHER_WAYS):
                raise
            why = f"{type(error).__name__}: {error}"
            log.warning("fa2tune: left out, as this Triton cannot import it: kernels.%s (%s)", module_name, why)
            return ()
        single = (module.VARIANT,) if hasattr(module, "VARIANT") else ()
        return (*single, *getattr(module, "VARIANTS", ()))

    def _whole(self, modules: Iterable[str]) -> dict[str, Variant]:
        """Theirs, without those whose neighbours are absent."""
        found = [variant for module in modules for variant in self._of(module)]
        return {one.name: one for one in found if all(self._near(n).get(n) for n in (*one.before, *one.after))}

    def _near(self, name: str) -> dict[str, Variant]:
        """Of the modules called after a kernel, or that hold it by what SHARED says."""
        return self._whole(m for m in self._modules if f"{m}_".startswith(f"{name}_") or name in SHARED.get(m, ()))

    def serving(self, kernel: str) -> Iterable[Variant]:
        """Those filed under a kernel, among others."""
        return self._near(kernel).values()

    def __getitem__(self, name: str) -> Variant:
        return self._near(name)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole(self._modules))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def variants() -> Mapping[str, Variant]:
    """Every kernel variant, by name."""
    return Variants()


def variant_named(name: str) -> Variant:
    try:
        return variants()[name]
    except KeyError:
        raise ValueError(f"kernel: got {name!r}, known are {', '.join(variants())}") from None


@cache
def ways(kernel: str) -> Mapping[str, Variant]:
    """The ways a kernel can go, by name, each with its Variant: the portable ones first."""
    known = variants()
    serving = known.serving(kernel) if isinstance(known, Variants) else known.values()
    of_kernel = [variant for variant in serving if variant.filed_under == kernel]
    found: dict[str, Variant] = {}
    for variant in sorted(of_kernel, key=lambda variant: bool(variant.serves)):
        for way in variant.ways:
            if found.setdefault(way, variant) is not variant:
                raise ValueError(f"kernel {kernel}: {found[way].name} and {variant.name} are both {way}")
    return found


def variants_of(kernel: str) -> tuple[Variant, ...]:
    """Every Variant that serves as this kernel, the portable one first."""
    return tuple(dict.fromkeys(ways(kernel).values()))


def variant_of(kernel: str, config: Config) -> Variant:
    """The Variant that a config of a kernel is of. ValueError: this house has none."""
    way, known = way_of(config), ways(kernel)
    if way not in known:
        raise ValueError(f"kernel {kernel}: got a {way!r:.40} config, known are {', '.join(known)}")
    return known[way]


def misfit(kernel: str, filed_as: str, config: Config) -> str | None:
    """Why a config from a file is no point of the search space of the way it is filed as; None: it is one."""
    try:
        variant = variant_of(kernel, config)
    except ValueError as error:
        return str(error)
    if (way := way_of(config)) != filed_as:
        return f"it is filed as {filed_as:.40}, and its config is a {way} one"
    dimensions = variant.space.dimensions
    if set(config) != set(dimensions):
        return f"its config does not name the dimensions of {variant.name}"
    for name, value in config.items():  # a file is data from somewhere else
        if not any(type(value) is type(known) and value == known for known in dimensions[name]):
            return f"its config has {name} {value!r:.40}, which is not a value of {variant.name}'s search space"
    return None


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


def parameters(variant: Variant) -> list[str]:
    """The kernel's parameter names, in order."""
    return list(inspect.signature(variant.kernel.fn).parameters)


@cache
def constexpr_names(variant: Variant) -> frozenset[str]:
    """The kernel's parameters annotated ``constexpr``, of Triton's language or Gluon's."""
    annotated = inspect.signature(variant.kernel.fn).parameters.values()
    return frozenset(p.name for p in annotated if getattr(p.annotation, "__name__", "") == "constexpr")


@cache
def runtime_names(variant: Variant) -> frozenset[str]:
    """The dimensions of the search that a launch chooses: configs that differ there alone share a binary."""
    arguments = frozenset(parameters(variant)) - constexpr_names(variant) | frozenset(variant.grid_dimensions)
    return frozenset(variant.space.dimensions) & arguments - frozenset(OPTIONS)


def binary_config(variant: Variant, config: Config) -> dict[str, Any]:
    """The part of a config that its binary depends on."""
    runtime = runtime_names(variant)
    return {name: value for name, value in config.items() if name not in runtime}


def _known(variant: Variant, spec: Specialization, config: Config) -> dict[str, Any]:
    """What is known by name at compile time, whether the kernel has such a parameter or not."""
    return {
        "HEAD_DIM": spec.head_dim,
        "HEAD_DIM_V": spec.head_dim_v,
        "BLOCK_D": padded_head_dim(spec.head_dim),
        "BLOCK_DV": padded_head_dim(spec.head_dim_v),
        "IS_CAUSAL": spec.causal,
        "PRECISION": spec.precision,
        **config,
        **variant.derived(spec, config),
    }


def constexprs(variant: Variant, spec: Specialization, config: Config) -> dict[str, Any]:
    """Every constexpr of the kernel, by name. ValueError names what the config lacks."""
    try:
        known = _known(variant, spec, config)
        return {name: known[name] for name in parameters(variant) if name in constexpr_names(variant)}
    except KeyError as missing:
        raise ValueError(f"config: {variant.name} needs {missing}, got {sorted(config)}") from None


def block_of(variant: Variant, spec: Specialization, config: Config, name: str) -> list[int]:
    """Shape of the block that the descriptor of a tensor addresses."""
    known = _known(variant, spec, config)
    block = [known[side] if isinstance(side, str) else side for side in variant.descriptors[name]]
    return [1, 1, *block] if len(block) == 2 else block


def uses_descriptors(config: Config) -> bool:
    """Whether what a Variant says a descriptor may read is read, and written, by one."""
    return way_of(config) != POINTER


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
    if name in constexpr_names(variant):
        return "constexpr"
    if name in variant.tensors:
        dtype = variant.tensors[name] or spec.dtype
        if uses_descriptors(config) and name in variant.descriptors:
            block = block_of(variant, spec, config, name)
            layout = f",{_shared_layout(tuple(block), dtype)}" if layouts and is_gluon(variant) else ""
            return f"tensordesc<{dtype}{block}{layout}>"
        return f"*{dtype}"
    if name in variant.floats:
        return "fp32"
    return "i64" if name.startswith("stride_") and spec.wide else "i32"


def _divisibility(variant: Variant, spec: Specialization, name: str, kind: str) -> int:
    """What the compiler may assume an argument to be a multiple of; 1: nothing."""
    if not spec.aligned or kind.startswith("tensordesc"):
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
    return {name: _type(variant, spec, config, name, layouts) for name in parameters(variant)}


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


def source(variant: Variant, spec: Specialization, config: Config) -> Any:
    """Triton's ASTSource of one config, or Gluon's. Threads may compile theirs at once."""
    from triton.compiler import ASTSource

    values = constexprs(variant, spec, config)
    language = _gluon_source() if is_gluon(variant) else ASTSource
    kinds, assumed = signature(variant, spec, config), attributes(variant, spec, config)
    kernel = variant.kernel.real() if isinstance(variant.kernel, hostside.Kernel) else variant.kernel
    found = language(fn=kernel, signature=kinds, constexprs=values, attrs=assumed)
    found.hash, found.make_ir = _parsing(found.hash), _parsing(found.make_ir)
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
    host is to blame."""
    import triton
    from triton.backends.compiler import GPUTarget

    try:
        asked = source(variant, spec, config)  # ValueError: the config does not fit the kernel
    except (ImportError, AttributeError) as error:
        raise CompileError(f"this Triton lacks what {variant.name} is written with: {error}"[:300]) from error
    try:
        compiled = triton.compile(asked, target=GPUTarget("cuda", arch, 32), options=options(config))
    except (OSError, MemoryError):
        raise
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        kind = HostTrouble if _PTXAS_KILLED.search(str(error)) else CompileError
        raise kind(f"{type(error).__name__}: {reason.strip()}"[:300]) from error
    if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
        raise CompileError(f"{variant.name} wants scratch memory, which no launch gives it")
    return compiled


Launches = list[tuple[Variant, Config]]


def around(variant: Variant, spec: Specialization, config: Config, arch: int) -> tuple[Launches, Launches]:
    """The kernels that run right before a config's, and right after it, with their own configs."""
    told = variant.passes_on(spec, config)

    def with_configs(names: tuple[str, ...]) -> Launches:
        found = map(variant_named, variant.runs_with(config, names))
        return [(one, {**one.space.default(spec, arch), **told}) for one in found]

    return with_configs(variant.before), with_configs(variant.after)


@cache
def tool(name: str) -> str:
    """Path of a CUDA binary tool that the triton wheel carries: cuobjdump, nvdisasm or ptxas."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise FileNotFoundError(f"{name} is missing from the triton wheel (looked in {path.parent})")
    return str(path)


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
