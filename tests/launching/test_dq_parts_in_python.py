"""dQ of the split Hopper backward with its keys in parts, run by Python (tests/kernels_in_python.py) beside float64 attention.
Workspaces and results are poisoned with NaN."""

from __future__ import annotations

from typing import Any

import kernels_in_python
import pytest
import torch
from gpu_in_python import PythonGpu
from test_computed_in_python import SCALE, Call, compare, gradient_of_lse, inputs, unset, wanted

from fa2tune.compiling.choice import Choice
from fa2tune.compiling.registry import variant_named
from fa2tune.launching import dq_parts, overlapped, passes
from fa2tune.search_spaces.sm90 import bwd_dq_split
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PythonGpu:
    return PythonGpu(monkeypatch, values=True)


def backward(
    gpu: PythonGpu, call: Call, parts: dict[str, int], order: str = "", through_lse: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """(gradients, in float64, sums of the parts). dK and dV only if ``parts`` or ``order`` is also of their kernel."""
    given = inputs(call, 0)
    dlse = gradient_of_lse(call) if through_lse else None
    right = wanted(call, given, dlse)
    q, k, v, do = (given[name] for name in ("q", "k", "v", "do"))
    o, lse = unset(q, call.dims[1]), right["lse"].float()
    o.copy_(right["o"])
    kernels = ("bwd_dq", "bwd_dkdv") if order or len(parts) > 1 else ("bwd_dq",)
    gradients = {"dq": unset(q, call.dims[0])}
    if len(kernels) > 1:
        gradients |= {"dk": unset(k, call.dims[0]), "dv": unset(v, call.dims[1])}
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, **gradients}
    tensors |= {} if dlse is None else {"dlse": dlse}
    problem = passes.describe(q, k, v, call.mask, SCALE, call.score, o=o, do=do)
    chosen = {}
    for kernel in kernels:
        variant = variant_named(f"sm90/{kernel}")
        chosen[kernel] = Choice(variant, variant.space.default(problem.specialization, 90))
    shared = {"delta": (tuple(q.shape[:3]), "fp32")}
    gpu.placed.clear()
    plan = passes.Kernels(chosen, problem, tensors, SCALE, 0, shared, parts, order)
    addresses = [gpu.place_values(name, tensor) for name, tensor in tensors.items()]
    block = gpu.place_workspaces()
    gpu.run(plan, [*addresses, block])
    names = [variant.name for variant, *_ in gpu.bound]
    assert names.count("sm90/bwd_dq_split") == names.count("portable/bwd_dq_combine") == 1
    assert names.count("sm90/bwd_dq") == bool(order), "which then makes delta"
    (sums,) = [given["dq_parts"] for given in gpu.placed if "dq_parts" in given]
    return gradients, right, torch.from_numpy(gpu.buffers[block + sums.start].words.reshape(sums.shape))


CALLS = [
    # lengths, heads, head dims, mask, batch: parts
    (Call(((70, 300),), (2, 1), (144, 144), FULL), 3),
    (Call(((130, 200),), (1, 1), (256, 256), FULL, batch=2), 2),
    (Call(((150, 400),), (2, 1), (136, 136), CAUSAL), 4),
    (Call(((200, 90),), (2, 1), (144, 144), CAUSAL), 2),  # rows without a key
    (Call(((65, 100),), (1, 1), (200, 200), FULL), 7),  # more parts than blocks
    (Call(((129, 200),), (1, 1), (192, 128), CAUSAL), 20),
    (Call(((140, 400),), (1, 1), (144, 144), band(150, 10)), 3),
    (Call(((140, 400),), (1, 1), (64, 144), band(-1, 20)), 5),
    (Call(((100, 300),), (1, 1), (144, 64), band(60, 0)), 2),
    (Call(((300, 140),), (1, 1), (144, 144), band(30, 5)), 3),  # rows without a key
    (Call(((150, 400),), (1, 1), (144, 144), Mask("chunked", 192)), 3),
    (Call(((140, 300),), (1, 1), (144, 144), Mask("causal_top_left")), 2),
]


