"""The Hopper forward whose tiles have the query heads of a key head as rows, run by Python (tests/kernels_in_python.py) beside
float64 attention. Results are poisoned with NaN, as is what lies around q, k and v."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import kernels_in_python
import pytest
import torch
from gpu_in_python import InPlaceGpu
from test_computed_in_python import (
    PACKING,
    SCALE,
    Call,
    _late,
    check_bits_beside,
    compare,
    inputs,
    offsets,
    unset,
    wanted,
)

from fa2tune.compiling.compiler import CompileError
from fa2tune.launching import key_splits, launch, passes
from fa2tune.search_spaces.sm90 import fwd_grouped
from fa2tune.spec.extent import RAGGED, WHOLE, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem

SPARE = 8  #: elements of NaN behind each row, and rows of it around each tensor


def within_nan(tensor: torch.Tensor, order: str) -> torch.Tensor:
    """The same [B, H, S, D] in memory of ``order`` "bhsd" or "bshd", as a part of a larger tensor of NaN."""
    batch, heads, rows, dim = tensor.shape
    if order == "bhsd":
        whole = torch.full((batch, heads + 1, rows + 3, dim + SPARE), torch.nan, dtype=tensor.dtype)
        view = whole[:, :heads, :rows, :dim]
    else:
        whole = torch.full((batch, rows + 3, heads + 1, dim + SPARE), torch.nan, dtype=tensor.dtype)
        view = whole[:, :rows, :heads, :dim].transpose(1, 2)
    return view.copy_(tensor)


class GroupedGpu(InPlaceGpu):
    """For plans of key_splits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        monkeypatch.setattr(key_splits, "placed", passes.placed)  # which keeps what it placed

    def forward(
        self,
        call: Call,
        given: dict[str, torch.Tensor],
        settings: dict[str, Any],
        order: str = "bhsd",
        scale: float = SCALE,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, lse); ``settings``: of a config, BLOCK_M, BLOCK_N and MEMBERS among them."""
        q, k, v = (within_nan(given[name], order) for name in "qkv")
        extent = Extent(RAGGED, len(call.lengths)) if call.packed else WHOLE
        problem = passes.describe(q, k, v, call.mask, scale, call.score, extent)
        tile = settings["BLOCK_M"], settings["BLOCK_N"]
        config = {**fwd_grouped.config_of(problem.specialization, *tile, settings["MEMBERS"]), **settings}
        assert all(config[name] in values for name, values in fwd_grouped.SPACE.dimensions.items())
        assert tile in key_splits.grouped_tiles(problem, 90) and fwd_grouped.fits(problem.specialization, config)
        tensors = {"q": q, "k": k, "v": v, "o": unset(q, call.dims[1]), "lse": torch.full(q.shape[:3], torch.nan)}
        tensors |= offsets(call)
        plan = type("Plan", (), {})()
        plan.chain, block = key_splits.bound(problem, tensors, scale, config, 0)
        assert call.packed or not block, "no memory beside the results"
        addresses = [self.place_values(name, tensor) for name, tensor in tensors.items()]
        self.run(plan, [*addresses, *([self.place_workspaces()] if block else [])])
        for base, buffer in self.buffers.items():
            if buffer.name in ("o", "lse"):
                assert (buffer.written == 1).all(), f"each word of {buffer.name} at {base:#x} is written once"
        return tensors["o"], tensors["lse"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GroupedGpu:
    return GroupedGpu(monkeypatch)


SMALL = {"BLOCK_M": 64, "BLOCK_N": 64}
TWO = {"BLOCK_M": 128, "BLOCK_N": 64}
WIDE = {"BLOCK_M": 128, "BLOCK_N": 128}
CALLS = [
    # lengths, heads, head dims, mask, batch: settings
    (Call(((131, 131),), (8, 2), (64, 64), CAUSAL), {**TWO, "MEMBERS": 4}),
    (Call(((131, 131),), (8, 2), (64, 64), CAUSAL, batch=2), {**SMALL, "MEMBERS": 4}),
    (Call(((37, 150),), (4, 2), (32, 32), FULL), {**TWO, "MEMBERS": 2}),
    (Call(((37, 150),), (4, 2), (32, 32), CAUSAL), {**SMALL, "MEMBERS": 2}),
    (Call(((50, 170),), (6, 2), (56, 56), FULL), {**SMALL, "MEMBERS": 4}),  # a member of four is not there
    (Call(((50, 170),), (3, 1), (56, 56), band(40, 10)), {**TWO, "MEMBERS": 2}),  # three in two times two
    (Call(((41, 200),), (7, 1), (128, 128), CAUSAL), {**WIDE, "MEMBERS": 8}),
    (Call(((41, 200),), (7, 1), (128, 128), FULL), {**SMALL, "MEMBERS": 4}),
    (Call(((136, 136),), (13, 1), (56, 56), FULL), {**WIDE, "MEMBERS": 16}),
    (Call(((30, 200),), (13, 1), (64, 64), CAUSAL), {**SMALL, "MEMBERS": 16}),
    (Call(((20, 100),), (32, 2), (64, 64), CAUSAL), {**TWO, "MEMBERS": 16}),
    (Call(((20, 100),), (16, 1), (64, 64), band(30, 0)), {**SMALL, "MEMBERS": 32}),  # half of the members are not there
    (Call(((9, 80),), (65, 1), (64, 64), CAUSAL), {**TWO, "MEMBERS": 64}),  # one of the second 64 is
    (Call(((9, 80),), (65, 1), (32, 32), FULL), {**SMALL, "MEMBERS": 64}),
    (Call(((40, 150),), (4, 2), (160, 160), CAUSAL), {**TWO, "MEMBERS": 2}),  # two parts of columns
    (Call(((40, 150),), (4, 1), (160, 160), FULL), {**SMALL, "MEMBERS": 4}),
    (Call(((40, 150),), (4, 1), (96, 96), band(60, 5)), {**SMALL, "MEMBERS": 4}),
    (Call(((40, 150),), (4, 2), (256, 256), CAUSAL), {**TWO, "MEMBERS": 2}),
    (Call(((40, 150),), (2, 1), (192, 128), CAUSAL), {**TWO, "MEMBERS": 2}),
    (Call(((40, 150),), (4, 1), (72, 40), CAUSAL), {**SMALL, "MEMBERS": 4}),
    (Call(((150, 60),), (4, 2), (64, 64), CAUSAL), {**TWO, "MEMBERS": 2}),  # queries without a key
    (Call(((150, 60),), (3, 1), (64, 64), band(20, 3)), {**SMALL, "MEMBERS": 4}),
    (Call(((150, 60),), (4, 2), (64, 64), FULL), {**TWO, "MEMBERS": 4}),
    (Call(((60, 600),), (4, 2), (64, 64), band(150, 20)), {**TWO, "MEMBERS": 2}),  # clear blocks between masked ones
    (Call(((60, 400),), (4, 2), (64, 64), band(-1, 20)), {**TWO, "MEMBERS": 4}),
    (Call(((100, 300),), (4, 2), (128, 128), Mask("chunked", 96)), {**SMALL, "MEMBERS": 4}),
    (Call(((100, 130),), (4, 2), (64, 64), Mask("causal_top_left")), {**SMALL, "MEMBERS": 2}),
    (Call(((1, 130),), (8, 2), (64, 64), CAUSAL), {**SMALL, "MEMBERS": 4}),
]


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize(("call", "settings"), CALLS, ids=str)
def test_tiles_of_several_heads(gpu: GroupedGpu, call: Call, settings: dict[str, Any], order: str) -> None:
    given = inputs(call, 0)
    o, lse = gpu.forward(call, given, settings, order)
    compare({"o": o, "lse": lse}, wanted(call, given))


SHORT = tuple((1 + 7 * n % 40, 1 + 7 * n % 40) for n in range(9))
PACKED = [
    # of PACKING some sequences have no keys, others no queries
    (PACKING, (8, 2), (64, 64), CAUSAL, {**TWO, "MEMBERS": 4}),
    (PACKING, (8, 2), (64, 64), FULL, {**SMALL, "MEMBERS": 4}),
    (SHORT, (4, 2), (128, 128), CAUSAL, {**TWO, "MEMBERS": 2}),
    (SHORT, (4, 1), (96, 96), band(7, 0), {**SMALL, "MEMBERS": 4}),
    (PACKING, (4, 1), (96, 96), band(7, 0), {**TWO, "MEMBERS": 4}),
    (PACKING, (3, 1), (64, 64), band(20, 3), {**SMALL, "MEMBERS": 4}),  # a member of four is not there
    (PACKING, (10, 2), (56, 56), band(-1, 20), {**TWO, "MEMBERS": 2}),  # five in three times two
    (PACKING, (6, 2), (64, 64), Mask("chunked", 64), {**WIDE, "MEMBERS": 4}),
    (PACKING, (6, 2), (64, 64), Mask("causal_top_left"), {**SMALL, "MEMBERS": 2}),
    (SHORT, (16, 1), (128, 128), FULL, {**WIDE, "MEMBERS": 16}),
    (SHORT, (13, 1), (160, 160), CAUSAL, {**TWO, "MEMBERS": 8}),
    (PACKING, (4, 2), (256, 256), CAUSAL, {**TWO, "MEMBERS": 2}),
    (PACKING, (2, 1), (192, 128), CAUSAL, {**TWO, "MEMBERS": 2}),
    (((400, 400), (3, 300)), (4, 2), (72, 40), band(150, 20), {**SMALL, "MEMBERS": 2}),
]


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("packing", PACKED, ids=lambda one: f"{one[1]} x {one[2]} {one[3]}")
def test_packed_sequences(gpu: GroupedGpu, packing: Any, order: str) -> None:
    """NaN lies behind the last sequence, between rows and between heads."""
    lengths, heads, dims, mask, settings = packing
    call = Call(lengths, heads, dims, mask, packed=True)
    given = inputs(call, 0)
    o, lse = gpu.forward(call, given, settings, order)
    compare({"o": o, "lse": lse}, wanted(call, given))


@pytest.mark.parametrize("forms", [{"PINGPONG": False}, {"NUMBERED": True}, {"O_THROUGH": "q"}, {"STAGES": 2}])
def test_other_forms_of_packed_sequences(gpu: GroupedGpu, forms: dict[str, Any]) -> None:
    call = Call(PACKING, (4, 1), (64, 64), CAUSAL, packed=True)
    given = inputs(call, 0)
    o, lse = gpu.forward(call, given, {**TWO, "MEMBERS": 4, **forms})
    compare({"o": o, "lse": lse}, wanted(call, given))


@pytest.mark.parametrize("mask", [CAUSAL, FULL, band(9, 2)], ids=str)
def test_what_is_packed_with_a_sequence_changes_no_bit_of_it(monkeypatch: pytest.MonkeyPatch, mask: Mask) -> None:
    call = Call(PACKING, (4, 1), (64, 64), mask, packed=True)
    check_bits_beside(call, lambda given: GroupedGpu(monkeypatch).forward(call, given, {**TWO, "MEMBERS": 4}, "bshd"))


@pytest.mark.parametrize("members", fwd_grouped.MEMBERS)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, band(25, 4)], ids=str)
def test_any_number_of_members(gpu: GroupedGpu, members: int, mask: Mask) -> None:
    call = Call(((23, 90),), (10, 2), (64, 64), mask, batch=2)
    given = inputs(call, 1)
    o, lse = gpu.forward(call, given, {**TWO, "MEMBERS": members})
    compare({"o": o, "lse": lse}, wanted(call, given))


@pytest.mark.parametrize(
    "forms", [{"PINGPONG": False}, {"NUMBERED": False}, {"O_THROUGH": "q"}, {"Q_IN_REGISTERS": True}]
)
def test_other_forms(gpu: GroupedGpu, forms: dict[str, Any]) -> None:
    call = Call(((70, 260),), (8, 2), (64, 64), CAUSAL)
    given = inputs(call, 0)
    o, lse = gpu.forward(call, given, {**TWO, "MEMBERS": 4, **forms})
    compare({"o": o, "lse": lse}, wanted(call, given))


def test_a_negative_scale(gpu: GroupedGpu) -> None:
    call = Call(((30, 100),), (4, 2), (64, 64), CAUSAL)
    given = inputs(call, 0)
    o, lse = gpu.forward(call, given, {**TWO, "MEMBERS": 2}, scale=-SCALE)
    compare({"o": o, "lse": lse}, wanted(call, {**given, "q": -given["q"]}))


def test_rows_of_infinite_scores_are_nan_as_softmax_has_them(gpu: GroupedGpu) -> None:
    call = Call(((30, 100),), (4, 1), (64, 64), FULL)
    given = inputs(call, 0)
    given["q"][:, 1, 3, 0], given["k"][..., 0] = -torch.inf, 1.0
    o, lse = gpu.forward(call, given, {**TWO, "MEMBERS": 4})
    assert o[:, 1, 3].isnan().all() and lse[0, 1, 3] == -torch.inf
    o[:, 1, 3] = 0
    assert not o.isnan().any(), "no other query, and no other head"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("await_room", lambda *_: None),
        ("pass_entries", lambda done, count, *_: done + count),
        ("members_of", lambda head, call, members: None),
    ],
)
def test_a_fault_is_found(gpu: GroupedGpu, monkeypatch: pytest.MonkeyPatch, name: str, instead: Any) -> None:
    """K and V that overwrite what is still read; ring entries that a group does not release; members that are another's."""
    call = Call(((128, 900),), (4, 1), (64, 64), CAUSAL)
    settings = {**TWO, "MEMBERS": 2, "STAGES": 2, "NUMBERED": False}
    changed = {name: instead, "warpgroup_mma_wait": _late} if name == "await_room" else {name: instead}
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, **changed})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 2)
    given = inputs(call, 0)
    with pytest.raises((AssertionError, AttributeError), match=r"'o', |deadlock|mbarrier|barrier|NoneType"):
        o, lse = gpu.forward(call, given, settings)
        compare({"o": o, "lse": lse}, wanted(call, given))


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
def test_descriptors_see_heads_by_member(order: str) -> None:
    """Any strides of queries and heads."""
    q = within_nan(torch.zeros(2, 6, 5, 64, dtype=torch.float16), order)
    sizes, steps = launch._by_member(q.shape, [*launch.strides_of(q), 1], 3)
    seen = torch.as_strided(q, sizes, steps)
    assert list(seen.shape) == [2, 2, 5, 3, 64]
    assert seen[1, 1, 4, 2].data_ptr() == q[1, 5, 4].data_ptr()


