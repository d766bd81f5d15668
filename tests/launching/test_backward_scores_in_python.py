"""Score terms in the backwards of kernels/sm90, run by Python: gradients, dense and packed, in the forms that a config can ask
for, and which kernel serves such calls."""

from __future__ import annotations

from typing import Any

import kernels_in_python
import pytest
from added_terms import add_terms
from gpu_in_python import PythonGpu
from test_computed_in_python import BACKWARDS, MASKS, PACKING, Call, check_backward, compare, inputs, wanted
from test_dq_parts_in_python import backward as dq_in_parts
from test_one_tile_in_python import OneTileGpu
from test_query_tiles_in_python import QueryTilesGpu
from test_stored_ds_in_python import StoredGpu
from test_turns_in_python import TURNS

from fa2tune.kernels.lib.hopper_tiles import Tile
from fa2tune.kernels.scores import none, softcap
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.score import Score

CAP = Score("softcap", 0.6)  # scores of these inputs reach it
ALIBI = Score("alibi", 3)  # of rows, columns, sequences and heads
TERMS = pytest.mark.parametrize("score", [CAP, ALIBI], ids=str)
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
SPLIT = "sm90/bwd_dq,sm90/bwd_dkdv"


@pytest.fixture(autouse=True)
def terms(monkeypatch: pytest.MonkeyPatch) -> None:
    add_terms(monkeypatch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PythonGpu:
    return PythonGpu(monkeypatch, values=True)


@TERMS
@PACKED
@pytest.mark.parametrize(("form", "mask"), list(zip(BACKWARDS, MASKS * 2, strict=False)), ids=str)
def test_fused(gpu: PythonGpu, form: str, mask: Mask, packed: bool, score: Score) -> None:
    call = Call(PACKING if packed else ((130, 150),), (2, 1), (128, 128), mask, packed=packed, score=score)
    check_backward(gpu, call, BACKWARDS[form], through_lse=True)


#: Calls of other head dims, and settings.
FUSED: list[tuple[Call, dict[str, Any]]] = [
    (Call(((140, 140),), (4, 2), (64, 64), CAUSAL, batch=2), {}),
    (Call(((140, 200),), (2, 1), (64, 64), band(40, 10), softmax_scale=-0.2), BACKWARDS["apart, by TMA"]),
    (Call(((200, 140),), (2, 2), (64, 64), FULL), BACKWARDS["concatenated"]),
    (Call(PACKING, (2, 1), (64, 64), CAUSAL, packed=True), BACKWARDS["scores ahead"]),
    (Call(((140, 140),), (2, 1), (32, 32), CAUSAL), {"NARROW": True}),
    (Call(PACKING, (2, 1), (24, 32), FULL, packed=True), {"NARROW": True, **BACKWARDS["and finished"]}),
    (Call(((150, 150),), (2, 1), (96, 96), CAUSAL), {}),
    (Call(PACKING, (2, 1), (80, 80), FULL, packed=True), {}),
    (Call(((150, 200),), (2, 1), (96, 64), CAUSAL), {}),
    (Call(((130, 300),), (2, 1), (128, 128), CAUSAL), {**TURNS, "BLOCK_M": 64, "num_warps": 8}),
    (Call(PACKING, (2, 1), (128, 128), CAUSAL, packed=True), {"LONGER_FIRST": True}),
]


@TERMS
@pytest.mark.parametrize(("call", "settings"), FUSED, ids=str)
def test_other_calls_of_the_fused_kernel(gpu: PythonGpu, call: Call, settings: dict[str, Any], score: Score) -> None:
    check_backward(gpu, call._replace(score=score), settings)


SPLIT_CALLS = [
    (Call(((150, 170),), (2, 1), (128, 128), CAUSAL, batch=2), {}),
    (Call(((200, 140),), (4, 2), (64, 64), FULL, softmax_scale=-0.2), {}),
    (Call(((150, 200),), (2, 1), (256, 256), CAUSAL), {}),
    (Call(((130, 200),), (1, 1), (192, 128), band(40, 10)), {}),
    (Call(((130, 200),), (1, 1), (64, 64), Mask("chunked", 64)), {}),
    (Call(PACKING, (2, 1), (64, 64), band(40, 10), packed=True), {}),
    (Call(PACKING, (4, 2), (256, 256), CAUSAL, packed=True), {}),
    (Call(PACKING, (2, 2), (128, 128), FULL, packed=True), {}),
]


@TERMS
@pytest.mark.parametrize(("call", "settings"), SPLIT_CALLS, ids=str)
def test_split(gpu: PythonGpu, call: Call, settings: dict[str, Any], score: Score) -> None:
    check_backward(gpu, call._replace(score=score), settings, SPLIT, through_lse=True)


@TERMS
@pytest.mark.parametrize(
    ("lengths", "heads", "dims", "mask", "settings"),
    [((150, 100), (4, 2), (64, 64), CAUSAL, {"PERSISTENT": True}), ((130, 128), (2, 1), (128, 128), FULL, {"PARTS": 3}),
     ((90, 70), (2, 1), (128, 64), band(40, 10), {"HALVES": 2})],
    ids=str,
)  # fmt: skip
def test_one_key_tile(
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    mask: Mask,
    settings: dict[str, Any],
    score: Score,
) -> None:
    call = Call((lengths,), heads, dims, mask, batch=2, score=score)
    given, right = inputs(call, 0), wanted(call, inputs(call, 0))
    compare(OneTileGpu(monkeypatch).backward(call, given, right, (settings,)), right)


@TERMS
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_query_tiles(monkeypatch: pytest.MonkeyPatch, mask: Mask, score: Score) -> None:
    call = Call(((90, 150),), (4, 2), (128, 64), mask, batch=2, score=score)
    given, right = inputs(call, 0), wanted(call, inputs(call, 0))
    compare(QueryTilesGpu(monkeypatch).backward(call, given, right, (64, 2)), right)


@TERMS
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_ds_in_memory(monkeypatch: pytest.MonkeyPatch, mask: Mask, score: Score) -> None:
    call = Call(((150, 200),), (4, 2), (256, 256), mask, batch=2, score=score)
    compare(*StoredGpu(monkeypatch).backward(call, {"SLICES": 1}, through_lse=True))


@TERMS
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_dq_in_parts(gpu: PythonGpu, mask: Mask, score: Score) -> None:
    call = Call(((130, 300),), (2, 1), (144, 144), mask, batch=2, score=score)
    found, right, _ = dq_in_parts(gpu, call, {"bwd_dq": 3, "bwd_dkdv": 1})
    compare(found, right)


@pytest.mark.parametrize("kernels", ["sm90/bwd_fused", SPLIT])
def test_a_derivative_that_is_left_out_is_found(gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setattr(softcap, "grad", none.grad)
    with pytest.raises(AssertionError, match="'dq', "):
        check_backward(gpu, Call(((70, 90),), (2, 1), (128, 128), CAUSAL, score=CAP), {}, kernels)


#: Kernels, and a name in their files that gives the sequence's number.
SEQUENCES = {"sm90/bwd_fused": "Tile", SPLIT: "sequence_of"}


@pytest.mark.parametrize("kernels", SEQUENCES)
def test_another_sequence_is_found(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    name = SEQUENCES[kernels]
    instead = {"Tile": lambda *given: Tile(*given[:-1], 0), "sequence_of": lambda *_: 0}[name]
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, name: instead})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    call = Call(PACKING, (2, 1), (64, 64), FULL, packed=True, score=ALIBI)
    with pytest.raises(AssertionError, match=r"'d[qkv]', "):
        check_backward(PythonGpu(monkeypatch, values=True), call, {}, kernels)
