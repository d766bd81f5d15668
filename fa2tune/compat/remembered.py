"""What was made of a tensor that all layers of a model share, until it changes in place or is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

#: Tensor -> its version, and what was made of that by name.
KNOWN: Any = WeakIdKeyDictionary()


def held(tensor: torch.Tensor) -> dict[Any, Any]:
    """Name -> what was made of a tensor as it is; to be added to."""
    # of inference mode nothing tells whether it was changed
    version = 0 if tensor.is_inference() else tensor._version
    known = KNOWN.get(tensor)
    if known is None or known[0] != version:
        known = KNOWN[tensor] = version, {}
    found: dict[Any, Any] = known[1]
    return found


def remembered(tensor: torch.Tensor, name: Any, make: Callable[[], Any], anew: bool = False) -> Any:
    """Made once for a tensor, and where it is asked for ``anew``; while torch.compile makes a graph, each time."""
    if torch.compiler.is_compiling():
        return make()
    found = held(tensor)
    if anew or name not in found:
        found[name] = make()
    return found[name]
