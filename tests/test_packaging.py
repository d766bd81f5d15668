"""What is installed is what is in the repository, however it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import HeaderParser
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
#: folder in the repository -> folder in the wheel
FOLDERS = {folder: package.replace(".", "/") for package, folder in SETUP["package-dir"].items()}
LARGEST_WHEEL = 2_000_000  #: bytes
ADDRESS = "https://example.org/team/fa2tune"

#: Run in a bare interpreter, from an empty directory: where fa2tune comes from, every module of it, every data file.
LOOK = """
import importlib.resources, importlib.util, json, pkgutil
import fa2tune
names = [m.name for m in pkgutil.walk_packages(fa2tune.__path__, "fa2tune.")]
folders = ("kernels.lib", "kernels.masks", "kernels.portable", "kernels.scores", "kernels.sm80", "kernels.sm90")
folders += ("search_spaces.lib", "search_spaces.portable", "search_spaces.sm80", "search_spaces.sm90")
for package in (f"fa2tune.{folder}" for folder in folders):  # not below fa2tune/ in a checkout
    names += [m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__, package + ".")]
names = sorted(set(names))
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


def in_wheel(sources: list[str]) -> list[str]:
    """Without what repeats the shipped rows for review, and without notes."""
    return [
        name
        for name in sources
        if not name.endswith(".md") and not (name.endswith(".json") and name[:-5] + ".sqlite" in sources)
    ]


def module_names(sources: list[str]) -> list[str]:
    """Without what another library loads from its path (fa2tune/compat/hub/build/)."""
    dotted = [
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in sources
        if name.endswith(".py") and "/build/" not in name
    ]
    return sorted(set(dotted) - {"fa2tune"})


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
    assert sorted(names) == in_wheel(sources)
    assert "fa2tune/cache/h200.sqlite" in names and "fa2tune/cache/lookup_cost.json" in names
    assert wheel.stat().st_size < LARGEST_WHEEL
    said = re.search(r"wheel of a checkout is ([\d.]+) MB", (ROOT / "docs/install.md").read_text(encoding="utf-8"))
    assert said and float(said[1]) == pytest.approx(wheel.stat().st_size / 1e6, abs=0.2)


