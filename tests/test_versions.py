"""A torch or a Triton that is too old is named, with the version that is needed, before anything else is done."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fa2tune import versions

ROOT = Path(__file__).parent.parent
OLD = {
    "torch": "import torch, importlib.metadata as m; torch.__version__ = '2.8.0+cu126'; v = m.version; "
    "m.version = lambda name: torch.__version__ if name == 'torch' else v(name)",
    "triton": "import fa2tune.compiling.fingerprint as f; f.triton_version = lambda: '3.5.1'",
}
SAID = {
    "torch": "fa2tune needs torch 2.9 or newer; this Python has torch 2.8.0+cu126. Upgrade it: "
    "pip install --upgrade 'torch>=2.9'",
    "triton": "fa2tune needs triton 3.6 or newer; this Python has triton 3.5.1. Upgrade it: "
    "pip install --upgrade 'triton>=3.6'",
}


def with_old(package: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python in which ``package`` has an older version's number."""
    (folder / "sitecustomize.py").write_text(OLD[package])
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "XDG_CACHE_HOME": str(folder)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=120
    )


#: What a call does where no file of binaries brings its kernel.
COMPILES = """
import fa2tune
try:
    fa2tune.attention
    from fa2tune.compiling import compiler, registry
    from fa2tune.spec.problem import Specialization
    variant, spec = registry.portable_of("fwd"), Specialization("bf16", 64, 64, "causal")
    compiler.compile_kernel(variant, spec, variant.space.default(spec, 90), 90)
except ImportError as error:
    print(error)
"""


def test_the_public_call_names_a_torch_that_is_too_old(tmp_path: Path) -> None:
    assert with_old("torch", tmp_path, "-c", COMPILES).stdout.startswith(SAID["torch"])


def test_a_triton_that_is_too_old_is_named_where_it_would_compile(tmp_path: Path) -> None:
    """A call whose machine code is in a file needs none."""
    done = with_old("triton", tmp_path, "-c", COMPILES)
    assert "fa2tune has no machine code of fwd, and to compile it takes Triton" in done.stdout, done.stderr
    assert f"cannot be used here (VersionError: {SAID['triton']}" in done.stdout


def test_an_interpreter_that_is_too_old_is_named(tmp_path: Path) -> None:
    done = with_old("triton", tmp_path, "-c", "import os; os.environ['TRITON_INTERPRET'] = '1'\n" + COMPILES)
    assert done.stdout.startswith(SAID["triton"])


@pytest.mark.parametrize("package", versions.REQUIRED)
def test_tune_for_an_absent_gpu_names_it_and_files_nothing(package: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache.sqlite"
    done = with_old(
        package, tmp_path, "-m", "fa2tune", "tune", "--gpu", "a100", "--headdim", "64", "--cache", str(cache)
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: {SAID[package]}")
    assert len(done.stderr.splitlines()) == 1
    assert not [path.name for path in tmp_path.rglob("*.sqlite")]


@pytest.mark.parametrize(
    "version", ["2.9.0", "2.11.0+cu128", "2.9.0a0+nv25.08", "2.9.0.dev20250801", "2.10.1", "3.0", "unknown"]
)
def test_versions_that_pass(version: str) -> None:
    versions.check("torch", version)


@pytest.mark.parametrize("version", ["2.8.1", "2.7.0+cpu", "1.13.1", "2.8.0a0+nv25.06"])
def test_versions_that_do_not(version: str) -> None:
    with pytest.raises(versions.VersionError, match=re.escape(f"this Python has torch {version}.")):
        versions.check("torch", version)


def test_the_package_requires_the_same_and_takes_prereleases() -> None:
    """pip orders 2.9.0a0+nv25.08, a container's own build, below 2.9 and would replace it."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {found.name: found.specifier for found in map(Requirement, project["dependencies"])}
    for package, lowest in versions.REQUIRED.items():
        release = ".".join(map(str, lowest))
        assert all(
            declared[package].contains(f"{release}{end}") for end in (".0", ".0a0+nv26.02", ".0.dev20260101+cu128")
        )
        assert not declared[package].contains(f"{lowest[0]}.{lowest[1] - 1}.9")
