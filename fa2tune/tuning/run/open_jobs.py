"""Tuning jobs that are worked on here: their searches, and what is left to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fa2tune.compiling import limits, registry
from fa2tune.predicting import model
from fa2tune.rows import pruned
from fa2tune.rows.row import PREDICTED, Row
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import STRATEGIES, Specialization
from fa2tune.spec.variant import Variant
from fa2tune.tuning.request.jobs import TuningJob
from fa2tune.tuning.request.plan import TuningPlan
from fa2tune.tuning.search.proposals import incumbents, winners
from fa2tune.tuning.search.proven import proven
from fa2tune.tuning.search.task import SearchTask

if TYPE_CHECKING:
    from fa2tune.sharing.study_writer import StudyWriter
    from fa2tune.tuning.search.failures import FailureRecord


@dataclass(eq=False)
class OpenJob:
    """A job that is worked on here."""

    job: TuningJob
    tasks: list[SearchTask]
    refused: dict[TuningKey, str] = field(
        default_factory=dict
    )  #: keys whose portable kernel has no legal config, and why
    under_way: int = 0  #: tasks
    dropped: bool = False  #: given back, or lost: whatever still comes of it counts no more
    #: backward specializations that are put together, or are being so
    whole_begun: set[Specialization] = field(default_factory=set)

    def __post_init__(self) -> None:
        contests: dict[tuple[str, Specialization], list[SearchTask]] = {}
        for task in self.tasks:
            contests.setdefault((task.kernel, task.spec), []).append(task)
        #: the variants of a kernel are selected together, in one race
        self.contests = list(contests.values())

    @property
    def settled(self) -> bool:
        """Whether nothing is left to do."""
        return not self.under_way and all(task.selected for task in self.tasks) and not self.wholes()

    @property
    def idle(self) -> bool:
        """Whether it can be given back: nothing is timed just now, nothing is decided yet."""
        return not self.under_way and not any(task.selecting for task in self.tasks)

    def wholes(self) -> list[list[SearchTask]]:
        """Specializations whose backward kernels are all selected, in every variant, and not yet put together."""
        kernels = {kernel for strategy in STRATEGIES.values() for kernel in strategy}
        by_spec: dict[Specialization, list[SearchTask]] = {}
        for task in self.tasks:
            if task.kernel in kernels and task.spec not in self.whole_begun:
                by_spec.setdefault(task.spec, []).append(task)
        return [
            members
            for members in by_spec.values()
            if {task.kernel for task in members} == kernels and all(task.selected for task in members)
        ]


def opened(job: TuningJob, plan: TuningPlan, writer: StudyWriter, stamp: str, failure_record: FailureRecord,
           known: Sequence[Row], say: Callable[[str], None], retry: bool = False) -> OpenJob:  # fmt: skip
    """The tasks of a job, with every trial there is of them. ``known``: rows whose configs are tried early; ``retry``:
    strike out what failed before."""
    tasks: list[SearchTask] = []
    refused: dict[TuningKey, str] = {}
    gpu = plan.target.gpu
    for spec in filter(job.covers, plan.specializations()):
        for variant in _variants(job, plan):
            task = SearchTask(variant, spec, plan, writer, stamp, failure_record, retry)
            own = [row for row in known if row.implementation in variant.implementations]
            task.search.also(incumbents(own, task.keys))
            task.seed(winners(own, task.kernel, spec, gpu.arch))
            if plan.target.obtained == PREDICTED:
                task.keep_to(proven(variant, spec, gpu.arch, own))
            if task.space.legal.configs:
                tasks.append(task)
            elif variant.portable:  # another implementation of a kernel need not have one
                reasons = pruned.counted(task.pruned(task.keys[0]))
                say(f"{task.title}: no legal config ({reasons})")
                refused |= dict.fromkeys(task.keys, f"no legal config ({reasons})")
    for task in tasks:
        leader = plan.leader_of(task.spec) if task.proven is None else None  # its own configs are all there are
        task.leader = next((f for f in tasks if f.variant is task.variant and f.spec.dtype == leader), None)
    return OpenJob(job, tasks, refused)


def _variants(job: TuningJob, plan: TuningPlan) -> list[Variant]:
    """What is searched: every variant of every kernel; where times are predicted, those that the model knows."""
    predicted, arch = plan.target.obtained == PREDICTED, plan.target.gpu.arch
    return [
        variant
        for kernel in plan.kernels
        if kernel in job.kernels
        for variant in registry.variants_of(kernel)
        if variant.portable or ((model.knows(variant) or not predicted) and variant.runs_on(arch))
    ]


def unmodelled(plan: TuningPlan) -> list[str]:
    """Kernels that the GPU could run and that are not searched, since times are predicted and the model does not know them."""
    if plan.target.obtained != PREDICTED:
        return []
    gpu, specs = plan.target.gpu, plan.specializations()

    def runs(variant: Variant) -> bool:
        configs = ((spec, variant.space.default(spec, gpu.arch)) for spec in specs)
        return any(limits.before_compile(variant, spec, config, gpu) is None for spec, config in configs)

    others = (one for kernel in plan.kernels for one in registry.variants_of(kernel) if not one.portable)
    return [one.name for one in others if not model.knows(one) and runs(one)]


def ahead(tasks: Sequence[SearchTask], waiting: Sequence[TuningJob], plan: TuningPlan) -> tuple[int, int]:
    """About how many candidates, and finals (of all variants of a kernel together), are to come: of ``tasks``, and of jobs
    that are not opened yet."""
    candidates = sum(max(0, f.search.goal - f.search.binaries) for f in tasks if not f.selected)
    finals = {(f.kernel, f.spec) for f in tasks if not f.selected}
    for job in waiting:
        for spec in filter(job.covers, plan.specializations()):
            variants = _variants(job, plan)
            candidates += sum(plan.trials_of(spec, variant) for variant in variants)
            finals |= {(variant.serves, spec) for variant in variants}
    return candidates, len(finals)


def connect_neighbours(tasks: Sequence[SearchTask]) -> None:
    """Give each its neighbours: those with the other mask or the other dtype, not both."""
    for task in tasks:
        spec = task.spec
        alike = [f for f in tasks if f.variant is task.variant and f.spec.head_dim == spec.head_dim]
        task.neighbours = [f for f in alike if (f.spec.dtype != spec.dtype) != (f.spec.mask != spec.mask)]
