"""The tuner: asks studies for configs, has them compiled ahead in parallel, times or predicts them, crowns the winners.

Child processes do the work (``worker.py``): one crew compiles and judges, others launch, one on each GPU (``measured.py``) or,
for a GPU that is not there, in Triton's interpreter (``predicted.py``). This process only keeps the books, of the lots
(``lots.py``) that it holds leases on (``leases.py``): all of them, unless other workers share its storage.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sqlalchemy as sa

from fa2tune.compiling import fingerprint
from fa2tune.measuring import worker
from fa2tune.measuring.worker import Crew, Job
from fa2tune.problem import Config
from fa2tune.rows import reader
from fa2tune.rows.row import PREDICTED, Row, hashed_as
from fa2tune.rows.store import Store
from fa2tune.sharing.leases import RETRIED, Leases
from fa2tune.sharing.shared import SharedStore
from fa2tune.sharing.shelf import Shelf
from fa2tune.tuning import crown, ledger, lots
from fa2tune.tuning.books import Books, Hands, Report, Watcher, describe, fate_of
from fa2tune.tuning.family import Family
from fa2tune.tuning.judge import Verdict
from fa2tune.tuning.lots import OpenLot
from fa2tune.tuning.measured import HEAT, STARTS, Measured, Task
from fa2tune.tuning.plan import Plan, TuneRequest, make_plan
from fa2tune.tuning.predicted import Predicted

#: Seconds; a compile that takes longer costs its candidate: so many times the slowest that came to an end in this run, within
#: bounds, for all depends on the host and on what else it does.
COMPILE_PATIENCE, COMPILE_AT_LEAST, COMPILE_AT_FIRST, COMPILE_AT_MOST = 6.0, 20.0, 40.0, 120.0
COMPILE_MEMORY = 4 << 30  #: bytes that a compile may hold
LOOKAHEAD = 1  #: configs under way per compiling core: more waste cores less, but know less when they are proposed
LEADERS_SHARE = 0.75  #: of a time budget, when other dtypes wait for the winners
GPUS_A_CLERK = 2  #: whose trials one process can store
PROGRESS_S = 0.5  #: between two looks at how far it is
IDLE_BEAT_S = 1.0  #: between two meetings, of a worker that has nothing to do


def tune(request: TuneRequest, watcher: Watcher | None = None, hands: Hands | None = None) -> Report:
    """Tune what ``request`` asks and put the rows into its cache. Ctrl-C ends early and keeps what was done.

    ValueError: a bad request, before anything is compiled."""
    return Run(make_plan(request), watcher or Watcher(), hands or Hands()).go()


@dataclass(eq=False)
class Work:
    """A task under way, and where its jobs run."""

    task: Task
    of: OpenLot
    crew: Crew


class Run:
    """One run of the tuner."""

    def __init__(self, plan: Plan, watcher: Watcher, hands: Hands) -> None:
        self.plan = plan
        self.begun, self.cpu = time.monotonic(), time.process_time()
        obtained = plan.target.obtained
        toolchain = crown.Toolchain(obtained)
        if obtained != PREDICTED:
            import torch

            toolchain = crown.Toolchain(obtained, torch.cuda.get_device_name(), fingerprint.driver_version())
        self.store = SharedStore(plan.storage) if plan.cache is None else Store(plan.cache)
        self.books = Books(plan, watcher, hands, self.store, toolchain, Report(plan), self._file_ours)
        plan.storage.say = watcher.line
        self.shelf = Shelf(plan.storage, -(-len(plan.devices) // GPUS_A_CLERK))
        triton = toolchain.stamp()["triton"]
        self.ledger = ledger.Ledger(plan.storage, ledger.Toolchain(triton, toolchain.obtained_on, toolchain.driver))
        self.stamp = lots.stamp(toolchain)
        self.leases = Leases(
            plan.storage, lots.campaign(plan, toolchain), lots.request_token(plan),
            plan.workers if obtained == PREDICTED else len(plan.devices),
        )  # fmt: skip
        self.lots = {lot.name: lot for lot in lots.lots(plan)}
        self.open: dict[str, OpenLot] = {}  #: what is worked on here
        self.families: list[Family] = []  #: of those lots, and of those that were settled here
        self.known = [row for layer in reader.layers() for row in layer.rows]
        self.compilers = Crew(plan.workers, {"OMP_NUM_THREADS": "1"}, memory=COMPILE_MEMORY)
        self.slowest_compile = 0.0
        self.way = Predicted(self.books) if obtained == PREDICTED else Measured(self.books)
        self.crews = self.way.working
        self.failures = Counter[Crew]()  #: in a row, before anything was launched
        self.works: list[Work] = []
        self.ready: deque[tuple[OpenLot, Task]] = deque()  #: finals that wait for a crew
        #: leases to give back as soon as the trials up to a mark are stored
        self.returning: list[tuple[str, tuple[int, ...], Callable[[str], None]]] = []
        self.now = ""
        self.looked = -PROGRESS_S
        self.waits = False

    def go(self) -> Report:
        """Until everything is crowned, or Ctrl-C."""
        report = self.books.report
        self.books.watcher.planned(self.plan, [*self.lots.values()])
        with ExitStack() as end:  # in the reverse order, each whatever becomes of the others
            end.callback(self.leases.leave)
            end.callback(self._tell_left)
            end.callback(self.shelf.close)
            end.callback(self.books.file, at_once=True)
            for crew in (self.compilers, *self.way.crews):
                end.callback(crew.close)
            try:
                while self._busy():
                    pause = 0.5 if self._next_lot() is None else 0.0
                    for job in worker.wait([self.compilers, *self.crews, *self.shelf.crews], pause):
                        job.tag(job)
                    self.books.file()
                    self._progress()
                self._take_from_others()
            except KeyboardInterrupt:
                report.interrupted = True
                self.plan.storage.hurry = True
        for family in self.families:
            report.fates.update(family.fates())
        report.seconds = time.monotonic() - self.begun
        report.launching = tuple(crew.worked / report.seconds / crew.size for crew in self.way.crews)
        report.compiling = self.compilers.worked / report.seconds / self.compilers.size
        report.bookkeeping = (time.process_time() - self.cpu) / report.seconds
        return report

    def _tell_left(self) -> None:
        """What did not get into the storage, where it stays away."""
        left = [f"the rows of {title}" for title, _ in self.books.unfiled]
        if self.shelf.left:
            left.append(f"{self.shelf.left} trials or facts about studies")
        if left:
            self.books.watcher.line(f"left unwritten: {', '.join(left)}; the next run makes them again")

    def _busy(self) -> bool:
        """Hand out what can be done; whether anything is, or will be, under way here."""
        if self.leases.due():
            self._meet()
        if not self.open:
            self._open_next()
        self._hand_out()
        if self._open_next():  # only now, as it takes seconds: what was there to do is under way
            self._hand_out()
        self._settle()
        if self.compilers.load or self.works or self.returning:
            return True
        if self._budget_is_over() or not self._unsettled():
            return False
        return bool(self._unopened()) or self._wait_for_others()

    def _hand_out(self) -> None:
        """To the compilers, and to whoever launches."""
        self._propose()
        if self.compilers.load:
            for crew in self.crews:  # what they import takes as long as the first compiles
                crew.prepare()
        for crew in self.crews:
            while sum(work.crew is crew for work in self.works) < self.way.tasks_at_once and (
                found := self._next_task()
            ):
                self.works.append(work := Work(found[1], found[0], crew))
                self._advance(work, None)

    def _progress(self) -> None:
        if time.monotonic() < self.looked + PROGRESS_S:
            return
        self.looked = time.monotonic()
        done = sum(len(family.tried()) for family in self.families)
        total = done + sum(max(0, f.search.goal - f.search.binaries) for f in self.families if not f.crowned)
        total += sum(lots.trials(self.lots[name], self.plan) for name in self._unopened())
        fates = Counter[str]()
        for family in self.families:
            fates.update(family.fates())
        self.books.watcher.progress(done, total, self.now, fates)

    # ---- lots

    def _unsettled(self) -> list[str]:
        return [name for name in self.lots if name not in self.leases.standing.settled]

    def _unopened(self) -> list[str]:
        """What is ours to begin."""
        busy = {*self.open, *(name for name, *_ in self.returning)}
        return [name for name in self._unsettled() if name in self.leases.standing.held and name not in busy]

    def _meet(self) -> None:
        """Renew the leases; take lots that are free, give back what is above our part, drop what was lost."""
        standing = self.leases.meet([*self.lots])
        if standing.lost:
            self.books.watcher.line("taken for dead by the other workers: what was under way here is begun anew")
            self._drop([*self.open])
            self.shelf.flush()  # what is opened again should find every trial of its own
        self._drop([name for name in self.open if name not in standing.held])
        if not standing.excess:
            return
        idle = {name: sum(len(f.tried()) for f in o.families) for name, o in self.open.items() if o.idle}
        excess = max(0, standing.excess - len(self.returning))
        back = [*reversed(self._unopened()), *sorted(idle, key=idle.__getitem__)]
        back = [name for name in back if name in standing.sought][:excess]
        self._drop([name for name in back if name in self.open])
        self.returning += [(name, self.shelf.mark(), self.leases.give) for name in back]

    def _next_lot(self) -> str | None:
        """The lot to be begun, if one is."""
        return None if self._budget_is_over() else next(iter(self._unopened()), None)

    def _open_next(self) -> bool:
        """One lot at a time; False: there is none."""
        name = self._next_lot()
        if name is None:
            return False
        self.waits = False
        known = [*self.known, *self.books.store.rows()]
        # once: what has crashed since, here or where this lot was before, is not tried again
        retry = self.plan.request.retry_failed and not self.leases.marked(name, RETRIED)
        opened = lots.opened(
            self.lots[name], self.plan, self.shelf, self.stamp, self.ledger, known, self.books.watcher.line, retry
        )
        if retry:
            self.leases.mark(name, RETRIED)
        self.open[name] = opened
        self.families = [family for family in self.families if not opened.lot.covers_family(family)] + opened.families
        lots.acquaint(self.families)
        self.books.watcher.opened(opened)
        self._tell_left_out(opened)
        return True

    def _tell_left_out(self, opened: OpenLot) -> None:
        left_out = Counter[str]()
        for family in opened.families:
            left_out.update(family.left_out(family.tried()))
        if left_out:
            reasons = ", ".join(f"{reason} {count}" for reason, count in left_out.items())
            self.books.watcher.line(
                f"left out of {opened.lot.name}, since they failed under this toolchain: {reasons} (--retry-failed tries "
                "them again)"
            )

    def _drop(self, names: Iterable[str]) -> None:
        """Work no more on these: they are others', or will be."""
        for name in names:
            opened = self.open.pop(name)
            opened.dropped = True
            for family in opened.families:
                family.dropped = True
        self.families = [family for family in self.families if not family.dropped]
        self.ready = deque(entry for entry in self.ready if not entry[0].dropped)
        lots.acquaint(self.families)

    def _settle(self) -> None:
        """Give leases back: of what is done, for good. Whoever takes a lot finds every trial of it."""
        for name in [name for name, opened in self.open.items() if opened.settled]:
            self.books.file(at_once=True)
            del self.open[name]
            self.returning.append((name, self.shelf.mark(), self._end))
        for entry in [entry for entry in self.returning if self.shelf.stored(entry[1])]:
            self.returning.remove(entry)
            entry[2](entry[0])

    def _end(self, name: str) -> None:
        """A lot is done, and stored. If it was lost meanwhile, what is shown of it are its new holder's rows."""
        if not self.leases.settle(name):
            self.families = [family for family in self.families if not self.lots[name].covers_family(family)]

    def _wait_for_others(self) -> bool:
        """Whether there are lots that other workers hold; if they die, or have too many, they are ours."""
        held = self.leases.standing.held
        theirs = [name for name in self._unsettled() if name not in held]
        if theirs and not self.waits:
            self.waits = True
            self.books.watcher.line(f"nothing to do here but wait for other workers: {', '.join(theirs)}")
        if theirs and time.monotonic() >= self.leases.met + IDLE_BEAT_S:
            self._meet()
        return bool(theirs)

    def _take_from_others(self) -> None:
        """Into the report, the rows of what others settled."""
        mine = {name for name, lot in self.lots.items() for family in self.families if lot.covers_family(family)}
        theirs = [self.lots[name] for name in self.leases.standing.settled & self.lots.keys() - mine]
        if not theirs:
            return
        request, gpu, made = self.plan.request, self.plan.target.gpu, self.books.toolchain.stamp()
        self.books.report.take(
            row for row in self.books.store.rows()
            if any(lot.covers(row.key) for lot in theirs)
            and (row.key.gpu, row.key.sm_count) == (gpu.name, gpu.sm_count)
            and row.key.bucket in request.buckets and row.key.dtype in request.dtypes
            and all(getattr(row, name) == made[name] for name in ("obtained", "obtained_on", "triton", "driver"))
            and row.kernel_hash == fingerprint.kernel_hashes().get(hashed_as(row.key.kernel, row.variant))
        )  # fmt: skip

    def _file_ours(self, rows: Sequence[Row]) -> Sequence[Row]:
        """File those of ``rows`` whose lots are still ours; which these are. In a database it is one step. A file makes its
        writers wait for their turn: who loses a lot just then writes once more."""
        store = self.store

        def ours(connection: sa.Connection) -> list[Row]:
            held = [self.lots[name] for name in self.leases.holding(connection) & self.lots.keys()]
            found = [row for row in rows if any(lot.covers(row.key) for lot in held)]
            if isinstance(store, SharedStore):
                store.write(connection, found)
            return found

        found = self.plan.storage.do(ours)
        if not isinstance(store, SharedStore):
            store.put(found)
        return found

    # ---- proposing and compiling

    def _budget_is_over(self) -> bool:
        return self.plan.time_budget_s is not None and time.monotonic() - self.begun > self.plan.time_budget_s

    def _time_is_up(self, family: Family) -> bool:
        """Whether the time budget leaves no room for another candidate of this family."""
        budget = self.plan.time_budget_s
        if budget is None:
            return False
        if not family.search.binaries:
            return self._budget_is_over()
        # the variants of a kernel share their finals, which are left half of the budget at most
        finals = {(f.kernel, f.spec): f for f in self.families}
        reserve = self.way.reserve([*{(f.kernel, f.spec): f for f in self.families if not f.crowned}.values()])
        share = min(1.0, budget / 2 / max(self.way.reserve([*finals.values()]), 1e-9))
        leads = any(f.leader is family for f in self.families)
        return time.monotonic() - self.begun > (budget - reserve * share) * (LEADERS_SHARE if leads else 1.0)

    def _propose(self) -> None:
        """Keep the compilers busy: the families furthest from their number of trials first."""
        open_ = [f for o in self.open.values() for f in o.families if not f.crowning and not self._time_is_up(f)]
        # no further ahead of what is timed than that: a proposal should know how the others went
        ahead = HEAT + -(-self.plan.workers // max(1, len(open_)))
        while open_ and self.compilers.load < LOOKAHEAD * self.plan.workers:
            family = min(open_, key=lambda f: f.search.binaries / f.trials)
            config = family.propose(self.books.report.rows) if len(family.search.in_flight) < ahead else None
            if config is None:
                open_.remove(family)
                continue
            failure = family.failures.of(config)
            if failure is not None:  # in this run, for another config of the same binary
                family.refuse(config, failure.fate, failure.why, {})
                continue
            problems = self.way.problems(family)
            if not problems and family.shares(config):
                self._share(family, config)
                continue
            arguments = (family.kernel, family.spec, config, self.plan.target.gpu, problems)
            tag = partial(self._judged, family, config)
            self.compilers.submit(Job(self.books.hands.judge, arguments, self._compile_seconds(), tag=tag))

    def _compile_seconds(self) -> float:
        """The deadline of a compile."""
        if not self.slowest_compile:
            return COMPILE_AT_FIRST
        return min(COMPILE_AT_MOST, max(COMPILE_AT_LEAST, COMPILE_PATIENCE * self.slowest_compile))

    def _judged(self, family: Family, config: Config, job: Job) -> None:
        if family.dropped:
            return
        report = self.books.report
        report.compiled += 1
        report.compile_seconds = time.monotonic() - self.begun
        if job.failure is not None:
            self.books.lost(job, f"compiling {family.title} {describe(config)}")
            verdict = Verdict(fate_of(job), job.failure)
        else:
            self.slowest_compile = max(self.slowest_compile, job.took)
            verdict = job.result
        if verdict.fate:
            family.failures.add(ledger.COMPILE, config, verdict.fate, verdict.why)
        for launch in [config, *family.compiled(config, verdict)]:
            self._take(family, launch, verdict)

    def _share(self, family: Family, config: Config) -> None:
        """Another launch of a binary that is here, or will be."""
        verdict = family.verdicts[family.binary(config)]
        if verdict is not None:
            self._take(family, config, verdict)

    def _take(self, family: Family, config: Config, verdict: Verdict) -> None:
        if verdict.fate:
            family.refuse(config, verdict.fate, verdict.why, verdict.binary)
        else:
            self.way.judged(family, config, verdict)

    # ---- launching

    def _next_task(self) -> tuple[OpenLot, Task] | None:
        """Finals first: what is crowned is safe."""
        for opened in self.open.values():
            tasks: list[Task] = []
            for contest in opened.contests:
                if not contest[0].crowning and all(map(self._done, contest)):
                    for family in contest:
                        family.crowning = True
                    tasks += self.way.crown(contest)
            for members in opened.wholes():
                opened.whole_begun.add(members[0].spec)
                tasks.append(self.way.whole(members))
            opened.under_way += len(tasks)
            self.ready.extend((opened, task) for task in tasks)
        if self.ready:
            return self.ready.popleft()
        found = self.way.search([family for opened in self.open.values() for family in opened.families])
        if found is None:
            return None
        family, task = found
        of = next(opened for opened in self.open.values() if family in opened.families)
        of.under_way += 1
        return of, task

    def _done(self, family: Family) -> bool:
        """Whether nothing more will be timed for it."""
        done = family.exhausted or (self._time_is_up(family) and not family.search.in_flight)
        return done and (family.leader is None or family.leader.crowned)

    def _advance(self, work: Work, job: Job | None) -> None:
        """Run a task up to its next job, or to its end."""
        if job is not None and self._again(work, job):
            return
        try:
            if work.of.dropped:
                work.task.close()
            following: Any = next(work.task) if job is None else work.task.send(job)
        except StopIteration:
            self.works.remove(work)
            work.of.under_way -= 1
            self._hear()
            return
        following.tag = partial(self._advance, work)
        work.crew.submit(following)

    def _again(self, work: Work, job: Job) -> bool:
        """Where there are several GPUs: whether a job runs again, since it failed before it launched anything. A GPU on which
        that happens ``STARTS`` times in a row does no more, others take over. Of the last one, the task judges."""
        broken = job.stuck or (job.failure is not None and not job.notes)
        self.failures[work.crew] = self.failures[work.crew] + 1 if broken else 0
        if not broken or len(self.crews) == 1:
            return False
        if job.stuck or self.failures[work.crew] >= STARTS:
            self._retire(work.crew, job)
        work.crew.submit(replace(job, began=False, notes=[], result=None, failure=None, died=False, stuck=False))
        return True

    def _retire(self, crew: Crew, job: Job) -> None:
        device = self.plan.devices[self.way.crews.index(crew)]
        self.books.watcher.line(
            f"GPU {device} does no more: {job.function}: {job.failure}; {len(self.crews) - 1} go on"
        )
        self.crews.remove(crew)
        self.leases.gpus = len(self.crews)
        for work in self.works:
            if work.crew is crew:
                work.crew = min(self.crews, key=lambda other: other.load)
                for waiting in [each for each in crew.queue if each.tag.args[0] is work]:
                    crew.queue.remove(waiting)
                    work.crew.submit(waiting)

    def _hear(self) -> None:
        """What the progress line says: the last row."""
        if self.books.report.rows:
            row = self.books.report.rows[-1]
            self.now = f"{row.key.kernel} {row.key.bucket}: {row.tflops:.0f} TFLOP/s"
