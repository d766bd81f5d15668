"""A kernel bound to one problem, ready to launch: the short road from tensors to the GPU, and the interpreter's beside it.

A bound launch holds every argument but the tensors. Calling it costs a list copy, one slot per tensor and the C launcher:
no signature binding, no hashing, no lock (Triton's own ``kernel[grid](...)`` spends about 14 us there, 35 with descriptors).
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from fa2tune import compiler
from fa2tune.problem import Config, Problem, Specialization
from fa2tune.variant import Variant

LOG2E = 1.4426950408889634
TORCH_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (on CPU tensors), as ``TRITON_INTERPRET=1`` asks."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class Described:
    """What Triton's driver reads of a host tensor descriptor, without the checks of its own class (3 us apiece): the problem
    has vouched for alignment."""

    __slots__ = ("base", "element_strides", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: torch.Tensor, shape: list[int], strides: list[int]) -> None:
        self.base, self.shape, self.strides = base, shape, strides
        self.padding, self.round_f32_to_tf32, self.element_strides = "zero", False, None


def _encode(metadata: Any, tensor: torch.Tensor, shape: list[int], strides: list[int]) -> Any:
    """The TMA descriptor of a tensor, encoded by Triton's driver as the compiled kernel wants it."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    described = Described(tensor, shape, strides)
    more = () if "_" not in make_tensordesc_arg.__code__.co_varnames[:3] else (None,)  # Triton 3.9 has a third, unused
    return make_tensordesc_arg(described, metadata, *more)[0]


def _launcher(compiled: Any) -> Callable[..., None]:
    """(grid, stream, arguments) -> None: the C launcher of a loaded kernel, with descriptors already encoded.

    Triton's own entry re-encodes every descriptor at every launch, in Python: 10 us of 13. Two generations of it are known:
    arguments spread out (3.6), or as one tuple beside the kernel's signature (3.7 on)."""
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    launch = run.launch
    if inspect.isfunction(launch):  # wrapped because of descriptors: the C function is what it closes over
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    flags = (run.launch_cooperative_grid, run.launch_pdl)
    if hasattr(run, "kernel_signature"):
        tail = (run.arg_annotations, run.kernel_signature)

        def call(grid: int, stream: int, arguments: list[Any]) -> None:
            launch(grid, 1, 1, stream, function, *flags, packed, None, None, None, None, None, *tail, arguments)
    else:

        def call(grid: int, stream: int, arguments: list[Any]) -> None:
            launch(grid, 1, 1, stream, function, *flags, None, None, packed, None, None, None, *arguments)

    return call


#: (batch, heads, rows) strides of a tensor, in elements, by tensor parameter.
Strides = Mapping[str, tuple[int, int, int]]
Workspaces = Mapping[str, torch.Tensor]


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
    offsets need 64 bits, whether a descriptor can address them (no stride of zero)."""
    aligned, wide, described = True, False, True
    for name, tensor in tensors.items():
        unit = 16 // tensor.element_size()
        b, h, m = strides[name]
        aligned &= tensor.data_ptr() % 16 == 0 and not (b % unit or h % unit or m % unit)
        wide |= max(b, h, m) >= 1 << 31 or m >= 1 << 22  # a block of 256 rows or more
        described &= min(b, h, m) > 0
    return aligned, wide, described and aligned


@cache
def arch_of(device_index: int) -> int:
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


@cache
def sm_count(device_index: int) -> int:
    """Streaming multiprocessors of a device: what persistent kernels fill."""
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


@cache
def load(variant: Variant, spec: Specialization, config: tuple[tuple[str, Any], ...], device_index: int) -> Any:
    """The kernel of a ``compiler.binary_config``, loaded on a device. Compiles on the first call. Raises CompileError or
    Triton's OutOfResources."""
    with torch.cuda.device(device_index):
        compiled = compiler.compile_kernel(variant, spec, dict(config), arch_of(device_index))
        compiled.run  # noqa: B018  # loads the binary on the current device
    return compiled


def _values(
    variant: Variant, problem: Problem, config: Config, strides: Strides, softmax_scale: float, names: tuple[str, ...]
) -> dict[str, Any]:
    """Every argument of the kernel but its tensors, by name."""
    spec = problem.specialization
    values = compiler.constexprs(variant, spec, config)
    values |= {name: config[name] for name in compiler.runtime_names(variant)}
    scale = -softmax_scale if spec.negate else softmax_scale
    values |= {
        # a scale of zero is a very small one, since the forward masks with -inf, and -inf * 0 is NaN
        "qk_scale": scale * LOG2E if scale < 0 else max(scale * LOG2E, 1e-30), "softmax_scale": softmax_scale,
        "batch": problem.batch, "heads_q": problem.heads_q, "group": problem.group,
        "seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k, "has_dlse": int("dlse" in names),
    }  # fmt: skip
    absent = dict.fromkeys(variant.tensors, (0, 0, 0))  # dlse, where lse has no gradient
    for name, (b, h, m) in {**absent, **strides}.items():
        rows = "n" if name in ("k", "v", "dk", "dv") else "m"
        values |= {f"stride_{name}b": b, f"stride_{name}h": h, f"stride_{name}{rows}": m}
    return values


def _shape(name: str, problem: Problem, workspaces: Mapping[str, torch.Tensor]) -> list[int]:
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


def _described(variant: Variant, config: Config) -> Mapping[str, tuple[str | int, ...]]:
    return variant.descriptors if compiler.uses_descriptors(config) else {}


