"""Rows that are renewed by the hash of their machine code, with a fake compiler in real child processes. The real one, and
sources that are edited: tests/test_extending.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_rows import CONFIG, row
from click.testing import CliRunner, Result
from tuner_fakes import logged
from upkeep_fakes import digest

from fa2tune.cli.cache import cache
from fa2tune.compiling import fingerprint
from fa2tune.fleet import renewal
from fa2tune.fleet.finding import UNTOLD
from fa2tune.fleet.renewal import (
    FRESH,
    HASH_ADDED,
    NO_HASH,
    NOT_COMPILED,
    NOT_REACHED,
    OTHER_CODE,
    OTHER_TRITON,
    RENEWED,
    SAME_CODE,
    Renewal,
    RenewalResult,
)
from fa2tune.launching import machine_code
from fa2tune.rows import reader, record
from fa2tune.rows.row import MEASURED, PORTED, Row
from fa2tune.rows.store import Store, export
from fa2tune.spec.problem import BACKWARD
from fa2tune.tuning.request.watcher import WorkerFunctions

pytestmark = pytest.mark.usefixtures("quick_starts")

FUNCTIONS = WorkerFunctions(machine_code="upkeep_fakes:machine_code")
STALE, CUBIN = "0" * 16, "89abcdef" * 8  #: hashes of other sources; of a cubin, as older rows have it


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.setenv("FA2TUNE_FAKE_LOG", str(tmp_path / "log.jsonl"))
    monkeypatch.setattr("fa2tune.cli.cache.renew._functions", lambda: FUNCTIONS)
    return tmp_path / "log.jsonl"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what goes wrong: (kind, entries of a config, figure)."""
    return lambda *wrong: monkeypatch.setenv("FA2TUNE_FAKE_FAULTS", json.dumps(wrong))


def made(kernel: str = "fwd", n: int = 64, **changes: Any) -> Row:
    """A row of today's sources and Triton, with its hash; ``n``: tells configs apart."""
    key = {"kernel": kernel, **changes.pop("key", {})}
    found = row(key, config={**CONFIG, "BLOCK_N": n}, triton=fingerprint.triton_version(), binary_hash=digest())
    found = replace(found, **changes)
    return found if "kernel_hash" in changes else replace(found, kernel_hash=_today(found))


def _today(row: Row) -> str:
    return fingerprint.kernel_hashes()[row.source]


def whole(**changes: Any) -> Row:
    return made(
        BACKWARD, config={"bwd_dkdv": "pointer", "bwd_dq": "pointer"}, strategy="split", implementation="portable",
        binary_hash=None, **changes,
    )  # fmt: skip


def compared(rows: list[Row], **options: Any) -> list[RenewalResult]:
    return Renewal(rows, rows, functions=FUNCTIONS, workers=2, **options).go()


def states(rows: list[Row], **options: Any) -> list[str]:
    return [one.state for one in compared(rows, **options)]


def test_a_row_of_the_same_machine_code_is_renewed_and_another_is_not(faults: Any) -> None:
    faults(["ptx", {"BLOCK_N": 32}, "c"], ["code", {"BLOCK_N": 16}, "c"], ["ptx", {"BLOCK_N": 128}, "c"],
           ["code", {"BLOCK_N": 128}, "c"])  # fmt: skip
    rows = [made(n=n, kernel_hash=STALE) for n in (64, 32, 16, 128)]
    found = compared(rows)
    assert [one.state for one in found] == [RENEWED, RENEWED, RENEWED, OTHER_CODE]
    assert found[3].new is None
    for before, one, now in zip(rows, found, (digest(), digest("c"), digest()), strict=False):
        assert one.new == replace(before, kernel_hash=_today(before), binary_hash=now)


def test_what_cannot_be_compared_says_why(faults: Any, log: Path) -> None:
    faults(["compile", {"BLOCK_N": 32}, 1], ["killed", {"BLOCK_N": 16}, 1])
    rows = [
        made(), made(binary_hash=CUBIN), made(binary_hash=None), made(binary_hash=CUBIN, kernel_hash=STALE),
        made(triton="2.0.0", kernel_hash=STALE), made(n=32, kernel_hash=STALE), made(n=16, kernel_hash=STALE),
        made(key={"bucket": 77}, kernel_hash=STALE), made(implementation="later", kernel_hash=STALE),
    ]  # fmt: skip
    found = compared(rows)
    assert [one.state for one in found] == [
        FRESH, HASH_ADDED, HASH_ADDED, NO_HASH, OTHER_TRITON, NOT_COMPILED, UNTOLD, NOT_COMPILED, NOT_COMPILED
    ]  # fmt: skip
    assert [one.new and one.new.binary_hash for one in found] == [None, digest(), digest(), *[None] * 6]
    assert [one.why for one in found[4:6]] == ["made with Triton 2.0.0", "CompilationError: no"]
    assert "no call has length bucket 77" in found[7].why and "no fwd later causal here" in found[8].why
    assert len(logged(log, "machine code")) == 3, "each config once"


