"""Which implementation of a kernel a row of the whole backward was measured with, and the call therefore asks for."""

from __future__ import annotations

from dataclasses import dataclass

from fa2tune.rows.row import Row, self_named
from fa2tune.spec.variant import PORTABLE, WARP_SPECIALIZED


@dataclass(frozen=True, slots=True)
class Kind:
    """Rows of a kernel that are asked for. Where None is, any are."""

    implementation: str  #: PORTABLE (by pointer or descriptor), WARP_SPECIALIZED, or one that names itself ("sm80")

    @property
    def special(self) -> bool:
        """Whether portable rows are none of these."""
        return self.implementation != PORTABLE

    @property
    def words(self) -> str:
        """For people."""
        return "warp-specialised" if self == WARP_SPECIALIZED_ROWS else self.implementation


PORTABLE_ROWS, WARP_SPECIALIZED_ROWS = Kind(PORTABLE), Kind(WARP_SPECIALIZED)


def kind_of(implementation: str) -> Kind:
    """The kind that an implementation is of."""
    special = implementation == WARP_SPECIALIZED or self_named([implementation])
    return Kind(implementation) if special else PORTABLE_ROWS


def kinds_of(row: Row) -> dict[str, Kind]:
    """Of a whole backward's row: kernel -> what it was measured with."""
    return {kernel: kind_of(implementation) for kernel, implementation in row.config.items()}


def kinds_in_turn(kind: Kind | None) -> tuple[Kind | None, ...]:
    """The kinds to look for, one after the other: a portable row stands in where no other can serve."""
    return (kind, PORTABLE_ROWS) if kind and kind.special else (kind,)


def other_kind(row: Row, kind: Kind | None) -> str | None:
    """Why a kernel's row is none of those asked for; None: it is one."""
    found = kind_of(row.implementation)
    if kind is None or kind == found:
        return None
    if kind.special and kind != WARP_SPECIALIZED_ROWS:
        return f"the whole backward was measured with the {kind.words} kernel"
    if found.special and found != WARP_SPECIALIZED_ROWS:
        return f"the whole backward was not measured with the {found.words} kernel"
    return f"the whole backward was measured with {'a' if kind.special else 'no'} warp-specialised kernel"