class _Maps(dict[int, Any]):
    """Base address -> encoded descriptor, for one tensor of one bound launch. Keeps as many as the caching allocator is
    likely to hand out in turn."""

    KEPT = 256

    def __init__(self, metadata: Any, shape: list[int], strides: list[int]) -> None:
        self.metadata, self.shape, self.strides = metadata, shape, strides

    def encode(self, tensor: torch.Tensor) -> Any:
        if len(self) >= self.KEPT:
            self.clear()
        encoded = self[tensor.data_ptr()] = _encode(self.metadata, tensor, self.shape, self.strides)
        return encoded


class BoundLaunch:
    """One kernel, one problem, one device. ``names``: the tensors to pass, in this order, when calling."""

    __slots__ = ("arguments", "call", "compiled", "device_index", "grid", "slots")

    def __init__(
        self, variant: Variant, problem: Problem, config: Config, strides: Strides, softmax_scale: float,
        names: tuple[str, ...], device_index: int, workspaces: Workspaces, scalars: Mapping[str, int],
    ) -> None:  # fmt: skip
        values = {**_values(variant, problem, config, strides, softmax_scale, names), **scalars}
        described = _described(variant, config)
        compiled_in = tuple(sorted(compiler.binary_config(variant, config).items()))
        self.compiled = load(variant, problem.specialization, compiled_in, device_index)
        metadata = iter(getattr(self.compiled.metadata, "tensordesc_meta", None) or ())
        self.arguments: list[
            Any
        ] = []  # as the C launcher takes them: a descriptor is followed by its shape and strides
        slots: dict[str, tuple[int, _Maps | None]] = {}  # where each tensor goes
        for name in compiler.parameters(variant):
            if name in described:
                shape = _shape(name, problem, workspaces)
                steps = _steps(shape, strides.get(name))
                slots[name] = len(self.arguments), _Maps(next(metadata), shape, steps)
                self.arguments += [None, *shape, *steps]
            elif name in variant.tensors:
                slots[name] = len(self.arguments), None
                self.arguments.append(0)
            else:
                self.arguments.append(values[name])
        self.slots = [slots[name] for name in names]
        self.grid = variant.programs(problem, config, sm_count(device_index))
        self.device_index = device_index
        self.call = _launcher(self.compiled)

    def __call__(self, *tensors: torch.Tensor) -> None:
        arguments = self.arguments.copy()
        for (index, maps), tensor in zip(self.slots, tensors):  # noqa: B905  # strict costs here; bind() fixed the count
            address = tensor.data_ptr()
            arguments[index] = address if maps is None else maps.get(address) or maps.encode(tensor)
        stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        if torch._C._cuda_getDevice() == self.device_index:
            self.call(self.grid, stream, arguments)
        else:  # a kernel is launched in its own device's context
            with torch.cuda.device(self.device_index):
                self.call(self.grid, stream, arguments)


class InterpretedLaunch:
    """The same for CPU tensors, in Triton's interpreter."""

    def __init__(
        self, variant: Variant, problem: Problem, config: Config, strides: Strides, softmax_scale: float,
        names: tuple[str, ...], device_index: int, workspaces: Workspaces, scalars: Mapping[str, int],
    ) -> None:  # fmt: skip
        values = {**_values(variant, problem, config, strides, softmax_scale, names), **scalars}
        self.variant, self.names, self.strides, self.problem = variant, names, strides, problem
        self.scalars = {name: values[name] for name in compiler.parameters(variant) if name not in variant.tensors}
        spec = problem.specialization
        self.blocks = {name: compiler.block_of(variant, spec, config, name) for name in _described(variant, config)}
        self.grid = variant.programs(problem, config, 1)
        self.shapes = {name: _shape(name, problem, workspaces) for name in self.blocks}

    def __call__(self, *tensors: torch.Tensor) -> None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        arguments: dict[str, Any] = dict(self.scalars)
        for name, tensor in zip(self.names, tensors, strict=True):
            arguments[name] = tensor
            if name in self.blocks:
                shape = self.shapes[name]
                steps = _steps(shape, self.strides.get(name))
                arguments[name] = TensorDescriptor(tensor, shape, steps, self.blocks[name])
        missing = {name: torch.empty(0) for name in self.variant.tensors if name not in arguments}
        self.variant.kernel[(self.grid,)](**arguments, **missing)


def bind(
    variant: Variant, problem: Problem, config: Config, strides: Strides, softmax_scale: float, names: tuple[str, ...],
    device_index: int, workspaces: Workspaces = MappingProxyType({}), scalars: Mapping[str, int] = MappingProxyType({}),
) -> BoundLaunch | InterpretedLaunch:  # fmt: skip
    """Load (compiling on the first call) and bind. ``device_index`` -1: the interpreter, on CPU tensors. ``workspaces``:
    those of ``names`` that are contiguous and of a shape of their own, which alone counts; ``scalars``: arguments by name,
    beside those that every kernel may ask for.

    Raises CompileError, Triton's OutOfResources, or ValueError if the config does not fit the kernel."""
    kind = InterpretedLaunch if device_index < 0 else BoundLaunch
    return kind(variant, problem, config, strides, softmax_scale, names, device_index, workspaces, scalars)


def prepare(
    variant: Variant, problem: Problem, config: Config, tensors: Mapping[str, torch.Tensor], softmax_scale: float,
    device_index: int,
) -> Callable[[], None]:  # fmt: skip
    """A closure that launches the kernel on these tensors: what a timer wants."""
    names = tuple(tensors)
    strides = {name: strides_of(tensor) for name, tensor in tensors.items() if tensor.dim() == 4 or name == "dlse"}
    bound = bind(variant, problem, config, strides, softmax_scale, names, device_index)
    values = tuple(tensors.values())
    return lambda: bound(*values)
