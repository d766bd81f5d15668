"""Which mask and which score term a call asks for: checks of causal, window, mask, softcap and score, and what operators get of
them. A file of kernels/ is not read while a graph is made: the operator checks names and values.
"""

from __future__ import annotations

from typing import Any

import torch

from fa2tune.calling import arguments
from fa2tune.spec import mask as masks
from fa2tune.spec import score as scores
from fa2tune.spec.combinations import why
from fa2tune.spec.mask import Mask, Window
from fa2tune.spec.score import Score
from fa2tune.spec.values import shown

_compiling = torch.compiler.is_compiling


def check_mask(causal: Any, window: Any, mask: Any) -> None:
    """TypeError or ValueError that names the argument, what came and what is allowed."""
    arguments.check_among("causal", causal, (True, False))
    masks.sides_of(window)
    if mask is None:
        return
    if isinstance(causal, torch.SymBool) or causal or window is not None:
        other, given = ("causal", "causal=True") if window is None else ("window", f"window={window!r:.40}")
        raise ValueError(f"mask: got {shown(mask)} and {given}, {why('mask', other)}")
    if not _compiling():
        masks.checked(mask)


def check_score(softcap: Any, score: Any) -> None:
    """TypeError or ValueError that names the argument, what came and what is allowed."""
    if softcap is True or softcap is False:  # an operator would take them as 1 and 0
        raise TypeError(f"softcap: got {softcap}, must be None or a number")
    if not _compiling():
        scores.score_of(softcap)
    if score is None:
        return
    if softcap:
        raise ValueError(f"score: got {shown(score)} and softcap={softcap!r:.40}, {why('score', 'softcap')}")
    if not _compiling():
        scores.checked(score)


def mask_for_operator(causal: bool, window: Window | None, mask: str | Mask | None) -> tuple[str, int, int]:
    """(name, first, second)."""
    if mask is None:
        return "band", *_sides(causal, window)
    return masks.for_operator(Mask(mask) if isinstance(mask, str) else mask)


def _sides(causal: bool, window: Window | None) -> tuple[int, int]:
    """-1 for an unbounded side. Where ``causal`` is not known while a graph is made, the right side is not, either, so that one
    graph serves both."""
    left, right = (-1 if side is None else side for side in masks.sides_of(window))
    # of a symbolic one torch.compile says that it is a bool, and neither True nor False
    symbolic = isinstance(causal, (bool, torch.SymBool)) and causal is not True and causal is not False
    if symbolic:
        return left, torch.sym_ite(causal, 0 * right, right)  # both of one type
    return left, 0 if causal else right


def score_for_operator(softcap: float | None, score: str | Score | None) -> tuple[Any, ...]:
    """(softcap,), or (0, name, values)."""
    if score is not None:
        return 0.0, *scores.for_operator(Score(score) if isinstance(score, str) else score)
    cap: Any = softcap or 0.0
    return (cap if _compiling() else float(cap),)  # of whatever kind of number
