"""The kernels, in Triton's interpreter, through the public call: correct by the error rule, gradients included."""

from __future__ import annotations

import math

import pytest
import torch

import fa2tune
from fa2tune.compiling.registry import portable_of
from fa2tune.launching import passes
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import STRATEGIES, Problem, Specialization
from fa2tune.spec.variant import DESCRIPTOR, POINTER

DTYPES = ("fp16", "bf16", "fp32")


@pytest.fixture(autouse=True)
def _poison():
    """torch.empty fills with NaN, so that an element that was not written is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def problem(dtype, seqlen_q, seqlen_k, head_dim=32, head_dim_v=None, causal=False, heads=(2, 1), batch=1):
    return Problem(
        dtype, batch, *heads, seqlen_q, seqlen_k, head_dim, head_dim_v or head_dim, CAUSAL if causal else FULL
    )


def run(inputs, *, with_lse=True, **options):
    """Through fa2tune.attention: o, lse and gradients."""
    q, k, v = (tensor.clone().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    o, lse = fa2tune.attention(q, k, v, return_lse=True, **options)
    outputs, incoming = [o], [inputs.do]
    if inputs.dlse is not None:
        outputs.append(lse)
        incoming.append(inputs.dlse)
    gradients = torch.autograd.grad(outputs, (q, k, v), incoming)
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def check(asked, *, scale=1.0, outlier=False, with_dlse=False, softmax_scale=None):
    inputs = reference.make_inputs(asked, "cpu", scale=scale, outlier=outlier, with_dlse=with_dlse)
    oracle, same = reference.oracle_and_reference(inputs, mask=asked.mask, softmax_scale=softmax_scale)
    verify.compare(run(inputs, causal=asked.mask == CAUSAL, softmax_scale=softmax_scale), oracle, same)


def check_options(asked, mask, /, **options):
    """With any of attention's arguments, which ask for this mask."""
    inputs = reference.make_inputs(asked, "cpu")
    oracle, same = reference.oracle_and_reference(inputs, mask=mask)
    verify.compare(run(inputs, **options), oracle, same)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_lengths(dtype, causal):
    check(problem(dtype, 113, 203, 64, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_more_queries_than_keys(causal):
    """With a causal mask the first rows see no key: zero output, -inf lse, zero gradient."""
    check(problem("fp16", 150, 70, causal=causal))


@pytest.mark.parametrize("seqlens", [(1, 1), (1, 77), (77, 1), (3, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_shorter_than_a_block(seqlens, causal):
    check(problem("fp16", *seqlens, causal=causal), with_dlse=True)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 16), (24, 24), (80, 48), (40, 96), (72, 136), (128, 128)])
def test_head_dims(head_dim, head_dim_v):
    check(problem("fp16", 70, 90, head_dim, head_dim_v, causal=True))


@pytest.mark.parametrize("head_dim", [192, 256])
def test_large_head_dims(head_dim):
    check(problem("fp16", 40, 50, head_dim, causal=True, heads=(1, 1)))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (4, 1)])
def test_grouped_heads(heads):
    check(problem("fp16", 40, 60, causal=True, heads=heads, batch=2))