def test_a_check_compares_what_is_fresh_and_changes_nothing(faults: Any) -> None:
    faults(["ptx", {"BLOCK_N": 32}, "c"], ["code", {"BLOCK_N": 32}, "c"])
    rows = [made(), made(n=32), made(kernel_hash=STALE), made(binary_hash=None), whole()]
    found = compared(rows, check=True)
    assert [one.state for one in found] == [SAME_CODE, OTHER_CODE, SAME_CODE, NO_HASH, FRESH]
    assert not any(one.new for one in found)


def test_a_whole_backward_is_renewed_as_its_kernels_agree(faults: Any) -> None:
    parts = [made("bwd_dkdv"), made("bwd_dq", n=32, kernel_hash=STALE)]
    for wrong, state, why in (
        ([], RENEWED, ""),
        ([["compile", {"BLOCK_N": 32}, 1]], NOT_COMPILED, "its bwd_dq CompilationError: no"),
        ([["ptx", {"BLOCK_N": 64}, "c"], ["code", {"BLOCK_N": 64}, "c"]], OTHER_CODE, "its bwd_dkdv"),
    ):
        faults(*wrong)
        last = compared([*parts, whole(kernel_hash=STALE)])[-1]
        assert (last.state, last.why) == (state, why)
        assert (last.new is not None) == (state == RENEWED)
        assert last.new is None or last.new == replace(last.row, kernel_hash=_today(last.row))
    faults()
    assert states([parts[0], whole(kernel_hash=STALE)])[-1] == UNTOLD
    old = replace(parts[1], binary_hash=CUBIN)
    assert states([parts[0], old, whole(kernel_hash=STALE)])[-1] == NO_HASH
    assert states([*parts, whole()])[-1] == FRESH


def test_a_ported_row_is_compared_by_the_code_that_was_measured(log: Path) -> None:
    key = {"gpu": "l4", "sm_count": 58, "arch": 89}
    states([made(key=key, obtained=PORTED, kernel_hash=STALE), made(key=key, obtained=MEASURED, kernel_hash=STALE)])
    assert {entry[2] for entry in logged(log, "machine code")} == {80, 89}


def test_nothing_that_triton_kept_of_other_sources_is_compared(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in ("a" * 64, "b" * 64):
        monkeypatch.setattr(fingerprint, "source_digest", lambda source=source: source)
        states([made(kernel_hash=STALE)])
    assert [Path(entry[4]).name for entry in logged(log, "machine code")] == ["a" * 16, "b" * 16]


def _renew(path: Path, *options: str) -> Result:
    return CliRunner().invoke(cache, ["renew", "--cache", str(path), *options])


def test_the_file_and_its_twin_are_written_and_nothing_else_changes(tmp_path: Path, faults: Any) -> None:
    path, twin = tmp_path / "rows.sqlite", tmp_path / "rows.json"
    faults(["compile", {"BLOCK_N": 32}, 1])
    rows = [made(kernel_hash=STALE), made(n=32, kernel_hash=STALE), made(n=16, triton="2.0.0")]
    export(rows, path)
    export(rows, twin, "json")
    before = path.read_bytes(), twin.read_bytes()
    done = _renew(path, "--check")
    assert done.exit_code == 1 and (path.read_bytes(), twin.read_bytes()) == before
    assert done.output.endswith("1 the same, 1 does not compile, 1 another Triton\n")
    done = _renew(path)
    assert done.exit_code == 1 and "CompilationError: no" in done.output, done.output
    assert done.output.endswith("rows.sqlite: 1 renewed, 1 does not compile, 1 another Triton\n")
    renewed = replace(rows[0], kernel_hash=_today(rows[0]))
    assert record.digest(reader.read(path)) == record.digest([renewed, *rows[1:]])
    assert reader.read(twin) == reader.read(path)
    faults()
    assert _renew(path).exit_code == 0 and _renew(path).output.endswith("2 fresh, 1 another Triton\n")
    assert _renew(tmp_path / "none.sqlite").exit_code == 2


def test_what_is_not_reached_is_left_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    export([made(kernel_hash=STALE)], path)
    done = _renew(path, "--time-budget", "0.000001")
    assert (done.exit_code, done.output) == (1, f"{path}: 1 {NOT_REACHED}\n")
    assert _renew(path).output.endswith("1 renewed\n")


def test_a_row_that_was_tuned_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    mine = [made(kernel_hash=STALE), made(n=32, kernel_hash=STALE)]
    Store(path).put(mine)
    writer = renewal.Writer(path)
    for one in compared(mine):
        writer(one)
    tuned = replace(mine[1], created="2026-03-01T00:00:00Z", kernel_hash=_today(mine[1]))
    Store(path).renew([tuned])
    writer.flush()
    assert tuned in reader.read(path) and mine[0] not in reader.read(path)


def test_what_older_rows_hold_is_no_such_hash() -> None:
    assert machine_code.known(digest()) and not machine_code.known(CUBIN) and not machine_code.known(None)
    assert machine_code.agree(digest(), digest("a", "c")) and machine_code.agree(digest(), digest("c"))
    assert not machine_code.agree(digest(), digest("b", "a"))


@pytest.mark.parametrize("path", reader.shipped_paths(), ids=lambda path: path.stem)
def test_every_shipped_row_of_a_kernel_has_a_hash(path: Path) -> None:
    lacking = [
        found for found in reader.read(path)
        if found.key.kernel != BACKWARD and not machine_code.known(found.binary_hash)
    ]  # fmt: skip
    assert lacking == []
