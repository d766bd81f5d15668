"""What every part of a tuning run writes into: the cache file, the record of trials, the report, the watcher's lines."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fa2tune.measuring import worker
from fa2tune.problem import BACKWARD, Config, TuningKey
from fa2tune.rows import record
from fa2tune.rows.row import Row, over_portable, winner
from fa2tune.tuning import crown
from fa2tune.tuning.plan import Plan
from fa2tune.tuning.study import Outcome
from fa2tune.variant import OPTIONS, WARP_SPECIALIZED, way_of

if TYPE_CHECKING:
    from fa2tune.tuning.family import Family
    from fa2tune.tuning.lots import Lot, OpenLot


@dataclass(frozen=True)
class Hands:
    """What child processes run, as "module:function" (another module in tests that have no GPU)."""

    judge: str = "fa2tune.tuning.judge:judge"
    race: str = "fa2tune.measuring.measure:race"
    check: str = "fa2tune.measuring.verify:check"
    check_backward: str = "fa2tune.measuring.verify:check_backward"


class Watcher:
    """Follows a run; does nothing."""

    def planned(self, plan: Plan, lots: Sequence[Lot]) -> None:
        """Before anything else."""

    def opened(self, lot: OpenLot) -> None:
        """Before its first compile."""

    def progress(self, done: int, total: int, now: str, fates: Mapping[str, int]) -> None:
        """Candidates done and to do, the best of what was last heard of, reasons of failures so far."""

    def line(self, text: str) -> None:
        """Something worth a line: a key is done, a worker was lost."""


@dataclass
class Report:
    """What a run came to."""

    plan: Plan
    rows: list[Row] = field(default_factory=list)
    compiled: int = 0  #: candidates compiled in this run
    compile_seconds: float = 0.0  #: wall time until the last of them
    checked: int = 0  #: numerics checks in this run
    seconds: float = 0.0
    #: shares of that time: of each crew that launches, of all compiling processes together, of this process's processor
    launching: tuple[float, ...] = ()
    compiling: float = 0.0
    bookkeeping: float = 0.0
    fates: Counter[str] = field(default_factory=Counter)  #: reason -> candidates without a time, of this run and before
    interrupted: bool = False

    def take(self, rows: Iterable[Row]) -> None:
        """Add rows; each takes the place of one that was there."""
        found = {record.identity(row): row for row in self.rows}
        self.rows = list((found | {record.identity(row): row for row in rows}).values())

    def leave(self, rows: Iterable[Row]) -> None:
        """Take out rows."""
        gone = {record.identity(row) for row in rows}
        self.rows = [row for row in self.rows if record.identity(row) not in gone]


FILING_SHARE = 20.0  #: filing rows takes one part in so many of the time


class Rows(Protocol):
    """What has the rows: a cache file, or a database."""

    def rows(self) -> list[Row]: ...


@dataclass
class Books:
    plan: Plan
    watcher: Watcher
    hands: Hands
    store: Rows
    toolchain: crown.Toolchain
    report: Report
    #: files those rows that are still this worker's to file, and says which these are
    file_ours: Callable[[Sequence[Row]], Sequence[Row]]
    unfiled: list[tuple[str, Sequence[Row]]] = field(default_factory=list)  #: (title, rows)
    filed: float = 0.0  #: time.monotonic() of the last time
    filing: float = 0.0  #: seconds that it took
    #: what was checked -> its errors, or why it failed
    checked: dict[Any, Mapping[str, Any] | str] = field(default_factory=dict)

    def put(self, rows: Sequence[Row], title: str) -> None:
        """Finished rows, of one lot, to be filed with the next ones."""
        if rows:
            self.report.take(rows)
            self.unfiled.append((title, rows))

    def file(self, at_once: bool = False) -> None:
        """File finished rows: they are safe from here on. A file is written as a whole, so this waits for some to come
        together: a small share of the time goes into it. What another worker has taken over meanwhile is its to find."""
        if not self.unfiled or not (at_once or time.monotonic() >= self.filed + FILING_SHARE * self.filing):
            return
        begun = time.monotonic()
        unfiled = [*self.unfiled]
        ours = {record.identity(row) for row in self.file_ours([row for _, rows in unfiled for row in rows])}
        del self.unfiled[: len(unfiled)]  # only now: Ctrl-C may have come in between
        self.filed = time.monotonic()
        self.filing = self.filed - begun
        for title, rows in unfiled:
            if record.identity(rows[0]) in ours:
                self._tell(rows, title)
            else:
                self.report.leave(rows)
                self.watcher.line(f"{title}: left to the worker that has taken it over")

    def _tell(self, rows: Sequence[Row], title: str) -> None:
        best = winner(rows)
        if best is None:
            self.watcher.line(f"{title}: no row that is served")
            return
        what = described(best)
        gain = "" if best.gain is None else f", {best.gain:.2f} x default"
        lead = over_portable(best, rows)
        gain += "" if lead is None else f", {lead:.2f} x the portable winner"
        self.watcher.line(f"{title}: {best.tflops:.0f} TFLOP/s {best.obtained}, {what}{gain}")

    def put_kept(self, family: Family) -> bool:
        """File the rows an earlier run crowned on these very trials; False if it did not."""
        kept = family.kept()
        for key, rows in kept or []:
            self.put(rows, f"{family.title} {key.bucket} (as before)")
        return kept is not None

    def lost(self, job: worker.Job, what: str) -> None:
        if job.died:
            self.watcher.line(f"lost a worker {what}: {job.failure}")

    def record(self, found: Sequence[tuple[TuningKey, Outcome]], stage: str, **more: Any) -> None:
        """One JSON line per candidate and length, if the request asks for them."""
        path = self.plan.request.record
        if path is None:
            return
        with path.open("a", encoding="utf-8") as file:
            for key, outcome in found:
                entry = {
                    "stage": stage, **asdict(key), "config": dict(outcome.config), "time_us": outcome.time_us,
                    "fate": outcome.fate, "why": outcome.why, **outcome.binary, **more,
                }  # fmt: skip
                file.write(json.dumps(entry) + "\n")


#: What a failure says -> the short word for it. Of a process that lived on, only the first two are the candidate's.
_WORDS = (
    ("out_of_memory", r"out of memory|OutOfMemory|MemoryError|bad_alloc"),
    ("wrong_result", r"WrongResult"),
    ("failed", r"uncorrectable ECC|fallen off the bus|device is lost|no CUDA-capable"),  # the GPU's own, nobody's fault
    ("killed", r"process died \((SIGKILL|SIGTERM|SIGHUP|SIGINT|SIGQUIT)\)"),  # from outside
    ("timeout", r"^no answer within|launch timed out"),
    ("device_assert", r"device-side assert"),
    ("illegal_access", r"illegal memory access|misaligned address|illegal address|illegal instruction|invalid program"),
)


def fate_of(job: worker.Job) -> str:
    """The short word for a job that failed. "failed": not the candidate's doing, as far as anyone knows."""
    if not job.began or (job.failure or "").startswith("MemoryError"):  # Python's own: this host has no more to give
        return "failed"
    return word_for(job.failure or "", _WORDS if job.died else _WORDS[:2], "crash" if job.died else "failed")


