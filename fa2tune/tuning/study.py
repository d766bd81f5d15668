"""One Optuna study per tuning key: what was tried, how it went, and what to try next. Resumable.

Proposals come from a study in memory; finished trials, and only those, are added to a study in the storage (``shelf.py``), so
that an interrupted run leaves no half-done trial behind, and whoever goes on, this worker or another, finds every trial there
was.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field

import optuna
from optuna.trial import TrialState, create_trial

from fa2tune.problem import Config, TuningKey
from fa2tune.rows.row import Row
from fa2tune.sharing.shelf import Shelf
from fa2tune.tuning.candidates import Point, UnseenSampler, point
from fa2tune.variant import way_of

optuna.logging.set_verbosity(optuna.logging.ERROR)

NAME_AT_MOST = 500  #: characters; Optuna allows 512


@dataclass(frozen=True)
class Outcome:
    """What became of one candidate at one key: a time, or the reason why it has none."""

    config: Config
    time_us: float | None = None
    fate: str = ""  #: "" if it was timed, else a short word to count: "shared_memory", "compile_error", "crash", ...
    why: str = ""  #: the reason in full
    binary: Mapping[str, int] = field(default_factory=dict)  #: registers, spills, shared_bytes
    predicted_us: float | None = None  #: the model's estimate before the compile: nobody's evidence, for the report

    @property
    def way(self) -> str:
        return way_of(self.config)


class KeyStudy:
    """The study of one TuningKey. ``stamp``: what makes old trials worthless when it changes (hashes of the space, kernel and
    model, compiler version, how times are obtained); part of the study's name."""

    def __init__(
        self, key: TuningKey, stamp: str, sampler: UnseenSampler, shelf: Shelf,
        forgotten: Callable[[Config, str], bool] = lambda config, fate: False,
    ) -> None:  # fmt: skip
        """``forgotten(config, fate)``: whether a stored end is to be tried again, as if it had not been."""
        self.key = key
        self.shelf = shelf
        self.name = study_name(key, stamp)
        self._stored = shelf.now(
            optuna.create_study, storage=shelf.optuna, study_name=self.name, load_if_exists=True, direction="minimize"
        )
        self._sampler = sampler
        self._study = optuna.create_study(sampler=sampler, direction="minimize")
        self._asked: dict[Point, optuna.Trial] = {}
        self.outcomes: dict[Point, Outcome] = {}
        self.disqualified: dict[Point, str] = {}  #: wrong results, found after they were timed
        for trial in shelf.now(self._stored.get_trials, deepcopy=False):
            outcome = Outcome(trial.params, trial.value, **trial.user_attrs["outcome"])
            if forgotten(outcome.config, outcome.fate):
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

    def tell(self, outcome: Outcome) -> None:
        """File the outcome of a config, asked for here or elsewhere. A config is told once."""
        where = point(outcome.config)
        if where in self.outcomes:
            return
        self.outcomes[where] = outcome
        state = TrialState.COMPLETE if outcome.time_us is not None else TrialState.PRUNED
        trial = self._asked.pop(where, None)
        about = {"fate": outcome.fate, "why": outcome.why, "binary": dict(outcome.binary),
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
        self.shelf.add(self.name, frozen)

    def best_us(self, way: str) -> float:
        """The shortest time of a way so far; infinite before the first."""
        times = (o.time_us for o in self.outcomes.values() if o.time_us is not None and o.way == way)
        return min(times, default=float("inf"))

    def ranked(self, way: str | None = None) -> list[Outcome]:
        """Timed candidates not disqualified, fastest first; ``way``: of one way only."""
        timed = [
            outcome for where, outcome in self.outcomes.items()
            if outcome.time_us is not None and way in (None, outcome.way) and where not in self.disqualified
        ]  # fmt: skip
        return sorted(timed, key=lambda outcome: (outcome.time_us, point(outcome.config)))

    def fates(self) -> dict[str, int]:
        """Reason -> how many candidates it cost."""
        fates = Counter(outcome.fate for outcome in self.outcomes.values() if outcome.fate)
        fates["wrong_result"] += len(self.disqualified)
        return dict(+fates)

    def disqualify(self, config: Config, why: str) -> None:
        """It was fast and wrong."""
        self.disqualified[point(config)] = why
        listed = [[dict(where), why] for where, why in self.disqualified.items()]
        self.shelf.keep(self.name, "disqualified", json.dumps(listed))

    def _attributes(self) -> dict[str, str]:
        return self.shelf.now(lambda: self._stored.user_attrs)

    @property
    def token(self) -> str:
        """What its winners rest on: other trials, or the same with another end, are another token."""
        timed = sum(outcome.time_us is not None for outcome in self.outcomes.values())
        return f"{len(self.outcomes)} {timed} {len(self.disqualified)}"

    def keep(self, name: str, token: str, rows: Sequence[Row]) -> None:
        """Keep the rows that these trials led to, so that the same command need not time its finalists again. ``token``: what
        they rest on."""
        kept = {"token": token, "rows": [asdict(row) for row in rows]}
        self.shelf.keep(self.name, name, json.dumps(kept))

    def kept(self, name: str, token: str) -> list[Row] | None:
        """The rows an earlier run kept under this name and token, or None."""
        text = self._attributes().get(name)
        kept = json.loads(text) if text else {}
        if kept.get("token") != token:
            return None
        return [Row(**{**values, "key": TuningKey(**values["key"])}) for values in kept["rows"]]


def study_name(key: TuningKey, stamp: str) -> str:
    name = " ".join(f"{name}={value}" for name, value in asdict(key).items()) + f" {stamp}"
    if len(name) > NAME_AT_MOST:  # of a GPU with a long name
        name = name[: NAME_AT_MOST - 33] + " " + hashlib.sha256(name.encode()).hexdigest()[:32]
    return name


def cover(studies: Iterable[KeyStudy], way: str, default: Config, tolerance: float) -> dict[TuningKey, list[Outcome]]:
    """Per key, the candidates of a way within ``tolerance`` of its best and not behind the default, those first that
    are so for the most keys: fewer distinct winners, at no cost that a prediction could tell. Then the others, by time."""
    ranks = {study.key: study.ranked(way) for study in studies}
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
