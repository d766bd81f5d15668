"""The dispatcher on the GPU: capture, compile, threads, streams, autocast, layouts, the operators."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

import fa2tune
from fa2tune.calling import choosing, dispatch


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


# ---- a first call while a graph is captured


def test_a_first_call_inside_a_capture_says_what_to_do(monkeypatch):
    q, k, v = qkv(1, 1, 77, 88)
    with pytest.raises(RuntimeError, match="warm-up call"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fa2tune.attention(q, k, v)
    monkeypatch.setenv(dispatch.CAPTURE_MISS, "wait")
    with pytest.raises(ValueError, match="FA2TUNE_CAPTURE_MISS: got 'wait'"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fa2tune.attention(q, k, v)


def test_other_lengths_of_a_loaded_kernel_need_no_warm_up():
    fa2tune.attention(*qkv(1, 2, 300, 64))
    q, k, v = qkv(1, 2, 301, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = fa2tune.attention(q, k, v)
    graph.replay()
    assert torch.equal(o, fa2tune.attention(q, k, v))


def test_a_first_call_inside_a_capture_may_take_the_default(monkeypatch):
    monkeypatch.setenv(dispatch.CAPTURE_MISS, "default")
    q, k, v = qkv(2, 4, 200, 104, requires_grad=True)
    do = torch.randn_like(q)
    before, plans = dispatch.SERVED["default, in a capture"], len(dispatch.FORWARD_PLANS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = fa2tune.attention(q, k, v, causal=True)
        gradients = torch.autograd.grad(o, (q, k, v), do)
    assert dispatch.SERVED["default, in a capture"] - before == 3  # forward, dq, dk and dv
    assert len(dispatch.FORWARD_PLANS) == plans  # later calls take what is tuned
    with torch.no_grad():
        for tensor in (q, k, v, do):
            tensor.normal_()
    graph.replay()
    for got, want in zip((o, *gradients), exact(q, k, v, do, True), strict=True):
        close(got, want)


# ---- tensors that a descriptor cannot address


def exact(q, k, v, do, causal):
    """(o, dq, dk, dv) in float64."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) / q.shape[3] ** 0.5
    if causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device="cuda").triu(columns - rows + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    o = torch.softmax(scores, -1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (o, *torch.autograd.grad(o, (q, k, v), do.double()))


def close(got, want):
    """Within 2 % of the largest entry, and nothing that is no number."""
    assert not (got.double() - want).abs().max() > 0.02 * want.abs().max()
    assert got.isfinite().all()


SHAPE = (2, 4, 256, 64)


def plain(dtype):
    return torch.randn(SHAPE, device="cuda", dtype=dtype)


def odd_base(dtype):
    return torch.randn(2 * 4 * 256 * 64 + 1, device="cuda", dtype=dtype)[1:].view(SHAPE)


def odd_rows(dtype):
    return torch.randn(2, 4, 256, 65, device="cuda", dtype=dtype)[..., :64]


def wide_rows(dtype):
    return torch.randn(2, 4, 256, 72, device="cuda", dtype=dtype)[..., :64]


def one_row(dtype):
    return torch.randn(2, 4, 1, 64, device="cuda", dtype=dtype).expand(SHAPE)


def one_head(dtype):
    return torch.randn(2, 1, 256, 64, device="cuda", dtype=dtype).expand(SHAPE)


def one_entry(dtype):
    return torch.randn(1, 4, 256, 64, device="cuda", dtype=dtype).expand(SHAPE)


def one_number(dtype):
    return torch.randn(1, 1, 1, 1, device="cuda", dtype=dtype).expand(SHAPE)


@pytest.mark.parametrize("deterministic", [True, False], ids=["split", "any_strategy"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("which", "kind"),
    [("do", odd_base), ("do", odd_rows), ("do", wide_rows), ("do", one_row), ("do", one_head), ("do", one_entry),
     ("do", one_number), ("q", odd_base), ("q", odd_rows), ("q", one_entry), ("k", odd_base), ("k", odd_rows),
     ("v", odd_base), ("v", odd_rows), ("kv", one_head), ("qkv", wide_rows)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
def test_views_through_the_public_call(which, kind, dtype, deterministic):
    names = ("q", "k", "v", "do")
    chosen = ("do",) if which == "do" else tuple(which)
    q, k, v, do = (kind(dtype) if name in chosen else plain(dtype) for name in names)
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    o = fa2tune.attention(q, k, v, causal=True, deterministic=deterministic)
    got = (o, *torch.autograd.grad(o, (q, k, v), do))
    for one, want in zip(got, exact(q, k, v, do, True), strict=True):
        close(one, want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [9, 200])
@pytest.mark.parametrize("dims", [(64, 16), (64, 32), (96, 24), (128, 16), (128, 32), (32, 128)])
def test_another_head_dim_of_v_where_tma_cannot_address(dims, keys, causal):
    """The default by pointer serves: no row does, and the kernel with keys in parts has tiles of its own."""
    q, k, v, do = (
        torch.randn(2, 4, rows, dim + 1, device="cuda", dtype=torch.float16)[..., :dim]
        for rows, dim in ((150, dims[0]), (keys, dims[0]), (keys, dims[1]), (150, dims[1]))
    )
    if causal:
        q, do = q[:, :, -keys:], do[:, :, -keys:]  # each query sees a key
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    o = fa2tune.attention(q, k, v, causal=causal)
    got = (o, *torch.autograd.grad(o, (q, k, v), do))
    for one, want in zip(got, exact(q, k, v, do, causal), strict=True):
        close(one, want)


@pytest.mark.parametrize("gradient", ["odd_base", "expanded", "strided"])
def test_gradients_of_lse_through_the_public_call(gradient):
    q, k, v = qkv(*SHAPE, requires_grad=True)
    _, lse = fa2tune.attention(q, k, v, return_lse=True)
    dlse = {
        "odd_base": lambda: torch.randn(2 * 4 * 256 + 1, device="cuda")[1:].view(2, 4, 256),
        "expanded": lambda: torch.randn(2, 4, 1, device="cuda").expand(2, 4, 256),
        "strided": lambda: torch.randn(2, 256, 4, 3, device="cuda")[..., 1].transpose(1, 2),
    }[gradient]()
    got = torch.autograd.grad(lse, (q, k), dlse)
    wide = [t.detach().double().requires_grad_() for t in (q, k)]
    scores = wide[0] @ wide[1].transpose(-1, -2) / 8
    for one, want in zip(got, torch.autograd.grad(torch.logsumexp(scores, -1), wide, dlse.double()), strict=True):
        close(one, want)


# ---- precompiled kernels

#: Fails if anything runs a program. Prints where the kernels came from and the largest error of o, dq, dk and dv.
FIRST_CALL = """
import json, sys
import torch
ran = []
sys.addaudithook(lambda event, arguments: ran.append(arguments[0]) if event == "subprocess.Popen" else None)
q, k, v, do = (torch.randn(2, 4, 1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
import fa2tune
from fa2tune.launching import launch
origins, load = [], launch.load
def told(*asked):
    found = load(*asked)
    origins.append(found.origin)
    return found
launch.load = told
o = fa2tune.attention(q, k, v, causal=True)
found = (o, *torch.autograd.grad(o, (q, k, v), do))
want = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), is_causal=True)
want = (want, *torch.autograd.grad(want, (q, k, v), do.double()))
errors = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, want)]
print(json.dumps([origins, max(errors), [str(program) for program in ran]]))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A file of the binaries that such a call may take on this GPU: the forward chooses among the rows of all buckets."""
    from fa2tune.fleet import precompile

    gpu = dispatch.gpu_of(0)

    def of_key(row):
        same = (row.key.head_dim, row.key.dtype, row.key.mask) == (64, "bf16", "causal")
        return same and (row.key.kernel == "fwd" or row.key.bucket == 1024)

    few = [replace(layer, rows=list(filter(of_key, layer.rows))) for layer in choosing.layers()]
    todo, _ = precompile.jobs(gpu, few, precompile.Wanted())
    if not todo:
        pytest.skip(f"no row serves {gpu.name}")
    path = tmp_path_factory.mktemp("binaries") / "here.kernels"
    precompile.save(path, precompile.compile_all(todo, gpu.arch))
    return path


def first_call(kernels, folder, **environment):
    environment = {**os.environ, "FA2TUNE_KERNELS": str(kernels), "TRITON_CACHE_DIR": str(folder), **environment}
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_node_without_a_compiler_runs_its_first_call_from_binaries(kernels, tmp_path):
    origins, error, ran = first_call(kernels, tmp_path / "empty", PATH="", CC="/nonexistent")
    assert set(origins) == {str(kernels)} and len(origins) >= 2
    assert error < 0.02 and ran == [] and not (tmp_path / "empty").exists()


def test_tampered_binaries_are_compiled_instead(kernels, tmp_path):
    from fa2tune.compiling import binaries

    content = bytearray(kernels.read_bytes())
    for entry in binaries.File(kernels).entries.values():
        content[binaries.File(kernels)._body + entry.offset + entry.size // 2] ^= 1
    broken = tmp_path / "broken.kernels"
    binaries.save(broken, bytes(content))
    origins, error, _ = first_call(broken, tmp_path / "made")
    assert all(origin == f"compiled: {broken} is damaged: a binary's hash is wrong" for origin in origins)
    assert error < 0.02


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
    """Nor does a first call, in cycles that a collection would find."""
    dispatch.reload()
    gc.collect()  # what earlier tests left is not to go in the midst of this one
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        q, k, v = qkv(2, 4, 2048, 64, requires_grad=True)
        # In this thread: autograd's own lets go of a backward's gradients after it has handed them over, and takes the
        # interpreter's lock for that. A look right away sees them still there.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(fa2tune.attention(q, k, v).sum(), (q, k, v))
        del q, k, v
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_opcheck():
    q, k, v = qkv(requires_grad=True)
    torch.library.opcheck(torch.ops.fa2tune.attention.default, (q, k, v, -1, 0, 0.125, True))


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
