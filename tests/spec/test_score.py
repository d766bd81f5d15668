"""Score terms on the host: what a call may name, and what a file of kernels/scores/ may say."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from added_terms import add_terms

import fa2tune
from fa2tune.spec import scorefile, standins
from fa2tune.spec.score import NONE, Score, checked, for_operator, of_operator, refuse_numbered, score_of

NAMES = ", ".join(scorefile.names())
CAP = Score("softcap", 30.0)


def test_what_a_call_asks_for() -> None:
    assert score_of() == NONE == score_of(0) == score_of(0.0, "none") == checked(Score("none"))
    assert score_of(30) == CAP == score_of(None, CAP) == checked(Score("softcap", np.float32(30)))
    assert Score("softcap", Fraction(1, 2)).values == (0.5,) and Score("softcap", 3) == Score("softcap", 3.0)


@pytest.mark.parametrize(
    ("score", "text", "kind", "asked"),
    [
        (NONE, "none", "the score term none", ("none",)),
        (CAP, "softcap 30", "a soft cap", ("softcap", 30.0)),
        (Score("mine", 1.5, -2), "mine 1.5 -2", "the score term mine", ("mine", 1.5, -2.0)),
    ],
    ids=str,
)
def test_what_a_term_is_called(score, text, kind, asked) -> None:
    assert (str(score), score.kind, for_operator(score)) == (text, kind, asked)
    assert eval(repr(score)) == score == pickle.loads(pickle.dumps(score))
    assert hash(eval(repr(score))) == hash(score)


def test_an_operator_gets_the_term_that_a_call_names() -> None:
    for score in (NONE, CAP):
        assert of_operator(0.0, *for_operator(score)) == score
    assert of_operator(30.0) == CAP  # softcap=, which was there before names
    assert of_operator(0.0) == NONE


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("softcapp", ValueError, r"^score: got 'softcapp', allowed are " + NAMES),
        ("", ValueError, r"^score: got '', allowed are " + NAMES),
        ("../spec/key", ValueError, r"^score: got '../spec/key', allowed are"),
        ("softcap", ValueError, r"^score: got 'softcap', softcap has 1 value: fa2tune.Score\('softcap', cap\)"),
        (Score("none", 3), ValueError, r"^score: got Score\('none', 3.0\), none has 0 values: fa2tune.Score\('none'\)"),
        (Score("softcap", 0), ValueError, r"^score: got Score\('softcap', 0.0\), cap must be from 0.001 to 1000000.0"),
        (Score("softcap", math.nan), ValueError, r"^score: got Score\('softcap', nan\), cap must be from"),
        (Score("softcap", math.inf), ValueError, r"cap must be from"),
        (50.0, TypeError, r"^score: got 50.0, must be a name or a fa2tune.Score: " + NAMES),
        (("softcap", 2), TypeError, r"^score: got \('softcap', 2\), must be a name or a fa2tune.Score"),
    ],
)  # fmt: skip
def test_a_wrong_term_is_named(given, error, said) -> None:
    with pytest.raises(error, match=said):
        checked(given)


@pytest.mark.parametrize("wrong", [("softcap", "1"), ("softcap", True), ("softcap", 1j), ("softcap", None), (3,)])
def test_a_term_is_a_name_and_numbers(wrong) -> None:
    with pytest.raises(TypeError, match=r"(name|values): got"):
        fa2tune.Score(*wrong)


@pytest.mark.parametrize("score", [Score("softcap"), Score("softcap", 1, 2), Score("softcap", 1, 2, 3), Score("", 2)])
def test_a_term_with_other_values_than_its_file_asks_for_is_refused_in_a_compiled_graph_too(score: Score) -> None:
    with pytest.raises(ValueError, match=r"^score: got "):
        of_operator(0.0, *for_operator(score))


def test_a_term_has_no_more_values_than_kernels_take() -> None:
    with pytest.raises(ValueError, match="values: got 3 of score term wide, kernels take up to 2"):
        replace(scorefile.score_named("softcap"), name="wide", values=dict.fromkeys("abc", (0.0, 1.0)))


def test_a_file_must_say_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    softcap = scorefile.score_named("softcap")
    for held in ({"SCORE": softcap}, {}, {"SCORE": 3}):
        monkeypatch.setattr(standins, "run", lambda module, held=held: held)
        with pytest.raises(ValueError, match=r"kernels/scores/none\.py: SCORE is .*must be ScoreHooks\('none'"):
            scorefile.score_named.__wrapped__("none")


def test_terms_that_read_numbers_are_refused_where_these_are_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    add_terms(monkeypatch)
    for allowed in (None, "none", Score("softcap", 5.0)):
        refuse_numbered(allowed, "a DTensor", "heads")
    with pytest.raises(ValueError, match=r"^score: got alibi with a DTensor, .* allowed are .*none.*, softcap"):
        refuse_numbered(Score("alibi", 8), "a DTensor", "heads")
