"""One Optuna study per tuning key: what was tried, how it went, and what to try next. Resumable.

Proposals come from a study in memory; finished trials, and only those, are added to a study in the storage
(``sharing/study_writer.py``), so that an interrupted run leaves no half-done trial behind, and the worker that goes on, this
one or another, finds every finished trial.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.trial import TrialState, create_trial

from fa2tune.rows import record
from fa2tune.rows.row import Row
from fa2tune.sharing.study_writer import StudyWriter
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import Config
from fa2tune.spec.variant import implementation_of
from fa2tune.tuning.search.candidates import Point, UnseenSampler, point

optuna.logging.set_verbosity(optuna.logging.ERROR)

NAME_AT_MOST = 500  #: characters; Optuna allows 512
SELECTED = "crowned"  #: the stored name of the rows that a study's finalists gave


@dataclass(frozen=True)
class TrialOutcome:
    """What became of one candidate at one key: a time, or the reason why it has none."""

    config: Config
    time_us: float | None = None
    status: str = ""  #: "" if it was timed, else a short word to count: "shared_memory", "compile_error", "crash", ...
    why: str = ""  #: the reason in full
    binary: Mapping[str, int | str] = field(default_factory=dict)  #: as ``CompileResult`` has it
    predicted_us: float | None = None  #: the model's estimate before the compile, for the report alone

    @property
    def implementation(self) -> str:
        return implementation_of(self.config)


def _stored(config: Config, time_us: float | None, about: Mapping[str, Any]) -> TrialOutcome:
    """An outcome out of a stored trial. The stored name of its status is "fate"."""
    rest = {name: value for name, value in about.items() if name != "fate"}
    return TrialOutcome(config, time_us, about.get("fate", ""), **rest)


class KeyStudy:
    """The study of one TuningKey. ``stamp``: what makes old trials worthless when it changes (hashes of the space, kernel and
    model, compiler version, how times are obtained); part of the study's name."""

    def __init__(
        self, key: TuningKey, stamp: str, sampler: UnseenSampler, writer: StudyWriter,
        forgotten: Callable[[Config, str], bool] = lambda config, status: False,
    ) -> None:  # fmt: skip
        """``forgotten(config, status)``: whether a stored end is to be tried again, as if it had not been."""
        self.key = key
        self.writer = writer
        self.name = study_name(key, stamp)
        self._stored = writer.study(self.name)
        self._sampler = sampler
        self._study = optuna.create_study(sampler=sampler, direction="minimize")
        self._asked: dict[Point, optuna.Trial] = {}
        self.outcomes: dict[Point, TrialOutcome] = {}
        self.disqualified: dict[Point, str] = {}  #: wrong results, found after they were timed
        for trial in writer.now(self._stored.get_trials, deepcopy=False):
            outcome = _stored(trial.params, trial.value, trial.user_attrs["outcome"])
            if forgotten(outcome.config, outcome.status):
                continue
            if point(outcome.config) not in self.outcomes:  # two processes may have tried the same
                self.outcomes[point(outcome.config)] = outcome
                self._study.add_trial(trial)
        for config, why in json.loads(self._attributes().get("disqualified", "[]")):
            if not forgotten(config, why.partition(":")[0]):
                self.disqualified[point(config)] = why

    def ask(self, taken: Set[Point]) -> Config | None:
        """A legal config that is neither in ``taken`` nor tried here; None when there is none left."""
        self._sampler.seen = taken | self.outcomes.keys()
        try:
            trial = self._study.ask(self._sampler.field.distributions)
        except LookupError:
            return None
        self._asked[point(trial.params)] = trial
        return dict(trial.params)

    def tell(self, outcome: TrialOutcome) -> None:
        """File the outcome of a config, asked for here or elsewhere. Of one config only the first counts."""
        where = point(outcome.config)
        if where in self.outcomes:
            return
        self.outcomes[where] = outcome
        state = TrialState.COMPLETE if outcome.time_us is not None else TrialState.PRUNED
        trial = self._asked.pop(where, None)
        about = {"fate": outcome.status, "why": outcome.why, "binary": dict(outcome.binary),
                 "predicted_us": outcome.predicted_us}  # fmt: skip
        if trial is None:
            frozen = create_trial(
                state=state, value=outcome.time_us, params=dict(outcome.config),
                distributions=self._sampler.field.distributions, user_attrs={"outcome": about},
            )  # fmt: skip
            self._study.add_trial(frozen)
        else:
            trial.set_user_attr("outcome", about)
            frozen = self._study.tell(trial, outcome.time_us, state=state)
        self.writer.add(self.name, frozen)

    def best_us(self, implementation: str) -> float:
        """The shortest time of an implementation so far; infinite before the first."""
        own = (outcome for outcome in self.outcomes.values() if outcome.implementation == implementation)
        return min((outcome.time_us for outcome in own if outcome.time_us is not None), default=float("inf"))

    def ranked(self, implementation: str | None = None) -> list[TrialOutcome]:
        """Timed candidates not disqualified, fastest first; ``implementation``: only of this one."""
        timed = [
            outcome for where, outcome in self.outcomes.items()
            if outcome.time_us is not None and where not in self.disqualified
            and implementation in (None, outcome.implementation)
        ]  # fmt: skip
        return sorted(timed, key=lambda outcome: (outcome.time_us, point(outcome.config)))

    def last_failure(self, implementation: str) -> str:
        """Why the last candidate of an implementation that did not end well did not, "": all of them did."""
        without = [f"{outcome.status}: {outcome.why}" for outcome in self.outcomes.values()
                   if outcome.time_us is None and outcome.implementation == implementation]  # fmt: skip
        wrong = [why for where, why in self.disqualified.items() if implementation_of(dict(where)) == implementation]
        return next(reversed([*without, *wrong]), "")

    def statuses(self) -> dict[str, int]:
        """Reason -> how many candidates it cost."""
        statuses = Counter(outcome.status for outcome in self.outcomes.values() if outcome.status)
        statuses["wrong_result"] += len(self.disqualified)
        return dict(+statuses)

    def disqualify(self, config: Config, why: str) -> None:
        """It was fast and wrong."""
        self.disqualified[point(config)] = why
        listed = [[dict(where), why] for where, why in self.disqualified.items()]
        self.writer.keep(self.name, "disqualified", json.dumps(listed))

    def _attributes(self) -> dict[str, str]:
        return self.writer.now(lambda: self._stored.user_attrs)

    @property
    def token(self) -> str:
        """What its winners rest on: other trials, or the same with another end, are another token."""
        timed = sum(outcome.time_us is not None for outcome in self.outcomes.values())
        return f"{len(self.outcomes)} {timed} {len(self.disqualified)}"

    def keep(self, name: str, token: str, rows: Sequence[Row]) -> None:
        """Keep the rows that these trials led to, so that the same command need not time its finalists again. ``token``: what
        they rest on."""
        self.writer.keep(self.name, name, json.dumps({"token": token, **record.document(rows)}))

    def kept(self, name: str, token: str) -> list[Row] | None:
        """The rows an earlier run kept under this name and token, or None."""
        text = self._attributes().get(name)
        kept = json.loads(text) if text else {}
        if kept.get("token") != token:
            return None
        try:
            return record.of_document(kept)
        except ValueError:  # of an older or a newer fa2tune
            return None


