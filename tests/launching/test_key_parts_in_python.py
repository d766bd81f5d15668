"""The Hopper forward whose keys are split among programs, and the kernel that puts the parts together, run by Python
(tests/kernels_in_python.py) beside float64 attention. Workspaces and results are poisoned with NaN."""

from __future__ import annotations

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

from fa2tune.kernels.lib import hopper_key_parts as key_parts
from fa2tune.launching import key_splits, passes
from fa2tune.search_spaces.sm90 import fwd_split
from fa2tune.spec.extent import RAGGED, WHOLE, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band

WIDE = {"NUMBERED": False, "PINGPONG": False, "BLOCK_N": 64, "STAGES": 2}


class SplitGpu(InPlaceGpu):
    """For plans of key_splits as well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        monkeypatch.setattr(key_splits, "placed", passes.placed)  # which keeps what it placed

    def forward(
        self,
        call: Call,
        given: dict[str, torch.Tensor],
        settings: dict[str, Any],
        scale: float = SCALE,
        wrong: list[int] | None = None,
    ) -> Any:
        """(o, lse, o_parts, stats); ``settings``: of a config, BLOCK_M and SPLITS among them; ``wrong``: offsets of both sides
        that are against the rules."""
        q, k, v = (given[name] for name in "qkv")
        extent = Extent(RAGGED, len(call.lengths)) if call.packed else WHOLE
        problem = passes.describe(q, k, v, call.mask, scale, call.score, extent)
        config = fwd_split.config_of(problem.specialization, settings["BLOCK_M"], settings["SPLITS"]) | settings
        assert all(config[name] in values for name, values in fwd_split.SPACE.dimensions.items())
        assert config["BLOCK_M"] in key_splits.split_tiles(problem, 90)
        tensors = {"q": q, "k": k, "v": v, "o": unset(q, call.dims[1]), "lse": torch.full(q.shape[:3], torch.nan)}
        tensors |= {
            name: one if wrong is None else torch.tensor(wrong, dtype=torch.int32)
            for name, one in offsets(call).items()
        }
        plan = type("Plan", (), {})()
        plan.chain, _ = key_splits.bound(problem, tensors, scale, config, 0)
        behind = max(
            (-(-one.end // passes.ALIGNMENT) * passes.ALIGNMENT for one in self.placed[-1].values()), default=0
        )
        made = key_splits.sums(problem, config["SPLITS"], behind)
        self.placed.append(dict(zip(("o_parts", "stats"), made, strict=True)))
        addresses = [self.place_values(name, tensor) for name, tensor in tensors.items()]
        block = self.place_workspaces()
        self.run(plan, [*addresses, block])
        for buffer in self.buffers.values():
            if buffer.name in ("o", "lse") and wrong is None:
                assert (buffer.written == 1).all(), f"each word of {buffer.name} is written once"
        parts = [self.buffers[block + one.start].words.reshape(one.shape) for one in self.placed[-1].values()]
        return tensors["o"], tensors["lse"], *parts


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SplitGpu:
    return SplitGpu(monkeypatch)


CALLS = [
    # lengths, heads, head dims, mask, batch: settings
    (Call(((70, 500),), (4, 2), (128, 128), CAUSAL), {"SPLITS": 2}),
    (Call(((130, 700),), (2, 1), (128, 128), FULL, batch=2), {"SPLITS": 3}),
    (Call(((200, 530),), (3, 3), (64, 64), CAUSAL), {"SPLITS": 4, **WIDE}),
    (Call(((200, 530),), (2, 1), (64, 64), band(150, 10)), {"SPLITS": 3, "BLOCK_N": 64}),
    (Call(((200, 530),), (2, 1), (64, 64), band(-1, 20)), {"SPLITS": 5, "BLOCK_N": 64}),
    (Call(((150, 400),), (1, 1), (128, 128), Mask("chunked", 192)), {"SPLITS": 3, "BLOCK_N": 64}),
    (Call(((140, 300),), (2, 1), (64, 64), Mask("causal_top_left")), {"SPLITS": 2, "BLOCK_N": 64}),
    (Call(((260, 90),), (2, 2), (64, 64), CAUSAL), {"SPLITS": 3, "BLOCK_N": 64}),  # rows without a key
    (Call(((65, 100),), (2, 1), (128, 128), FULL), {"SPLITS": 7}),  # more parts than blocks
    (Call(((129, 260),), (2, 1), (128, 128), CAUSAL), {"SPLITS": 40}),
    (Call(((84, 330),), (2, 1), (200, 200), FULL), {"SPLITS": 2}),  # a head dim that is no tile's
    (Call(((70, 330),), (2, 1), (96, 96), CAUSAL), {"SPLITS": 2}),  # two parts of columns
    (Call(((70, 330),), (1, 1), (192, 128), CAUSAL), {"SPLITS": 3}),
    (Call(((70, 200),), (1, 1), (256, 256), CAUSAL), {"SPLITS": 2}),
    (Call(((70, 300),), (4, 1), (128, 128), CAUSAL), {"SPLITS": 3, "BLOCK_M": 64}),
    (Call(((100, 300),), (2, 1), (64, 64), band(60, 0)), {"SPLITS": 2, "BLOCK_M": 64}),
    (Call(((70, 300),), (2, 1), (72, 40), CAUSAL), {"SPLITS": 2, "BLOCK_M": 64}),
]


@pytest.mark.parametrize(("call", "settings"), CALLS, ids=str)
def test_parts_of_keys(gpu: SplitGpu, call: Call, settings: dict[str, Any]) -> None:
    given = inputs(call, 0)
    o, lse, *parts = gpu.forward(call, given, {"BLOCK_M": 128, **settings})
    compare({"o": o, "lse": lse}, wanted(call, given))
    assert all(not torch.from_numpy(part).isnan().any() for part in parts), "every word of the workspaces is written"


NARROW = {"BLOCK_N": 64, "SPLITS": 2}
LONG = ((3, 3), (300, 300), (40, 9), (0, 0), (20, 500))
PACKED = [
    # of PACKING some sequences have no keys, others no queries, and all but two have fewer blocks than parts
    (PACKING, (4, 2), (64, 64), CAUSAL, {"SPLITS": 4}),
    (PACKING, (2, 1), (64, 64), FULL, {**NARROW, "SPLITS": 3}),
    (PACKING, (2, 2), (128, 128), FULL, {**NARROW, "BLOCK_M": 64}),
    (LONG, (2, 1), (64, 64), CAUSAL, {**NARROW, "SPLITS": 3}),
    (LONG, (2, 1), (64, 64), CAUSAL, {**NARROW, "BLOCK_M": 64}),
    (LONG, (3, 3), (64, 64), FULL, {**NARROW, "SPLITS": 4}),
    (LONG, (2, 1), (128, 128), CAUSAL, {"SPLITS": 3}),
    (LONG, (2, 1), (64, 64), band(150, 10), NARROW),
    (LONG, (2, 1), (64, 64), band(7, 0), {**NARROW, "SPLITS": 4}),
    (LONG, (1, 1), (64, 64), band(-1, 20), {**NARROW, "SPLITS": 3, **WIDE}),
    (PACKING, (4, 1), (96, 96), band(20, 3), NARROW),
    (LONG, (1, 1), (128, 128), Mask("chunked", 192), {**NARROW, "SPLITS": 3}),
    (PACKING, (2, 1), (64, 64), Mask("causal_top_left"), NARROW),
    (LONG, (2, 1), (200, 200), FULL, {"SPLITS": 2}),
    (PACKING, (1, 1), (192, 128), CAUSAL, {"SPLITS": 3}),
    (LONG, (1, 1), (256, 256), CAUSAL, {"SPLITS": 2}),
    (LONG, (2, 1), (72, 40), CAUSAL, {"SPLITS": 2, "BLOCK_M": 64}),
]


@pytest.mark.parametrize("packing", PACKED, ids=lambda one: f"{one[1]} x {one[2]} {one[3]}")
def test_packed_sequences(gpu: SplitGpu, packing: Any) -> None:
    """NaN lies behind the last sequence. Rows there, and those that see no key, are 0 and -inf."""
    lengths, heads, dims, mask, settings = packing
    call = Call(lengths, heads, dims, mask, packed=True)
    given = inputs(call, 0)
    o, lse, *parts = gpu.forward(call, given, {"BLOCK_M": 128, **settings})
    compare({"o": o, "lse": lse}, wanted(call, given))
    assert all(not torch.from_numpy(part).isnan().any() for part in parts), "every word of the workspaces is written"


@pytest.mark.parametrize("mask", [CAUSAL, FULL, band(9, 2)], ids=str)
def test_what_is_packed_with_a_sequence_changes_no_bit_of_it(monkeypatch: pytest.MonkeyPatch, mask: Mask) -> None:
    call = Call(PACKING, (4, 1), (64, 64), mask, packed=True)
    check_bits_beside(call, lambda given: SplitGpu(monkeypatch).forward(call, given, {"BLOCK_M": 128, **NARROW})[:2])


@pytest.mark.parametrize("wrong", [[-5, 100, 40000, 7], [300, 20, 330, 100], [0, 2**31 - 1, 5, 300], [0, 330, 0, 330]])
def test_wrong_offsets_touch_no_other_memory(gpu: SplitGpu, wrong: list[int]) -> None:
    """Results mean nothing; what lies outside of the tensors is a fault."""
    call = Call(((100, 100), (100, 100), (130, 130)), (2, 1), (64, 64), CAUSAL, packed=True)
    gpu.forward(call, inputs(call, 0), {"BLOCK_M": 128, **NARROW, "SPLITS": 3}, wrong=wrong)


@pytest.mark.parametrize("fault", ["part_of_blocks", "packed_place"])
def test_a_fault_of_packed_parts_is_found(gpu: SplitGpu, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """All parts have all keys; sums go where another sequence's do."""
    known = kernels_in_python._NAMES
    changed = {
        "part_of_blocks": lambda below, blocks, part, parts, by: (below, blocks, blocks > 0),
        "packed_place": lambda head, start, end_q, rows, sequence, call, parts: key_parts.Place(
            0, start, 0, head // parts // call.group, head // parts % call.group, head % parts, sequence
        ),
    }
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**known, fault: changed[fault]})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    call = Call(LONG, (2, 1), (64, 64), FULL, packed=True)
    given = inputs(call, 0)
    with pytest.raises(AssertionError, match=r"'lse'|'o'"):
        o, lse, *_ = gpu.forward(call, given, {"BLOCK_M": 128, **NARROW})
        compare({"o": o, "lse": lse}, wanted(call, given))


