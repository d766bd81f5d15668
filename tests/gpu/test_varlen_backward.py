"""Packed sequences in the Hopper backward, fused and split, by the error rule, with NaN in sequences beside those compared."""

from __future__ import annotations

import random

import pytest
import torch

import fa2tune
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.kinds import WARP_SPECIALIZED_ROWS
from fa2tune.calling.schedules import group_parts_schedule
from fa2tune.compiling.registry import variant_named
from fa2tune.launching import group_parts, passes
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import FUSED, SPLIT, STRATEGIES, Problem, Specialization

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="a kernel for compute capability 9.0")

#: Of queries and of keys.
PACKINGS = {
    "equal": tuple((n, n) for n in (1, 0, 63, 64, 65, 127, 128, 129, 1000, 0, 513)),
    "unequal": ((5, 900), (0, 40), (700, 300), (129, 0), (64, 64), (1, 2000), (65, 63)),
    "many": tuple((1 + n % 37, 1 + n % 41) for n in range(300)),
    "one": ((1000, 1000),),
    "the longest last": (*((1 + 5 * n % 60, 1 + 5 * n % 60) for n in range(200)), (0, 0), (0, 70), (2500, 2500)),
}
SPARE = 70  #: rows behind the last sequence
SCALE = 0.11
NAN = float("nan")
#: What differs from the default of 64 and of 128 columns.
TOGETHER = {"ORDER": "together"}
CONCATENATED = {**TOGETHER, "REDUCE": "vector", "BLOCK_M": 64, "num_warps": 8, "EXPONENTIALS_FIRST": False}
FORMS = {
    "apart, by TMA": {**TOGETHER, "REDUCE": "tma"},
    "apart, from registers": {**TOGETHER, "REDUCE": "vector"},
    "a block behind, by TMA": {"ORDER": "behind", "REDUCE": "tma"},
    "a block behind, from registers": {"ORDER": "behind", "REDUCE": "vector"},
    "scores ahead": {"ORDER": "ahead", "REDUCE": "vector", "EXPONENTIALS_FIRST": False},
    "concatenated": CONCATENATED,
    "concatenated, by TMA": {**CONCATENATED, "REDUCE": "tma"},
    "each started early": {"EARLY_START": True},
    "concatenated, each started early": {**CONCATENATED, "EARLY_START": True},
    "apart, by TMA, each started early": {**TOGETHER, "REDUCE": "tma", "EARLY_START": True},
    "longer first": {"LONGER_FIRST": True},
    "concatenated, longer first": {**CONCATENATED, "LONGER_FIRST": True},
    "longer first, each started early": {"LONGER_FIRST": True, "EARLY_START": True},
    "concatenated, longer first, each started early": {**CONCATENATED, "LONGER_FIRST": True, "EARLY_START": True},
    "apart, by TMA, longer first, each started early": {
        **TOGETHER,
        "REDUCE": "tma",
        "LONGER_FIRST": True,
        "EARLY_START": True,
    },
    "prepared overlapped": {"BESIDE": True},
    "prepared overlapped, heads in one band": {"BESIDE": True, "HEADS_PER_WAVE": 32},
    "and finished": {**TOGETHER, "BESIDE": True, "FINISH_BESIDE": True, "REDUCE": "tma"},
    "and finished, from registers": {"BESIDE": True, "FINISH_BESIDE": True, "ORDER": "behind", "REDUCE": "vector"},
    "concatenated, and finished": {**CONCATENATED, "BESIDE": True, "FINISH_BESIDE": True},
}
IN_QUERY_PARTS = {
    "query blocks in parts": {"QUERY_PARTS": True, "EARLY_START": True},
    "apart, by TMA, query blocks in parts": {**TOGETHER, "REDUCE": "tma", "QUERY_PARTS": True, "EARLY_START": True},
    "concatenated, query blocks in parts": {**CONCATENATED, "QUERY_PARTS": True, "EARLY_START": True},
}
LONGER_FIRST = [form for form in FORMS if "longer first" in form]


#: In place of a form: the split kernels, by their default configs.
SPLIT_FORM = "split"


def strategy_of(form):
    return SPLIT if form == SPLIT_FORM else FUSED


def configs_of(spec, form):
    """The config of each kernel in this form, or None: the search space has no such form for these head dims."""
    found = {}
    for kernel in STRATEGIES[strategy_of(form)]:
        variant = variant_named(f"sm90/{kernel}")
        packed = bwd_fused.PACKED if kernel == "bwd_fused" else {}
        found[kernel] = {
            **variant.space.default(spec, 90),
            **packed,
            **FORMS.get(form, {}),
            **IN_QUERY_PARTS.get(form, {}),
        }
        if variant.space.broken(found[kernel], spec, 90):
            return None
    return found


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)


