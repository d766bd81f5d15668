"""The Hopper forward whose tiles have all keys of a key head, run by Python (tests/kernels_in_python.py) beside float64
attention. Results are poisoned with NaN, as is what lies around q, k and v. A copy lands when its barrier is waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kernels_in_python
import pytest
import torch
from added_terms import add_terms
from gpu_in_python import InPlaceGpu
from kernel_values import Buffer
from public_gpu import public_gpu
from test_computed_in_python import Call, compare, inputs, unset, wanted
from test_grouped_in_python import within_nan
from test_public_calls_in_python import Case, results
from test_public_calls_in_python import inputs as inputs_of

from fa2tune.calling.schedules import few_keys_schedule, multistage_schedule
from fa2tune.launching import key_splits, passes
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.sm90 import fwd_one_tile
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, STACKED, Mask, band
from fa2tune.spec.problem import Problem, Specialization
from fa2tune.spec.roles import FWD_ONE_TILE
from fa2tune.spec.score import Score

#: (rows, keys) of a tile.
Tile = tuple[int, int]


class LateCopies(kernels_in_python._Mbarrier):
    """Copies by TMA that land when their barrier is waited for, and not before. ``awaited``: whether a wait is one, by the
    copies that it is for."""

    def __init__(self) -> None:
        self.asked = defaultdict[Any, list[tuple[Any, ...]]](list)
        self.awaited: Callable[[int], bool] = lambda copies: True

    def load(self, descriptor: Any, coordinates: Any, barrier: Any, place: Any) -> None:
        self.asked[barrier].append((descriptor, coordinates, barrier, place))

    def wait(self, barrier: Any, phase: Any, pred: Any = True) -> None:  # type: ignore[override]
        if self.awaited(len(self.asked[barrier])):
            for copy in self.asked.pop(barrier):
                kernels_in_python._tma_load(*copy)
            super().wait(barrier, phase, pred)


class OneTileGpu(InPlaceGpu):
    """``copies``: (kind, tensor) of each by TMA; ``late``: those that have not landed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.copies, self.late = list[tuple[str, str]](), LateCopies()
        names = {"mbarrier": self.late, "tma_load": self.late.load}
        monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, **names})
        monkeypatch.setattr(kernels_in_python, "_MODULES", {})

    def seen(self, kind: str, buffer: Buffer, elements: Any) -> None:
        self.copies.append((kind, buffer.name))

    def forward(
        self, call: Call, given: dict[str, torch.Tensor], tile: Tile, order: str = "bhsd"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, lse)"""
        q, k, v = (within_nan(given[name], order) for name in "qkv")
        problem = passes.describe(q, k, v, call.mask, call.softmax_scale, call.score)
        assert tile in fwd_one_tile.tiles(problem.specialization, 90) and problem.seqlen_k <= tile[1]
        config = fwd_one_tile.config_of(problem.specialization, *tile)
        assert all(config[name] in values for name, values in fwd_one_tile.SPACE.dimensions.items())
        tensors = {"q": q, "k": k, "v": v, "o": unset(q, call.dims[1]), "lse": torch.full(q.shape[:3], torch.nan)}
        return self.run_whole(problem, tensors, call.softmax_scale, config)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> OneTileGpu:
    return OneTileGpu(monkeypatch)


def check(gpu: OneTileGpu, call: Call, tile: Tile, order: str = "bhsd") -> None:
    given = inputs(call, 0)
    o, lse = gpu.forward(call, given, tile, order)
    compare({"o": o, "lse": lse}, wanted(call, given))
    assert not gpu.late.asked, "a program waits for all that it loads"


CALLS = [
    # lengths, heads, head dims, mask, batch: tile
    (Call(((70, 60),), (2, 2), (64, 64), FULL, batch=2), (64, 64)),
    (Call(((130, 100),), (4, 2), (64, 64), FULL), (128, 128)),
    (Call(((212, 212),), (2, 1), (192, 192), FULL), (64, 256)),  # two parts of columns
    (Call(((64, 64),), (1, 1), (64, 64), FULL), (64, 64)),  # exactly a tile
    (Call(((128, 256),), (2, 1), (128, 128), FULL), (128, 256)),
    (Call(((1, 130),), (7, 1), (64, 64), CAUSAL), (64, 256)),
    (Call(((131, 131),), (8, 2), (64, 64), CAUSAL, batch=2), (128, 256)),
    (Call(((40, 101),), (3, 1), (80, 80), CAUSAL), (64, 128)),
    (Call(((150, 60),), (4, 2), (64, 64), CAUSAL), (64, 64)),  # queries without a key, of a whole tile
    (Call(((333, 30),), (2, 1), (80, 80), CAUSAL), (128, 64)),
    (Call(((150, 60),), (4, 2), (64, 64), FULL), (128, 64)),
    (Call(((150, 200),), (2, 1), (128, 128), band(60, 10)), (128, 256)),
    (Call(((200, 100),), (2, 1), (56, 56), band(20, 3)), (64, 128)),  # queries before all keys
    (Call(((60, 200),), (4, 2), (64, 64), band(-1, 20)), (64, 256)),
    (Call(((60, 200),), (4, 2), (64, 64), band(30, -1)), (128, 256)),
    (Call(((100, 250),), (4, 2), (128, 128), Mask("chunked", 96)), (64, 256)),
    (Call(((100, 130),), (4, 2), (64, 64), Mask("causal_top_left")), (64, 256)),
    (Call(((130, 100),), (4, 2), (64, 64), Mask("causal_top_left")), (128, 128)),
    (Call(((154, 50),), (2, 2), (64, 64), Mask(STACKED, 7), batch=2), (128, 64)),
    (Call(((200, 10),), (1, 1), (128, 128), Mask(STACKED, 5)), (64, 64)),  # 30 queries, five heads each, without a key
    (Call(((90, 1),), (4, 2), (64, 64), FULL), (64, 64)),  # one key
    (Call(((90, 1),), (4, 2), (128, 128), CAUSAL), (128, 64)),
    (Call(((1, 1),), (1, 1), (256, 256), CAUSAL), (64, 64)),
    (Call(((77, 65),), (6, 2), (64, 64), CAUSAL, softmax_scale=-0.2), (64, 128)),
    (Call(((77, 65),), (6, 2), (176, 40), FULL, softmax_scale=-0.2), (128, 128)),
    (Call(((77, 65),), (2, 1), (64, 64), band(9, 2), softmax_scale=0.0), (64, 128)),
    (Call(((77, 65),), (2, 1), (64, 64), CAUSAL, softmax_scale=2.0), (64, 128)),  # scores of up to fifty
]


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize(("call", "tile"), CALLS, ids=str)
def test_tiles_with_all_keys(gpu: OneTileGpu, call: Call, tile: Tile, order: str) -> None:
    check(gpu, call, tile, order)


DIMS = [(24, 24), (40, 40), (80, 80), (96, 96), (128, 128), (160, 160), (192, 192), (200, 200), (256, 256), (176, 40),
        (64, 128), (160, 56), (192, 128), (72, 256)]  # fmt: skip


@pytest.mark.parametrize("mask", [FULL, CAUSAL, band(40, 7)], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_tile_of_a_head_dim(monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], mask: Mask) -> None:
    """With as many keys as it has, and with odd lengths."""
    tiles = fwd_one_tile.tiles(Specialization("fp16", *dims, mask.name), 90)
    assert {(64, 64), (128, 64)} <= {*tiles}
    for rows, keys in tiles:
        for lengths in ((rows, keys), (rows + 13, keys - 27)):
            check(OneTileGpu(monkeypatch), Call((lengths,), (2, 1), dims, mask), (rows, keys))


@pytest.mark.parametrize("score", [Score("softcap", 0.6), Score("alibi", 3)], ids=str)
@pytest.mark.parametrize(
    ("call", "tile"),
    [
        (Call(((131, 120),), (4, 2), (64, 64), CAUSAL, batch=2), (128, 128)),
        (Call(((70, 50),), (3, 1), (56, 56), FULL, softmax_scale=-0.2), (64, 64)),
        (Call(((100, 128),), (2, 1), (192, 128), band(40, 10)), (64, 128)),
        (Call(((150, 60),), (2, 2), (128, 128), CAUSAL), (128, 64)),  # queries without a key
    ],
    ids=str,
)
def test_score_terms(gpu: OneTileGpu, monkeypatch: pytest.MonkeyPatch, call: Call, tile: Tile, score: Score) -> None:
    add_terms(monkeypatch)
    check(gpu, call._replace(score=score), tile)


@pytest.mark.parametrize(("dims", "parts"), [((128, 128), (1, 1)), ((192, 192), (2, 2)), ((176, 64), (2, 1))])
def test_what_a_program_copies(gpu: OneTileGpu, dims: tuple[int, int], parts: tuple[int, int]) -> None:
    """Its queries, all keys of its key head, and its output, each once."""
    programs = 2 * 4 * 3
    check(gpu, Call(((150, 128),), (4, 2), dims, CAUSAL, batch=2), (64, 128))
    expected = {("load", "q"): parts[0], ("load", "k"): parts[0], ("load", "v"): parts[1], ("store", "o"): parts[1]}
    assert {one: gpu.copies.count(one) for one in {*gpu.copies}} == {
        one: programs * count for one, count in expected.items()
    }


def test_rows_of_infinite_scores_are_nan_as_softmax_has_them(gpu: OneTileGpu) -> None:
    call = Call(((70, 100),), (4, 1), (64, 64), FULL)
    given = inputs(call, 0)
    given["q"][:, 1, 3, 0], given["k"][..., 0] = -torch.inf, 1.0
    o, lse = gpu.forward(call, given, (64, 128))
    assert o[:, 1, 3].isnan().all() and lse[0, 1, 3] == -torch.inf
    o[:, 1, 3] = 0
    assert not o.isnan().any(), "no other query, and no other head"


@pytest.mark.parametrize("copies", [2, 1], ids=["q and k", "v"])
def test_a_wait_that_is_left_out_is_found(gpu: OneTileGpu, copies: int) -> None:
    """``copies``: that it is for."""
    gpu.late.awaited = lambda asked: asked != copies
    with pytest.raises(AssertionError, match="'o', nan"):
        check(gpu, Call(((70, 100),), (2, 1), (64, 64), FULL), (64, 128))
    assert {len(left) for left in gpu.late.asked.values()} == {copies}


@pytest.mark.parametrize(
    ("name", "instead", "found"),
    [
        ("expect_parts", lambda *_: None, "deadlock"),
        ("expect_both", lambda *_: None, "deadlock"),
        ("products_done", lambda acc: acc, "before it is waited for"),
        ("used_of", lambda tiles, used: tiles[:1], "'o', "),
        ("where_seen", lambda out, *_: out, "'o', nan"),
        ("quotients", lambda acc, _: acc, "'o', "),
        ("sum_parts", lambda weights: weights[:, :1], "'o', "),
    ],
)
def test_a_fault_is_found(
    gpu: OneTileGpu, monkeypatch: pytest.MonkeyPatch, name: str, instead: Any, found: str
) -> None:
    """Barriers that await nothing, a product that is not waited for, columns, rows and sums that are left out."""
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, name: instead})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 0.5)
    with pytest.raises(AssertionError, match=found):
        check(gpu, Call(((150, 60),), (2, 1), (96, 96), CAUSAL), (64, 64))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "case",
    [
        Case((212, 212), (192, 192), FULL, ("sm90/fwd_one_tile",), (14, 14)),
        Case((97, 70), (128, 128), CAUSAL, ("sm90/fwd_one_tile",), (6, 2), dtype="fp16", scale=-0.3),  # see no key
    ],
    ids=str,
)
def test_a_public_call_with_gradients(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Wherever the kernel computes such a call it is expected to be faster."""
    monkeypatch.setattr(few_keys_schedule, "MARGIN", -100.0)
    monkeypatch.setattr(multistage_schedule, "MARGIN", 1.0)
    given = inputs_of(case)
    with public_gpu() as served:
        found = results(case, given)
        assert tuple(served.ran[:1]) == case.runs
    verify.compare(found, *reference.oracle_and_reference(given, mask=case.mask, softmax_scale=case.scale))


