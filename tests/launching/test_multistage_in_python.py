"""The Hopper forward whose warps load for themselves, run by Python (tests/kernels_in_python.py) beside float64 attention.
Results are poisoned with NaN, as is what lies around q, k and v. A copy lands when its barrier is waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernels_in_python
import pytest
from in_place_in_python import LateGpu, check, check_infinite_scores
from public_gpu import public_gpu
from test_computed_in_python import Call
from test_public_calls_in_python import Case, results
from test_public_calls_in_python import inputs as inputs_of

from fa2tune.calling.schedules import multistage_schedule
from fa2tune.launching import key_splits
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.sm90 import fwd_multistage
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.roles import FWD_MULTISTAGE
from fa2tune.spec.score import Score


class MultistageGpu(LateGpu):
    space = fwd_multistage.SPACE

    def config_of(self, problem: Problem, *form: Any) -> Config:
        (keys,) = form  # of a block
        assert (64, keys) in fwd_multistage.tiles(problem.specialization, 90)
        return fwd_multistage.config_of(problem.specialization, 64, keys)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> MultistageGpu:
    return MultistageGpu(monkeypatch)


CALLS = [
    # lengths, heads, head dims, mask, batch: keys of a block
    (Call(((70, 60),), (2, 2), (64, 64), FULL, batch=2), 64),  # one block
    (Call(((130, 400),), (4, 2), (64, 64), FULL), 64),  # more blocks than stages
    (Call(((64, 256),), (2, 1), (192, 192), FULL), 128),  # two parts, as many blocks as stages
    (Call(((100, 385),), (2, 1), (192, 192), FULL), 128),
    (Call(((65, 200),), (2, 1), (256, 256), FULL), 64),
    (Call(((200, 200),), (3, 1), (128, 128), CAUSAL), 64),
    (Call(((300, 130),), (2, 2), (80, 80), CAUSAL), 64),  # queries that see no key
    (Call(((70, 500),), (2, 1), (160, 96), CAUSAL, batch=2), 128),
    (Call(((129, 321),), (2, 1), (256, 256), CAUSAL, softmax_scale=-0.2), 64),
    (Call(((77, 265),), (6, 2), (96, 96), FULL, softmax_scale=2.0), 64),  # maxima rise
    (Call(((40, 300),), (2, 1), (224, 224), CAUSAL, softmax_scale=0.0), 64),
]


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize(("call", "keys"), CALLS, ids=str)
def test_blocks_in_stages(gpu: MultistageGpu, call: Call, keys: int, order: str) -> None:
    check(gpu, call, (keys,), order)


def test_rows_of_infinite_scores_are_nan_as_softmax_has_them(gpu: MultistageGpu) -> None:
    call = Call(((70, 200),), (4, 1), (128, 128), FULL)
    check_infinite_scores(gpu, call, (64,))


@pytest.mark.parametrize(
    ("name", "instead", "found"),
    [
        ("products_done", lambda acc: acc, "before it is waited for"),
        ("quotients", lambda acc, _: acc, "'o', "),
        ("sum_parts", lambda weights: weights[:, :1], "'o', "),
        ("shrunk", lambda acc, *_: acc, "'o', "),
        ("expect_parts", lambda *_: None, "deadlock"),
    ],
)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, name: str, instead: Any, found: str) -> None:
    gpu = MultistageGpu(monkeypatch, **{name: instead})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 0.5)
    with pytest.raises(AssertionError, match=found):
        check(gpu, Call(((77, 365),), (2, 1), (128, 128), FULL, softmax_scale=2.0), (64,))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "case",
    [
        Case((97, 270), (248, 248), FULL, ("sm90/fwd_multistage",), (6, 3), scale=-0.3),
        Case((130, 90), (64, 64), CAUSAL, ("sm90/fwd_multistage",), (6, 2), dtype="fp16"),  # queries that see no key
    ],
    ids=str,
)
def test_a_public_call_with_gradients(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multistage_schedule, "MARGIN", -100.0)
    given = inputs_of(case)
    with public_gpu() as served:
        found = results(case, given)
        assert tuple(served.ran[:1]) == case.runs
    verify.compare(found, *reference.oracle_and_reference(given, mask=case.mask, softmax_scale=case.scale))


def test_what_the_kernel_takes() -> None:
    problem = Problem("bf16", 1, 8, 2, 500, 500, 256, 256, FULL)
    assert key_splits.space_of(problem, 90, FWD_MULTISTAGE) is fwd_multistage
    assert fwd_multistage.tiles(problem.specialization, 90) == ((64, 64),)
    assert fwd_multistage.tiles(replace(problem, head_dim=128, head_dim_v=128).specialization, 90) == (
        (64, 64),
        (64, 128),
    )
    for arch, other in (
        (80, problem), (100, problem), (90, replace(problem, dtype="fp32")), (90, replace(problem, tma=False)),
        (90, replace(problem, aligned=False)), (90, replace(problem, extent=Extent(RAGGED, 3))),
        (90, replace(problem, mask=Mask("band", 30, 30))), (90, replace(problem, score=Score("softcap", 3.0))),
    ):  # fmt: skip
        assert key_splits.space_of(other, arch, FWD_MULTISTAGE) is None


def test_its_configs_are_told_from_others() -> None:
    problem = Problem("bf16", 2, 8, 2, 500, 500, 128, 128, CAUSAL)
    for rows, keys in fwd_multistage.tiles(problem.specialization, 90):
        config = fwd_multistage.config_of(problem.specialization, rows, keys)
        assert key_splits.is_multistage(config) and not key_splits.is_one_tile(config)
        assert key_splits.role_of(config) == FWD_MULTISTAGE and key_splits.parts_of(config) == 1
        (only,) = key_splits.kernels(problem, config, 90)
        assert only == (key_splits.splitting(config), config, problem) and only[0].name == "sm90/fwd_multistage"
        assert fwd_multistage.programs(problem, config) == 2 * 8 * -(-500 // rows)
