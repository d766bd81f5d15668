"""fa2tune: tuned FlashAttention-2 kernels from an on-disk config cache.

``fa2tune.attention(q, k, v)`` computes attention, ``fa2tune.attention_varlen`` that of packed sequences, whose offsets
``fa2tune.cu_seqlens`` makes of position ids or document ids, and whose layers share a ``fa2tune.varlen_schedule``.
``fa2tune.explain`` says which cache row serves such a call and ``fa2tune.is_supported`` whether it is taken here.
``fa2tune.manifest()`` describes what is loaded; ``fa2tune.Mask`` names a mask with its values, ``fa2tune.Score`` a score term.
These names load on first use, so that ``import fa2tune`` costs nothing.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa2tune.calling.ops import attention as attention
    from fa2tune.calling.packing import cu_seqlens as cu_seqlens
    from fa2tune.calling.serving import explain as explain
    from fa2tune.calling.serving import is_supported as is_supported
    from fa2tune.calling.varlen import attention_varlen as attention_varlen
    from fa2tune.calling.varlen_schedules import varlen_schedule as varlen_schedule
    from fa2tune.fleet.manifests import manifest as manifest
    from fa2tune.spec.mask import Mask as Mask
    from fa2tune.spec.score import Score as Score

__version__ = "0.2.0"
__all__ = [
    "Mask",
    "Score",
    "attention",
    "attention_varlen",
    "cu_seqlens",
    "explain",
    "is_supported",
    "manifest",
    "varlen_schedule",
]

#: name -> module, never of the same name: the module would hide what it holds
_LAZY = {
    "Mask": "fa2tune.spec.mask",
    "Score": "fa2tune.spec.score",
    "attention": "fa2tune.calling.ops",
    "attention_varlen": "fa2tune.calling.varlen",
    "cu_seqlens": "fa2tune.calling.packing",
    "explain": "fa2tune.calling.serving",
    "is_supported": "fa2tune.calling.serving",
    "manifest": "fa2tune.fleet.manifests",
    "varlen_schedule": "fa2tune.calling.varlen_schedules",
}
_TOP_LEVEL = ("kernels", "search_spaces", "cache")


class _Checkout:
    """In a bare checkout (or an editable install that maps only this folder) kernels/, search_spaces/ and cache/ stand
    beside this folder. Finds exactly those three below ``fa2tune``, and nothing else of the repository."""

    root = Path(__file__).parent.parent

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, leaf = name.rpartition(".")
        if package == "fa2tune" and leaf in _TOP_LEVEL and (cls.root / leaf).is_dir():
            return PathFinder.find_spec(name, [str(cls.root)])
        return None


if not (Path(__file__).parent / "kernels").is_dir():
    sys.meta_path.append(_Checkout)


#: The thresholds to restore while ``uncollected`` has set others.
_thresholds: tuple[int, int, int] | None = None


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection during a first call, in any thread, until ``collected``: a full collection takes 50 ms once torch
    is imported, and a first call would trigger one or two. This sets the thresholds, so gc.disable() and gc.enable() of the
    program keep their meaning."""
    global _thresholds
    found = gc.get_threshold()
    ours = found[0] != 0  # else it is off already: by the program, or for another thread's first call
    if ours:
        _thresholds = found
        gc.set_threshold(0, *found[1:])
    try:
        yield
    finally:
        if ours:
            _collected(found)  # its own: another thread's block may have begun and ended while this one began


def collected() -> None:
    """Ends ``uncollected`` early, before something slow."""
    _collected(_thresholds)


def _collected(found: tuple[int, int, int] | None) -> None:
    global _thresholds
    _thresholds = None
    if found is not None and gc.get_threshold() == (0, *found[1:]):  # else the program has set its own meanwhile
        gc.set_threshold(*found)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=collected)  # in a child no thread would end it


if not TYPE_CHECKING:  # a type checker would take every name for a public one

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            with uncollected():
                value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
            return value
        raise AttributeError(f"module 'fa2tune' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*__all__, "__version__"])
