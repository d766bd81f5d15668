"""What a call gives as a mask or a score term, for errors; its run-time numbers: as many as its file asks for, each within its
limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def shown(given: Any) -> str:
    """An argument in an error, on one line: a tensor by its shape."""
    shape = getattr(given, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(given).__name__} of shape {tuple(shape)}"
    return f"{given!r:.80}"


def check_limits(
    argument: str, given: Any, named: Any, asked: Mapping[str, tuple[int, int]] | Mapping[str, tuple[float, float]]
) -> None:
    """ValueError names ``argument``, what came and what is allowed.

    Args:
        argument: "mask" or "score".
        given: what the call passes.
        named: the ``fa2tune.Mask`` or ``fa2tune.Score`` that it means.
        asked: number that the file asks for -> (smallest, largest) allowed.
    """
    if len(named.values) != len(asked):
        how = ", ".join([repr(named.name), *asked])
        count = f"{len(asked)} value{'' if len(asked) == 1 else 's'}"
        raise ValueError(
            f"{argument}: got {given!r:.80}, {named.name} has {count}: fa2tune.{type(named).__name__}({how})"
        )
    for (name, (least, most)), value in zip(asked.items(), named.values, strict=True):
        if not least <= value <= most:
            raise ValueError(f"{argument}: got {given!r:.80}, {name} must be from {least} to {most}")
