"""The Hopper forward whose programs have equal shares of all key blocks, and the kernel that puts parts together, run by Python
(tests/kernels_in_python.py) beside float64 attention. Workspaces and results are poisoned with NaN."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kernels_in_python
import numpy as np
import pytest
import torch
from gpu_in_python import InPlaceGpu
from test_computed_in_python import SCALE, Call, compare, inputs, unset, wanted

from fa2tune.kernels.lib import hopper_shares
from fa2tune.launching import key_splits, passes
from fa2tune.search_spaces.sm90 import fwd_shares
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Config, Problem

BLOCK = {"BLOCK_N": 64, "STAGES": 2}


class SharesGpu(InPlaceGpu):
    """For plans of key_splits as well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        monkeypatch.setattr(key_splits, "placed", passes.placed)  # which keeps what it placed

    def forward(self, call: Call, given: dict[str, torch.Tensor], settings: Config, scale: float = SCALE) -> Any:
        """(o, lse, o_parts, stats); ``settings``: SHARES and ROUNDS, and others of a config."""
        problem = posed(call, given, scale)
        config = completed(problem, settings)
        tensors = {**given, "o": unset(given["q"], call.dims[1]), "lse": torch.full(given["q"].shape[:3], torch.nan)}
        tensors = {name: tensors[name] for name in ("q", "k", "v", "o", "lse")}
        plan = type("Plan", (), {})()
        plan.chain, _ = key_splits.bound(problem, tensors, scale, config, 0)
        addresses = [self.place_values(name, tensor) for name, tensor in tensors.items()]
        block = self.place_workspaces()
        self.run(plan, [*addresses, block])
        for buffer in self.buffers.values():
            if buffer.name in ("o", "lse"):
                assert (buffer.written == 1).all(), f"each word of {buffer.name} is written once"
        parts = [self.buffers[block + one.start].words.reshape(one.shape) for one in self.placed[-1].values()]
        return tensors["o"], tensors["lse"], *parts


def posed(call: Call, given: dict[str, torch.Tensor], scale: float = SCALE) -> Problem:
    return passes.describe(given["q"], given["k"], given["v"], call.mask, scale)


def completed(problem: Problem, settings: Config) -> Config:
    config = fwd_shares.config_of(problem.specialization, settings["SHARES"], settings.get("ROUNDS", 0)) | settings
    assert all(config[name] in values for name, values in fwd_shares.SPACE.dimensions.items())
    return config


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SharesGpu:
    return SharesGpu(monkeypatch)


CALLS = [
    # lengths, heads, head dims, mask, batch: settings
    (Call(((300, 300),), (2, 1), (64, 64), FULL), {"SHARES": 4, **BLOCK}),
    (Call(((300, 300),), (2, 1), (64, 64), FULL), {"SHARES": 4, "ROUNDS": 1, **BLOCK}),
    (Call(((300, 700),), (4, 2), (128, 128), FULL, batch=2), {"SHARES": 7, "ROUNDS": 3}),
    (Call(((256, 300),), (2, 2), (64, 64), FULL), {"SHARES": 2, "ROUNDS": 2, **BLOCK}),  # nothing is left
    (Call(((70, 900),), (1, 1), (64, 64), FULL), {"SHARES": 5, **BLOCK}),  # one tile, a part for each program
    (Call(((70, 200),), (2, 1), (64, 64), FULL), {"SHARES": 8, **BLOCK}),  # a block for each program
    (Call(((500, 500),), (2, 1), (64, 64), CAUSAL), {"SHARES": 3, **BLOCK}),
    (Call(((500, 500),), (1, 1), (64, 64), CAUSAL), {"SHARES": 7, **BLOCK}),
    (Call(((390, 801),), (3, 1), (64, 64), CAUSAL, batch=2), {"SHARES": 11, **BLOCK}),
    (Call(((257, 330),), (2, 1), (64, 64), CAUSAL), {"SHARES": 5}),  # blocks of 128 keys
    (Call(((129, 130),), (2, 1), (128, 128), CAUSAL), {"SHARES": 3}),
    (Call(((300, 330),), (2, 1), (96, 96), CAUSAL), {"SHARES": 4}),  # two parts of columns
    (Call(((200, 330),), (1, 1), (192, 128), CAUSAL), {"SHARES": 3}),
    (Call(((300, 330),), (2, 1), (184, 184), FULL), {"SHARES": 5, "ROUNDS": 1}),  # Q in registers, in turn
    (Call(((500, 200),), (4, 1), (184, 184), FULL), {"SHARES": 3, "ROUNDS": 3}),  # six runs and more a program
    (Call(((300, 200),), (1, 1), (256, 256), FULL), {"SHARES": 2, "ROUNDS": 1}),
    (Call(((260, 300),), (1, 1), (72, 40), CAUSAL), {"SHARES": 2}),
    (Call(((260, 240),), (1, 1), (64, 64), CAUSAL), {"SHARES": 3, **BLOCK}),  # rows without a key
    (Call(((260, 240),), (1, 1), (64, 64), CAUSAL), {"SHARES": 1, **BLOCK}),
    (Call(((260, 300),), (2, 1), (64, 64), Mask("causal_top_left")), {"SHARES": 3, **BLOCK}),
]


