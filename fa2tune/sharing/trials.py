"""Finished trials into Optuna's tables, many in one transaction.

``RDBStorage.create_new_trial`` takes one, with a query or two for every parameter and a transaction for each: 14 ms of a core
and a disk's answer, so that a quick GPU times candidates faster than they are stored. This takes about 1 ms. The tables are
Optuna's, by its own models; where a version has others, its own way is taken.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.distributions import distribution_to_json
from optuna.trial import FrozenTrial
from sqlalchemy import orm

try:
    from optuna.storages._rdb import models
except ImportError:  # a later Optuna
    models = None  # type: ignore[assignment]

#: Of the tables that are written here.
SCHEMA_VERSION = 12


def together(held: optuna.storages.BaseStorage) -> bool:
    """Whether this storage takes many at once."""
    return (
        models is not None
        and models.SCHEMA_VERSION == SCHEMA_VERSION
        and isinstance(held, optuna.storages.RDBStorage)
        and hasattr(held, "engine")
    )


def store(held: optuna.storages.BaseStorage, trials: Sequence[tuple[int, FrozenTrial]]) -> None:
    """``trials``: (id of its study, trial), each finished, with one value or none. In each study they get the next numbers, in
    this order. All of them or none are stored, where they go together."""
    if not together(held):
        for study, trial in trials:
            held.create_new_trial(study, trial)
        return
    with orm.Session(held.engine) as session, session.begin():  # type: ignore[attr-defined]
        # one writer at a time gives a study's numbers; where a read cannot lock (SQLite), a write that changes nothing does
        studies = sorted({study for study, _ in trials})
        for study in studies:
            own = models.StudyModel.study_id == study
            session.execute(sa.update(models.StudyModel).where(own).values(study_name=models.StudyModel.study_name))
        counted = sa.select(models.TrialModel.study_id, sa.func.count()).group_by(models.TrialModel.study_id)
        taken = Counter[int]()
        for study, count in session.execute(counted.where(models.TrialModel.study_id.in_(studies))):
            taken[study] = count
        made: list[Any] = []
        for study, trial in trials:
            made.append(
                models.TrialModel(
                    study_id=study, number=taken[study], state=trial.state, datetime_start=trial.datetime_start,
                    datetime_complete=trial.datetime_complete,
                )
            )  # fmt: skip
            taken[study] += 1
        session.add_all(made)
        session.flush()  # gives each its id
        session.add_all(
            part for model, (_, trial) in zip(made, trials, strict=True) for part in _parts(model.trial_id, trial)
        )


def _parts(number: int, trial: FrozenTrial) -> Iterator[models.BaseModel]:
    """What else a trial consists of."""
    if trial.value is not None:
        value, kind = models.TrialValueModel.value_to_stored_repr(trial.value)
        yield models.TrialValueModel(trial_id=number, objective=0, value=value, value_type=kind)
    for name, chosen in trial.params.items():
        distribution = trial.distributions[name]
        yield models.TrialParamModel(
            trial_id=number, param_name=name, param_value=distribution.to_internal_repr(chosen),
            distribution_json=distribution_to_json(distribution),
        )  # fmt: skip
    for name, said in trial.user_attrs.items():
        yield models.TrialUserAttributeModel(trial_id=number, key=name, value_json=json.dumps(said))
