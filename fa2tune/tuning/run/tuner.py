"""The tuner: proposes configs, compiles them ahead in parallel, times or predicts them, and selects a row for every key.

Child processes do the work (``measuring/worker.py``): some compile and check limits (``compiles.py``), others launch
(``launches.py``), one for each GPU or, for a GPU that is not present, in Triton's interpreter. This process only schedules and
records, for the tuning jobs on which it holds leases (``held_jobs.py``): all of them, unless other workers share its storage.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from fa2tune.compiling import fingerprint
from fa2tune.measuring import worker
from fa2tune.rows.row import PORTED, PREDICTED
from fa2tune.rows.store import Store
from fa2tune.sharing.leases import Leases
from fa2tune.sharing.shared import SharedStore
from fa2tune.sharing.study_writer import StudyWriter
from fa2tune.tuning.request import jobs
from fa2tune.tuning.request.plan import TuneRequest, TuningPlan, make_plan
from fa2tune.tuning.request.provenance import Provenance
from fa2tune.tuning.request.watcher import PORTED_FUNCTIONS, Watcher, WorkerFunctions
from fa2tune.tuning.run.budget import Budget
from fa2tune.tuning.run.compiles import Compiles
from fa2tune.tuning.run.filing import Filing
from fa2tune.tuning.run.held_jobs import HeldJobs
from fa2tune.tuning.run.launches import Launches
from fa2tune.tuning.run.open_jobs import unmodelled
from fa2tune.tuning.run.progress import Progress
from fa2tune.tuning.search.failures import FailureRecord, FailureScope
from fa2tune.tuning.select import completeness
from fa2tune.tuning.select.log import Log
from fa2tune.tuning.select.measured import Measured
from fa2tune.tuning.select.predicted import Predicted
from fa2tune.tuning.select.report import Report

GPUS_A_WRITER = 2  #: whose trials one process can store


def tune(request: TuneRequest, watcher: Watcher | None = None, functions: WorkerFunctions | None = None) -> Report:
    """Tune what ``request`` asks for and write the rows to its cache. Ctrl-C ends early and keeps what is finished.

    ValueError: a bad request, before anything is compiled."""
    plan = make_plan(request)
    own = PORTED_FUNCTIONS if plan.target.obtained == PORTED else WorkerFunctions()
    return Run(plan, watcher or Watcher(), functions or own).go()


def _provenance(obtained: str) -> Provenance:
    if obtained == PREDICTED:
        return Provenance(obtained)
    import torch

    return Provenance(obtained, torch.cuda.get_device_name(), fingerprint.driver_version())


class Run:
    """One run of the tuner."""

    def __init__(self, plan: TuningPlan, watcher: Watcher, functions: WorkerFunctions) -> None:
        self.plan = plan
        self.cpu = time.process_time()
        predicted = plan.target.obtained == PREDICTED
        made = _provenance(plan.target.obtained)
        gpus = plan.workers if predicted else len(plan.devices)
        self.leases = Leases(plan.storage, jobs.campaign(plan, made), jobs.request_token(plan), gpus)
        all_jobs = {job.name: job for job in jobs.tuning_jobs(plan)}
        store = SharedStore(plan.storage) if plan.cache is None else Store(plan.cache)
        filing = Filing(plan.storage, self.leases, all_jobs, store)
        self.log = Log(plan, watcher, functions, store, made, Report(plan), filing.file)
        plan.storage.say = watcher.line
        self.writer = StudyWriter(plan.storage, -(-len(plan.devices) // GPUS_A_WRITER))
        scope = FailureScope(made.stamp()["triton"], made.obtained_on, made.driver)
        record = FailureRecord(plan.storage, scope)
        self.held = HeldJobs(all_jobs, self.log, self.leases, self.writer, record, jobs.stamp(made))
        self.method = Predicted(self.log) if predicted else Measured(self.log)
        self.budget = Budget(plan.time_budget_s, self.method.reserve)
        self.compiles = Compiles(self.method, self.held, self.budget)
        self.launches = Launches(self.method, self.held, self.budget)
        self.progress = Progress(self.held, self.budget)

    def go(self) -> Report:
        """Until every key is settled, the time budget is used up, or Ctrl-C."""
        report = self.log.report
        self.log.watcher.planned(self.plan, [*self.held.jobs.values()])
        if unknown := unmodelled(self.plan):
            gpu = self.plan.target.gpu.name
            self.log.watcher.line(
                f"not searched, as no model predicts them: {', '.join(unknown)}; a {gpu} would time them"
            )
        with ExitStack() as end:  # in the reverse order, each whatever becomes of the others
            end.callback(self.leases.leave)
            end.callback(self._tell_left)
            end.callback(self.writer.close)
            end.callback(self.log.file, at_once=True)
            for crew in (self.compiles.crew, *self.method.crews):
                end.callback(crew.close)
            try:
                while self._busy():
                    pause = 0.5 if self._next_job() is None else 0.0
                    crews = [self.compiles.crew, *self.launches.crews, *self.writer.crews]
                    for job in worker.wait(crews, pause):
                        job.tag(job)
                    self.log.file()
                    self.progress.tell()
                self.held.take_from_others()
            except KeyboardInterrupt:
                report.interrupted = True
                self.plan.storage.hurry = True
        for task in self.held.tasks:
            report.statuses.update(task.statuses())
        completeness.close(self.plan, report)
        report.seconds = self.budget.spent_s()
        report.launching = tuple(crew.worked / report.seconds / crew.size for crew in self.method.crews)
        report.compiling = self.compiles.crew.worked / report.seconds / self.compiles.crew.size
        report.bookkeeping = (time.process_time() - self.cpu) / report.seconds
        return report

    def _tell_left(self) -> None:
        """Say what was not written, because the storage does not answer."""
        left = [f"the rows of {title}" for title, _ in self.log.unfiled]
        if self.writer.left:
            left.append(f"{self.writer.left} trials or study attributes")
        if left:
            self.log.watcher.line(f"not written: {', '.join(left)}; the next run does this again")

    def _busy(self) -> bool:
        """Hand out what can be done; whether anything is, or will be, under way here."""
        if self.leases.due():
            self.held.meet()
        if not self.held.open:
            self._begin_next()
        self._hand_out()
        if self._begin_next():  # only now, as it takes seconds: what was there to do is under way
            self._hand_out()
        self.held.settle()
        if self.compiles.crew.load or self.launches.works or self.held.returning:
            return True
        if self.budget.is_over() or not self.held.unsettled():
            return False
        return bool(self.held.unopened()) or self.held.wait_for_others()

    def _next_job(self) -> str | None:
        """The tuning job to be begun, if one is."""
        return None if self.budget.is_over() else next(iter(self.held.unopened()), None)

    def _begin_next(self) -> bool:
        """One job at a time; False: there is none."""
        name = self._next_job()
        if name is not None:
            self.held.begin(name)
        return name is not None

    def _hand_out(self) -> None:
        """To the processes that compile, and to those that launch, until nothing more can be begun. Steps that need no job
        (their rows were kept by an earlier run) end at once; what waited for it is then proposed in another round."""
        ended = -1
        while ended != self.launches.ended:
            ended = self.launches.ended
            self.compiles.propose()
            if self.compiles.crew.load:  # what they import takes as long as the first compiles
                self.launches.prepare()
            self.launches.hand_out()
