"""What a run came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from fa2tune.rows import record
from fa2tune.rows.row import Row
from fa2tune.spec.key import TuningKey
from fa2tune.tuning.request.plan import TuningPlan


@dataclass
class Report:
    """What a run came to."""

    plan: TuningPlan
    rows: list[Row] = field(default_factory=list)
    compiled: int = 0  #: candidates compiled in this run
    compile_seconds: float = 0.0  #: wall time until the last of them
    checked: int = 0  #: numerics checks in this run
    seconds: float = 0.0
    #: shares of that time: of each crew that launches, of all compiling processes together, of this process's processor
    launching: tuple[float, ...] = ()
    compiling: float = 0.0
    bookkeeping: float = 0.0
    statuses: Counter[str] = field(
        default_factory=Counter
    )  #: reason -> candidates without a time, of this run and before
    interrupted: bool = False
    failed: dict[TuningKey, str] = field(default_factory=dict)  #: what has no row, and why
    missing: list[TuningKey] = field(default_factory=list)  #: what was asked for, and is not settled

    def take(self, rows: Iterable[Row]) -> None:
        """Add rows; those of a slot take the place of what it held."""
        new = [*rows]
        self.leave(new)
        self.rows += new

    def leave(self, rows: Iterable[Row]) -> None:
        """Empty the slots of rows."""
        gone = {record.slot(row) for row in rows}
        self.rows = [row for row in self.rows if record.slot(row) not in gone]