@pytest.mark.parametrize(("call", "settings"), CALLS, ids=str)
def test_equal_shares(gpu: SharesGpu, call: Call, settings: Config) -> None:
    given = inputs(call, 0)
    o, lse, *_ = gpu.forward(call, given, settings)
    compare({"o": o, "lse": lse}, wanted(call, given))


def test_sums_of_parts_alone_go_to_memory(gpu: SharesGpu) -> None:
    """2 x 5 tiles under the causal mask have 3, 5, 7, 9 and 10 blocks and lie as the last, the first and so on. Runs begin at
    0, 13, 27, 40 and 54 of 68, tiles at 0, 10, 13, 22, 27, 34 and so on: of the first two programs all tiles are whole."""
    call = Call(((630, 640),), (2, 2), (64, 64), CAUSAL)
    given = inputs(call, 0)
    *_, o_parts, stats = gpu.forward(call, given, {"SHARES": 5, **BLOCK})
    used = ~np.isnan(stats).all((2, 3))  # [programs, 2]: the tile that it ends, the one that it begins
    assert (np.isnan(stats).any((2, 3)) == ~used).all() and (np.isnan(o_parts).any((2, 3)) == ~used).all()
    assert used.astype(int).tolist() == [[0, 0], [0, 0], [0, 1], [1, 1], [1, 0]]


