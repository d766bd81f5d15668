"""What tests/kernels_in_python.py computes with: integers, what is unknown, global and shared memory, and TMA's copies."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import tile_values
import triton.language as tl
from tile_values import ARRAYS, Real


class Fault(AssertionError):
    """What the GPU would not do, or would do to memory that is another's."""


class Unknown:
    """A number, tile or layout that nothing here depends on. ``shape``: where it is known."""

    def __init__(self, shape: Any = None) -> None:
        if shape is not None:
            self.shape = shape

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return UNKNOWN

    def __call__(self, *_: Any, **__: Any) -> Any:
        return UNKNOWN

    def __bool__(self) -> bool:
        raise Fault("control flow depends on what a tile holds")

    def __iter__(self) -> Any:
        raise Fault("an unknown is taken apart")

    def _absorb(self, *_: Any) -> Any:
        return UNKNOWN

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = _absorb
    __and__ = __rand__ = __or__ = __ror__ = __mod__ = __neg__ = __invert__ = __getitem__ = __rfloordiv__ = _absorb
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _absorb  # type: ignore[assignment]
    __hash__ = object.__hash__


UNKNOWN = Unknown()


def array(x: Any) -> Any:
    return x.a if isinstance(x, Int) else np.asarray(x)


def quotient(a: Any, b: Any) -> Any:
    """As C has it; of a division by 0, which is no fault on a GPU, anything."""
    if isinstance(a, int) and isinstance(b, int):
        found = abs(a) // (abs(b) or 1)
        return found if (a < 0) == (b < 0) else -found
    safe = np.where(b == 0, 1, b)
    return np.abs(a) // np.abs(safe) * np.sign(a) * np.sign(safe)


def plain(x: Any) -> int | bool | None:
    """One number as Python's own, which most are and which is ten times as fast; None: several."""
    if isinstance(x, int):
        return x
    if isinstance(x, Int):
        return x.one
    return x.item() if isinstance(x, np.integer | np.bool_) else None


class Int:
    """Integers or booleans of any shape. ``wide``: of 64 bits. ``one``: the number, if it is one alone."""

    def __init__(self, a: Any, wide: bool = False) -> None:
        self.wide, self.held, self.one = wide, None, plain(a)
        if self.one is None:
            self.held = np.asarray(a)
            if self.held.dtype != bool:
                self.held = self.held.astype(np.int64, copy=False)
            if not self.held.ndim:
                self.one = self.held.item()
        if self.one is not None:
            low = high = self.one
            if wide and not -(1 << 63) <= low < 1 << 63:  # modulo 2^64
                self.one = (low + (1 << 63)) % (1 << 64) - (1 << 63)
        elif wide or self.held.dtype == bool or not self.held.size:
            return
        else:
            low, high = np.minimum.reduce(self.held, None), np.maximum.reduce(self.held, None)
        if not wide and not (low >= -(1 << 31) and high < 1 << 31):
            raise Fault(f"more than 32 bits: {low} to {high}")

    @property
    def a(self) -> Any:
        if self.held is None:
            self.held = np.asarray(self.one, bool if isinstance(self.one, bool) else np.int64)
        return self.held

    def _seen(self, a: Any) -> Int:
        """Of these numbers, so none is out of range."""
        found = Int.__new__(Int)
        found.wide, found.held, found.one = self.wide, a, None if a.ndim else a.item()
        return found

    def _with(self, how: Callable[[Any, Any], Any], other: Any, turned: bool = False) -> Any:
        if self.one is not None and (number := plain(other)) is not None:
            both: tuple[Any, Any] = (number, self.one) if turned else (self.one, number)
            if how not in (operator.and_, operator.or_):
                both = int(both[0]), int(both[1])
            return Int(how(*both), self.wide or getattr(other, "wide", False))
        if isinstance(other, Unknown):
            return UNKNOWN
        if isinstance(other, float):
            return tile_values.computed(how, *((other, self) if turned else (self, other)))
        if isinstance(other, Pointer | Real):
            return NotImplemented
        both = (array(other), self.a) if turned else (self.a, array(other))
        if how not in (operator.and_, operator.or_):
            both = both[0].astype(np.int64, copy=False), both[1].astype(np.int64, copy=False)
        return Int(how(*both), self.wide or getattr(other, "wide", False))

    def __bool__(self) -> bool:
        return bool(self.a.item() if self.one is None else self.one)

    def __index__(self) -> int:
        return int(self.a.item() if self.one is None else self.one)

    def __getitem__(self, key: Any) -> Int:
        return self._seen(np.asarray(self.a[key]))

    def __invert__(self) -> Int:
        return Int(~self.a)

    def __neg__(self) -> Int:
        return Int(-self.a, self.wide)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.a.shape

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=UNKNOWN)

    @property
    def dtype(self) -> Any:
        return tl.int64 if self.wide else tl.int32

    def to(self, dtype: Any, **_: Any) -> Any:
        if dtype in (tl.int32, tl.int64):
            return Int(self.a + 0 if self.one is None else int(self.one), dtype == tl.int64)
        return Real(tile_values.rounded(self.a, dtype), dtype) if dtype in ARRAYS else UNKNOWN

    def reshape(self, shape: Sequence[int]) -> Int:
        return self._seen(self.a.reshape([int(n) for n in shape]))

    def permute(self, order: Sequence[int]) -> Int:
        return self._seen(self.a.transpose(order))

    __hash__ = object.__hash__


