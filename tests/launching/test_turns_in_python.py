"""The fused Hopper backward whose key tiles add to dQ in turns, run by Python: gradients, the same bits on every run, in the
order of keys, and no tile that waits for one which only starts later."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import kernels_in_python
import pytest
import torch
from gpu_in_python import PROGRAMS, PythonGpu
from public_gpu import public_gpu
from test_computed_in_python import TOP_LEFT, Call, check_backward, computed, inputs, unset, wanted

import fa2tune
from fa2tune.calling.schedules import query_tiles_schedule, turns_schedule
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

TURNS: dict[str, Any] = {**bwd_fused.TURNS, "IN_ORDER": True, "EXPONENTIALS_FIRST": False}
CALLS = [
    (Call(((130, 150),), (2, 1), (128, 128), CAUSAL), {"BLOCK_M": 64, "num_warps": 4}),
    (Call(((330, 650),), (2, 1), (128, 128), CAUSAL), {"BLOCK_M": 64, "num_warps": 8}),
    (Call(((300, 500),), (2, 2), (64, 64), FULL, batch=2), {"BLOCK_M": 128, "num_warps": 4}),
    (Call(((500, 300),), (4, 2), (64, 64), CAUSAL), {"BLOCK_M": 128, "num_warps": 4, "HEADS_PER_WAVE": 32}),
    (Call(((500, 300),), (4, 2), (40, 64), TOP_LEFT), {"BLOCK_M": 128, "num_warps": 4, "HEADS_PER_WAVE": 1}),
    (Call(((150, 700),), (1, 1), (104, 128), FULL), {"BLOCK_M": 64, "num_warps": 8}),
]
every = pytest.mark.parametrize(("call", "form"), CALLS, ids=str)
some = pytest.mark.parametrize(("call", "form"), CALLS[1:4], ids=str)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PythonGpu:
    return PythonGpu(monkeypatch, values=True)


def gradients(monkeypatch: pytest.MonkeyPatch, call: Call, form: dict[str, Any]) -> dict[str, torch.Tensor]:
    given, right = inputs(call, 0), wanted(call, inputs(call, 0))
    o, lse = unset(given["q"], call.dims[1]), right["lse"].float()
    o.copy_(right["o"])
    found = {f"d{name}": unset(given[name], call.dims[name == "v"]) for name in "qkv"}
    computed(
        PythonGpu(monkeypatch, values=True),
        call,
        "sm90/bwd_fused",
        {**given, "o": o, "lse": lse, **found},
        {**TURNS, **form},
    )
    return found


@every
@pytest.mark.parametrize("through_lse", [False, True], ids=["", "dlse"])
def test_gradients(gpu: PythonGpu, call: Call, form: dict[str, Any], through_lse: bool) -> None:
    check_backward(gpu, call, {**TURNS, **form}, through_lse=through_lse)


def test_groups_in_parts(gpu: PythonGpu) -> None:
    call = Call(((200, 300),), (4, 1), (64, 64), CAUSAL)
    check_backward(gpu, call, {**TURNS, "BLOCK_M": 128, "num_warps": 4}, parts=2)


@some
def test_key_tiles_come_from_the_last_to_the_first(
    monkeypatch: pytest.MonkeyPatch, call: Call, form: dict[str, Any]
) -> None:
    """At each block of a head's dQ: a turn is passed on with the tile's number and one, when nothing is still to be added."""
    passed: dict[int, list[int]] = defaultdict(list)
    store, rows, late = kernels_in_python.store_words, form["BLOCK_M"], []

    def seen(pointer: Any, value: Any, mask: Any = None) -> None:
        if mask is None:
            turn, turns = int(pointer.index.a), len(pointer.buffer.written) - 1
            own = turns // (call.batch * call.heads[0])  # of a head
            adding = [[int(one) for one in at] for _, at, _ in kernels_in_python._HERE.reductions]
            late.append(len(adding))
            blocks = {1 + (b * call.heads[0] + h) * own + row // rows * (rows // 64) for b, h, row, _ in adding}
            assert turn not in blocks, "passed on before it is added to"
            passed[turn].append(int(kernels_in_python.array(value)))
        store(pointer, value, mask)

    monkeypatch.setattr(kernels_in_python, "store_words", seen)
    gradients(monkeypatch, call, form)
    blocks = -(-call.rows[0] // rows)
    assert sum(len(turns) > 1 for turns in passed.values()) > blocks // 2
    for turns in passed.values():
        assert turns == [*range(turns[0], 0, -1)], "down to the first tile, one by one"
    assert not any(late)


@some
def test_the_same_bits(monkeypatch: pytest.MonkeyPatch, call: Call, form: dict[str, Any]) -> None:
    first, *others = (gradients(monkeypatch, call, form) for _ in range(3))
    for one in others:
        assert all(torch.equal(one[name], tensor) for name, tensor in first.items())


@some
def test_no_tile_waits_for_a_program_that_has_not_started(
    monkeypatch: pytest.MonkeyPatch, gpu: PythonGpu, call: Call, form: dict[str, Any]
) -> None:
    """As where kernels of another stream hold multiprocessors: the first program starts when all others have ended."""
    started = kernels_in_python._spawn
    ended = threading.Semaphore(0)

    def late(program: Any, name: str, warps: int, work: Callable[[], Any], knows: bool) -> threading.Thread:
        def first() -> None:
            for _ in range(program.programs - 1):
                assert ended.acquire(timeout=60), "the others wait for it"
            work()

        def other() -> None:
            work()
            ended.release()

        of_grid = name == f"program {program.number}" and program.programs == PROGRAMS
        return started(program, name, warps, (first if program.number == 0 else other) if of_grid else work, knows)

    monkeypatch.setattr(kernels_in_python, "_spawn", late)
    check_backward(gpu, call, {**TURNS, **form})


def test_public_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_schedule, "SERVES", {64: 0, 128: 0})
    monkeypatch.setattr(turns_schedule, "LEAST_ROUNDS", 0)
    monkeypatch.setattr(query_tiles_schedule, "QUERY_TILES", False)
    given = reference.make_inputs(Problem("fp16", 1, 2, 2, 150, 290, 128, 128, FULL), "cpu", with_dlse=True)
    q, k, v = (one.detach().requires_grad_() for one in (given.q, given.k, given.v))
    with public_gpu() as gpu:
        o, lse = fa2tune.attention(q, k, v, causal=True, deterministic=True, return_lse=True)
        found = torch.autograd.grad((o, lse), (q, k, v), (given.do, given.dlse))
    assert tuple(gpu.ran[-3:]) == ("sm90/bwd_prepare", "sm90/bwd_fused", "sm90/bwd_finish")
    named = {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), found, strict=True))}
    verify.compare(named, *reference.oracle_and_reference(given, mask=CAUSAL))
