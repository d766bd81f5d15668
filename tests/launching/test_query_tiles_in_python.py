"""The Hopper backward by tiles of queries, run by Python (tests/kernels_in_python.py) beside float64 attention. Results and
what parts of them go through are poisoned with NaN, as is what lies around the tensors that are read."""

from __future__ import annotations

from typing import Any

import kernels_in_python
import pytest
import torch
from test_computed_in_python import Call, compare, gradient_of_lse, inputs, wanted
from whole_in_python import WholeGpu

from fa2tune.launching import query_tiles
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Config, Problem


class QueryTilesGpu(WholeGpu):
    """For plans of query_tiles."""

    module = query_tiles

    def config_of(self, problem: Problem, *form: Any) -> Config:
        rows, splits = form  # queries of a tile, parts of the keys
        assert query_tiles.able(problem, 90)
        config: Config = query_tiles.space_of(problem, 90).config_of(problem.specialization, rows, splits)
        assert splits <= query_tiles.most_splits(problem, config, 90)
        return config


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> QueryTilesGpu:
    return QueryTilesGpu(monkeypatch)


CALLS = [
    # lengths, heads, head dims, mask, batch: parts of the keys
    (Call(((70, 77),), (3, 3), (64, 64), FULL), 1),
    (Call(((100, 330),), (2, 2), (192, 192), FULL), 3),
    (Call(((100, 330),), (1, 1), (160, 160), CAUSAL), 2),
    (Call(((130, 200),), (2, 2), (192, 192), CAUSAL, batch=2), 2),  # two tiles, the second of two rows
    (Call(((128, 64),), (1, 1), (136, 136), FULL), 1),
    (Call(((300, 64),), (2, 1), (64, 64), CAUSAL), 1),  # rows without a key; grouped heads
    (Call(((50, 270),), (4, 2), (64, 64), CAUSAL), 5),
    (Call(((40, 150),), (1, 1), (200, 200), FULL), 2),
    (Call(((130, 100),), (1, 1), (256, 256), CAUSAL), 1),
    (Call(((90, 100),), (2, 2), (192, 128), CAUSAL), 2),
    (Call(((300, 300),), (1, 1), (64, 64), CAUSAL), 3),  # blocks that no row of a tile sees; parts without blocks
    (Call(((90, 100),), (1, 1), (40, 176), FULL), 1),
    (Call(((5, 1),), (1, 1), (64, 64), FULL), 1),
    (Call(((150, 190),), (2, 2), (64, 64), band(20, 3)), 2),
    (Call(((90, 190),), (1, 1), (72, 40), Mask("chunked", 48)), 3),
    (Call(((150, 190),), (2, 1), (64, 64), Mask("causal_top_left")), 2),
]


@pytest.mark.parametrize(("rows", "order"), [(128, "bhsd"), (64, "bshd")])
@pytest.mark.parametrize(("call", "splits"), CALLS, ids=str)
def test_gradients(gpu: QueryTilesGpu, call: Call, splits: int, rows: int, order: str) -> None:
    given = inputs(call, 0)
    dlse = gradient_of_lse(call) if call.mask == CAUSAL else None
    right = wanted(call, given, dlse)
    compare(gpu.backward(call, given, right, (rows, splits), dlse, order), right)


def test_the_same_bits_each_run(gpu: QueryTilesGpu) -> None:
    call = Call(((140, 90),), (2, 1), (64, 64), CAUSAL)
    given = inputs(call, 0)
    right = wanted(call, given)
    first = gpu.backward(call, given, right, (64, 2))
    gpu.bound.clear()
    gpu.placed.clear()
    again = gpu.backward(call, given, right, (64, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_fault_is_found(gpu: QueryTilesGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are not scaled."""

    def scaled(tiles: Any, _: Any) -> Any:
        return tiles

    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, "scaled": scaled})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    call = Call(((70, 77),), (1, 1), (64, 64), FULL)
    given = inputs(call, 0)
    right = wanted(call, given)
    with pytest.raises(AssertionError, match=r"dq|dk"):
        compare(gpu.backward(call, given, right, (128, 1)), right)