_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in (
        "add", "sub", "mul", "xor", "lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne",
    )},
    "and": operator.and_, "or": operator.or_, "floordiv": quotient, "mod": lambda a, b: a - quotient(a, b) * b,
}  # fmt: skip
for _name, _how in _OPERATORS.items():
    setattr(Int, f"__{_name}__", lambda self, other, how=_how: self._with(how, other))
    setattr(Int, f"__r{_name}__", lambda self, other, how=_how: self._with(how, other, True))
tile_values.define_operators(Int, Unknown)


class Buffer:
    """Global memory of one tensor: its words, where they count, of what type if of floating point, and how often each was
    written or added to. ``touched`` (buffer, elements, whether they are written) is told of every access."""

    touched: ClassVar[Callable[[Buffer, Any, bool], None]] = staticmethod(lambda *_: None)

    def __init__(self, name: str, base: int, count: int, itemsize: int, words: Any = None, dtype: Any = None) -> None:
        self.name, self.base, self.itemsize, self.words, self.dtype = name, base, itemsize, words, dtype
        self.written = np.zeros(count, np.int32)
        self.lock = threading.Lock()

    def at(self, index: Any, doing: str) -> Any:
        if index.size and not (index.min() >= 0 and index.max() < len(self.written)):
            raise Fault(f"{doing} {self.name} at {index.min()} to {index.max()} of {len(self.written)}")
        return index

    def held(self, value: Any) -> Any:
        """What a store of a value leaves here."""
        return array(value) if self.dtype is None else tile_values.rounded(tile_values.floats(value), self.dtype)


class Pointer:
    def __init__(self, buffer: Buffer, index: Any = 0) -> None:
        self.buffer, self.index = buffer, index if isinstance(index, Int) else Int(index, True)
        self.dtype = SimpleNamespace(element_ty=buffer.dtype or UNKNOWN)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.buffer, self._wide() + other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.buffer, self._wide() - other)

    def _wide(self) -> Int:
        return self.index if self.index.wide else Int(self.index.a, True)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.buffer, self.index[key])

    def to(self, _: Any) -> Pointer:
        return self

    def reshape(self, shape: Sequence[int]) -> Pointer:
        return Pointer(self.buffer, self.index.reshape(shape))

    def places(self, mask: Any, doing: str) -> tuple[Any, Any]:
        index, mask = np.broadcast_arrays(self.index.a, array(True if mask is None else mask))
        self.buffer.at(index[mask], doing)
        return index, mask


