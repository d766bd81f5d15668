"""The whole backward on a GPU that is present: split against fused, each with the configs selected for its kernels."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fa2tune.compiling import fingerprint
from fa2tune.measuring.samples import Race
from fa2tune.measuring.worker import Job
from fa2tune.rows.row import Row, self_named
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import BACKWARD, SPLIT, STRATEGIES, Config
from fa2tune.spec.variant import PORTABLE, implementation_of
from fa2tune.tuning.search.candidates import point
from fa2tune.tuning.search.failures import BLAMELESS
from fa2tune.tuning.search.status import launch_status
from fa2tune.tuning.search.task import SearchTask
from fa2tune.tuning.select import evidence, finalists, gpu_jobs
from fa2tune.tuning.select.gpu_jobs import Steps
from fa2tune.tuning.select.log import NONE_RIGHT, Log


@dataclass(frozen=True)
class _Able:
    """A strategy and implementation of the backward that has a row of its own, the config of each of its kernels, and the
    errors of its results."""

    strategy: str
    implementation: str
    configs: dict[str, Config]
    errors: Mapping[str, Any]


class WholeBackward:
    """One specialization at all its lengths. ``members``: the search tasks of its kernels, all selected."""

    def __init__(self, members: Sequence[SearchTask], log: Log) -> None:
        self.log, self.keys, self.spec = log, members[0].keys, members[0].spec
        self.forward = members[0].forward_default()
        self.portable = {task.kernel: task for task in members if task.variant.portable}
        self.title = f"{BACKWARD} {members[0].short}"

    def steps(self) -> Steps:
        """Split against fused, each with its winners, with and without warp-specialised kernels, and split of the defaults."""
        if lacking := [name for name in STRATEGIES[SPLIT] if name not in self.portable]:
            why = f"{', '.join(lacking)} has no legal portable config"
            self.log.watcher.line(f"{self.title}: no row, as {why}")
            self.log.fail((key.with_(kernel=BACKWARD) for key in self.keys), why)
            return
        for key in self.keys:
            variants = evidence.backward_variants(self.log.report.rows, key)
            configs_of = {
                filed: {kernel: row.config for kernel, row in rows.items()} for filed, rows in variants.items()
            }
            token = repr([
                (
                    fingerprint.backward_hash(
                        *filed, self.spec.mask, self_named(map(implementation_of, found.values()))
                    ),
                    *filed,
                    sorted(map(point, found.values())),
                )
                for filed, found in configs_of.items()
            ])  # fmt: skip
            study = self.portable["bwd_dq"].studies[key.with_(kernel="bwd_dq")]
            rows = study.kept("whole", token)
            if rows is None:
                able, sound = yield from self._proved(configs_of)
                rows, raced = yield from self._rows(key.with_(kernel=BACKWARD), able)
                if sound and raced:
                    study.keep("whole", token, rows)
            self.log.put(key.with_(kernel=BACKWARD), rows, f"{self.title} {key.bucket}", NONE_RIGHT)

    def _proved(
        self, configs_of: Mapping[tuple[str, str], dict[str, Config]]
    ) -> Generator[Job, Job, tuple[list[_Able], bool]]:
        """Those whose results are right, and whether that is known of all of them."""
        able, sound = [], True
        for (strategy, implementation), configs in configs_of.items():
            arguments = ({"fwd": self.forward, **configs}, self.spec, strategy, "cuda")
            memo = (strategy, self.spec, *(point(config) for config in configs.values()))
            what = f"checking the {strategy} {implementation} {self.title.replace(BACKWARD, 'backward')}"
            errors = yield from gpu_jobs.check(self.log, self.log.functions.check_backward, arguments, memo, what)
            if isinstance(errors, str):
                sound = sound and errors.partition(":")[0] not in BLAMELESS
            else:
                able.append(_Able(strategy, implementation, configs, errors))
        return able, sound

    def _rows(self, key: TuningKey, able: Sequence[_Able]) -> Generator[Job, Job, tuple[list[Row], bool]]:
        """The rows, and whether they are worth keeping. A strategy that fails does not cost the others their rows."""
        title = f"whole backward {key.dtype} {key.head_dim} {key.bucket}"
        defaults = {name: self.portable[name].default for name in STRATEGIES[SPLIT]}
        able, sound = list(able), True
        while True:
            if not able:
                return [], sound
            contenders = [{"strategy": SPLIT, "configs": defaults}]
            contenders += [{"strategy": each.strategy, "configs": each.configs} for each in able]
            job = yield from gpu_jobs.run(self.log.functions.race, (key, contenders, "proof"))
            if job.failure is None:
                break
            self.log.watcher.line(f"{title}: {job.failure}")
            last = job.notes[-1]
            if last == 0 or (last < 0 and len(able) == 1):
                return [], False
            # while they ran in turns
            sound = sound and last > 0 and launch_status(job) not in BLAMELESS
            able.pop(last - 1 if last > 0 else -1)
        race: Race = job.result
        if race.tainted:
            self.log.watcher.line(f"{title}: the GPU stayed throttled: the portable split backward is kept")
            sound = False
        for each, samples in zip(able, race.times[1:], strict=True):
            if (
                (each.strategy, each.implementation) == (SPLIT, PORTABLE)
                and samples
                and finalists.replaces(samples, race.times[0])
            ):
                # each kernel's row was proved by itself; nothing chooses them together
                self.log.watcher.line(f"{title}: slower than with the default configs")
        rows = [
            evidence.measured(
                key, each.implementation, {kernel: implementation_of(config) for kernel, config in each.configs.items()},
                self.log.provenance, samples, race.times[0], each.strategy, errors=each.errors,
                **evidence.watched(race),
            )
            for each, samples in zip(able, race.times[1:], strict=True)
            if samples and ((each.strategy, each.implementation) == (SPLIT, PORTABLE) or not race.tainted)
        ]  # fmt: skip
        return rows, sound
