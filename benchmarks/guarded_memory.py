"""Tensors that lie where an address that is off is found.

arena   all in the middle of memory that is full of NaN: an address that is off faults nowhere, but what it reads is NaN,
        and what it writes is found and named
start   each at the start of memory with nothing mapped before or behind: an address in front of it faults
end     and at the end of such memory
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from fa2tune.devices import library
from fa2tune.launching.cuda import check

STAGES = ("arena", "start", "end")
ARENA_BYTES, APART = 6 << 30, 128 << 20
PAGE = 2 << 20  #: bytes that the driver maps at once


class Stray(AssertionError):
    """Memory beside the tensors was written."""


class _Bytes:
    """Memory of the driver's own, as torch takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class Memory:
    """Where the tensors of a call lie. ``stage``: one of STAGES."""

    def __init__(self, stage: str, device: str) -> None:
        self.stage, self.device = stage, device
        self.spans: list[tuple[str, int, int]] = []  #: name, first and last byte of the arena
        self.gaps: list[int] = []  #: addresses
        self.mapped: list[int] = []
        if stage == "arena":
            self.arena = torch.full((ARENA_BYTES,), 0xFF, dtype=torch.uint8, device=device)
            self.next = APART

    def _map(self, size: int) -> int:
        """An address, of which torch's allocator knows nothing."""
        address = ctypes.c_uint64()
        check(library().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)), f"mapping {size} bytes")
        return address.value

    @staticmethod
    def _unmap(addresses: list[int]) -> None:
        while addresses:
            check(library().cuMemFree_v2(ctypes.c_uint64(addresses.pop())), "unmapping")

    def _own(self, size: int) -> torch.Tensor:
        """Pages with a gap before them."""
        if self.device != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        self.gaps.append(self._map(APART))
        self.mapped.append(self._map(size))
        return torch.as_tensor(_Bytes(self.mapped[-1], size), device=self.device)

    def tensor(self, name: str, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Full of 0xFF, which is NaN in every float type."""
        size = dtype.itemsize
        span = size * (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)))
        if self.stage == "arena":
            first = self.next
            self.next += -(-span // 512) * 512 + APART
            if self.next > len(self.arena):
                raise ValueError(f"{name}: {span} bytes do not fit the arena")
            self.spans.append((name, first, first + span))
            memory, place = self.arena, first
        else:
            whole = -(-span // PAGE) * PAGE
            memory = self._own(whole).fill_(0xFF)
            place = 0 if self.stage == "start" else (whole - span) // 16 * 16
        return memory.view(dtype).as_strided(tuple(shape), tuple(strides), place // size)

    def like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy."""
        return self.tensor(name, tensor.shape, tensor.stride(), tensor.dtype).copy_(tensor)

    def ready(self) -> None:
        """Nothing is mapped between the tensors from here on."""
        if self.gaps:
            self.gaps.append(self._map(APART))
            self._unmap(self.gaps)

    def close(self) -> None:
        self._unmap(self.mapped)

    def check(self) -> None:
        """Stray: a byte of the arena that is of no tensor has changed."""
        if self.stage != "arena":
            return
        ends = [(name, first, last) for name, first, last in self.spans] + [("the arena's end", len(self.arena), 0)]
        begin = 0
        for number, (name, first, last) in enumerate(ends):
            other = self.arena[begin:first] != 0xFF
            if other.any():
                at = begin + int(other.nonzero()[0])
                before = f", {at - ends[number - 1][2]} behind {ends[number - 1][0]}" if number else ""
                raise Stray(f"{int(other.sum())} bytes, the first {first - at} before {name}{before}")
            begin = last
