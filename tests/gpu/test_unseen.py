"""Queries that see no key, filled in on the GPU: the error rule of results and gradients, rows that are 0, and CUDA graphs.
Memory that is not written holds NaN."""

from __future__ import annotations

import pytest
import torch
from launches_on_gpu import poison_fresh_memory

import fa2tune
from fa2tune.calling import dispatch, unseen
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, Mask, band
from fa2tune.spec.problem import Problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WINDOW = band(100, 0)
NAMES = ("o", "lse", "dq", "dk", "dv")
#: (batch, query heads, key heads), (queries, keys), (head dims), mask, dtype. Backwards of these are fused, split, by one key
#: tile, by tiles of queries, and portable.
CALLS = [
    ((2, 4, 2), (1500, 700), (64, 64), CAUSAL, "bf16"), ((3, 3, 3), (700, 333), (128, 128), CAUSAL, "bf16"),
    ((2, 4, 4), (900, 417), (176, 176), CAUSAL, "bf16"), ((2, 4, 2), (600, 400), (248, 248), CAUSAL, "fp16"),
    ((9, 8, 8), (800, 77), (64, 64), CAUSAL, "bf16"), ((4, 6, 6), (330, 130), (128, 128), CAUSAL, "bf16"),
    ((2, 4, 4), (600, 300), (192, 128), CAUSAL, "bf16"), ((2, 8, 1), (600, 300), (96, 96), CAUSAL, "bf16"),
    ((2, 4, 2), (700, 300), (80, 80), WINDOW, "bf16"), ((2, 4, 2), (500, 130), (64, 64), CAUSAL, "fp32"),
    ((30, 16, 2), (140, 100), (64, 64), CAUSAL, "bf16"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are filled in where it does not pay, too."""
    poison_fresh_memory(monkeypatch)
    monkeypatch.setattr(unseen, "filled_in", lambda problem, gpu, pass_: unseen.count(problem))
    monkeypatch.setattr(dispatch, "FORWARD_PLANS", {})
    monkeypatch.setattr(dispatch, "BACKWARD_PLANS", {})


def posed(asked: Problem, layout: str) -> reference.Inputs:
    """Inputs whose memory is in the order of a layout."""
    given = reference.make_inputs(asked, "cuda", with_dlse=True, on_device=True)
    if layout == "bhsd":
        return given
    q, k, v, do = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (given.q, given.k, given.v, given.do))
    return reference.Inputs(q, k, v, do, given.dlse)


def results(given: reference.Inputs, mask: Mask) -> dict[str, torch.Tensor]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in (given.q, given.k, given.v))
    o, lse = fa2tune.attention(q, k, v, mask=mask, return_lse=True)
    gradients = torch.autograd.grad((o, lse), (q, k, v), (given.do, given.dlse))
    return dict(zip(NAMES, (o.detach(), lse.detach(), *gradients), strict=True))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_results_and_a_capture(call: tuple, layout: str) -> None:
    heads, lengths, dims, mask, dtype = call
    given = posed(Problem(dtype, *heads, *lengths, *dims, mask), layout)
    oracle, same = reference.oracle_and_reference(given, mask=mask)
    right = oracle, same, reference.rounded_off(given, oracle, mask=mask) if dtype == "fp32" else None
    found = results(given, mask)
    verify.compare(found, *right)
    rows = lengths[0] - lengths[1]
    assert not found["o"][:, :, :rows].any() and not found["dq"][:, :, :rows].any()
    assert any(isinstance(plan, unseen.Forward) for plan in dispatch.FORWARD_PLANS.values())
    assert any(isinstance(plan, unseen.Backward) for plan in dispatch.BACKWARD_PLANS.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = results(given, mask)
    for _ in range(3):
        for one in replayed.values():
            one.fill_(torch.nan)
        graph.replay()
        verify.compare(replayed, *right)
