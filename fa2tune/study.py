"""One Optuna study per tuning key: what was tried, how it went, and what to try next. Resumable.

Proposals come from a study in memory; finished trials, and only those, are added to a study in SQLite on a thread of its own
(an insert takes 20 ms, which the GPU should not wait for), so that an interrupted run leaves no half-done trial behind.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState, create_trial

from fa2tune.candidates import Point, UnseenSampler, point
from fa2tune.problem import Config, TuningKey
from fa2tune.row import Row

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class Outcome:
    """What became of one candidate at one key: a time, or the reason why it has none."""

    config: Config
    time_us: float | None = None
    fate: str = ""  #: "" if it was timed, else a short word to count: "shared_memory", "compile_error", "crash", ...
    why: str = ""  #: the reason in full
    binary: Mapping[str, int] = field(default_factory=dict)  #: registers, spills, shared_bytes

    @property
    def loads(self) -> str:
        return str(self.config["LOADS"])


class Shelf:
    """The SQLite file with the studies. One writer thread."""

    def __init__(self, path: Path | None) -> None:
        """None: in memory, forgotten at the end (for tests)."""
        self.storage: optuna.storages.BaseStorage = optuna.storages.InMemoryStorage()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.storage = optuna.storages.RDBStorage(
                f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}}
            )
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="studies")
        self._pending: list[Future[Any]] = []

    def later(self, function: Any, *arguments: Any) -> None:
        self._pending.append(self._writer.submit(function, *arguments))

    def flush(self) -> None:
        """Wait until everything is on disk; raises what a write raised."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close(self) -> None:
        self.flush()
        self._writer.shutdown()


class KeyStudy:
    """The study of one TuningKey. ``stamp``: what makes old trials worthless when it changes (hashes of the space, kernel and
    model, compiler version, how times are obtained); part of the study's name."""

    def __init__(self, key: TuningKey, stamp: str, sampler: UnseenSampler, shelf: Shelf) -> None:
        self.key = key
        self.shelf = shelf
        self.name = study_name(key, stamp)
        self._stored = optuna.create_study(
            storage=shelf.storage, study_name=self.name, load_if_exists=True, direction="minimize"
        )
        self._sampler = sampler
        self._study = optuna.create_study(sampler=sampler, direction="minimize")
        self._asked: dict[Point, optuna.Trial] = {}
        self.outcomes: dict[Point, Outcome] = {}
        for trial in self._stored.get_trials(deepcopy=False):
            outcome = Outcome(**{f.name: trial.user_attrs[f.name] for f in fields(Outcome)})
            if point(outcome.config) not in self.outcomes:  # two processes may have tried the same
                self.outcomes[point(outcome.config)] = outcome
                self._study.add_trial(trial)

    def ask(self, taken: set[Point]) -> Config | None:
        """A legal config that is neither in ``taken`` nor tried here; None when there is none left."""
        self._sampler.seen = taken | self.outcomes.keys()
        try:
            trial = self._study.ask(self._sampler.distributions)
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
        attributes = asdict(outcome)
        if trial is None:
            frozen = create_trial(
                state=state, value=outcome.time_us, params=dict(outcome.config),
                distributions=self._sampler.distributions, user_attrs=attributes,
            )  # fmt: skip
            self._study.add_trial(frozen)
        else:
            for name, value in attributes.items():
                trial.set_user_attr(name, value)
            frozen = self._study.tell(trial, outcome.time_us, state=state)
        self.shelf.later(self._stored.add_trial, frozen)

    def ranked(self, loads: str | None = None) -> list[Outcome]:
        """Timed candidates, fastest first; ``loads``: of one load variant only."""
        timed = [o for o in self.outcomes.values() if o.time_us is not None and loads in (None, o.loads)]
        return sorted(timed, key=lambda outcome: (outcome.time_us, point(outcome.config)))

    def fates(self) -> dict[str, int]:
        """Reason -> how many candidates it cost."""
        return dict(Counter(outcome.fate for outcome in self.outcomes.values() if outcome.fate))

    def crown(self, rows: Sequence[Row]) -> None:
        """Keep the rows that these trials led to, so that the same command need not measure its finalists again."""
        crowned = {"trials": len(self.outcomes), "rows": [asdict(row) for row in rows]}
        self.shelf.later(self._stored.set_user_attr, "crowned", json.dumps(crowned))

    def crowned(self) -> list[Row] | None:
        """The rows of an earlier run that saw these very trials, or None."""
        text = self._stored.user_attrs.get("crowned")
        crowned = json.loads(text) if text else {}
        if crowned.get("trials") != len(self.outcomes):
            return None
        return [Row(**{**values, "key": TuningKey(**values["key"])}) for values in crowned["rows"]]


def study_name(key: TuningKey, stamp: str) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(key).items()) + f" {stamp}"


def cover(studies: Iterable[KeyStudy], tolerance: float) -> dict[TuningKey, list[Config]]:
    """Per key, the configs within ``tolerance`` of its best, those first that are so for the most keys: fewer distinct winners,
    at no cost that a prediction could tell."""
    studies = list(studies)
    close: dict[TuningKey, list[Config]] = {}
    for study in studies:
        ranked = study.ranked()
        limit = (ranked[0].time_us or 0.0) * (1 + tolerance) if ranked else 0.0
        close[study.key] = [o.config for o in ranked if o.time_us is not None and o.time_us <= limit]
    votes = Counter(point(config) for configs in close.values() for config in configs)
    return {key: sorted(configs, key=lambda c: -votes[point(c)]) for key, configs in close.items()}
