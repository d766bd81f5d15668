"""Forwards whose tiles have all keys of a key head, on the GPU: the error rule, strides, CUDA graphs, gradients."""

from __future__ import annotations

import pytest
import torch
from hopper_cases import VIEWS, as_they_are

import fa2tune
from fa2tune.launching import key_splits, passes
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.sm90 import fwd_one_tile
from fa2tune.spec.mask import CAUSAL, FULL, STACKED, Mask
from fa2tune.spec.problem import Problem, Specialization
from fa2tune.spec.score import NONE, Score

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
WINDOW = Mask("band", 60, 2)
DIMS = [(64, 64), (128, 128), (200, 200), (192, 192), (256, 256), (160, 56), (24, 24)]
#: (queries, keys): odd ones, one of either, those of whole tiles, queries that see no key under a mask.
LENGTHS = [(137, 49), (75, 113), (200, 213), (64, 64), (128, 128), (128, 256), (300, 40), (333, 150), (90, 1), (1, 127)]
SERVED = {"sm90/fwd_one_tile"}


def checked(asked, scale=None, view=as_they_are, score=NONE, **how):
    """One forward by each tile that holds the call's keys; memory that is not written holds NaN. The tiles, (rows, keys)."""
    inputs = reference.make_inputs(asked, "cuda", on_device=True, **how)
    scale = asked.head_dim**-0.5 if scale is None else scale
    oracle, same = reference.oracle_and_reference(
        inputs, mask=asked.mask, gradients=False, softmax_scale=scale, score=score
    )
    q, k, v = map(view, (inputs.q, inputs.k, inputs.v))
    problem = passes.describe(q, k, v, asked.mask, scale, score)
    found = [tile for tile in fwd_one_tile.tiles(problem.specialization, 90) if tile[1] >= asked.seqlen_k]
    for tile in found:
        config = fwd_one_tile.config_of(problem.specialization, *tile)
        with verify._strict("ieee"):
            o, lse = key_splits.forward(q, k, v, problem, scale, config)
            again = key_splits.forward(q, k, v, problem, scale, config)
        verify.compare({"o": o, "lse": lse}, oracle, same)
        assert torch.equal(o, again[0]) and torch.equal(lse, again[1]), f"{tile}: the same bits on every run"
    return set(found)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=str)
@pytest.mark.parametrize(("dims", "dtype"), [*((dims, "bf16") for dims in DIMS), ((128, 128), "fp16")], ids=str)
def test_every_tile(dims, dtype, mask):
    ran = set()
    for queries, keys in LENGTHS:
        ran |= checked(Problem(dtype, 2, 6, 2, queries, keys, *dims, mask))
    assert ran == set(fwd_one_tile.tiles(Specialization(dtype, *dims, mask.name), 90)) and len(ran) >= 4


@pytest.mark.parametrize(
    "mask",
    [Mask("band", -1, 20), Mask("band", 30, -1), Mask("chunked", 48), Mask("causal_top_left"), Mask(STACKED, 5)],
    ids=str,
)
def test_other_masks(mask):
    for queries, keys in ((155, 61), (75, 127), (200, 213)):
        assert checked(Problem("bf16", 2, 2, 2, queries, keys, 128, 128, mask))


@pytest.mark.parametrize("dims", [(64, 64), (192, 192), (176, 40)], ids=str)
def test_strides_and_scales(dims):
    for queries, keys in ((137, 49), (200, 121)):
        asked = Problem("bf16", 3, 8, 2, queries, keys, *dims, CAUSAL)
        assert all(checked(asked, view=view) for view in VIEWS)
        assert all(checked(asked, scale=scale) for scale in (-0.1, 0.0))
        assert checked(asked, scale=1.0, outlier=True)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_a_soft_cap(dims, mask):
    """Its scores, of standard deviation 1 before it, are cut off at 2."""
    assert checked(Problem("bf16", 2, 6, 2, 137, 101, *dims, mask), score=Score("softcap", 2.0))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 192)], ids=str)
