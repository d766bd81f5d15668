"""Kernel files read without Triton say what they say with it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fa2tune.compiling import compiler, hostside, registry
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem, Specialization
from fa2tune.spec.variant import Variant

ROOT = Path(__file__).parents[2]
PROBLEMS = [
    Problem(dtype, *lengths, dim, dim, mask)
    for dtype in ("bf16", "fp32") for dim in (40, 64, 128, 256) for mask in (FULL, CAUSAL)
    for lengths in ((2, 6, 2, 300, 517), (1, 1, 1, 1, 1), (4, 16, 16, 4096, 4096))
]  # fmt: skip
#: Imported, so with Triton, whatever files of binaries there are.
REAL = {variant.name: variant for variant in registry.Variants().values()}


@pytest.fixture(scope="module")
def host() -> dict[str, Variant]:
    found = {}
    for name, real in REAL.items():
        found[name] = hostside.variant(real.module.removeprefix("fa2tune.kernels."))
        object.__setattr__(found[name], "name", name)  # as registry.Variants has it
    return found


def test_every_kernel_file_can_be_read_so(host: dict[str, Variant]) -> None:
    assert host.keys() == REAL.keys() and len(host) >= 8


@pytest.mark.parametrize("name", REAL)
def test_a_variant_says_the_same(host: dict[str, Variant], name: str) -> None:
    real, found = REAL[name], host[name]
    for field in ("name", "space", "tensors", "descriptors", "floats", "min_arch", "max_arch", "serves", "grid_dimensions",
                  "before", "packed_before", "after", "implementations", "portable", "short_name"):  # fmt: skip
        assert getattr(found, field) == getattr(real, field), field
    assert found.parameters == real.parameters
    assert found.constexpr_names == real.constexpr_names
    assert compiler.is_gluon(found) == compiler.is_gluon(real)
    assert found.kernel.real() is real.kernel and found.kernel.fn.__module__ == real.kernel.fn.__module__


@pytest.mark.parametrize("name", REAL)
def test_its_functions_say_the_same(host: dict[str, Variant], name: str) -> None:
    real, found = REAL[name], host[name]
    for problem in PROBLEMS:
        spec = problem.specialization
        if name.startswith("sm90/") and spec.dtype == "fp32":
            continue
        told = {}
        for one in (*real.before, *real.after):
            told |= REAL[one].space.default(spec, 90)
        config = {**told, **real.space.default(spec, 90)}
        for one in REAL.values():  # what a kernel passes on to those around it
            if name in (*one.before, *one.after):
                config |= one.passes_on(spec, one.space.default(spec, 90))
        assert found.passes_on(spec, config) == real.passes_on(spec, config)
        assert found.programs(problem, config, 132) == real.programs(problem, config, 132)
        assert found.constants(spec, config) == real.constants(spec, config)
        assert found.workspaces(problem, config) == real.workspaces(problem, config)
        for early in (False, True):
            assert found.scalars(problem, config, early) == real.scalars(problem, config, early)
            starts = {**config, "EARLY_START": early, "FINISH_BESIDE": False}
            assert found.early(problem, starts, 132) == real.early(problem, starts, 132)
        assert compiler.constexprs(found, spec, config) == compiler.constexprs(real, spec, config)
        for aligned in (True, False):
            asked: Specialization = replace(spec, aligned=aligned)
            assert compiler.signature(found, asked, config, False) == compiler.signature(real, asked, config, False)
            assert compiler.attributes(found, asked, config) == compiler.attributes(real, asked, config)


def test_what_is_compiled_is_the_real_kernel(host: dict[str, Variant]) -> None:
    spec = Specialization("bf16", 64, 64, "full")
    config = compiler.binary_config(host["portable/bwd_delta"], host["portable/bwd_delta"].space.default(spec, 90))
    made = compiler.compile_kernel(host["portable/bwd_delta"], spec, config, 90)
    assert made.kernel == compiler.compile_kernel(REAL["portable/bwd_delta"], spec, config, 90).kernel


def test_a_file_that_cannot_be_read_so_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fa2tune.compiling import binaries

    path = tmp_path / "some.kernels"
    binaries.save(path, binaries.file_bytes({}, {}))
    monkeypatch.setenv("FA2TUNE_KERNELS", str(path))
    assert isinstance(registry.Variants()["portable/fwd"].kernel, hostside.Kernel)
    monkeypatch.setattr(hostside, "variant", lambda name: {}[name])
    assert registry.Variants()["portable/fwd"].kernel is REAL["portable/fwd"].kernel
    monkeypatch.undo()
    monkeypatch.setenv("FA2TUNE_KERNELS", "off")
    assert registry.Variants()["portable/fwd"].kernel is REAL["portable/fwd"].kernel


def test_stand_ins_do_not_leak(host: dict[str, Variant]) -> None:
    import triton

    assert inspect.ismodule(triton) and inspect.ismodule(sys.modules["fa2tune.kernels.lib.common"])


#: What a first call chooses and launches: a list of a variant and its binary's config each.
CHOSEN = """
from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.launching import passes
from fa2tune.compiling import compiler
from fa2tune.spec.problem import STRATEGIES, Problem
from fa2tune.spec.mask import CAUSAL
problem, gpu, launched = Problem("bf16", 4, 32, 32, 4096, 4096, 64, 64, CAUSAL), gpus.named("h200"), []
strategy, kinds = choosing.strategy_of(problem, gpu, False)
for kernel in ("fwd", *STRATEGIES[strategy]):
    config = choosing.choose(problem, kernel, gpu, kinds.get(kernel)).config
    for variant, its_config in passes.runs(kernel, problem.specialization, config, 90):
        launched.append((variant, compiler.binary_config(variant, its_config)))
