"""``fa2tune doctor``: the verdict, the next command, the exit status, and what it checks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_rows import CONFIG, KEY, row
from click.testing import CliRunner, Result
from test_driver_devices import H200, Driver

from fa2tune import devices
from fa2tune.cli import _checks, main
from fa2tune.compiling import binaries, compiler, fingerprint
from fa2tune.compiling.binaries import New
from fa2tune.launching import precompiled
from fa2tune.rows import reader
from fa2tune.rows.row import Row
from fa2tune.rows.store import Store

ROOT = Path(__file__).parents[2]
T4, L4, H100_PCIE = ("Tesla T4", 7, 5, 40), ("NVIDIA L4", 8, 9, 58), ("NVIDIA H100 PCIe", 9, 0, 114)


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the user's file, none yet; no other layer; an H200."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FA2TUNE_CACHE", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(reader, "shipped_paths", list)
    monkeypatch.setattr(_checks, "torch_build", lambda: _checks.TorchBuild("13.0"))
    here(monkeypatch, H200)
    return reader.user_path()


def here(monkeypatch: pytest.MonkeyPatch, *listed: tuple[str, int, int, int], **codes: int) -> None:
    monkeypatch.setattr(devices, "library", lambda: Driver(*listed, **codes))


def no_driver() -> Any:
    raise OSError("libcuda.so.1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def fresh(key: dict[str, Any] | None = None, **changes: Any) -> Row:
    made = {"triton": fingerprint.triton_version(), "driver": fingerprint.driver_version()}
    return row(key, **({"config": CONFIG, "kernel_hash": fingerprint.kernel_hashes()["fwd causal"]} | made | changes))


# --- the verdict


@pytest.mark.parametrize(
    ("gpu", "rows", "verdict", "command"),
    [
        (H200, [({}, {}), ({"bucket": 512}, {})],
         "Ready: NVIDIA H200 has 2 rows measured on this GPU, fresh for Triton {triton}.", "nothing to do"),
        (H200, [({}, {"triton": "3.5.0"})],
         "Ready: NVIDIA H200 has 1 row measured on this GPU. All are stale (triton 3.5.0, now {triton}), and still serve.",
         "fa2tune cache verify --stale --repair"),
        (H200, [({}, {"kernel_hash": "0123456789abcdef"})],
         "Ready: NVIDIA H200 has 1 row measured on this GPU. All are stale (another kernel source), and still serve.",
         "fa2tune cache verify --stale --repair"),
        (H200, [({}, {}), ({}, {"triton": "3.5.0", "implementation": "descriptor"}), ({"bucket": 512}, {"triton": "3.5.0"})],
         "Ready: NVIDIA H200 has 3 rows measured on this GPU. 1 of 2 keys have only stale rows (triton 3.5.0, now {triton}).",
         "fa2tune cache verify --stale --repair"),
        (H200, [({}, {}), ({}, {"triton": "3.5.0", "implementation": "descriptor"})],
         "Ready: NVIDIA H200 has 1 row measured on this GPU, fresh for Triton {triton}.", "nothing to do"),
        (H100_PCIE, [({}, {})],
         "Ready: NVIDIA H100 PCIe has 1 row measured on h200 (same silicon), fresh for Triton {triton}.",
         "fa2tune tune (measures on this GPU)"),
        (H200, [({}, {"obtained": "predicted"})],
         "Ready: NVIDIA H200 has 1 row predicted for this GPU, not measured, fresh for Triton {triton}.",
         "fa2tune tune (measures on this GPU)"),
        (L4, [({}, {})], "Ready: NVIDIA L4 has no rows, so attention() takes the default configs.",
         "fa2tune tune (measures on this GPU)"),
    ],
    ids=["fresh", "Triton", "source", "some stale", "both", "silicon", "predicted", "none"],
)  # fmt: skip
def test_the_first_line_says_which_rows_this_gpu_has(
    user: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu: tuple[str, int, int, int],
    rows: list[Any],
    verdict: str,
    command: str,
) -> None:
    here(monkeypatch, gpu)
    Store(user).put([fresh(key, **changes) for key, changes in rows])
    done = run()
    lines = done.output.splitlines()
    assert lines[:2] == [verdict.format(triton=fingerprint.triton_version()), f"Next: {command}"]
    assert done.exit_code == 0


def test_rows_of_another_driver_need_nothing(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "driver_version", lambda: "590.1")
    here(monkeypatch, H200)
    Store(user).put([fresh(driver="580.159.04")])
    lines = run().output.splitlines()
    fresh_one = "Ready: NVIDIA H200 has 1 row measured on this GPU, fresh for Triton"
    assert lines[0].startswith(fresh_one) and lines[1] == "Next: nothing to do"


def test_stale_rows_of_a_fleets_file_are_renewed_there(
    user: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fleet = tmp_path / "our fleet.sqlite"
    Store(fleet).put([fresh(triton="3.5.0")])
    monkeypatch.setenv("FA2TUNE_CACHE", str(fleet))
    assert f"Next: fa2tune cache verify --cache '{fleet}' --stale --repair\n" in run().output
    monkeypatch.delenv("FA2TUNE_CACHE")
    monkeypatch.setattr(reader, "shipped_paths", lambda: [fleet])
    assert f"Next: fa2tune cache merge '{fleet}' && fa2tune cache verify --stale --repair\n" in run().output


def test_every_gpu_has_a_line_on_its_rows(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(user).put([fresh(), fresh({"bucket": 512}, obtained="predicted")])
    here(monkeypatch, H200, L4)
    output = run().output
    assert re.search(r"^ok +gpu 0 rows +1 row measured on this GPU; 1 fresh, 0 stale$", output, re.MULTILINE)
    assert re.search(r"^ok +gpu 0 rows +1 row predicted for this GPU, not measured; 1 fresh", output, re.MULTILINE)
    assert re.search(r"^ok +gpu 1 rows +none: default configs$", output, re.MULTILINE)


# --- not ready


def test_without_a_gpu_it_is_not_ready_unless_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "library", no_driver)
    done = run()
    assert done.exit_code == 1
    first, second = done.output.splitlines()[:2]
    assert first == "No GPU (no NVIDIA driver is installed): attention() does not run here."
    assert second.startswith("Next: fa2tune tune --gpu a100 ")
    assert "Everything" not in done.output
    build = run("--no-gpu")
    assert build.exit_code == 0 and build.output.startswith("Ready to compile, and to tune for an absent GPU.")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreted = run()
    assert interpreted.exit_code == 0 and "attention() takes CPU tensors" in interpreted.output.splitlines()[0]


def test_no_gpu_excuses_nothing_but_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "library", no_driver)
    monkeypatch.setenv("FA2TUNE_CAPTURE_MISS", "perhaps")
    done = run("--no-gpu")
    assert done.exit_code == 1 and done.output.startswith("Not ready: FA2TUNE_CAPTURE_MISS.")


def test_a_gpu_that_the_kernels_do_not_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, T4)
    done = run()
    assert done.exit_code == 1
    assert done.output.startswith("Not ready: gpu 0.\nNext: fa2tune needs compute capability 8.0 (A100) or newer\n")


@pytest.mark.parametrize(
    ("build", "fix"),
    [
        (_checks.TorchBuild(), "install the CUDA build of torch"),
        (_checks.TorchBuild(hip="6.4"), "fa2tune needs an NVIDIA GPU"),
        (_checks.TorchBuild("14.1"), "update the driver, or install a torch for an older CUDA"),
    ],
)
def test_a_torch_that_cannot_use_the_driver(
    monkeypatch: pytest.MonkeyPatch, build: _checks.TorchBuild, fix: str
) -> None:
    monkeypatch.setattr(_checks, "torch_build", lambda: build)
    done = run()
    assert done.exit_code == 1 and done.output.startswith("Not ready: torch build.\n") and fix in done.output


def test_what_torch_is_built_for_is_read_from_its_version_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    import torch

    assert _checks.torch_build() == _checks.TorchBuild(torch.version.cuda or "", torch.version.hip or "")


def test_it_requires_what_pyproject_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        re.split(r"[<>=]", line)[0]: re.findall(r"\d+", line.partition(".dev")[0]) for line in project["dependencies"]
    }
    for package, lowest in _checks.PACKAGES.items():
        assert declared[package] == [str(n) for n in lowest if n], package
    assert project["requires-python"] == ">=3.11"


def test_what_is_missing_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_checks.PACKAGES, "triton", (99, 1))
    done = run()
    assert done.exit_code == 1
    assert done.output.startswith("Not ready: triton.\nNext: pip install --upgrade 'triton>=99.1'\n")


def test_what_only_tuning_needs_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_checks.PACKAGES, "optuna", (99,))
    done = run()
    assert done.exit_code == 0 and done.output.startswith("Ready: ")
    assert re.search(
        r"^note +optuna .*\n +-> pip install --upgrade 'optuna>=99'; attention\(\) runs", done.output, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("content", "what", "reason"),
    [(b"not a database", "damaged", "is not an SQLite database"), (None, "missing", "no such file")],
)
def test_a_fleets_file_that_cannot_be_read(
    user: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, what: str, reason: str
) -> None:
    """attention() runs, and not as the environment asks."""
    Store(user).put([fresh()])
    fleet = tmp_path / "fleet.sqlite"
    if content is not None:
        fleet.write_bytes(content)
    monkeypatch.setenv("FA2TUNE_CACHE", str(fleet))
    done = run()
    assert done.exit_code == 1
    assert done.output.splitlines()[:2] == [
        f"Ready, but fleet file {fleet} is {what} and skipped. NVIDIA H200 has 1 row measured on this GPU, fresh for Triton "
        f"{fingerprint.triton_version()}.",
        f"Next: restore {fleet} from a copy, or remove it from FA2TUNE_CACHE",
    ]
    assert re.search(rf"^FAIL +fleet cache +{re.escape(str(fleet))}: {reason}$", done.output, re.MULTILINE)
    found = json.loads(run("--json").output)
    assert found["ready"] and found["skipped"] == [f"fleet file {fleet} is {what} and skipped"]


def test_a_users_file_that_is_damaged(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(user).put([fresh()])
    user.write_bytes(user.read_bytes()[:5000])
    done = run()
    assert done.exit_code == 1
    assert done.output.splitlines()[:2] == [
        f"Ready, but user file {user} is damaged and skipped. NVIDIA H200 has no rows, so attention() takes the default "
        "configs.",
        f"Next: mv {user} {user}.bad (or restore it from a copy)",
    ]
    monkeypatch.setattr(devices, "library", no_driver)
    build = run("--no-gpu")
    assert build.exit_code == 1 and build.output.splitlines()[0].endswith(
        f"and --no-gpu needs none. But user file {user} is damaged and skipped."
    )
    monkeypatch.setenv("FA2TUNE_CAPTURE_MISS", "perhaps")
    worse = run("--no-gpu").output.splitlines()
    assert worse[0] == "Not ready: FA2TUNE_CAPTURE_MISS." and worse[1].startswith("Next: set it to ")


def test_a_file_of_binaries_that_is_not_there_and_a_setting_that_no_call_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FA2TUNE_KERNELS", str(tmp_path / "fleet.kernels"))
    monkeypatch.setenv("FA2TUNE_CAPTURE_MISS", "perhaps")
    done = run()
    assert done.exit_code == 1
    assert f"{tmp_path / 'fleet.kernels'}: no such file" in done.output
    assert "'perhaps'" in done.output and "error or default" in done.output
    assert done.output.startswith("Not ready: named kernels, FA2TUNE_CAPTURE_MISS.")


# --- files of binaries


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of three binaries that fit this Triton, named by FA2TUNE_KERNELS."""
    launch = {"name": "k", "shared": 0, "warps": 4, "ctas": 1, "cooperative": False, "programmatic": False, "maps": []}
    about = {"triton": precompiled.triton_build(), "arch": 90}
    path = tmp_path / "three.kernels"
    entries = {
        (key := hashlib.sha256(bytes([n])).hexdigest()): New(key, about, launch, os.urandom(200)) for n in range(3)
    }
    binaries.save(path, binaries.file_bytes(entries, {}))
    monkeypatch.setenv("FA2TUNE_KERNELS", str(path))
    binaries.forget()
    yield path
    binaries.forget()


