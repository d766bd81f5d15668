"""Sliding windows and chunks on the GPU: the public call and every shipped form of the Hopper kernels, by the error rule; the
cost of a window."""

from __future__ import annotations

import json

import hopper_cases
import pytest
import torch
from benchmark_scripts import script

import fa2tune
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.kinds import WARP_SPECIALIZED_ROWS, kind_of
from fa2tune.compiling import limits
from fa2tune.compiling.registry import variant_of
from fa2tune.launching import passes
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import FULL, Mask, mask_of
from fa2tune.spec.problem import Problem
from fa2tune.spec.variant import implementation_of

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
WINDOWS = ((128, 0), (0, 200), (65, 300), (None, 64), (700, None), (1000, 0))
CHUNKS = (1000, 256, 64, 7)
#: The same as a call has them.
OPTIONS = {
    "windows": [{"window": window} for window in WINDOWS],
    "chunks": [{"mask": Mask("chunked", chunk)} for chunk in CHUNKS],
}
LENGTHS = ((512, 512), (1000, 1300), (1300, 1000), (77, 2000))


def problem(dtype, seqlen_q, seqlen_k, head_dim, heads=(4, 2)):
    return Problem(dtype, 2, *heads, seqlen_q, seqlen_k, head_dim, head_dim, FULL)


def compared(asked, found, options, gradients=True):
    """``options``: causal, window or mask, as attention takes them."""
    inputs = reference.make_inputs(asked, "cuda")
    oracle, same = reference.oracle_and_reference(inputs, mask=asked_for(**options), gradients=gradients)
    verify.compare(found(inputs, options), oracle, same)


def asked_for(causal=False, window=None, mask=None):
    return mask_of(causal, window, mask)


def whole_call(inputs, options):
    q, k, v = (tensor.clone().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    o, lse = fa2tune.attention(q, k, v, return_lse=True, **options)
    gradients = torch.autograd.grad(o, (q, k, v), inputs.do)
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 80, 192])
def test_the_public_call(head_dim, window):
    for seqlen_q, seqlen_k in LENGTHS:
        compared(problem("bf16", seqlen_q, seqlen_k, head_dim), whole_call, {"window": window})


def test_a_causal_window_in_fp16():
    compared(problem("fp16", 900, 1100, 64), whole_call, {"window": (100, -1), "causal": True})


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 80, 192])
def test_chunks_through_the_public_call(head_dim, chunk):
    for seqlen_q, seqlen_k in LENGTHS:
        compared(problem("bf16", seqlen_q, seqlen_k, head_dim), whole_call, {"mask": Mask("chunked", chunk)})


@pytest.mark.parametrize("head_dim", [64, 128, 256, 80, 192])
def test_causal_from_the_top_left(head_dim):
    for lengths in ((900, 1100), (1300, 1000), (513, 513)):
        compared(problem("bf16", *lengths, head_dim), whole_call, {"mask": Mask("causal_top_left")})


def test_chunks_in_fp32_and_fp16():
    for dtype in ("fp32", "fp16"):
        compared(problem(dtype, 900, 1100, 64), whole_call, {"mask": Mask("chunked", 200)})


def forms(head_dim):
    """Every distinct warp-specialised config that rows of this head dim name, tile order aside."""
    found = {}
    for layer in choosing.layers():
        for row in layer.rows:
            if row.warp_specialized and (row.key.kernel, row.key.head_dim) == ("fwd", head_dim):
                config = {**row.config, "HEADS_PER_WAVE": 4}
                found[json.dumps(config, sort_keys=True)] = config
    return [found[name] for name in sorted(found)]


#: Each is a case of its own, so that processes share them: its binaries are no other's.
FORMS = [(head_dim, number) for head_dim in (64, 128, 256) for number in range(len(forms(head_dim)) if HOPPER else 1)]


def test_rows_name_several_forms():
    assert [len(forms(head_dim)) >= 4 for head_dim in (64, 128, 256)] == [True, True, True]


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("masks", OPTIONS)
@pytest.mark.parametrize(("head_dim", "number"), FORMS)
def test_every_form_of_the_hopper_forward(head_dim, number, masks):
    gpu, config, tried = dispatch.gpu_of(0), forms(head_dim)[number], 0

    def forward(inputs, options):
        mask = asked_for(**options)
        described = passes.describe(inputs.q, inputs.k, inputs.v, mask, head_dim**-0.5)
        if limits.before_compile(variant_of("fwd", config), described.specialization, config, gpu):
            return {}
        with torch.no_grad():
            o, lse = passes.forward(
                inputs.q, inputs.k, inputs.v, mask=mask, softmax_scale=head_dim**-0.5, config=config
            )  # fmt: skip
        nonlocal tried
        tried += 1
        return {"o": o, "lse": passes.lse_of(lse)}

    for options in OPTIONS[masks]:
        for lengths in LENGTHS:
            compared(problem("bf16", *lengths, head_dim), forward, options, gradients=False)
    assert tried


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize(("dtype", "head_dim"), [("bf16", 64), ("bf16", 128), ("fp16", 64), ("fp16", 128)])
def test_every_form_of_the_fused_hopper_backward(dtype, head_dim):
    """Gradients of every binary that a row names, and of every form that compute-sanitizer sees."""
    variant = variant_of("bwd_fused", {})
    cases = [
        (variant, config, asked)
        for asked in hopper_cases.bounded(dtype, head_dim)
        for config in hopper_cases.forms_of(variant, head_dim)
        if limits.before_compile(variant, asked.specialization, config, dispatch.gpu_of(0)) is None
    ]  # fmt: skip
    assert hopper_cases.compilable(cases) == cases
    for one, config, asked in cases:
        hopper_cases.check(one, config, asked, with_dlse=False)
    assert len(cases) > 10 * len(hopper_cases.BOUNDED)


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("kernel", ["bwd_dq", "bwd_dkdv"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 80])
def test_the_split_hopper_backward(kernel, head_dim):
    variant = variant_of(kernel, {})
    for asked in hopper_cases.bounded("bf16", head_dim):
        for config in [hopper_cases.config_for(variant, asked), *hopper_cases.forms_of(variant, head_dim)[::3]]:
            hopper_cases.check(variant, config, asked, with_dlse=False)


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_hopper_backward_serves_windows(head_dim, deterministic):
    gpu = dispatch.gpu_of(0)
    for asked in hopper_cases.bounded("bf16", head_dim):
        strategy, kinds = choosing.strategy_of(asked, gpu, deterministic)
        assert strategy == ("split" if deterministic or head_dim == 256 else "fused")
        assert WARP_SPECIALIZED_ROWS in kinds.values()
        for kernel, kind in kinds.items():
            assert kind_of(implementation_of(choosing.choose(asked, kernel, gpu, kind).config)) == kind


@pytest.mark.xfail(
    reason="1.12 to 1.34 in both passes on an H200, 1 of 12 at most 1.15: benchmarks/calls/windows_2.json", strict=False
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_window_costs_its_share_of_visible_tiles(head_dim):
    """1024 of 16384, causal: at most 1.15 times its share of the tiles that the causal mask visits, with the same config."""
    windows = script("windows")
    found = list(windows.measured(f"1x{2048 // head_dim}/{2048 // head_dim}x16384x{head_dim}:1024", 0.3))
    print("", *map(windows.line, found), sep="\n")
    assert {entry["name"] for entry in found} == ({"portable", "hopper"} if HOPPER else {"portable"})
    assert max(entry["ratio"] for entry in found) <= 1.15
