"""Many finished trials in one transaction are what Optuna makes of them one by one, on both kinds of storage."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from postgres_server import server

from fa2tune.sharing import trials
from fa2tune.sharing.storage import Storage, parsed

__all__ = ["server"]  # a fixture
pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks of POSIX")
NUMBERS = itertools.count()
DISTRIBUTIONS = {
    "BLOCK_M": CategoricalDistribution((64, 128)), "LOADS": CategoricalDistribution(("pointer", "descriptor")),
    "PERSISTENT": CategoricalDistribution((False, True)), "warps": IntDistribution(4, 8), "cap": FloatDistribution(0.0, 1.0),
}  # fmt: skip


@pytest.fixture(params=["postgresql", "sqlite"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "postgresql":
        found = Storage(parsed(request.getfixturevalue("server").create(f"trials{next(NUMBERS)}")))
    else:
        found = Storage.of_studies(tmp_path / "studies.sqlite")
    yield found
    found.engine.dispose()


def trial(value: float | None) -> FrozenTrial:
    chosen = int(value) if value is not None and math.isfinite(value) else 1
    return create_trial(
        state=TrialState.PRUNED if value is None else TrialState.COMPLETE, value=value, distributions=DISTRIBUTIONS,
        params={"BLOCK_M": 64 << chosen % 2, "LOADS": "pointer", "PERSISTENT": chosen % 3 == 0, "warps": 4 + chosen % 5,
                "cap": chosen % 7 / 7},
        user_attrs={"outcome": {"fate": "spills" if value is None else "", "binary": {"registers": 168}}, "seed": 3},
    )  # fmt: skip


def study(storage: optuna.storages.BaseStorage, name: str) -> int:
    return storage.create_new_study([optuna.study.StudyDirection.MINIMIZE], name)


def all_of(storage: optuna.storages.BaseStorage, number: int) -> list[dict[str, Any]]:
    """Every field of every trial, but for ids, which are the storage's."""
    return [{**vars(found), "_trial_id": None} for found in storage.get_all_trials(number)]


def test_they_are_optunas(held: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = held.optuna()
    assert trials.together(storage), "this Optuna's tables are known"
    made = [trial(value) for value in (3.5, None, 0.0, 12.25, math.inf, None, 1e9)]
    one_by_one, at_once, other, plainly = (
        study(storage, name) for name in ("one by one", "at once", "other", "plainly")
    )
    for each in made:
        storage.create_new_trial(one_by_one, each)
    trials.store(storage, [(number, each) for each in made[:4] for number in (at_once, other)])
    trials.store(storage, [(at_once, each) for each in made[4:]])
    monkeypatch.setattr(trials, "models", None)
    assert not trials.together(storage)
    trials.store(storage, [(plainly, each) for each in made])
    assert all_of(storage, at_once) == all_of(storage, one_by_one) == all_of(storage, plainly)
    assert all_of(storage, other) == all_of(storage, one_by_one)[:4]
    assert [each["_number"] for each in all_of(storage, at_once)] == [*range(len(made))]


def test_two_writers_give_each_trial_a_number_of_its_own(held: Storage) -> None:
    number = study(held.optuna(), "study")

    def write(writer: int) -> None:
        own = held.optuna()
        for batch in range(5):
            first = 1000 * writer + 10 * batch
            trials.store(own, [(number, trial(float(value))) for value in range(first, first + 10)])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(2)))
    found = held.optuna().get_all_trials(number)
    assert sorted(each.number for each in found) == [*range(100)]
    assert {each.value for each in found} == {1000.0 * writer + value for writer in range(2) for value in range(50)}


def test_all_or_none(held: Storage) -> None:
    storage = held.optuna()
    number = study(storage, "study")
    wrong = trial(2.0)
    wrong.user_attrs = {"outcome": object()}  # no JSON
    with pytest.raises(TypeError):
        trials.store(storage, [(number, trial(1.0)), (number, wrong)])
    assert storage.get_all_trials(number) == []
