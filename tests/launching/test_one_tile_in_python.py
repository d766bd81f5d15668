"""The Hopper backward whose keys are one tile, run by Python (tests/kernels_in_python.py) beside float64 attention. Results and
what parts of them go through are poisoned with NaN, as is what lies around the tensors that are read."""

from __future__ import annotations

from typing import Any

import kernels_in_python
import pytest
import torch
from test_computed_in_python import Call, compare, gradient_of_lse, inputs, wanted
from whole_in_python import WholeGpu

from fa2tune.launching import one_key_tile
from fa2tune.search_spaces.sm90 import bwd_one_tile
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Config, Problem


class OneTileGpu(WholeGpu):
    """For plans of one_key_tile."""

    module = one_key_tile

    def config_of(self, problem: Problem, *form: Any) -> Config:
        (settings,) = form
        assert one_key_tile.can(problem, 90)
        made = bwd_one_tile.config_of(
            problem.specialization,
            settings.get("PARTS", 1),
            settings.get("HALVES"),
            settings.get("PERSISTENT", False),
        )
        config: Config = {**made, **settings}
        assert all(config[name] in values for name, values in bwd_one_tile.SPACE.dimensions.items())
        assert bool(one_key_tile.workspaces(problem, config)) == (config["PARTS"] > 1)
        return config


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> OneTileGpu:
    return OneTileGpu(monkeypatch)


TURNS = {"PERSISTENT": True}
CALLS = [
    # lengths, heads, head dims, mask, batch: settings
    (Call(((70, 77),), (3, 3), (64, 64), FULL), {}),
    (Call(((130, 100),), (2, 2), (64, 64), CAUSAL, batch=2), {}),
    (Call(((300, 64),), (2, 1), (64, 64), CAUSAL), {}),  # rows without a key; blocks of them
    (Call(((70, 66),), (5, 5), (24, 24), CAUSAL, batch=2), TURNS),  # more tiles than three multiprocessors
    (Call(((50, 66),), (4, 4), (64, 64), FULL, batch=2), TURNS),  # one block a tile
    (Call(((50, 60),), (16, 8), (64, 64), CAUSAL), TURNS),
    (Call(((130, 100),), (1, 1), (64, 64), CAUSAL), TURNS),
    (Call(((130, 66),), (5, 5), (64, 64), CAUSAL), TURNS),
    (Call(((130, 66),), (5, 5), (64, 64), FULL), {"STAGES": 1}),
    (Call(((130, 66),), (4, 4), (64, 64), FULL), {**TURNS, "STAGES": 1}),
    (Call(((130, 100),), (2, 2), (48, 80), CAUSAL), {}),
    (Call(((130, 100),), (4, 4), (128, 128), CAUSAL), {**TURNS, "HALVES": 2}),
    (Call(((222, 91),), (1, 1), (120, 120), FULL), {"PARTS": 3}),
    (Call(((104, 104),), (4, 1), (96, 96), FULL), {"PARTS": 4}),
    (Call(((104, 104),), (6, 2), (96, 96), CAUSAL), {"PARTS": 5}),
    (Call(((87, 87),), (1, 1), (48, 80), FULL), {}),
    (Call(((107, 107),), (1, 1), (200, 200), FULL), {"PARTS": 2}),
    (Call(((68, 68),), (2, 2), (208, 208), CAUSAL), {}),
    (Call(((67, 67),), (1, 1), (192, 64), FULL), {}),
    (Call(((67, 60),), (1, 1), (64, 192), FULL), {}),
    (Call(((200, 50),), (2, 1), (128, 128), CAUSAL), {}),
    (Call(((200, 50),), (1, 1), (256, 256), CAUSAL), {}),
    (Call(((200, 128),), (1, 1), (128, 64), FULL), {"HALVES": 2, "PARTS": 2}),
    (Call(((5, 1),), (1, 1), (64, 64), FULL), {"PARTS": 3}),  # parts without blocks
    (Call(((150, 120),), (2, 2), (64, 64), band(20, 3)), {"PARTS": 2}),
    (Call(((150, 120),), (1, 1), (64, 64), band(-1, 20)), {}),
    (Call(((150, 120),), (2, 1), (72, 40), Mask("chunked", 48)), {}),
    (Call(((150, 60),), (2, 1), (64, 64), Mask("causal_top_left")), {"PARTS": 2}),
]


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize(("call", "settings"), CALLS, ids=str)
def test_gradients(gpu: OneTileGpu, call: Call, settings: dict[str, Any], order: str) -> None:
    given = inputs(call, 0)
    dlse = gradient_of_lse(call) if call.mask == CAUSAL else None
    right = wanted(call, given, dlse)
    compare(gpu.backward(call, given, right, (settings,), dlse, order), right)


def test_the_same_bits_each_run(gpu: OneTileGpu) -> None:
    call = Call(((100, 90),), (4, 1), (64, 64), CAUSAL)
    given = inputs(call, 0)
    right = wanted(call, given)
    first = gpu.backward(call, given, right, ({"PARTS": 3},))
    gpu.bound.clear()
    gpu.placed.clear()
    again = gpu.backward(call, given, right, ({"PARTS": 3},))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_fault_is_found(gpu: OneTileGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without their delta."""

    def put_terms(rows: Any, _: Any, smem: Any, *__: Any) -> None:
        smem.terms.index(0).store(rows.lse)
        smem.terms.index(1).store(rows.dlse)

    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, "_put_terms": put_terms})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    call = Call(((70, 77),), (1, 1), (64, 64), FULL)
    given = inputs(call, 0)
    right = wanted(call, given)
    with pytest.raises(AssertionError, match=r"dq|dk"):
        compare(gpu.backward(call, given, right, ({},)), right)