def build(checkout: Path, hook: str, folder: Path) -> Path:
    """What a hook of the build backend makes of ``checkout``."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"
    name = run(sys.executable, "-c", code, folder, cwd=checkout).splitlines()[-1]
    return folder / name


def test_the_source_distribution_is_the_repository_without_its_ci(
    checkout: Path, files: list[str], sources: list[str], tmp_path: Path
) -> None:
    archive = build(checkout, "build_sdist", tmp_path)
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames() if not packed.getmember(name).isdir()}
        packed.extractall(tmp_path, filter="data")
    made = {"PKG-INFO", "setup.cfg"} | {name for name in names if name.startswith("fa2tune.egg-info/")}
    assert names - made == {name for name in files if not name.startswith((".ci/", ".git"))}
    wheel = build(tmp_path / archive.name.removesuffix(".tar.gz"), "build_wheel", tmp_path)
    assert sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name) == in_wheel(sources)


def metadata(checkout: Path, folder: Path, *, address: str, readme: str) -> Message:
    copy = folder / "copy"
    shutil.copytree(checkout, copy)
    setup = (copy / "pyproject.toml").read_text()
    assert '\naddress = ""\n' in setup, "no address is written down before the project has one"
    (copy / "pyproject.toml").write_text(setup.replace('\naddress = ""\n', f'\naddress = "{address}"\n'))
    (copy / "README.md").write_text(readme)
    return HeaderParser().parsestr((build(copy, "prepare_metadata_for_build_wheel", folder) / "METADATA").read_text())


README = """# fa2tune
![plot](docs/a.png "bars") [how](docs/how.md#top) [site](https://example.org/x.png)
[below](#here) [`code`](./LICENSE)
[![linked](docs/b.svg)](docs/b.md) <img src="docs/c.webp" width="40"> <a href='docs/d.md'>d</a>
[mail](mailto:a@b)
`[not](docs/e.md)` [ref][r]

```python
x = [f](docs/f.md)  # code
```

[r]: docs/r.md
"""


def test_without_an_address_links_stay_and_no_url_is_named(checkout: Path, tmp_path: Path) -> None:
    made = metadata(checkout, tmp_path, address="", readme=README)
    assert made.get_payload().strip() == README.strip()
    assert made["Description-Content-Type"] == "text/markdown"
    assert made["Project-URL"] is None and made["Home-page"] is None


def test_with_an_address_links_and_images_are_absolute(checkout: Path, tmp_path: Path) -> None:
    made = metadata(checkout, tmp_path, address=ADDRESS + "/", readme=README)
    tag = f"v{made['Version']}"
    raw, blob = f"{ADDRESS}/raw/{tag}", f"{ADDRESS}/blob/{tag}"
    assert (
        made.get_payload().strip()
        == f"""# fa2tune
![plot]({raw}/docs/a.png "bars") [how]({blob}/docs/how.md#top) [site](https://example.org/x.png)
[below](#here) [`code`]({blob}/LICENSE)
[![linked]({raw}/docs/b.svg)]({blob}/docs/b.md) <img src="{raw}/docs/c.webp" width="40"> <a href='{blob}/docs/d.md'>d</a>
[mail](mailto:a@b)
`[not](docs/e.md)` [ref][r]

```python
x = [f](docs/f.md)  # code
```

[r]: {blob}/docs/r.md"""
    )
    assert dict(url.split(", ") for url in made.get_all("Project-URL")) == {
        "Homepage": ADDRESS,
        "Source": ADDRESS,
        "Issues": f"{ADDRESS}/issues",
        "Documentation": f"{ADDRESS}/tree/{tag}/docs",
        "Changelog": f"{blob}/CHANGELOG.md",
    }


def test_every_relative_link_of_the_readme_leads_to_a_file(checkout: Path, files: list[str], tmp_path: Path) -> None:
    made = metadata(checkout, tmp_path, address=ADDRESS, readme=(ROOT / "README.md").read_text())
    linked = re.findall(rf"{ADDRESS}/(?:raw|blob)/v[0-9.]+/([^)\s\"'#>]+)", str(made.get_payload()))
    assert linked, "the README links to something"
    folders = {str(parent) for name in files for parent in Path(name).parents}
    assert [name for name in linked if name.rstrip("/") not in {*files, *folders}] == []


def test_the_three_top_level_folders_hold_no_init(files: list[str]) -> None:
    assert not {f"{folder}/__init__.py" for folder in ("kernels", "search_spaces", "cache")} & set(files)


#: A user's file. Where a line ends in "# CODE", mypy reports just that.
TYPED = """
import fa2tune
import torch

def user(q: torch.Tensor, flag: bool) -> None:
    o, lse = fa2tune.attention(q, q, q, return_lse=True, layout="bshd", deterministic=None)
    pair: int = fa2tune.attention(q, q, q, return_lse=True)  # assignment
    either: int = fa2tune.attention(q, q, q, return_lse=flag)  # assignment
    alone = fa2tune.attention(q, q, q, causal=flag, softmax_scale=0.5).shape
    fa2tune.attention(q, q, q, layout="BSHD")  # call-overload
    fa2tune.attention(q, q, q, is_causal=True)  # call-overload
    fa2tune.explain(q, q, q, layout="BSHD")  # arg-type
    fa2tune.explain(q, q, q).verdict.upper()
    fa2tune.is_supported(q, q, q).upper()  # attr-defined
    fa2tune.manifest().hash.upper()
    fa2tune.atention(q, q, q)  # attr-defined
"""
#: torch takes a minute to check; without it, its types are Any
MYPY = "[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n[mypy-fa2tune.*]\nfollow_imports = silent\n"


def types_are_known(empty: Path, *options: str | Path, **environment: str) -> None:
    """A type checker finds the package, and what it reports of a user's file is right."""
    if importlib.util.find_spec("mypy") is None:
        assert "FA2TUNE_CI" not in os.environ, "mypy is missing"
        pytest.skip("needs mypy")
    file, settings = empty / "user.py", empty / "mypy.ini"
    file.write_text(TYPED)
    settings.write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", settings, "--no-error-summary",
               "--hide-error-context", "--cache-dir", empty / "mypy", *options, file.name]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")} | environment
    done = subprocess.run([str(part) for part in command], cwd=empty, env=env, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    found = list(dict.fromkeys((int(line.split(":")[1]), line.rsplit("[", 1)[1][:-1]) for line in errors))
    lines = enumerate(TYPED.split("\n"), 1)
    assert found == [(number, line.split("# ")[1]) for number, line in lines if "# " in line], done.stdout + done.stderr


def test_types_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    types_are_known(empty, MYPYPATH=str(site))


def planned(wheel: Path, folder: Path, torch: str, triton: str, *wanted: str) -> subprocess.CompletedProcess[str]:
    """What pip would install beside this torch and Triton, where all else that is needed is there. Without an index, so it
    finds no other torch either."""
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    with zipfile.ZipFile(wheel) as packed:
        about = packed.read(next(name for name in packed.namelist() if name.endswith("/METADATA"))).decode()
    needed = [Requirement(line) for line in HeaderParser().parsestr(about).get_all("Requires-Dist", [])]
    versions = {one.name: version(one.name) for one in needed if one.marker is None} | {
        "torch": torch,
        "triton": triton,
    }
    for name, number in versions.items():
        installed = site / f"{name.replace('-', '_')}-{number}.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--dry-run", "--no-index", wheel, *wanted]
    # nor what this machine's pip is told: places of wheels, constraints
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env["PIP_CONFIG_FILE"] = os.devnull
    return subprocess.run([str(part) for part in command], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("torch", "triton"),
    [("2.11.0", "3.6.0"), ("2.11.0+cu128", "3.6.0"), ("2.11.0a0+nv26.02", "3.6.0+git1"), ("2.15.0", "3.9.0")],
)
def test_an_install_leaves_a_torch_that_is_new_enough(wheel: Path, tmp_path: Path, torch: str, triton: str) -> None:
    done = planned(wheel, tmp_path, torch, triton)
    assert done.returncode == 0, done.stderr
    would = [line for line in done.stdout.splitlines() if line.startswith("Would install")]
    assert would == [f"Would install fa2tune-{wheel.name.split('-')[1]}"]


def test_an_install_that_names_its_older_torch_is_refused(wheel: Path, tmp_path: Path) -> None:
    done = planned(wheel, tmp_path, "2.8.0+cu126", "3.4.0", "torch==2.8.0+cu126")
    assert done.returncode == 1
    assert "conflicting dependencies" in done.stderr and "torch==2.8.0+cu126" in done.stderr


def test_wheel(wheel: Path, sources: list[str], tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    agrees(look(sys.executable, empty, PYTHONPATH=str(site)), site, in_wheel(sources))


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
    types_are_known(empty, "--python-executable", python)
