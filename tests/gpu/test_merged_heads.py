"""Query heads of a key head taken as one, in public calls on the GPU: the error rule, gradients, both orders of rows, CUDA
graphs, torch.compile."""

from __future__ import annotations

import pytest
import torch

import fa2tune
from fa2tune.calling import dispatch, merging
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
DIMS = [(16, 16), (24, 24), (40, 40), (64, 64), (72, 72), (96, 96), (128, 128), (160, 160), (192, 128), (184, 184),
        (224, 224), (256, 256)]  # fmt: skip


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """It is expected to pay wherever it can be had; passes that ask are listed."""
    found = []
    monkeypatch.setattr(merging, "pays", lambda chooser, ours, pass_, *others: not found.append(pass_))
    dispatch.reload()
    yield found
    dispatch.reload()


def laid(tensor, order):
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if order == "bshd" else tensor


def checked(problem, order, deterministic=False, scale=None):
    inputs = reference.make_inputs(problem, "cuda", on_device=True, with_dlse=True)
    options = {"mask": problem.mask, "softmax_scale": scale or problem.head_dim**-0.5}
    oracle, same = reference.oracle_and_reference(inputs, **options)
    q, k, v = (laid(one, order).detach().requires_grad_() for one in (inputs.q, inputs.k, inputs.v))
    with verify._strict("ieee"):
        o, lse = fa2tune.attention(q, k, v, return_lse=True, deterministic=deterministic, **options)
        gradients = torch.autograd.grad((o, lse), (q, k, v), (laid(inputs.do, order), inputs.dlse))
    found = {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    verify.compare(found, oracle, same)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("dims", DIMS)
def test_head_dims(asked, dims, mask):
    checked(Problem("bf16", 3, 9, 1, 137, 300, *dims, mask), "bshd")
    checked(Problem("fp16", 2, 5, 1, 333, 290, *dims, mask), "bshd", deterministic=True)
    assert asked == ["fwd", "bwd"] * 2


@pytest.mark.parametrize("dims", DIMS)
def test_one_head_after_the_other(asked, dims):
    checked(Problem("bf16", 3, 9, 3, 137, 300, *dims, FULL), "bhsd")
    checked(Problem("fp16", 2, 5, 1, 77, 77, *dims, FULL), "bhsd")
    assert asked == ["fwd", "bwd"] * 2


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [(84, (66, 66)), (2, (1000, 1000)), (17, (200, 70)), (65, (40, 600)), (8, (1300, 2100)), (96, (33, 257))],
)
def test_groups_and_lengths(heads, lengths, mask):
    for dim in (64, 128, 192):
        checked(Problem("bf16", 2, heads, 1, *lengths, dim, dim, mask), "bshd", scale=-0.1 if heads == 17 else None)


def tensors(queries=66, heads=84, dim=56):
    q = torch.randn(10, queries, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k, v = (torch.randn(10, queries, 1, dim, device="cuda", dtype=q.dtype).transpose(1, 2) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("causal", [False, True])
def test_a_cuda_graph_of_both_passes(causal):
    q, k, v = (one.requires_grad_() for one in tensors())
    do = torch.randn_like(q)

    def both():
        o = fa2tune.attention(q, k, v, causal=causal)
        return o, *torch.autograd.grad(o, (q, k, v), do)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        found = both()
    with torch.no_grad():
        q.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for mine, now in zip(found, both(), strict=True):
        assert (mine - now).abs().max() <= 0.02 * now.abs().max()
    assert torch.equal(found[0], both()[0])


def test_compiled_calls_have_the_strides_that_the_compiler_expects():
    q, k, v = (one.requires_grad_() for one in tensors())
    compiled = torch.compile(lambda *t: fa2tune.attention(*t, causal=True, return_lse=True), fullgraph=True)
    o, lse = compiled(q, k, v)
    expected, its_lse = fa2tune.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(o, expected) and torch.equal(lse, its_lse) and lse.is_contiguous()
    found, wanted = (torch.autograd.grad(one.float().square().sum(), (q, k, v)) for one in (o, expected))
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine - theirs).abs().max() <= 0.02 * theirs.abs().max()
