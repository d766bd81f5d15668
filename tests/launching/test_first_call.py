"""What a first call does to the process around it, whose garbage collection is not fa2tune's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from fa2tune import collected, uncollected
from fa2tune.compiling import compiler, registry
from fa2tune.compiling.compiler import CompileError
from fa2tune.launching import cuda, launch, precompiled
from fa2tune.spec.problem import Specialization

OURS = (700, 11, 12)
SPEC = Specialization("bf16", 64, 64, "causal")


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(*OURS)
    yield
    gc.set_threshold(*before)
    (gc.enable if enabled else gc.disable)()


def test_nothing_is_collected_meanwhile_and_all_is_as_it_was() -> None:
    with uncollected():
        assert gc.get_threshold()[0] == 0 and gc.isenabled()
        with uncollected():  # another thread's first call
            pass
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold() == OURS
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.get_threshold() == OURS


def test_what_the_program_asks_for_meanwhile_stays() -> None:
    """A trainer that collects by hand switches the collector off in a thread of its own."""
    with uncollected():
        gc.disable()
    assert not gc.isenabled() and gc.get_threshold() == OURS
    gc.enable()
    with uncollected():
        gc.set_threshold(5, 6, 7)
    assert gc.get_threshold() == (5, 6, 7)
    gc.set_threshold(0, 6, 7)  # never, from before
    with uncollected():
        collected()
    assert gc.get_threshold() == (0, 6, 7)


def test_a_first_call_within_the_first_instructions_of_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_threshold = gc.set_threshold

    def preempted(*thresholds: int) -> None:
        monkeypatch.setattr(gc, "set_threshold", set_threshold)
        with uncollected():  # another thread's, from its beginning to its end
            pass
        set_threshold(*thresholds)

    monkeypatch.setattr(gc, "set_threshold", preempted)
    with uncollected():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold() == OURS


@pytest.mark.parametrize("precompiled_", [True, False])
def test_a_compile_is_none_of_it(monkeypatch: pytest.MonkeyPatch, precompiled_: bool) -> None:
    variant, seen = registry.portable_of("fwd"), list[int]()
    image: Any = SimpleNamespace(maps=[]) if precompiled_ else None
    monkeypatch.setattr(cuda, "may_load", lambda: True)
    monkeypatch.setattr(launch, "arch_of", lambda device: 90)
    monkeypatch.setattr(precompiled, "find", lambda *asked: (image, "a file"))
    monkeypatch.setattr(launch, "Function", lambda *asked: seen.append(gc.get_threshold()[0]))

    def compile_kernel(*asked: Any) -> Any:
        seen.append(gc.get_threshold()[0])
        raise CompileError("it was only asked")

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    config = variant.space.default(SPEC, 90) | {"LOADS": "pointer"}
    binary = tuple(sorted(compiler.binary_config(variant, config).items()))
    with uncollected(), suppress(CompileError):
        launch.load.__wrapped__(variant, SPEC, binary, 0)
    assert seen == [0 if precompiled_ else OURS[0]] and gc.get_threshold() == OURS
