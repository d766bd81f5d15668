"""The command group and doctor. Each command is tested beside its own room."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from pace import timed

import fa2tune
from fa2tune.cli import COMMANDS, doctor, main

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "triton", "optuna", "sqlalchemy", "numpy", "matplotlib")
#: Runs the command line in a bare interpreter and prints which modules that imported.
PROBE = """
import json, sys
from fa2tune.cli import main
try:
    main(sys.argv[1:], prog_name="fa2tune")
finally:
    print(json.dumps([name for name in sys.modules if "." not in name]), file=sys.stderr)
"""


def probe(*arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str], float]:
    done, seconds = timed([sys.executable, "-c", PROBE, *arguments], cwd=ROOT)
    return done, json.loads(done.stderr.splitlines()[-1]), seconds


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["cache", "--help"], ["cache", "path"], ["cache", "list"]],
    ids=" ".join,
)
def test_light_commands_start_in_under_a_second_and_import_nothing_heavy(arguments: list[str]) -> None:
    _, modules, first = probe(*arguments)
    assert not set(HEAVY) & set(modules)
    assert min(first, *(probe(*arguments)[2] for _ in range(2))) < 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_needs_no_torch(command: str) -> None:
    done, modules, _ = probe(command, "--help")
    assert done.stdout.startswith(f"Usage: fa2tune {command}")
    assert not {"torch", "triton"} & set(modules)


def test_help_lists_every_module_of_the_command_line() -> None:
    modules = {path.stem for path in (ROOT / "fa2tune" / "cli").glob("[!_]*") if path.suffix == ".py" or path.is_dir()}
    assert modules == set(COMMANDS)
    listing = CliRunner().invoke(main, ["--help"], terminal_width=120).output
    for command, line in COMMANDS.items():
        assert re.search(rf"^  {command} +{re.escape(line)}$", listing, re.MULTILINE)


def test_unknown_command_names_it_and_what_there_is() -> None:
    result = CliRunner().invoke(main, ["tuna"])
    assert result.exit_code == 2
    assert "'tuna'" in result.output
    assert all(command in result.output for command in COMMANDS)


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"fa2tune {fa2tune.__version__}\n"


def test_python_dash_m_is_the_same_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "fa2tune", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"fa2tune {fa2tune.__version__}\n")


# --- doctor


def test_doctor_passes_where_the_suite_passes() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    for subject in ("python", *doctor.REQUIRED, "ptxas", "cuobjdump", "nvdisasm", "gpu", "kernels"):
        assert re.search(rf"^(ok|note) +{re.escape(subject)}", result.output, re.MULTILINE), subject


def test_doctor_requires_what_pyproject_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=]", line)[0]: re.findall(r"\d+", line) for line in project["dependencies"]}
    for package, lowest in doctor.REQUIRED.items():
        assert declared[package] == [str(n) for n in lowest if n], package
    assert project["requires-python"] == ">=3.11"


def test_doctor_names_what_is_missing_and_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.REQUIRED, "triton", (99, 1))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "pip install --upgrade 'triton>=99.1'" in result.output
    assert "Not ready: triton." in result.output


def test_doctor_fails_on_a_cache_file_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "fleet.sqlite"
    broken.write_bytes(b"not a database")
    monkeypatch.setenv("FA2TUNE_CACHE", str(broken))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert str(broken) in result.output
    assert "Not ready: cache." in result.output
