"""Floating-point tiles for tests/kernels_in_python.py: NumPy arrays with a type of the language, and products that run until
they are waited for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl

#: Of arrays; bfloat16 has float32's, with numbers that bfloat16 holds.
ARRAYS = {tl.float32: np.float32, tl.float16: np.float16, tl.bfloat16: np.float32, tl.int32: np.int32}


def rounded(a: Any, dtype: Any) -> Any:
    """Values of an array as ``dtype`` holds them, to the nearest and even."""
    if dtype != tl.bfloat16:
        with np.errstate(over="ignore"):
            return np.asarray(a).astype(ARRAYS[dtype])
    bits = np.ascontiguousarray(a, np.float32).view(np.uint32).astype(np.uint64)
    even = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(a), even, a).astype(np.float32).reshape(np.shape(a))


class Real:
    """A tile, row or number. ``unread``: why nothing may read it yet."""

    def __init__(self, a: Any, dtype: Any = tl.float32, layout: Any = None) -> None:
        self.held, self.dtype, self.unread = np.asarray(a, ARRAYS[dtype]), dtype, ""
        self.type = SimpleNamespace(layout=layout)

    @property
    def a(self) -> Any:
        if self.unread:
            raise AssertionError(self.unread)
        return self.held

    @property
    def shape(self) -> list[int]:
        return list(self.held.shape)

    def _like(self, a: Any) -> Real:
        return Real(a, self.dtype)

    def __getitem__(self, key: Any) -> Real:
        return self._like(self.a[key])

    def __neg__(self) -> Real:
        return self._like(-self.a)

    def __bool__(self) -> bool:
        raise AssertionError("control flow depends on a floating-point number")

    def to(self, dtype: Any, **_: Any) -> Real:
        return Real(rounded(self.a, dtype), dtype)

    def reshape(self, shape: Sequence[int]) -> Real:
        return self._like(self.a.reshape([int(n) for n in shape]))

    def permute(self, order: Sequence[int]) -> Real:
        return self._like(self.a.transpose(order))

    def expand_dims(self, axis: int) -> Real:
        return self._like(np.expand_dims(self.a, axis))

    def broadcast_to(self, shape: Sequence[int]) -> Real:
        return self._like(np.broadcast_to(self.a, [int(n) for n in shape]))

    __hash__ = object.__hash__


def floats(x: Any) -> Any:
    """An argument of a floating-point operation: of a Real, an integer tile or a number."""
    if isinstance(x, Real):
        return x.a
    return np.asarray(getattr(x, "a", x), np.float32)


def computed(how: Callable[..., Any], *given: Any) -> Real:
    with np.errstate(all="ignore"):
        return Real(how(*map(floats, given)).astype(np.float32))


_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
}  # fmt: skip


def define_operators(integers: Callable[[Any], Any], unknown: type) -> None:
    """``integers``: makes an integer tile of an array; ``unknown``: type of what swallows every operation."""

    def both(how: Callable[[Any, Any], Any], turned: bool) -> Callable[[Real, Any], Any]:
        def call(self: Real, other: Any) -> Any:
            if isinstance(other, unknown):
                return other
            return computed(how, other, self) if turned else computed(how, self, other)

        return call

    for name, how in _OPERATORS.items():
        setattr(Real, f"__{name}__", both(how, False))
        setattr(Real, f"__r{name}__", both(how, True))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        compare = getattr(operator, name)
        setattr(Real, f"__{name}__", lambda self, other, how=compare: integers(how(floats(self), floats(other))))


class Products:
    """Those that one partition has issued and not waited for, in order."""

    def __init__(self) -> None:
        self.running: list[tuple[Real, Any, Any, Any]] = []

    def issue(self, a: Any, b: Any, acc: Real, add: bool) -> Real:
        """a: a tile, or shared memory like b. What memory holds is read when the product is waited for, and has to be the same
        then."""
        found = Real(np.empty(acc.shape, np.float32))
        found.unread = "a product is read before it is waited for"
        before = [None if isinstance(one, Real) else one.words.copy() for one in (a, b)]
        self.running.append((found, (a.a if isinstance(a, Real) else a, b), before, acc if add else None))
        return found

    def wait(self, left: int) -> None:
        count = max(len(self.running) - left, 0)
        done, self.running = self.running[:count], self.running[count:]
        for found, operands, before, acc in done:
            arrays = [one if then is None else one.words for one, then in zip(operands, before, strict=True)]
            moved = any(
                then is not None and not np.array_equal(now, then, equal_nan=True)
                for now, then in zip(arrays, before, strict=True)
            )
            with np.errstate(all="ignore"):
                product = np.matmul(arrays[0].astype(np.float32), arrays[1].astype(np.float32))
                found.held = (product if acc is None else product + acc.held) * (np.nan if moved else 1)
            found.unread = ""