def poison_memory():
    """Memory that the next call gets is full of NaN."""
    sizes = [64 << 20] * 2 + [120 << 10] * 64 + [1 << 10] * 64  # of the allocator's large and small blocks
    waste = [torch.full((size,), NAN, device="cuda") for size in sizes]
    torch.cuda.synchronize()
    del waste


def spans(lengths):
    """(rows of q, rows of k) of each sequence."""
    found, first, begin = [], 0, 0
    for queries, keys in lengths:
        found.append((slice(first, first + queries), slice(begin, begin + keys)))
        first, begin = first + queries, begin + keys
    return found


def gradients(given, o, lse, lengths, mask, form, parts=1):
    """(dq, dk, dv) [1, heads, rows, dim] of packed inputs of that shape."""
    starts = [offsets(side) for side in zip(*lengths, strict=True)]
    extent = Extent(RAGGED, len(lengths), 0)
    tensors = given.q, given.k, given.v
    problem = passes.describe(*tensors, mask, SCALE, extent=extent, o=o, do=given.do)
    strategy, configs = strategy_of(form), configs_of(problem.specialization, form)
    split = {kernel: parts for kernel in configs if kernel in group_parts.MAKE_DK_DV}
    plan = passes.BackwardPlan(problem, given.do, given.dlse, *tensors, o, SCALE, strategy, configs, split)
    poison_memory()
    found = plan(given.do, given.dlse, *tensors, o, lse, *starts)
    torch.cuda.synchronize()
    if strategy == SPLIT:
        again = plan(given.do, given.dlse, *tensors, o, lse, *starts)
        for one, other in zip(found, again, strict=True):  # also of NaN
            assert torch.equal(one.view(torch.int16), other.view(torch.int16)), "not the same bits again"
    return found


def interleaved(tensor):
    """The same numbers in memory as packed calls have them: [rows, heads, dim]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def compared(
    packing, mask=CAUSAL, form="default", *, dtype="bf16", heads=(4, 2), dims=(128, 128), poisoned=(1, 0), groups_in=1
):
    """``poisoned``: (n, r): the sequences whose number is r modulo n are NaN; n = 1: none is. ``groups_in``: parts of each
    query group, or of a tile's query blocks."""
    lengths = PACKINGS[packing]
    every, rest = poisoned
    places = spans(lengths)
    queries, keys = (sum(side) for side in zip(*lengths, strict=True))
    if configs_of(Specialization(dtype, *dims, mask.name, extent=RAGGED), form) is None:
        pytest.skip("no such form")
    asked = Problem(dtype, 1, *heads, queries + SPARE, keys + SPARE, *dims, FULL)
    made = reference.make_inputs(asked, "cuda", with_dlse=True)
    given = reference.Inputs(*(interleaved(t) for t in (made.q, made.k, made.v, made.do)), made.dlse)
    kept = [n for n in range(len(lengths)) if every == 1 or n % every != rest]
    for tensor, side, end in ((given.q, 0, queries), (given.k, 1, keys), (given.v, 1, keys), (given.do, 0, queries)):
        tensor[:, :, end:] = NAN
        for number in set(range(len(lengths))) - set(kept):
            tensor[:, :, places[number][side]] = NAN
    rows = (t[0].transpose(0, 1) for t in (given.q, given.k, given.v))
    starts = [offsets(side) for side in zip(*lengths, strict=True)]
    o, lse = fa2tune.attention_varlen(*rows, *starts, return_lse=True, mask=mask, softmax_scale=SCALE)
    found = gradients(given, o.transpose(0, 1)[None], lse[None], lengths, mask, form, groups_in)
    for name, gradient, end in zip(("dq", "dk", "dv"), found, (queries, keys, keys), strict=True):
        assert not gradient[:, :, end:].any(), f"{name} behind the last sequence"
    got, parts = {"dq": [], "dk": [], "dv": []}, []
    for number in kept:
        of_q, of_k = places[number]
        one = [
            given.q[:, :, of_q],
            given.k[:, :, of_k],
            given.v[:, :, of_k],
            given.do[:, :, of_q],
            given.dlse[:, :, of_q],
        ]
        parts.append(reference.oracle_and_reference(reference.Inputs(*one), mask=mask, softmax_scale=SCALE))
        for (name, all_rows), place in zip(got.items(), (of_q, of_k, of_k), strict=True):
            all_rows.append(found[("dq", "dk", "dv").index(name)][:, :, place])
    right = [{name: torch.cat([part[which][name] for part in parts], 2) for name in got} for which in (0, 1)]
    return verify.compare({name: torch.cat(rows, 2) for name, rows in got.items()}, *right)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_packings(packing, mask, dim):
    compared(packing, mask, dims=(dim, dim))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_forms(form, dim):
    compared("equal", CAUSAL, form, dims=(dim, dim), poisoned=(2, 1))