def test_a_negative_scale(gpu: SplitGpu) -> None:
    call = Call(((70, 300),), (2, 1), (64, 64), CAUSAL)
    given = inputs(call, 0)
    o, lse, *_ = gpu.forward(call, given, {"BLOCK_M": 128, "SPLITS": 2}, -SCALE)
    compare({"o": o, "lse": lse}, wanted(call, {**given, "q": -given["q"]}))


def test_rows_of_infinite_scores_are_nan_as_softmax_has_them(gpu: SplitGpu) -> None:
    call = Call(((70, 300),), (1, 1), (64, 64), FULL)
    given = inputs(call, 0)
    given["q"][:, :, 3, 0], given["k"][..., 0] = -torch.inf, 1.0
    o, lse, *_ = gpu.forward(call, given, {"BLOCK_M": 128, "SPLITS": 2})
    assert o[:, :, 3].isnan().all() and not o[:, :, :3].isnan().any() and not o[:, :, 4:].isnan().any()
    assert (lse[:, :, 3] == -torch.inf).all()


def test_an_infinite_value_that_no_row_of_a_group_sees_spoils_none(gpu: SplitGpu) -> None:
    """Blocks that only the second group sees are the first one's whole part."""
    call = Call(((128, 256),), (1, 1), (64, 64), CAUSAL)
    given = inputs(call, 0)
    right = wanted(call, given)
    given["v"][:, :, 192:] = torch.inf  # seen by queries from 64 on
    o, *_ = gpu.forward(call, given, {"BLOCK_M": 128, "BLOCK_N": 64, "SPLITS": 4})
    compare({"o": o[:, :, :64]}, {"o": right["o"][:, :, :64]})


