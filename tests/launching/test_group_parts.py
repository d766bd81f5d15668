"""What is launched for a backward whose query groups are split: which kernels, with which heads, on which tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from fa2tune.compiling.registry import variant_named
from fa2tune.launching import passes
from fa2tune.launching.launch import Workspace
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import Problem

ASKED = Problem("bf16", 2, 12, 2, 300, 500, 128, 128, CAUSAL)


@pytest.fixture
def launched(monkeypatch):
    """What ``bind`` was asked for, and where the tensors are, launch by launch."""
    found = []

    def bind(variant, problem, config, strides, scale, names, device, workspaces, scalars, measured):
        one = SimpleNamespace(variant=variant, problem=problem, strides=strides, names=names, scalars=scalars)
        one.grid = variant.programs(problem, config, 132)
        return one

    def chain(launches, device):
        found.extend((one, dict(zip(one.names, places, strict=True))) for one, places in launches)

    monkeypatch.setattr(passes, "bind", bind)
    monkeypatch.setattr(passes, "chain", chain)
    monkeypatch.setattr(passes, "arch_of", lambda index: 90)
    monkeypatch.setattr(
        passes, "starts_early", lambda variant, problem, config, _device: variant.early(problem, config, 132)
    )
    return found


def kernels(config, parts, strategy=("bwd_fused",), asked=ASKED):
    queries, keys = (2, 12, 300, 128), (2, asked.heads_kv, 500, 128)
    shapes = {"q": queries, "k": keys, "v": keys, "o": queries, "do": queries, "lse": queries[:3]}
    shapes |= {"dq": queries, "dk": keys, "dv": keys}
    tensors = {name: torch.empty(sizes, device="meta", dtype=torch.bfloat16) for name, sizes in shapes.items()}
    configs = dict.fromkeys(strategy, config)
    return tensors, passes.Kernels(configs, asked, tensors, 0.1, 0, parts=dict.fromkeys(strategy, parts))


def fused(**changes):
    variant = variant_named("sm90/bwd_fused")
    return {**variant.space.default(ASKED.specialization, 90), "DYNAMIC": True, **changes}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("parts", [2, 3, 6])
def test_all_kernels_between_see_the_parts_as_key_heads(launched, parts, beside):
    config = fused(BESIDE=beside, FINISH_BESIDE=beside, REDUCE="vector")
    tensors, made = kernels(config, parts)
    names = [one.variant.name for one, _ in launched]
    prologue = "sm90/bwd_prepare_overlapped" if beside else "sm90/bwd_prepare"
    between = [prologue, "sm90/bwd_fused", "sm90/bwd_finish"]
    assert names == ["portable/bwd_spread", *between, "portable/bwd_gather"]
    for one, _ in launched[1:-1]:
        assert (one.problem.heads_kv, one.problem.group) == (2 * parts, 6 // parts)
        assert one.problem.specialization == ASKED.specialization, "the binary is that of any call"
    order = list(tensors)
    (_, spread), *_, (gather_launch, gather) = launched
    main = launched[2][1]
    for name in ("k", "v"):
        assert spread[name] == order.index(name) and spread[f"{name}_parts"] == main[name]
    for name in ("dk", "dv"):
        assert gather[name] == order.index(name) and gather[f"{name}_parts"] == main[name]
    for name in ("k", "v", "dk", "dv"):
        place = main[name]
        assert isinstance(place, Workspace) and place.shape == (2, 2 * parts, 500, 128) and place.end <= made.size
        assert launched[2][0].strides[name] == (2 * parts * 500 * 128, 500 * 128, 128)
    assert main["q"] == order.index("q") and launched[3][1]["dq"] == order.index("dq")
    assert gather_launch.problem.heads_kv == 2 and gather_launch.scalars["parts"] == parts
    assert launched[0][0].grid == -(-500 // 32) * 2 * 2 * parts and gather_launch.grid == 2 * -(-500 // 16) * 2 * 2
    places = sorted({(place.start, place.end) for place in main.values() if isinstance(place, Workspace)})
    assert all(one[1] <= other[0] for one, other in pairwise(places)), "words and sums are one"


def test_without_a_split_nothing_is_added(launched):
    tensors, _ = kernels(fused(BESIDE=False, FINISH_BESIDE=False), 1)
    assert [one.variant.name for one, _ in launched] == ["sm90/bwd_prepare", "sm90/bwd_fused", "sm90/bwd_finish"]
    order = list(tensors)
    assert all(launched[1][1][name] == order.index(name) for name in ("q", "k", "v", "do", "dk", "dv"))
    assert all(one.problem == ASKED for one, _ in launched)


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
@pytest.mark.parametrize("heads_kv", [1, 2])
def test_one_key_head_is_found_by_a_stride_of_zero(launched, loads, heads_kv):
    asked, spreads = replace(ASKED, heads_kv=heads_kv), heads_kv > 1
    config = {**variant_named("portable/bwd_dkdv").space.default(asked.specialization, 90), "LOADS": loads}
    tensors, made = kernels(config, 3, ("bwd_dkdv",), asked)
    assert [one.variant.name for one, _ in launched] == [
        *(["portable/bwd_spread"] if spreads else []), "portable/bwd_dkdv", "portable/bwd_gather"
    ]  # fmt: skip
    main, places = launched[-2]
    assert (places["k"] == list(tensors).index("k")) != spreads
    assert (main.strides["k"][1] == 0) != spreads and main.strides["k"][2] == 128
    assert main.problem.heads_kv == 3 * heads_kv
    assert made.size >= (4 if spreads else 2) * 2 * 3 * heads_kv * 500 * 128 * 2


def test_the_hopper_kernels_find_one_key_head_so_too(launched):
    asked = replace(ASKED, heads_kv=1)
    tensors, _ = kernels(fused(BESIDE=False, FINISH_BESIDE=False), 4, asked=asked)
    assert "portable/bwd_spread" not in [one.variant.name for one, _ in launched]
    main, places = launched[1]
    assert main.variant.name == "sm90/bwd_fused" and places["v"] == list(tensors).index("v")
    assert main.strides["v"] == (500 * 128, 0, 128) and main.problem.heads_kv == 4


def test_sums_of_parts_are_aligned_where_keys_are_not(launched):
    kernels(fused(BESIDE=False, FINISH_BESIDE=False), 3, asked=replace(ASKED, aligned=False))
    assert [launched[place][0].problem.aligned for place in (0, 2, -1)] == [False, False, True]
    steps = launched[-1][0].strides
    assert all(step % 8 == 0 for name in ("dk", "dv") for step in steps[name])


@pytest.mark.parametrize("parts", [0, 4, 12])
def test_a_number_that_does_not_divide_the_group_is_refused(launched, parts):
    with pytest.raises(ValueError, match=rf"parts: got {parts} for bwd_fused, allowed are 1, 2, 3, 6"):
        kernels(fused(), parts)