@pytest.mark.parametrize("packing", ["equal", "unequal", "many"])
@pytest.mark.parametrize("rest", [0, 1])
def test_nan_of_a_neighbour_stays_there(packing, rest):
    compared(packing, FULL, poisoned=(2, rest))
    compared(packing, CAUSAL, "concatenated", poisoned=(2, rest))
    compared(packing, CAUSAL, "concatenated, each started early", poisoned=(2, rest))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("form", LONGER_FIRST)
def test_longer_sequences_first(packing, form):
    compared(packing, CAUSAL, form, poisoned=(3, 1))
    compared(packing, FULL, form, dims=(64, 64), heads=(6, 3))


@pytest.mark.parametrize("mask", [band(128, 0), band(65, 300), Mask("chunked", 200)], ids=str)
@pytest.mark.parametrize("form", LONGER_FIRST)
def test_longer_sequences_first_in_windows_and_chunks(mask, form):
    compared("the longest last", mask, form, poisoned=(2, 1))
    compared("unequal", mask, form, dims=(64, 64), heads=(8, 1))


@pytest.mark.parametrize("heads", [(8, 1), (6, 2), (3, 3)], ids=str)
def test_query_groups(heads):
    compared("unequal", CAUSAL, heads=heads)
    compared("equal", CAUSAL, "concatenated", heads=heads, dims=(64, 64))


@pytest.mark.parametrize(
    "form",
    [
        "default",
        "concatenated",
        "concatenated, each started early",
        "longer first",
        "concatenated, longer first, each started early",
        "prepared overlapped, heads in one band",
        "and finished, from registers",
    ],
)
@pytest.mark.parametrize(("heads", "parts"), [((8, 1), 4), ((8, 2), 2), ((6, 2), 3)], ids=str)
def test_query_groups_in_parts(heads, parts, form):
    compared("unequal", CAUSAL, form, heads=heads, groups_in=parts, poisoned=(3, 0))
    compared("equal", FULL, form, heads=heads, dims=(64, 64), groups_in=parts)
    compared("many", CAUSAL, form, heads=heads, dims=(24, 32), groups_in=parts, poisoned=(3, 0))


@pytest.mark.parametrize("form", IN_QUERY_PARTS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("mask", "dim", "parts"), [(CAUSAL, 64, 2), (FULL, 128, 3), (CAUSAL, 128, 8)], ids=str)
def test_query_blocks_in_parts(packing, form, mask, dim, parts):
    compared(packing, mask, form, heads=(2, 2), dims=(dim, dim), groups_in=parts, poisoned=(3, 1))


