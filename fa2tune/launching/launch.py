"""A kernel bound to one problem, ready to launch: the short path from tensors to the GPU, and the interpreter's beside it.

A chain of launches holds every argument but the tensors. Calling it costs an address per tensor, one look-up and a foreign call
per launch (``cuda.py``): no signature binding, no lock (Triton's own ``kernel[grid](...)`` spends about 14 us there, 35 with
descriptors).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fa2tune import collected, gpus, versions
from fa2tune.compiling import compiler
from fa2tune.compiling.compiler import CompileError, NoTritonError
from fa2tune.compiling.fingerprint import triton_version
from fa2tune.launching import cuda, ported, precompiled
from fa2tune.launching.cuda import Chain, CudaError, Function, Launch, Maps
from fa2tune.launching.image import Image, MapFormat
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, Specialization
from fa2tune.spec.variant import SCORE, WINDOW, Variant

versions.check("torch", torch.__version__)

log = logging.getLogger("fa2tune")

LOG2E = 1.4426950408889634
TORCH_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


if compiler.interpreted():  # elsewhere Triton matters only to what is compiled
    versions.check("triton", triton_version())

#: Aligned as TMA wants it; what is there does not matter to encode a descriptor.
ANY_ADDRESS = 1 << 32
#: CUtensorMapDataType, where the compiler's own numbers differ.
_HOST_TYPES = {8: 10, 9: 8, 10: 9}


class CaptureMiss(RuntimeError):
    """A kernel is not loaded yet, and a stream is being captured."""


def image_of(compiled: Any) -> Image:
    """What Triton compiled, without Triton. CompileError: this version cannot launch it."""
    known = compiled.metadata
    maps = []
    for wanted in getattr(known, "tensordesc_meta", None) or ():
        if wanted is None or wanted["fp4_padded"] or wanted.get("is_im2col"):
            raise CompileError(f"{known.name} needs a kind of tensor descriptor that is not supported: {wanted}")
        kind, block = wanted["elem_type"], tuple(wanted["block_size"])
        maps.append(MapFormat(wanted["swizzle"], wanted["elem_size"], _HOST_TYPES.get(kind, kind), block))
    return Image(
        known.name, compiled.kernel, known.shared, known.num_warps, known.num_ctas, known.launch_cooperative_grid,
        known.launch_pdl, tuple(maps),
    )  # fmt: skip


def kinds(variant: Variant, spec: Specialization, config: Config) -> list[str]:
    """Kinds of the kernel's parameters as ``cuda.SIZES`` has them: a descriptor is followed by its shape and strides."""
    found = []
    for name, written in compiler.signature(variant, spec, config, layouts=False).items():
        if written.startswith("tensordesc"):
            rank = len(compiler.block_of(variant, spec, config, name))
            found += ["map", *["i32"] * rank, *["i64"] * rank]
        elif written != "constexpr":
            found.append("pointer" if written.startswith("*") else written)
    return found


#: (batch, heads, rows) strides of a tensor, in elements, by tensor parameter.
Strides = Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Workspace:
    """A contiguous tensor within the block of memory that the kernels of one call share."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int  #: bytes from the block's

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def within(self, block: torch.Tensor) -> torch.Tensor:
        """It itself; ``block``: bytes."""
        return block[self.start : self.end].view(self.dtype).view(self.shape)


Placed = Mapping[str, Workspace]


def strides_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Strides of (batch, heads, rows[, dim]). A dimension of length 1 has no stride that matters: it gets one that is
    aligned, so that it spoils neither vector loads nor a descriptor."""
    filler = tensor.shape[3] if tensor.dim() == 4 else 1
    b, h, m = (
        filler if length == 1 else stride for length, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )
    return b, h, m


def addressing(tensors: Mapping[str, torch.Tensor], strides: Strides) -> tuple[bool, bool, bool]:
    """(aligned, wide, described) of the tensors a kernel reads: whether base and strides are multiples of 16 bytes, whether
    offsets need 64 bits, whether a descriptor can address them. Batches and heads may have a stride of 0 (expanded tensors):
    cuTensorMapEncodeTiled takes it, and a tile lies within one head. Rows may not: no tile of such rows was tried."""
    aligned, wide, described = True, False, True
    for name, tensor in tensors.items():
        unit = 16 // tensor.element_size()
        b, h, m = strides[name]
        aligned &= tensor.data_ptr() % 16 == 0 and not (b % unit or h % unit or m % unit)
        wide |= max(b, h, m) >= 1 << 31 or m >= 1 << 22  # a block of 256 rows or more
        described &= m > 0
    return aligned, wide, described and aligned


