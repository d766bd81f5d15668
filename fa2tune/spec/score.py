"""What a call does to its scores before softmax: a term, which is a file of kernels/scores/, with its run-time numbers.

``attention(softcap=...)`` names one of them, ``attention(score=...)`` any.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fa2tune.spec import scorefile
from fa2tune.spec.values import check_limits, shown


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Score:
    """A score term by name, with its run-time numbers: ``Score("softcap", 50.0)``.

    Args:
        name: of a file in kernels/scores/, which is what is compiled in: "none", "softcap" or one that you added. The error of
            ``attention(score="")`` lists them.
        values: as many numbers as that file asks for, up to two. They are arguments of the compiled kernels: another value
            takes no other binary.

    Raises:
        TypeError: name is no str, or a value no real number.
    """

    name: str
    values: tuple[float, ...]

    def __init__(self, name: str, *values: float) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name: got {name!r:.80}, must be a str, the name of a score term")
        if any(isinstance(value, bool) or not isinstance(value, numbers.Real) for value in values):
            raise TypeError(f"values: got {values!r:.80}, must be real numbers")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "values", tuple(float(value) for value in values))

    def __repr__(self) -> str:
        return f"Score({', '.join(map(repr, (self.name, *self.values)))})"

    def __str__(self) -> str:
        """For people: "none", "softcap 50"."""
        return " ".join([self.name, *(f"{value:g}" for value in self.values)])

    @property
    def kind(self) -> str:
        """For people, without values."""
        return "a soft cap" if self.name == "softcap" else f"the score term {self.name}"

    @property
    def numbered(self) -> bool:
        """Whether it reads the number of the sequence or of the head."""
        return scorefile.score_named(self.name).numbered

    def arguments(self, softmax_scale: float) -> tuple[float, float]:
        """What kernels get as score_first and score_second, for a scale that is not 0."""
        found = (*scorefile.score_named(self.name).arguments(softmax_scale, self.values), 0.0, 0.0)
        first, second = (
            max(-scorefile.LARGEST_NUMBER, min(value, scorefile.LARGEST_NUMBER)) for value in found[: scorefile.NUMBERS]
        )
        return first, second

    def transformed(self, scores: Any, places: scorefile.Places) -> Any:
        """Scores, times softmax_scale, as softmax takes them: tensors of torch."""
        return scorefile.score_named(self.name).transformed(scores, self.values, places)


NONE = Score("none")
#: What an operator gets for a value that a score term does not have: beyond what kernels can hold.
NO_VALUE = -1e300


def score_of(softcap: Any = None, score: Any = None) -> Score:
    """What ``attention(softcap=..., score=...)`` asks for. TypeError or ValueError names the argument and what came."""
    return _capped(softcap) if score is None else checked(score)


def _capped(softcap: Any) -> Score:
    """None and 0: none."""
    if softcap is None:
        return NONE
    if isinstance(softcap, bool) or not isinstance(softcap, numbers.Real):
        raise TypeError(f"softcap: got {softcap!r:.80}, must be None or a number")
    cap: Any = softcap  # numbers.Real has no types of its operators
    least, most = scorefile.score_named("softcap").values["cap"]
    if cap and not least <= cap <= most:
        raise ValueError(f"softcap: got {softcap!r:.80}, must be from {least:g} to {most:g}, or 0 or None for none")
    return Score("softcap", cap) if cap else NONE


def checked(given: Any) -> Score:
    """The score term that a call names. TypeError or ValueError names ``score``, what came and what is allowed."""
    if not isinstance(given, str | Score):
        raise TypeError(f"score: got {shown(given)}, must be a name or a fa2tune.Score: {', '.join(scorefile.names())}")
    score = Score(given) if isinstance(given, str) else given
    check_limits("score", given, score, scorefile.score_named(score.name).values)
    return score


def refuse_numbered(given: Any, what: str, divides: str) -> None:
    """ValueError: ``score`` of a call that is computed in parts (``what`` names what divides it, into ``divides``) reads the
    number of the sequence or of the head, which a part counts anew. Else as ``checked``."""
    if given is None or not (score := checked(given)).numbered:
        return
    allowed = ", ".join(name for name in scorefile.names() if not scorefile.score_named(name).numbered)
    raise ValueError(
        f"score: got {score.name} with {what}, which divides {divides}, while the term may read their numbers; allowed are "
        f"{allowed}, and terms whose file says numbered=False"
    )


def for_operator(score: Score) -> tuple[Any, ...]:
    """A score term as operators take it: its name and its values. (What it does not have is their default: passed on, a number
    of this module would be an input of a dynamic graph.) ValueError: it has more values than any; ``of_operator`` checks the
    rest."""
    if len(score.values) > scorefile.NUMBERS:  # no repr: torch.compile cannot trace it
        raise ValueError(
            f"score: got {len(score.values)} values of {score.name}, a score term has at most {scorefile.NUMBERS}"
        )
    return score.name, *score.values


@lru_cache(maxsize=4096)
def of_operator(softcap: float, name: str | None = None, first: float = NO_VALUE, second: float = NO_VALUE) -> Score:
    """What an operator was called with: ``softcap``, or where ``name`` is not None ``for_operator``. ValueError as ``score_of``
    has it."""
    if name is None:
        return score_of(softcap)
    return checked(Score(name, *(value for value in (first, second) if value != NO_VALUE)))
