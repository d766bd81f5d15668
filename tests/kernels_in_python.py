"""Gluon kernels run by Python itself, for their addresses and their protocol, and if asked for what they compute.

Every device function is the kernel's own. Its module's names for the hardware are replaced: integers are NumPy's, checked for
32 bits, and divided as C divides; partitions are threads that wait for each other at mbarriers and named barriers. An access
outside its tensor raises ``Fault``. What is computed in floating point is ``UNKNOWN``, unless ``launch`` is asked for values:
then memory holds numbers, layouts move nothing, and a product reads shared memory when it is waited for. If that has changed
since it was issued, its result is NaN.
"""

from __future__ import annotations

import operator
import re
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from early_starts import READ, WRITE, Flight, Overlap, Touch
from kernel_values import (
    UNKNOWN,
    Buffer,
    Descriptor,
    Fault,
    Int,
    Pointer,
    Shared,
    Unknown,
    add_words,
    array,
    atomic_add,
    atomic_increment,
    load_words,
    plain,
    quotient,
    store_words,
)  # fmt: skip
from tile_values import ARRAYS, Products, Real, computed
from triton.runtime import jit

PATIENCE = 120  #: seconds until a wait is a deadlock; where cores are few, a wait is long
_HERE = threading.local()
_GROUPS_LEFT = re.compile(r"cp\.async\.bulk\.wait_group (\d)")


class Barrier:
    """An mbarrier in shared memory."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0
        self.known = False  #: whether a thread came that knows that the kernel before has ended

    def _settle(self) -> None:
        if self.left < 0:
            raise Fault("more arrivals at an mbarrier than it counts")
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.count, self.phase + 1
            _HERE.program.changed.notify_all()

    def come(self, arrivals: int, promised: int) -> None:
        with _HERE.program.changed:
            self.left -= arrivals
            self.bytes += promised
            self.known |= _HERE.knows
            self._settle()

    def wait(self, parity: int) -> None:
        _HERE.program.until(lambda: self.phase & 1 != parity, f"an mbarrier of {self.count} in phase {self.phase}")
        _HERE.knows |= self.known


class _Mbarrier:
    MBarrierLayout = Unknown

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.left = count

    @staticmethod
    def expect(barrier: Barrier, nbytes: int) -> None:
        barrier.come(1, nbytes)

    @staticmethod
    def arrive(barrier: Barrier, count: int, pred: Any = True) -> None:
        if bool(pred):
            barrier.come(count, 0)

    @staticmethod
    def wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
        if bool(pred):
            barrier.wait(int(phase))

    @staticmethod
    def invalidate(barrier: Barrier) -> None:
        pass


def _tma_load(descriptor: Descriptor, coordinates: Sequence[Any], barrier: Barrier, place: Shared) -> None:
    descriptor.copy("load", coordinates, place)
    barrier.come(0, -descriptor.block_type.nbytes)


class _Reductions:
    """A thread's reductions by TMA: their shared memory is read, and the sums are written, as late as they may be."""

    @staticmethod
    def add(descriptor: Descriptor, at: Sequence[Any], place: Shared) -> None:
        _HERE.reductions.append((descriptor, at, place))

    @staticmethod
    def read(left: int) -> None:
        for nth, (descriptor, at, place) in enumerate(_HERE.reductions[: len(_HERE.reductions) - left]):
            words = None if place.words is None else place.words.copy()
            _HERE.reductions[nth] = descriptor, at, Shared(place.dtype, place.shape, words)

    @staticmethod
    def wait(left: int) -> None:
        while len(_HERE.reductions) > left:
            descriptor, at, place = _HERE.reductions.pop(0)
            descriptor.copy("reduction", at, place)