def test_what_the_kernel_takes() -> None:
    problem = Problem("bf16", 1, 8, 2, 100, 100, 64, 64, CAUSAL)
    spec = problem.specialization
    assert fwd_one_tile.tiles(spec, 90) == tuple((rows, keys) for rows in (64, 128) for keys in (64, 128, 256))
    assert fwd_one_tile.tiles(replace(spec, head_dim=256, head_dim_v=256), 90) == (
        (64, 64), (64, 128), (128, 64), (128, 128),
    )  # fmt: skip
    assert key_splits.space_of(problem, 90, FWD_ONE_TILE) is fwd_one_tile
    ragged = replace(problem, extent=Extent(RAGGED, 3))
    for arch, other in (
        (80, problem), (100, problem), (90, replace(problem, dtype="fp32")), (90, replace(problem, tma=False)),
        (90, replace(problem, aligned=False)), (90, ragged),
    ):  # fmt: skip
        assert key_splits.space_of(other, arch, FWD_ONE_TILE) is None


def test_its_configs_are_told_from_others() -> None:
    problem = Problem("bf16", 2, 8, 2, 100, 100, 64, 64, CAUSAL)
    for rows, keys in fwd_one_tile.tiles(problem.specialization, 90):
        config = fwd_one_tile.config_of(problem.specialization, rows, keys)
        assert key_splits.is_one_tile(config) and not key_splits.is_grouped(config)
        assert key_splits.role_of(config) == FWD_ONE_TILE and key_splits.parts_of(config) == 1
        assert key_splits.splitting(config).name == "sm90/fwd_one_tile"
        (only,) = key_splits.kernels(problem, config, 90)
        assert only == (key_splits.splitting(config), config, problem)
        assert fwd_one_tile.programs(problem, config) == 2 * 8 * -(-100 // rows)
