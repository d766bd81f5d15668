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
from fa2tune.search_spaces.portable.fwd_combine import WRITTEN
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
        config = with_parts(problem, settings)
        tensors = {**given, "o": unset(given["q"], call.dims[1]), "lse": torch.full(given["q"].shape[:3], torch.nan)}
        tensors = {name: tensors[name] for name in ("q", "k", "v", "o", "lse")}
        plan = type("Plan", (), {})()
        plan.chain, _ = key_splits.bound(problem, tensors, scale, config, 0)
        made = key_splits.sums(problem, config["SPLITS"])
        self.placed.append(dict(zip(("o_parts", "stats"), made, strict=True)))
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


def with_parts(problem: Problem, settings: Config) -> Config:
    config = fwd_shares.config_of(problem.specialization, settings["SHARES"], settings.get("ROUNDS", 0), 2) | settings
    config["SPLITS"] = fwd_shares.parts_of_longest(problem, config)
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
    o, lse, _, stats = gpu.forward(call, given, settings)
    compare({"o": o, "lse": lse}, wanted(call, given))
    assert not np.isnan(stats).any(), "every word of stats is written"


def test_a_tile_is_whole_or_in_parts(gpu: SharesGpu) -> None:
    """2 x 5 tiles under the causal mask have 68 blocks: of five programs' runs some hold whole tiles."""
    call = Call(((630, 640),), (2, 2), (64, 64), CAUSAL)
    given = inputs(call, 0)
    *_, stats = gpu.forward(call, given, {"SHARES": 5, **BLOCK})
    totals = stats[1]  # [parts, rows]
    whole = (totals == WRITTEN).all(0)
    assert ((totals == WRITTEN).any(0) == whole).all()
    assert whole.any() and ((totals > 0).sum(0)[~whole] >= 2).all()


@pytest.mark.parametrize("seed", range(3))
def test_runs_hold_each_key_block_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The search and the places of parts, by plain arithmetic: of tiles of up to 1024 a head, and of products near 32 bits."""
    drawn = np.random.default_rng(seed)
    of = {name: kernels_in_python.in_python(getattr(hopper_shares, name)) for name in FUNCTIONS}
    for _ in range(20):
        tiles, heads, programs = (
            int(drawn.integers(1, most)) for most in ((1025, 4, 140), (9, 40, 20))[drawn.integers(2)]
        )
        first, more = int(drawn.integers(1, 60)), int(drawn.integers(3))
        visited = [first + more * tile for tile in range(tiles)]
        visited[-1] -= int(drawn.integers(visited[-1] - visited[-2] + 1)) if tiles > 1 else 0
        rounds = 0 if more or visited[-1] != first else int(drawn.integers(tiles * heads // programs + 1))
        left = sum(visited) * heads - rounds * programs * first
        if left < programs or sum(visited) * heads * programs >= 2**31:
            continue
        check_runs(monkeypatch, of, visited, heads, programs, rounds, more)


FUNCTIONS = ("share_of", "run_of", "goes_on", "next_at")


def check_runs(
    monkeypatch: pytest.MonkeyPatch, of: dict[str, Any], visited: list[int], heads: int, programs: int, rounds: int, more: int
) -> None:  # fmt: skip
    """``visited``: blocks of each tile of a head."""
    rows = 128
    below = lambda end, *_: visited[min(int(end) // rows, len(visited)) - 1]  # noqa: E731
    form = SimpleNamespace(BLOCK_M=rows, BLOCK_N=64, BLOCKS_BELOW=below)
    call = SimpleNamespace(
        batch=1, heads_q=heads, group=1, seqlen_q=len(visited) * rows, seqlen_k=64 * visited[-1], window=(0, 0)
    )
    blocks = hopper_shares.Blocks(sum(visited), visited[0], more)
    seen = [[np.zeros(count, int) for count in visited] for _ in range(heads)]
    parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    shares = []
    for number in range(programs):
        here = SimpleNamespace(number=number, programs=programs)
        monkeypatch.setattr(kernels_in_python._HERE, "program", here, raising=False)
        share = of["share_of"](call, rounds, blocks)
        turn, at = 0, share.begin
        while of["goes_on"](turn, at, share):
            run = of["run_of"](turn, at, share, blocks, call, form)
            head, tile, below, count = (
                int(one) for one in (run.place.h_kv, run.place.row // rows, run.below, run.count)
            )
            seen[head][tile][below - count : below] += 1
            parts.setdefault((head, tile), []).append((int(run.place.part), int(run.parts)))
            at = of["next_at"](turn, at, run, share)
            turn += 1
        shares.append(int(share.end - share.begin))
    assert all((one == 1).all() for head in seen for one in head)
    assert all(sorted(part for part, _ in found) == [*range(found[0][1])] for found in parts.values())
    assert max(shares) - min(shares) <= 1


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
    (Call(((500, 200),), (1, 1), (64, 64), CAUSAL), {"SHARES": 2, "SPLITS": 9}, "evenly more keys"),
    (Call(((300, 300),), (1, 1), (64, 64), CAUSAL), {"SHARES": 2, "SPLITS": 9, "ROUNDS": 1}, "ROUNDS: got 1 of tiles"),
    (Call(((300, 300),), (1, 1), (64, 64), FULL), {"SHARES": 2, "SPLITS": 9, "ROUNDS": 2}, "no more tiles than there"),
    (Call(((300, 900),), (1, 1), (64, 64), FULL), {"SHARES": 9, "SPLITS": 2}, "SPLITS: got 2 for"),
    (Call(((70, 200),), (1, 1), (64, 64), FULL), {"SHARES": 9, "SPLITS": 9}, "SHARES: got 9 for"),
    (Call(((70, 200),), (1, 1), (64, 64), FULL), {"SHARES": 0, "SPLITS": 9}, "SHARES: got 0, must be 1 to 256"),
    (Call(((70, 200),), (1, 1), (64, 64), FULL), {"ROUNDS": 9, "SPLITS": 9}, "ROUNDS: got 9, must be 0 to 8"),
]


@pytest.mark.parametrize(("call", "settings", "why"), REFUSED, ids=lambda one: one if isinstance(one, str) else "")
def test_what_it_does_not_compute_is_refused(gpu: SharesGpu, call: Call, settings: Config, why: str) -> None:
    given = inputs(call, 0)
    problem = posed(call, given)
    config = fwd_shares.config_of(problem.specialization, 2, 0, 2) | settings
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
        ("_mark_parts", lambda *_: None),
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
        o, lse, _, stats = gpu.forward(call, given, {"SHARES": 5, **BLOCK})
        compare({"o": o, "lse": lse}, wanted(call, given))
        assert not np.isnan(stats).any(), "every word of stats is written"