def test_more_tiles_than_multiprocessors_hold(dims):
    assert checked(Problem("bf16", 40, 24, 12, 300, 60, *dims, CAUSAL))
    assert checked(Problem("bf16", 40, 24, 12, 100, 125, *dims, FULL))


def tensors(batch=1, heads=(14, 14), queries=212, keys=212, dim=192, dtype=torch.bfloat16):
    q = torch.randn(batch, heads[0], queries, dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(batch, heads[1], keys, dim, device="cuda", dtype=dtype) for _ in range(2))
    return q, k, v


def served(q, k, v, causal=False):
    return set(fa2tune.explain(q, k, v, causal=causal).kernels[0].runs)


def right(o, expected):
    return (o.float() - expected).abs().max() < 0.01 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"dtype": torch.float16}, {"queries": 300}, {"batch": 4, "heads": (12, 6), "queries": 100, "keys": 90, "dim": 128}],
    ids=str,
)  # fmt: skip
def test_the_public_call_a_cuda_graph_and_another_stream(sizes, causal):
    q, k, v = tensors(**sizes)
    assert served(q, k, v, causal) == SERVED
    eager, lse = fa2tune.attention(q, k, v, causal=causal, return_lse=True)
    expected, its_lse = reference.attention(q.float(), k.float(), v.float(), mask=CAUSAL if causal else FULL)
    assert right(eager, expected)
    blind = its_lse.isinf()
    assert torch.equal(lse[blind], its_lse[blind]) and (lse - its_lse)[~blind].abs().max() < 1e-3
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(fa2tune.attention(q, k, v, causal=causal), eager), "the same bits on every run"
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        outs = [fa2tune.attention(q, k, v, causal=causal) for _ in range(5)]
    for _ in range(3):
        q.normal_()
        graph.replay()
        torch.cuda.synchronize()
        again = fa2tune.attention(q, k, v, causal=causal)
        assert not torch.equal(again, eager) and all(torch.equal(out, again) for out in outs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_calls(dtype):
    q, k, v = tensors(dtype=dtype)
    assert served(q, k, v) == SERVED
    compiled = torch.compile(lambda *t: fa2tune.attention(*t) * 2, fullgraph=True)
    expected, _ = reference.attention(q.float(), k.float(), v.float(), mask=FULL)
    assert right(compiled(q, k, v) / 2, expected)


def test_a_tensor_that_tma_cannot_address_is_copied_first():
    q, k, v = tensors()
    moved = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).copy_(q)
    assert served(moved, k, v) == SERVED
    found, lse = fa2tune.attention(moved, k, v, return_lse=True)
    expected, its_lse = fa2tune.attention(q, k, v, return_lse=True)
    assert torch.equal(found, expected) and torch.equal(lse, its_lse)


@pytest.mark.parametrize("keys", [256, 257])
def test_of_more_keys_than_a_tile_has_another_kernel_serves(keys):
    q, k, v = tensors(keys=keys)
    assert (served(q, k, v) == SERVED) == (keys <= max(fwd_one_tile.KEYS))
    expected, _ = reference.attention(q.float(), k.float(), v.float(), mask=FULL)
    assert right(fa2tune.attention(q, k, v), expected)


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
@pytest.mark.parametrize("queries", [212, 300])
def test_gradients_follow(queries, mask):
    """lse has one, too. Of 300 queries the first ones see no key under the causal mask."""
    asked = Problem("bf16", 1, 14, 14, queries, 212, 192, 192, mask)
    inputs = reference.make_inputs(asked, "cuda", on_device=True, with_dlse=True)
    oracle, same = reference.oracle_and_reference(inputs, mask=mask)
    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    assert served(q, k, v, mask == CAUSAL) == SERVED
    o, lse = fa2tune.attention(q, k, v, causal=mask == CAUSAL, return_lse=True)
    gradients = torch.autograd.grad((o, lse), (q, k, v), (inputs.do, inputs.dlse))
    got = {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    verify.compare(got, oracle, same)
