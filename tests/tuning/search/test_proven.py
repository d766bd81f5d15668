"""Which configs of kernels that no interpreter runs may be tried without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sm80_runs import DEFAULT, FORWARD, of_another_gpu
from tuner_runs import SPEC

from fa2tune.compiling.registry import portable_of
from fa2tune.rows.row import PREDICTED, Row
from fa2tune.spec.problem import Specialization
from fa2tune.tuning.search.candidates import point
from fa2tune.tuning.search.proven import proven

pytestmark = pytest.mark.usefixtures("quick_starts")


def test_what_counts_as_proved() -> None:
    other = {**DEFAULT, "BLOCK_M": 64}
    assert proven(portable_of("fwd"), SPEC, 80, []) is None

    def found(one: Row, spec: Specialization = SPEC) -> bool:
        known = proven(FORWARD, spec, 80, [one])
        assert known is not None and next(iter(known)) == point(FORWARD.space.default(spec, 80))
        return point(other) in known

    assert found(of_another_gpu(other))
    assert found(of_another_gpu(other), replace(SPEC, head_dim=96, head_dim_v=96))  # padded alike
    assert not found(of_another_gpu(other), replace(SPEC, head_dim=64, head_dim_v=64))
    assert not found(of_another_gpu(other), replace(SPEC, mask="full"))
    assert not found(of_another_gpu(other), replace(SPEC, dtype="fp16"))
    assert not found(of_another_gpu(other, errors={}))
    assert not found(replace(of_another_gpu(other), obtained=PREDICTED))