@cache
def capability_of(device_index: int) -> int:
    """Of a device: 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


def arch_of(device_index: int) -> int:
    """Whose code a device runs: its own, unless this process runs ported code."""
    return ported.running() or capability_of(device_index)


@cache
def sm_count(device_index: int) -> int:
    """Streaming multiprocessors of a device: what persistent kernels fill."""
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


@cache
def load(
    variant: Variant, spec: Specialization, config: tuple[tuple[str, Any], ...], device_index: int, measured: str = ""
) -> Function:
    """The kernel of a ``compiler.binary_config``, loaded on a device: out of a trusted file of binaries, or
    else compiled by Triton, on the first call. ``measured``: as ``precompiled.find`` has it.

    Raises CompileError, Triton's OutOfResources, NoTritonError, or CaptureMiss."""
    if not cuda.may_load():
        raise CaptureMiss(variant.short_name)
    if ported.running():
        return _loaded(variant, spec, dict(config), device_index, None, "ported code")
    image, found = precompiled.find(variant, spec, dict(config), arch_of(device_index), measured)
    try:
        return _loaded(variant, spec, dict(config), device_index, image, found)
    except NoTritonError as error:
        image, found = precompiled.find(variant, spec, dict(config), arch_of(device_index))  # what any Triton compiled
        if image is None:
            raise error.of(variant.short_name, spec, arch_of(device_index), found) from error
        return _loaded(variant, spec, dict(config), device_index, image, found)


def _loaded(
    variant: Variant, spec: Specialization, binary: Config, device_index: int, image: Image | None, found: str
) -> Function:
    """An image that was found, or, without one that loads, a compiled one."""
    wanted, arch = kinds(variant, spec, binary), arch_of(device_index)
    described = compiler.described(variant, spec, binary)
    ranks = [len(compiler.block_of(variant, spec, binary, name)) for name in described]
    if image is not None and [len(one.block) for one in image.maps] != ranks:
        image, found = None, f"{found} is damaged: {variant.short_name} has other descriptors"
    if image is not None:
        try:
            return Function(image, wanted, device_index, found)
        except CudaError as error:
            log.warning("%s kernels of %s are not used: %s", variant.short_name, found, error)
            if error.code != cuda.OUT_OF_MEMORY:  # which may pass
                precompiled.refuse(image, str(error))
            found = f"{found}: {error}"
    # reads machine code: its import takes milliseconds, which a process without Triton does not spend
    from fa2tune.compiling import operandcheck

    log.info("compiling %s: %s", variant.short_name, found)
    collected()  # takes seconds, or minutes
    compiled = operandcheck.compile_kernel(variant, spec, binary, arch)
    image = image_of(compiled)
    if ported.running():
        code = ported.assembled(compiled, capability_of(device_index))
        image = replace(image, cubin=code)
        if (other := ported.running_for()) is not None and ported.crowding():
            image = ported.crowded(image, other, gpus.device(device_index))
    try:
        return Function(image, wanted, device_index, f"compiled: {found}")
    except CudaError as error:
        raise CompileError(str(error)) from error


def _away_from_zero(scale: float) -> float:
    """A scale of zero is a very small one: the forward masks with -inf, and -inf * 0 is NaN, and one backward divides by it."""
    return min(scale, -1e-30) if scale < 0 else max(scale, 1e-30)


