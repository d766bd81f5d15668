"""The public call's manners: errors, operators, autograd, compile, autocast. In the interpreter, on CPU tensors."""

from __future__ import annotations

import itertools

import numpy
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fa2tune
from fa2tune.calling import dispatch
from fa2tune.spec.mask import FULL


def qkv(*shape, dtype=torch.float16, **options):
    shape = shape or (1, 2, 20, 16)
    return [torch.randn(shape, dtype=dtype, **options) for _ in "qkv"]


def nested(layout):
    parts = [torch.zeros(2, length, 16, dtype=torch.float16) for length in (20, 24)]
    if layout is torch.jagged:
        parts = [part.transpose(0, 1) for part in parts]
    return torch.nested.nested_tensor(parts, layout=layout)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": "text"}, TypeError, "q: got str"),
        ({"k": torch.zeros(1, 2, 20, 16, dtype=torch.bfloat16)}, TypeError, "k: got dtype torch.bfloat16, q has"),
        ({"q": torch.zeros(1, 2, 20, 16, dtype=torch.int32)}, TypeError, "q: got dtype torch.int32, allowed are"),
        ({"q": torch.zeros(2, 20, 16, dtype=torch.float16)}, ValueError, "q: got shape .* 4 dimensions"),
        ({"k": torch.zeros(2, 2, 20, 16, dtype=torch.float16)}, ValueError, "k: got batch 2, q has 1"),
        ({"k": torch.zeros(1, 2, 20, 24, dtype=torch.float16)}, ValueError, "k: got head dim 24, q has 16"),
        ({"v": torch.zeros(1, 2, 21, 16, dtype=torch.float16)}, ValueError, "v: got sequence length 21, k has 20"),
        ({"v": torch.zeros(1, 1, 20, 16, dtype=torch.float16)}, ValueError, "v: got 1 heads, k has 2"),
        (
            {"q": torch.zeros(1, 3, 20, 16, dtype=torch.float16)},
            ValueError,
            "q: got 3 heads, must be a multiple of the 2",
        ),
        ({"v": torch.zeros(1, 2, 20, 264, dtype=torch.float16)}, ValueError, "v: got head dim 264"),
        (
            {"v": torch.zeros(1, 2, 20, 20, dtype=torch.float16)},
            ValueError,
            "v: got head dim 20, must be a multiple of 8",
        ),
        ({"q": torch.zeros(1, 2, 20, 32, dtype=torch.float16)[..., ::2]}, ValueError, "q: got strides .* contiguous"),
        (
            {"q": torch.zeros(1, 2, 20, 16, dtype=torch.float16).to_sparse()},
            TypeError,
            "q: got layout torch.sparse_coo",
        ),
        ({"v": torch.zeros(20, 16, dtype=torch.float16).to_sparse_csr()}, TypeError, "v: got layout torch.sparse_csr"),
        ({"k": nested(torch.strided)}, TypeError, "k: got a nested tensor"),
        ({"q": nested(torch.jagged)}, TypeError, "q: got a nested tensor"),
        ({"causal": None}, TypeError, "causal: got None, allowed are True, False"),
        ({"causal": "yes"}, TypeError, "causal: got 'yes', allowed"),
        ({"causal": 2}, TypeError, "causal: got 2, allowed"),
        ({"deterministic": "x"}, TypeError, "deterministic: got 'x', allowed are True, False, None"),
        ({"layout": ["bhsd"]}, ValueError, "layout: got .'bhsd'., allowed are"),
        ({"softmax_scale": [1.0]}, ValueError, "softmax_scale: got .1.0., must be a number from"),
        ({"layout": "sbhd"}, ValueError, "layout: got 'sbhd', allowed are 'bhsd' and 'bshd'"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: got nan"),
        ({"softmax_scale": 10**40}, ValueError, "softmax_scale: got 10000"),
        ({"softmax_scale": -(10**5000)}, ValueError, "softmax_scale: got an integer beyond 2"),
        ({"softmax_scale": "big"}, ValueError, "softmax_scale: got 'big'"),
        ({"q": torch.zeros(1, 2, 20, 16, dtype=torch.float16, device="meta")}, ValueError, "q: got device meta"),
    ],
)
def test_bad_arguments_are_named(changes, error, words):
    q, k, v = qkv()
    arguments = {"q": q, "k": k, "v": v, **changes}
    with pytest.raises(error, match=words):
        fa2tune.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="q: got device cpu, must be a CUDA device"):
        fa2tune.attention(*qkv(1, 2, 31, 16))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(1, 2, 20, 17)}, "q: got head dim 17, must be a multiple"),
        ({"q": torch.zeros(1, 2, 20, 16, dtype=torch.float64)}, "q: got dtype torch.float64, allowed are"),
        ({"v": torch.zeros(1, 2, 21, 16)}, "v: got sequence length 21, k has 20"),
        ({"deterministic": "x"}, "deterministic: got 'x'"),
    ],
)
def test_another_device_hides_no_other_mistake(monkeypatch, changes, words):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    arguments = {name: torch.zeros(1, 2, 20, 16) for name in "qkv"} | changes
    if arguments["q"].shape[3] == 17:
        arguments["k"] = arguments["q"]
    with pytest.raises((TypeError, ValueError), match=words):
        fa2tune.attention(**arguments)