@pytest.mark.parametrize(("call", "parts"), CALLS, ids=str)
def test_keys_in_parts(gpu: PythonGpu, call: Call, parts: int) -> None:
    gradients, right, sums = backward(gpu, call, {"bwd_dq": parts}, through_lse=call.mask == CAUSAL)
    compare(gradients, right)
    assert sums.shape[0] == parts and not sums.isnan().any(), "every word of the workspace is written"
    whole = sums.double().sum(0).reshape(right["dq"].shape) * SCALE
    assert (whole - right["dq"]).abs().max() <= 4e-3 * right["dq"].abs().max().clamp(min=1)


def test_parts_are_even_and_those_without_blocks_are_zero(gpu: PythonGpu) -> None:
    """Of 6 blocks in 9 parts three have none; of 5 seen by all rows in 2 parts the last has three."""
    *_, sums = backward(gpu, Call(((70, 384),), (1, 1), (144, 144), FULL), {"bwd_dq": 9})
    empty = [p for p in range(9) if 6 * p // 9 == 6 * (p + 1) // 9]
    assert [p for p in range(9) if (sums[p] == 0).all()] == empty and len(empty) == 3


def test_with_groups_in_parts_and_both_kernels_at_a_time(gpu: PythonGpu) -> None:
    call, parts = Call(((70, 200),), (2, 1), (144, 144), CAUSAL), {"bwd_dq": 3, "bwd_dkdv": 2}
    after, right, _ = backward(gpu, call, parts)
    compare(after, right)
    gpu.bound.clear()
    found, *_ = backward(gpu, call, parts, overlapped.DQ_FIRST)
    assert all(torch.equal(found[name], after[name]) for name in found)


def test_the_sum_has_the_same_bits_each_run(gpu: PythonGpu) -> None:
    call = Call(((64, 200),), (1, 1), (144, 144), FULL)
    first, *_ = backward(gpu, call, {"bwd_dq": 11})
    gpu.bound.clear()
    again, *_ = backward(gpu, call, {"bwd_dq": 11})
    assert torch.equal(first["dq"], again["dq"])


@pytest.mark.parametrize(("name", "instead"), [("store_columns", lambda *_: None), ("_over_keys", lambda acc, *_: acc)])
def test_a_fault_is_found(gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch, name: str, instead: Any) -> None:
    """Sums that are not stored; blocks that no group takes."""
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, name: instead})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 2)
    with pytest.raises(AssertionError, match=r"dq|deadlock"):
        gradients, right, _ = backward(gpu, Call(((64, 200),), (1, 1), (144, 144), FULL), {"bwd_dq": 2})
        compare({"dq": gradients["dq"]}, right)


def test_what_cannot_be_split_is_refused() -> None:
    asked = Problem("bf16", 1, 2, 2, 70, 500, 144, 144, FULL)
    tuned, portable = variant_named("sm90/bwd_dq"), variant_named("portable/bwd_dq")
    assert dq_parts.checked(asked, tuned, 3) == 3 and dq_parts.checked(asked, portable, 1) == 1
    packed = Problem("bf16", 1, 2, 2, 70, 500, 144, 144, FULL, extent=Extent(RAGGED, 2))
    for problem, variant, most in ((asked, tuned, bwd_dq_split.MOST_SPLITS), (asked, portable, 1), (packed, tuned, 1)):
        with pytest.raises(ValueError, match=f"parts: got {most + 1} for bwd_dq, allowed are 1 to {most}$"):
            dq_parts.checked(problem, variant, most + 1)


def test_one_part_does_not_import_the_kernel_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dq_parts, "computes", lambda *_: pytest.fail("imported"))
    asked = Problem("bf16", 1, 1, 1, 64, 64, 256, 256, FULL)
    assert dq_parts.checked(asked, variant_named("sm90/bwd_dq"), 1) == 1
    assert not dq_parts.can(asked, variant_named("portable/bwd_dq"))
