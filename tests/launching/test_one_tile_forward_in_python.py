"""The Hopper forward whose tiles have all keys of a key head, run by Python (tests/kernels_in_python.py) beside float64
attention. Results are poisoned with NaN, as is what lies around q, k and v. A copy lands when its barrier is waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernels_in_python
import pytest
from added_terms import add_terms
from in_place_in_python import LateGpu, check, check_infinite_scores
from kernel_values import Buffer
from public_gpu import public_gpu
from test_computed_in_python import Call
from test_public_calls_in_python import Case, results
from test_public_calls_in_python import inputs as inputs_of

from fa2tune.calling.schedules import few_keys_schedule, multistage_schedule
from fa2tune.launching import key_splits
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.sm90 import fwd_one_tile
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, STACKED, Mask, band
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.roles import FWD_ONE_TILE
from fa2tune.spec.score import Score

#: (rows, keys) of a tile.
Tile = tuple[int, int]


class OneTileGpu(LateGpu):
    """``copies``: (kind, tensor) of each by TMA."""

    space = fwd_one_tile.SPACE

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.copies = list[tuple[str, str]]()

    def seen(self, kind: str, buffer: Buffer, elements: Any) -> None:
        self.copies.append((kind, buffer.name))

    def config_of(self, problem: Problem, *form: Any) -> Config:
        assert form in fwd_one_tile.tiles(problem.specialization, 90) and problem.seqlen_k <= form[1]
        return fwd_one_tile.config_of(problem.specialization, *form)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> OneTileGpu:
    return OneTileGpu(monkeypatch)


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
    check_infinite_scores(gpu, call, (64, 128))


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
