"""Which (query, key) pairs a call attends: a mask, which is a file of kernels/masks/, with its run-time integers.

``attention(causal=..., window=...)`` names three of them. A window is a band around the diagonal, aligned at the bottom right:
query i of seqlen_q sees keys i + offset - left to i + offset + right, both inclusive, offset = seqlen_k - seqlen_q. Causal is
the band (unbounded, 0), no mask is (unbounded, unbounded), flash-attn's ``window_size=(w, 0)`` is (w, 0).
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fa2tune.spec import maskfile
from fa2tune.spec.maskfile import LARGEST, MOST_VALUES
from fa2tune.spec.maskfile import ROW_MASKS as ROW_MASKS
from fa2tune.spec.values import check_limits, shown

#: What a call passes: (left, right), each None or -1 (unbounded) or a number of keys from 0 on, up to ``LARGEST``.
Window = tuple[int | None, int | None]
#: The mask of a window.
BAND = "band"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Mask:
    """A mask by name, with its run-time integers: ``Mask("causal")``, ``Mask("chunked", 8192)``.

    Args:
        name: of a file in kernels/masks/, which is what is compiled in: "full", "causal", "band", "chunked" or one that
            you added. The error of ``attention(mask="")`` lists them.
        values: as many integers as that file asks for, up to two. They are arguments of the compiled kernels: another value
            takes no other binary.

    Raises:
        TypeError: name is no str, or a value no int.
    """

    name: str
    values: tuple[int, ...]

    def __init__(self, name: str, *values: int) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name: got {name!r:.80}, must be a str, the name of a mask")
        if any(isinstance(value, bool) or not isinstance(value, numbers.Integral) for value in values):
            raise TypeError(f"values: got {values!r:.80}, must be integers")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "values", tuple(int(value) for value in values))

    def __repr__(self) -> str:
        return f"Mask({', '.join(map(repr, (self.name, *self.values)))})"

    def __str__(self) -> str:
        """For people: "full", "causal", "window 1024, 0", "chunked 8192"."""
        return maskfile.mask_named(self.name).text(self.name, self.values)

    @property
    def kind(self) -> str:
        """For people, without values: "a window", "the mask chunked"."""
        named = {BAND: "a window", STACKED: "query heads as one"}
        return named.get(self.name, f"the mask {self.name}")

    @property
    def hooks(self) -> maskfile.MaskHooks:
        """What its file says."""
        return maskfile.mask_named(self.name)

    @property
    def measured(self) -> bool:
        """Whether rows are measured with this mask."""
        return self.name in ROW_MASKS

    @property
    def row_mask(self) -> str:
        """The mask, one of ``ROW_MASKS``, whose rows serve it."""
        return maskfile.mask_named(self.name).row_mask_of(self.values)

    @property
    def window(self) -> Window | None:
        """(left, right) of a band, None where a side is unbounded; None of any other mask."""
        if self.name != BAND:
            return None
        left, right = (None if side == UNBOUNDED else side for side in self.values)
        return left, right

    def fitted(self, seqlen_q: int, seqlen_k: int) -> Mask:
        """The one that is the same for these lengths and costs least: a window that reaches all keys is none."""
        simpler = maskfile.mask_named(self.name).fitted
        return self if simpler is None else Mask(*simpler((seqlen_q, seqlen_k), self.values))

    def arguments(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """What kernels get as window_left and window_right."""
        first, second = _filled(maskfile.mask_named(self.name).arguments((seqlen_q, seqlen_k), self.values))
        return first, second

    def visible(self, rows: Any, columns: Any, seqlen_q: int, seqlen_k: int) -> Any:
        """Which keys (columns, from 0 on) each query (rows, from 0 on) sees: bool, broadcast. Integers or tensors of any
        library."""
        return maskfile.mask_named(self.name).visible(rows, columns, (seqlen_q, seqlen_k), self.values)

    def pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        """(query, key) pairs that one head attends."""
        return _pairs(self, seqlen_q, seqlen_k)


FULL, CAUSAL = Mask("full"), Mask("causal")
#: Causal, of rows that are of several heads.
STACKED = "causal_stacked"
UNBOUNDED = -1  #: a side of a band
ABSENT = -(2**62)  #: what an operator gets for a value that a mask does not have


@lru_cache(maxsize=4096)
def _pairs(mask: Mask, seqlen_q: int, seqlen_k: int) -> int:
    return maskfile.visible_pairs(maskfile.mask_named(mask.name), (seqlen_q, seqlen_k), mask.values)


def _filled(values: tuple[int, ...]) -> tuple[int, ...]:
    return (*values, *[0] * (MOST_VALUES - len(values)))


def band(left: int | None, right: int | None) -> Mask:
    """The mask of a window whose sides are None (unbounded) or numbers of keys: full and causal are two of them."""
    if left is None and right in (None, 0):
        return FULL if right is None else CAUSAL
    return Mask(BAND, *(UNBOUNDED if side is None else side for side in (left, right)))


@lru_cache(maxsize=1024)  # asked of every form that is estimated
def heads_stacked(mask: Mask) -> int:
    """Of how many heads the rows of a query are; 1: there is one row a query."""
    return mask.values[0] if mask.name == STACKED else 1


def queries_of(mask: Mask, rows: int) -> int:
    """How many queries so many rows are of."""
    return -(-rows // heads_stacked(mask))


def row_mask_named(name: str) -> Mask:
    """The mask of a row. ValueError: rows have no such mask."""
    if name not in ROW_MASKS:
        raise ValueError(f"mask: got {name!r:.40}, allowed are {' and '.join(ROW_MASKS)}")
    return CAUSAL if name == "causal" else FULL


def mask_of(causal: bool, window: Any = None, mask: Any = None) -> Mask:
    """What ``attention(causal=..., window=..., mask=...)`` asks for; with ``causal`` a query sees no key after the diagonal,
    whatever ``window`` says of the right side. TypeError or ValueError names the argument and what came."""
    if mask is not None:
        return checked(mask)
    left, right = sides_of(window)
    return band(left, 0 if causal else right)


def checked(given: Any) -> Mask:
    """The mask that a call names. TypeError or ValueError names ``mask``, what came and what is allowed."""
    if not isinstance(given, str | Mask):
        raise TypeError(f"mask: got {shown(given)}, must be a name or a fa2tune.Mask: {', '.join(maskfile.offered())}")
    mask = Mask(given) if isinstance(given, str) else given
    if mask.name not in maskfile.names() or not maskfile.mask_named(mask.name).offered:
        raise ValueError(f"mask: got {mask.name!r:.40}, allowed are {', '.join(maskfile.offered())}")
    check_limits("mask", given, mask, maskfile.mask_named(mask.name).values)
    return mask


def for_operator(mask: Mask) -> tuple[str, int, int]:
    """A mask as operators take it, so that one graph of torch.compile serves all bands. ValueError: it has more values than any
    mask; ``of_operator`` checks the rest."""
    if mask in (FULL, CAUSAL):
        return BAND, UNBOUNDED, 0 if mask == CAUSAL else UNBOUNDED
    if len(mask.values) > MOST_VALUES:  # no repr: torch.compile cannot trace it
        raise ValueError(f"mask: got {len(mask.values)} values of {mask.name}, a mask has at most {MOST_VALUES}")
    first, second = (*mask.values, *[ABSENT] * (MOST_VALUES - len(mask.values)))
    return mask.name, first, second


@lru_cache(maxsize=4096)
def of_operator(name: str, first: int, second: int) -> Mask:
    """What an operator was called with: ``for_operator``. ValueError as ``checked`` has it."""
    mask = checked(Mask(name, *(value for value in (first, second) if value != ABSENT)))
    return mask if mask.window is None else band(*mask.window)


def sides_of(window: Any) -> tuple[int | None, int | None]:
    """(left, right) of a call's ``window``, checked; None: unbounded. TypeError or ValueError names it and what came."""
    allowed = "must be None or a tuple (left, right) of integers from 0 to 2^63 - 1, None or -1 for an unbounded side"
    if window is None:
        return None, None
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"window: got {window!r:.80}, {allowed}")
    found: list[int | None] = []
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, numbers.Integral)):
            raise TypeError(f"window: got {window!r:.80}, {allowed}")
        if side is not None and (side < -1 or not side <= LARGEST):  # more is no argument of an operator
            raise ValueError(f"window: got {window!r:.80}, {allowed}")
        found.append(None if side is None or side == -1 else int(side))
    return found[0], found[1]
