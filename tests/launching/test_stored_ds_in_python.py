"""The Hopper backward with dS in memory, of which a second kernel makes dQ, run by Python (tests/kernels_in_python.py) beside
float64 attention. Workspaces and results are poisoned with NaN."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import kernels_in_python
import pytest
import torch
from gpu_in_python import PythonGpu
from test_computed_in_python import SCALE, Call, compare, gradient_of_lse, inputs, unset, wanted
from test_grouped_in_python import within_nan

from fa2tune.launching import launch, passes, stored_ds
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.score import Score


class StoredGpu(PythonGpu):
    """For plans of stored_ds, whose slices share launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, values=True)
        made, self.of_launch = launch.bind, dict[int, tuple[Any, ...]]()

        def kept(*given: Any) -> Any:
            found = made(*given)
            self.of_launch[id(found)] = given[:3]
            return found

        monkeypatch.setattr(stored_ds, "bind", kept)

    def backward(
        self, call: Call, changes: Config, through_lse: bool = False, order: str = "bhsd"
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(gradients, in float64)."""
        given = inputs(call, 0)
        dlse = gradient_of_lse(call) if through_lse else None
        right = wanted(call, given, dlse)
        q, k, v, do = (within_nan(given[name], order) for name in ("q", "k", "v", "do"))
        o, lse = within_nan(right["o"].half(), order), right["lse"].float()
        gradients = {"dq": unset(q, call.dims[0]), "dk": unset(k, call.dims[0]), "dv": unset(v, call.dims[1])}
        tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, **gradients}
        tensors |= {} if dlse is None else {"dlse": dlse}
        problem = passes.describe(q, k, v, call.mask, SCALE, call.score, o=o, do=do)
        assert stored_ds.able(problem, 90)
        kernel = stored_ds.kernel(problem, 90)
        config = {**kernel.space.default(problem.specialization, 90), **changes}
        assert kernel.space.broken(config, problem.specialization, 90) is None
        assert all(config[name] in values for name, values in kernel.space.dimensions.items())
        plan: Any = type("Plan", (), {})()
        plan.chain, _ = stored_ds.bound(problem, tensors, SCALE, config, 0)
        self.placed.append(stored_ds.placed(stored_ds.workspaces(problem, config, 90), q.dtype, 0)[0])
        self.bound[:] = [self.of_launch[id(one)] for one, _ in plan.chain.launches]
        addresses = [self.place_values(name, tensor) for name, tensor in tensors.items()]
        self.run(plan, [*addresses, self.place_workspaces()])
        count = len(stored_ds.slices(problem, config["SLICES"]))
        assert [variant.name for variant, *_ in self.bound] == [
            "portable/bwd_delta", *[kernel.name, "sm90/bwd_dq_ds"] * count,
            *["portable/bwd_dq_combine"] * (config["DQ_SPLITS"] > 1),
        ]  # fmt: skip
        for buffer in self.buffers.values():
            if buffer.name in gradients:
                assert (buffer.written == 1).all(), f"each word of {buffer.name} is written once"
            elif buffer.name.startswith("workspace"):
                assert (buffer.written <= count).all()
        return gradients, right


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StoredGpu:
    return StoredGpu(monkeypatch)


CALLS = [
    # lengths, heads, head dims, mask, batch: changes
    (Call(((70, 300),), (2, 1), (144, 144), FULL), {}),
    (Call(((130, 200),), (1, 1), (256, 256), FULL, batch=2), {}),
    (Call(((250, 400),), (2, 1), (136, 136), CAUSAL), {"STAGES": 3, "P_STAGES": 2}),
    (Call(((330, 90),), (2, 1), (144, 144), CAUSAL), {}),  # rows without a key
    (Call(((65, 100),), (3, 3), (200, 200), FULL), {"DQ_GROUPS": 2}),
    (Call(((129, 200),), (1, 1), (192, 128), CAUSAL), {"DQ_GROUPS": 2}),
    (Call(((200, 129),), (4, 2), (64, 160), CAUSAL, batch=2), {"HEADS_PER_WAVE": 4}),
    (Call(((513, 70),), (1, 1), (184, 96), CAUSAL), {"STAGES": 3}),
    (Call(((1, 1),), (1, 1), (176, 176), CAUSAL), {}),
    (Call(((385, 385),), (1, 1), (160, 160), CAUSAL), {"STAGES": 4}),
]


@pytest.mark.parametrize(("call", "changes"), CALLS, ids=str)
def test_gradients(gpu: StoredGpu, call: Call, changes: Config) -> None:
    compare(*gpu.backward(call, changes, through_lse=call.mask == CAUSAL))


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize(
    ("call", "changes"),
    [
        (Call(((70, 300),), (2, 1), (144, 144), FULL), {}),
        (Call(((130, 200),), (1, 1), (256, 256), FULL, batch=2), {}),
        (Call(((250, 400),), (2, 1), (136, 136), CAUSAL), {"DQ_GROUPS": 2}),
        (Call(((330, 90),), (2, 1), (144, 144), CAUSAL), {}),  # rows without a key, parts without a block
        (Call(((200, 129),), (4, 2), (64, 160), CAUSAL, batch=2), {}),
        (Call(((193, 513),), (1, 1), (160, 160), CAUSAL), {"PERSISTENT": True}),
    ],
    ids=str,
)
def test_keys_of_dq_in_parts(gpu: StoredGpu, call: Call, changes: Config, splits: int) -> None:
    compare(*gpu.backward(call, {"DQ_SPLITS": splits, **changes}, through_lse=call.mask == CAUSAL))


TILES_OF_A_PROGRAM = [
    (Call(((70, 300),), (2, 1), (144, 144), FULL), {}),
    (Call(((130, 700),), (2, 2), (136, 136), CAUSAL), {"P_STAGES": 2}),
    (Call(((330, 90),), (4, 2), (144, 144), CAUSAL, batch=2), {"STAGES": 4, "HEADS_PER_WAVE": 4}),
    (Call(((1, 200),), (3, 3), (160, 160), FULL), {}),
    (Call(((385, 385),), (1, 1), (192, 192), CAUSAL), {}),
    (Call(((200, 450),), (4, 2), (160, 160), CAUSAL), {"STAGES": 4, "P_STAGES": 2, "HEADS_PER_WAVE": 2}),
    (Call(((130, 200),), (2, 2), (144, 144), CAUSAL, score=Score("softcap", 5.0)), {}),
    (Call(((100, 150),), (2, 2), (144, 144), FULL, batch=3), {"SLICES": 2, "P_STAGES": 2}),
]


@pytest.mark.parametrize(("call", "changes"), TILES_OF_A_PROGRAM, ids=str)
@pytest.mark.parametrize("programs", [1, 3, 132])
def test_a_program_takes_tile_after_tile(
    gpu: StoredGpu, monkeypatch: pytest.MonkeyPatch, call: Call, changes: Config, programs: int
) -> None:
    """Whose K and V share the slots of Q and dO."""
    monkeypatch.setattr(launch, "sm_count", lambda _: programs)
    compare(*gpu.backward(call, {"PERSISTENT": True, "STAGES": 3, **changes}, through_lse=call.mask == CAUSAL))


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("call", "slices"),
    [
        (Call(((70, 130),), (2, 1), (144, 144), FULL, batch=3), 2),  # two batch entries and one
        (Call(((70, 130),), (2, 1), (144, 144), CAUSAL, batch=3), 3),
        (Call(((130, 70),), (6, 3), (144, 160), CAUSAL, batch=2), 4),  # two key heads and one, of each
        (Call(((66, 130),), (3, 3), (136, 144), FULL), 3),
    ],
    ids=str,
)
def test_slices(gpu: StoredGpu, call: Call, slices: int, order: str) -> None:
    """Each over views of the tensors, in the same memory."""
    compare(*gpu.backward(call, {"SLICES": slices}, through_lse=call.mask == CAUSAL, order=order))


def test_slices_have_the_bits_of_a_whole_call(gpu: StoredGpu) -> None:
    call = Call(((100, 150),), (2, 2), (144, 144), CAUSAL, batch=2)
    found = []
    for slices in (1, 2, 4):
        for kept in (gpu.placed, gpu.buffers):
            kept.clear()
        found.append(gpu.backward(call, {"SLICES": slices})[0])
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in other)


def test_how_a_call_is_sliced() -> None:
    problem = Problem("bf16", 3, 10, 5, 200, 300, 144, 144, FULL)
    one = stored_ds.ds_bytes(replace(problem, batch=1, heads_q=2, heads_kv=1), 90)
    assert one == 2 * 2 * 256 * 320
    for most, count, sizes in (
        (15 * one, 1, [(3, 5)]), (14 * one, 2, [(2, 5), (1, 5)]), (9 * one, 3, [(1, 5)] * 3),
        (4 * one, 6, [(1, 3), (1, 2)] * 3), (2 * one, 9, [(1, 2), (1, 2), (1, 1)] * 3), (one, 15, [(1, 1)] * 15),
    ):  # fmt: skip
        assert stored_ds.fewest_slices(problem, most, 90) == count
        found = stored_ds.slices(problem, count)
        assert [(each.batches, each.heads) for each in found] == sizes
        assert max(stored_ds.ds_bytes(each.of(problem), 90) for each in found) <= most
        whole = {
            (each.batch + b, each.head + h) for each in found for b in range(each.batches) for h in range(each.heads)
        }
        assert len(whole) == 15
        asked = stored_ds.workspaces(problem, {"SLICES": count, "DQ_SPLITS": 1}, 90)["ds"]
        assert 2 * math.prod(asked[0]) <= most
    assert stored_ds.fewest_slices(problem, one - 1, 90) == 0


def test_the_same_bits_each_run(gpu: StoredGpu) -> None:
    call = Call(((200, 150),), (2, 1), (144, 144), CAUSAL)
    first, _ = gpu.backward(call, {})
    for kept in (gpu.placed, gpu.buffers):
        kept.clear()
    again, _ = gpu.backward(call, {})
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_fault_is_found(gpu: StoredGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """dS that is not stored."""
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, "store_block": lambda *_: None})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 2)
    call = Call(((70, 100),), (1, 1), (144, 144), FULL)
    with pytest.raises(AssertionError, match=r"dq|deadlock|written"):
        gradients, right = gpu.backward(call, {})
        compare({"dq": gradients["dq"]}, right)
