"""The command group. Each command is tested beside its own room."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from cache_rows import stale_here
from click.testing import CliRunner
from pace import timed

import fa2tune
from fa2tune.cli import COMMANDS, _options, main
from fa2tune.spec import scorefile

ROOT = Path(__file__).parents[2]
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


def probing(*arguments: str) -> list[str]:
    return [sys.executable, "-c", PROBE, *arguments]


def probe(*arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    done = subprocess.run(probing(*arguments), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done, json.loads(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("command", ["--help", "--version", "cache --help", "cache path"])
def test_light_commands_start_in_under_a_second_and_import_nothing_heavy(command: str) -> None:
    _, modules = probe(*command.split())
    assert not set(HEAVY) & set(modules)
    assert any(timed(probing(*command.split()), cwd=ROOT)[1] < 1 for _ in range(3))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_needs_no_torch(command: str) -> None:
    done, modules = probe(command, "--help")
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


# --- called wrongly


@pytest.mark.parametrize(
    "command",
    [["tune"], ["bench"], ["explain"], *(["cache", name] for name in ("list", "show", "export", "verify", "renew"))],
    ids=" ".join,
)
def test_both_masks_at_once_are_refused_whichever_comes_first(command: list[str]) -> None:
    for masks in (["--causal", "--full"], ["--full", "--causal"]):
        result = CliRunner().invoke(main, [*command, *masks])
        assert result.exit_code == 2
        said = " ".join(result.output.split())
        assert "--causal and --full: got both" in said and "leave both options out for" in said


@pytest.mark.parametrize(
    "arguments",
    [
        "cache list --cache FILE", "cache show --cache FILE", "cache export --format json --cache FILE",
        "cache merge FILE --cache new.sqlite", "cache diff FILE FILE", "cache lock FILE", "cache check FILE",
        "cache verify --cache FILE", "cache renew --cache FILE",
        "cache coverage --model FILE --gpu h200", "cache precompile --gpu h200 --cache FILE",
        "explain --gpu h200 --cache FILE", "report --cache FILE", "leases --storage sqlite:///FILE",
    ],
)  # fmt: skip
@pytest.mark.parametrize("content", [None, b"\xff\xfe neither text nor a database \xff" * 9], ids=["absent", "foreign"])
def test_a_file_that_cannot_be_read_is_exit_code_2_and_named(
    arguments: str, content: bytes | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """1 is an answer: a gap, a difference, a row that does not hold."""
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "it").write_bytes(content)
    result = CliRunner().invoke(main, arguments.replace("FILE", "it").split())
    assert result.exit_code == 2, result.output
    assert "it: " in result.output or "it cannot be read: it is not text" in result.output
    assert "codec" not in result.output and "Errno" not in result.output
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} <= {"it"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        *((f"cache {rest}", 2) for rest in (
            "list --cache FILE", "show --cache FILE", "export --format json --cache FILE", "merge FILE --cache new.sqlite",
            "diff FILE FILE", "verify --cache FILE", "precompile --gpu h200 --cache FILE")),
        ("explain --gpu h200 --cache FILE", 2), ("tune --gpu a100 --cache FILE", 2), ("doctor", 1),
    ],
)  # fmt: skip
def test_a_file_whose_error_text_is_hostile_is_named_and_nothing_of_it_reaches_the_terminal(
    arguments: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SQLite quotes a damaged schema in its error: bytes that are not UTF-8, or escapes that a terminal acts on."""
    whole = (ROOT / "cache" / "h200-triton3.9.sqlite").read_bytes()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FA2TUNE_CACHE", "it.sqlite")
    for damaged in (
        whole.replace(b"TABLE rows", b"\xfaABLE rows", 1), whole.replace(b"head_dim INTEGER", b"head_dim`\x1b[2JGER", 1)
    ):  # fmt: skip
        (tmp_path / "it.sqlite").write_bytes(damaged)
        result = CliRunner().invoke(main, arguments.replace("FILE", "it.sqlite").split(), terminal_width=400)
        assert result.exit_code == code, result.output
        assert f"{tmp_path / 'it.sqlite'}: " in result.output
        assert all(line.isprintable() for line in result.output.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        "cache list", "cache show --gpu h200 --kernel fwd --bucket 512", "cache merge FILE --cache new.sqlite",
        "cache diff FILE FILE", "explain --gpu h200 --cache FILE", "doctor", "cache lock FILE", "report --cache FILE",
    ],
)  # fmt: skip
def test_the_name_of_a_file_is_shown_escaped(arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "a\x1b[2Jb.sqlite"
    shutil.copy(ROOT / "cache" / "h200.sqlite", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FA2TUNE_CACHE", str(tmp_path / name))
    result = CliRunner().invoke(main, arguments.replace("FILE", name).split(), terminal_width=400)
    assert result.exit_code in (0, 1) and all(line.isprintable() for line in result.output.splitlines())
    if "diff" not in arguments:
        assert "a\\x1b[2Jb" in result.output


@pytest.mark.parametrize("command", ["list", "show", "export", "verify"])
def test_rows_are_asked_for_by_what_a_row_can_have(command: str) -> None:
    for option, value, allowed in (("--bucket", "100", "512"), ("--headdim", "3", "16 to 256 in steps of 8")):
        result = CliRunner().invoke(main, ["cache", command, option, value])
        assert result.exit_code == 2 and option in result.output and allowed in result.output


def test_a_gpu_that_is_not_known_is_said_once_and_what_is_close() -> None:
    result = CliRunner().invoke(main, ["explain", "--gpu", "h100-pci"])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "--gpu: got 'h100-pci', which is not known; close to it are h100-pcie" in said
    assert "rtx" not in said, "not the whole catalogue"


def explained(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["explain", "--gpu", "h200", "--json", *arguments])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(
    ("arguments", "mask", "window"),
    [
        ((), "full", None),
        (("--window", "1024,8"), "window 1024, 8", [1024, 8]),
        (("--window", "1024,8", "--causal"), "window 1024, 0", [1024, 0]),  # as attention(causal=True, window=...)
        (("--window", "-1,8"), "window unbounded, 8", [None, 8]),
        (("--window", "4096,0"), "causal", None),  # it reaches all keys
        (("--window=4096,0", "--seqlen-k", "8192"), "window 4096, 0", [4096, 0]),
    ],
)
def test_a_call_with_a_window_is_explained(arguments: tuple[str, ...], mask: str, window: list[int | None]) -> None:
    found = explained(*arguments)
    assert (found["problem"]["mask"], found["problem"]["window"]) == (mask, window)
    assert [one["window"] for one in found["kernels"]] == [window is not None] * len(found["kernels"])
    tuned = "stale" if stale_here(part for one in found["kernels"] for part in one["stale"]) else "tuned"
    assert found["status"] == ("near" if window else tuned) and ("without a window" in found["verdict"]) == bool(window)
    said = CliRunner().invoke(main, ["explain", "--gpu", "h200", *arguments]).stdout
    assert ("without a window" in said) == bool(window)


@pytest.mark.parametrize("command", ["explain", "bench"])
@pytest.mark.parametrize("window", ["1024", "1,2,3", "a,b", "-2,0", "9223372036854775808,0"])
def test_a_window_that_is_none_is_refused(command: str, window: str) -> None:
    result = CliRunner().invoke(main, [command, "--window", window])
    assert result.exit_code == 2
    assert f"got {window!r}, expected LEFT,RIGHT: two integers from -1 to 2^63 - 1" in " ".join(result.stderr.split())


def test_a_call_with_a_mask_by_name_is_explained() -> None:
    found = explained("--mask", "chunked,1000")
    assert found["problem"]["mask"] == "chunked 1000" and "without the mask chunked" in found["verdict"]
    assert explained("--mask", "chunked,4096")["problem"]["mask"] == "causal"  # one chunk
    assert explained("--mask", "band,1024,8") == explained("--window", "1024,8")
    assert explained("--mask", "causal") == explained("--causal")


def test_a_call_with_a_score_term_is_explained() -> None:
    found = explained("--score", "softcap,30")
    assert found["problem"]["score"] == "softcap 30" and "without a soft cap" in found["verdict"]
    assert explained("--score", "none") == explained()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--score", "softcap"), "got 'softcap', softcap has 1 value: 'softcap,cap'"),
        (("--score", "softcap,0"), "got 'softcap,0.0', cap must be from 0.001"),
        (("--score", "softcap,x"), "got 'softcap,x', expected NAME or NAME,VALUE,...: numbers"),
        (("--score", "soft"), f"got 'soft', allowed are {', '.join(scorefile.names())}"),
        (("--mask", "chunked"), "got 'chunked', chunked has 1 value: 'chunked,chunk'"),
        (("--mask", "chunked,0"), "got 'chunked,0', chunk must be from 1"),
        (("--mask", "chunked,x"), "got 'chunked,x', expected NAME or NAME,VALUE,...: integers"),
        (("--mask", "casual"), "got 'casual', allowed are "),
        (
            ("--mask", "full", "--causal"),
            "--mask: got full and --causal, one of --mask, --causal, --full and --window is",
        ),
        (("--mask", "chunked,8", "--window", "8,0"), "--mask: got chunked 8 and --window, one of --mask, --causal"),
        (("--window", "8,4", "--window=3,3"), "--window: got it 2 times, once is allowed"),
        (("--seqlen", "8", "--seqlen", "8", "--causal", "--causal"), "--seqlen: got it 2 times, once is allowed"),
    ],
)
def test_a_mask_or_a_score_term_by_name_that_is_none_is_refused(arguments: tuple[str, ...], why: str) -> None:
    result = CliRunner().invoke(main, ["explain", "--gpu", "h200", *arguments])
    assert result.exit_code == 2 and why in " ".join(result.stderr.split())


