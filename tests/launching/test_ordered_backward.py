"""What is launched for a backward whose dQ is summed in a fixed order: kernels, programs, arguments and workspaces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fa2tune.compiling.choice import Choice
from fa2tune.compiling.registry import variant_named
from fa2tune.launching import launch, passes
from fa2tune.launching.launch import Workspace, _values
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import Problem

ASKED = Problem("bf16", 2, 12, 2, 300, 500, 96, 96, CAUSAL)
ORDERED = variant_named("sm80/bwd_ordered")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ``bind`` was asked for, and where the tensors are, launch by launch."""
    found: list[Any] = []

    def bind(variant, problem, config, strides, scale, names, device, workspaces, scalars, measured):  # type: ignore[no-untyped-def]
        values = {**_values(variant, problem, config, strides, scale, names), **scalars}
        return SimpleNamespace(variant=variant, names=names, values=values, grid=variant.programs(problem, config, 108))

    def chain(launches, device):  # type: ignore[no-untyped-def]
        found.extend((one, dict(zip(one.names, places, strict=True))) for one, places in launches)

    monkeypatch.setattr(passes, "bind", bind)
    monkeypatch.setattr(passes, "chain", chain)
    monkeypatch.setattr(passes, "arch_of", lambda index: 80)
    monkeypatch.setattr(launch, "sm_count", lambda index: 132)
    return found


def made(buffers: int, parts: int = 1) -> passes.Kernels:
    queries, keys = (2, 12, 300, 96), (2, 2, 500, 96)
    shapes = {"q": queries, "k": keys, "v": keys, "o": queries, "do": queries, "lse": queries[:3]}
    shapes |= {"dq": queries, "dk": keys, "dv": keys}
    tensors = {name: torch.empty(sizes, device="meta", dtype=torch.bfloat16) for name, sizes in shapes.items()}
    config = {**ORDERED.space.default(ASKED.specialization, 80), "DQ_BUFFERS": buffers}
    return passes.Kernels({"bwd_fused": Choice(ORDERED, config)}, ASKED, tensors, 0.1, 0, parts={"bwd_fused": parts})


@pytest.mark.parametrize("buffers", [2, 3])
def test_every_program_has_sums_of_its_own(launched: list[Any], buffers: int) -> None:
    kernels = made(buffers)
    assert kernels.casts is None, "nothing is left to do"
    names = [one.variant.name.removeprefix("sm80/") for one, _ in launched]
    assert names == ["bwd_prepare", "bwd_ordered_zero", "bwd_ordered", "bwd_ordered_finish"]
    (_, first), (zero, second), (main, third), (finish, last) = launched
    place = third["sums"]
    assert isinstance(place, Workspace) and place.shape == (buffers, 2, 12, 384, 128) and place.end <= kernels.size
    assert place.dtype is torch.float32 and first["sums"] == second["sums"] == last["sums"] == place
    assert first["peaks"] == third["peaks"] and third["peaks"].shape == (2, 12, 384)
    assert main.grid == buffers * 2 * 2 and zero.grid == 384 // 32 * 24 and finish.grid == -(-300 // 32) * 24
    for one, _ in launched[1:]:
        assert one.values["DQ_BUFFERS"] == buffers and one.values["rows_padded"] == 384
        assert one.values["batch"] == 2 and one.values["heads_q"] == 12


def test_one_sum_is_zeroed_where_rows_are_prepared(launched: list[Any]) -> None:
    made(1)
    names = [one.variant.name.removeprefix("sm80/") for one, _ in launched]
    assert names == ["bwd_prepare", "bwd_ordered", "bwd_ordered_finish"]
    assert launched[1][1]["sums"].shape == (1, 2, 12, 384, 128)


def test_parts_of_a_group_have_programs_of_their_own(launched: list[Any]) -> None:
    made(3, parts=2)
    names = [one.variant.name for one, _ in launched]
    assert names[0] == "portable/bwd_spread" and names[-1] == "portable/bwd_gather"
    main, places = launched[3]
    assert main.variant is ORDERED and main.grid == 3 * 2 * 4
    assert places["sums"].shape == (3, 2, 12, 384, 128), "the query heads are as many"


def test_configs_of_the_other_kernel_have_one_sum() -> None:
    free = variant_named("sm80/bwd_fused")
    config = free.space.default(ASKED.specialization, 80)
    assert ORDERED.space.completed(config) == {**config, "DQ_BUFFERS": 1}
    assert set(ORDERED.space.dimensions) == {*free.space.dimensions, "DQ_BUFFERS"}
