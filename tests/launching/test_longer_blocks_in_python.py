"""The Hopper forward in blocks of 80 keys, run by Python (tests/kernels_in_python.py) next to float64 attention. Results are
poisoned with NaN, as is what lies around q, k and v, and what lies behind a block of K where a product's tile is higher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import kernels_in_python
import numpy as np
import pytest
from in_place_in_python import WholeTilesGpu, check, check_infinite_scores, with_names
from kernel_values import Shared
from public_gpu import public_gpu
from test_computed_in_python import Call
from test_public_calls_in_python import Case, results
from test_public_calls_in_python import inputs as inputs_of

from fa2tune.calling.schedules import longer_blocks_schedule, multistage_schedule
from fa2tune.launching import key_splits
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.sm90 import fwd_80_keys
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.roles import FWD_80_KEYS
from fa2tune.spec.score import Score


def _as_block(units: Shared, first: int, descriptor: Any) -> Shared:
    """The units from ``first`` on that a block fills."""
    shape = [int(n) for n in descriptor.block_type.shape]
    count = int(np.prod(shape)) // units.words[0].size
    return Shared(units.dtype, shape, units.words[first : first + count].reshape(shape))


def _as_rows(units: Shared, first: int, height: int) -> Shared:
    """A block's rows; NaN behind them."""
    columns, keys = units.shape[-1], fwd_80_keys.KEYS
    found = np.full([height, columns], np.nan, units.words.dtype)
    found[:keys] = units.words[first : first + keys // units.shape[1]].reshape(keys, columns)
    return Shared(units.dtype, [height, columns], found)


class LongerGpu(WholeTilesGpu):
    """Shared memory in units is what it is on a GPU, where no unit is seen as a tile of its size."""

    space = fwd_80_keys.SPACE

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        in_units(monkeypatch)

    def config_of(self, problem: Problem, *form: Any) -> Config:
        (turns,) = form
        assert fwd_80_keys.fits(problem.specialization, 90)
        return {**fwd_80_keys.config_of(problem.specialization), "PINGPONG": turns}


def in_units(monkeypatch: pytest.MonkeyPatch, **others: Any) -> None:
    with_names(monkeypatch, unit_as_block=_as_block, unit_as_rows=_as_rows, **others)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LongerGpu:
    return LongerGpu(monkeypatch)


CALLS = [
    Call(((130, 300),), (2, 1), (256, 256), FULL, batch=2),
    Call(((70, 160),), (2, 2), (232, 232), FULL),  # whole blocks
    Call(((128, 161),), (4, 2), (248, 248), FULL),  # a block of one key
    Call(((200, 145),), (1, 1), (200, 200), FULL),  # the last key is the first of a tail
    Call(((64, 144),), (3, 1), (208, 224), FULL),  # and of a main piece
    Call(((1, 77),), (2, 1), (240, 240), FULL),  # one block
    Call(((300, 1),), (2, 1), (256, 256), FULL),
    Call(((77, 565),), (6, 2), (216, 216), FULL, softmax_scale=-0.2),
    Call(((77, 265),), (2, 1), (256, 232), FULL, softmax_scale=2.0),  # maxima rise
    Call(((40, 100),), (2, 1), (224, 224), FULL, softmax_scale=0.0),
]


@pytest.mark.parametrize("turns", [False, True], ids=["", "in turn"])
@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_blocks_of_80_keys(gpu: LongerGpu, call: Call, order: str, turns: bool) -> None:
    check(gpu, call, (turns,), order)


def test_rows_of_infinite_scores_are_nan_as_softmax_has_them(gpu: LongerGpu) -> None:
    call = Call(((70, 200),), (4, 1), (256, 256), FULL)
    check_infinite_scores(gpu, call, (False,))


@pytest.mark.parametrize(
    ("name", "instead", "found"),
    [
        ("products_done", lambda acc: acc, "before it is waited for"),
        ("quotients", lambda acc, _: acc, "'o', "),
        ("sum_parts", lambda weights: weights[:, :1], "'o', "),
        ("shrunk", lambda acc, *_: acc, "'o', "),
        ("expect_both", lambda *_: None, "deadlock"),
    ],
)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, name: str, instead: Any, found: str) -> None:
    gpu = LongerGpu(monkeypatch)
    in_units(monkeypatch, **{name: instead})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 0.5)
    with pytest.raises(AssertionError, match=found):
        check(gpu, Call(((77, 265),), (2, 1), (256, 256), FULL, softmax_scale=2.0), (False,))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wherever the kernel computes a call it is expected to be faster."""
    for name, value in {"LEAST_KEYS": 1, "MARGIN": -100.0, "triton_version": lambda: "3.6.0"}.items():
        monkeypatch.setattr(longer_blocks_schedule, name, value)
    monkeypatch.setattr(multistage_schedule, "MARGIN", 1.0)
    longer_blocks_schedule.config_of.cache_clear()
    yield
    longer_blocks_schedule.config_of.cache_clear()


@pytest.mark.usefixtures("poison", "always")
def test_a_public_call_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    in_units(monkeypatch)
    case = Case((97, 270), (248, 248), FULL, ("sm90/fwd_80_keys",), (6, 3), scale=-0.3)
    given = inputs_of(case)
    with public_gpu() as served:
        found = results(case, given)
        assert tuple(served.ran[:1]) == case.runs
    verify.compare(found, *reference.oracle_and_reference(given, mask=case.mask, softmax_scale=case.scale))


def test_what_the_kernel_takes() -> None:
    problem = Problem("bf16", 1, 8, 2, 2000, 2000, 256, 256, FULL)
    assert key_splits.space_of(problem, 90, FWD_80_KEYS) is fwd_80_keys
    assert key_splits.space_of(replace(problem, head_dim=200, head_dim_v=248), 90, FWD_80_KEYS) is fwd_80_keys
    ragged = replace(problem, extent=Extent(RAGGED, 3))
    for arch, other in (
        (80, problem), (100, problem), (90, replace(problem, dtype="fp32")), (90, replace(problem, tma=False)),
        (90, replace(problem, aligned=False)), (90, ragged), (90, replace(problem, mask=CAUSAL)),
        (90, replace(problem, head_dim_v=192)), (90, replace(problem, head_dim=192)),
        (90, replace(problem, score=Score("softcap", 3.0))),
    ):  # fmt: skip
        assert key_splits.space_of(other, arch, FWD_80_KEYS) is None


def test_its_configs_are_told_from_others() -> None:
    problem = Problem("bf16", 2, 8, 2, 2000, 2000, 256, 256, FULL)
    config = fwd_80_keys.config_of(problem.specialization)
    assert key_splits.has_longer_blocks(config) and key_splits.keys_of_block(config) == fwd_80_keys.KEYS == 80
    assert not key_splits.is_one_tile(config) and not key_splits.is_grouped(config)
    assert key_splits.role_of(config) == FWD_80_KEYS and key_splits.parts_of(config) == 1
    (only,) = key_splits.kernels(problem, config, 90)
    assert only == (key_splits.splitting(config), config, problem) and only[0].name == "sm90/fwd_80_keys"
