"""Key blocks of 96 keys of kernels/sm90/fwd.py, as tiles of 64 and 32, run by Python (tests/kernels_in_python.py) beside
float64 attention. Memory that nothing has set is NaN."""

from __future__ import annotations

from typing import Any

import kernels_in_python
import pytest
from gpu_in_python import PythonGpu
from test_computed_in_python import Call, check_forward

from fa2tune.search_spaces.sm90.fwd import of_tiles
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Specialization

CHUNKED, TOP_LEFT = Mask("chunked", 64), Mask("causal_top_left")
MASKS = [FULL, CAUSAL, band(60, 10), band(20, 0), band(-1, 20), CHUNKED, TOP_LEFT]
OTHER = {"PINGPONG": False, "NUMBERED": False}
Q_IN_SHARED = {"Q_IN_REGISTERS": False}
CASES: list[tuple[Call, dict[str, Any]]] = [
    *((Call(((130, keys),), (2, 1), (192, 192), FULL), {}) for keys in (1, 64, 65, 95, 96, 97, 191, 192, 193, 300)),
    *(
        (Call((lengths,), (2, 1), (192, 192), CAUSAL), {})
        for lengths in ((96, 96), (97, 97), (200, 200), (64, 300), (300, 288), (200, 95))
    ),
    *((Call(((300, 330),), (2, 1), (192, 192), mask), {}) for mask in MASKS[2:]),
    *((Call(((330, 200),), (1, 1), (192, 192), mask, batch=2), OTHER) for mask in MASKS),  # rows that see no key
    *((Call(((200, 390),), (2, 1), (192, 192), mask), {"RESCALE": "never"}) for mask in MASKS[:3]),
    *((Call(((200, 390),), (2, 1), (192, 192), mask), {"RESCALE": "now", **Q_IN_SHARED}) for mask in MASKS[:3]),
    *((Call(((150, 290),), (2, 1), dims, mask), {}) for dims in ((168, 168), (176, 176), (184, 184), (192, 128), (160, 160),
                                                                 (144, 144), (136, 136)) for mask in (FULL, CAUSAL)),
]  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PythonGpu:
    return PythonGpu(monkeypatch, values=True)


def check(gpu: PythonGpu, call: Call, changes: dict[str, Any], keys: int = 96) -> None:
    config = dict(of_tiles(Specialization("fp16", *call.dims, call.mask.name), 128, keys, 0))
    check_forward(gpu, call, {**config, **changes})


@pytest.mark.parametrize(("call", "changes"), CASES, ids=lambda one: one if isinstance(one, Call) else "")
def test_blocks_of_96_keys(gpu: PythonGpu, call: Call, changes: dict[str, Any]) -> None:
    check(gpu, call, changes)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_blocks_of_80_keys(gpu: PythonGpu, mask: Mask) -> None:
    """They are raced (benchmarks/dense_forwards.py), and are none of the space's values."""
    check(gpu, Call(((150, 290),), (2, 1), (192, 192), mask), {}, 80)


@pytest.mark.parametrize(
    "instead",
    [{"row_maxima": lambda s, _: kernels_in_python._LANGUAGE.max(s[0], 1) - 100.0},
     {"weights_of": lambda s, scale, peak, _: (kernels_in_python._LANGUAGE.exp2(s[0] * scale - peak[:, None]), s[1] * 0)}],
    ids=["a maximum that is too low", "the second tile left out"],
)  # fmt: skip
def test_a_fault_is_found(gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch, instead: dict[str, Any]) -> None:
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, **instead})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    with pytest.raises(AssertionError, match=r"'o', "):
        check(gpu, Call(((64, 200),), (1, 1), (192, 192), FULL), {})
