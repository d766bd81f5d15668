"""How long a run will go on: an estimate for the progress line."""

from __future__ import annotations

from dataclasses import dataclass

ENOUGH = 4  #: candidates after the first ones, before their pace says anything


@dataclass
class Remaining:
    """``budget_s``: the time budget of the run, if it has one."""

    budget_s: float | None = None
    first: tuple[float, int] | None = None  #: seconds, and candidates done, when the first ones were

    def seconds(self, spent_s: float, done: int, todo: int, finals_s: float) -> float | None:
        """Seconds left, or None before they can be estimated. ``spent_s``: since the run began; ``done``: candidates that
        this run has finished, kept ones not counted; ``todo``: those still to come; ``finals_s``: for final races or checks.

        The pace counts from the first candidate: before it lie imports and the start of child processes. With a time budget
        no candidate is begun after its end, so no more than the rest of it is left."""
        most = None if self.budget_s is None else max(0.0, self.budget_s - spent_s)
        if done and self.first is None:
            self.first = spent_s, done
        if self.first is None or (todo and done < self.first[1] + ENOUGH):
            return None
        pace = (spent_s - self.first[0]) / max(1, done - self.first[1])
        estimate = pace * todo + finals_s
        return estimate if most is None else min(most, estimate)
