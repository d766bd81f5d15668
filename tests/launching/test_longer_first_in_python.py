"""The fused Hopper backward of packed sequences with longer sequences first (LONGER_FIRST), run by Python
(tests/kernels_in_python.py): gradients beside float64 attention, the order in which programs take tiles, addresses, and what
other kernels in flight touch."""

from __future__ import annotations

import itertools
import sys
import threading
from typing import Any

import kernels_in_python
import pytest
from gpu_in_python import PythonGpu
from kernel_values import Buffer, Fault
from test_computed_in_python import BACKWARDS, PACKING, Call, check_backward

from fa2tune.launching import launch
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band

PTX = "griddepcontrol.wait; mov.b32 $0, 0;"
LONGER = {"LONGER_FIRST": True}
EARLY = {"EARLY_START": True}
#: Short ones and a long one behind them.
LONG_LAST = (*((1 + 7 * n % 40, 1 + 5 * n % 40) for n in range(9)), (300, 310))
#: More sequences than are read at once.
MANY = tuple((1 + n % 3, 1 + n % 2) for n in range(140))
CALLS = [
    (Call(LONG_LAST, (2, 1), (64, 64), CAUSAL, packed=True), "concatenated", {}),
    (Call(LONG_LAST, (2, 2), (64, 64), FULL, packed=True), "scores ahead", {"HEADS_PER_WAVE": 1}),
    (Call(PACKING, (2, 1), (128, 128), CAUSAL, packed=True), "a block behind", {}),
    (Call(PACKING, (4, 2), (128, 128), FULL, packed=True), "apart, by TMA", {}),
    (Call(PACKING, (2, 1), (64, 64), band(40, 10), packed=True), "from registers", {"BLOCK_M": 128}),
    (Call(PACKING, (1, 1), (96, 96), CAUSAL, packed=True), "from registers", {"IN_PARTS": True, "ORDER": "together"}),
    (Call(MANY, (1, 1), (64, 64), CAUSAL, packed=True), "concatenated", {}),
    (Call(((300, 300),), (1, 1), (64, 64), CAUSAL, packed=True), "concatenated", {}),
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PythonGpu:
    return PythonGpu(monkeypatch, values=True)


@pytest.mark.parametrize(("call", "form", "more"), CALLS, ids=str)
@pytest.mark.parametrize("starts", [{}, EARLY], ids=["one after the other", "each started early"])
def test_gradients(gpu: PythonGpu, call: Call, form: str, more: dict[str, Any], starts: dict[str, bool]) -> None:
    check_backward(gpu, call, {**BACKWARDS[form], **more, **starts, **LONGER})


@pytest.mark.parametrize(("heads", "parts"), [((4, 2), 2), ((6, 2), 3)], ids=str)
def test_groups_in_parts(gpu: PythonGpu, heads: tuple[int, int], parts: int) -> None:
    call = Call(LONG_LAST, heads, (64, 64), CAUSAL, packed=True)
    check_backward(gpu, call, {**BACKWARDS["concatenated"], **EARLY, **LONGER}, parts=parts)


#: Rows of q and k. Of the fifth a causal mask hides most queries.
UNLIKE = ((100, 200), (0, 40), (300, 300), (7, 90), (150, 70), (20, 0), (7, 50))


@pytest.mark.parametrize(
    ("mask", "sequences"), [(FULL, (2, 4, 0, 3, 6)), (CAUSAL, (2, 0, 4, 3, 6)), (band(-1, 9), (2, 0, 4, 3, 6))], ids=str
)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("longer", [True, False])
def test_which_tile_comes_next(
    gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch, mask: Mask, sequences: tuple[int, ...], heads: int, longer: bool
) -> None:
    """One program takes them all."""
    taken: list[int] = []

    def seen(_kind: str, buffer: Buffer, elements: Any) -> None:
        if buffer.name == "k":
            taken.append(int(elements.min()))

    monkeypatch.setattr(gpu, "seen", seen)
    monkeypatch.setattr(launch, "sm_count", lambda _: 1)
    call = Call(UNLIKE, (heads, heads), (64, 64), mask, packed=True)
    check_backward(gpu, call, {**BACKWARDS["concatenated"], "HEADS_PER_WAVE": 4, "LONGER_FIRST": longer})
    starts = [0, *itertools.accumulate(keys for _, keys in UNLIKE)]
    tiles = [starts[one] + first for one in (sequences if longer else sorted(sequences))
             for first in range(0, UNLIKE[one][1], 128)]  # fmt: skip
    assert taken == [64 * (head * call.rows[1] + row) for row in tiles for head in range(heads)]


@pytest.mark.parametrize("form", ["concatenated", "apart, by TMA"])
def test_a_first_tile_that_does_not_wait_is_found(gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """The warp that takes tiles, which alone reads their order: the others get it from that one."""
    late: set[int] = set()

    def wait() -> None:
        if sys._getframe(1).f_code.co_name == "produce" and threading.get_ident() not in late:
            late.add(threading.get_ident())
        else:
            kernels_in_python._LANGUAGE.inline_asm_elementwise(PTX, "=r,r", [0], dtype=None, is_pure=False, pack=1)

    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, "await_kernel_before": wait})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 2)
    with pytest.raises(Fault, match="reads workspace"):
        check_backward(gpu, Call(UNLIKE, (1, 1), (128, 128), FULL, packed=True), {**BACKWARDS[form], **EARLY, **LONGER})
