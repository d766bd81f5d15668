"""Forwards of few queries, whose keys are split among programs, on the GPU: the error rule, strides, CUDA graphs, gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

import fa2tune
from fa2tune.calling import choosing, dispatch, unseen
from fa2tune.calling.schedules import few_tiles, key_splits_schedule
from fa2tune.launching import key_splits, passes
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.portable import fwd_split
from fa2tune.search_spaces.sm90 import fwd_split as hopper_split
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import BACKWARD, Problem
from fa2tune.spec.score import score_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WINDOW = Mask("band", 300, 2)


def checked(asked, splits, rows=16, loads=None, softcap=None, hopper=False, scale=None):
    """One forward by an explicit config; memory that is not written holds NaN. hopper: of the warp-specialised kernel."""
    arch = dispatch.gpu_of(0).arch
    inputs = reference.make_inputs(asked, "cuda", on_device=True)
    score, scale = score_of(softcap), scale or asked.head_dim**-0.5
    oracle, same = reference.oracle_and_reference(
        inputs, mask=asked.mask, gradients=False, score=score, softmax_scale=scale
    )
    problem = passes.describe(inputs.q, inputs.k, inputs.v, asked.mask, scale, score)
    if hopper:
        config = dict(hopper_split.config_of(problem.specialization, rows, splits))
    else:
        config = dict(fwd_split.config_of(problem.specialization, arch, problem.tma, rows, splits))
    if loads is not None:
        config["LOADS"] = loads
    with verify._strict("ieee"):
        o, lse = key_splits.forward(inputs.q, inputs.k, inputs.v, problem, scale, config)
    verify.compare({"o": o, "lse": passes.lse_of(lse)}, oracle, same)


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW, Mask("chunked", 512), Mask("causal_top_left")], ids=str)
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [((32, 8), (1, 4097)), ((12, 4), (7, 1000)), ((6, 1), (40, 17)), ((4, 4), (130, 1500)), ((71, 1), (1, 640))],
)
def test_masks_groups_and_lengths(heads, lengths, mask, splits):
    checked(Problem("bf16", 2, *heads, *lengths, 128, 128, mask), splits)


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        *(("bf16", dims) for dims in ((16, 16), (64, 64), (80, 80), (192, 128), (72, 40), (256, 256))),
        ("fp16", (128, 128)), ("fp32", (64, 64)), ("fp32", (128, 128)), ("fp32", (256, 256)),
    ],
)  # fmt: skip
def test_head_dims_and_tiles(dtype, dims):
    asked = Problem(dtype, 1, 8, 2, 37, 1100, *dims, CAUSAL)
    sizes = fwd_split.tiles(asked.specialization, dispatch.gpu_of(0).arch)
    for rows in sizes:
        checked(asked, 4, rows)
    checked(asked, 1, sizes[0])
    checked(asked, 3, sizes[0], "pointer")
    checked(asked, 3, sizes[-1], "pointer")


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_many_keys(softcap):
    checked(Problem("bf16", 1, 8, 2, 4, 70000, 128, 128, CAUSAL), 33, softcap=softcap)


of_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@of_hopper
@pytest.mark.parametrize("splits", [2, 3, 40])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW, Mask("chunked", 512), Mask("causal_top_left")], ids=str)
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [((32, 8), (256, 4097)), ((12, 4), (130, 1000)), ((6, 1), (400, 170)), ((3, 3), (84, 1500)), ((8, 1), (64, 640))],
)
def test_masks_groups_and_lengths_by_the_warp_specialised_kernel(heads, lengths, mask, splits):
    checked(Problem("bf16", 2, *heads, *lengths, 128, 128, mask), splits, 128, hopper=True)
    if splits == 3:
        checked(Problem("fp16", 2, *heads, *lengths, 128, 128, mask), splits, 64, hopper=True)


@of_hopper
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=str)
@pytest.mark.parametrize(
    "dims",
    [(16, 16), (40, 40), (64, 64), (72, 40), (96, 96), (160, 160), (192, 128), (192, 192), (200, 200), (256, 256)],
)
def test_head_dims_by_the_warp_specialised_kernel(dims, mask):
    asked = Problem("bf16", 1, 8, 2, 137, 2100, *dims, mask)
    for rows in hopper_split.tiles(asked.specialization, 90):
        checked(asked, 4, rows, hopper=True)
    checked(asked, 3, 128, hopper=True, scale=-0.1)


@of_hopper
def test_more_parts_than_multiprocessors_hold():
    """Programs then take several parts one after the other."""
    checked(Problem("bf16", 4, 32, 8, 256, 2048, 128, 128, CAUSAL), 4, 128, hopper=True)
    checked(Problem("bf16", 4, 32, 8, 256, 2048, 64, 64, FULL), 5, 64, hopper=True)


@of_hopper
def test_a_chunk_of_a_prompt_takes_the_warp_specialised_kernel():
    q, k, v = decoding(batch=1, queries=256, keys=16384)
    served = fa2tune.explain(q, k, v, causal=True).kernels[0]
    assert set(served.runs) == {"sm90/fwd_split", "fwd_combine"}
    o, lse = fa2tune.attention(q, k, v, causal=True, return_lse=True)
    expected, its_lse = exact(q, k, v, CAUSAL)
    assert (o.float() - expected).abs().max() < 0.01 * expected.abs().max().clamp(min=1)
    assert (lse - its_lse).abs().max() < 1e-3
    assert torch.equal(o, fa2tune.attention(q, k, v, causal=True)), "the same bits on every run"
    alone, chained, x = [], [], torch.zeros_like(q)
    queries = [torch.randn_like(q) for _ in range(20)]
    for one in queries:
        alone.append(fa2tune.attention(one, k, v, causal=True))
        torch.cuda.synchronize()
    for one in queries:  # the kernel that puts parts together starts early, and the next call reuses the parts' memory
        x = fa2tune.attention(one + 0 * x, k, v, causal=True)
        chained.append(x)
    assert all(torch.equal(a, b) for a, b in zip(alone, chained, strict=True))


def decoding(batch=2, queries=1, keys=8192, heads=(32, 8), dim=128):
    q = torch.randn(batch, heads[0], queries, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, heads[1], keys, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return q, k, v


def exact(q, k, v, mask=FULL):
    return reference.attention(q.float(), k.float(), v.float(), mask=mask)


def test_the_public_call_splits_keys():
    q, k, v = decoding()
    assert fa2tune.explain(q, k, v).kernels[0].split is not None
    o, lse = fa2tune.attention(q, k, v, return_lse=True)
    expected, its_lse = exact(q, k, v)
    assert (o.float() - expected).abs().max() < 0.01 * expected.abs().max().clamp(min=1)
    assert (lse - its_lse).abs().max() < 1e-3
    again = fa2tune.attention(q, k, v)
    assert torch.equal(o, again), "the same bits on every run"


def test_caches_that_are_views():
    """Keys of a cache that is longer, (b, s, h, d) in memory, and one whose base is off by 2 bytes."""
    q, k, v = decoding(keys=5000)
    cache = torch.full((2, 6000, 8, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    cache[:, :5000] = k.transpose(1, 2)
    odd = torch.empty(v.numel() + 1, device="cuda", dtype=v.dtype)[1:].view_as(v).copy_(v)
    expected, _ = exact(q, k, v)
    for key, value in ((cache[:, :5000].transpose(1, 2), v), (k, odd)):
        o = fa2tune.attention(q, key, value)
        assert (o.float() - expected).abs().max() < 0.01 * expected.abs().max().clamp(min=1)


def test_a_cuda_graph_and_another_stream():
    q, k, v = decoding()
    eager = fa2tune.attention(q, k, v)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(fa2tune.attention(q, k, v), eager)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        outs = [fa2tune.attention(q, k, v) for _ in range(5)]
    for _ in range(3):
        q.normal_()
        graph.replay()
        torch.cuda.synchronize()
        expected = fa2tune.attention(q, k, v)
        assert all(torch.equal(out, expected) for out in outs)


def test_calls_in_a_row_do_not_wait_for_each_other_wrongly():
    """The kernel that puts parts together starts early, and the next call reuses the memory of the parts."""
    q, k, v = decoding(batch=1)
    queries = [torch.randn_like(q) for _ in range(50)]
    alone = []
    for one in queries:
        alone.append(fa2tune.attention(one, k, v))
        torch.cuda.synchronize()
    chained, x = [], torch.zeros_like(q)
    for one in queries:
        x = fa2tune.attention(one + 0 * x, k, v)
        chained.append(x)
    assert all(torch.equal(a, b) for a, b in zip(alone, chained, strict=True))


def test_compiled_calls():
    q, k, v = decoding(queries=3)
    compiled = torch.compile(lambda *t: fa2tune.attention(*t, causal=True) * 2, fullgraph=True)
    expected, _ = exact(q, k, v, CAUSAL)
    assert (compiled(q, k, v).float() / 2 - expected).abs().max() < 0.01 * expected.abs().max().clamp(min=1)


def test_gradients_follow_a_split_forward():
    asked = Problem("bf16", 1, 8, 2, 5, 6000, 64, 64, CAUSAL)
    inputs = reference.make_inputs(asked, "cuda", on_device=True)
    oracle, same = reference.oracle_and_reference(inputs, mask=CAUSAL)
    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    assert fa2tune.explain(q, k, v, causal=True).kernels[0].split is not None
    o, lse = fa2tune.attention(q, k, v, causal=True, return_lse=True)
    gradients = torch.autograd.grad(o, (q, k, v), inputs.do)
    got = {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    verify.compare(got, oracle, same)


def test_no_split_where_the_tuned_kernel_has_tiles_enough():
    gpu = dispatch.gpu_of(0)
    asked = Problem("bf16", 8, 32, 8, 4096, 4096, 128, 128, CAUSAL)
    assert key_splits_schedule.config_of(asked, choosing.choose(asked, "fwd", gpu).config, gpu) is None


WIDE = [(72, 72), (80, 80), (96, 96), (104, 104), (136, 136), (160, 160), (72, 144), (104, 80), (192, 128)]
#: The rows of 80 have tiles of 64 rows at such lengths.
OF_ROWS = [((72, 72), CAUSAL), ((80, 80), CAUSAL)]


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
@pytest.mark.parametrize(
    "dims", [(16, 16), (24, 24), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (72, 144)], ids=str
)
def test_every_form_of_few_tiles(dims, mask):
    """Whichever the estimate takes; lengths that leave tiles and blocks partly empty."""
    forms = few_tiles.configs(Problem("bf16", 1, 1, 1, 1, 1, *dims, mask).specialization, 90)
    assert forms
    for lengths in ((300, 300), (65, 700), (1, 64)):
        asked = Problem("bf16", 2, 6, 2, *lengths, *dims, mask)
        inputs = reference.make_inputs(asked, "cuda", on_device=True)
        oracle, same = reference.oracle_and_reference(inputs, mask=mask, gradients=False)
        for config in forms:
            o, lse = passes.forward(
                inputs.q, inputs.k, inputs.v, mask=mask, softmax_scale=dims[0] ** -0.5, config=config
            )
            verify.compare({"o": o, "lse": lse}, oracle, same)


@pytest.mark.parametrize(("dims", "mask"), list(itertools.product(WIDE, (CAUSAL, FULL))), ids=str)
def test_calls_of_few_tiles(dims, mask):
    """Tiles of 64 rows, two programs a multiprocessor, for head dims that are padded or in parts."""
    asked = Problem("bf16", 2, 4, 2, 300, 300, *dims, mask)
    choice = choosing.choose(asked, "fwd", dispatch.gpu_of(0))
    assert choice.few_tiles or (dims, mask) in OF_ROWS
    assert key_splits_schedule.config_of(asked, choice.config, dispatch.gpu_of(0), choice.row) is None
    inputs = reference.make_inputs(asked, "cuda", on_device=True)
    oracle, same = reference.oracle_and_reference(inputs, mask=mask)
    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    o, lse = fa2tune.attention(q, k, v, causal=mask == CAUSAL, return_lse=True)
    gradients = torch.autograd.grad(o, (q, k, v), inputs.do)
    got = {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    verify.compare(got, oracle, same)


def test_queries_that_see_no_key_are_filled_in():
    asked = Problem("bf16", 4, 16, 8, 6000, 200, 64, 64, CAUSAL)
    gpu = dispatch.gpu_of(0)
    assert unseen.filled_in(asked, gpu, "fwd") == unseen.filled_in(asked, gpu, BACKWARD) == 5800
    inputs = reference.make_inputs(asked, "cuda", on_device=True)
    oracle, same = reference.oracle_and_reference(inputs, mask=CAUSAL)
    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    o, lse = fa2tune.attention(q, k, v, causal=True, return_lse=True)
    gradients = torch.autograd.grad(o, (q, k, v), inputs.do)
    got = {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    verify.compare(got, oracle, same)
