"""The Hopper backwards whose kernels start before the one before them ends (EARLY_START), run by Python
(tests/kernels_in_python.py) beside float64 attention: what a kernel touches that another one in flight does, and no wait comes
before, is a fault (tests/early_starts.py)."""

from __future__ import annotations

from typing import Any

import kernels_in_python
import numpy as np
import pytest
from early_starts import READ, WRITE, Flight, Overlap, Touch
from gpu_in_python import PythonGpu
from kernel_values import Buffer, Fault
from test_computed_in_python import BACKWARDS, BEHIND, PACKING, SPLIT, TOP_LEFT, Call, check_backward

from fa2tune.compiling.registry import variant_named
from fa2tune.launching import cuda
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.mask import CAUSAL, FULL, band
from fa2tune.spec.problem import Specialization

EARLY = {"EARLY_START": True}
#: What 96 columns have in parts.
IN_PARTS = {"IN_PARTS": True, "REDUCE": "vector", "ORDER": "together", "HEADS_PER_WAVE": 4}
V_APART = {**IN_PARTS, "V_APART": True}
CALLS = [
    (Call(((130, 150),), (2, 1), (128, 128), CAUSAL), "a block behind", {}),
    (Call(((150, 130),), (2, 2), (128, 128), FULL, batch=2), "apart, by TMA", {}),
    (Call(((140, 300),), (2, 1), (128, 128), band(40, 10)), "scores ahead", {}),
    (Call(((140, 140),), (2, 2), (64, 64), FULL), "concatenated", {}),
    (Call(((200, 550),), (2, 1), (64, 64), CAUSAL), "from registers", {"DYNAMIC": False, "PERSISTENT": False}),
    (Call(((300, 600),), (2, 2), (64, 64), CAUSAL), "from registers", {"DYNAMIC": False, "PAIRS": True}),
    (Call(((130, 400),), (2, 1), (96, 96), CAUSAL), "from registers", IN_PARTS),
    (Call(((100, 130),), (2, 1), (88, 88), FULL), "from registers", IN_PARTS),
    (Call(((130, 400),), (2, 1), (96, 64), CAUSAL), "from registers", V_APART),
    (Call(((100, 130),), (2, 2), (16, 120), FULL), "from registers", V_APART),
    (Call(((140, 300),), (2, 1), (88, 72), band(40, 10)), "from registers", V_APART),
    (Call(((140, 300),), (2, 1), (32, 32), CAUSAL), "scores ahead", {"NARROW": True}),
    (Call(((150, 130),), (2, 2), (24, 24), FULL), "concatenated", {"NARROW": True}),
    (Call(((64, 800),), (1, 1), (64, 64), TOP_LEFT), "concatenated", {}),  # most tiles, and first ones, no query sees
    (Call(((64, 500),), (1, 1), (128, 128), TOP_LEFT), "apart, by TMA", {}),
    (Call(PACKING, (2, 1), (128, 128), CAUSAL, packed=True), "concatenated", {}),
    (Call(PACKING, (2, 2), (128, 128), FULL, packed=True), "apart, by TMA", {}),
    (Call(PACKING, (2, 1), (128, 128), CAUSAL, packed=True), "a block behind", {}),
    (Call(PACKING, (1, 1), (64, 64), band(40, 0), packed=True), "concatenated", {}),
    (Call(PACKING, (2, 1), (64, 64), FULL, packed=True), "scores ahead", {}),
    (Call(PACKING, (2, 2), (96, 96), CAUSAL, packed=True), "from registers", IN_PARTS),
    (Call(PACKING, (1, 1), (96, 64), CAUSAL, packed=True), "from registers", V_APART),
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PythonGpu:
    return PythonGpu(monkeypatch, values=True)


@pytest.mark.parametrize(("call", "form", "more"), CALLS, ids=str)
def test_gradients(gpu: PythonGpu, call: Call, form: str, more: dict[str, Any]) -> None:
    check_backward(gpu, call, {**(BEHIND if call.dims[0] < 128 else {}), **BACKWARDS[form], **more, **EARLY})


@pytest.mark.parametrize(("heads", "parts"), [((4, 2), 2), ((4, 1), 4)], ids=str)
def test_groups_in_parts(gpu: PythonGpu, heads: tuple[int, int], parts: int) -> None:
    """Copies of K and V come before, sums of dK and dV after: neither starts early."""
    call = Call(((130, 150),), heads, (64, 64), CAUSAL)
    check_backward(gpu, call, {**BEHIND, **BACKWARDS["concatenated"], **EARLY}, parts=parts)


@pytest.mark.parametrize(("heads", "parts", "early"), [((4, 2), 2, False), ((1, 1), 1, True)])
def test_which_launches_start_early(
    gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], parts: int, early: bool
) -> None:
    """dQ's not where four tiles leave none of three multiprocessors to it."""
    made: list[tuple[str, bool]] = []
    launched = cuda.Launch.__init__

    def kept(*given: Any) -> None:
        made.append((gpu.bound[-1][0].short_name, given[-1]))
        launched(*given)

    monkeypatch.setattr(cuda.Launch, "__init__", kept)
    check_backward(gpu, Call(((60, 60),), heads, (64, 64), CAUSAL), {**BACKWARDS["concatenated"], **EARLY}, parts=parts)
    own = [("sm90/bwd_prepare", False), ("sm90/bwd_fused", True), ("sm90/bwd_finish", early)]
    assert made == (own if parts == 1 else [("bwd_spread", False), *own, ("bwd_gather", False)])