def study_name(key: TuningKey, stamp: str) -> str:
    name = " ".join(f"{name}={value}" for name, value in record.key_record(key).items()) + f" {stamp}"
    if len(name) > NAME_AT_MOST:  # of a GPU with a long name
        name = name[: NAME_AT_MOST - 33] + " " + hashlib.sha256(name.encode()).hexdigest()[:32]
    return name


def cover(
    studies: Iterable[KeyStudy], implementation: str, default: Config, tolerance: float
) -> dict[TuningKey, list[TrialOutcome]]:
    """Per key, the candidates of an implementation within ``tolerance`` of its best and not behind the default, those first
    that are so for the most keys: fewer distinct winners, at no cost that a prediction could tell. Then the others, by time."""
    ranks = {study.key: study.ranked(implementation) for study in studies}
    close: dict[TuningKey, int] = {}
    votes = Counter[Point]()
    for key, ranked in ranks.items():
        times = [outcome.time_us or 0.0 for outcome in ranked]
        bound = (
            min([times[0] * (1 + tolerance), *(t for t, o in zip(times, ranked, strict=True) if o.config == default)])
            if ranked
            else 0.0
        )
        close[key] = sum(time <= bound for time in times)
        votes.update(point(outcome.config) for outcome in ranked[: close[key]])
    return {
        key: sorted(ranked[: close[key]], key=lambda o: -votes[point(o.config)]) + ranked[close[key] :]
        for key, ranked in ranks.items()
    }
