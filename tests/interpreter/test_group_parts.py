"""A backward whose query groups are split into parts, in Triton's interpreter: by the error rule, gradients included."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fa2tune.compiling.registry import portable_of
from fa2tune.launching import group_parts, passes
from fa2tune.measuring import reference, verify
from fa2tune.spec.extent import RAGGED, WHOLE, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import STRATEGIES, Problem


@pytest.fixture(autouse=True)
def _poison():
    """torch.empty fills with NaN, so that an element that was not written is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients_of(asked, strategy, parts, inputs, forward, loads="pointer"):
    spec = asked.specialization
    configs = {name: {**portable_of(name).space.default(spec, 80), "LOADS": loads} for name in STRATEGIES[strategy]}
    return passes.backward(
        inputs.do, inputs.dlse, inputs.q, inputs.k, inputs.v, *forward, mask=asked.mask,
        softmax_scale=asked.head_dim**-0.5, strategy=strategy, configs=configs,
        parts={name: parts for name in configs if name in group_parts.MAKE_DK_DV},
    )  # fmt: skip


def forward_of(asked, inputs):
    config = portable_of("fwd").space.default(asked.specialization, 80)
    scale = asked.head_dim**-0.5
    return passes.forward(inputs.q, inputs.k, inputs.v, mask=asked.mask, softmax_scale=scale, config=config)


@pytest.mark.parametrize("strategy", ["split", "fused"])
@pytest.mark.parametrize(
    ("heads", "dims", "mask", "parts", "loads"),
    [
        ((6, 1), (32, 32), CAUSAL, 2, "pointer"),
        ((6, 1), (40, 24), FULL, 6, "pointer"),  # of one key head: no copies of K and V
        ((6, 1), (32, 32), CAUSAL, 3, "descriptor"),
        ((6, 2), (24, 40), CAUSAL, 3, "descriptor"),
        ((8, 2), (32, 32), Mask("band", 20, 3), 2, "pointer"),
    ],
)
def test_every_split_keeps_the_error_rule(strategy, heads, dims, mask, parts, loads):
    asked = Problem("fp16", 2, *heads, 50, 70, *dims, mask)
    inputs = reference.make_inputs(asked, "cpu", with_dlse=True)
    oracle, same = reference.oracle_and_reference(inputs, mask=mask)
    o, lse = forward_of(asked, inputs)
    gradients = gradients_of(asked, strategy, parts, inputs, (o, lse), loads)
    verify.compare({"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}, oracle, same)


def test_a_split_group_sums_what_its_heads_give_alone():
    """float32: the parts' sums differ from one sum in rounding alone; a part of one head is that head's own gradient."""
    asked = Problem("fp32", 2, 6, 2, 33, 40, 16, 32, CAUSAL)
    inputs = reference.make_inputs(asked, "cpu")
    forward = forward_of(asked, inputs)
    whole = gradients_of(asked, "split", 1, inputs, forward)
    for one, other in zip(whole, gradients_of(asked, "split", 3, inputs, forward), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["split", "fused"])
@pytest.mark.parametrize(("heads", "parts", "mask"), [((6, 1), 3, CAUSAL), ((8, 2), 2, FULL), ((4, 2), 2, CAUSAL)])
def test_packed_sequences_keep_it_too(strategy, heads, parts, mask):
    """Sequence by sequence; the rows behind the last one have gradients of 0."""
    lengths, spare = ((20, 30), (0, 7), (33, 33), (9, 0)), 5
    queries, keys = (sum(side) + spare for side in zip(*lengths, strict=True))
    asked = Problem("fp16", 1, *heads, queries, keys, 32, 16, mask, extent=Extent(RAGGED, len(lengths)))
    whole = reference.make_inputs(replace(asked, mask=FULL, extent=WHOLE), "cpu")
    starts = [torch.tensor([0, *itertools.accumulate(side)], dtype=torch.int32) for side in zip(*lengths, strict=True)]
    o, lse = torch.zeros(1, heads[0], queries, 16, dtype=torch.float16), torch.full((1, heads[0], queries), -torch.inf)
    pairs = [slice(*pair) for pair in itertools.pairwise(starts[0].tolist())]
    pairs_k = [slice(*pair) for pair in itertools.pairwise(starts[1].tolist())]
    expected = []
    for rows, others in zip(pairs, pairs_k, strict=True):
        sides = {name: rows if name in ("q", "do") else others for name in ("q", "k", "v", "do")}
        one = replace(whole, **{name: getattr(whole, name)[:, :, side] for name, side in sides.items()})
        expected.append(reference.oracle_and_reference(one, mask=mask))
        o[:, :, rows], lse[:, :, rows] = expected[-1][1]["o"], expected[-1][0]["lse"]
    spec = asked.specialization
    configs = {name: {**portable_of(name).space.default(spec, 80), "LOADS": "pointer"} for name in STRATEGIES[strategy]}
    split = {name: parts for name in configs if name in group_parts.MAKE_DK_DV}
    tensors = whole.q, whole.k, whole.v
    plan = passes.BackwardPlan(asked, whole.do, None, *tensors, o, 32**-0.5, strategy, configs, split)
    dq, dk, dv = plan(whole.do, None, *tensors, o, lse, *starts)
    assert not any(one[:, :, -spare:].any() for one in (dq, dk, dv))
    for rows, others, (oracle, same) in zip(pairs, pairs_k, expected, strict=True):
        if rows.start == rows.stop or others.start == others.stop:
            assert not dq[:, :, rows].any() and not dk[:, :, others].any() and not dv[:, :, others].any()
            continue
        found = {"dq": dq[:, :, rows], "dk": dk[:, :, others], "dv": dv[:, :, others]}
        verify.compare(found, {name: oracle[name] for name in found}, {name: same[name] for name in found})


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
def test_gradients_have_the_memory_order_of_their_inputs(order):
    asked = Problem("fp16", 2, 4, 2, 33, 40, 16, 16, CAUSAL)
    inputs = reference.make_inputs(asked, "cpu")
    if order == "bshd":
        turned = {n: getattr(inputs, n).transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v", "do")}
        inputs = replace(inputs, **turned)
    oracle, same = reference.oracle_and_reference(inputs, mask=CAUSAL)
    o, lse = forward_of(asked, inputs)
    dq, dk, dv = gradients_of(asked, "split", 2, inputs, (o, lse))
    assert (dk.stride(1) < dk.stride(2)) == (order == "bshd")
    verify.compare({"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, oracle, same)


@pytest.mark.parametrize("parts", [0, -1, 3, 8])
def test_only_divisors_of_the_group_are_taken(parts):
    asked = Problem("fp16", 1, 4, 1, 33, 40, 16, 16, CAUSAL)
    inputs = reference.make_inputs(asked, "cpu")
    with pytest.raises(ValueError, match=rf"parts: got {parts} for bwd_dkdv, allowed are 1, 2, 4"):
        gradients_of(asked, "split", parts, inputs, forward_of(asked, inputs))
