"""Score terms in the kernels of kernels/sm80, run by Python: values and gradients, dense and packed, in the forms that a config
can ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from added_terms import add_terms
from gpu_in_python import PythonGpu
from test_computed_in_python import PACKING, Call, check_backward, check_forward

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.compiling import limits
from fa2tune.kernels.scores import none, softcap
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import Score

CAP = Score("softcap", 0.6)  # scores of these inputs reach it
#: A term of rows, columns, sequences and heads.
ALIBI = Score("alibi", 3)
PLACED = [
    Call(((70, 90),), (2, 1), (64, 64), CAUSAL, batch=2, score=ALIBI),
    Call(((90, 70),), (3, 1), (64, 64), FULL, score=ALIBI, softmax_scale=-0.2),
    Call(PACKING[2:], (2, 1), (64, 64), band(40, 10), packed=True, score=ALIBI),
]
CALLS = [
    Call(((70, 90),), (2, 1), (64, 64), CAUSAL, score=CAP),
    Call(((90, 70),), (1, 1), (96, 96), FULL, batch=2, score=CAP, softmax_scale=-0.2),
    Call(((90, 130),), (2, 2), (64, 128), band(40, 10), score=Score("softcap", 30.0)),
    Call(((80, 80),), (1, 1), (128, 128), Mask("chunked", 48), score=CAP),
    Call(PACKING[2:], (2, 1), (64, 64), CAUSAL, packed=True, score=CAP),
    *PLACED,
]
calls = pytest.mark.parametrize("call", CALLS, ids=str)
TILES = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "SCORE_WARPS": 2, "KEY_WARPS": 4, "QUERY_WARPS": 2}
#: P and dS through registers, through shared memory, dP ahead; V in registers.
FORMS: dict[str, dict[str, Any]] = {
    "registers": {**TILES, "P_THROUGH": "registers", "BLOCK_M": 32, "SCORE_WARPS": 1},
    "shared": {**TILES, "P_THROUGH": "shared", "EARLY": False}, "early": {**TILES, "P_THROUGH": "shared", "EARLY": True},
    "held": {**TILES, "P_THROUGH": "shared", "BLOCK_M": 32, "V_IN_REGISTERS": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def terms(monkeypatch: pytest.MonkeyPatch) -> None:
    add_terms(monkeypatch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PythonGpu:
    return PythonGpu(monkeypatch, values=True, arch=80)


@pytest.mark.parametrize("schedule", ["fa2", "double"])
@calls
def test_forward(gpu: PythonGpu, call: Call, schedule: str) -> None:
    check_forward(gpu, call, {"SCHEDULE": schedule}, "sm80/fwd")


@pytest.mark.parametrize("form", FORMS)
@calls
def test_backward(gpu: PythonGpu, call: Call, form: str) -> None:
    check_backward(gpu, call, FORMS[form], "sm80/bwd_fused", through_lse=True)


@pytest.mark.parametrize("form", ["shared", "registers"])
def test_backward_in_a_fixed_order(gpu: PythonGpu, form: str) -> None:
    check_backward(gpu, CALLS[0], {**FORMS[form], "DQ_BUFFERS": 2}, "sm80/bwd_ordered")


def test_half_of_the_warps_may_have_dk(gpu: PythonGpu) -> None:
    call = Call(((100, 130),), (2, 2), (128, 128), CAUSAL, score=CAP)
    form = {**FORMS["shared"], "num_warps": 8, "SCORE_WARPS": 4, "KEY_WARPS": 2, "KEYS_APART": True}
    check_backward(gpu, call, form, "sm80/bwd_fused")


def test_a_derivative_that_is_left_out_is_found(gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forms that take it to dS in different ways."""
    monkeypatch.setattr(softcap, "grad", none.grad)
    for form in ("registers", "shared"):
        gpu.bound.clear()
        with pytest.raises(AssertionError, match="'dq', "):
            check_backward(gpu, CALLS[0], FORMS[form], "sm80/bwd_fused")


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_rows_of_calls_without_a_term_serve(dim: int, mask: Mask) -> None:
    """With the row's config, but for what no term is computed by."""
    problem = Problem("bf16", 4, 16, 16, 4096, 4096, dim, dim, mask)
    capped = replace(problem, score=CAP)
    for gpu in map(gpus.named, ("a100", "rtx-4090")):
        for kernel in ("fwd", "bwd_fused"):
            row, found = (choosing.choose(one, kernel, gpu) for one in (problem, capped))
            assert found.variant is row.variant and found.variant.name == f"sm80/{kernel}"
            assert limits.before_compile(found.variant, capped.specialization, found.config, gpu) is None
            refused = row.config.get("SCORES_APART") or row.config.get("P_THROUGH") == "one"
            if not refused:
                assert found.config == row.config
            else:
                assert (
                    limits.before_compile(row.variant, capped.specialization, row.config, gpu).name == "term_has_room"
                )