def test_a_file_of_intact_binaries(kernels: Path) -> None:
    done = run()
    found = rf"^ok +named kernels .*3 binaries: 3 for sm_90 by Triton {re.escape(precompiled.triton_build())}$"
    assert re.search(found, done.output, re.MULTILINE), done.output
    assert done.exit_code == 0


def test_with_machine_code_a_triton_that_is_missing_is_a_note(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_checks.PACKAGES, "triton", (99, 1))
    done = run()
    assert done.exit_code == 0 and done.output.startswith("Ready: ")
    assert "\nNext: pip install --upgrade 'triton>=99.1'\n" in done.output, "no tune without it"
    monkeypatch.setattr(devices, "library", no_driver)
    build = run("--no-gpu")
    assert build.exit_code == 0 and build.output.startswith("Ready for calls whose machine code is in a file;")
    note = r"^note +triton .*\n? *-> pip install --upgrade 'triton>=99.1'; calls whose machine code is in a file"
    assert re.search(note, done.output, re.MULTILINE), done.output


@pytest.mark.parametrize("machine_code", [True, False])
def test_a_broken_triton(machine_code: bool, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not machine_code:
        monkeypatch.setenv("FA2TUNE_KERNELS", "off")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    (tmp_path / "broken" / "triton").mkdir(parents=True)
    (tmp_path / "broken" / "triton" / "__init__.py").write_text("raise OSError('libtriton.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path / "broken")
    found = list(_checks.tools())
    assert [one.found for one in found] == ["does not import: libtriton.so: no such file"]
    assert found[0].needed is not machine_code and found[0].fix.startswith("pip install --force-reinstall triton")


def test_one_damaged_binary_is_found(kernels: Path) -> None:
    """The header's hash is right, so that the file opens; the binary would be refused at the first call that needs it."""
    content = bytearray(kernels.read_bytes())
    content[-5] ^= 1
    kernels.write_bytes(content)
    binaries.forget()
    done = run()
    assert done.exit_code == 1 and done.output.startswith("Not ready: named kernels.")
    assert f"{kernels}, 3 binaries, 1 damaged" in done.output
    assert "ship the file again; until then calls compile those kernels" in done.output


def test_a_shipped_file_is_installed_again_and_without_triton_its_calls_are_errors(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.write_bytes(kernels.read_bytes()[:-5])
    monkeypatch.delenv("FA2TUNE_KERNELS")
    monkeypatch.setattr(reader, "shipped_paths", lambda: [kernels.with_suffix(".sqlite")])
    monkeypatch.setattr("fa2tune.compiling.fingerprint.triton_version", lambda: "")
    binaries.forget()
    (found,) = _checks.binaries_files()
    assert found.found == f"{kernels}: ends too early: it was truncated"
    assert found.fix.startswith("install fa2tune again") and "until then calls are an error" in found.fix


# --- JSON, speed


def test_json_says_the_same(user: Path) -> None:
    Store(user).put([fresh(), fresh({"bucket": 512}, triton="3.5.0")])
    done = run("--json")
    found = json.loads(done.output)
    text = run().output.splitlines()
    assert (found["ready"], found["verdict"], f"Next: {found['next']}") == (True, text[0], text[1])
    (gpu,) = found["gpus"]
    assert (gpu["name"], gpu["gpu"], gpu["arch"]) == ("NVIDIA H200", "h200", 90)
    (held,) = gpu["rows"]
    assert (held["evidence"], held["rows"], held["fresh"], held["keys"], held["fresh_keys"]) == ("measured", 2, 1, 2, 1)
    assert held["stale_files"] == [str(user)]
    assert {one["subject"] for one in found["findings"]} >= {
        "python",
        *_checks.PACKAGES,
        "CUDA tools",
        "gpu 0",
        "kernels",
    }


def test_a_missing_disassembler_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run without it."""
    there = compiler.tool

    def missing(name: str) -> str:
        if name == "nvdisasm":
            raise FileNotFoundError(f"{name} is missing")
        return there(name)

    monkeypatch.setattr(compiler, "tool", missing)
    note, rest = _checks.tools()
    assert (note.subject, note.mark, note.found) == ("nvdisasm", "note", "nvdisasm is missing")
    assert "launched without a check of their machine code" in note.fix
    assert (rest.mark, rest.found) == ("ok", "ptxas, cuobjdump")


PROBE = """
import sys
sys.path.insert(0, {tests!r})
from test_driver_devices import H200, Driver
from fa2tune import devices
devices.library = lambda: Driver(H200)
from fa2tune.cli import main
try:
    main(["doctor"], prog_name="fa2tune")
finally:
    print("heavy:", sorted({{"torch", "optuna", "sqlalchemy", "matplotlib"}} & set(sys.modules)))
"""


def test_it_imports_no_torch() -> None:
    """With a GPU and the shipped rows; the numbers of torch come from its files."""
    probe = PROBE.format(tests=str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT)
    assert "heavy: []" in done.stdout.splitlines(), done.stdout + done.stderr
    assert "NVIDIA H200" in done.stdout


def test_rows_of_gpus_that_share_no_code_do_not_count(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = replace(KEY, gpu="a100-sxm-80gb", sm_count=108, arch=80)
    Store(user).put([replace(fresh(), key=ampere)])
    assert run().output.startswith("Ready: NVIDIA H200 has no rows")