def test_a_plan_of_the_forward_hides_no_mistake_of_the_backward():
    q, k, v = qkv(requires_grad=True)
    fa2tune.attention(q, k, v)
    o = fa2tune.attention(q, k, v, deterministic="x")  # not asked for again: the forward does not depend on it
    with pytest.raises(TypeError, match="deterministic: got 'x', allowed are True, False"):
        o.sum().backward()


def test_vmap_is_refused():
    q, k, v = qkv(3, 1, 2, 8, 16)
    with pytest.raises(NotImplementedError, match="vmap is not supported"):
        torch.vmap(fa2tune.attention)(q, k, v)


@pytest.mark.parametrize("through_operator", [False, True])
def test_differentiating_twice_is_refused(through_operator):
    q, k, v = qkv(dtype=torch.float32, requires_grad=True)
    if through_operator:
        o, _ = torch.ops.fa2tune.attention(q, k, v, -1, -1, 0.25, True)
    else:
        o = fa2tune.attention(q, k, v)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiating twice is not supported"):
        dq.sum().backward()


def test_create_graph_alone_is_fine():
    q, k, v = qkv(dtype=torch.float32, requires_grad=True)
    plain = torch.autograd.grad(fa2tune.attention(q, k, v).sum(), q)[0]
    kept = torch.autograd.grad(fa2tune.attention(q, k, v).sum(), q, create_graph=True)[0]
    assert torch.equal(plain, kept)


@pytest.mark.parametrize("bshd", [False, True])
def test_fake_tensors_have_the_real_strides(bshd):
    layout = "bshd" if bshd else "bhsd"
    q, k, v = qkv(2, 20, 20, 16)
    o, lse = fa2tune.attention(q, k, v, layout=layout, return_lse=True)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (q, k, v)]
        fake_o, fake_lse = fa2tune.attention(*fakes, layout=layout, return_lse=True)
    assert (fake_o.shape, fake_o.stride(), fake_o.dtype) == (o.shape, o.stride(), o.dtype)
    assert (fake_lse.shape, fake_lse.stride(), fake_lse.dtype) == (lse.shape, lse.stride(), lse.dtype)


def heads_first(*shape):
    return torch.randn(*shape)


def one_head(batch, heads, rows, dim):
    return torch.randn(batch, 1, rows, dim).expand(batch, heads, rows, dim)


def one_batch(batch, heads, rows, dim):
    return torch.randn(1, heads, rows, dim).expand(batch, heads, rows, dim)


def rows_first(batch, heads, rows, dim):
    return torch.randn(rows, batch, heads, dim).permute(1, 2, 0, 3)


def windows(batch, heads, rows, dim):
    return torch.randn(batch * heads * rows * dim).as_strided(
        (batch, heads, rows, dim), (heads * rows * dim, 8, dim, 1)
    )


