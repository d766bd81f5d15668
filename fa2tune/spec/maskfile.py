"""What a file of kernels/masks/ says of its mask in plain Python, beside the device functions that kernels ask.

Reading one needs no Triton. A file of this folder is all there is to a mask: calls, operators, the oracle and the peers of the
benchmark ask it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fa2tune.spec import standins

#: Names of the masks that rows are measured with, in the order of tables.
ROW_MASKS = ("full", "causal")
#: The largest number that an operator of torch takes.
LARGEST = 2**63 - 1
#: Where the files are.
FOLDER = "fa2tune.kernels.masks"
MOST_VALUES = 2
#: The device function that some kernels ask in place of the others: they compare keys with the last one that a row sees, alone.
LAST_KEY = "last_key"

MaskValues = tuple[int, ...]  #: run-time integers of a mask, in the order of ``MaskHooks.values``
Lengths = tuple[int, int]  #: seqlen_q, seqlen_k


def _as_given(lengths: Lengths, values: MaskValues) -> MaskValues:
    return values


def _named(name: str, values: MaskValues) -> str:
    return " ".join([name, ", ".join(map(str, values))]).rstrip()


@dataclass(frozen=True)
class MaskHooks:
    """What a file says of its mask. Its device functions are the hooks that kernels ask: ``HOOKS`` of spec/variant.py."""

    name: str  #: of the file
    left: bool  #: whether a query may see no key to its left from some distance on
    right: bool  #: whether a query may see no key to its right
    #: (rows, columns, lengths, values): whether the queries (from 0 on) see the keys (from 0 on). bool, broadcast; integers, or
    #: arrays or tensors of any library
    visible: Callable[[Any, Any, Lengths, MaskValues], Any]
    #: the mask, one of ROW_MASKS, whose rows serve it; or that of (values)
    row_mask: str | Callable[[MaskValues], str]
    values: Mapping[str, tuple[int, int]] = field(
        default_factory=dict
    )  #: run-time integer -> (smallest, largest) allowed
    #: (lengths, values) -> pairs that one head attends; None: they are counted, a row at a time
    pairs: Callable[[Lengths, MaskValues], int] | None = None
    #: (lengths, values) -> (name, *values) of the mask that is the same for these lengths and costs least; None: itself
    fitted: Callable[[Lengths, MaskValues], tuple[Any, ...]] | None = None
    #: (lengths, values) -> what kernels get as window_left and window_right: 32-bit integers
    arguments: Callable[[Lengths, MaskValues], MaskValues] = _as_given
    text: Callable[[str, MaskValues], str] = _named  #: (name, values) -> for people
    even: bool = False  #: whether queries see about as many keys each, so that tiles take about the same time
    #: whether the last key that a query sees is at most one behind the last one of the query before. Where it is not stated,
    #: no kernel begins with a tile before the one in front is done
    diagonal: bool = False
    #: whether calls may ask for it; else it only takes the place of another, in calls that are not packed
    offered: bool = True
    masked: bool = field(init=False)  #: whether any query may see less than all keys

    def __post_init__(self) -> None:
        object.__setattr__(self, "masked", self.left or self.right)
        if isinstance(self.row_mask, str):
            self.row_mask_of(())
        if len(self.values) > MOST_VALUES:
            raise ValueError(f"values: got {len(self.values)} of mask {self.name}, kernels take up to {MOST_VALUES}")

    @property
    def bounded(self) -> dict[str, bool]:
        """Constexprs of kernels."""
        return {"LEFT_BOUNDED": self.left, "RIGHT_BOUNDED": self.right}

    def row_mask_of(self, values: MaskValues) -> str:
        """One of ROW_MASKS. ValueError: the file says another."""
        found = self.row_mask if isinstance(self.row_mask, str) else self.row_mask(values)
        if found not in ROW_MASKS:
            raise ValueError(f"row_mask: got {found!r:.40} of mask {self.name}, allowed are {' and '.join(ROW_MASKS)}")
        return found


def names() -> list[str]:
    """Of the files in kernels/masks/."""
    return standins.names_in(FOLDER)


def offered() -> list[str]:
    """Those that calls may ask for."""
    return [name for name in names() if mask_named(name).offered]


@cache
def mask_named(name: str) -> MaskHooks:
    """What the file kernels/masks/<name>.py says of its mask. ValueError: there is no such file, or it defines ``last_key`` for
    a mask that has more than a bound on the right."""
    found = standins.described(FOLDER, name, "MASK", MaskHooks)
    if LAST_KEY in _defined(name) and (found.left or not found.right or found.values):
        values = ", ".join(found.values) or "none"
        raise ValueError(
            f"kernels/masks/{name}.py: {LAST_KEY} is defined with left={found.left}, right={found.right}, values: {values}; "
            f"allowed with it are left=False, right=True, values: none"
        )
    return found


def _defined(name: str) -> frozenset[str]:
    found = standins.run(f"masks.{name}")
    return frozenset(each for each, value in found.items() if isinstance(value, standins.Kernel))


@cache
def hooks_of(name: str) -> frozenset[str]:
    """The device functions that the file defines."""
    return _defined(mask_named(name).name)


def pairs_below(rows: int, columns: int, shift: int) -> int:
    """Sum over i < rows of i + shift, each held between 0 and columns: pairs (i, j) with j < i + shift."""
    first = min(max(-shift, 0), rows)  # rows before it have none
    full = min(max(columns - shift, first), rows)  # rows from it on have them all
    ramp = full - first
    return ramp * shift + (first + full - 1) * ramp // 2 + (rows - full) * columns


def visible_pairs(mask: MaskHooks, lengths: Lengths, values: MaskValues) -> int:
    """Pairs that one head attends, by what the mask's file says, or counted."""
    if mask.pairs is not None:
        return mask.pairs(lengths, values)
    import numpy as np  # not for reading a file

    seqlen_q, seqlen_k = lengths
    columns = np.arange(seqlen_k)
    return sum(
        int(np.broadcast_to(mask.visible(np.int64(row), columns, lengths, values), (seqlen_k,)).sum())
        for row in range(seqlen_q)
    )