@dataclass
class Program:
    """One program of a grid: what its partitions share."""

    number: int
    programs: int
    warps: int
    values: bool
    overlap: Overlap
    failed: threading.Event  #: a thread of any program of the grid, so that none polls for ever
    changed: threading.Condition = field(default_factory=threading.Condition)
    met: dict[int, list[int]] = field(
        default_factory=dict
    )  #: named barrier -> threads that have come, times it was full
    known: set[int] = field(
        default_factory=set
    )  #: of these, where a thread came that knows that the kernel before has ended
    errors: list[BaseException] = field(default_factory=list)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.errors or holds(), PATIENCE):
                raise Fault(f"deadlock: {_HERE.name} waits for {what}")
            if self.errors and not holds():
                raise Fault("another partition failed")

    def meet(self, number: int, threads: int, waits: bool) -> None:
        with self.changed:
            state = self.met.setdefault(number, [0, 0])
            state[0] += 32 * _HERE.warps
            turn = state[1]
            if _HERE.knows:
                self.known.add(number)
            if state[0] > threads:
                raise Fault(f"{state[0]} threads at barrier {number} of {threads}")
            if state[0] == threads:
                state[:] = [0, turn + 1]
                self.changed.notify_all()
        if waits:
            self.until(lambda: state[1] > turn, f"barrier {number}")
            _HERE.knows |= number in self.known


def _assembly(text: str, _: str, given: Sequence[Any], **__: Any) -> Any:
    """What of inline PTX counts here."""
    overlap = _HERE.program.overlap
    if (left := _GROUPS_LEFT.match(text)) is not None:
        _Reductions.wait(int(left[1]))
    elif "griddepcontrol.wait" in text:
        overlap.waited = _HERE.knows = True
    elif "griddepcontrol.launch_dependents" in text:
        overlap.start_next()
    elif text.startswith("fence.acq_rel"):
        overlap.fence()
    elif "bar.sync $1" in text or "bar.arrive" in text:
        if len(given) < 3 or bool(given[2]):
            _HERE.program.meet(int(array(given[0])), int(array(given[1])), "bar.sync" in text)
    elif "global.inc.u32" in text:
        return atomic_increment(given[0], given[1])
    elif "atom.relaxed" in text:
        return atomic_add(given[0], 1)
    elif "ld.relaxed" in text:
        _await_turn(*given)
    elif "ld.acquire" in text:
        if _HERE.program.failed.is_set():
            raise Fault("another partition or program failed")
        _HERE.knows = True
        return load_words(given[0])
    elif "trap" in text or "shfl" in text or text.startswith("mov.b32 $0, $1"):  # a branch that is never taken
        return given[0]
    elif "st.release" in text:
        store_words(given[0], given[1])
    elif "st.relaxed" in text:
        store_words(given[0], 1, given[1] != 0)
    elif "global.add.u32" in text:
        index, mask = given[0].places(given[1] != 0, "a count in")
        Buffer.touched(given[0].buffer, index[mask], True)
        with given[0].buffer.lock:
            np.add.at(given[0].buffer.words, index[mask], 1)
    elif "global.add.v4" in text:
        quads = given[0].index.a[..., None] + np.arange(4)
        known = isinstance(given[1], Real)
        add_words(
            Pointer(given[0].buffer, Int(quads, True)),
            Real(np.stack([one.a for one in given[1:]], -1)) if known else UNKNOWN,
        )
    return UNKNOWN


def _await_turn(turn: Any, passed: Any, due: Any, passes: Any, number: Any) -> None:
    """Of the kernels of sm80: one turn is passed on before another is waited for."""
    if bool(passes):
        store_words(passed, number)
    deadline = time.monotonic() + PATIENCE
    while not isinstance(seen := load_words(turn), Unknown) and seen.a < int(array(due)):
        if _HERE.program.failed.is_set():
            raise Fault("another partition or program failed")
        if time.monotonic() > deadline:
            raise Fault(f"deadlock: {_HERE.name} waits for a turn")
        time.sleep(0)


def _touched(buffer: Buffer, index: Any, written: bool) -> None:
    _HERE.program.overlap.touch(_HERE.knows, Touch(WRITE if written else READ, buffer, index))


Buffer.touched = staticmethod(_touched)


def _atomic_add(pointer: Any, value: Any, mask: Any = None, sem: str = "acq_rel", **_: Any) -> Any:
    _HERE.knows |= sem in ("acquire", "acq_rel")
    return atomic_add(pointer, value, mask)


