"""What a call does to its scores before softmax: a term, which is a file of kernels/scores/, with its run-time numbers."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from fa2tune.spec import scorefile


@dataclass(frozen=True, slots=True)
class Score:
    """A term by name, with its run-time numbers."""

    name: str  #: of its file in kernels/scores/, which is what is compiled in
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        """For people: "none", "softcap 50"."""
        return " ".join([self.name, *(f"{value:g}" for value in self.values)])

    @property
    def kind(self) -> str:
        """For people, without values."""
        return "a soft cap" if self.name == "softcap" else f"the score term {self.name}"

    def arguments(self, softmax_scale: float) -> tuple[float, float]:
        """What kernels get as score_first and score_second, for a scale that is not 0."""
        found = (*scorefile.score_named(self.name).arguments(softmax_scale, self.values), 0.0, 0.0)
        first, second = (max(-scorefile.LARGEST, min(value, scorefile.LARGEST)) for value in found[: scorefile.NUMBERS])
        return first, second

    def transformed(self, scores: Any) -> Any:
        """Scores, times softmax_scale, as softmax takes them: tensors of torch."""
        return scorefile.score_named(self.name).transformed(scores, self.values)


NONE = Score("none")


def score_of(softcap: Any = None) -> Score:
    """What ``attention(softcap=...)`` asks for; None and 0: none. TypeError or ValueError names it and what came."""
    if softcap is None:
        return NONE
    if isinstance(softcap, bool) or not isinstance(softcap, numbers.Real):
        raise TypeError(f"softcap: got {softcap!r:.80}, must be None or a number")
    least, most = scorefile.score_named("softcap").values["cap"]
    cap = float(softcap)
    if cap and not (math.isfinite(cap) and least <= cap <= most):
        raise ValueError(f"softcap: got {softcap!r:.80}, must be from {least:g} to {most:g}, or 0 or None for none")
    return Score("softcap", (cap,)) if cap else NONE