@pytest.mark.parametrize("made", [heads_first, one_head, one_batch, rows_first, windows])
@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("seqlen_k", [0, 20])
def test_fake_operators_write_where_the_real_ones_do(made, bshd, seqlen_k):
    """torch.compile lays out what follows by the fake ones."""
    q, k, v = (made(2, 3, rows, 16) for rows in (12, seqlen_k, seqlen_k))
    if bshd:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) if made is heads_first else t for t in (q, k, v))
    forward, backward = torch.ops.fa2tune.attention, torch.ops.fa2tune.attention_backward
    o, lse = forward(q, k, v, -1, 0, 0.25, True)
    gradients = backward(torch.ones_like(o), None, q, k, v, o, lse, -1, 0, 0.25, True)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (q, k, v)]
        fake_o, fake_lse = forward(*fakes, -1, 0, 0.25, True)
        fake_gradients = backward(torch.ones_like(fake_o), None, *fakes, fake_o, fake_lse, -1, 0, 0.25, True)
    for real, fake in zip((o, lse, *gradients), (fake_o, fake_lse, *fake_gradients), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_compiled_with_heads_that_share_keys_by_expansion():
    def loss(q, k, v):
        k, v = (t.expand(-1, 4, -1, -1) for t in (k, v))
        return fa2tune.attention(q, k, v, causal=True).transpose(1, 2).flatten(2).square().sum()

    eager = [torch.randn(2, heads, 9, 16, requires_grad=True) for heads in (4, 1, 1)]
    compiled = [t.detach().clone().requires_grad_() for t in eager]
    loss(*eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*compiled).backward()
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("bshd", [False, True])
def test_opcheck(bshd):
    q, k, v = qkv(1, 4, 12, 16, dtype=torch.float32)
    if bshd:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    torch.library.opcheck(torch.ops.fa2tune.attention.default, (q, k, v, -1, 0, 0.25, True))
    with_grad = [t.detach().requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(torch.ops.fa2tune.attention.default, (*with_grad, -1, 0, 0.25, True))
    o, lse = torch.ops.fa2tune.attention(q, k, v, -1, 0, 0.25, True)
    call = (torch.randn_like(o), torch.randn_like(lse), q, k, v, o, lse, -1, 0, 0.25, True)
    torch.library.opcheck(torch.ops.fa2tune.attention_backward.default, call)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_torch_compile_full_graph(layout):
    def loss(q, k, v):
        o, lse = fa2tune.attention(q, k, v, causal=True, layout=layout, return_lse=True)
        return (o * o).sum() + lse.sum()

    eager = qkv(1, 8, 8, 16, dtype=torch.float32, requires_grad=True)
    compiled = [t.detach().clone().requires_grad_() for t in eager]
    loss(*eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*compiled).backward()
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_torch_compile_with_a_symbolic_mask():
    """Whether it is causal, and how wide its window is, follow from lengths: one graph for all of them."""

    def step(q, k, v):
        causal = q.shape[2] * 2 > k.shape[2]
        return fa2tune.attention(q, k, v, causal=causal), fa2tune.attention(
            q, k, v, causal=causal, window=(q.shape[2], 2)
        )

    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counted, dynamic=True)
    for rows in (12, 20, 30):
        q = torch.randn(1, 2, rows, 16, requires_grad=True)
        k, v = torch.randn(2, 1, 2, 32, 16)
        found, expected = compiled(q, k, v), step(q, k, v)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(sum(o.sum() for o in outputs), q)[0] for outputs in (found, expected)]
        torch.testing.assert_close(*gradients)
    assert counted.frame_count == 1


@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_torch_compile_with_a_mask_that_follows_from_the_lengths(dynamic):
    """Prefill and decode in one function: whether it is causal is not known while the graph is made."""

    def step(q, k, v):
        return fa2tune.attention(q, k, v, causal=q.shape[2] > 1)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (32, 48, 64):
        q, k, v = qkv(1, 2, rows, 16, dtype=torch.float32)
        torch.testing.assert_close(compiled(q, k, v), fa2tune.attention(q, k, v, causal=True))
    torch.testing.assert_close(compiled(q[:, :, :1], k, v), fa2tune.attention(q[:, :, :1], k, v))


def test_truth_values_of_numpy():
    q, k, v = qkv(1, 2, 21, 16)
    expected = fa2tune.attention(q, k, v, causal=True)
    dispatch.FORWARD_PLANS.clear()
    assert torch.equal(fa2tune.attention(q, k, v, causal=numpy.bool_(True)), expected)
    with FlopCounterMode(display=False):  # through the operators
        o = fa2tune.attention(q, k, v, causal=numpy.bool_(True), deterministic=numpy.bool_(True))
    assert torch.equal(o, expected)


def test_parameters_and_modules():
    q = torch.nn.Parameter(torch.randn(1, 2, 20, 16))
    fa2tune.attention(q, q, q).sum().backward()
    assert q.grad is not None and q.grad.abs().sum() > 0