def _elementwise(how: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **_: Any) -> Any:
        numbers = [plain(one) for one in given]
        if None not in numbers:
            return Int(of_numbers(*map(int, numbers)), any(getattr(one, "wide", False) for one in given))
        if any(isinstance(one, Unknown) for one in given):
            return UNKNOWN
        if any(isinstance(one, Real | float) for one in given):
            return computed(how, *given)
        return Int(how(*map(array, given)), any(getattr(one, "wide", False) for one in given))

    return call


def _high_word(a: Any, b: Any) -> Any:
    """Of the product of two numbers of 32 bits without a sign."""
    return (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF) >> 32


def _ceiling(a: Any, b: Any) -> Any:
    return quotient(a + b - 1, b)


def _reduced(how: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Any, axis: int | None = None, **_: Any) -> Any:
        if isinstance(x, Unknown):
            return UNKNOWN
        if isinstance(x, Real):
            return computed(lambda a: np.asarray(how(a, axis=axis)), x)
        return Int(how(x.a, axis=axis), x.wide)

    return call


def _where(condition: Any, one: Any, other: Any) -> Any:
    """The condition is no number of a floating-point operation."""
    if any(isinstance(each, Unknown) for each in (condition, one, other)):
        return UNKNOWN
    chosen = array(condition) != 0
    if any(isinstance(each, Real | float) for each in (one, other)):
        return computed(lambda a, b: np.where(chosen, a, b), one, other)
    return Int(np.where(chosen, array(one), array(other)), any(getattr(each, "wide", False) for each in (one, other)))


def _filled(shape: Sequence[int], value: Any, dtype: Any = tl.float32, *_: Any, **__: Any) -> Any:
    if isinstance(dtype, Unknown):
        return UNKNOWN
    return Int(np.full(shape, value)) if dtype in (tl.int32, tl.int64) else Real(np.full(shape, value), dtype)


def _zeros_like(x: Any) -> Any:
    return _real(np.zeros_like)(x) if isinstance(x, Real) else x * 0  # infinity times 0 is NaN


def _specialize(partitions: Any, warps: Sequence[int], _registers: Any) -> None:
    program, started = _HERE.program, []
    for number, ((function, given), count) in enumerate(zip(partitions, (program.warps, *warps), strict=True)):
        name = f"partition {number} of program {program.number}"
        work = lambda function=function, given=given: function(*given)  # noqa: E731
        started.append(_spawn(program, name, count, work, _HERE.knows))
    for thread in started:
        thread.join()


def _spawn(program: Program, name: str, warps: int, work: Callable[[], Any], knows: bool) -> threading.Thread:
    def run() -> None:
        _HERE.program, _HERE.name, _HERE.warps, _HERE.products = program, name, warps, Products()
        _HERE.knows = knows  # that the kernel before has ended
        _HERE.asked, _HERE.groups, _HERE.reductions = [], [], []
        try:
            work()
            _Reductions.wait(0)
        except BaseException as error:
            with program.changed:
                program.errors.append(error)
                program.failed.set()
                program.changed.notify_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
    if dtype == tl.int64:
        return Shared(dtype, shape, barriers=[Barrier() for _ in range(shape[0])])
    if dtype == tl.int32:
        return Shared(dtype, shape, np.zeros(shape, np.int32))
    return Shared(dtype, shape, np.full(shape, np.nan, ARRAYS[dtype]) if _HERE.program.values else None)


def _split(x: Any) -> Any:
    return (UNKNOWN, UNKNOWN) if isinstance(x, Unknown) else (x[..., 0], x[..., 1])


