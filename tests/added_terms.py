"""The score terms of tests/score_terms/, as if their files lay in kernels/scores/."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from fa2tune.spec import scorefile

TERMS = Path(__file__).parent / "score_terms"


def add_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.import_module(scorefile.FOLDER)
    places = [*package.__path__, str(TERMS)]
    monkeypatch.setattr(package, "__path__", places)
    monkeypatch.setattr(package.__spec__, "submodule_search_locations", places)