@pytest.mark.parametrize(
    ("name", "what"), [("await_kernel_before", "reads workspace"), ("_do_once", "reads workspace")]
)
@pytest.mark.parametrize("form", ["concatenated", "from registers", "apart, by TMA"])
def test_a_kernel_that_does_not_wait_is_found(
    gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch, name: str, what: str, form: str
) -> None:
    """The main kernel's threads, or those that finish."""
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, name: lambda *_: None})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 2)
    with pytest.raises(Fault, match=what):
        check_backward(gpu, Call(((100, 200),), (1, 1), (128, 128), FULL), {**BACKWARDS[form], **EARLY})


@pytest.mark.parametrize("name", ["await_prepared", "do_once"])
def test_an_overlapped_kernel_that_does_not_wait_is_found(
    gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """For flags, or at its end for the end of the kernel that sets them."""
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, name: lambda *_: None})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 2)
    with pytest.raises(Fault, match=r"which a kernel touches|may end before the one before it"):
        check_backward(gpu, Call(((100, 200),), (1, 1), (128, 128), FULL), BACKWARDS["prepared overlapped"])


@pytest.mark.parametrize(("call", "settings"), SPLIT, ids=str)
def test_split_kernels(gpu: PythonGpu, call: Call, settings: dict[str, Any]) -> None:
    check_backward(gpu, call, {**settings, **EARLY}, "sm90/bwd_dq,sm90/bwd_dkdv")


@pytest.mark.parametrize("dim", [128, 256])
def test_a_split_kernel_that_does_not_wait_is_found(gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    """Of each form of dK/dV's kernel."""
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, "do_once": lambda PTX: None})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 2)
    with pytest.raises(Fault, match="reads workspace"):
        check_backward(gpu, Call(((70, 90),), (1, 1), (dim, dim), FULL), EARLY, "sm90/bwd_dq,sm90/bwd_dkdv")


def test_what_is_in_flight() -> None:
    buffer, other = (Buffer(name, 0, 8, 4) for name in ("a", "b"))
    first, here = np.array([0, 1]), np.array([1, 2])
    flight = Flight()
    before = Overlap(None, flight)
    before.touch(True, Touch(WRITE, other, first))
    before.fence()  # seen by all that start from now on
    before.touch(True, Touch(READ, buffer, first))
    before.start_next()
    before.touch(True, Touch(WRITE, buffer, np.array([7])))
    own = Overlap(flight, None)
    for touch in (Touch(READ, buffer, here), Touch(WRITE, other, first), Touch(WRITE, buffer, np.array([3]))):
        own.touch(False, touch)
    for touch in (Touch(WRITE, buffer, here), Touch(READ, buffer, np.array([7]))):
        own.touch(True, touch)
        with pytest.raises(Fault, match="a, which a kernel touches"):
            own.touch(False, touch)


@pytest.mark.parametrize("name", ["await_kernel_before", "_do_once"])
def test_a_packed_kernel_that_does_not_wait_is_found(
    gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, name: lambda *_: None})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 2)
    with pytest.raises(Fault, match="reads workspace"):
        check_backward(
            gpu, Call(PACKING, (1, 1), (128, 128), FULL, packed=True), {**BACKWARDS["concatenated"], **EARLY}
        )


@pytest.mark.parametrize("extent", ["whole", "ragged"])
def test_overlapped_calls_do_not_have_it(extent: str) -> None:
    space, spec = variant_named("sm90/bwd_fused").space, Specialization("bf16", 64, 64, "causal", extent=extent)
    config = {**space.default(spec, 90), **bwd_fused.PACKED}
    assert space.broken({**config, **EARLY}, spec, 90) is None
    assert space.broken({**config, "BESIDE": True}, spec, 90) is None
    broken = space.broken({**config, "BESIDE": True, **EARLY}, spec, 90)
    assert broken is not None and broken.name == "early_start_waits_for_ends"
