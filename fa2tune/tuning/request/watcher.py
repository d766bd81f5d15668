"""What a caller of ``tune`` passes in beside the request: what follows the run, and what its child processes run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fa2tune.tuning.request.jobs import TuningJob
from fa2tune.tuning.request.plan import TuningPlan


@dataclass(frozen=True)
class WorkerFunctions:
    """What child processes run, as "module:function" (another module in tests that have no GPU)."""

    compile_check: str = "fa2tune.tuning.search.compile_check:compile_check"
    race: str = "fa2tune.measuring.measure:race"
    check: str = "fa2tune.measuring.verify:check"
    check_backward: str = "fa2tune.measuring.verify:check_backward"
    machine_code: str = "fa2tune.launching.machine_code:of_config"


#: Of a run for a GPU whose code another one runs (``launching/ported.py``).
PORTED_FUNCTIONS = WorkerFunctions(
    compile_check="fa2tune.tuning.search.compile_check:compile_check_ported",
    race="fa2tune.measuring.ported:race",
    check="fa2tune.measuring.ported:check",
    check_backward="fa2tune.measuring.ported:check_backward",
)


class Watcher:
    """Follows a run; does nothing."""

    def planned(self, plan: TuningPlan, jobs: Sequence[TuningJob]) -> None:
        """Before anything else."""

    def opened(self, job: TuningJob, tasks: Sequence[Any]) -> None:
        """Before the first compile of a job. ``tasks``: its search tasks (``search/task.py``)."""

    def progress(self, done: int, total: int, left_s: float | None, now: str, statuses: Mapping[str, int]) -> None:
        """Candidates finished and to finish, an estimate of the seconds left (None: not known yet), the last result, and the
        reasons of failures so far."""

    def line(self, text: str) -> None:
        """Something worth a line: a key is done, a worker was lost."""
