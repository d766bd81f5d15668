"""A stand-in for an H200: programs for a GPU run to their end without one, and what they would launch is known.

Tensors hold nothing (torch's fake ones, on the CPU), launches do nothing, numbers read from tensors are zero, and comparisons
of results hold. What processes of their own launch, and what torch.compile makes, is not seen. ``benchmarks/ahead.py``
compiles for scripts so, ``tests/gpu/compile_ahead.py`` for the tests that need a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from host_path import NullDriver, function_without_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import bias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fa2tune import gpus
from fa2tune.calling import dispatch, ops, packing  # noqa: F401  # packing: defines an operator
from fa2tune.fleet.precompile import BinaryJob
from fa2tune.launching import cuda, launch, overlapped, passes, ported
from fa2tune.measuring import verify

GPU = gpus.named("h200")
CPU = torch.device("cpu")
ADDRESS = 1 << 32
MEMORY = 141 << 30  #: bytes
aten = torch.ops.aten

#: What has been launched, in order.
launched: dict[BinaryJob, None] = {}


class OnTheCpu(TorchFunctionMode):
    """Where a call names the GPU, it gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return CPU if str(args[0]).startswith("cuda") else func(*args, **(kwargs or {}))
        if func is torch.Tensor.cuda:
            return args[0].clone()
        named = {name: self.placed(value) for name, value in (kwargs or {}).items()}
        return func(*map(self.placed, args), **named)

    @staticmethod
    def placed(value: Any) -> Any:
        named = value if isinstance(value, str) else value.type if isinstance(value, torch.device) else ""
        return CPU if named in ("cuda", "cuda:0") else value


class Answers(TorchDispatchMode):
    """What depends on values: numbers are zero, two tensors are equal, a mask picks nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            kind = args[0].dtype
            return True if kind is torch.bool else 0.0 if kind.is_floating_point else 0
        if func is aten.equal.default:
            return True
        if func.name() == "fa2tune::document_offsets":  # of one document, whatever their number is
            return args[0].new_empty((2,), dtype=torch.int32)
        if func is aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if func in (aten.index_put_.default, aten.index_put.default):
            return args[0]
        if func is aten.index.Tensor:
            args = (args[0], [place for one in args[1] for place in self.places(one)])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def places(index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Of an index of ``aten.index``: of a mask none, in each of its dimensions."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        return [index.new_empty((0,), dtype=torch.int64)] * index.dim()


class Generator(torch.Generator):
    """Of whatever device is asked for."""

    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls)


class Anything:
    """A stream, an event, a graph: takes every call, and is a context. Everything takes a millisecond."""

    cuda_stream, device = 0, CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 1.0 if name == "elapsed_time" else None

    def __enter__(self) -> Anything:
        return self

    def __exit__(self, *_: object) -> None: ...


class Everything:
    """A set that has whatever is asked for."""

    def __contains__(self, _: object) -> bool:
        return True


def _load(variant: Any, spec: Any, config: Any, device_index: int, measured: str = "") -> cuda.Function:
    """In place of ``launch.load``."""
    launched[variant, spec, config] = None
    return function_without_code(variant, spec, config)


def _address(tensor: torch.Tensor) -> int:
    return ADDRESS + tensor.storage_offset() * tensor.element_size()


def _bias(_variant: object, queries: int, keys: int) -> torch.Tensor:
    """In place of torch's mask for SDPA, a subclass of Tensor that cannot be made of a fake one."""
    return torch.ones(queries, keys, dtype=torch.bool)


def _passed(*_: Any) -> dict[str, float]:
    """In place of a comparison."""
    return {"max": 0.0, "max_allowed": 1.0, "rms": 0.0, "rms_allowed": 1.0}


def _patched() -> list[tuple[Any, str, Any]]:
    """(of what, name, value)."""
    driver, asked, major, minor = NullDriver(), torch.cuda, *divmod(GPU.arch, 10)
    name = f"no GPU: a stand-in for an {GPU.name}"  # where a record would name it
    properties = SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=GPU.sm_count, total_memory=MEMORY
    )
    contexts = ("device", "CUDAGraph", "graph", "Stream", "Event", "stream", "current_stream")
    nothing = ("synchronize", "empty_cache", "_lazy_init", "set_sync_debug_mode")
    zero = ("current_device", "memory_allocated", "max_memory_allocated")
    return [
        *((asked, each, lambda *_: None) for each in nothing), *((asked, each, lambda *_: 0) for each in zero),
        *((asked, each, Anything) for each in contexts),
        (asked, "is_available", lambda: True), (asked, "device_count", lambda: 1),
        (asked, "get_device_capability", lambda *_: (major, minor)), (asked, "get_device_name", lambda *_: name),
        (asked, "get_device_properties", lambda *_: properties), (asked, "is_current_stream_capturing", lambda: False),
        (torch._C, "_cuda_getDevice", int), (torch._C, "_cuda_getCurrentRawStream", abs), (torch, "Generator", Generator),
        (torch.Tensor, "get_device", int),
        (torch.Tensor, "data_ptr", _address), (cuda, "_address", _address),
        (torch, "equal", lambda *_: True), (torch, "allclose", lambda *_, **__: True),
        (torch.testing, "assert_close", lambda *_, **__: None),
        (verify, "compare_tensor", _passed), (verify, "compare", lambda got, *_: {name: _passed() for name in got}),
        (bias, "CausalBias", _bias), (overlapped, "SIDES", {}),  # streams beside others are not kept for a GPU
        (cuda, "library", lambda: driver), (launch, "sm_count", lambda _: GPU.sm_count),
        (launch, "capability_of", lambda _: GPU.arch), (passes, "ALLOCATE", None),
        (ops, "interpreted", lambda: True), (ops, "_modes", int), (ops, "_PLAIN_TYPES", Everything()),
    ]  # fmt: skip


@contextmanager
def gpu() -> Iterator[None]:
    """Within it the GPU is there for torch and fa2tune. Scripts are imported within it, before ``tensors``."""
    with ExitStack() as stack:
        for of, name, value in _patched():
            stack.enter_context(mock.patch.object(of, name, value, create=True))
        replaced = {"load": (launch.load, _load), "gpu_of": (dispatch.gpu_of, lambda _: ported.running_for() or GPU)}
        for module in [module for name, module in sys.modules.items() if name.startswith("fa2tune.")]:
            for name, (old, new) in replaced.items():  # some modules have the function itself
                if vars(module).get(name) is old:
                    stack.enter_context(mock.patch.object(module, name, new))
        cuda.may_start_early.cache_clear()
        dispatch.reload()
        yield
    cuda.may_start_early.cache_clear()
    dispatch.reload()


@contextmanager
def tensors() -> Iterator[None]:
    """Within it every new tensor holds nothing."""
    with FakeTensorMode(allow_non_fake_inputs=True), Answers(), OnTheCpu():
        yield
