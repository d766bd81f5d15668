"""What kernels visit under a mask, tile after tile: the functions of its file that kernels ask, run on the host.

So the analytic model and the schedules count what kernels do, whichever mask it is: there is no mask that they know by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from fa2tune.spec import maskfile, standins
from fa2tune.spec.mask import Mask

Numbers = Any  #: a numpy array of integers, [tiles]


class Visits(NamedTuple):
    """Rows of the other side that each tile visits, as ``key_range`` in kernels/masks/full.py has them."""

    begin: Numbers
    full_begin: Numbers
    full_end: Numbers
    end: Numbers

    def trips(self, step: int) -> tuple[Numbers, Numbers]:
        """(unmasked, masked) trips of so many rows."""
        begin, full_begin, full_end, end = self
        masked = _trips(begin, full_begin, step) + _trips(full_end, end, step)
        return _trips(full_begin, full_end, step), masked


def _trips(begin: Numbers, end: Numbers, step: int) -> Numbers:
    return (-(-(end - begin) // step)).clip(0)


def bounded(mask: Mask) -> bool:
    """Whether queries may miss keys on either side."""
    return any(maskfile.mask_named(mask.name).bounded.values())


def longest_last(mask: Mask) -> bool:
    """Whether a head's last tiles of queries have the most keys, so that kernels begin with them: of masks bounded on
    the right alone. Tiles of others come in their order."""
    described = maskfile.mask_named(mask.name)
    return described.right and not described.left


def keys_of_tiles(mask: Mask, seqlen_q: int, seqlen_k: int, rows: int, step: int) -> Visits:
    """Keys that tiles of so many queries visit, in steps of so many."""
    window, starts = mask.arguments(seqlen_q, seqlen_k), _starts(seqlen_q, rows)
    return Visits(*_asked(mask.name, "key_range", starts, rows, seqlen_k - seqlen_q, seqlen_k, window, step))


def queries_of_tiles(mask: Mask, seqlen_q: int, seqlen_k: int, keys: int, step: int) -> Visits:
    """Queries that tiles of so many keys visit, in steps of so many."""
    window, starts = mask.arguments(seqlen_q, seqlen_k), _starts(seqlen_k, keys)
    return Visits(*_asked(mask.name, "query_range", starts, keys, seqlen_k - seqlen_q, seqlen_q, window, step))


@lru_cache(maxsize=1024)
def key_blocks(mask: Mask, seqlen_q: int, seqlen_k: int, rows: int, keys: int) -> tuple[Numbers, Numbers]:
    """Of tiles of so many queries in kernels in Gluon: (first, end) of the blocks of so many keys that each visits.
    Both are shared: no caller writes to them."""
    starts, asked = _starts(seqlen_q, rows), (seqlen_q, seqlen_k, mask.arguments(seqlen_q, seqlen_k), keys)
    (end,) = _asked(mask.name, "blocks_below", starts + rows, *asked)
    (first,) = _asked(mask.name, "first_block", starts, *asked)
    return first, end


def most_keys(mask: Mask, seqlen_q: int, seqlen_k: int) -> int:
    """Keys up to the last one that any query sees."""
    return int(keys_of_tiles(mask, seqlen_q, seqlen_k, max(1, seqlen_q), 1).end[-1])


def _starts(length: int, size: int) -> Numbers:
    import numpy as np  # not for reading what a mask says

    return np.arange(0, length, size)


@lru_cache(maxsize=256)
def _hook(name: str, function: str) -> Callable[..., Any]:
    if function not in maskfile.hooks_of(name):
        raise ValueError(f"kernels/masks/{name}.py: {function} is missing, which kernels ask")
    found: Callable[..., Any] = standins.run(f"masks.{name}")[function]
    return found


def _asked(name: str, function: str, places: Numbers, *rest: Any) -> list[Numbers]:
    """What a function of a mask's file says for each place: a number, or several."""
    import numpy as np

    hook = _hook(name, function)
    try:
        found = hook(places, *rest)
    except ValueError:  # a function that branches on a place takes one at a time
        each = [hook(place, *rest) for place in places.tolist()]
        found = tuple(np.array(each).T) if each and isinstance(each[0], tuple) else np.array(each)
    several = found if isinstance(found, tuple) else (found,)
    return [np.broadcast_to(np.asarray(one), places.shape) for one in several]
