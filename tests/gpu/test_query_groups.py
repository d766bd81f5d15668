"""Backwards whose query groups are split into parts, on the GPU: by the error rule, on another stream, in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from hopper_cases import VIEWS, config_for, legal, refusal, sequence_first, specialized, strategy_of

import fa2tune
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.schedules import group_parts_schedule
from fa2tune.launching import group_parts, passes
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import STRATEGIES, Problem

VARIANTS = specialized(group_parts.MAKE_DK_DV) if torch.cuda.is_available() else []
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
every = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
GROUPS = [((4, 2), 2), ((6, 2), 3), ((8, 1), 2), ((8, 1), 8), ((16, 2), 4), ((71, 1), 71)]


def checked(variant, asked, config, parts, view=VIEWS[0]):
    """One kernel's groups in so many parts; the other kernels as ``strategy_of`` says."""
    if why := refusal(variant, asked):
        pytest.skip(why)
    made = reference.make_inputs(asked, "cuda", with_dlse=True)
    oracle, same = reference.oracle_and_reference(made, mask=asked.mask)
    q, k, v, do = (view(t) for t in (made.q, made.k, made.v, made.do))
    scale = asked.head_dim**-0.5
    strategy, configs = strategy_of(variant, config, asked, portable=False)
    with verify._strict("ieee"):  # uninitialised memory holds NaN
        o, lse = passes.forward(q, k, v, mask=asked.mask, softmax_scale=scale, config=configs["fwd"])
        gradients = passes.backward(
            do, made.dlse, q, k, v, o, lse, mask=asked.mask, softmax_scale=scale, strategy=strategy, configs=configs,
            parts={variant.serves: parts},
        )  # fmt: skip
    verify.compare(dict(zip(("dq", "dk", "dv"), gradients, strict=True)), oracle, same)


@every
@pytest.mark.parametrize(("heads", "parts"), GROUPS)
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_keep_the_error_rule(variant, dtype, mask, heads, parts):
    asked = Problem(dtype, 2, *heads, 391, 517, 128, 128, mask)
    checked(variant, asked, config_for(variant, asked), parts)


@every
@pytest.mark.parametrize("lengths", [(1, 300), (300, 1), (129, 64), (517, 391)])
@pytest.mark.parametrize("dims", [(64, 64), (72, 40)])
def test_odd_lengths_and_head_dims(variant, dims, lengths):
    asked = Problem("bf16", 1, 6, 1, *lengths, *dims, CAUSAL)
    checked(variant, asked, config_for(variant, asked), 3, sequence_first)


@pytest.mark.parametrize("beside", [(True, False), (True, True)], ids=["prologue", "prologue and epilogue"])
@pytest.mark.parametrize("heads", [((8, 1), 4), ((71, 1), 71)], ids=str)
def test_overlapped_ends_see_the_parts(beside, heads):
    """The prologue prepares rows, and the epilogue waits for the tiles of a head, by the same heads as the main kernel."""
    fused = next((one for one in VARIANTS if one.serves == "bwd_fused"), None)
    if fused is None:
        pytest.skip("no warp-specialised fused backward for this GPU")
    asked = Problem("bf16", 2, *heads[0], 1000, 1000, 64, 64, CAUSAL)
    wanted = dict(zip(("BESIDE", "FINISH_BESIDE"), beside, strict=True))
    config = next(one for one in legal(fused, asked) if wanted.items() <= one.items())
    checked(fused, asked, config, heads[1])


def gradients(q, k, v, do, deterministic=False):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    return torch.autograd.grad(fa2tune.attention(q, k, v, causal=True, deterministic=deterministic), (q, k, v), do)


def few_key_heads():
    """A call whose groups are split, on a GPU of at least sixteen multiprocessors."""
    q, do = (torch.randn(1, 8, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, 1, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    asked = passes.describe(q, k, v, CAUSAL, 128**-0.5)
    for exact in (False, True):
        strategy, kinds = choosing.strategy_of(asked, dispatch.gpu_of(0), exact)
        configs = {n: choosing.choose(asked, n, dispatch.gpu_of(0), kinds.get(n)).config for n in STRATEGIES[strategy]}
        assert max(group_parts_schedule.parts(asked, configs, dispatch.gpu_of(0)).values()) > 1
    return q, k, v, do


@pytest.mark.parametrize("deterministic", [False, True])
def test_through_the_public_call_on_another_stream_and_in_a_graph(deterministic):
    q, k, v, do = few_key_heads()
    oracle, same = reference.oracle_and_reference(reference.Inputs(q, k, v, do), mask=CAUSAL)
    first = gradients(q, k, v, do, deterministic)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second = gradients(q, k, v, do, deterministic)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        third = gradients(q, k, v, do, deterministic)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for found in (first, second, third):
        verify.compare(dict(zip(("dq", "dk", "dv"), found, strict=True)), oracle, same)
        if deterministic:
            assert all(torch.equal(one, other) for one, other in zip(found, first, strict=True))


def test_parts_of_one_call_are_summed_in_a_fixed_order():
    q, k, v, do = few_key_heads()
    runs = [gradients(q, k, v, do) for _ in range(5)]
    for found in runs:  # dq of the fused backward is summed in no fixed order; dk and dv are
        assert torch.equal(found[1], runs[0][1]) and torch.equal(found[2], runs[0][2])
