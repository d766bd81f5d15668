"""Forwards whose tiles have the query heads of a key head as rows, on the GPU: the error rule, strides, CUDA graphs,
gradients."""

from __future__ import annotations

import pytest
import torch

import fa2tune
from fa2tune.launching import key_splits, passes
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.sm90 import fwd_grouped
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Problem

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
WINDOW = Mask("band", 60, 2)
#: (query heads, key heads), (queries, keys)
CALLS = [((8, 4), (131, 131)), ((6, 2), (200, 70)), ((8, 2), (131, 600)), ((7, 1), (94, 94)), ((26, 2), (136, 1000)),
         ((32, 2), (33, 257)), ((65, 1), (20, 300)), ((84, 1), (66, 66))]  # fmt: skip


def checked(asked, members, sizes=None, scale=None, order="bhsd"):
    """One forward by each tile; memory that is not written holds NaN. sizes: (rows, keys) of tiles, None for all."""
    inputs = reference.make_inputs(asked, "cuda", on_device=True)
    scale = scale or asked.head_dim**-0.5
    oracle, same = reference.oracle_and_reference(inputs, mask=asked.mask, gradients=False, softmax_scale=scale)
    q, k, v = inputs.q, inputs.k, inputs.v
    if order == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    problem = passes.describe(q, k, v, asked.mask, scale)
    for size in sizes or key_splits.grouped_tiles(problem, 90):
        config = fwd_grouped.config_of(problem.specialization, *size, members)
        with verify._strict("ieee"):
            o, lse = key_splits.forward(q, k, v, problem, scale, config)
        verify.compare({"o": o, "lse": lse}, oracle, same)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW, Mask("chunked", 48), Mask("causal_top_left")], ids=str)
@pytest.mark.parametrize(("heads", "lengths"), CALLS)
def test_masks_groups_and_lengths(heads, lengths, mask):
    group = heads[0] // heads[1]
    for members in fwd_grouped.MEMBERS:
        if members < 2 * group:
            checked(Problem("bf16", 2, *heads, *lengths, 128, 128, mask), members, ((64, 64), (128, 128)))


@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=str)
@pytest.mark.parametrize(
    "dims",
    [(16, 16), (24, 24), (32, 32), (40, 40), (56, 56), (64, 64), (72, 40), (96, 96), (128, 128), (160, 160), (192, 128),
     (184, 184), (224, 224), (256, 256)],
)  # fmt: skip
def test_head_dims_and_tiles(dims, mask):
    asked = Problem("bf16", 3, 8, 2, 137, 300, *dims, mask)
    for order in ("bhsd", "bshd"):
        checked(asked, 4, order=order)
    checked(Problem("fp16", 3, 10, 2, 137, 300, *dims, mask), 8)
    checked(asked, 2, scale=-0.1)


def test_more_tiles_than_multiprocessors_hold():
    """Programs then take several tiles one after the other."""
    checked(Problem("bf16", 40, 24, 2, 100, 257, 64, 64, CAUSAL), 16)
    checked(Problem("bf16", 40, 24, 4, 100, 257, 128, 128, FULL), 2)


def tensors(batch=10, heads=(84, 2), queries=66, keys=66, dim=56, dtype=torch.bfloat16):
    q = torch.randn(batch, queries, heads[0], dim, device="cuda", dtype=dtype).transpose(1, 2)
    k, v = (torch.randn(batch, keys, heads[1], dim, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(2))
    return q, k, v


def served(q, k, v):
    return set(fa2tune.explain(q, k, v, causal=True).kernels[0].runs)


def test_the_public_call_a_cuda_graph_and_another_stream():
    q, k, v = tensors()
    assert served(q, k, v) == {"sm90/fwd_grouped"}
    eager, lse = fa2tune.attention(q, k, v, causal=True, return_lse=True)
    expected, its_lse = reference.attention(q.float(), k.float(), v.float(), mask=CAUSAL)
    assert (eager.float() - expected).abs().max() < 0.01 * expected.abs().max().clamp(min=1)
    assert (lse - its_lse).abs().max() < 1e-3
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(fa2tune.attention(q, k, v, causal=True), eager), "the same bits on every run"
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        outs = [fa2tune.attention(q, k, v, causal=True) for _ in range(5)]
    for _ in range(3):
        q.normal_()
        graph.replay()
        torch.cuda.synchronize()
        expected = fa2tune.attention(q, k, v, causal=True)
        assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_calls(dtype):
    q, k, v = tensors(dtype=dtype)
    assert served(q, k, v) == {"sm90/fwd_grouped"}
    compiled = torch.compile(lambda *t: fa2tune.attention(*t, causal=True) * 2, fullgraph=True)
    expected, _ = reference.attention(q.float(), k.float(), v.float(), mask=CAUSAL)
    assert (compiled(q, k, v).float() / 2 - expected).abs().max() < 0.01 * expected.abs().max().clamp(min=1)


def test_a_soft_cap_and_tensors_that_tma_cannot_address():
    """Another kernel serves them."""
    q, k, v = tensors()
    expected, _ = reference.attention(q.float(), k.float(), v.float(), mask=CAUSAL)
    moved = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).copy_(q)
    assert served(moved, k, v) != {"sm90/fwd_grouped"}
    found = fa2tune.attention(moved, k, v, causal=True)
    assert (found.float() - expected).abs().max() < 0.01 * expected.abs().max().clamp(min=1)
    capped = fa2tune.explain(q, k, v, causal=True, softcap=1000.0)
    assert set(capped.kernels[0].runs) != {"sm90/fwd_grouped"}
    found = fa2tune.attention(q, k, v, causal=True, softcap=1000.0)  # as good as none
    assert (found.float() - expected).abs().max() < 0.01 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_gradients_follow(mask):
    asked = Problem("bf16", 10, 84, 1, 66, 66, 56, 56, mask)
    inputs = reference.make_inputs(asked, "cuda", on_device=True)
    oracle, same = reference.oracle_and_reference(inputs, mask=mask)
    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    o, lse = fa2tune.attention(q, k, v, causal=mask == CAUSAL, return_lse=True)
    gradients = torch.autograd.grad(o, (q, k, v), inputs.do)
    got = {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    verify.compare(got, oracle, same)