def test_no_mask_and_a_window_are_not_one_call() -> None:
    result = CliRunner().invoke(main, ["explain", "--gpu", "h200", "--full", "--window", "8,8"])
    assert result.exit_code == 2 and "--full and --window: got both, one at most is allowed" in result.stderr


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to, not even root")
def test_a_place_that_cannot_be_written_is_named_and_not_the_file_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "rows.sqlite"
    shutil.copy(ROOT / "cache" / "a100.sqlite", file)
    for arguments in (["lock", str(file), "--out", "/proc/x"], ["export", "--cache", str(file), "/proc/x.json"]):
        result = CliRunner().invoke(main, ["cache", *arguments])
        assert result.exit_code == 2
        assert f"Error: {arguments[-1]}: cannot be written: No such file or directory" in result.output
    gone = tmp_path / "nowhere" / "x"
    for arguments in (
        ["lock", str(file), "--out", str(gone)], ["merge", str(file), "--cache", str(gone)],
        ["precompile", "--gpu", "a100", "--out", str(gone)],
    ):  # fmt: skip
        result = CliRunner().invoke(main, ["cache", *arguments])
        assert result.exit_code == 2 and "is not a folder" in result.output and not gone.parent.exists()


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "rows.sqlite"), 1, "rows.sqlite: No space left on device"),
        (ConnectionResetError("cut"), 1, "cut"),
        (RuntimeError("the GPU is gone"), 1, "the GPU is gone"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "typo"), 2, "typo: No such file or directory"),
        (PermissionError(errno.EACCES, "Permission denied", "theirs"), 2, "theirs: Permission denied"),
        (ValueError("no cache file"), 2, "no cache file"),
    ],
)
def test_a_wrong_name_is_exit_code_2_and_what_stops_the_work_is_1(error: Exception, code: int, words: str) -> None:
    with pytest.raises(click.ClickException) as caught, _options.shown_errors():
        raise error
    assert caught.value.exit_code == code and caught.value.message == words


def test_a_disk_that_fills_up_in_a_tune_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(run: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "rows.sqlite")

    monkeypatch.setattr("fa2tune.tuning.run.tuner.Run.go", full)
    arguments = ["tune", "--gpu", "a100", "--cache", str(tmp_path / "c.sqlite")]
    result = CliRunner().invoke(main, [*arguments, "--studies", str(tmp_path / "s.sqlite")])
    assert (
        result.exit_code == 1 and "Error: rows.sqlite: No space left on device. What was done is kept" in result.output
    )
    gone = tmp_path / "nowhere" / "x"
    for option in ("--record", "--cache", "--studies"):
        result = CliRunner().invoke(main, [*arguments, option, str(gone)])
        assert result.exit_code == 2 and "is not a folder" in result.output and option in result.output
        assert not gone.parent.exists()


def test_the_listing_of_the_cache_commands_is_whole_at_80_columns() -> None:
    listing = CliRunner().invoke(main, ["cache", "--help"], terminal_width=80).output.partition("Commands:")[2]
    assert listing.strip() and all(
        line.endswith(".") and not line.endswith("...") for line in listing.split("\n") if line
    )
