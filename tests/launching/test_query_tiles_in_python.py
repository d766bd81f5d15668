"""The Hopper backward by tiles of queries, run by Python (tests/kernels_in_python.py) beside float64 attention. Results and
what parts of them go through are poisoned with NaN, as is what lies around the tensors that are read."""

from __future__ import annotations

from typing import Any

import kernels_in_python
import pytest
import torch
from gpu_in_python import PythonGpu
from test_computed_in_python import SCALE, Call, compare, gradient_of_lse, inputs, unset, wanted
from test_grouped_in_python import within_nan

from fa2tune.launching import passes, query_tiles, whole_backward
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band


class QueryTilesGpu(PythonGpu):
    """For plans of query_tiles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, values=True)
        self.count_launches_of(monkeypatch, whole_backward)

    def backward(
        self, call: Call, given: dict[str, torch.Tensor], right: dict[str, torch.Tensor], rows: int, splits: int,
        dlse: torch.Tensor | None = None, order: str = "bhsd", scale: float = SCALE,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Gradients; ``rows``: queries of a tile; ``splits``: parts of the keys."""
        q, k, v, do = (within_nan(given[name], order) for name in ("q", "k", "v", "do"))
        o, lse = within_nan(right["o"].half(), order), right["lse"].float()
        problem = passes.describe(q, k, v, call.mask, scale, call.score, o=o, do=do)
        assert query_tiles.able(problem, 90)
        config = query_tiles.space_of(problem, 90).config_of(problem.specialization, rows, splits)
        assert splits <= query_tiles.most_splits(problem, config, 90)
        gradients = {"dq": unset(q, call.dims[0]), "dk": unset(k, call.dims[0]), "dv": unset(v, call.dims[1])}
        tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, **gradients}
        tensors |= {} if dlse is None else {"dlse": dlse}
        plan = type("Plan", (), {})()
        plan.chain, block = query_tiles.bound(problem, tensors, scale, config, 0)
        spaces = query_tiles.workspaces(problem, config)
        self.placed.append(passes.placed(spaces, q.dtype, 0)[0])
        assert bool(block) == bool(spaces)
        addresses = [self.place_values(name, tensor) for name, tensor in tensors.items()]
        self.run(plan, [*addresses, self.place_workspaces()] if block else addresses)
        for buffer in self.buffers.values():
            if buffer.name in gradients or buffer.name.startswith("workspace"):
                assert (buffer.written == 1).all(), f"each word of {buffer.name} is written once"
        return gradients


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
    compare(gpu.backward(call, given, right, rows, splits, dlse, order), right)


def test_the_same_bits_each_run(gpu: QueryTilesGpu) -> None:
    call = Call(((140, 90),), (2, 1), (64, 64), CAUSAL)
    given = inputs(call, 0)
    right = wanted(call, given)
    first = gpu.backward(call, given, right, 64, 2)
    gpu.bound.clear()
    gpu.placed.clear()
    again = gpu.backward(call, given, right, 64, 2)
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
        compare(gpu.backward(call, given, right, 128, 1), right)
