"""The tanh soft cap in the portable kernels: correct by the error rule, gradients included; the operators; the errors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from test_kernels import problem, run

import fa2tune
from fa2tune import gpus
from fa2tune.calling import choosing, explanation, serving
from fa2tune.compiling import support
from fa2tune.compiling.registry import portable_of, refused_score, variants
from fa2tune.launching import passes
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import STRATEGIES
from fa2tune.spec.score import Score, score_of
from fa2tune.spec.variant import DESCRIPTOR, POINTER


def check(asked, softcap, *, scale=1.0, **options):
    inputs = reference.make_inputs(asked, "cpu", scale=scale, with_dlse=True)
    about = {name: value for name, value in options.items() if name == "softmax_scale"}
    oracle, same = reference.oracle_and_reference(inputs, mask=asked.mask, score=score_of(softcap), **about)
    verify.compare(run(inputs, mask=asked.mask, softcap=softcap, **options), oracle, same)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Mask("band", 20, 3), Mask("chunked", 40)], ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_every_dtype_and_mask(dtype, mask):
    check(replace(problem(dtype, 90, 130, 64, heads=(4, 2)), mask=mask), 2.0)


@pytest.mark.parametrize("softcap", [0.01, 0.3, 50, 1e6])
def test_caps_below_and_above_the_scores(softcap):
    check(problem("fp32", 70, 90, 32, causal=True), softcap)


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_scores_that_reach_the_cap(scale):
    check(problem("fp16", 70, 90, 64), 3.0, scale=scale)


@pytest.mark.parametrize("softmax_scale", [0.0, -0.3, 1.0])
def test_with_any_scale(softmax_scale):
    check(problem("fp16", 70, 90, 64, causal=True), 1.5, softmax_scale=softmax_scale)


def test_more_queries_than_keys():
    check(problem("fp16", 90, 50, 32, causal=True), 2.0)


def test_every_config_of_both_strategies():
    asked, score = replace(problem("fp16", 150, 190, 32), mask=CAUSAL), score_of(1.0)
    inputs = reference.make_inputs(asked, "cpu")
    options = {"mask": CAUSAL, "softmax_scale": 32**-0.5, "score": score}
    oracle, same = reference.oracle_and_reference(inputs, **options)
    spec = replace(asked, score=score).specialization
    for loads, masked in itertools.product((POINTER, DESCRIPTOR), ("last", "first", "inside")):
        choice = {"LOADS": loads, "MASKED": masked, "BLOCK_M": 32, "BLOCK_N": 32}
        names = ("fwd", *{name for kernels in STRATEGIES.values() for name in kernels})
        configs = {name: {**portable_of(name).space.default(spec, 80), **choice} for name in names}
        o, lse = passes.forward(inputs.q, inputs.k, inputs.v, **options, config=configs["fwd"])
        verify.compare({"o": o, "lse": passes.lse_of(lse)}, oracle, same)
        for strategy in STRATEGIES:
            found = passes.backward(
                inputs.do, None, inputs.q, inputs.k, inputs.v, o, lse, **options, strategy=strategy, configs=configs
            )
            verify.compare(dict(zip(("dq", "dk", "dv"), found, strict=True)), oracle, same)


def test_gradients_are_those_of_finite_differences():
    """Of the float32 kernels, along a random direction."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 12, 16, requires_grad=True) for _ in range(3))
    weights = torch.randn(1, 1, 12, 16)

    def loss(q, k, v):
        return (fa2tune.attention(q, k, v, causal=True, softcap=0.7) * weights).sum()

    assert torch.autograd.gradcheck(loss, (q, k, v), eps=1e-2, atol=2e-3, rtol=1e-2, fast_mode=True)


def test_none_and_zero_are_no_cap():
    q, k, v = (torch.randn(1, 2, 64, 32, dtype=torch.float16) for _ in range(3))
    plain = fa2tune.attention(q, k, v)
    for none in (None, 0, 0.0):
        assert torch.equal(fa2tune.attention(q, k, v, softcap=none), plain)
    assert not torch.equal(fa2tune.attention(q, k, v, softcap=0.5), plain)


def test_the_operators_take_it_last():
    q, k, v = (torch.randn(1, 2, 40, 32, dtype=torch.float16, requires_grad=True) for _ in range(3))
    torch.library.opcheck(torch.ops.fa2tune.attention.default, (q, k, v, -1, 0, 0.2, False, "band", 2.0))

    def call(q, k, v):
        return fa2tune.attention(q, k, v, causal=True, softcap=2.0)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, plain = (torch.autograd.grad(f(q, k, v).sum(), (q, k, v)) for f in (compiled, call))
    assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize(
    ("softcap", "error"),
    [(-1.0, ValueError), (1e-4, ValueError), (1e7, ValueError), (float("nan"), ValueError), (float("inf"), ValueError),
     (True, TypeError), ("50", TypeError), ((50,), TypeError)],
)  # fmt: skip
def test_a_wrong_cap_is_named(softcap, error):
    q, k, v = (torch.randn(1, 2, 64, 32, dtype=torch.float16) for _ in range(3))
    fa2tune.attention(q, k, v, softcap=1)
    with pytest.raises(error, match=r"softcap: got .*must be"):
        fa2tune.attention(q, k, v, softcap=softcap)
    assert not fa2tune.is_supported(q, k, v, softcap=softcap)


def test_rows_of_calls_without_a_term_serve(monkeypatch):
    monkeypatch.setattr(support, "interpreted", lambda: False)  # what an H200 would take
    h200 = gpus.named("h200")
    asked = replace(problem("bf16", 4096, 4096, 128, heads=(16, 16), batch=4), mask=CAUSAL, score=score_of(50.0))
    for kernel in ("fwd", "bwd_dq", "bwd_dkdv", "bwd_fused"):
        assert "LOADS" not in choosing.choose(asked, kernel, h200).config
    assert not any(refused_score(one, asked.specialization) for one in variants().values())
    found = serving.explain_problem(asked, h200, present=False)
    assert found.status == explanation.NEAR and "tuned without a soft cap" in found.verdict
    assert found.as_dict()["problem"]["score"] == "softcap 50" == str(Score("softcap", 50.0))


@pytest.mark.parametrize("flag", [True, False])
def test_a_bool_is_no_cap_in_a_compiled_graph_either(flag: bool) -> None:
    q = torch.randn(1, 2, 16, 16)
    compiled = torch.compile(lambda q: fa2tune.attention(q, q, q, softcap=flag), backend="eager")
    for call in (compiled, lambda q: fa2tune.attention(q, q, q, softcap=flag)):
        with pytest.raises(TypeError, match=r"softcap: got (True|False), must be None or a number"):
            call(q)
