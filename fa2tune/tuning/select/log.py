"""What every part of a tuning run writes into: the cache file, the record of trials, the report, the watcher's lines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fa2tune.measuring import worker
from fa2tune.rows import record
from fa2tune.rows.describe import described_row
from fa2tune.rows.row import PORTED, Row, over_portable, winner
from fa2tune.spec.key import TuningKey
from fa2tune.tuning.request.plan import TuningPlan
from fa2tune.tuning.request.provenance import Provenance
from fa2tune.tuning.request.watcher import Watcher, WorkerFunctions
from fa2tune.tuning.search.study import TrialOutcome
from fa2tune.tuning.select.report import Report

if TYPE_CHECKING:
    from fa2tune.tuning.search.task import SearchTask


NONE_RIGHT = "no candidate ran within the limits and gave right results"  #: why a key has no row
FILING_SHARE = 20.0  #: filing rows takes one part in so many of the time


class RowSource(Protocol):
    """What has the rows: a cache file, or a database."""

    def rows(self) -> list[Row]: ...


@dataclass
class Log:
    plan: TuningPlan
    watcher: Watcher
    functions: WorkerFunctions
    store: RowSource
    provenance: Provenance
    report: Report
    #: files those rows that are still this worker's to file, and says which these are
    file_ours: Callable[[Sequence[Row]], Sequence[Row]]
    unfiled: list[tuple[str, Sequence[Row]]] = field(default_factory=list)  #: (title, rows)
    filed: float = 0.0  #: time.monotonic() of the last time
    filing: float = 0.0  #: seconds that it took
    #: what was checked -> its errors, or why it failed
    checked: dict[Any, Mapping[str, Any] | str] = field(default_factory=dict)

    def put(self, key: TuningKey, rows: Sequence[Row], title: str, otherwise: str) -> None:
        """The finished rows of a key, to be filed with the next ones; ``otherwise``: why there are none."""
        if rows:
            self.report.take(rows)
            self.unfiled.append((title, rows))
        else:
            self.fail([key], otherwise)

    def fail(self, keys: Iterable[TuningKey], why: str) -> None:
        """These keys are settled without a row. The first reason stays."""
        for key in keys:
            self.report.failed.setdefault(key, why)

    def file(self, at_once: bool = False) -> None:
        """File finished rows: they are safe from here on. A file is written as a whole, so this waits for some to come
        together: a small share of the time goes into it. What another worker has taken over meanwhile is its to find."""
        if not self.unfiled or not (at_once or time.monotonic() >= self.filed + FILING_SHARE * self.filing):
            return
        begun = time.monotonic()
        unfiled = [*self.unfiled]
        ours = {record.slot(row) for row in self.file_ours([row for _, rows in unfiled for row in rows])}
        del self.unfiled[: len(unfiled)]  # only now: Ctrl-C may have come in between
        self.filed = time.monotonic()
        self.filing = self.filed - begun
        for title, rows in unfiled:
            if record.slot(rows[0]) in ours:
                self._tell(rows, title)
            else:
                self.report.leave(rows)
                self.watcher.line(f"{title}: another worker has taken this job over; its rows count")

    def _tell(self, rows: Sequence[Row], title: str) -> None:
        best = winner(rows)
        if best is None:
            self.watcher.line(f"{title}: no row that a call can use")
            return
        gain = "" if best.gain is None else f", {best.gain:.2f} x portable default"
        lead = over_portable(best, rows)
        gain += "" if lead is None else f", {lead:.2f} x portable"
        on = f" on {best.obtained_on}" if best.obtained == PORTED else ""
        self.watcher.line(f"{title}: {best.tflops:.0f} TFLOP/s {best.obtained}{on}{gain}; {described_row(best)}")

    def put_kept(self, task: SearchTask) -> bool:
        """File the rows an earlier run selected on these very trials; False if it did not."""
        kept = task.kept()
        for key, rows in kept or []:
            self.put(key, rows, f"{task.title} {key.bucket} (kept)", NONE_RIGHT)
        return kept is not None

    def lost(self, job: worker.Job, what: str) -> None:
        if job.died:
            self.watcher.line(f"a child process died while {what}: {job.failure}")

    def record(self, found: Sequence[tuple[TuningKey, TrialOutcome]], stage: str, **more: Any) -> None:
        """One JSON line per candidate and length, if the request asks for them."""
        path = self.plan.request.record
        if path is None:
            return
        lines = [
            json.dumps({
                "stage": stage, **record.key_record(key), "config": dict(outcome.config), "time_us": outcome.time_us,
                "fate": outcome.status, "why": outcome.why, **outcome.binary, **more,
            })
            for key, outcome in found
        ]  # fmt: skip
        try:
            with path.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error  # of a full disk it names no file
