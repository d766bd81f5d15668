"""Tuning for a GPU that is not present: a model predicts times, Triton's interpreter checks what is selected."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fa2tune.measuring.worker import Crew, Job
from fa2tune.rows.row import SIBLING, Row
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import BACKWARD, SPLIT, Config
from fa2tune.spec.variant import OPTIONS, PORTABLE
from fa2tune.tuning.request.provenance import PROOF
from fa2tune.tuning.search.candidates import Point, point
from fa2tune.tuning.search.compile_check import CompileResult
from fa2tune.tuning.search.status import status_of
from fa2tune.tuning.search.study import SELECTED, TrialOutcome, cover
from fa2tune.tuning.search.task import SearchTask
from fa2tune.tuning.select import evidence, finalists
from fa2tune.tuning.select.gpu_jobs import Steps
from fa2tune.tuning.select.log import NONE_RIGHT, Log

#: By which a config must be predicted to be faster than the default that serves in its place: less is no gain without a
#: measurement.
MARGIN = 0.03
EQUAL_WITHIN = 0.01  #: predictions closer than this are called equal
CHECK_DEADLINE = 180.0  #: seconds


class Predicted:
    """Files predictions, selects by them. Search tasks are selected side by side, one check a core."""

    steps_at_once = 1 << 16  #: of a crew
    check_seconds = 2.5  #: of one check of one core, to know how much of a time budget they will take

    def __init__(self, log: Log) -> None:
        self.log = log
        interpreter = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.crews = self.working = [Crew(log.plan.workers, interpreter)]

    def reserve(self, finals: int) -> float:
        """Seconds to leave for the checks of so many kernels and specializations."""
        return finals * 2 * self.check_seconds / self.log.plan.workers

    def problems(self, task: SearchTask) -> list[Any]:
        """What the compile check should predict."""
        return [key.workload() for key in task.keys]

    def compiled(self, task: SearchTask, config: Config, result: CompileResult) -> None:
        """A config compiled, and its limits hold: file what the model says."""
        found = [
            (key, TrialOutcome(config, time_us, binary=result.binary))
            for key, time_us in zip(task.keys, result.predicted_us, strict=True)
        ]
        task.file(config, found)
        self.log.record(found, "predicted")

    def search(self, tasks: Sequence[SearchTask]) -> tuple[SearchTask, Steps] | None:
        """Nothing is launched during the search."""
        return None

    def select(self, tasks: Sequence[SearchTask]) -> list[Steps]:
        """Per length and implementation: the fastest by the model that the interpreter proves right."""
        portable = next((task for task in tasks if task.variant.portable), tasks[0])
        return [self._selection(task, portable) for task in tasks]

    def _selection(self, task: SearchTask, portable: SearchTask) -> Steps:
        rows: dict[TuningKey, list[Row]] = {key: [] for key in task.keys}
        if not self.log.put_kept(task):
            yield from self._select(task, portable, rows)
        task.selected = True

    def _select(self, task: SearchTask, portable: SearchTask, rows: dict[TuningKey, list[Row]]) -> Steps:
        """``portable``: the task whose default is the one to beat."""
        for implementation in task.space.implementations():
            rival = finalists.rival(portable.variant.space, task.spec, self.log.plan.target.gpu.arch, implementation)
            ranks = cover(task.studies.values(), implementation, rival, EQUAL_WITHIN)
            for key, ranked in ranks.items():
                study = task.studies[key]
                default = portable.studies[key].outcomes.get(point(rival))
                candidates = (
                    with_margin(ranked, rival, default.time_us if default else None) if task.proven is None
                    else with_margin(ranked, task.default)
                )  # fmt: skip
                wrong = ""
                for outcome in candidates:
                    errors = yield from self._proved(task, outcome.config)
                    if isinstance(errors, str):
                        study.disqualify(outcome.config, wrong := errors)
                        continue
                    assert outcome.time_us is not None
                    rows[key].append(
                        evidence.predicted(
                            key, implementation, outcome.config, self.log.provenance, outcome.time_us,
                            default.time_us if default else None, errors=errors, **evidence.evidence_of(outcome),
                            **({} if task.proven is None else {"proof": PROOF[SIBLING]}),
                        )
                    )  # fmt: skip
                    break
                else:
                    if wrong and task.proven is None:  # that no GPU has run a config is no fault
                        self.log.watcher.line(f"{task.title} {key.bucket}: no row by {implementation}: {wrong}")
        for key, found in rows.items():
            study = task.studies[key]
            found = [replace(row, tried=len(study.outcomes), pruned=task.pruned(key)) for row in found]
            study.keep(SELECTED, study.token, found)
            self.log.put(key, found, f"{task.title} {key.bucket}", NONE_RIGHT)

    def _proved(self, task: SearchTask, config: Config) -> Generator[Job, Job, Any]:
        """Errors of a config in the interpreter, or why it failed. Compile options mean nothing there. Of a kernel that it does
        not run, those that a row has."""
        if task.proven is not None:
            return task.proven.get(point(config), "not_run: no GPU has run this config, and Gluon has no interpreter")
        constexprs: Point = point({name: value for name, value in config.items() if name not in OPTIONS})
        what = (task.kernel, task.spec, constexprs)
        if what not in self.log.checked:
            arguments = (task.kernel, config, task.spec, self.log.plan.target.gpu.arch, "cpu", True)
            job = yield Job(self.log.functions.check, arguments, CHECK_DEADLINE)
            self.log.report.checked += 1
            self.log.lost(job, f"checking {task.title}")
            self.log.checked[what] = f"{status_of(job)}: {job.failure}" if job.failure else job.result
        return self.log.checked[what]

    def whole(self, members: Sequence[SearchTask]) -> Steps:
        """Split and fused backward of one specialization, with and without warp-specialised kernels, from the sums of their
        kernels' predictions."""
        gpu = self.log.plan.target.gpu
        for key in members[0].keys:
            variants = evidence.backward_variants(self.log.report.rows, key)
            default_us = _total(variants.get((SPLIT, PORTABLE), {}), "default_time_us")
            if default_us is not None:
                default_us += evidence.streaming_us(key.workload(), SPLIT, gpu)
            what, rows = key.with_(kernel=BACKWARD), []
            for (strategy, implementation), of in variants.items():
                time_us = _total(of, "time_us")
                if time_us is None:
                    continue
                time_us += evidence.streaming_us(key.workload(), strategy, gpu)
                errors = evidence.worst_errors([row.errors for row in of.values()])
                named = {name: row.implementation for name, row in of.items()}
                made = evidence.predicted(
                    what, implementation, named, self.log.provenance, time_us, default_us, strategy, errors=errors
                )
                rows.append(made)
            self.log.put(what, rows, f"{BACKWARD} {members[0].short} {key.bucket}", NONE_RIGHT)
        yield from ()


def with_margin(ranked: Sequence[TrialOutcome], default: Config, default_us: float | None = None) -> list[TrialOutcome]:
    """Candidates by predicted time, with the default before those that are not faster by more than the model can tell.
    ``default_us``: the time of a default of another implementation, which serves where none is faster by so much."""
    known = next((outcome for outcome in ranked if outcome.config == default), None)
    bound = default_us if known is None else known.time_us
    if bound is None:
        return [*ranked]
    ahead = [outcome for outcome in ranked if (outcome.time_us or 0.0) * (1 + MARGIN) <= bound]
    if known is None:
        return ahead
    return [*ahead, known, *(outcome for outcome in ranked if outcome not in ahead and outcome is not known)]


def _total(of: Mapping[str, Row], column: str) -> float | None:
    """Sum of a time over the rows of kernels; None where there are none, or one has no such time."""
    times: list[float | None] = [getattr(row, column) for row in of.values()]
    return None if not times or None in times else sum(time for time in times if time is not None)