@pytest.mark.parametrize("softmax_scale", [0.0, -0.3, 1.0, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_scale(softmax_scale, causal):
    check(problem("fp16", 70, 90, causal=causal), softmax_scale=softmax_scale, with_dlse=True)


def test_large_inputs():
    check(problem("fp16", 150, 170, causal=True), scale=10.0)


def test_outlier_channel():
    check(problem("fp16", 150, 170, causal=True), outlier=True)


@pytest.mark.parametrize("causal", [False, True])
def test_lse_is_differentiable(causal):
    check(problem("fp32", 60, 50, causal=causal), with_dlse=True)


@pytest.mark.parametrize("masked", ["last", "first", "inside"])
@pytest.mark.parametrize("loads", [POINTER, DESCRIPTOR])
@pytest.mark.parametrize("strategy", ["split", "fused"])
def test_every_variant(strategy, loads, masked):
    """Both strategies, pointer and descriptor loads, both loop orders, several heads in a band."""
    asked = problem("fp16", 133, 150, 48, 64, causal=True, heads=(6, 2))
    spec = asked.specialization
    choice = {"LOADS": loads, "MASKED": masked, "HEADS_PER_WAVE": 4}
    configs = {name: {**portable_of(name).space.default(spec, 80), **choice} for name in ("fwd", *STRATEGIES[strategy])}
    inputs = reference.make_inputs(asked, "cpu", with_dlse=True)
    oracle, same = reference.oracle_and_reference(inputs, mask=CAUSAL)
    q, k, v = inputs.q, inputs.k, inputs.v
    options = {"mask": CAUSAL, "softmax_scale": 48**-0.5}
    o, lse = passes.forward(q, k, v, **options, config=configs["fwd"])
    gradients = passes.backward(inputs.do, inputs.dlse, q, k, v, o, lse, **options, strategy=strategy, configs=configs)
    verify.compare({"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}, oracle, same)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed", "expanded"])
def test_strides_without_copies(layout):
    """Views are read as they are; the output has the memory order that the layout suggests."""
    torch.manual_seed(0)
    batch, heads, seqlen, dim = 2, 2, 50, 32
    if layout == "packed":
        qkv = torch.randn(batch, seqlen, 3, heads, dim, dtype=torch.float16)
        q, k, v = qkv.unbind(2)
    elif layout == "expanded":
        q = torch.randn(batch, seqlen, heads, dim, dtype=torch.float16)
        k, v = (torch.randn(1, seqlen, 1, dim, dtype=torch.float16).expand(batch, -1, heads, -1) for _ in "kv")
    else:
        q, k, v = (torch.randn(batch, heads, seqlen, dim, dtype=torch.float16) for _ in "qkv")
    bshd = layout != "bhsd"
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    o = fa2tune.attention(q, k, v, layout="bshd" if bshd else "bhsd")
    assert o.is_contiguous()
    plain = [(t.transpose(1, 2) if bshd else t).contiguous() for t in (q, k, v)]
    expected = fa2tune.attention(*plain)
    assert torch.equal(o.transpose(1, 2) if bshd else o, expected)


def test_gradient_of_sum_has_no_strides():
    """.sum().backward() sends an expanded gradient, all strides 0."""
    inputs = reference.make_inputs(problem("fp32", 40, 40), "cpu")
    q, k, v = (tensor.clone().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    fa2tune.attention(q, k, v).sum().backward()
    expected = reference.evaluate(
        reference.Inputs(inputs.q, inputs.k, inputs.v, torch.ones_like(inputs.do)), torch.float64
    )
    for tensor, name in ((q, "dq"), (k, "dk"), (v, "dv")):
        torch.testing.assert_close(tensor.grad.double(), expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dropped", ["batch", "heads", "queries"])
def test_nothing_asked(dropped):
    shape = {"batch": (0, 2, 5, 16), "heads": (1, 0, 5, 16), "queries": (1, 2, 0, 16)}[dropped]
    q = torch.randn(shape, dtype=torch.float16, requires_grad=True)
    other = (shape[0], shape[1], 5, 16)
    k, v = (torch.randn(other, dtype=torch.float16, requires_grad=True) for _ in "kv")
    o, lse = fa2tune.attention(q, k, v, return_lse=True)
    assert o.shape == shape and lse.shape == shape[:3]
    o.sum().backward()
    assert q.grad.shape == shape and not k.grad.any() and not v.grad.any()


def test_no_keys():
    q = torch.randn(1, 2, 5, 16, dtype=torch.float16, requires_grad=True)
    k, v = (torch.randn(1, 1, 0, 16, dtype=torch.float16, requires_grad=True) for _ in "kv")
    o, lse = fa2tune.attention(q, k, v, return_lse=True)
    assert not o.any() and torch.equal(lse, torch.full((1, 2, 5), -math.inf))
    o.sum().backward()
    assert not q.grad.any() and k.grad.shape == k.shape


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_and_inf_as_softmax_has_them(where, value):
    asked = problem("fp32", 40, 70, 16, heads=(1, 1))
    inputs = reference.make_inputs(asked, "cpu")
    tensor = getattr(inputs, where)
    tensor[0, 0, 7, 3] = value
    o = fa2tune.attention(inputs.q, inputs.k, inputs.v)
    expected, _ = reference.attention(inputs.q.double(), inputs.k.double(), inputs.v.double())
    assert torch.equal(torch.isnan(o), torch.isnan(expected))
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_score_of_minus_infinity_in_every_key_is_nan():
    """Not the same as a row that sees no key."""
    q, k, v = torch.ones(1, 1, 3, 16), torch.full((1, 1, 40, 16), -math.inf), torch.ones(1, 1, 40, 16)
    assert torch.isnan(fa2tune.attention(q, k, v)).all()


def test_deterministic_asked_for_gives_the_same_bits():
    inputs = reference.make_inputs(problem("fp16", 70, 90), "cpu")
    first, second = (run(inputs, deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_specialization_defaults_are_points_of_their_space():
    for name in ("fwd", "bwd_dq", "bwd_dkdv", "bwd_fused"):
        space = portable_of(name).space
        for dtype in DTYPES:
            for dim in (16, 64, 72, 128, 256):
                for arch in (80, 86, 90, 100, 120):
                    for aligned in (True, False):
                        spec = Specialization(dtype, dim, dim, "causal", aligned=aligned)
                        config = space.default(spec, arch)
                        assert space.broken(config, spec, arch) is None, (name, spec, arch)
                        assert all(config[d] in values for d, values in space.dimensions.items()), (name, config)
