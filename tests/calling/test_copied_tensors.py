"""Tensors that TMA cannot address: which they are, when they are copied, and that a plan gets the copies."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from benchmark_scripts import BENCHMARKS

from fa2tune import gpus
from fa2tune.calling import copies, dispatch, serving
from fa2tune.calling.choosing import Chooser
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import BACKWARD, Problem

H200, A100 = gpus.named("h200"), gpus.named("a100")
LARGE = Problem("bf16", 2, 16, 16, 4096, 4096, 128, 128, CAUSAL, aligned=False, tma=False)
SMALL = replace(LARGE, seqlen_q=128, seqlen_k=128)
NAMES = ("q", "k", "v")
RECORDED = json.loads((BENCHMARKS / "calls/group_parts.json").read_text())["copies"]


def test_which_tensors_no_descriptor_can_address():
    plain = torch.zeros(2, 4, 32, 64, dtype=torch.bfloat16)
    storage = torch.zeros(plain.numel() + 1, dtype=torch.bfloat16)
    odd = storage[1:].view(2, 4, 32, 64)  # base off by 2 bytes
    wide = torch.zeros(2, 4, 32, 67, dtype=torch.bfloat16)[..., :64]  # rows of 134 bytes
    given = {"q": plain, "k": odd, "v": wide, "o": plain[:1].expand(2, 4, 32, 64), "do": plain.transpose(1, 2)}
    assert copies.unaddressable(given) == ("k", "v")
    given = {"q": plain[:, :1].expand(2, 4, 32, 64), "k": plain[:, :, :1].expand(2, 4, 32, 64)}
    assert copies.unaddressable(given) == ("k",), "batches and heads may be expanded, rows may not"


@pytest.mark.parametrize("pass_", ["fwd", BACKWARD])
def test_large_calls_are_copied_and_small_ones_are_not(pass_):
    assert dispatch.with_copies(Chooser(LARGE, H200), NAMES, pass_)
    assert not dispatch.with_copies(Chooser(SMALL, H200), NAMES, pass_)
    assert not dispatch.with_copies(
        Chooser(replace(LARGE, seqlen_q=1), H200), NAMES, pass_
    )  # decoding reads K and V once
    assert not dispatch.with_copies(Chooser(copies.addressable(LARGE), H200), NAMES, pass_)
    assert not dispatch.with_copies(Chooser(LARGE, H200), (), pass_)


@pytest.mark.parametrize("pass_", ["fwd", BACKWARD])
def test_a_row_stride_of_zero_alone_costs_less_without_a_copy(pass_):
    """Its loads stay vectors: the copy has to be cheaper to pay."""
    expanded = replace(LARGE, aligned=True)
    lengths = [2**n for n in range(8, 15)]
    odd, still = (
        [bool(dispatch.with_copies(Chooser(replace(one, seqlen_q=n, seqlen_k=n), H200), NAMES, pass_)) for n in lengths]
        for one in (LARGE, expanded)
    )
    assert sum(odd) > sum(still) > 0


@pytest.mark.parametrize("case", RECORDED, ids=lambda one: f"{one['kind']} {one['seqlen']}")
@pytest.mark.parametrize("pass_", ["fwd", BACKWARD])
def test_what_was_faster_on_an_h200_is_chosen(case, pass_):
    """Expanded heads were timed on the portable kernels, as rows with a stride of 0 are served."""
    asked = replace(LARGE, seqlen_q=case["seqlen"], seqlen_k=case["seqlen"], aligned=case["kind"] == "expanded")
    us = case[pass_]
    copied = dispatch.with_copies(Chooser(asked, H200), case["names"], pass_)
    assert us["copied" if copied else "as they are"] <= 1.01 * min(us.values())


@pytest.mark.parametrize(("pass_", "length"), [("fwd", 256), (BACKWARD, 256), (BACKWARD, 128)])
def test_calls_that_wait_for_the_host_are_not_copied(pass_, length):
    """Expected to take under 30 us forward and 70 backward by pointer: the host takes as long, and longer with copies."""
    asked = replace(LARGE, seqlen_q=length, seqlen_k=length)
    assert (1 + copies.BY_ELEMENTS) * copies.busy_us(asked, H200, pass_) < {"fwd": 30, BACKWARD: 70}[pass_]
    assert not copies.pays(asked, H200, pass_, NAMES)


def test_the_longest_tile_is_one_multiprocessors():
    """2 x 16 heads of 512 under a causal mask: 128 tiles, the longest twice the mean; of 8k all are busy."""
    short, long = (replace(LARGE, seqlen_q=n, seqlen_k=n) for n in (512, 8192))
    full = H200.peak("bf16", "ieee") * 1e6 * copies.RATE
    assert copies.busy_us(short, H200, "fwd") == pytest.approx(short.flops("fwd") / full * 132 / 64, rel=0.01)
    assert copies.busy_us(long, H200, "fwd") == pytest.approx(long.flops("fwd") / full)
    one = replace(short, batch=1, heads_q=1, heads_kv=1, seqlen_q=1)
    assert copies.busy_us(one, H200, "fwd") == pytest.approx(one.flops("fwd") / full * 132)


@pytest.mark.parametrize("pass_", ["fwd", BACKWARD])
def test_nothing_is_copied_for_portable_kernels(pass_):
    assert not dispatch.with_copies(Chooser(LARGE, A100), NAMES, pass_)
    assert not dispatch.with_copies(Chooser(replace(LARGE, dtype="fp32"), H200), NAMES, pass_)


def test_a_call_is_copied_from_some_length_on_and_not_for_more_tensors_earlier():
    lengths = [2**n for n in range(6, 15)]
    one, three = (
        [
            bool(dispatch.with_copies(Chooser(replace(LARGE, seqlen_q=n, seqlen_k=n), H200), names, "fwd"))
            for n in lengths
        ]
        for names in (("k",), NAMES)
    )
    assert one == sorted(one) and three == sorted(three) and sum(one) >= sum(three) > 0 and not one[0]


@pytest.mark.parametrize("order", ["bhsd", "bshd", "expanded"])
def test_a_plan_gets_dense_copies_in_the_memory_order_of_what_came(order):
    tensor = torch.randn(2, 4, 32, 67)[..., 1:65]
    tensor = tensor.transpose(1, 2) if order == "bshd" else tensor
    tensor = tensor[:1].expand(2, -1, -1, -1) if order == "expanded" else tensor
    other, seen = torch.randn(2, 4, 32, 64), []
    plan = copies.copying(lambda *tensors: seen.extend(tensors), ("q", "k", "v"), {"k": copies.copied})
    plan(other, tensor, None)
    assert seen[0] is other and seen[2] is None
    assert torch.equal(seen[1], tensor) and seen[1].data_ptr() != tensor.data_ptr()
    assert copies.unaddressable({"k": seen[1]}) == ()
    assert (seen[1].stride(1) < seen[1].stride(2)) == (tensor.stride(1) < tensor.stride(2))


def test_a_plan_without_copies_is_the_plan_itself():
    plan = object()
    assert copies.copying(plan, NAMES, ()) is plan


def test_explain_says_what_is_copied():
    told = serving.explain_problem(LARGE, H200, present=False)
    said = "TMA cannot address q, k and v: copied before the forward and the backward, which is expected to be faster."
    assert said in str(told)
    assert {tuple(one["copied"]) for one in told.as_dict()["kernels"]} == {NAMES}
    assert told.kernels[0].row is not None and told.kernels[0].row.warp_specialized
    small = serving.explain_problem(SMALL, H200, present=False)
    assert "copied" not in str(small) and small.kernels[0].config["LOADS"] == "pointer"
    some = serving.explain_problem(LARGE, H200, ("fwd",), present=False, strided=("k",))
    assert "TMA cannot address k: copied before the forward, which" in str(some)


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize(
    "empty", [{"seqlen_k": 0}, {"seqlen_q": 0}, {"batch": 0}, {"heads_q": 0, "heads_kv": 0}], ids=str
)
def test_a_call_without_a_pair_is_explained(empty: dict[str, int], tma: bool) -> None:
    sizes = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 64, "seqlen_k": 64, **empty}
    problem = Problem("bf16", **sizes, head_dim=64, head_dim_v=64, mask=CAUSAL, aligned=tma, tma=tma)
    found = serving.explain_problem(problem, gpus.named("h200"), present=False)
    assert found.kernels and not copies.pays(problem, gpus.named("h200"), "fwd", ("q",))
