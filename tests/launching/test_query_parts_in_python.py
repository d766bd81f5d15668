"""The fused Hopper backward whose key tiles have their query blocks in parts (QUERY_PARTS), run by Python
(tests/kernels_in_python.py): gradients beside float64 attention, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_in_python import PythonGpu
from test_computed_in_python import BACKWARDS, PACKING, Call, check_backward

from fa2tune.compiling import registry
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import Score

EARLY, PARTS = {"EARLY_START": True}, {"QUERY_PARTS": True}
APART = {"IN_PARTS": True, "V_APART": True, "ORDER": "together", "BLOCK_M": 64, "num_warps": 4}
LONG_LAST = (*((1 + 7 * n % 40, 1 + 5 * n % 40) for n in range(5)), (300, 310))
#: More parts than a tile has query blocks, and tiles that no query sees.
CALLS = [
    (Call(((300, 300),), (1, 1), (64, 64), CAUSAL), "concatenated", {}, 2),
    (Call(((300, 260),), (2, 2), (128, 128), CAUSAL, batch=2), "a block behind", {}, 3),
    (Call(((260, 300),), (2, 2), (128, 128), FULL), "apart, by TMA", {}, 4),
    (Call(((140, 400),), (1, 1), (128, 128), CAUSAL), "from registers", {"BLOCK_M": 64}, 8),
    (Call(((70, 270),), (2, 2), (24, 24), FULL), "scores ahead", {"NARROW": True, "BLOCK_M": 128}, 2),
    (Call(((200, 300),), (1, 1), (96, 96), CAUSAL), "from registers", {"IN_PARTS": True, "ORDER": "together"}, 2),
    (Call(((200, 140),), (2, 2), (64, 64), CAUSAL), "scores ahead", {"HEADS_PER_WAVE": 1}, 2),
    (Call(((1100, 130),), (1, 1), (64, 64), FULL), "concatenated", {}, 12),
    (Call(((700, 70),), (2, 2), (128, 128), CAUSAL), "from registers", {"BLOCK_M": 64}, 32),
    (Call(((200, 260),), (1, 1), (64, 64), CAUSAL, score=Score("softcap", 0.6)), "concatenated", {}, 2),
    (Call(((200, 260),), (2, 2), (128, 24), CAUSAL), "from registers", APART, 3),
    (Call(LONG_LAST, (1, 1), (128, 24), FULL, packed=True), "from registers", APART, 2),
    (Call(LONG_LAST, (2, 2), (64, 64), CAUSAL, packed=True), "concatenated", {}, 2),
    (Call(LONG_LAST, (1, 1), (128, 128), FULL, packed=True), "a block behind", {"HEADS_PER_WAVE": 1}, 3),
    (Call(PACKING, (2, 2), (128, 128), CAUSAL, packed=True), "apart, by TMA", {}, 4),
    (
        Call(PACKING, (1, 1), (96, 96), CAUSAL, packed=True),
        "from registers",
        {"IN_PARTS": True, "ORDER": "together"},
        2,
    ),
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PythonGpu:
    return PythonGpu(monkeypatch, values=True)


@pytest.mark.parametrize(("call", "form", "more", "parts"), CALLS, ids=str)
@pytest.mark.parametrize("starts", [{}, EARLY], ids=["one after the other", "each started early"])
def test_gradients(
    gpu: PythonGpu, call: Call, form: str, more: dict[str, Any], parts: int, starts: dict[str, bool]
) -> None:
    check_backward(gpu, call, {**BACKWARDS[form], **more, **starts, **PARTS}, parts=parts)


@pytest.mark.parametrize("parts", [1, 5, 64])
def test_a_number_of_parts_that_there_is_not(gpu: PythonGpu, parts: int) -> None:
    call = Call(((200, 200),), (1, 1), (64, 64), CAUSAL)
    with pytest.raises(ValueError, match="allowed are 2, 3, 4, 6, 8"):
        check_backward(gpu, call, {**BACKWARDS["concatenated"], **PARTS}, parts=parts)


def test_grouped_heads_have_parts_of_groups(gpu: PythonGpu) -> None:
    call = Call(((200, 200),), (2, 1), (64, 64), CAUSAL)
    with pytest.raises(ValueError, match="parts: got 2 for bwd_fused, allowed are none"):
        check_backward(gpu, call, {**BACKWARDS["concatenated"], **PARTS}, parts=2)


@pytest.mark.parametrize("other", [{"BESIDE": True}, {"PAIRS": True, "DYNAMIC": False}], ids=str)
def test_forms_that_count_a_tile_once(other: dict[str, bool]) -> None:
    space = registry.variant_named("sm90/bwd_fused").space
    spec = Problem("bf16", 1, 1, 1, 200, 200, 64, 64, CAUSAL).specialization
    config = {**space.default(spec, 90), **PARTS}
    broken = space.broken({**config, **other}, spec, 90)
    assert space.broken(config, spec, 90) is None and broken is not None
    assert broken.name == "query_parts_are_of_whole_blocks"
