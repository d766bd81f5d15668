"""What a race of a family launches: each kernel over windows or packed sequences, on the CPU in place of the GPU."""

from __future__ import annotations

import functools

import pytest
import torch

from fa2tune.compiling.registry import portable_config
from fa2tune.measuring import measure, reference
from fa2tune.spec import key as keys
from fa2tune.spec.extent import OFFSETS
from fa2tune.spec.problem import BACKWARD, SPLIT, STRATEGIES


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Workloads of 128 tokens, two heads of 16; tensors of the CPU."""
    monkeypatch.setattr(keys, "WORKLOAD_TOKENS", 128)
    monkeypatch.setattr(keys, "WORKLOAD_HIDDEN", 32)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    made = reference.make_inputs
    monkeypatch.setattr(reference, "make_inputs", lambda problem, device, **options: made(problem, "cpu"))


def answer(key, inputs, gradients=True):
    """o, dq, dk and dv of each sequence by itself, or of all."""
    mask = key.workload().mask
    if key.family != "ragged":
        return reference.evaluate(inputs, torch.float64, mask=mask)
    found, first = [], 0
    for rows in key.lengths():
        of = slice(first, first := first + rows)
        one = reference.Inputs(*(t[:, :, of] for t in (inputs.q, inputs.k, inputs.v, inputs.do)))
        found.append(reference.evaluate(one, torch.float64, mask=mask))
    return {name: torch.cat([one[name] for one in found], 2) for name in found[0]}


@pytest.mark.parametrize("family", ["banded", "ragged"])
def test_every_kernel_computes_its_workload(family):
    key = keys.TuningKey("a100", 108, 80, "fwd", "fp16", "ieee", 16, 16, "causal", 64, family)
    gpu = object.__new__(measure._WarmGpu)
    gpu.stage = None
    tensors = gpu.tensors(key.with_(kernel="bwd_dq"))
    assert set(OFFSETS) <= set(tensors) or family == "banded"
    right = answer(key, reference.Inputs(*(tensors[name] for name in ("q", "k", "v", "do"))))
    close = functools.partial(torch.testing.assert_close, atol=0.02, rtol=0.02)
    config = functools.partial(portable_config, spec=key.specialization(), arch=80)

    def fresh(*names):
        for name in names:
            tensors[name].fill_(torch.nan)

    close(tensors["o"].double(), right["o"])
    fresh("o")
    measure._runner(key, config("fwd"), tensors)()
    close(tensors["o"].double(), right["o"])
    for kernel, names in (("bwd_dq", ["dq"]), ("bwd_dkdv", ["dk", "dv"]), ("bwd_fused", ["dq", "dk", "dv"])):
        fresh(*names)
        measure._runner(key.with_(kernel=kernel), config(kernel), tensors)()
        for name in names:
            close(tensors[name].double(), right[name])
    whole = {"strategy": SPLIT, "configs": {kernel: config(kernel) for kernel in STRATEGIES[SPLIT]}}
    for name, found in zip(
        ("dq", "dk", "dv"), measure._runner(key.with_(kernel=BACKWARD), whole, tensors)(), strict=True
    ):
        close(found.double(), right[name])
