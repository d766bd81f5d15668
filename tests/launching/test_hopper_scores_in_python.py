"""Score terms in the forwards of kernels/sm90, run by Python: values, dense and packed, in the forms that a config can ask for,
and which kernel serves such calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernels_in_python
import pytest
from added_terms import add_terms
from gpu_in_python import PythonGpu
from test_computed_in_python import ONE_GROUP, PACKING, TWO_Q_TILES, Call, check_forward, compare, inputs, wanted
from test_grouped_in_python import SMALL, TWO, GroupedGpu
from test_key_parts_in_python import SplitGpu

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.compiling import limits
from fa2tune.kernels.lib.hopper_keys import Seen
from fa2tune.search_spaces.sm90 import fwd
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import Score

CAP = Score("softcap", 0.6)  # scores of these inputs reach it
ALIBI = Score("alibi", 3)  # of rows, columns, sequences and heads
TERMS = pytest.mark.parametrize("score", [CAP, ALIBI], ids=str)


@pytest.fixture(autouse=True)
def terms(monkeypatch: pytest.MonkeyPatch) -> None:
    add_terms(monkeypatch)


FORWARDS: list[tuple[Call, dict[str, Any]]] = [
    (Call(((200, 260),), (2, 1), (128, 128), FULL, batch=2), {}),
    (Call(((70, 270),), (4, 2), (64, 64), CAUSAL), {}),
    (Call(((260, 140),), (2, 2), (64, 64), CAUSAL, softmax_scale=-0.2), {**TWO_Q_TILES, "maxnreg": 0}),
    (Call(((200, 200),), (2, 1), (64, 64), band(60, 10)), ONE_GROUP),
    (Call(((190, 250),), (1, 1), (128, 128), Mask("chunked", 64)), {"RESCALE": "now"}),
    (Call(((130, 130),), (2, 1), (96, 96), CAUSAL, batch=2), {}),
    (Call(((150, 150),), (1, 1), (256, 256), CAUSAL), {}),
    (Call(PACKING, (2, 1), (64, 64), CAUSAL, packed=True), {}),
    (Call(PACKING, (4, 2), (128, 128), FULL, packed=True), {}),
    (Call(PACKING, (2, 1), (64, 64), band(40, 10), packed=True), ONE_GROUP),
]


@TERMS
@pytest.mark.parametrize(("call", "settings"), FORWARDS, ids=str)
def test_forward(monkeypatch: pytest.MonkeyPatch, call: Call, settings: dict[str, Any], score: Score) -> None:
    check_forward(PythonGpu(monkeypatch, values=True), call._replace(score=score), settings)


GROUPED = [
    (Call(((131, 140),), (8, 2), (64, 64), CAUSAL, batch=2), {**TWO, "MEMBERS": 4}),
    (Call(((50, 170),), (3, 1), (56, 56), band(40, 10), softmax_scale=-0.2), {**SMALL, "MEMBERS": 2}),
    (Call(PACKING, (10, 2), (64, 64), CAUSAL, packed=True), {**TWO, "MEMBERS": 2}),
    (Call(PACKING, (3, 1), (64, 64), FULL, packed=True), {**SMALL, "MEMBERS": 4}),
]


@TERMS
@pytest.mark.parametrize(("call", "settings"), GROUPED, ids=str)
def test_tiles_of_several_heads(
    monkeypatch: pytest.MonkeyPatch, call: Call, settings: dict[str, Any], score: Score
) -> None:
    call = call._replace(score=score)
    given = inputs(call, 0)
    o, lse = GroupedGpu(monkeypatch).forward(call, given, settings, scale=call.softmax_scale)
    compare({"o": o, "lse": lse}, wanted(call, given))


SPLIT = [
    (Call(((70, 500),), (4, 2), (128, 128), CAUSAL, batch=2), {"SPLITS": 2}),
    (Call(((200, 530),), (2, 1), (64, 64), band(150, 10), softmax_scale=-0.2), {"SPLITS": 3, "BLOCK_N": 64}),
    (Call(PACKING, (4, 2), (64, 64), CAUSAL, packed=True), {"SPLITS": 4}),
    (Call(PACKING, (2, 2), (128, 128), FULL, packed=True), {"SPLITS": 3, "BLOCK_N": 64, "BLOCK_M": 64}),
]


@TERMS
@pytest.mark.parametrize(("call", "settings"), SPLIT, ids=str)
def test_parts_of_keys(monkeypatch: pytest.MonkeyPatch, call: Call, settings: dict[str, Any], score: Score) -> None:
    call = call._replace(score=score)
    given = inputs(call, 0)
    o, lse, *_ = SplitGpu(monkeypatch).forward(call, given, {"BLOCK_M": 128, **settings}, call.softmax_scale)
    compare({"o": o, "lse": lse}, wanted(call, given))


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 144, 160, 192, 256])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, band(1024, 0)], ids=str)
def test_rows_of_calls_without_a_term_serve(dim: int, mask: Mask) -> None:
    """By Hopper's kernel with the row's config, but for bounds by norms and what leaves a term no registers; or by portable
    ones, where these were measured to be faster."""
    gpu = gpus.named("h200")
    portable = dim <= 64 or (dim > 128 and mask.name == "band")
    for length in (512, 4096, 16384):
        problem = replace(Problem("bf16", 16384 // length, 16, 16, length, length, dim, dim, mask), score=CAP)
        found = choosing.choose(problem, "fwd", gpu)
        assert (found.row or dim < 64) and found.variant.name == ("portable/fwd" if portable else "sm90/fwd")
        assert portable or found.config["maxnreg"] == (128 if dim <= 160 else 0)
        assert limits.before_compile(found.variant, problem.specialization, found.config, gpu) is None


def test_norms_bound_no_scores_beside_a_term() -> None:
    problem = replace(Problem("bf16", 1, 16, 16, 16384, 16384, 128, 128, CAUSAL), score=CAP)
    spec = problem.specialization
    config = {**fwd.SPACE.default(spec, 90), "RESCALE": "never"}
    broken = fwd.SPACE.broken(config, spec, 90)
    assert broken is not None and broken.name == "norms_bound_scores"
    assert fwd.SPACE.broken(config, replace(spec, score="none"), 90) is None
    assert fwd.fitted(spec, config)["RESCALE"] == "lazy"


#: What a term is given wrongly -> a name in the kernels' files, and what is there instead.
FAULTS: dict[str, tuple[str, Any]] = {
    "sequence": ("sequence_of", lambda *_: 0),
    "head": ("Seen", lambda *given: Seen(*given[:-1], 0)),
    "offset": ("Seen", lambda rows, offset, *rest: Seen(rows, offset + 1, *rest)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kernel", ["fwd", "grouped", "split"])
def test_what_a_term_is_given_wrongly_is_found(monkeypatch: pytest.MonkeyPatch, kernel: str, fault: str) -> None:
    name, instead = FAULTS[fault]
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, name: instead})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    call = Call(PACKING, (4, 2), (64, 64), FULL, packed=True, score=ALIBI)
    with pytest.raises(AssertionError, match=r"'lse'|'o'"):
        if kernel == "fwd":
            check_forward(PythonGpu(monkeypatch, values=True), call, {})
        elif kernel == "grouped":
            test_tiles_of_several_heads(monkeypatch, call, {**TWO, "MEMBERS": 2}, ALIBI)
        else:
            test_parts_of_keys(monkeypatch, call, {"SPLITS": 3}, ALIBI)
