"""Machine code with an operand at a wrong address is neither loaded nor filed for other machines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fa2tune.compiling import compiler, operandcheck, registry
from fa2tune.compiling.compiler import CompileError
from fa2tune.fleet import precompile
from fa2tune.launching import cuda, launch, precompiled
from fa2tune.spec.problem import Specialization

SPEC = Specialization("bf16", 64, 64, "band")
VARIANT = registry.variant_named("sm90/fwd")
POINT = tuple(sorted(compiler.binary_config(VARIANT, VARIANT.space.default(SPEC, 90)).items()))


@pytest.fixture
def image_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What became an image. All that is compiled is unsound."""
    taken: list[Any] = []
    compiled = SimpleNamespace(metadata_group={"fwd.cubin": tmp_path / "fwd.cubin"})
    found = operandcheck.UnsoundOperand(0x90, 33, ("nothing",))
    monkeypatch.setattr(compiler, "compile_kernel", lambda *_: compiled)
    monkeypatch.setattr(operandcheck, "_check", lambda path: (found,))
    monkeypatch.setattr(launch, "image_of", taken.append)
    return taken


def test_it_is_not_loaded(image_of: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "may_load", lambda: True)
    monkeypatch.setattr(launch, "arch_of", lambda device: 90)
    monkeypatch.setattr(precompiled, "find", lambda *_: (None, "there is no file of binaries"))
    with pytest.raises(CompileError, match="sm90/fwd is miscompiled: HGMMA at 0x90 takes UR33 from nothing"):
        launch.load.__wrapped__(VARIANT, SPEC, POINT, 0)
    assert image_of == []


def test_it_is_not_filed(image_of: list[Any]) -> None:
    with pytest.raises(CompileError, match="sm90/fwd is miscompiled: HGMMA at 0x90 takes UR33 from nothing"):
        precompile.build((VARIANT, SPEC, POINT), 90)
    assert image_of == []