def test_few_key_heads_of_long_sequences_are_split_when_called():
    """The public call, which chooses parts and bands by the rows, beside the sequences one by one."""
    lengths = (1500, 2958)
    q, k, v = (
        torch.randn(sum(lengths), heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (32, 4, 4)
    )
    do, starts = torch.randn_like(q), offsets(lengths)
    asked = Problem("bf16", 1, 32, 4, len(q), len(q), 64, 64, CAUSAL, extent=Extent(RAGGED, 2, 4096))
    _, choices = choosing.choose_backward(choosing.Chooser(asked, dispatch.gpu_of(0)), False)
    if not group_parts_schedule.parts(asked, choices, dispatch.gpu_of(0)):
        pytest.skip("not split on this GPU")
    o = fa2tune.attention_varlen(q, k, v, starts, None, max(lengths), max(lengths), causal=True)
    found = torch.autograd.grad(o, (q, k, v), do)
    for rows, _ in spans([(length, length) for length in lengths]):
        views = (t[rows].detach().transpose(0, 1)[None] for t in (q, k, v, do))
        oracle, same = reference.oracle_and_reference(reference.Inputs(*views, None), mask=CAUSAL)
        got = {name: t[rows].transpose(0, 1)[None] for name, t in zip(("dq", "dk", "dv"), found, strict=True)}
        verify.compare(got, {name: oracle[name] for name in got}, {name: same[name] for name in got})


@pytest.mark.parametrize("mask", [band(128, 0), band(65, 300), Mask("chunked", 200)], ids=str)
def test_windows_and_chunks(mask):
    compared("equal", mask, poisoned=(3, 0))
    compared("unequal", mask, dims=(64, 64))


@pytest.mark.parametrize("dims", [(80, 80), (40, 40), (128, 64), (72, 120)], ids=str)
def test_padded_head_dims_and_fp16(dims):
    compared("equal", CAUSAL, dtype="fp16", dims=dims)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_split_packings(packing, mask, dim):
    compared(packing, mask, SPLIT_FORM, dims=(dim, dim), poisoned=(2, 1))


@pytest.mark.parametrize("mask", [band(128, 0), band(65, 300), band(-1, 40), Mask("chunked", 200)], ids=str)
@pytest.mark.parametrize("dim", [64, 256])
def test_split_windows_and_chunks(mask, dim):
    compared("equal", mask, SPLIT_FORM, dims=(dim, dim), poisoned=(3, 0))
    compared("unequal", mask, SPLIT_FORM, dims=(dim, dim))


@pytest.mark.parametrize("dims", [(192, 192), (192, 128), (144, 144), (256, 64), (72, 120)], ids=str)
@pytest.mark.parametrize("heads", [(8, 1), (3, 3)], ids=str)
def test_split_padded_head_dims_and_fp16(dims, heads):
    compared("unequal", CAUSAL, SPLIT_FORM, dtype="fp16", dims=dims, heads=heads, poisoned=(2, 0))


#: Prepared before and finished after, or overlapped; with an order of tiles; or split.
every_kind = pytest.mark.parametrize(
    "form",
    [
        "default",
        "concatenated, and finished",
        "longer first",
        "concatenated, longer first, each started early",
        SPLIT_FORM,
    ],
)


def served_by_hopper(monkeypatch, form):
    """Calls take a Hopper backward, whatever the rows say."""
    chosen = choosing.Chooser.choose
    kinds = dict.fromkeys(STRATEGIES[strategy_of(form)], WARP_SPECIALIZED_ROWS)
    monkeypatch.setattr(dispatch, "BACKWARD_PLANS", {})
    monkeypatch.setattr(choosing.Chooser, "strategy", lambda *asked: (strategy_of(form), kinds))

    def choose(chooser, kernel, *rest):
        if kernel in kinds:
            return choosing.choice_of(kernel, configs_of(chooser.problem.specialization, form)[kernel])
        return chosen(chooser, kernel, *rest)

    monkeypatch.setattr(choosing.Chooser, "choose", choose)


@every_kind
def test_a_cuda_graph_is_replayed_with_other_lengths(monkeypatch, form):
    served_by_hopper(monkeypatch, form)
    total, sequences = 4096, 16
    q, k, v = (torch.randn(total, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    do = torch.randn_like(q)
    starts = offsets([total // sequences] * sequences)

    def run():
        o = fa2tune.attention_varlen(q, k, v, starts, causal=True)
        return torch.autograd.grad(o, (q, k, v), do)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    draw = random.Random(0)
    for end in (total, total - 500, 0):
        cuts = sorted(draw.choices(range(end + 1), k=sequences - 1))
        starts.copy_(torch.tensor([0, *cuts, end], dtype=torch.int32))
        graph.replay()
        (dq, *others), (eager_dq, *eager) = captured, run()
        assert all(torch.equal(*pair) for pair in zip(others, eager, strict=True))
        # fused, the order of dQ's sums is not fixed
        assert (dq - eager_dq).abs().max() <= (0 if form == SPLIT_FORM else 2**-6 * eager_dq.abs().max())


@every_kind
def test_nothing_waits_for_the_gpu(monkeypatch, form):
    served_by_hopper(monkeypatch, form)
    q, k, v = (torch.randn(512, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    starts = offsets([200, 312])
    fa2tune.attention_varlen(q, k, v, starts).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fa2tune.attention_varlen(q, k, v, starts).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_kind
def test_wrong_offsets_leave_other_memory_alone(monkeypatch, form):
    """They cannot be checked without waiting. Nothing outside the tensors is read or written, and no warp waits for ever."""
    served_by_hopper(monkeypatch, form)
    q, k, v = (torch.randn(512, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    for wrong in ([-5, 100, 40000], [300, 20, 512], [0, 2**31 - 1, 5], [512, 0, 512]):
        fa2tune.attention_varlen(q, k, v, torch.tensor(wrong, device="cuda", dtype=torch.int32)).sum().backward()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_deterministic_call_is_split(dim):
    q, k, v = (torch.randn(2000, 4, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    starts = offsets([700, 1300])
    o = fa2tune.attention_varlen(q, k, v, starts, causal=True, deterministic=True)
    one, other = (torch.autograd.grad(o, (q, k, v), torch.ones_like(o), retain_graph=True) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    asked = Problem("bf16", 1, 4, 4, 2000, 2000, dim, dim, CAUSAL, extent=Extent(RAGGED, 2, 0))
    strategy, choices = choosing.choose_backward(choosing.Chooser(asked, dispatch.gpu_of(0)), True)
    assert strategy == SPLIT
    assert choices["bwd_dkdv"].variant.name == "sm90/bwd_dkdv"
    assert choices["bwd_dq"].variant.name == "sm90/bwd_dq" or dim == 64  # where rows have the portable one ahead
