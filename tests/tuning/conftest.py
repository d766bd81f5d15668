"""What tests of the tuner's floors share."""

from __future__ import annotations

from pathlib import Path

import pytest
from sm80_runs import FORWARD, SM80_FAKES
from tuner_runs import H200, Bench

from fa2tune import gpus
from fa2tune.compiling import registry
from fa2tune.compiling.registry import portable_of


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.fixture
def both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the forward the portable kernel and that of kernels/sm80."""
    monkeypatch.setattr("tuner_runs.FAKES", SM80_FAKES)
    monkeypatch.setattr(registry, "variants_of", lambda kernel: (portable_of(kernel), FORWARD))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host with three equal GPUs; which one was made the current one."""
    found: list[int] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "visible", lambda: [H200, H200, H200])
    monkeypatch.setattr(gpus, "use", found.append)
    return found