@pytest.mark.parametrize("seed", range(3))
def test_runs_hold_each_key_block_once(seed: int) -> None:
    """Where tiles lie and which programs have them, by plain arithmetic: of up to 1024 tiles a head."""
    drawn = np.random.default_rng(seed)
    of = {name: kernels_in_python.in_python(getattr(hopper_shares, name)) for name in FUNCTIONS}
    checked = 0
    for _ in range(20):
        tiles, heads, programs = (
            int(drawn.integers(1, most)) for most in ((1025, 4, 140), (9, 40, 20))[drawn.integers(2)]
        )
        first, more = int(drawn.integers(1, 60)), int(drawn.integers(3))
        visited = [first + more * tile for tile in range(tiles)]
        visited[-1] -= int(drawn.integers(visited[-1] - visited[-2] + 1)) if tiles > 1 else 0
        rounds = 0 if more or visited[-1] != first else int(drawn.integers(tiles * heads // programs + 1))
        left = sum(visited) * heads - rounds * programs * first
        if left >= programs:
            check_runs(of, visited, heads, programs, rounds, more)
            checked += 1
    assert checked >= 15


FUNCTIONS = ("share_of", "run_of", "goes_on", "next_at", "tile_at", "last_of")


def check_runs(of: dict[str, Any], visited: list[int], heads: int, programs: int, rounds: int, more: int) -> None:
    """``visited``: blocks of each tile of a head."""
    rows = 128
    form = SimpleNamespace(BLOCK_M=rows)
    call = SimpleNamespace(batch=1, heads_q=heads, group=1, seqlen_q=len(visited) * rows)
    blocks = hopper_shares.Blocks(sum(visited), visited[0], more)
    seen = [[np.zeros(count, int) for count in visited] for _ in range(heads)]
    parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    shares, runs = [], []
    for number in range(programs):
        share = of["share_of"](number, programs, call, rounds, blocks)
        turn, at = 0, share.begin
        while of["goes_on"](turn, at, share):
            run = of["run_of"](turn, at, share, blocks, call, form)
            head, tile, below, count = (
                int(one) for one in (run.place.h_kv, run.place.row // rows, run.below, run.count)
            )
            seen[head][tile][below - count : below] += 1
            assert run.whole == (count == visited[tile])
            if not run.whole:
                last = of["last_of"](of["tile_at"](at, blocks, call, rows), share)
                parts.setdefault((head, tile), []).append((number, int(run.slot), int(last)))
            at = of["next_at"](turn, at, run, share)
            turn += 1
        shares.append(int(share.end - share.begin))
        runs.append(turn)
    assert all((one == 1).all() for head in seen for one in head)
    for found in parts.values():  # the first has its second slot, others the first
        numbers = [number for number, *_ in found]
        first, last = numbers[0], numbers[-1]
        assert found == [(number, 2 * number + (number == first), last) for number in range(first, last + 1)]
    assert max(shares) - min(shares) <= 1
    if heads * len(visited) >= 8 * programs and len(visited) > 1:  # two neighbours have as many blocks as any other two
        assert max(runs) - min(runs) <= 4


def test_a_negative_scale(gpu: SharesGpu) -> None:
    call = Call(((200, 300),), (2, 1), (64, 64), CAUSAL)
    given = inputs(call, 0)
    o, lse, *_ = gpu.forward(call, given, {"SHARES": 3}, -SCALE)
    compare({"o": o, "lse": lse}, wanted(call, {**given, "q": -given["q"]}))


@pytest.mark.parametrize("infinite", [-torch.inf, torch.inf])
@pytest.mark.parametrize("shares", [1, 3])
def test_rows_of_infinite_scores_are_nan_as_softmax_has_them(gpu: SharesGpu, shares: int, infinite: float) -> None:
    """In whole tiles and in parts."""
    call = Call(((70, 300),), (1, 1), (64, 64), FULL)
    given = inputs(call, 0)
    given["q"][:, :, 3, 0], given["k"][..., 0] = infinite, 1.0
    o, lse, *_ = gpu.forward(call, given, {"SHARES": shares, **BLOCK})
    assert o[:, :, 3].isnan().all() and not o[:, :, :3].isnan().any() and not o[:, :, 4:].isnan().any()
    assert (lse[:, :, 3] == -torch.inf).all() if infinite < 0 else lse[:, :, 3].isnan().all()


def test_an_infinite_value_that_no_row_of_a_part_sees_spoils_none(gpu: SharesGpu) -> None:
    call = Call(((128, 256),), (1, 1), (64, 64), CAUSAL)
    given = inputs(call, 0)
    right = wanted(call, given)
    given["v"][:, :, 192:] = torch.inf  # seen by queries from 64 on
    o, *_ = gpu.forward(call, given, {"SHARES": 4, **BLOCK})
    compare({"o": o[:, :, :64]}, {"o": right["o"][:, :, :64]})


REFUSED = [
    (Call(((500, 200),), (1, 1), (64, 64), CAUSAL), {"SHARES": 2}, "evenly more keys"),
    (Call(((300, 300),), (1, 1), (64, 64), CAUSAL), {"SHARES": 2, "ROUNDS": 1}, "ROUNDS: got 1 of tiles"),
    (Call(((300, 300),), (1, 1), (64, 64), FULL), {"SHARES": 2, "ROUNDS": 2}, "no more tiles than there"),
    (Call(((70, 200),), (1, 1), (64, 64), FULL), {"SHARES": 9}, "SHARES: got 9 for"),
    (Call(((70, 200),), (1, 1), (64, 64), FULL), {"SHARES": 0}, "SHARES: got 0, must be 1 to 256"),
    (Call(((70, 200),), (1, 1), (64, 64), FULL), {"ROUNDS": 9}, "ROUNDS: got 9, must be 0 to 8"),
]


@pytest.mark.parametrize(("call", "settings", "why"), REFUSED, ids=lambda one: one if isinstance(one, str) else "")
def test_what_it_does_not_compute_is_refused(gpu: SharesGpu, call: Call, settings: Config, why: str) -> None:
    given = inputs(call, 0)
    problem = posed(call, given)
    config = fwd_shares.config_of(problem.specialization, 2, 0) | settings
    with pytest.raises(ValueError, match=why):
        key_splits.forward(given["q"], given["k"], given["v"], problem, SCALE, config)


@pytest.mark.parametrize("mask", [band(20, 3), Mask("chunked", 64)], ids=str)
def test_other_masks_are_not_computed(mask: Mask) -> None:
    call = Call(((70, 300),), (1, 1), (64, 64), mask)
    assert not fwd_shares.fits(posed(call, inputs(call, 0)).specialization, 90)
    assert fwd_shares.fits(posed(Call(call.lengths, call.heads, call.dims, FULL), inputs(call, 0)).specialization, 90)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("next_at", lambda turn, at, run, share: at + run.count + 1),  # a key block is left out
        ("slot_of", lambda number, begins: 2 * number),
        ("contributions", lambda acc, total: tuple(one * 2.0 for one in acc)),
    ],
)
def test_a_fault_is_found(gpu: SharesGpu, monkeypatch: pytest.MonkeyPatch, name: str, instead: Any) -> None:
    call = Call(((390, 801),), (2, 1), (64, 64), CAUSAL)
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, name: instead})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 2)
    given = inputs(call, 0)
    with pytest.raises(AssertionError, match=r"'o'|'lse'|deadlock|barrier|written|outside"):
        o, lse, *_ = gpu.forward(call, given, {"SHARES": 5, **BLOCK})
        compare({"o": o, "lse": lse}, wanted(call, given))
