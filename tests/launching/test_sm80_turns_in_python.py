"""The fused backward by mma.sync whose key tiles add to dQ in turns, run by Python: gradients, the order of additions, the same
bits on every run, and no tile that waits for one which only starts later."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import kernels_in_python
import pytest
import torch
from gpu_in_python import PythonGpu
from kernels_in_python import _HERE
from test_computed_in_python import (
    APART,
    BY_MMA_SYNC,
    HELD_OR_APART,
    PACKED_BY_MMA_SYNC,
    PACKING,
    Call,
    band,
    check_backward,
    computed,
    inputs,
    offsets,
    unset,
    wanted,
)

from fa2tune.spec.mask import CAUSAL, FULL, Mask

KERNEL = "sm80/bwd_fused"
CALLS = [*BY_MMA_SYNC, *PACKED_BY_MMA_SYNC, *HELD_OR_APART]
#: Several tiles of keys and several blocks, of which some are seen by one tile alone.
LONG = [
    (Call(((330, 650),), (2, 1), (64, 64), CAUSAL), {"HEADS_PER_WAVE": 1}),
    (Call(((300, 500),), (2, 2), (64, 64), FULL, batch=2), {}),
    (Call(((500, 300),), (4, 2), (64, 64), CAUSAL), {"HEADS_PER_WAVE": 16}),
    (Call(((500, 500),), (1, 1), (64, 64), band(100, 30)), {}),
    (Call(((500, 500),), (1, 1), (64, 64), Mask("chunked", 130)), {}),
    (Call(((400, 700),), (1, 1), (128, 128), CAUSAL), {**APART, "KEYS_APART": True, "SCORES_APART": True}),
    (Call(((330, 400), (0, 150), (150, 0), *PACKING), (2, 1), (64, 64), CAUSAL, packed=True), {}),
]
every = pytest.mark.parametrize(("call", "settings"), LONG, ids=str)


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What a program adds is there when a fence says so, and not before."""
    await_turn, assembly = kernels_in_python._await_turn, kernels_in_python._assembly
    language = kernels_in_python._LANGUAGE

    def later(*given: Any, **named: Any) -> None:
        _HERE.reductions.append((given, named))

    def arrived() -> None:
        while _HERE.reductions:
            given, named = _HERE.reductions.pop(0)
            kernels_in_python._atomic_add(*given, **named)

    def awaited(*given: Any) -> None:
        arrived()
        await_turn(*given)

    def assembled(text: str, *given: Any, **named: Any) -> Any:
        if "st.release" in text:
            arrived()
        return assembly(text, *given, **named)

    monkeypatch.setattr(language, "atomic_add", later)
    monkeypatch.setattr(language, "inline_asm_elementwise", assembled)
    monkeypatch.setattr(kernels_in_python, "_await_turn", awaited)
    return arrived


def gradients(monkeypatch: pytest.MonkeyPatch, call: Call, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    given = inputs(call, 0)
    right = wanted(call, given)
    o, lse = unset(given["q"], call.dims[1]), right["lse"].float()
    o.copy_(right["o"])
    found = {f"d{name}": unset(given[name], call.dims[name == "v"]) for name in "qkv"}
    tensors = {**given, "o": o, "lse": lse, **found, **offsets(call)}
    computed(PythonGpu(monkeypatch, values=True, arch=80), call, KERNEL, tensors, {**settings, "IN_ORDER": True})
    return found


@pytest.mark.parametrize(("call", "settings"), CALLS, ids=str)
def test_gradients(monkeypatch: pytest.MonkeyPatch, call: Call, settings: dict[str, Any]) -> None:
    check_backward(PythonGpu(monkeypatch, values=True, arch=80), call, {**settings, "IN_ORDER": True}, KERNEL)


@pytest.mark.parametrize("through_lse", [False, True], ids=["", "dlse"])
@every
def test_gradients_of_many_tiles(
    monkeypatch: pytest.MonkeyPatch, call: Call, settings: dict[str, Any], through_lse: bool
) -> None:
    gpu = PythonGpu(monkeypatch, values=True, arch=80)
    check_backward(gpu, call, {**settings, "IN_ORDER": True}, KERNEL, through_lse=through_lse)


def test_groups_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(((200, 300),), (4, 1), (64, 64), CAUSAL)
    check_backward(PythonGpu(monkeypatch, values=True, arch=80), call, {"IN_ORDER": True}, KERNEL, parts=2)


def orders(monkeypatch: pytest.MonkeyPatch, call: Call, settings: dict[str, Any]) -> list[list[int]]:
    """Of each block of dQ the programs that add to it, as their additions arrive. Those of larger numbers begin first."""
    add, started, lock = kernels_in_python._atomic_add, kernels_in_python._spawn, threading.Lock()
    found = defaultdict[int, list[int]](list)

    def seen(pointer: Any, value: Any, mask: Any = None, **named: Any) -> None:
        with lock:
            add(pointer, value, mask, **named)
            found[int(pointer.index.a.flat[0])].append(_HERE.program.number)

    def backwards(program: Any, name: str, warps: int, work: Callable[[], Any], knows: bool) -> threading.Thread:
        def begun() -> None:
            time.sleep(0.1 * (program.programs - program.number) / program.programs)
            work()

        return started(program, name, warps, begun, knows)

    monkeypatch.setattr(kernels_in_python, "_atomic_add", seen)
    monkeypatch.setattr(kernels_in_python, "_spawn", backwards)
    gradients(monkeypatch, call, settings)
    return list(found.values())


@every
def test_key_tiles_come_from_the_first_to_the_last(
    monkeypatch: pytest.MonkeyPatch, call: Call, settings: dict[str, Any]
) -> None:
    found = orders(monkeypatch, call, settings)
    assert sum(len(programs) > 1 for programs in found) > 2
    assert all(programs == sorted(set(programs)) for programs in found)


def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tile waits."""
    late, zero = kernels_in_python._await_turn, kernels_in_python.Int(0)
    monkeypatch.setattr(
        kernels_in_python, "_await_turn", lambda turn, passed, due, *rest: late(turn, passed, zero, *rest)
    )
    assert any(programs != sorted(programs) for programs in orders(monkeypatch, *LONG[1]))


@every
def test_the_same_bits(monkeypatch: pytest.MonkeyPatch, call: Call, settings: dict[str, Any]) -> None:
    found = [gradients(monkeypatch, call, settings) for _ in range(3)]
    assert all(torch.equal(one[name], found[0][name]) for one in found[1:] for name in one)


@every
def test_no_tile_waits_for_a_program_of_a_larger_number(
    monkeypatch: pytest.MonkeyPatch, call: Call, settings: dict[str, Any]
) -> None:
    """As on a GPU that runs one program at a time: each starts when the one before it has ended."""
    started, lock, alone = kernels_in_python._spawn, threading.Lock(), []

    def after(program: Any, name: str, warps: int, work: Callable[[], Any], knows: bool) -> threading.Thread:
        thread = started(program, name, warps, work, knows)
        thread.join(60)
        with lock:
            alone.append(not thread.is_alive())
        return thread

    monkeypatch.setattr(kernels_in_python, "_spawn", after)
    check_backward(PythonGpu(monkeypatch, values=True, arch=80), call, {**settings, "IN_ORDER": True}, KERNEL)
    assert all(alone)
