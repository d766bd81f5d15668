"""The fused Hopper backward with the query blocks of a key tile in parts (QUERY_PARTS), on the GPU: by the error rule, with NaN
in outputs and workspaces, through the public call, and in a CUDA graph. Of packed sequences: test_varlen_backward.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hopper_cases import config_for, specialized, strategy_of
from test_early_start import BY_TMA, CONCATENATED
from test_query_groups import gradients

from fa2tune.calling import choosing, dispatch
from fa2tune.calling.schedules import group_parts_schedule
from fa2tune.launching import group_parts, passes
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Problem

FOUND = list(specialized(("bwd_fused",))) if torch.cuda.is_available() else []
pytestmark = pytest.mark.skipif(not FOUND, reason="no warp-specialised fused backward for this GPU")
FORMS: dict[str, dict[str, Any]] = {"default": {}, "concatenated": CONCATENATED, "by TMA": BY_TMA}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
@pytest.mark.parametrize("lengths", [(391, 517), (517, 391), (1, 300), (2144, 2144)], ids=str)
def test_gradients_keep_the_error_rule(lengths: tuple[int, int], mask: Mask, dim: int, form: str) -> None:
    for dtype, parts, early in (("bf16", 3, True), ("fp16", 2, False), ("bf16", 8, True)):
        asked = Problem(dtype, 2, 3, 3, *lengths, dim, dim, mask)
        config = bwd_fused.fitted(asked.specialization, {**config_for(FOUND[0], asked), **FORMS[form]})
        config = {
            **config,
            "PAIRS": False,
            "BESIDE": False,
            "FINISH_BESIDE": False,
            "QUERY_PARTS": True,
            "EARLY_START": early,
        }
        if bwd_fused.SPACE.broken(config, asked.specialization, 90) is not None:
            pytest.skip("no such form")
        made = reference.make_inputs(asked, "cuda", with_dlse=True)
        oracle, same = reference.oracle_and_reference(made, mask=mask)
        strategy, configs = strategy_of(FOUND[0], config, asked, portable=False)
        given = {"mask": mask, "softmax_scale": dim**-0.5}
        with verify._strict("ieee"):  # uninitialised memory holds NaN
            o, lse = passes.forward(made.q, made.k, made.v, config=configs["fwd"], **given)
            found = passes.backward(
                made.do, made.dlse, made.q, made.k, made.v, o, lse, strategy=strategy, configs=configs,
                parts={"bwd_fused": parts}, **given,
            )  # fmt: skip
        verify.compare(dict(zip(("dq", "dk", "dv"), found, strict=True)), oracle, same)


def few_tiles() -> list[torch.Tensor]:
    """A call of two heads whose query blocks are in parts, on a GPU of more multiprocessors than key tiles."""
    q, k, v, do = (torch.randn(1, 2, 2144, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    asked, gpu = passes.describe(q, k, v, CAUSAL, 128**-0.5), dispatch.gpu_of(0)
    choices = choosing.choose_backward(choosing.Chooser(asked, gpu), False)[1]
    if "bwd_fused" not in choices or not group_parts.of_queries(choices["bwd_fused"].config):
        pytest.skip("not in parts on this GPU")
    assert group_parts_schedule.parts(asked, choices, gpu)["bwd_fused"] > 1
    return [q, k, v, do]


def test_through_the_public_call_on_another_stream_and_in_a_graph() -> None:
    q, k, v, do = few_tiles()
    oracle, same = reference.oracle_and_reference(reference.Inputs(q, k, v, do), mask=CAUSAL)
    first = gradients(q, k, v, do)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second = gradients(q, k, v, do)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        third = gradients(q, k, v, do)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for found in (first, second, third):
        verify.compare(dict(zip(("dq", "dk", "dv"), found, strict=True)), oracle, same)
        # dq is summed in no fixed order; parts of dk and dv are
        assert torch.equal(found[1], first[1]) and torch.equal(found[2], first[2])