def _values(
    variant: Variant, problem: Problem, config: Config, strides: Strides, softmax_scale: float, names: tuple[str, ...]
) -> dict[str, Any]:
    """Every argument of the kernel but its tensors and what is compiled in, by name."""
    spec = problem.specialization
    values: dict[str, Any] = {name: config[name] for name in compiler.runtime_names(variant)}
    scale = -softmax_scale if spec.negate else softmax_scale
    first, second = problem.score.arguments(_away_from_zero(scale))
    values |= {
        "qk_scale": _away_from_zero(scale * LOG2E), "softmax_scale": softmax_scale,
        "batch": problem.extent.sequences if problem.extent.ragged else problem.batch,
        "heads_q": problem.heads_q, "group": problem.group,
        "seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k, "has_dlse": int("dlse" in names),
        **dict(zip(SCORE, (first, second), strict=True)),
        **dict(zip(WINDOW, problem.mask.arguments(problem.seqlen_q, problem.seqlen_k), strict=True)),
    }  # fmt: skip
    absent = dict.fromkeys(variant.tensors, (0, 0, 0))  # dlse, where lse has no gradient
    for name, (b, h, m) in {**absent, **strides}.items():
        rows = "n" if name in ("k", "v", "dk", "dv") else "m"
        values |= {f"stride_{name}b": b, f"stride_{name}h": h, f"stride_{name}{rows}": m}
    for name in ("q", "o"):
        _, h, m = strides.get(name, (0, 0, 0))
        values |= dict(
            zip((f"{name}_units", f"{name}_group_units"), (m // _UNIT, problem.group * h // _UNIT), strict=True)
        )
    return values


def _named(variant: Variant, name: str, values: Mapping[str, Any]) -> Any:
    """The argument for a parameter of a kernel that is neither tensor nor compiled in. ValueError: a call has none of that
    name."""
    if name not in values:
        known = sorted({*values} - variant.constexpr_names, key=lambda one: (one.startswith("stride_"), one))
        raise ValueError(
            f"{variant.short_name}: got a parameter {name}, allowed are its tensors and {', '.join(known)}"
        )
    return values[name]


def _shape(name: str, problem: Problem, workspaces: Placed) -> list[int]:
    """Of a tensor that a descriptor addresses: (batch, heads, rows, dim), or what a workspace's is."""
    if name in workspaces:
        return list(workspaces[name].shape)
    queries, values = name in ("q", "o", "do", "dq"), name in ("v", "o", "do", "dv")
    return [
        problem.batch, problem.heads_q if queries else problem.heads_kv,
        problem.seqlen_q if queries else problem.seqlen_k, problem.head_dim_v if values else problem.head_dim,
    ]  # fmt: skip


def _steps(shape: Sequence[int], strides: tuple[int, ...] | None) -> list[int]:
    """Strides of every dimension of such a tensor; None: it is contiguous."""
    if strides is not None:
        return [*strides, 1]
    return [math.prod(shape[place + 1 :]) for place in range(len(shape))]


#: The coordinate in front of a packed tensor's own ones, and how many rows it seems to have; and sizes that bound nothing.
_PACKED_ROWS, _MOST_ROWS = 1 << 30, (1 << 31) - (1 << 16)
#: Elements of 16 bytes, which strides are multiples of. Tiles of several query heads have two-byte ones.
_UNIT = 8


def _addressed(
    name: str, problem: Problem, strides: tuple[int, int, int] | None, workspaces: Placed
) -> tuple[list[int], list[int]]:
    """(shape, strides), as ``cuda.Maps`` has them, of a tensor behind a descriptor.

    A packed tensor has one batch entry, so that dimension is free: its coordinate is the row where a sequence ends. Rows are
    counted so that the tensor's bound falls on that row: row r of a sequence of n rows has the coordinate 2^30 - n + r. The
    hardware then cuts a block where its sequence ends: loads fill with zeros, stores leave the next sequence alone. One more
    dimension takes the 2^30 rows back: its coordinate is always 2^30, and 2^30 of its strides are 2^64 bytes, where addresses
    wrap around, less 2^30 rows. (A base before the tensor faults where nothing is mapped there.)"""
    shape = _shape(name, problem, workspaces)
    steps = _steps(shape, strides)
    if not problem.extent.ragged or name in workspaces:
        return shape, steps
    _, heads, _, dim = shape
    _, head_step, row_step, one = steps
    back = (1 << 64) // _PACKED_ROWS // ITEMSIZE[problem.dtype] - row_step
    return [_MOST_ROWS, _MOST_ROWS, heads, _PACKED_ROWS, dim], [back, row_step, head_step, row_step, one]


def _by_member(shape: Sequence[int], steps: Sequence[int], group: int) -> tuple[list[int], list[int]]:
    """(shape, strides) of a (batch, heads, rows, dim) tensor as (batch, key heads, rows, heads of a key head, dim); of packed
    sequences, as ``_addressed`` has them, with a distance of 16 bytes in the place of key heads, since five dimensions are all
    that there are: a sequence's end and a key head are one coordinate."""
    if len(shape) == 5:
        (most, ends, _, rows, dim), (back, _, head_step, row_step, one) = shape, steps
        return [most, ends, rows, group, dim], [back, _UNIT, row_step, head_step, one]
    (batch, heads, rows, dim), (batch_step, head_step, row_step, one) = shape, steps
    return [batch, heads // group, rows, group, dim], [batch_step, group * head_step, row_step, head_step, one]


def _farthest(problem: Problem, strides: tuple[int, int, int]) -> int:
    """The largest distance, in units of 16 bytes, that a coordinate of ``_by_member`` has to say."""
    _, head_step, row_step = strides
    return (problem.seqlen_q * row_step + problem.heads_q * head_step) // _UNIT


@dataclass(frozen=True)
class BoundForm:
    """What the binary of a config says of a kernel's parameters."""

    binary: tuple[tuple[str, Any], ...]  #: ``compiler.binary_config``, sorted
    described: frozenset[str]  #: those that are descriptors
    constants: frozenset[str]  #: those that are compiled in
    passed: Mapping[str, str]  #: as ``compiler.passed`` has it


@lru_cache(maxsize=4096)
def _form(variant: Variant, spec: Specialization, binary: tuple[tuple[str, Any], ...]) -> BoundForm:
    config = dict(binary)
    described, constants = compiler.described(variant, spec, config), compiler.constexprs(variant, spec, config)
    return BoundForm(binary, frozenset(described), frozenset(constants), compiler.passed(variant, spec, config))


def form(variant: Variant, spec: Specialization, config: Config) -> BoundForm:
    """Worked out once for each binary, not for each length. ValueError: the config lacks something."""
    return _form(variant, spec, tuple(sorted(compiler.binary_config(variant, config).items())))


def starts_early(variant: Variant, problem: Problem, config: Config, device_index: int) -> bool:
    """Whether a config's kernel will start before the one before it has ended. Not where that is another call's, as this one
    brings the order of its tiles: it would take longer (docs/experiments/fused-backward-ends.md)."""
    first = bool(variant.packed_before) and problem.extent.scheduled
    return not first and variant.early(problem, config, sm_count(device_index)) and cuda.may_start_early()


def _bound(
    variant: Variant, problem: Problem, config: Config, strides: Strides, softmax_scale: float, names: tuple[str, ...],
    device_index: int, workspaces: Placed, scalars: Mapping[str, int], measured: str,
) -> Launch:  # fmt: skip
    """One kernel, one problem, one device. ``names``: the tensors to pass, in this order, when calling."""
    values = {**_values(variant, problem, config, strides, softmax_scale, names), **scalars}
    formed = form(variant, problem.specialization, config)
    function = load(variant, problem.specialization, formed.binary, device_index, measured)
    formats = iter(function.image.maps)
    arguments: list[Any] = []
    slots: dict[str, tuple[int, Maps | None]] = {}  # where each tensor goes
    for name in variant.parameters:
        if name in formed.constants:
            continue
        if name in formed.described:
            whole = variant.rest_of.get(name, name)
            shape, steps = _addressed(whole, problem, strides.get(whole), workspaces)
            wanted = next(formats)
            if len(variant.descriptors[name]) > 2 and whole not in workspaces:  # a tile of several query heads
                shape, steps = _by_member(shape, steps, problem.group)
                if problem.extent.ragged and _farthest(problem, strides[whole]) > _MOST_ROWS:
                    raise CompileError(f"{variant.short_name}, {name}: its rows lie too far apart for one coordinate")
            maps = Maps(wanted, shape, steps)
            try:  # what TMA cannot take is to be known now, while another config can be had
                maps.encode(ANY_ADDRESS)
            except CudaError as error:
                raise CompileError(f"{variant.short_name}, {name}: {error}") from error
            slots[name] = len(arguments), maps
            arguments += [0, *shape, *steps]
        elif name in variant.tensors:
            slots[name] = len(arguments), None
            arguments.append(0)
        else:
            arguments.append(_named(variant, name, values))
    early = starts_early(variant, problem, config, device_index)
    grid = variant.programs(problem, config, sm_count(device_index), early)
    return Launch(function, grid, arguments, [slots[name] for name in names], early)


#: Held while the interpreter runs a kernel: it replaces functions of triton.language for the whole process and puts them back
#: afterwards, so a second thread would find them in the wrong state.
INTERPRETING = threading.Lock()


class InterpretedLaunch:
    """The same for CPU tensors, in Triton's interpreter. Threads take turns."""

    def __init__(
        self, variant: Variant, problem: Problem, config: Config, strides: Strides, softmax_scale: float,
        names: tuple[str, ...], device_index: int, workspaces: Placed, scalars: Mapping[str, int], measured: str,
    ) -> None:  # fmt: skip
        values = {**_values(variant, problem, config, strides, softmax_scale, names), **scalars}
        constants = compiler.with_hooks(compiler.constexprs(variant, problem.specialization, config))
        values |= constants
        self.variant, self.names, self.strides, self.problem = variant, names, strides, problem
        passed = [name for name in variant.parameters if name in constants or name not in variant.tensors]
        self.scalars = {name: _named(variant, name, values) for name in passed}
        spec = problem.specialization
        described = compiler.described(variant, spec, config)
        self.blocks = {name: compiler.block_of(variant, spec, config, name) for name in described}
        self.grid = variant.programs(problem, config, 1)
        self.shapes = {name: _shape(name, problem, workspaces) for name in self.blocks}

    def __call__(self, *tensors: torch.Tensor) -> None:
        import numpy as np
        from triton.tools.tensor_descriptor import TensorDescriptor

        arguments: dict[str, Any] = dict(self.scalars)
        for name, tensor in zip(self.names, tensors, strict=True):
            arguments[name] = tensor
            if name in self.blocks:
                shape = self.shapes[name]
                steps = _steps(shape, self.strides.get(name))
                arguments[name] = TensorDescriptor(tensor, shape, steps, self.blocks[name])
        missing = {name: torch.empty(0) for name in self.variant.tensors if name not in arguments}
        # A row that sees no key, as those of a tile behind the last query, has a sum of 0: kernels divide 0 by it and take its
        # logarithm, as IEEE defines it, and write neither. NumPy, which computes here, would warn of both.
        with INTERPRETING, np.errstate(divide="ignore", invalid="ignore"):
            self.variant.kernel[(self.grid,)](**arguments, **missing)


def bind(
    variant: Variant, problem: Problem, config: Config, strides: Strides, softmax_scale: float, names: tuple[str, ...],
    device_index: int, workspaces: Placed = MappingProxyType({}), scalars: Mapping[str, int] = MappingProxyType({}),
    measured: str = "",
) -> Launch | InterpretedLaunch:  # fmt: skip
    """Load (compiling on the first call) and bind. ``device_index`` -1: the interpreter, on CPU tensors. ``workspaces``:
    those of ``names`` that are contiguous and of a shape of their own, which alone counts; ``scalars``: arguments by name,
    beside those that every kernel may ask for; ``measured``: as ``precompiled.find`` has it.

    Raises CompileError, Triton's OutOfResources, NoTritonError, or ValueError if the config does not fit the kernel."""
    make = InterpretedLaunch if device_index < 0 else _bound
    return make(variant, problem, config, strides, softmax_scale, names, device_index, workspaces, scalars, measured)


class Within(NamedTuple):
    """A part of one of a call's tensors, contiguous and of int32."""

    tensor: int  #: which one
    start: int  #: bytes from its start

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[self.tensor].flatten()[self.start // 4 :]


#: Where a launch finds a tensor: which one of a call's it is, where in one, or where in the block of workspaces, the last of a
#: call's.
TensorPlace = int | Within | Workspace


def _place(place: TensorPlace) -> tuple[int, int]:
    """As ``cuda.Chain`` has it."""
    if isinstance(place, int):
        return place, 0
    return (-1, place.start) if isinstance(place, Workspace) else (place.tensor, place.start)


class InterpretedChain:
    """The same as a ``cuda.Chain`` for CPU tensors, in Triton's interpreter."""

    def __init__(self, launches: Sequence[tuple[InterpretedLaunch, Sequence[TensorPlace]]]) -> None:
        self.launches = launches

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        cuda.refuse_nowhere([tensor.data_ptr() for tensor in tensors])
        for launch, places in self.launches:
            launch(*(self._found(place, tensors) for place in places))

    @staticmethod
    def _found(place: TensorPlace, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if isinstance(place, Workspace):
            return place.within(tensors[-1])
        return tensors[place] if isinstance(place, int) else place.of(tensors)


def chain(
    launches: Sequence[tuple[Launch | InterpretedLaunch, Sequence[TensorPlace]]], device_index: int,
    make: Callable[..., Chain] = Chain,
) -> Chain | InterpretedChain:  # fmt: skip
    """What ``bind`` made for this device, one after the other, or as ``make`` has it."""
    if device_index < 0:
        return InterpretedChain(launches)  # type: ignore[arg-type]
    at = [(launch, [_place(place) for place in places]) for launch, places in launches]
    return make(at, device_index)