def test_deterministic_follows_torch():
    q, k, v = qkv(dtype=torch.float32, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        o = fa2tune.attention(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert o.grad_fn.deterministic is True
    assert fa2tune.attention(q, k, v).grad_fn.deterministic is False


def test_plans_are_remembered():
    q, k, v = qkv(1, 2, 23, 16)
    fa2tune.attention(q, k, v)
    made = len(dispatch.FORWARD_PLANS)
    fa2tune.attention(q.clone(), k.clone(), v.clone())
    assert len(dispatch.FORWARD_PLANS) == made


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "o"])
def test_saved_tensors_may_come_back_with_other_strides(which):
    """As hooks on saved tensors bring them that store what is saved elsewhere meanwhile."""
    q, k, v = qkv(1, 20, 2, 16, dtype=torch.float32, requires_grad=True)
    do = torch.randn(1, 20, 2, 16)
    expected = torch.autograd.grad(
        fa2tune.attention(q, k, v, layout="bshd"), (q, k, v), do
    )  # its plan is not to be taken
    count = itertools.count()

    def apart(tensor):
        return torch.cat((tensor, tensor), -1)[..., :16] if next(count) == which else tensor

    with torch.autograd.graph.saved_tensors_hooks(apart, lambda t: t):
        o = fa2tune.attention(q, k, v, layout="bshd")
    for one, other in zip(torch.autograd.grad(o, (q, k, v), do), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("which", range(5), ids=["q", "k", "v", "o", "lse"])
def test_saved_tensors_may_come_back_with_their_columns_apart(which):
    q, k, v = qkv(1, 2, 20, 16, requires_grad=True)
    do = torch.randn(1, 2, 20, 16, dtype=q.dtype)
    expected = torch.autograd.grad(fa2tune.attention(q, k, v), (q, k, v), do)
    count = itertools.count()

    def turned(tensor):
        return tensor.mT.contiguous().mT if next(count) == which else tensor

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(turned, lambda t: t):
            o = fa2tune.attention(q, k, v)
        for one, other in zip(torch.autograd.grad(o, (q, k, v), do), expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("unpack", "words"),
    [
        (torch.Tensor.float, "the gradient of o of dtype torch.float16, q has torch.float32"),
        (lambda t: t.bfloat16() if t.shape[2] == 30 else t, "k of dtype torch.bfloat16, q has torch.float16"),
        (torch.Tensor.half, "lse of dtype torch.float16"),
    ],
    ids=["float", "bfloat16", "half"],
)
def test_saved_tensors_of_another_dtype_are_refused(unpack, words):
    q, k, v = (torch.randn(1, 2, rows, 16, dtype=torch.float16, requires_grad=True) for rows in (20, 30, 30))
    fa2tune.attention(q, k, v).sum().backward()  # there is a plan
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        o = fa2tune.attention(q, k, v)
    with pytest.raises(TypeError, match=f"attention's backward: got {words}"):
        o.sum().backward()


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("k", r"k of shape \(1, 2, 16, 16\), the forward had \(1, 2, 30, 16\)|v of shape"),
        ("v", r"v of shape \(1, 2, 16, 24\), the forward had \(1, 2, 30, 24\)"),
        ("o", r"o of shape \(1, 2, 16, 24\), the forward had \(1, 2, 20, 24\)"),
        ("meta", "k on meta, q is on cpu"),
    ],
)
def test_saved_tensors_of_another_shape_or_device_are_refused(which, words):
    """They would be read beyond their end."""
    q, k, v = (
        torch.randn(1, 2, rows, dim, dtype=torch.float16, requires_grad=True)
        for rows, dim in ((20, 16), (30, 16), (30, 24))
    )
    if which == "meta":  # the interpreter's tensors have no device number to tell them apart by
        dispatch.BACKWARD_PLANS.clear()
    else:
        fa2tune.attention(q, k, v).sum().backward()  # there is a plan
    count = itertools.count()

    def unpack(tensor):
        if which == "meta":
            return tensor.to("meta") if tensor.shape[2:] == (30, 16) else tensor
        return tensor[:, :, :16] if next(count) == "qkvo".index(which) else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        o = fa2tune.attention(q, k, v)
    with pytest.raises(ValueError, match=f"attention's backward: got ({words})"):
        o.sum().backward()


