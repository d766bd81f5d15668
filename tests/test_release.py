"""Version, changelog, citation and CI workflow agree with each other."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fa2tune

yaml = pytest.importorskip("yaml")  # comes with optuna
ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((ROOT / name).read_text())
    return found


def test_the_changelog_names_this_version_behind_unreleased() -> None:
    heads = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == ("Unreleased", "")
    assert heads[1][0] == fa2tune.__version__
    assert heads[1][1], "a released version has a date"


def test_the_citation_names_this_version_and_its_date() -> None:
    citation = read("CITATION.cff")
    released = re.search(rf"^## \[{fa2tune.__version__}\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released is not None
    assert citation["version"] == fa2tune.__version__
    assert str(citation["date-released"]) == released[1]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"]
    assert citation["cff-version"] == "1.2.0"
    assert [reference["title"].partition(":")[0] for reference in citation["references"]] == ["FlashAttention-2"]


def test_the_workflow_runs_the_ci_script_and_makes_a_release_on_the_oldest_python() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert commands == {"checks": [".ci/run"], "release": ["make release"]}
    for job in jobs.values():
        pythons = [step["with"]["python-version"] for step in job["steps"] if "python-version" in step.get("with", {})]
        assert [f">={python}" for python in pythons] == [PROJECT["requires-python"]]


def test_make_release_makes_the_machine_code_checks_it_and_holds_the_wheel_to_its_size() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nrelease: setup\n")[2].partition("\n\n")[0]
    made, checked, built, measured = (
        recipe.find(one) for one in ("ship_binaries.py build", "--check", "pip wheel", "-size")
    )
    assert 0 < made < checked < built < measured and "git archive HEAD" in recipe


def test_what_ci_leaves_out_with_the_newest_versions_is_there() -> None:
    """pytest ignores a file that it is told to ignore and that does not exist."""
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    (listed,) = re.findall(r"^SAME_EVERYWHERE=\([^)]*\)$", script, re.M)
    command = f'{listed}; printf "%s\\n" "${{SAME_EVERYWHERE[@]}}"'
    paths = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(paths) > 20 and [path for path in paths if not (ROOT / path).exists()] == []
