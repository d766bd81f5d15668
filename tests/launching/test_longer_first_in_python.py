"""The fused Hopper backward of packed sequences with longer sequences first (LONGER_FIRST), run by Python
(tests/kernels_in_python.py): gradients beside float64 attention, the order in which programs take tiles, addresses, and what
other kernels in flight touch."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_in_python import PythonGpu
from test_computed_in_python import BACKWARDS, PACKING, Call, check_backward

from fa2tune.spec.mask import CAUSAL, FULL, band

LONGER = {"LONGER_FIRST": True}
EARLY = {"EARLY_START": True}
#: Short ones and a long one behind them.
LONG_LAST = (*((1 + 7 * n % 40, 1 + 5 * n % 40) for n in range(9)), (300, 310))
#: More sequences than are read at once.
MANY = tuple((1 + n % 3, 1 + n % 2) for n in range(140))
CALLS = [
    (Call(LONG_LAST, (2, 1), (64, 64), CAUSAL, packed=True), "joined", {}),
    (Call(LONG_LAST, (2, 2), (64, 64), FULL, packed=True), "scores ahead", {"HEADS_PER_WAVE": 1}),
    (Call(PACKING, (2, 1), (128, 128), CAUSAL, packed=True), "a block behind", {}),
    (Call(PACKING, (4, 2), (128, 128), FULL, packed=True), "apart, by TMA", {}),
    (Call(PACKING, (2, 1), (64, 64), band(40, 10), packed=True), "from registers", {"BLOCK_M": 128}),
    (Call(PACKING, (1, 1), (96, 96), CAUSAL, packed=True), "from registers", {"IN_PARTS": True, "ORDER": "together"}),
    (Call(MANY, (1, 1), (64, 64), CAUSAL, packed=True), "joined", {}),
    (Call(((300, 300),), (1, 1), (64, 64), CAUSAL, packed=True), "joined", {}),
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PythonGpu:
    return PythonGpu(monkeypatch, values=True)


@pytest.mark.parametrize(("call", "form", "more"), CALLS, ids=str)
@pytest.mark.parametrize("starts", [{}, EARLY], ids=["one after the other", "each started early"])
def test_gradients(gpu: PythonGpu, call: Call, form: str, more: dict[str, Any], starts: dict[str, bool]) -> None:
    check_backward(gpu, call, {**BACKWARDS[form], **more, **starts, **LONGER})