def test_gradients_of_a_subclass_are_unwrapped():
    """What sharded training hands back: a wrapper has no address."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Wraps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return TwoTensor(gradient.clone(), gradient.clone())

    q, k, v = qkv(1, 2, 20, 16, requires_grad=True)
    do = torch.randn(1, 2, 20, 16, dtype=q.dtype)
    expected = torch.autograd.grad(fa2tune.attention(q, k, v), (q, k, v), do)
    for one, other in zip(
        torch.autograd.grad(Wraps.apply(fa2tune.attention(q, k, v)), (q, k, v), do), expected, strict=True
    ):
        assert isinstance(one, TwoTensor)
        torch.testing.assert_close(one.a, other)
        torch.testing.assert_close(one.b, other)


def test_saved_tensors_of_another_shape_are_refused_and_spoil_nothing():
    """Autograd does not see that ``.data`` was exchanged."""
    expected = None
    for narrowed in (True, False, True):  # before there is a plan, and after
        q, k, v = (t.detach().requires_grad_() for t in qkv(2, 2, 20, 16, dtype=torch.float32))
        o = fa2tune.attention(q, k, v)
        if narrowed:
            k.data, v.data = k.data[:, :, :10], v.data[:, :, :10]
            with pytest.raises(RuntimeError):
                torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
        else:
            found = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
            expected = torch.autograd.grad(
                torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v, (q, k, v), torch.ones_like(o)
            )
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert expected is not None


def test_backwards_of_every_kind_of_gradient_share_a_forward():
    """Each finds the plan that fits it, whatever came before it."""
    q, k, v = qkv(dtype=torch.float32, requires_grad=True)
    o, lse = fa2tune.attention(q, k, v, return_lse=True)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    strided = torch.randn(1, 20, 2, 16).transpose(1, 2)
    exact = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v, torch.logsumexp(q @ k.transpose(-1, -2) / 4, -1)
    for of_o, of_lse in 2 * [
        (do, dlse),
        (do, None),
        (None, dlse),
        (strided, dlse),
        (strided[:, :, :, :1].expand_as(o), None),
    ]:
        asked = [(0, of_o)] * (of_o is not None) + [(1, of_lse)] * (of_lse is not None)
        outputs, given = [(o, lse)[i] for i, _ in asked], [gradient for _, gradient in asked]
        got = torch.autograd.grad(outputs, (q, k, v), given, retain_graph=True, allow_unused=True)
        want = torch.autograd.grad([exact[i] for i, _ in asked], (q, k, v), given, retain_graph=True, allow_unused=True)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, atol=1e-4, rtol=1e-4)


def test_forward_mode_is_refused():
    q, k, v = qkv(dtype=torch.float32)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            fa2tune.attention(dual, k, v)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda t: fa2tune.attention(t, k, v), (q,), (torch.ones_like(q),))


def test_gradients_of_torch_func_are_refused():
    q, k, v = qkv(dtype=torch.float32)
    offsets = torch.tensor([0, 8], dtype=torch.int32)

    def packed(*given):
        return fa2tune.attention_varlen(*(t[0].transpose(0, 1) for t in given), offsets)

    for call in (fa2tune.attention, packed):
        for transform in (torch.func.grad, torch.func.jacrev):
            with pytest.raises(NotImplementedError, match=r"attention: torch\.func\.grad is not supported; use"):
                transform(lambda t, call=call: call(t, k, v).sum())(q)


def test_batched_gradients_are_refused():
    q, k, v = qkv(dtype=torch.float32, requires_grad=True)
    o = fa2tune.attention(q, k, v)
    with pytest.raises(NotImplementedError, match="vmap is not supported"):
        torch.autograd.grad(o, q, torch.ones(3, *o.shape), is_grads_batched=True)


def test_compiled_with_a_scale_that_varies():
    def scaled(q, scale):
        return fa2tune.attention(q, q, q, softmax_scale=scale)

    q = torch.randn(1, 2, 20, 16)
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    for scale in (0.1, 0.2, 0.3):
        torch.testing.assert_close(compiled(q, scale), scaled(q, scale))


def test_a_scale_too_small_for_float32_is_zero():
    q, k, v = qkv(1, 2, 7, 16, dtype=torch.float32)
    torch.testing.assert_close(
        fa2tune.attention(q, k, v, softmax_scale=1e-46, causal=True),
        fa2tune.attention(q, k, v, softmax_scale=0.0, causal=True),
    )


def test_float32_precision_follows_either_setting_of_torch():
    from fa2tune.launching.passes import float32_precision

    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert float32_precision() == "tf32"
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert float32_precision() == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_a_large_output_has_64_bit_strides():
    from fa2tune.launching.passes import describe

    q = torch.empty(1, 1, 1, 64, dtype=torch.float16).expand(2, 32, 1 << 20, 64)
    k = torch.empty(2, 32, 8, 64, dtype=torch.float16)
    v = torch.empty(2, 32, 8, 256, dtype=torch.float16)
    assert describe(q, k, v, FULL, 0.125).wide
