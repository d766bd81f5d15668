"""A lookup compares hashes of sources with those in rows. It compiles nothing and runs no tool."""

from __future__ import annotations

import subprocess
from typing import Any, NoReturn

import pytest
import triton

from fa2tune import gpus
from fa2tune.calling import serving
from fa2tune.calling.choosing import Chooser, choose_backward
from fa2tune.compiling import compiler, registry
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem


class Compiled(BaseException):
    """No handler of a failed compilation catches it."""


def refused(*given: Any, **named: Any) -> NoReturn:
    raise Compiled


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((triton, "compile"), (compiler, "source"), (subprocess, "run"), (subprocess, "Popen")):
        monkeypatch.setattr(module, name, refused)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, band(1024, 0)], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("gpu", ["h200", "h100", "a100"])
@pytest.mark.usefixtures("no_compiler")
def test_a_lookup_compiles_nothing(gpu: str, dim: int, mask: Mask) -> None:
    problem = Problem("bf16", 2, 16, 16, 4096, 4096, dim, dim, mask)
    known = gpus.named(gpu)
    chooser = Chooser(problem, known)
    assert chooser.choose("fwd", None).config
    for deterministic in (False, True):
        _, choices = choose_backward(chooser, deterministic)
        assert all(choice.config for choice in choices.values())
    assert serving.explain_problem(problem, known).kernels


@pytest.mark.usefixtures("no_compiler")
def test_what_compiles_is_seen_to() -> None:
    variant = registry.variant_named("portable/fwd")
    spec = Problem("bf16", 2, 16, 16, 4096, 4096, 64, 64, FULL).specialization
    for compiles in (compiler.compile_kernel, compiler.build):
        with pytest.raises(Compiled):
            compiles(variant, spec, variant.space.default(spec, 90), 90)
