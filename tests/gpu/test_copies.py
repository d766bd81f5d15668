"""Tensors that TMA cannot address, copied before the fast kernels: forward, backward, in a CUDA graph, under torch.compile."""

from __future__ import annotations

import pytest
import torch

import fa2tune
from fa2tune.calling import copies, dispatch
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no warp-specialised kernels"
)
SHAPE = (2, 8, 2048, 128)


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Copies whatever they cost, so that small calls show them."""
    monkeypatch.setattr(copies, "pays", lambda *asked: True)
    dispatch.reload()
    yield
    dispatch.reload()


def odd_base(tensor):
    storage = tensor.new_full((tensor.numel() + 1,), float("nan"))
    return storage[1:].view(tensor.shape).copy_(tensor)


def odd_rows(tensor):
    b, h, m, d = tensor.shape
    return tensor.new_full((b, h, m, d + 3), float("nan"))[..., 1 : d + 1].copy_(tensor)


def made(kind, heads_kv=SHAPE[1]):
    q, do = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(SHAPE[0], heads_kv, *SHAPE[2:], device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if kind == "expanded":  # heads have a stride of 0, which TMA takes
        return q, k[:, :1].expand(SHAPE), v[:, :1].expand(SHAPE), do
    if kind == "expanded_batch":
        return q, *(t.expand(SHAPE[0], *t.shape[1:]) for t in (k[:1], v[:1])), do
    if kind == "expanded_rows":
        return q, *(t[:, :, :1].expand(SHAPE) for t in (k, v)), do
    odd = {"odd_base": odd_base, "odd_rows": odd_rows}[kind]
    return odd(q), odd(k), odd(v), odd(do)


def run(q, k, v, do):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    o, lse = fa2tune.attention(q, k, v, causal=True, return_lse=True)
    return {"o": o.detach(), "lse": lse.detach()} | dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do), strict=True)
    )


@pytest.mark.parametrize("kind", ["odd_base", "odd_rows", "expanded", "expanded_batch", "expanded_rows"])
def test_results_keep_the_error_rule(kind):
    tensors = made(kind)
    oracle, same = reference.oracle_and_reference(reference.Inputs(*(t.contiguous() for t in tensors)), mask=CAUSAL)
    verify.compare(run(*tensors), oracle, same)
    plans = [*dispatch.FORWARD_PLANS.values(), *dispatch.BACKWARD_PLANS.values()]
    copied = kind not in ("expanded", "expanded_batch")
    assert len(plans) == 2 and all(isinstance(plan, copies.Copying) == copied for plan in plans)
    q, k, v, _ = tensors
    told = fa2tune.explain(q, k, v, causal=True, backward=True)
    assert ("copied before the forward and the backward" in str(told)) == copied


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_outputs_and_gradients_have_the_memory_order_of_what_came(layout):
    q, k, v, do = made("odd_rows")
    if layout == "bshd":
        q, k, v, do = (odd_rows(t.transpose(1, 2)).transpose(1, 2) for t in (q, k, v, do))
    found = run(q, k, v, do)
    for name in ("o", "dq", "dk", "dv"):
        assert (found[name].stride(1) < found[name].stride(2)) == (layout == "bshd")


def test_a_graph_copies_what_is_there_when_it_is_replayed():
    q, k, v, do = made("odd_base")
    run(q, k, v, do)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(q, k, v, do)
    for tensor in (q, k, v, do):
        tensor.normal_()
    graph.replay()
    expected = run(q, k, v, do)
    for name, one in captured.items():
        torch.testing.assert_close(one, expected[name], atol=2e-2, rtol=2e-2)


def test_under_torch_compile():
    q, k, v, do = made("odd_rows")
    compiled = torch.compile(lambda *t: fa2tune.attention(*t, causal=True), fullgraph=True)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    o = compiled(*leaves)
    got = {"o": o.detach(), **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do), strict=True))}
    expected = run(q, k, v, do)
    for name, one in got.items():
        torch.testing.assert_close(one, expected[name], atol=2e-2, rtol=2e-2)
