"""What is installed is what is in the repository, however it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
#: folder in the repository -> folder in the wheel
FOLDERS = {folder: package.replace(".", "/") for package, folder in SETUP["package-dir"].items()}

#: Run in a bare interpreter, from an empty directory: where fa2tune comes from, every module of it, every data file.
LOOK = """
import importlib.resources, importlib.util, json, pkgutil
import fa2tune
names = [m.name for m in pkgutil.walk_packages(fa2tune.__path__, "fa2tune.")]
for package in ("fa2tune.kernels", "fa2tune.search_spaces"):  # not below fa2tune/ in a checkout
    names += [m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__, package + ".")]
names = sorted(set(names) - {"fa2tune.__main__"})  # that one runs
for name in names:
    importlib.import_module(name)
strays = [name for name in ("fa2tune.tests", "fa2tune.benchmarks") if importlib.util.find_spec(name)]
data = sorted(f.name for f in importlib.resources.files("fa2tune.cache").iterdir() if not f.name.startswith("__"))
print(json.dumps({"file": fa2tune.__file__, "modules": names, "strays": strays, "data": data}))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def files() -> list[str]:
    """Every file of the repository, those not yet committed too; not what git ignores."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listing = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    return [name for name in listing if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def checkout(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy: a build/ left behind in the working tree would find its way into the wheel."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, checkout]
    run(*build, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def sources(files: list[str]) -> list[str]:
    """The repository's files that belong to the package, by their names in the wheel."""
    pairs = [(name, *name.partition("/")[::2]) for name in files]
    return sorted(f"{FOLDERS[folder]}/{rest}" for _, folder, rest in pairs if folder in FOLDERS)


def module_names(sources: list[str]) -> list[str]:
    dotted = [
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in sources if name.endswith(".py")
    ]
    return sorted(set(dotted) - {"fa2tune", "fa2tune.__main__"})


def look(python: Path | str, empty: Path, **environment: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(run(python, "-c", LOOK, cwd=empty, **environment).splitlines()[-1])
    return found


def agrees(found: dict[str, object], root: Path, sources: list[str]) -> None:
    assert Path(str(found["file"])).is_relative_to(root)
    modules = [
        name for name in found["modules"] if name not in ("fa2tune.kernels", "fa2tune.search_spaces", "fa2tune.cache")
    ]  # type: ignore[attr-defined]
    assert modules == module_names(sources)
    assert found["strays"] == []
    assert found["data"] == sorted(name.rpartition("/")[2] for name in sources if name.startswith("fa2tune/cache/"))


def test_the_wheel_holds_the_repositorys_files_and_no_others(wheel: Path, sources: list[str]) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert sorted(names) == sources


def test_the_three_top_level_folders_hold_no_init(files: list[str]) -> None:
    assert not {f"{folder}/__init__.py" for folder in ("kernels", "search_spaces", "cache")} & set(files)


def test_wheel(wheel: Path, sources: list[str], tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    agrees(look(sys.executable, empty, PYTHONPATH=str(site)), site, sources)


def test_bare_checkout(checkout: Path, sources: list[str], tmp_path: Path) -> None:
    agrees(look(sys.executable, tmp_path, PYTHONPATH=str(checkout)), checkout, sources)


def test_editable_install(checkout: Path, sources: list[str], tmp_path: Path) -> None:
    venv, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    # the packages of this environment, but not its own fa2tune
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    for package in Path(pytest.__file__).parent.parent.iterdir():
        if not package.name.startswith(("fa2tune", "__editable__")):
            (site / package.name).symlink_to(package)
    options = ["--editable", checkout, "--no-deps", "--no-build-isolation", "--ignore-installed"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, cwd=empty)
    agrees(look(python, empty), checkout, sources)
    assert run(venv / "bin" / "fa2tune", "--version", cwd=empty).startswith("fa2tune ")