def load_words(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Any:
    index, mask = pointer.places(mask, "a load of")
    Buffer.touched(pointer.buffer, index[mask], False)
    if pointer.buffer.words is None:
        return UNKNOWN
    with pointer.buffer.lock:
        found = np.where(mask, pointer.buffer.words[np.where(mask, index, 0)], array(other))
    return Int(found) if pointer.buffer.dtype is None else Real(found, pointer.buffer.dtype)


def store_words(pointer: Pointer, value: Any, mask: Any = None) -> None:
    index, mask = pointer.places(mask, "a store to")
    index, buffer = index[mask], pointer.buffer
    Buffer.touched(buffer, index, True)
    with buffer.lock:
        np.add.at(buffer.written, index, 1)
        if buffer.words is not None:
            buffer.words[index] = np.broadcast_to(buffer.held(value), mask.shape)[mask]


def add_words(pointer: Pointer, value: Any, mask: Any = None) -> None:
    index, mask = pointer.places(mask, "an addition to")
    buffer = pointer.buffer
    Buffer.touched(buffer, index[mask], True)
    with buffer.lock:
        np.add.at(buffer.written, index[mask], 1)
        if buffer.words is not None:
            np.add.at(buffer.words, index[mask], np.broadcast_to(buffer.held(value), mask.shape)[mask])


def atomic_add(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> Any:
    if pointer.buffer.dtype is not None:
        return add_words(pointer, value, mask)
    place = pointer.places(None, "an addition to")[0]
    Buffer.touched(pointer.buffer, place, True)
    with pointer.buffer.lock:
        before = pointer.buffer.words[place].copy()
        pointer.buffer.words[place] += value
    return Int(before)


def atomic_increment(pointer: Pointer, last: Any) -> Any:
    """Behind ``last`` it is 0 again."""
    place = pointer.places(None, "a count in")[0]
    Buffer.touched(pointer.buffer, place, True)
    with pointer.buffer.lock:
        before = pointer.buffer.words[place].copy()
        pointer.buffer.words[place] = np.where(before >= array(last), 0, before + 1)
    return Int(before)


class Shared:
    """Shared memory, with its words where they count. An index outside it is a fault."""

    def __init__(self, dtype: Any, shape: Sequence[int], words: Any = None, barriers: Any = None) -> None:
        self.dtype, self.shape, self.words, self.barriers = dtype, [int(n) for n in shape], words, barriers
        self.numel = int(np.prod(self.shape))

    def _seen_as(self, how: Callable[[Any], Any], shape: Sequence[int], dtype: Any = None) -> Shared:
        """The same memory; NumPy may copy what it cannot see so, which would be another's."""
        words = None if self.words is None else how(self.words)
        if words is not None and words.size and not np.shares_memory(words, self.words):
            raise Fault(f"{self.shape} cannot be seen as {list(shape)}")
        return Shared(dtype or self.dtype, shape, words)

    def index(self, at: Any) -> Any:
        if not 0 <= (place := operator.index(at)) < self.shape[0]:
            raise Fault(f"slot {place} of {self.shape[0]} in shared memory")
        if self.barriers is not None:
            return self.barriers[place]
        return self._seen_as(lambda words: words[place], self.shape[1:])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        shape = list(self.shape)
        shape[dim] = length
        first = operator.index(start)
        return self._seen_as(
            lambda words: np.moveaxis(np.moveaxis(words, dim, 0)[first : first + length], 0, dim), shape
        )

    def reshape(self, shape: Sequence[int]) -> Shared:
        shape = [int(n) for n in shape]
        if int(np.prod(shape)) != self.numel:
            raise Fault(f"{self.shape} reshaped to {shape}")
        return self._seen_as(lambda words: words.reshape(shape), shape)

    def permute(self, order: Sequence[int]) -> Shared:
        return self._seen_as(lambda words: words.transpose(order), [self.shape[n] for n in order])

    def reinterpret(self, dtype: Any, shape: Sequence[int], _: Any) -> Shared:
        shape = [int(n) for n in shape]
        count = int(np.prod(shape))
        if count * dtype.primitive_bitwidth > self.numel * self.dtype.primitive_bitwidth:
            raise Fault(f"{shape} in the memory of {self.shape}")
        if dtype == self.dtype:
            return self._seen_as(lambda words: words.reshape(-1)[:count].reshape(shape), shape)
        return self._seen_as(lambda words: words.reshape(-1).view(ARRAYS[dtype])[:count].reshape(shape), shape, dtype)

    _reinterpret = reinterpret

    def load(self, _: Any = None) -> Any:
        if self.words is None:
            return UNKNOWN
        return Int(self.words.copy()) if self.dtype == tl.int32 else Real(self.words.copy(), self.dtype)

    def store(self, value: Any) -> None:
        if self.words is None:
            return
        if isinstance(value, Real) and value.dtype != self.dtype:
            raise Fault(f"a store of {value.dtype} to memory of {self.dtype}")
        self.words[...] = array(value) if self.dtype == tl.int32 else value.a


@dataclass
class Descriptor:
    """A tensor map, slowest dimension first. ``seen`` (kind, buffer, elements) is told of every copy.

    As PTX's tensor copies in tile mode: an element with a coordinate outside 0 to its dimension's size is zero or dropped; of
    any other each coordinate is multiplied by its dimension's byte stride, and the sum with the base is taken modulo 2^64. The
    bytes of a box count whole."""

    buffer: Buffer
    base: int
    sizes: Sequence[int]
    strides: Sequence[int]  #: bytes, of all dimensions
    block_shape: list[int]
    dtype: Any
    layout: Any = UNKNOWN
    seen: Callable[[str, Buffer, Any], None] = lambda *_: None

    def __post_init__(self) -> None:
        rank, size = len(self.sizes), self.dtype.primitive_bitwidth // 8
        fits = rank <= 5 and all(0 < n <= 1 << 32 for n in self.sizes) and self.base % 16 == 0
        if not fits or not all(n % 16 == 0 and 0 <= n < 1 << 40 for n in self.strides[:-1]) or self.strides[-1] != size:
            raise Fault(f"no tensor map: base {self.base:#x}, sizes {self.sizes}, byte strides {self.strides}")
        if not all(0 < n <= 256 for n in self.block_shape[:-1]):
            raise Fault(f"no box: {self.block_shape}")
        count = int(np.prod(self.block_shape))
        self.block_type = SimpleNamespace(shape=self.block_shape, numel=count, nbytes=count * size)

    def load(self, coordinates: Sequence[Any]) -> Any:
        """As a portable kernel has it."""
        known = self.buffer.words is not None
        place = Shared(self.dtype, self.block_shape, np.zeros(self.block_shape, ARRAYS[self.dtype]) if known else None)
        self.copy("load", coordinates, place)
        return place.load()

    def copy(self, kind: str, coordinates: Sequence[Any], place: Shared) -> None:
        if list(place.shape) != list(self.block_shape):
            raise Fault(f"{kind} of a block {self.block_shape} and shared memory {place.shape}")
        at = [int(array(one)) for one in coordinates]
        if len(at) != len(self.sizes) or not all(-(1 << 31) <= one < 1 << 31 for one in at):
            raise Fault(f"{kind} at {at} of {self.sizes}")
        addresses, inside = np.array([self.base], np.uint64), []
        if kind == "load" and place.words is not None:
            place.words[...] = 0
        for one, size, stride, length in zip(at, self.sizes, self.strides, self.block_shape, strict=True):
            there = np.arange(max(one, 0), max(min(one + length, size), 0)).astype(np.uint64)
            inside.append(there.astype(np.int64) - one)
            with np.errstate(over="ignore"):  # modulo 2^64
                addresses = (addresses[:, None] + there[None, :] * np.uint64(stride)).reshape(-1)
        if not addresses.size:
            return
        index = [(int(a) - self.buffer.base) // self.buffer.itemsize for a in (addresses.min(), addresses.max())]
        self.buffer.at(np.array(index), f"{kind} at {at} touches")
        elements = ((addresses - np.uint64(self.buffer.base)) // np.uint64(self.buffer.itemsize)).astype(np.int64)
        self.seen(kind, self.buffer, elements)
        Buffer.touched(self.buffer, elements, kind != "load")
        block = np.ix_(*inside)
        if kind == "load" and place.words is not None:
            place.words[block] = self.buffer.words[elements].reshape([len(one) for one in inside])
        if kind != "load":
            with self.buffer.lock:
                np.add.at(self.buffer.written, elements, 1)
                if place.words is not None and kind == "store":
                    self.buffer.words[elements] = place.words[block].reshape(-1)
                elif place.words is not None:
                    np.add.at(self.buffer.words, elements, place.words[block].reshape(-1))
