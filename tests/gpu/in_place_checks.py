"""Checks of kernels that run in place of the tuned forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hopper_cases import VIEWS

import fa2tune
from fa2tune.spec.problem import Problem


def check_strides_and_scales(checked: Callable[..., object], asked: Problem) -> None:
    """``checked``: of a problem, with a view of its tensors, a scale, or an outlier."""
    for view in VIEWS:
        checked(asked, view=view)
    for scale in (-0.1, 0.0):
        checked(asked, scale=scale)
    checked(asked, scale=1.0, outlier=True)


def check_public_call(shape: tuple[int, int, int, int], forward: str) -> None:
    """A call of this shape, served by this forward: gradients, and a graph that gives the same bits."""
    q, k, v = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    kernels = fa2tune.explain(q, k, v).kernels
    assert forward in next(one for one in kernels if one.kernel == "fwd").runs
    fa2tune.attention(q, k, v).sum().backward()
    grads = [one.grad.clone() for one in (q, k, v)]
    want = [one.detach().float().requires_grad_() for one in (q, k, v)]
    torch.nn.functional.scaled_dot_product_attention(*want).sum().backward()
    for found, one in zip(grads, want, strict=True):
        assert (found - one.grad).abs().max() <= 0.02 * max(1.0, one.grad.abs().max().item())
    with torch.no_grad():
        eager = fa2tune.attention(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fa2tune.attention(q, k, v)
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(captured, eager)
