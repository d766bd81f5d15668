"""Packed sequences in the Hopper forward, by explicit configs: several tiles a program, every mask, NaN in neighbours, outputs
that were NaN, offsets that are wrong."""

from __future__ import annotations

import itertools

import pytest
import torch

from fa2tune.compiling.registry import variant_named
from fa2tune.launching import key_splits, passes
from fa2tune.measuring import reference
from fa2tune.search_spaces.sm90 import fwd_grouped, fwd_split
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

#: Of queries and of keys.
PACKINGS = {
    "even": tuple((n, n) for n in (1, 0, 513, 77, 127, 128, 129, 1000, 63, 64, 65)),
    "unequal": ((5, 900), (0, 40), (700, 300), (129, 0), (64, 64), (1, 2000), (257, 129)),
    "many": tuple((1 + n % 37, 1 + n % 41) for n in range(300)),
}
SPARE = 70  #: rows behind the last sequence
#: Sets of tiles: one, two and three groups; a second Q; O in halves.
FORMS = {
    "two groups": {}, "a second Q": {"Q_STAGES": 2}, "a second Q, in registers": {"Q_STAGES": 2, "Q_IN_REGISTERS": True},
    "one group": {"BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 3, "PINGPONG": False, "NUMBERED": False, "maxnreg": 80,
                  "Q_IN_REGISTERS": True},
    "small tiles": {"BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 2, "PINGPONG": False, "NUMBERED": False, "maxnreg": 128,
                    "Q_IN_REGISTERS": True},
}  # fmt: skip


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)


def views(*tensors):
    return [tensor.transpose(0, 1)[None] for tensor in tensors]


def plan_of(q, k, v, sequences, mask, settings):
    scale, given = q.shape[2] ** -0.5, views(q, k, v)
    problem = passes.describe(*given, mask, scale, extent=Extent(RAGGED, sequences))
    if "MEMBERS" in settings:
        tile = settings["BLOCK_M"], settings["BLOCK_N"]
        config = fwd_grouped.config_of(problem.specialization, *tile, settings["MEMBERS"])
        return key_splits.SplitPlan(problem, *given, scale, config)
    if "SPLITS" in settings:
        rows, splits = settings["BLOCK_M"], settings["SPLITS"]
        return key_splits.SplitPlan(problem, *given, scale, fwd_split.config_of(problem.specialization, rows, splits))
    variant = variant_named("sm90/fwd")
    config = {**variant.space.default(problem.specialization, 90), **settings}
    return passes.ForwardPlan(problem, *given, scale, config)


def into_nan(plan, q, k, v, starts):
    """(total, heads, dim) and (heads, total), written over NaN, with workspaces full of other words."""
    o, lse, *block = plan.fresh()
    for tensor in (o, lse):
        tensor.fill_(float("nan"))
    for words in block:
        words.fill_(0x7F)
    plan.chain((*views(q, k, v), o, lse, *starts, *block))
    return o, lse[0]


def compared(dtype, packing, mask, settings, heads=(12, 4), dims=(128, 128)):
    lengths = PACKINGS[packing]
    rows, keys = ([side for side, _ in lengths], [side for _, side in lengths])
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(sum(side) + SPARE, count, dim, device="cuda").to(dtype)
        for side, count, dim in ((rows, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1]))
    )
    q[sum(rows) :] = k[sum(keys) :] = float("nan")
    v[sum(keys) :] = float("inf")
    starts = offsets(rows), offsets(keys)
    plan = plan_of(q, k, v, len(lengths), mask, settings)
    o, lse = into_nan(plan, q, k, v, starts)
    near = {"atol": 0.02, "rtol": 0.0} if dtype is torch.bfloat16 else {"atol": 0.004, "rtol": 0.0}
    sides = [list(itertools.pairwise(side.tolist())) for side in starts]
    for (first, end), (begin, last) in zip(*sides, strict=True):
        one = [tensor.double() for tensor in views(q[first:end], k[begin:last], v[begin:last])]
        if end == first:
            continue
        right, right_lse = reference.attention(*one, mask=mask)
        torch.testing.assert_close(o[first:end].double(), right[0].transpose(0, 1), **near)
        torch.testing.assert_close(lse[:, first:end].double(), right_lse[0], atol=1e-4, rtol=1e-5)
    assert (o[sum(rows) :] == 0).all() and (lse[:, sum(rows) :] == -torch.inf).all()
    poisoned, kept = [tensor.clone() for tensor in (q, k, v)], torch.ones(len(o), dtype=torch.bool, device="cuda")
    for (first, end), (begin, last) in list(zip(*sides, strict=True))[1::2]:
        poisoned[0][first:end] = poisoned[1][begin:last] = poisoned[2][begin:last] = float("nan")
        kept[first:end] = False
    again, again_lse = into_nan(plan, *poisoned, starts)
    assert torch.equal(again[kept], o[kept]) and torch.equal(again_lse[:, kept], lse[:, kept])


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("form", FORMS)
def test_forms(packing, form):
    dim = 64 if form == "one group" else 128
    compared(torch.bfloat16, packing, CAUSAL, FORMS[form], dims=(dim, dim))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("settings", [{}, {"BLOCK_M": 128, "Q_STAGES": 2}], ids=["three groups", "a second Q"])
