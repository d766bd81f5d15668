"""The numerics gate over real kernels, in Triton's interpreter (TRITON_INTERPRET=1)."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start of the process", allow_module_level=True)

import torch

from fa2tune.compiling.registry import portable_config, portable_of
from fa2tune.launching import passes
from fa2tune.measuring import verify
from fa2tune.spec.key import specialization_of
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import KERNELS, Specialization

SMALL = {
    **portable_of("fwd").space.default(Specialization("fp16", 16, 16, "full"), 80), "BLOCK_M": 32, "BLOCK_N": 32,
    "num_warps": 4, "num_stages": 1,
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_default_configs_pass(kernel, causal, dtype):
    spec = Specialization(dtype, 24, 16, "causal" if causal else "full")
    errors = verify.check(kernel, portable_of(kernel).space.default(spec, 80), spec, 80, "cpu", True)
    assert set(errors) == ({"o", "lse"} if kernel == "fwd" else {"dq", "dk", "dv"})
    assert all(entry["max"] <= entry["max_allowed"] for entry in errors.values())


def test_a_kernel_that_leaves_rows_unwritten_is_caught(monkeypatch):
    """Outputs start as NaN, so what a kernel skips shows."""
    variant = portable_of("fwd")
    grid = variant.grid
    object.__setattr__(variant, "grid", lambda *call: grid(*call) - 1)
    try:
        with pytest.raises(verify.WrongResult, match="NaN"):
            verify.check_forward(SMALL, Specialization("fp16", 16, 16, "full"), "cpu", True)
    finally:
        object.__setattr__(variant, "grid", grid)


def test_a_wrong_scale_is_caught(monkeypatch):
    forward = passes.forward
    monkeypatch.setattr(
        passes, "forward", lambda *a, softmax_scale, **k: forward(*a, softmax_scale=softmax_scale * 1.02, **k)
    )
    with pytest.raises(verify.WrongResult):
        verify.check_forward(SMALL, Specialization("fp16", 16, 16, "causal"), "cpu", True)


def test_a_gradient_of_the_wrong_head_is_caught(monkeypatch):
    backward = passes.backward

    def swapped(*arguments, **options):
        dq, dk, dv = backward(*arguments, **options)
        return dq.flip(1), dk, dv

    monkeypatch.setattr(passes, "backward", swapped)
    with pytest.raises(verify.WrongResult, match="dq"):
        spec = Specialization("fp16", 16, 16, "full")
        verify.check("bwd_dq", portable_of("bwd_dq").space.default(spec, 80), spec, 80, "cpu", True)


def test_a_kernel_that_ignores_the_sign_of_the_scale_is_caught(monkeypatch):
    """Until one config of it is right, each is tried with a negative scale, which takes a binary of its own."""
    spec, run = Specialization("fp16", 16, 16, "full"), []
    forward, variant = passes.forward, portable_of("fwd")
    monkeypatch.setattr(verify, "_NEGATED", set())
    monkeypatch.setattr(passes, "forward", lambda *a, **k: (run.append(k["softmax_scale"]), forward(*a, **k))[1])
    with monkeypatch.context() as patch:
        patch.setitem(vars(variant), "constants", lambda _spec, _config: {"NEGATE": False})
        with pytest.raises(verify.WrongResult, match="with a negative softmax_scale, o: max error"):
            verify.check_forward(SMALL, spec, "cpu", True)
    errors = verify.check_forward(SMALL, spec, "cpu", True)
    assert run == 2 * [0.25, 0.25, -0.25]
    assert verify.check_forward(SMALL, spec, "cpu", True) == errors and run[6:] == [0.25, 0.25]


@pytest.mark.parametrize("second", [float("nan"), 0.01])
def test_a_second_plane_of_lse_that_is_wrong_is_caught(monkeypatch, second):
    """float32: callers get the first plane alone, the backward takes both."""
    forward = passes.forward

    def wrong(*arguments, **options):
        o, lse = forward(*arguments, **options)
        lse[1] += second
        return o, lse

    monkeypatch.setattr(passes, "forward", wrong)
    with pytest.raises(verify.WrongResult, match="lse, both planes"):
        verify.check_forward(SMALL, Specialization("fp32", 16, 16, "full"), "cpu", True)


def test_torch_is_left_as_it_was():
    verify.check_forward(SMALL, Specialization("fp32", 16, 16, "full"), "cpu", True)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", ["banded", "ragged"])
def test_windows_and_packed_sequences_pass_the_gate(kernel, family):
    spec = specialization_of(family, "fp16", 24, 16, "causal")
    config = portable_config(kernel, spec, 80)
    errors = verify.check(kernel, config, spec, 80, "cpu", True)
    assert set(errors) == ({"o", "lse"} if kernel == "fwd" else {"dq", "dk", "dv"})


@pytest.mark.parametrize("family", ["banded", "ragged"])
def test_a_window_or_the_ends_of_sequences_left_out_are_caught(monkeypatch, family):
    """By the oracle: the window is part of the question, and so are the sequences."""
    spec = specialization_of(family, "fp16", 16, 16, "causal")
    forward = passes.forward

    def wrong(*tensors, mask, offsets, **options):
        ends = tuple(torch.tensor([0, tensors[side].shape[2]], dtype=torch.int32) for side in (0, 1)) if offsets else ()
        return forward(*tensors, mask=CAUSAL, offsets=ends, **options)

    monkeypatch.setattr(passes, "forward", wrong)
    with pytest.raises(verify.WrongResult):
        verify.check_forward({**SMALL, "LOADS": "pointer"}, spec, "cpu", True)