def test_parts_are_even_and_hold_every_key_block_once(gpu: SplitGpu) -> None:
    """Sums of P over the parts, each against its own maximum, are those of the whole row."""
    call = Call(((70, 640),), (2, 1), (64, 64), CAUSAL)
    given = inputs(call, 0)
    _, lse, _, stats = gpu.forward(call, given, {"BLOCK_M": 128, "BLOCK_N": 64, "SPLITS": 5})
    peaks, totals = torch.from_numpy(stats).double()  # [parts, rows], rows are (query, query head)
    whole = (peaks.exp2() * totals).sum(0).log().view(70, 2).T
    assert torch.allclose(whole, lse[0].double(), atol=1e-3)
    assert (totals > 0).all()


@pytest.mark.parametrize(
    ("name", "instead", "settings"),
    [
        ("await_room", lambda *_: None, {"NUMBERED": False}),
        ("pass_entries", lambda done, count, *_: done + count, {}),
    ],
)
def test_a_fault_is_found(
    gpu: SplitGpu, monkeypatch: pytest.MonkeyPatch, name: str, instead: Any, settings: dict[str, Any]
) -> None:
    """K and V that overwrite what is still read; ring entries that a group does not release."""
    call = Call(((128, 900),), (1, 1), (64, 64), CAUSAL)
    settings = {"BLOCK_M": 128, "BLOCK_N": 64, "SPLITS": 2, "STAGES": 2, **settings}
    changed = {name: instead, "warpgroup_mma_wait": _late} if name == "await_room" else {name: instead}
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, **changed})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 2)
    given = inputs(call, 0)
    with pytest.raises(AssertionError, match=r"'o', |deadlock|mbarrier|barrier"):
        o, lse, *_ = gpu.forward(call, given, settings)
        compare({"o": o, "lse": lse}, wanted(call, given))
