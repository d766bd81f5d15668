"""How many rows each sequence of a call has: all as many (dense), or each its own number (ragged), which the GPU alone knows.

A ragged call has tensors of one batch entry, in which sequences lie one after the other, and ``cu_seqlens``, int32, with where
each starts. Kernels ask ``kernels/lib/extent.py``, if their constexpr ``RAGGED`` says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

DENSE, RAGGED = "dense", "ragged"
#: Tensor parameters of kernels with a constexpr RAGGED: a call's own. In a dense call they are compiled in as 0, so they cost
#: nothing.
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
#: Of q and o, where a tile's rows are several query heads: units of 16 bytes from a row to the next, and from the query heads
#: of a key head to the next ones (``_by_member`` in launching/launch.py).
UNITS = ("q_units", "q_group_units", "o_units", "o_group_units")
#: The order of their tiles (kernels/portable/packed_order.py), and how many of them programs have taken.
QUEUE = ("order", "taken")
#: All that packed calls alone have.
PACKED = (*OFFSETS, *QUEUE, *UNITS)
#: Tensors with a row a token: behind a descriptor they have one dimension more (``_addressed`` in launching/launch.py).
PACKED_ROWS_OF = ("q", "k", "v", "o", "do", "dq", "dk", "dv")


@dataclass(frozen=True)
class Extent:
    """Which of the two, and what the host knows of the lengths."""

    name: str = DENSE  #: DENSE or RAGGED: compiled in
    sequences: int = 0  #: of a ragged call, as its offsets count them
    longest: int = 0  #: rows of its longest sequence, as the caller says: chooses among rows of the cache; 0: not known
    parts: int = 1  #: sequences of the offsets for each of the caller's: more than 1 where used lengths divide them
    scheduled: bool = False  #: the order of tiles comes with the call

    @property
    def given(self) -> int:
        """Sequences, as the caller counts them."""
        return self.sequences // self.parts

    def __str__(self) -> str:
        """For people."""
        return self.name if self.name == DENSE else f"{self.given} packed sequences"

    @cached_property  # asked for a hundred times where a plan is made
    def ragged(self) -> bool:
        return self.name == RAGGED

    def tiles(self, batch: int, length: int, block: int) -> int:
        """Tiles of ``block`` rows that are launched for a head; ``length``: rows of a batch entry. In a ragged call there are
        as many as any lengths can need."""
        return length // block + self.sequences + 1 if self.ragged else -(-length // block) * batch

    def length(self, total: int) -> int:
        """Rows of a sequence, as far as the choice of a row of the cache goes: on average; where the longest is known, the
        geometric mean of both, as most of the work lies in longer sequences, and most tiles in shorter ones."""
        if not self.ragged:
            return total
        mean = -(-total // max(1, self.given))
        return round(math.sqrt(mean * self.longest)) if self.longest else mean


WHOLE = Extent()
