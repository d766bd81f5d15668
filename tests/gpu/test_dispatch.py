"""The dispatcher on the GPU: capture, compile, threads, streams, autocast, layouts, the operators."""

from __future__ import annotations

import threading

import pytest
import torch

import fa2tune
from fa2tune import dispatch


def qkv(*shape, dtype=torch.bfloat16, **options):
    shape = shape or (2, 4, 256, 64)
    return [torch.randn(shape, device="cuda", dtype=dtype, **options) for _ in "qkv"]


def test_graph_capture_after_a_warm_up_call():
    q, k, v = qkv()
    fa2tune.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = fa2tune.attention(q, k, v)
    for tensor in (q, k, v):
        tensor.normal_()
    graph.replay()
    assert torch.equal(o, fa2tune.attention(q, k, v))


def test_capture_with_gradients():
    q, k, v = qkv(requires_grad=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(fa2tune.attention(q, k, v, causal=True).sum(), (q, k, v))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = torch.autograd.grad(fa2tune.attention(q, k, v, causal=True).sum(), (q, k, v))
    graph.replay()
    expected = torch.autograd.grad(fa2tune.attention(q, k, v, causal=True).sum(), (q, k, v))
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_first_call_inside_a_capture_says_what_to_do():
    q, k, v = qkv(1, 1, 77, 88)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="warm-up call"), torch.cuda.graph(graph):
        fa2tune.attention(q, k, v)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_torch_compile(layout):
    def loss(q, k, v):
        o, lse = fa2tune.attention(q * 1.5, k, v, causal=True, layout=layout, return_lse=True)
        return (o.float() ** 2).sum() + lse.sum()

    eager = qkv(2, 128, 128, 64, requires_grad=True)
    compiled = [t.detach().clone().requires_grad_() for t in eager]
    loss(*eager).backward()
    torch.compile(loss, fullgraph=True)(*compiled).backward()
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=2e-2, rtol=2e-2)


def test_torch_compile_with_cuda_graphs():
    """mode="reduce-overhead": what the plans keep must not live in a graph's memory pool."""

    def step(q, k, v):
        return fa2tune.attention(q, k, v, causal=True).float().square().sum()

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # warm-up, record, replay
        inputs = qkv(2, 2, 192, 64, requires_grad=True)
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(*inputs)
        loss.backward()
        eager = [t.detach().clone().requires_grad_() for t in inputs]
        expected = step(*eager)
        expected.backward()
        torch.testing.assert_close(loss, expected, atol=1e-2, rtol=1e-2)
        for one, other in zip(inputs, eager, strict=True):
            torch.testing.assert_close(one.grad, other.grad, atol=2e-2, rtol=2e-2)


def test_plans_keep_no_memory():
    dispatch.reload()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    q, k, v = qkv(2, 4, 2048, 64, requires_grad=True)
    torch.autograd.grad(fa2tune.attention(q, k, v).sum(), (q, k, v))
    del q, k, v
    assert torch.cuda.memory_allocated() == before


def test_opcheck():
    q, k, v = qkv(requires_grad=True)
    torch.library.opcheck(torch.ops.fa2tune.attention.default, (q, k, v, True, 0.125, True))


def test_threads_and_streams():
    inputs = [qkv(1, 2, 100 + 8 * i, 64, requires_grad=True) for i in range(8)]
    expected = [torch.autograd.grad(fa2tune.attention(*t, deterministic=True).sum(), t) for t in inputs]
    dispatch.reload()
    results: list = [None] * 8

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            results[i] = torch.autograd.grad(fa2tune.attention(*inputs[i], deterministic=True).sum(), inputs[i])
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for got, want in zip(results, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_several_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    here = qkv(requires_grad=True)
    there = [t.detach().to("cuda:1").requires_grad_() for t in here]  # while cuda:0 is the current device
    for causal in (False, True):
        expected, got = (fa2tune.attention(*t, causal=causal, deterministic=True) for t in (here, there))
        assert torch.equal(got.cpu(), expected.cpu())
        for one, other in zip(
            torch.autograd.grad(got.sum(), there), torch.autograd.grad(expected.sum(), here), strict=True
        ):
            assert one.device == torch.device("cuda:1") and torch.equal(one.cpu(), other.cpu())


def test_autocast():
    q, k, v = qkv(dtype=torch.float32, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o = fa2tune.attention(q, k, v)
    assert o.dtype == torch.bfloat16
    o.sum().backward()
    assert q.grad.dtype == torch.float32


def test_same_bits_when_deterministic():
    q, k, v = qkv(2, 4, 1000, 128, requires_grad=True)
    runs = [
        torch.autograd.grad(fa2tune.attention(q, k, v, causal=True, deterministic=True).sum(), (q, k, v)) for _ in "12"
    ]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_bshd_and_packed_views_copy_nothing():
    qkv_packed = torch.randn(2, 500, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv_packed.unbind(2)
    fa2tune.attention(q, k, v, layout="bshd")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    o = fa2tune.attention(q, k, v, layout="bshd")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 2  # o and lse
    expected = fa2tune.attention(*(t.transpose(1, 2).contiguous() for t in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(o, expected, atol=1e-2, rtol=1e-2)
