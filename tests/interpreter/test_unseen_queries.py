"""Queries that see no key, filled in around a call of the others: results and gradients are those of the whole call."""

from __future__ import annotations

import pytest
import torch

import fa2tune
from fa2tune.calling import dispatch, unseen
from fa2tune.measuring import reference
from fa2tune.spec.mask import CAUSAL


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(unseen, "filled_in", lambda problem, gpu, pass_: unseen.count(problem))
    dispatch.reload()
    yield
    dispatch.reload()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_results_and_gradients_are_those_of_the_whole_call(always, layout, dtype):
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 2, 70, 16), (2, 1, 20, 16), (2, 1, 20, 16)]
    inputs = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    if layout == "bshd":
        inputs = [tensor.transpose(1, 2) for tensor in inputs]
    q, k, v = (tensor.clone().requires_grad_() for tensor in inputs)
    o, lse = fa2tune.attention(q, k, v, causal=True, layout=layout, return_lse=True)
    plans = [*dispatch.FORWARD_PLANS.values()]
    assert any(isinstance(plan, unseen.Forward) for plan in plans)
    right, right_lse = reference.attention(*exact, mask=CAUSAL, softmax_scale=0.25)
    (o.float().square().sum() + lse[lse.isfinite()].sum()).backward()
    (right.square().sum() + right_lse[right_lse.isfinite()].sum()).backward()
    assert any(isinstance(plan, unseen.Backward) for plan in dispatch.BACKWARD_PLANS.values())
    bhsd = (lambda t: t.transpose(1, 2)) if layout == "bshd" else (lambda t: t)
    assert bhsd(o).shape == right.shape and torch.equal(lse.isinf(), right_lse.isinf())
    least = 2e-2 if dtype is torch.float16 else 1e-4
    for got, wanted in ((o, right), *((mine.grad, one.grad) for mine, one in zip((q, k, v), exact, strict=True))):
        assert (bhsd(got).double() - wanted).abs().max() < least
    assert (lse.double() - right_lse)[lse.isfinite()].abs().max() < least
    assert not bhsd(q.grad)[:, :, :50].any() and not bhsd(o)[:, :, :50].any()


def test_under_torch_compile(always):
    q, k, v = (torch.randn(1, 2, rows, 16, dtype=torch.float16) for rows in (40, 8, 8))
    compiled = torch.compile(lambda *t: fa2tune.attention(*t, causal=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), fa2tune.attention(q, k, v, causal=True))