def word_for(reason: str, words: Sequence[tuple[str, str]] = _WORDS[:1], otherwise: str = "launch_error") -> str:
    """The short word for a reason; by default, for that of a launch which failed and left its process alive."""
    return next((word for word, says in words if re.search(says, reason)), otherwise)


def describe(config: Config) -> str:
    """A config on half a line: "128x64 pointer first w8 s3 r168 heads-per-wave=4"."""
    both = "BLOCK_M" in config and "BLOCK_N" in config
    parts = [f"{config['BLOCK_M']}x{config['BLOCK_N']}"] if both else []
    if "num_warps" in config and way_of(config) == WARP_SPECIALIZED:
        parts.append(WARP_SPECIALIZED)
    parts += [value for value in config.values() if isinstance(value, str)]
    parts += [short + str(config[name]) for name, short in zip(OPTIONS, "wsr", strict=True) if config.get(name)]
    for name, value in sorted(config.items(), reverse=True):
        said = name in OPTIONS or (both and name in ("BLOCK_M", "BLOCK_N")) or isinstance(value, str) or value is False
        if not said:
            word = name.lower().replace("_", "-")
            parts.append(word if value is True else f"{word}={value}")
    return " ".join(parts)


def described(row: Row) -> str:
    """What a row launches, on half a line: its config; of a whole backward the road, and the ways of the kernels on it."""
    if row.key.kernel != BACKWARD:
        return describe(row.config) or row.variant
    ways = ", ".join(f"{kernel} {way}" for kernel, way in row.config.items())
    return f"{row.road}: {ways}" if ways else row.variant
