"""A GPU that is Python: memory, and the launches of a plan, each kernel run by tests/kernels_in_python.py."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import kernels_in_python
import numpy as np
import pytest
import torch
import triton.language as tl
from early_starts import Flight
from kernel_values import Buffer, Descriptor, Int, Pointer

from fa2tune.compiling import compiler
from fa2tune.launching import cuda, key_splits, launch, passes
from fa2tune.launching.image import MapFormat
from fa2tune.spec.problem import ITEMSIZE, Config, Problem

PROGRAMS = 3  #: its multiprocessors
GAP = 1 << 24  #: bytes between tensors
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
ELEMENTS = {2: tl.bfloat16, 4: tl.float32}
#: What memory holds that nothing has set.
UNSET = 0x2F2F2F2F


class PythonGpu:
    """Plans made while it is there are for it. ``values``: tensors hold numbers (``place_values``); ``arch``: its compute
    capability."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, values: bool = False, arch: int = 90) -> None:
        self.values, self.arch = values, arch
        self.buffers: dict[int, Buffer] = {}
        self.maps: dict[int, tuple[Any, ...]] = {}
        self.bound: list[tuple[Any, ...]] = []
        self.placed: list[dict[str, Any]] = []
        self.next = 0x7F00_0000_0000
        driver = SimpleNamespace(cuTensorMapEncodeTiled=self._encode, cuLaunchKernelEx=print)
        monkeypatch.setattr(cuda, "library", lambda: driver)
        monkeypatch.setattr(cuda, "may_start_early", lambda: True)
        monkeypatch.setattr(launch, "load", self._load)
        monkeypatch.setattr(launch, "sm_count", lambda _: PROGRAMS)
        for where in (launch, passes):
            monkeypatch.setattr(where, "arch_of", lambda _: arch)
        made, placed = passes.bind, passes.placed
        monkeypatch.setattr(passes, "bind", lambda *given: self.bound.append(given[:3]) or made(*given))

        def kept(*asked: Any) -> Any:
            found = placed(*asked)
            self.placed.append(found[0])
            return found

        monkeypatch.setattr(passes, "placed", kept)

    def _encode(self, place, _type, rank, address, sizes, strides, block, _steps, *_rest):  # type: ignore[no-untyped-def]
        self.maps[place.value] = address.value, list(sizes)[::-1], list(strides)[: rank - 1][::-1], list(block)[::-1]
        return 0

    @staticmethod
    def _load(variant: Any, spec: Any, config: Any, *_: Any) -> Any:
        config, block = dict(config), compiler.block_of
        formats = [
            MapFormat(0, ITEMSIZE[variant.tensors[name] or spec.dtype], 0, tuple(block(variant, spec, config, name)))
            for name in compiler.described(variant, spec, config)
        ]
        image = SimpleNamespace(
            name="k", maps=formats, warps=4, ctas=1, shared=0, programmatic=False, cooperative=False
        )
        return SimpleNamespace(image=image, kinds=launch.kinds(variant, spec, config), handle=None)

    def count_launches_of(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        """What a module of launching/ binds is run, too."""
        made = launch.bind
        monkeypatch.setattr(
            module, "bind", lambda *given, **named: self.bound.append(given[:3]) or made(*given, **named)
        )

    def place(self, name: str, count: int, itemsize: int, words: Any = None, dtype: Any = None) -> int:
        base = self.next
        self.next += -(-(count * itemsize + GAP) // 512) * 512
        self.buffers[base] = Buffer(name, base, count, itemsize, words, dtype)
        return base

    def place_values(self, name: str, tensor: torch.Tensor) -> int:
        """A tensor of the CPU, whose memory this is, but of bfloat16."""
        assert tensor.storage_offset() == 0 and tensor.dtype is not torch.bfloat16
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        words = torch.as_strided(tensor, (count,), (1,)).numpy()
        return self.place(name, count, tensor.element_size(), words, DTYPES.get(tensor.dtype))

    def place_workspaces(self) -> int:
        """Those of the plans made so far; their address."""
        block = self.next
        for one in {id(p): p for given in self.placed for p in given.values()}.values():
            count, dtype, words = int(np.prod(one.shape)), DTYPES.get(one.dtype), None
            if one.dtype is torch.int32:
                words = np.full(count, UNSET, np.int64)
            elif self.values:
                words = np.full(count, np.nan, np.float32)
            name = f"workspace at {one.start}"
            self.buffers[block + one.start] = Buffer(name, block + one.start, count, one.dtype.itemsize, words, dtype)
        return block

    def seen(self, kind: str, buffer: Buffer, elements: Any) -> None:
        """Told of every copy by TMA."""

    def run(self, plan: passes.Kernels, addresses: list[int]) -> None:
        """Kernels one after the other; what one may not touch that starts early is a fault (tests/early_starts.py)."""
        launches = plan.chain.launches
        early = [cuda._PROGRAMMATIC in [one.id for one in call.attributes] for call, _ in launches] + [False]  # type: ignore[union-attr]
        flight: Flight | None = None
        for nth, ((call, places), (variant, problem, config)) in enumerate(zip(launches, self.bound, strict=True)):  # type: ignore[arg-type]
            before, after = flight if early[nth] else None, Flight() if early[nth + 1] else None
            given = [addresses[which] + behind for which, behind in places]
            _, kept = call.packed(given, 0)
            spec = problem.specialization
            constants = compiler.with_hooks(compiler.constexprs(variant, spec, config))
            kinds, pointers = list(call.function.kinds), list(kept[1])
            arguments: dict[str, Any] = dict(constants)
            at = 0
            for name in variant.parameters:
                if name not in constants:
                    arguments[name] = self._argument(kinds[at], pointers[at])
                    at += 1 + 2 * len(
                        getattr(arguments[name], "sizes", ())
                    )  # a map is followed by its sizes and strides
            grid, warps = call.config.grid_x, config["num_warps"]
            kernels_in_python.launch(variant.kernel, grid, warps, arguments, self.values, before, after)
            # one that starts early may let the next one start before the one before it has ended
            flight = after.with_those_of(before) if after is not None and before is not None else after

    def _holding(self, address: int) -> Buffer:
        """The memory that begins there, or that it lies in."""
        if (found := self.buffers.get(address)) is not None:
            return found
        (found,) = (
            one for one in self.buffers.values() if 0 < address - one.base < len(one.written) * one.itemsize
        )  # fmt: skip
        return found

    def _argument(self, kind: str, pointer: int) -> Any:
        if kind == "map":
            base, sizes, strides, block = self.maps[pointer]
            buffer = self._holding(base)
            dtype = buffer.dtype or ELEMENTS[buffer.itemsize]
            return Descriptor(buffer, base, sizes, [*strides, buffer.itemsize], block, dtype, seen=self.seen)
        if kind == "fp32":
            return ctypes.c_float.from_address(pointer).value
        if kind == "pointer":
            address = ctypes.c_uint64.from_address(pointer).value
            nothing = Buffer("nothing", 0, 0, 4, np.zeros(1, np.float32) if self.values else None, tl.float32)
            if not address:
                return Pointer(nothing)
            buffer = self._holding(address)
            return Pointer(buffer, (address - buffer.base) // buffer.itemsize)
        return Int({"i32": ctypes.c_int32, "i64": ctypes.c_int64}[kind].from_address(pointer).value, kind == "i64")


class InPlaceGpu(PythonGpu):
    """For plans of key_splits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, values=True)
        self.count_launches_of(monkeypatch, key_splits)

    def run_whole(
        self, problem: Problem, tensors: dict[str, torch.Tensor], scale: float, config: Config
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, lse) of a kernel that needs no memory next to the results, and writes each word of them once."""
        plan = SimpleNamespace()
        plan.chain, block = key_splits.bound(problem, tensors, scale, config, 0)
        assert not block, "no memory next to the results"
        self.run(plan, [self.place_values(name, tensor) for name, tensor in tensors.items()])
        for base, buffer in self.buffers.items():
            if buffer.name in ("o", "lse"):
                assert (buffer.written == 1).all(), f"each word of {buffer.name} at {base:#x} is written once"
        return tensors["o"], tensors["lse"]
