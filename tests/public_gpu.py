"""Public calls on tensors of the CPU, chosen for and launched as on an H200, whose kernels Python runs.

Choices, plans, descriptors, packed arguments, streams and events are the library's own. The driver is replaced: a launch reads
its arguments where the driver would, and tests/kernels_in_python.py runs the kernel. Streams are in order. What is on a side
stream runs as late as its events allow (``late``), or when it is launched."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import kernels_in_python
import numpy as np
import pytest
import torch
from kernel_values import Buffer, Descriptor, Fault, Int, Pointer
from triton import language as tl

from fa2tune import gpus
from fa2tune.calling import dispatch, ops, varlen_schedules
from fa2tune.compiling import compiler
from fa2tune.launching import counters, cuda, launch, overlapped, passes
from fa2tune.launching.image import MapFormat
from fa2tune.spec.problem import ITEMSIZE

GPU = "h200"
ELEMENTS = {
    "fp32": (tl.float32, np.float32), "fp16": (tl.float16, np.float16), "bf16": (tl.bfloat16, np.uint16),
    "i32": (None, np.int32),
}  # fmt: skip
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
READ = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


@dataclass
class Loaded:
    """What a handle stands for."""

    variant: Any
    spec: Any
    config: dict[str, Any]
    image: Any
    kinds: Sequence[str]
    handle: int
    origin: str = ""


class Driver:
    """libcuda, as far as a call asks it."""

    def __init__(self, gpu: PublicGpu) -> None:
        self.gpu = gpu

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *_: 0

    def cuCtxGetCurrent(self, found: Any) -> int:
        found._obj.value = 77
        return 0

    def cuDriverGetVersion(self, found: Any) -> int:
        found._obj.value = 13000
        return 0

    def cuStreamCreateWithPriority(self, found: Any, flags: int, priority: Any) -> int:
        found._obj.value = self.gpu.number()
        return 0

    def cuEventCreate(self, found: Any, flags: int) -> int:
        found._obj.value = self.gpu.number()
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        self.gpu.put(stream.value or 0, event.value)
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:
        self.gpu.reach(event.value)
        return 0

    def cuTensorMapEncodeTiled(self, place, _type, rank, address, sizes, strides, block, *_rest) -> int:  # type: ignore[no-untyped-def]
        self.gpu.maps[place.value] = (
            address.value or 0, list(sizes)[::-1], list(strides)[: rank - 1][::-1], list(block)[::-1],
        )  # fmt: skip
        return 0

    def cuLaunchKernelEx(self, config: Any, handle: int, arguments: Any, _extra: Any) -> int:
        asked = config._obj
        loaded = self.gpu.loaded[handle]
        pointers = (ctypes.c_uint64 * len(loaded.kinds)).from_address(arguments.value)
        given = [self.gpu.read(kind, pointer) for kind, pointer in zip(loaded.kinds, pointers, strict=True)]
        self.gpu.put(asked.stream or 0, (loaded, asked.grid_x, given))
        return 0


def memory(address: int, count: int, dtype: Any) -> Any:
    return np.frombuffer((ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address), dtype)


class PublicGpu:
    """``ran``: names of the kernels that have run, in order. ``programs``: multiprocessors that persistent kernels fill, few,
    so that a program takes several tiles; the choices are made for all that an H200 has."""

    def __init__(self, patch: pytest.MonkeyPatch, programs: int = 3, late: bool = False) -> None:
        self.late, self.element = late, ""  # of tensors of the problem's dtype
        self.loaded: dict[int, Loaded] = {}
        self.maps: dict[int, tuple[Any, ...]] = {}
        self.memory: dict[int, torch.UntypedStorage] = {}
        self.streams: dict[int, list[Any]] = {}  #: launches that have not run, and events that come behind them
        self.numbers, self.ran = 1 << 20, list[str]()
        self.stream, self.capturing = 0, False  #: the current stream, by name alone, and whether it is captured
        driver, gpu = Driver(self), gpus.named(GPU)
        for of, name, value in (
            (cuda, "library", lambda: driver), (cuda, "may_start_early", lambda: True), (cuda, "may_load", lambda: True),
            (launch, "arch_of", lambda index: gpu.arch), (passes, "arch_of", lambda index: gpu.arch),
            (launch, "sm_count", lambda index: programs), (launch, "load", self._load), (ops, "interpreted", lambda: True),
            (varlen_schedules, "interpreted", lambda: True), (varlen_schedules, "arch_of", lambda index: gpu.arch),
            (counters, "_BY_STREAM", {}), (counters, "_SPARE", {}),
            (dispatch, "gpu_of", lambda index: gpu), (torch.Tensor, "get_device", lambda tensor: 0),
            (cuda.Chain, "MEMO", {}), (cuda.Chain, "SEEN", set()), (overlapped, "SIDES", {}),
        ):  # fmt: skip
            patch.setattr(of, name, value)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.stream, raising=False)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        for chain in (cuda.Chain, overlapped.ForkedChain):
            patch.setattr(chain, "__call__", self._called(chain.__call__))

    def _called(self, chain: Callable[[Any, Sequence[torch.Tensor]], None]) -> Callable[..., None]:
        """A chain's call, of which it is known where tensors lie."""

        def call(own: Any, tensors: Sequence[torch.Tensor]) -> None:
            for tensor in tensors:
                self.memory[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            self.element = NAMES.get(tensors[0].dtype, "i32")
            chain(own, tensors)
            assert not any(self.streams.values()), "a stream that nothing waits for"
            self.memory.clear()

        return call

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def _load(self, variant: Any, spec: Any, config: Any, *_: Any) -> Loaded:
        config, block = dict(config), compiler.block_of
        formats = [
            MapFormat(0, ITEMSIZE[variant.tensors[name] or spec.dtype], 0, tuple(block(variant, spec, config, name)))
            for name in compiler.described(variant, spec, config)
        ]
        image = SimpleNamespace(
            name=variant.name, maps=formats, warps=4, ctas=1, shared=0, programmatic=False, cooperative=False
        )
        made = Loaded(variant, spec, config, image, launch.kinds(variant, spec, config), self.number())
        self.loaded[made.handle] = made
        return made

    # ---- streams

    def put(self, stream: int, what: Any) -> None:
        """At the end of a stream. The one that torch computes on, 0, keeps nothing waiting."""
        queue = self.streams.setdefault(stream, [])
        queue.append(what)
        if stream == 0 or not self.late:
            self._run(queue, len(queue))

    def reach(self, event: int) -> None:
        """Everything before an event."""
        for queue in self.streams.values():
            if event in queue:
                self._run(queue, queue.index(event) + 1)

    def _run(self, queue: list[Any], count: int) -> None:
        done, queue[:] = queue[:count], queue[count:]
        for one in done:
            if isinstance(one, tuple):
                self._launch(*one)

    # ---- launches

    @staticmethod
    def read(kind: str, pointer: int) -> Any:
        if kind == "map":
            return pointer
        return READ.get(kind, ctypes.c_uint64).from_address(pointer).value

    def _launch(self, loaded: Loaded, grid: int, given: Sequence[Any]) -> None:
        variant, spec = loaded.variant, loaded.spec
        arguments = dict(compiler.with_hooks(compiler.constexprs(variant, spec, loaded.config)))
        buffers: dict[tuple[int, str], Buffer] = {}
        at = 0
        for name in variant.parameters:
            if name in arguments:
                continue
            kind, value = loaded.kinds[at], given[at]
            element = variant.tensors.get(name) or self.element
            if kind == "map":
                base, sizes, strides, block = self.maps[value]
                buffer = self._buffer(buffers, base, element, name)
                arguments[name] = Descriptor(
                    buffer, base, sizes, [*strides, buffer.itemsize], block, ELEMENTS[element][0] or tl.int32
                )
                at += 2 * len(sizes)
            elif kind == "pointer":
                buffer = self._buffer(buffers, value, element, name)
                arguments[name] = Pointer(buffer, (value - buffer.base) // buffer.itemsize if value else 0)
            else:
                arguments[name] = value if kind == "fp32" else Int(value, kind == "i64")
            at += 1
        self.ran.append(variant.name)
        kernels_in_python.launch(variant.kernel, grid, loaded.config["num_warps"], arguments, True)
        for (_, element), buffer in buffers.items():
            if element == "bf16":
                at = np.flatnonzero(buffer.written)
                memory(buffer.base, len(buffer.written), np.uint16)[at] = buffer.words.view(np.uint32)[at] >> 16

    def _buffer(self, made: dict[tuple[int, str], Buffer], address: int, element: str, name: str) -> Buffer:
        """The memory that an address lies in, as elements of one type."""
        dtype, words = ELEMENTS[element]
        if not address:
            return Buffer("nothing", 0, 0, 4, np.zeros(1, np.float32), tl.float32)
        for start, storage in self.memory.items():
            if start <= address < start + storage.nbytes():
                if (start, element) not in made:
                    size = np.dtype(words).itemsize
                    base = start + (address - start) % size
                    count = (start + storage.nbytes() - base) // size
                    held = memory(base, count, words)
                    if element == "bf16":  # as float32, and written back
                        held = (held.astype(np.uint32) << 16).view(np.float32)
                    made[start, element] = Buffer(name, base, count, size, held, dtype)
                return made[start, element]
        raise Fault(f"{name} at {address:#x}, which is no tensor of the call")


@contextmanager
def public_gpu(**options: Any) -> Iterator[PublicGpu]:
    """Within it calls of tensors of the CPU run as on an H200. ``options``: of ``PublicGpu``."""
    with pytest.MonkeyPatch.context() as patch:
        dispatch.reload()
        yield PublicGpu(patch, **options)
    dispatch.reload()