def test_head_dim_64(packing, settings):
    compared(torch.float16, packing, CAUSAL, settings, dims=(64, 64))


@pytest.mark.parametrize("mask", [FULL, band(128, 0), band(65, 300), Mask("chunked", 200)], ids=str)
@pytest.mark.parametrize("packing", ["even", "unequal"])
def test_masks(packing, mask):
    compared(torch.bfloat16, packing, mask, {})


#: Without maxima: two groups, three groups with P in words, a second Q. fp16 has room for fewer bounds.
BOUNDED = {
    "128": (torch.bfloat16, 128, {}), "64": (torch.bfloat16, 64, {}), "64 of float16": (torch.float16, 64, {}),
    "a second Q": (torch.bfloat16, 64, {"BLOCK_M": 128, "Q_STAGES": 2}),
}  # fmt: skip


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("form", BOUNDED)
def test_without_maxima(packing, form, mask):
    dtype, dim, settings = BOUNDED[form]
    compared(dtype, packing, mask, {**settings, "RESCALE": "never"}, dims=(dim, dim))


@pytest.mark.parametrize("dims", [(256, 256), (96, 96), (192, 128), (72, 40)], ids=str)
def test_other_head_dims(dims):
    compared(torch.bfloat16, "unequal", CAUSAL, {}, heads=(6, 1), dims=dims)


#: Tiles of several query heads: heads, rows and keys of a tile, its members. Groups of three and five fill none.
SEVERAL = [((12, 3), (128, 64), 4), ((6, 2), (64, 64), 4), ((10, 2), (128, 128), 2), ((8, 1), (64, 64), 8)]


def of_several(case):
    heads, (rows, keys), members = case
    return heads, {"BLOCK_M": rows, "BLOCK_N": keys, "MEMBERS": members}


@pytest.mark.parametrize("mask", [CAUSAL, FULL, band(7, 0), band(65, 300), Mask("chunked", 200)], ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_tiles_of_several_heads(case, packing, mask):
    heads, settings = of_several(case)
    compared(torch.bfloat16, packing, mask, settings, heads=heads)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (256, 256), (192, 128), (72, 40)], ids=str)
def test_head_dims_of_tiles_of_several_heads(dims):
    heads, settings = of_several(SEVERAL[0])
    compared(torch.float16, "unequal", CAUSAL, settings, heads=heads, dims=dims)
    compared(torch.bfloat16, "many", band(7, 0), settings, heads=heads, dims=dims)


#: Keys in parts: rows of a tile, and parts. Many sequences have fewer blocks than that.
PARTS = [(64, 2), (64, 4), (128, 2), (128, 3)]


def in_parts(rows, splits):
    return {"BLOCK_M": rows, "SPLITS": splits}


@pytest.mark.parametrize("mask", [CAUSAL, FULL, band(7, 0), band(65, 300), Mask("chunked", 200)], ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_keys_in_parts(parts, packing, mask):
    compared(torch.bfloat16, packing, mask, in_parts(*parts), heads=(4, 2))


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (256, 256), (192, 128), (72, 40)], ids=str)
def test_head_dims_of_keys_in_parts(dims):
    compared(torch.float16, "unequal", CAUSAL, in_parts(128, 3), heads=(1, 1), dims=dims)
    compared(torch.bfloat16, "even", band(7, 0), in_parts(128, 2), heads=(6, 2), dims=dims)


@pytest.mark.parametrize(
    ("settings", "heads"),
    [(of_several(SEVERAL[0])[1], SEVERAL[0][0]), (in_parts(128, 3), (2, 1)), (in_parts(64, 4), (2, 2))],
    ids=["several heads", "keys in parts", "keys in parts, one group"],
)
def test_a_graph_whose_lengths_change(settings, heads):
    tensors = [torch.randn(3000, count, 96, device="cuda", dtype=torch.bfloat16) for count in (*heads, heads[1])]
    starts = torch.tensor([0, 1000, 1000, 3000], device="cuda", dtype=torch.int32)
    plan, graph = plan_of(*tensors, 3, band(9, 0), settings), torch.cuda.CUDAGraph()
    plan(*views(*tensors), starts, starts)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        o, lse = plan(*views(*tensors), starts, starts)
    for lengths in ((1, 2, 40), (2999, 0, 1), (0, 0, 0), (700, 1500, 800)):
        starts.copy_(offsets(lengths))
        graph.replay()
        right, right_lse = plan(*views(*tensors), starts, starts)
        assert torch.equal(o, right) and torch.equal(lse, right_lse)
        tensors[0].normal_()


@pytest.mark.parametrize("settings", [{}, of_several(((4, 1), (128, 64), 4))[1], in_parts(128, 3)],
                         ids=["one head", "several", "keys in parts"])  # fmt: skip
def test_wrong_offsets_leave_other_memory_alone(settings):
    q, k, v = (torch.randn(4096, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (4, 1, 1))
    plan = plan_of(q, k, v, 3, CAUSAL, settings)
    for wrong in ([-5, 100, 40000, 7], [300, 20, 512, 100], [0, 2**31 - 1, 5, 4096], [0, 4096, 0, 4096]):
        bad = torch.tensor(wrong, device="cuda", dtype=torch.int32)
        plan(*views(q, k, v), bad, bad)
    torch.cuda.synchronize()
