"""Plain words for the names under which a row counts the candidates that were never timed (``Row.pruned``).

The names are those of search-space constraints, of limits of a GPU and of failures. Rows and studies store them, so the names
stay as they are; people read these words. A constraint has its own, ``Constraint.short``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fa2tune.spec.standins import is_module
from fa2tune.spec.variant import SearchSpace

BEFORE = "_before"  #: the end of a failure's name where an earlier run met it

WORDS: Mapping[str, str] = {
    # of the search itself
    "not_of_the_family": "what such calls leave out",
    "hopeless": "predicted to be too slow",
    # limits of the GPU, before a compile
    "architecture": "other compute capability",
    "interpreter": "no interpreter runs it",
    "instruction_cache": "loop exceeds the instruction cache",
    "call": "a call that this kernel does not compute",
    "mask": "a mask that this kernel does not compute",
    "score": "a score term that this kernel does not compute",
    "scale": "a negative scale, which this kernel does not compute",
    "extent": "packed sequences, which this kernel does not compute",
    "mma_shape": "block smaller than a tensor-core product",
    "shared_memory_of_tiles": "streamed tiles exceed shared memory",
    "threads_per_block": "too many threads per block",
    # and after it
    "registers": "binary exceeds the registers",
    "shared_memory": "binary exceeds shared memory",
    "spills": "too many spills",
    # failures
    "compile_error": "compile error",
    "crash": "crash",
    "device_assert": "assertion on the device",
    "failed": "failure of the host or GPU",
    "illegal_access": "illegal memory access",
    "killed": "killed from outside",
    "launch_error": "launch error",
    "miscompiled": "wrong machine code",
    "out_of_memory": "out of memory",
    "timeout": "timeout",
    "wrong_result": "wrong result",
}


@cache
def spaces() -> Mapping[str, SearchSpace]:
    """The search space of each kernel that has a file of one, by the kernel's path. They import neither torch nor triton."""
    package, found = importlib.import_module("fa2tune.search_spaces"), dict[str, SearchSpace]()
    for path in sorted(path for root in map(Path, package.__path__) for path in root.glob("*/*.py") if is_module(path)):
        name = f"{path.parent.name}/{path.stem}"
        module = importlib.import_module(f"fa2tune.search_spaces.{name.replace('/', '.')}")
        if isinstance(space := getattr(module, "SPACE", None), SearchSpace):
            found[name] = space
    return found


@cache
def _of_constraints() -> Mapping[str, str]:
    return {rule.name: rule.short for space in spaces().values() for rule in space.constraints}


def words(name: str) -> str:
    """The words for a name. One that is not known, of a newer fa2tune or a constraint that is no more, is shown with spaces."""
    found = WORDS.get(name) or _of_constraints().get(name)
    if found is None and name.endswith(BEFORE):
        return f"{words(name.removesuffix(BEFORE))}, in an earlier run"
    return found or name.replace("_", " ")


def counted(pruned: Mapping[str, int]) -> str:
    """How many candidates each reason excluded, the most first: "tiles exceed shared memory: 31; crash: 7"."""
    most_first = sorted(pruned.items(), key=lambda item: -item[1])
    return "; ".join(f"{words(name)}: {count}" for name, count in most_first)
