"""The host's side of a kernel file without Triton: its Variants, for a process that finds its kernels compiled.

A test holds every Variant made so against the real one.
"""

from __future__ import annotations

from fa2tune.spec.standins import Kernel as Kernel
from fa2tune.spec.standins import run
from fa2tune.spec.variant import Variant


def variant(module_name: str) -> Variant:
    """What a module of fa2tune.kernels holds. Raises whatever running it raises: then it has to be imported."""
    found: Variant = run(module_name)["VARIANT"]
    return found