"""
#: The choice, and a look for its binaries: prints what was found and imported.
LOOK = f"""
import json, sys
{CHOSEN}
from fa2tune.launching import precompiled
found = [precompiled.find(variant, problem.specialization, binary, 90)[1] for variant, binary in launched]
print(json.dumps([found, [name for name in sys.modules if name.split(".")[0] == "triton"]]))
"""


def test_a_first_call_that_finds_its_binaries_imports_no_triton(tmp_path: Path) -> None:
    """As test_precompile.py has it, for the shipped rows of one head dim, dtype and mask."""
    from fa2tune import gpus
    from fa2tune.fleet import precompile
    from fa2tune.rows import reader

    h200 = gpus.named("h200")
    layers = [
        replace(
            layer, rows=[r for r in layer.rows if (r.key.head_dim, r.key.dtype, r.key.mask) == (64, "bf16", "causal")]
        )
        for layer in reader.layers()
    ]
    todo, _ = precompile.jobs(h200, layers, precompile.Wanted())
    here: dict[str, Any] = {}
    exec(CHOSEN, here)
    needed = [(variant.name, here["problem"].specialization, binary) for variant, binary in here["launched"]]
    todo = [job for job in todo if (job[0].name, job[1], dict(job[2])) in needed]
    assert len(todo) == len(needed)
    path = tmp_path / "here.kernels"
    precompile.save(path, precompile.compile_all(todo, 90, workers=2))
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "FA2TUNE_KERNELS": str(path), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, imported = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 2 and set(found) == {str(path)} and imported == []


#: The same with a file that knows nothing of today's sources, and a Triton that has no Gluon.
WITHOUT_GLUON = """
import sys
class NoGluon:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("triton.experimental"):
            raise ImportError("no Gluon here")
sys.meta_path.insert(0, NoGluon)
from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.spec.problem import Problem
from fa2tune.spec.mask import CAUSAL
print(choosing.choose(Problem("bf16", 4, 32, 32, 4096, 4096, 64, 64, CAUSAL), "fwd", gpus.named("h200")).step)
"""


def test_a_triton_without_gluon_chooses_all_the_same(tmp_path: Path) -> None:
    from fa2tune.compiling import binaries

    path = tmp_path / "old.kernels"
    binaries.save(path, binaries.file_bytes({}, {"another day": {"fwd": "0"}}))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GLUON], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "FA2TUNE_KERNELS": str(path), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("problem exact", "default"))
