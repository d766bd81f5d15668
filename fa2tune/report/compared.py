"""Two caches, key by key: which one's winner is faster, and by how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fa2tune.report.facts import order
from fa2tune.rows.row import TIE_MARGIN, Row, winner
from fa2tune.spec.key import TuningKey

FASTER, SLOWER, ALIKE = "faster", "slower", "alike"
NO_TIMES = "no times"  #: of one of the two
OTHER_EVIDENCE = "other evidence"  #: a measured time says nothing about a predicted one
HERE, THERE = "only here", "only there"
COMPARISONS = (FASTER, SLOWER, ALIKE, OTHER_EVIDENCE, NO_TIMES, HERE, THERE)


@dataclass(frozen=True)
class Compared:
    """One key's winners in both files."""

    key: TuningKey
    here: Row | None
    there: Row | None

    @property
    def ratio(self) -> float | None:
        """Time there over time here: above 1 the row here is the faster one. None without two times of like evidence."""
        if not self.here or not self.there or self.here.obtained != self.there.obtained:
            return None
        if not self.here.time_us or not self.there.time_us:
            return None
        return self.there.time_us / self.here.time_us

    @property
    def state(self) -> str:
        """One of COMPARISONS."""
        if self.here is None or self.there is None:
            return THERE if self.here is None else HERE
        if self.ratio is None:
            return NO_TIMES if self.here.obtained == self.there.obtained else OTHER_EVIDENCE
        if abs(self.ratio - 1) <= TIE_MARGIN:
            return ALIKE
        return FASTER if self.ratio > 1 else SLOWER

    @property
    def same_config(self) -> bool:
        if not self.here or not self.there:
            return False
        return (self.here.filed_as, self.here.config) == (self.there.filed_as, self.there.config)


def compare(rows: Iterable[Row], others: Iterable[Row]) -> list[Compared]:
    """Every key of either file, in the page's order."""
    sides: list[dict[TuningKey, Row]] = []
    for file in (rows, others):
        by_key: dict[TuningKey, list[Row]] = {}
        for row in file:
            by_key.setdefault(row.key, []).append(row)
        sides.append({key: best for key, mine in by_key.items() if (best := winner(mine))})
    here, there = sides
    return [Compared(key, here.get(key), there.get(key)) for key in sorted({*here, *there}, key=order)]


def counts(found: Sequence[Compared]) -> list[tuple[str, int]]:
    """How many keys are in each state, without those that no key is in."""
    met = Counter(c.state for c in found)
    return [(state, met[state]) for state in COMPARISONS if met[state]]