def _cast(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if isinstance(x, Int | Real) else Int(x, True)


def _product(a: Any, b: Any, acc: Any, use_acc: Any = True, is_async: bool = False) -> Any:
    if any(isinstance(one, Unknown) or (isinstance(one, Shared) and one.words is None) for one in (a, b)):
        return Unknown(acc.shape)
    found = _HERE.products.issue(a, b, acc, bool(use_acc))
    if not is_async:
        _HERE.products.wait(0)
    return found


def _dot(a: Any, b: Any, acc: Any = None, **_: Any) -> Any:
    found = _mma(a, b, 0.0)
    return found if acc is None else found + acc


def _arange(start: Any, end: Any, **_: Any) -> Any:
    return UNKNOWN if isinstance(end, Unknown) else Int(np.arange(start, end))


def _range(*ends: Any, **_: Any) -> Any:
    return map(Int, range(*map(operator.index, ends)))


class _AsyncCopy:
    """Copies by cp.async: done when they are waited for, and not before."""

    @staticmethod
    def load(place: Shared, pointer: Any, mask: Any = None) -> None:
        _HERE.asked.append((place, load_words(pointer, mask, 0)))

    @staticmethod
    def commit_group() -> None:
        _HERE.groups.append(_HERE.asked)
        _HERE.asked = []

    @staticmethod
    def wait_group(left: int) -> None:
        while len(_HERE.groups) > left:
            for place, tile in _HERE.groups.pop(0):
                place.store(tile)


def _mma(a: Any, b: Any, acc: Any) -> Any:
    if any(isinstance(one, Unknown) for one in (a, b)):
        return Unknown(acc.shape)
    return computed(lambda x, y, z: np.matmul(x.astype(np.float32), y.astype(np.float32)) + z, a, b, acc)


def _hidden_behind(x: Any, columns: Any, last: Any, bits: str) -> Any:
    otherwise = float(np.array(int(bits[2:], 16), np.uint32).view(np.float32))
    return _where(columns <= last, x, otherwise)


def _raise_peak(peak: Any, top: Any, _: int) -> Any:
    """All rows as those of one warp."""
    if isinstance(top, Unknown):
        return UNKNOWN, UNKNOWN, UNKNOWN
    if not (top.a > peak.a + 8).any():
        return peak, peak * 0 + 1.0, Int(np.zeros(peak.shape, np.int64))
    highest = computed(lambda a, b: np.maximum(a.max(1, keepdims=True), b), top, peak)
    return highest, computed(lambda a, b: np.exp2(a - b), peak, highest), Int(np.ones(peak.shape, np.int64))


def _raised_in(shrink: Any, _: int) -> Any:
    return UNKNOWN if isinstance(shrink, Unknown) else Int(np.full(shrink.shape, int((shrink.a != 1).any())))


def _scaled_if(raised: Any, x: Any, shrink: Any, _: int) -> Any:
    unknown = isinstance(x, Unknown) or isinstance(raised, Unknown)
    return x if unknown or not raised.a.any() else x * shrink[:, :1]


def _real(how: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **_: UNKNOWN if any(isinstance(x, Unknown) for x in given) else computed(how, *given)


#: Names of layouts, which are known nowhere.
_LAYOUTS = (
    "BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout",
)  # fmt: skip
_FLOATING: Mapping[str, Callable[..., Any]] = {
    "exp2": np.exp2, "log2": np.log2, "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a), "abs": np.abs,
    "div_rn": np.divide, "fma": lambda a, b, c: a * b + c,
}  # fmt: skip
_LANGUAGE = SimpleNamespace(
    constexpr=lambda x: x, arange=_arange, range=_range, static_range=range, static_assert=lambda *_: None, cast=_cast,
    minimum=_elementwise(np.fmin, min), maximum=_elementwise(np.fmax, max), where=_where,
    cdiv=_elementwise(_ceiling, _ceiling), umulhi=_elementwise(_high_word, _high_word),
    sum=_reduced(np.sum), max=_reduced(np.max), min=_reduced(np.min),
    convert_layout=lambda x, *_, **__: x, multiple_of=lambda x, _: x, max_contiguous=lambda x, _: x,
    load=load_words, store=store_words, atomic_add=_atomic_add, inline_asm_elementwise=_assembly,
    program_id=lambda _: Int(_HERE.program.number), num_programs=lambda _: Int(_HERE.program.programs),
    zeros=lambda shape, *rest, **_: _filled(shape, 0, *rest), full=_filled, zeros_like=_zeros_like, split=_split,
    to_tensor=lambda x: x if isinstance(x, Int | Unknown | Real) else Int(x), reshape=lambda x, shape: x.reshape(shape),
    dot=_dot, trans=lambda x: x.permute([1, 0]), permute=lambda x, order: x.permute(order),
    allocate_shared_memory=_allocate, warp_specialize=_specialize,
    int16=tl.int16, int32=tl.int32, int64=tl.int64, float32=tl.float32, float16=tl.float16, bfloat16=tl.bfloat16,
    **dict.fromkeys(_LAYOUTS, UNKNOWN), **{name: _real(how) for name, how in _FLOATING.items()},
    math=SimpleNamespace(**{name: _real(_FLOATING[name]) for name in ("exp2", "log2", "rsqrt")}),
)  # fmt: skip


def _awaited(left: int, deps: Sequence[Any]) -> Any:
    _HERE.products.wait(left)
    return deps[0] if len(deps) == 1 else tuple(deps)


#: Names in modules of kernels -> what they are here.
_NAMES: Mapping[str, Any] = {
    "gl": _LANGUAGE, "tl": _LANGUAGE, "mbarrier": _Mbarrier, "tma_load": _tma_load,
    "tma_store": lambda descriptor, at, place: descriptor.copy("store", at, place),
    "tma_reduce_add": _Reductions.add, "tma_store_wait": _Reductions.read,
    "thread_barrier": lambda: None, "block_barrier": lambda: None, "fence_async_shared": lambda: None,
    "warpgroup_mma": _product, "warpgroup_mma_wait": _awaited, "range": _range,
    "to_carry": lambda weights, dtype, *_: weights.to(dtype), "of_carried": lambda p, *_: p, "repack": lambda p, *_: p,
    "rescaled": lambda acc, shrink: acc * shrink, "async_copy": _AsyncCopy, "async_load": _AsyncCopy.load,
    "mma_v2": _mma, "hidden_behind": _hidden_behind, "raise_peak": _raise_peak, "scaled_if": _scaled_if,
    "raised_in": _raised_in,
}  # fmt: skip
_MODULES: dict[str, dict[str, Any]] = {}


def in_python(x: Any) -> Any:
    """A device function, or a constant, as it is here."""
    if isinstance(x, tl.constexpr):
        return x.value
    if isinstance(x, jit.JITFunction | jit.ConstexprFunction):
        return lambda *given, **named: _function(x.fn)(*given, **named)
    return x


def _function(fn: Any) -> Any:
    if (names := _MODULES.get(fn.__module__)) is None:
        found = {name: in_python(value) for name, value in fn.__globals__.items()}
        names = _MODULES[fn.__module__] = {
            **found,
            **{name: _NAMES[name] for name in _NAMES if name in found},
            "range": _NAMES["range"],
        }
    called = types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__)
    called.__kwdefaults__ = fn.__kwdefaults__
    return called


def launch(
    kernel: Any, grid: int, warps: int, arguments: Mapping[str, Any], values: bool = False, before: Flight | None = None,
    after: Flight | None = None,
) -> None:  # fmt: skip
    """All programs at once. ``arguments``: by name, of which integers are ``Int``, and device functions themselves.
    ``values``: buffers hold their words, and these are computed with. ``before``, ``after``: as ``Overlap`` has them."""
    function = _function(kernel.fn)
    given = {name: in_python(value) for name, value in arguments.items()}
    failed = threading.Event()
    programs = [Program(number, grid, warps, values, Overlap(before, after), failed) for number in range(grid)]
    work = lambda: function(**given)  # noqa: E731
    threads = [_spawn(one, f"program {one.number}", warps, work, before is None) for one in programs]
    for thread in threads:
        thread.join()
    for one in programs:
        one.overlap.start_next()
    for one in programs:
        for error in sorted(one.errors, key=lambda error: "another partition" in str(error)):
            raise error
        for number, (left, _) in one.met.items():
            if left:
                raise Fault(f"program {one.number} leaves {left} threads at barrier {number}")
    if before is not None and not any(one.overlap.waited for one in programs):
        raise Fault("the kernel may end before the one before it, for which the next one would not wait")
