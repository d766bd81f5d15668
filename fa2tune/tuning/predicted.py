"""The way for a GPU that is not there: the model predicts times, Triton's interpreter proves the winners' numerics."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fa2tune.measuring.worker import Crew, Job
from fa2tune.problem import BACKWARD, ROADS, SPLIT, Config, TuningKey
from fa2tune.rows.row import Row
from fa2tune.tuning import crown
from fa2tune.tuning.books import Books, fate_of
from fa2tune.tuning.candidates import Point, point
from fa2tune.tuning.family import Family
from fa2tune.tuning.judge import Verdict
from fa2tune.tuning.study import Outcome, cover
from fa2tune.variant import OPTIONS

Task = Generator[Job, Job, Any]

TOLERANCE = 0.01  #: predictions closer than this are called equal
CHECK_DEADLINE = 180.0  #: seconds


class Predicted:
    """Files predictions, crowns by them. Families are crowned side by side, one check a core."""

    tasks_at_once = 1 << 16  #: of a crew
    check_seconds = 2.5  #: of one check of one core, to know how much of a time budget they will take

    def __init__(self, books: Books) -> None:
        self.books = books
        interpreter = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.crews = self.working = [Crew(books.plan.workers, interpreter)]

    def reserve(self, open_: Sequence[Family]) -> float:
        """Seconds to leave for their checks."""
        return len(open_) * 2 * self.check_seconds / self.books.plan.workers

    def problems(self, family: Family) -> list[Any]:
        """What the judge should predict."""
        return [key.workload() for key in family.keys]

    def judged(self, family: Family, config: Config, verdict: Verdict) -> None:
        """A config compiled, and its limits hold: file what the model says."""
        found = [
            (key, Outcome(config, time_us, binary=verdict.binary))
            for key, time_us in zip(family.keys, verdict.predicted_us, strict=True)
        ]
        family.file(config, found)
        self.books.record(found, "predicted")

    def search(self, families: Sequence[Family]) -> tuple[Family, Task] | None:
        """Nothing is launched during the search."""
        return None

    def crown(self, families: Sequence[Family]) -> list[Task]:
        """Per length and way: the fastest by the model that the interpreter proves right."""
        (family,) = families  # nothing but the portable kernels is predicted
        return [self._crowned(family)]

    def _crowned(self, family: Family) -> Task:
        rows: dict[TuningKey, list[Row]] = {key: [] for key in family.keys}
        if not self.books.put_kept(family):
            yield from self._crown(family, rows)
        family.crowned = True

    def _crown(self, family: Family, rows: dict[TuningKey, list[Row]]) -> Task:
        for way in family.ways():
            rival = crown.rival(family.variant.space, family.spec, self.books.plan.target.gpu.arch, way)
            ranks = cover(family.studies.values(), way, rival, TOLERANCE)
            for key, candidates in ranks.items():
                study = family.studies[key]
                default = study.outcomes.get(point(rival))
                for outcome in candidates:
                    errors = yield from self._proved(family, outcome.config)
                    if isinstance(errors, str):
                        study.disqualify(outcome.config, errors)
                        continue
                    assert outcome.time_us is not None
                    rows[key].append(
                        crown.predicted(
                            key, way, outcome.config, self.books.toolchain, outcome.time_us,
                            default.time_us if default else None, errors=errors, **crown.evidence_of(outcome),
                        )
                    )  # fmt: skip
                    break
        for key, found in rows.items():
            study = family.studies[key]
            found = [replace(row, tried=len(study.outcomes), pruned=family.pruned(key)) for row in found]
            study.keep("crowned", study.token, found)
            self.books.put(found, f"{family.title} {key.bucket}")

    def _proved(self, family: Family, config: Config) -> Generator[Job, Job, Any]:
        """Errors of a config in the interpreter, or why it failed. Compile options mean nothing there."""
        constexprs: Point = point({name: value for name, value in config.items() if name not in OPTIONS})
        what = (family.kernel, family.spec, constexprs)
        if what not in self.books.checked:
            arguments = (family.kernel, config, family.spec, self.books.plan.target.gpu.arch, "cpu", True)
            job = yield Job(self.books.hands.check, arguments, CHECK_DEADLINE)
            self.books.report.checked += 1
            self.books.lost(job, f"checking {family.title}")
            self.books.checked[what] = f"{fate_of(job)}: {job.failure}" if job.failure else job.result
        return self.books.checked[what]

    def whole(self, members: Sequence[Family]) -> Task:
        """Split and fused backward of one specialization, from the sums of their kernels' predictions."""
        by_name = {family.kernel: family for family in members}
        gpu = self.books.plan.target.gpu
        for key in members[0].keys:
            best = {name: family.best_row(self.books.report.rows, key) for name, family in by_name.items()}
            default_us = _total(best, ROADS[SPLIT], "default_time_us")
            if default_us is not None:
                default_us += crown.streaming_us(key.workload(), SPLIT, gpu)
            rows = []
            for road, kernels in ROADS.items():
                time_us = _total(best, kernels, "time_us")
                if time_us is None:
                    continue
                time_us += crown.streaming_us(key.workload(), road, gpu)
                errors = crown.worst_errors([row.errors for name in kernels if (row := best[name])])
                rows.append(
                    crown.predicted(
                        key.with_(kernel=BACKWARD), road, {}, self.books.toolchain, time_us, default_us, errors=errors
                    )
                )
            self.books.put(rows, f"{BACKWARD} {members[0].short} {key.bucket}")
        yield from ()


def _total(best: Mapping[str, Row | None], kernels: Sequence[str], column: str) -> float | None:
    """Sum of a time over kernels; None where one has none."""
    times: list[float | None] = [getattr(best[name], column, None) for name in kernels]
    return None if None in times else sum(time for time in times if time is not None)
