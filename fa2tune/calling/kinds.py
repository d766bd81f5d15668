"""Which implementation of a kernel a row of the whole backward was measured with, and the call therefore asks for."""

from __future__ import annotations

from fa2tune.rows.row import Row, self_named
from fa2tune.spec.variant import WARP_SPECIALIZED

#: Rows of a kernel that are asked for: warp-specialised ones (True), portable ones (False), those of an implementation that
#: names itself ("sm80"), or any (None).
Kind = bool | str | None


def kind_of(implementation: str) -> bool | str:
    """The kind that an implementation is of."""
    return implementation if self_named([implementation]) else implementation == WARP_SPECIALIZED


def kinds_of(row: Row) -> dict[str, bool | str]:
    """Of a whole backward's row: kernel -> what it was measured with."""
    return {kernel: kind_of(implementation) for kernel, implementation in row.config.items()}


def kinds_in_turn(kind: Kind) -> tuple[Kind, ...]:
    """The kinds to look for, one after the other: a portable row stands in where no other can serve."""
    return (kind, False) if kind else (kind,)


def other_kind(row: Row, kind: Kind) -> str | None:
    """Why a kernel's row is none of those asked for; None: it is one."""
    if kind is None or kind_of(row.implementation) == kind:
        return None
    if isinstance(kind, str):
        return f"the whole backward was measured with the {kind} kernel"
    if isinstance(found := kind_of(row.implementation), str):
        return f"the whole backward was not measured with the {found} kernel"
    return f"the whole backward was measured with {'a' if kind else 'no'} warp-specialised kernel"
