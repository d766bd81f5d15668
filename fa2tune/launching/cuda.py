"""The CUDA driver by ctypes: load a compiled kernel, encode TMA descriptors, launch.

Triton's own launcher does the same from C modules that it builds with gcc at the first launch, one for each signature. This one
needs no compiler, and a launch costs less: arguments are packed once for each set of addresses, which a caching allocator
hands out again and again; then 0.2 us go to the foreign call, which lets go of the interpreter's lock. Conventions are those of
Triton 3.6 to 3.9: a descriptor is followed by its shape (32 bits each) and strides (64 bits), and the last two parameters are
scratch memory, of which our kernels have none.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import addressof, byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache, partial
from typing import Any, ClassVar

import torch

from fa2tune.compiling.compiler import CompileError
from fa2tune.devices import library, refusal
from fa2tune.launching.image import Image, MapFormat
from fa2tune.spec.variant import WARP_THREADS

#: Kinds of kernel parameters -> bytes. "map" is a TMA descriptor, passed by value.
SIZES = {"pointer": 8, "map": 128, "i32": 4, "i64": 8, "fp32": 4}
MAP_BYTES = MAP_ALIGNMENT = 128
_address = torch.Tensor.data_ptr

# Of cuda.h
_INVALID_CONTEXT = 201
OUT_OF_MEMORY = 2
_SHARED_OPTIN = 97  #: CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_MAX_THREADS, _SHARED_STATIC, _MAX_DYNAMIC_SHARED = 0, 1, 8  #: CU_FUNC_ATTRIBUTE_...
_PREFER_SHARED = 1  #: CU_FUNC_CACHE_PREFER_SHARED
_SHARED_UNASKED = 48 << 10  #: bytes of dynamic shared memory that a kernel gets without opting in
_COOPERATIVE, _CLUSTER_DIMENSION, _CLUSTER_POLICY, _PROGRAMMATIC = 2, 4, 5, 6  #: CU_LAUNCH_ATTRIBUTE_...
_SPREAD = 1  #: CU_CLUSTER_SCHEDULING_POLICY_SPREAD
_L2_128B = 2  #: CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_RELAXED = 2  #: CU_STREAM_CAPTURE_MODE_RELAXED
PER_THREAD = 2  #: CU_STREAM_PER_THREAD: one name for many streams
_GRAPHS_TAKE_EARLY = 12030  #: the first CUDA whose graphs know launches that start early


class CudaError(RuntimeError):
    """The driver refused. ``code``: its own, 0 if it did not answer with one."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class _Attribute(ctypes.Structure):
    _fields_ = (("id", c_uint32), ("pad", c_uint32), ("value", c_uint32 * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid_x", c_uint), ("grid_y", c_uint), ("grid_z", c_uint),
        ("block_x", c_uint), ("block_y", c_uint), ("block_z", c_uint),
        ("shared", c_uint), ("stream", c_void_p), ("attributes", c_void_p), ("count", c_uint),
    )  # fmt: skip


def check(code: int, doing: str) -> None:
    """CudaError, in the driver's words, if ``code`` is one."""
    if code:
        raise CudaError(refusal(library(), code, doing), code)


@cache
def may_start_early() -> bool:
    """Whether a launch may start before the one before it has ended: if the driver's CUDA is 12.3 or later. Older ones know
    such launches, but not in a graph, and a launch may be captured at any time."""
    version = c_int()
    check(library().cuDriverGetVersion(byref(version)), "asking for the driver's version")
    return version.value >= _GRAPHS_TAKE_EARLY


def ensure_context(device_index: int) -> None:
    """Make the device's primary context current, where this thread has none."""
    context = c_void_p()
    check(library().cuCtxGetCurrent(byref(context)), "asking for the context")
    if not context.value:
        check(library().cuDevicePrimaryCtxRetain(byref(context), device_index), "retaining the context")
        check(library().cuCtxSetCurrent(context), "setting the context")


def _out_of_resources(asked: int, most: int, what: str) -> Exception:
    try:
        from triton.runtime.errors import OutOfResources  # only here: with precompiled kernels Triton is not imported
    except Exception:  # a broken Triton raises what it likes
        return CompileError(f"out of resource: {what}: needed {asked}, this GPU has {most}")
    found: Exception = OutOfResources(asked, most, what)
    return found


@contextmanager
def relaxed_mode() -> Iterator[None]:
    """What a capture, in any thread, forbids is what could be unsafe in it; loading a kernel adds nothing to a stream."""
    mode = c_int(_RELAXED)
    check(library().cuThreadExchangeStreamCaptureMode(byref(mode)), "relaxing the capture mode")
    try:
        yield
    finally:
        check(library().cuThreadExchangeStreamCaptureMode(byref(mode)), "restoring the capture mode")


class Function:
    """A kernel loaded on one device. ``kinds``: of its parameters, scratch aside, in order."""

    __slots__ = ("handle", "image", "kinds", "origin")

    def __init__(self, image: Image, kinds: Sequence[str], device_index: int, origin: str) -> None:
        """``origin``: where the image comes from, for messages. CudaError: the driver does not take it; Triton's
        OutOfResources: this GPU has less than it needs."""
        self.image, self.kinds, self.origin = image, tuple(kinds), origin
        with torch.cuda.device(device_index), relaxed_mode():  # another thread may be capturing a graph
            ensure_context(device_index)
            driver = library()
            most = c_int()
            code = driver.cuDeviceGetAttribute(byref(most), _SHARED_OPTIN, device_index)
            check(code, "asking for the limit of shared memory")
            if image.shared > most.value:
                raise _out_of_resources(image.shared, most.value, "shared memory")
            module, self.handle = c_void_p(), c_void_p()
            check(driver.cuModuleLoadData(byref(module), image.cubin), f"loading {image.name}")
            check(
                driver.cuModuleGetFunction(byref(self.handle), module, image.name.encode()),
                f"looking for {image.name}",
            )
            if image.shared > _SHARED_UNASKED:
                check(driver.cuFuncSetCacheConfig(self.handle, _PREFER_SHARED), "preferring shared memory")
                room = most.value - self._attribute(_SHARED_STATIC)
                check(driver.cuFuncSetAttribute(self.handle, _MAX_DYNAMIC_SHARED, room), "opting in to shared memory")
            if (threads := image.warps * WARP_THREADS) > (most_threads := self._attribute(_MAX_THREADS)):
                raise _out_of_resources(threads, most_threads, "threads")
            self._hold_against_parameters()

    def _attribute(self, which: int) -> int:
        found = c_int()
        check(library().cuFuncGetAttribute(byref(found), which, self.handle), "asking for a kernel's attribute")
        return found.value

    def _hold_against_parameters(self) -> None:
        """CudaError where the kernel was compiled with other parameters than a launch would pass. Drivers before 12.4
        cannot tell."""
        ask = getattr(library(), "cuFuncGetParamInfo", None)
        if ask is None:
            return
        found: list[int] = []
        offset, size = c_size_t(), c_size_t()
        while not ask(self.handle, c_size_t(len(found)), byref(offset), byref(size)):
            found.append(size.value)
        expected = [SIZES[kind] for kind in (*self.kinds, "pointer", "pointer")]
        if found != expected:
            raise CudaError(f"{self.image.name} takes parameters of {found} bytes, a launch passes {expected}")


class Maps(dict[int, tuple[int, Any]]):
    """Base address of a tensor -> (address of its encoded TMA descriptor, the memory it lies in), for tensors of one shape.
    Keeps as many as the caching allocator is likely to hand out in turn."""

    KEPT = 256

    def __init__(self, wanted: MapFormat, shape: Sequence[int], strides: Sequence[int], ahead: int = 0) -> None:
        """``shape`` and ``strides`` in elements, slowest dimension first; the last stride is 1. ``ahead``: elements from where
        the coordinates are counted to the tensor's own start."""
        rank = len(shape)
        self.ahead = ahead * wanted.element_bytes
        sizes = [stride * wanted.element_bytes for stride in strides[:-1]]
        self._type, self._rank, self._swizzle = wanted.element_type, rank, wanted.swizzle
        self._shape = (c_uint64 * rank)(*reversed(shape))
        self._strides = (c_uint64 * rank)(*reversed(sizes))  # one more than is read
        self._block = (c_uint32 * rank)(*reversed(wanted.block))
        self._steps = (c_uint32 * rank)(*[1] * rank)

    def encode(self, address: int) -> tuple[int, Any]:
        """CudaError: an address that TMA cannot take."""
        buffer = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        place = -addressof(buffer) % MAP_ALIGNMENT + addressof(buffer)
        encode = partial(
            library().cuTensorMapEncodeTiled, c_void_p(place), self._type, self._rank, c_void_p(address - self.ahead),
            self._shape, self._strides, self._block, self._steps, 0, self._swizzle, _L2_128B, 0,
        )  # fmt: skip
        code = encode()
        if code == _INVALID_CONTEXT:  # the first that this thread asks of CUDA
            ensure_context(torch._C._cuda_getDevice())
            code = encode()
        if code:
            shape, strides = list(self._shape)[::-1], list(self._strides)[-2::-1]
            check(code, f"encoding a TMA descriptor of address {address:#x}, shape {shape}, byte strides {strides}")
        if len(self) >= self.KEPT:
            self.clear()
        found = self[address] = place, buffer
        return found


def _packed(kind: str, value: Any) -> int:
    """A scalar as the 64 bits of its slot, of which the kernel reads the low ones. ValueError: it does not fit."""
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    bits = 8 * SIZES[kind]
    if kind != "pointer" and not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ValueError(f"got {value}, which does not fit {kind}")
    return int(value) & (1 << 64) - 1


#: A call of the driver of which nothing is left open; the launch it makes, and behind that the memory it reads meanwhile.
Packed = tuple[Callable[[], int], Sequence[Any]]


class NoAddressError(RuntimeError):
    """A tensor has no storage: its wrapper has to be removed first."""


def refuse_nowhere(addresses: Sequence[int]) -> None:
    if 0 in addresses:
        raise NoAddressError(
            "attention: got a tensor without storage (of a tensor subclass, or one that is not materialised yet)"
        )


class Launch:
    """A loaded kernel with every argument but the addresses of its tensors and the stream."""

    __slots__ = ("attributes", "config", "function", "launch", "pointers", "slots", "values")

    def __init__(
        self, function: Function, grid: int, arguments: Sequence[Any], slots: Sequence[tuple[int, Maps | None]],
        early: bool = False,
    ) -> None:  # fmt: skip
        """``arguments``: one per parameter, anything for a tensor; ``slots``: for each tensor of a call the parameter it
        is, and its descriptors if it is passed by one; ``early``: it may start before the launch before it has ended."""
        self.function, self.slots = function, list(slots)
        values = [
            0 if kind == "map" else _packed(kind, value) for kind, value in zip(function.kinds, arguments, strict=True)
        ] + [0, 0]  # scratch
        self.values = array("Q", values)
        start, count = self.values.buffer_info()
        self.pointers = array("Q", range(start, start + 8 * count, 8))
        image = function.image
        asked: list[tuple[int, tuple[int, ...]]] = []
        if image.programmatic or early:
            asked.append((_PROGRAMMATIC, (1,)))
        if image.cooperative:
            asked.append((_COOPERATIVE, (1,)))
        if image.ctas != 1:
            asked += [(_CLUSTER_DIMENSION, (image.ctas, 1, 1)), (_CLUSTER_POLICY, (_SPREAD,))]
        self.attributes = (_Attribute * max(1, len(asked)))()
        for attribute, (which, numbers) in zip(self.attributes, asked, strict=False):
            attribute.id = which
            attribute.value[: len(numbers)] = numbers
        self.config = _LaunchConfig(
            grid * image.ctas, 1, 1, WARP_THREADS * image.warps, 1, 1, image.shared, None,
            addressof(self.attributes), len(asked),
        )  # fmt: skip
        self.launch: Callable[..., int] = library().cuLaunchKernelEx

    @property
    def doing(self) -> str:
        return f"launching {self.function.image.name}"

    def packed(self, addresses: Sequence[int], stream: int) -> Packed:
        """On this stream, with tensors that lie at these addresses. CudaError: one that TMA cannot take."""
        memory = self.pointers + array("Q", addresses)
        start, kept = memory.buffer_info()[0], [self, memory]
        first = start + 8 * len(self.pointers)
        for place, ((index, maps), address) in enumerate(zip(self.slots, addresses, strict=True)):
            if maps is None:
                memory[index] = first + 8 * place
            else:  # kept here too: another thread may drop it from its Maps meanwhile
                memory[index], descriptor = maps.get(address) or maps.encode(address)
                kept.append(descriptor)
        config = _LaunchConfig.from_buffer_copy(self.config)
        config.stream = stream
        return partial(self.launch, byref(config), self.function.handle, c_void_p(start), None), kept


class Chain:
    """Launches one after the other. Threads may call it at once."""

    __slots__ = ("device_index", "launches")

    #: (chain, stream, addresses of a call's tensors) -> its launches, from the second call on: addresses that never come again
    #: are not worth keeping.
    MEMO: ClassVar[dict[tuple[Chain, int, tuple[int, ...]], list[Packed]]] = {}
    SEEN: ClassVar[set[int]] = set()  #: hashes of keys that came once
    KEPT = 4096
    passed_by: ClassVar[int] = 0  #: keys for which the memo was too full

    def __init__(self, launches: Sequence[tuple[Launch, Sequence[tuple[int, int]]]], device_index: int) -> None:
        """``launches``: each with where its tensors lie: (which one of a call's tensors, how many bytes behind its start)."""
        self.launches, self.device_index = launches, device_index

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """On the current stream of the device."""
        if torch._C._cuda_getDevice() != self.device_index:  # a kernel is launched in its own device's context
            with torch.cuda.device(self.device_index):
                return self(tensors)
        key = self, torch._C._cuda_getCurrentRawStream(self.device_index), tuple(map(_address, tensors))
        for call, kept in self.MEMO.get(key) or self._pack(key):
            if code := call():
                self._again(code, call, kept[0], key[1])
        return None

    def _pack(self, key: tuple[Chain, int, tuple[int, ...]]) -> list[Packed]:
        _, stream, addresses = key
        refuse_nowhere(addresses)
        found = self.packed(addresses, stream)
        if (mark := hash(key)) not in self.SEEN:
            if len(self.SEEN) >= 4 * self.KEPT:
                self.SEEN.clear()
            self.SEEN.add(mark)
        elif len(self.MEMO) < self.KEPT:
            self.MEMO[key] = found
        else:  # not emptied at once: of a cycle that is longer than the memo, most of it still is found
            Chain.passed_by += 1
            if Chain.passed_by > 4 * self.KEPT:
                forget_packed()
        return found

    def packed(self, addresses: Sequence[int], stream: int) -> list[Packed]:
        """Every launch, with tensors that lie at these addresses."""
        return [
            launch.packed([addresses[which] + behind for which, behind in places], stream)
            for launch, places in self.launches
        ]

    def _again(self, code: int, call: Callable[[], int], kept: Any, stream: int) -> None:
        """Once more in a thread that had no context; any other failure is the caller's. ``kept``: what says what was done."""
        if code == _INVALID_CONTEXT:
            ensure_context(self.device_index)
            code = call()
        check(code, kept.doing)


def forget_packed() -> None:
    """Pack every launch anew."""
    Chain.MEMO.clear()
    Chain.SEEN.clear()
    Chain.passed_by = 0


_relaxed: ContextVar[bool] = ContextVar("_relaxed", default=False)


def may_load() -> bool:
    """Whether a kernel may be loaded now: not while a stream is captured, unless ``relaxed_capture`` says so."""
    return _relaxed.get() or not torch.cuda.is_current_stream_capturing()


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Within it this thread may load kernels while it captures a stream."""
    token = _relaxed.set(True)
    try:
        yield
    finally:
        _relaxed.reset(token)
