"""The Hopper backward with dS in memory, of which a second kernel makes dQ, run by Python (tests/kernels_in_python.py) beside
float64 attention. Workspaces and results are poisoned with NaN."""

from __future__ import annotations

import kernels_in_python
import pytest
import torch
from gpu_in_python import PythonGpu
from test_computed_in_python import SCALE, Call, compare, gradient_of_lse, inputs, unset, wanted

from fa2tune.compiling.choice import Choice
from fa2tune.compiling.registry import variant_named
from fa2tune.launching import passes
from fa2tune.search_spaces.sm90 import bwd_dkdv_ds
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Config


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PythonGpu:
    return PythonGpu(monkeypatch, values=True)


def backward(
    gpu: PythonGpu, call: Call, changes: Config, through_lse: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(gradients, in float64)."""
    given = inputs(call, 0)
    dlse = gradient_of_lse(call) if through_lse else None
    right = wanted(call, given, dlse)
    q, k, v, do = (given[name] for name in ("q", "k", "v", "do"))
    o, lse = unset(q, call.dims[1]), right["lse"].float()
    o.copy_(right["o"])
    gradients = {"dq": unset(q, call.dims[0]), "dk": unset(k, call.dims[0]), "dv": unset(v, call.dims[1])}
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, **gradients}
    tensors |= {} if dlse is None else {"dlse": dlse}
    problem = passes.describe(q, k, v, call.mask, SCALE, o=o, do=do)
    assert bwd_dkdv_ds.fits(problem.specialization, 90)
    kernel = variant_named("sm90/bwd_dkdv_ds")
    config = {**kernel.space.default(problem.specialization, 90), **changes}
    assert kernel.space.broken(config, problem.specialization, 90) is None
    plan = passes.Kernels(
        {"bwd_fused": Choice(kernel, config)}, problem, tensors, SCALE, 0, {"delta": (tuple(q.shape[:3]), "fp32")}
    )
    addresses = [gpu.place_values(name, tensor) for name, tensor in tensors.items()]
    gpu.run(plan, [*addresses, gpu.place_workspaces()])
    assert [variant.name for variant, *_ in gpu.bound] == ["portable/bwd_delta", kernel.name, "sm90/bwd_dq_ds"]
    for buffer in gpu.buffers.values():
        if buffer.name in gradients:
            assert (buffer.written == 1).all(), f"each word of {buffer.name} is written once"
        elif buffer.name.startswith("workspace"):
            assert (buffer.written <= 1).all()
    return gradients, right


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
def test_gradients(gpu: PythonGpu, call: Call, changes: Config) -> None:
    gradients, right = backward(gpu, call, changes, through_lse=call.mask == CAUSAL)
    compare(gradients, right)


def test_the_same_bits_each_run(gpu: PythonGpu) -> None:
    call = Call(((200, 150),), (2, 1), (144, 144), CAUSAL)
    first, _ = backward(gpu, call, {})
    for kept in (gpu.bound, gpu.placed, gpu.buffers):
        kept.clear()
    again, _ = backward(gpu, call, {})
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_fault_is_found(gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """dS that is not stored."""
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, "store_block": lambda *_: None})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 2)
    call = Call(((70, 100),), (1, 1), (144, 144), FULL)
    with pytest.raises(AssertionError, match=r"dq|deadlock|written"):
        gradients, right = backward(gpu, call, {})
        compare({"dq": gradients["dq"]}, right)
