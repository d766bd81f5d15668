"""What a file of kernels/scores/ says of its term in plain Python, beside the device functions that kernels ask.

A score term changes the scores between q k^T and softmax. Reading a file needs no Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fa2tune.spec import standins

#: Where the files are.
FOLDER = "fa2tune.kernels.scores"
#: How many run-time numbers kernels take, and the largest that they may be: of float32, with room.
NUMBERS, LARGEST_NUMBER = 2, 3e38

ScoreValues = tuple[float, ...]  #: run-time numbers of a term, in the order of ``ScoreHooks.values``


def _as_given(softmax_scale: float, values: ScoreValues) -> ScoreValues:
    return values


@dataclass(frozen=True)
class Places:
    """Where scores stand, as device functions of a term get it: integers, or tensors of torch that broadcast against them."""

    rows: Any  #: number of the query in its sequence
    columns: Any  #: of the key
    offset: Any  #: seqlen_k - seqlen_q: row i is at place i + offset of the keys
    batch: Any  #: number of the sequence
    head: Any  #: of the query head


@dataclass(frozen=True)
class ScoreHooks:
    """What a file says of its term. Its device functions are the hooks that kernels ask: ``SCORE_HOOKS`` of spec/variant.py."""

    name: str  #: of the file
    #: (scores times softmax_scale, values, where they stand) -> what softmax is taken of: tensors of torch, differentiable, of
    #: one dtype
    transformed: Callable[[Any, ScoreValues, Places], Any]
    values: Mapping[str, tuple[float, float]] = field(
        default_factory=dict
    )  #: run-time number -> (smallest, largest) allowed
    #: (softmax_scale, values) -> what kernels get as score_first and score_second; the scale is not 0
    arguments: Callable[[float, ScoreValues], ScoreValues] = _as_given
    #: whether it reads the number of the sequence or of the head, so that a call is computed whole
    numbered: bool = True

    def __post_init__(self) -> None:
        if len(self.values) > NUMBERS:
            raise ValueError(f"values: got {len(self.values)} of score term {self.name}, kernels take up to {NUMBERS}")


def names() -> list[str]:
    """Of the files in kernels/scores/."""
    return standins.names_in(FOLDER)


@cache
def score_named(name: str) -> ScoreHooks:
    """What the file kernels/scores/<name>.py says of its term. ValueError: there is no such file."""
    return standins.described(FOLDER, name, "SCORE", ScoreHooks)