def test_rows_too_far_apart_for_a_coordinate_are_refused(gpu: GroupedGpu) -> None:
    """Another kernel serves then."""
    k = torch.empty(1, 1, 20000, 64, dtype=torch.float16, device="meta")
    for step, refused in ((1 << 19, False), (1 << 21, True)):
        q = torch.empty_strided((1, 4, 20000, 64), (64, 64, step, 1), dtype=torch.float16, device="meta")
        problem = passes.describe(q, k, k, CAUSAL, SCALE, extent=Extent(RAGGED, 3))
        config = fwd_grouped.config_of(problem.specialization, 64, 64, 4)
        o, lse = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty(1, 4, 20000, device="meta")
        tensors = {"q": q, "k": k, "v": k, "o": o, "lse": lse, **passes.meta_offsets(problem.extent)}
        with pytest.raises(CompileError, match="too far apart") if refused else nullcontext():
            key_splits.bound(problem, tensors, SCALE, config, 0)


def test_what_the_kernel_takes() -> None:
    problem = Problem("bf16", 1, 8, 2, 100, 100, 64, 64, CAUSAL)
    assert key_splits.grouped_tiles(problem, 90) == ((64, 64), (64, 128), (128, 64), (128, 128))
    assert key_splits.grouped_tiles(problem, 80) == ()
    assert key_splits.grouped_tiles(Problem("bf16", 1, 8, 8, 100, 100, 64, 64, CAUSAL), 90) == ()
    assert key_splits.grouped_tiles(Problem("fp32", 1, 8, 2, 100, 100, 64, 64, CAUSAL), 90) == ()
    assert key_splits.grouped_tiles(Problem("bf16", 1, 8, 2, 100, 100, 64, 64, CAUSAL, tma=False), 90) == ()
    with pytest.raises(ValueError, match="rows, keys: got 64, 64 for head dims 256 and 256"):
        fwd_grouped.config_of(Problem("bf16", 1, 8, 2, 100, 100, 256, 256, FULL).specialization, 64, 64, 4)
