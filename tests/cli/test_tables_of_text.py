"""Tables of the command line, at the widths that terminals have."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_rows import BARE, FULL
from click.testing import CliRunner
from rich.console import Console

from fa2tune import gpus
from fa2tune.calling import serving
from fa2tune.cli import _tables, explain, report
from fa2tune.cli.tune import _Screen, _table
from fa2tune.rows import reader
from fa2tune.rows.row import Row
from fa2tune.spec.mask import FULL as NO_MASK
from fa2tune.spec.problem import Problem

TITLES = ("kernel", "x", "note", "tried", "none", "why")
ROWS = [["fwd", "1", "n" * 30, "5", "", "same"], ["bwd_dq", "22", "m", "66", "", "same"]]


def table(width: int | None) -> list[str]:
    return list(_tables.lines(TITLES, ROWS, width, right=("x", "tried"), below=("note", "why"), spare=("tried",)))


def test_what_fits_or_goes_into_a_file_stands_on_one_line_a_row() -> None:
    assert table(None) == table(64) == [
        f"kernel   x  {'note':30}  tried  none  why", f"fwd      1  {'n' * 30}      5        same",
        f"bwd_dq  22  {'m':30}     66        same",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "head"), [(40, "kernel   x  tried  none"), (20, "kernel   x  tried"), (12, "kernel   x")]
)
def test_what_does_not_fit_gives_way_in_turn(width: int, head: str) -> None:
    heading, first, note, second, other, alike = table(width)
    assert heading == head and first.split()[:2] == ["fwd", "1"] and second.split()[:2] == ["bwd_dq", "22"]
    assert ("5" in first) == ("tried" in head)
    assert note.split() == ["note:", "n" * 30] and other == "    note: m", "below its row, under its title"
    assert alike == "why: same", "once"


def test_neighbouring_lengths_are_one() -> None:
    assert _tables.spans([16384, 512, 1024, 4096, 8192]) == ["512-1024", "4096-16384"]
    assert _tables.spans([2048]) == ["2048"]
    assert _tables.spans([7, 512, 600, 1024]) == ["7", "512", "600", "1024"], "of another release"


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_tune_keeps_to_the_terminal(width: int) -> None:
    [path] = [path for path in reader.shipped_paths() if path.name == "h200.sqlite"]
    shown = list(_table(reader.read(path), width))
    assert max(map(len, shown)) <= width
    assert shown[0].split()[:6] == ["kernel", "dtype", "dim", "mask", "length", "TFLOP/s"], "no heading is cut"
    assert ("tried" in shown[0]) == (width == 120)
    assert sum("warp_specialized" in line for line in shown) > 50


@pytest.mark.parametrize("rows", [list, lambda: [FULL], lambda: [FULL, BARE]], ids=["none", "one", "two"])
def test_few_rows_too(rows: Callable[[], list[Row]]) -> None:
    held = rows()
    assert sum(line.startswith(("fwd", "bwd")) for line in _table(held, 80)) == len(held)


def test_the_progress_of_tune_keeps_count_and_time_left_on_a_narrow_terminal() -> None:
    screen = _Screen(Console(file=io.StringIO(), width=80, force_terminal=True))
    screen.progress(1234, 5678, 2642.0, "fwd bf16 128 causal warp_specialized, racing 12 of 48 configs at 16384", {})
    [shown] = rendered(screen)
    assert "1234/5678" in shown and "about 2642 s left" in shown and "candidates tried" in shown
    assert len(shown.rstrip()) <= 80 and "fwd" in shown and shown.rstrip().endswith("…"), "what runs now is cut"


def rendered(screen: _Screen) -> list[str]:
    lines = screen.console.render_lines(screen.bar.get_renderable())
    return ["".join(segment.text for segment in line) for line in lines]


@pytest.mark.parametrize(("gpu", "dims"), [("l40s", (128, 64)), ("a100", (128, 64)), ("h100", (128, 128))])
def test_the_next_command_of_explain_fits_and_is_one_command_of_a_shell(gpu: str, dims: tuple[int, int]) -> None:
    problem = Problem("fp16", 1, 16, 16, 4096, 4096, *dims, NO_MASK)
    found = serving.explain_problem(problem, gpus.named(gpu), present=False)
    shown = list(explain._short(found, 80, verbose=False))
    # a path is copied whole, however long
    assert max(len(line) for line in shown if not line.startswith("file: ")) <= 80, shown
    begin = next(number for number, line in enumerate(shown) if line.startswith("Next"))
    command = " ".join(line.removesuffix("\\").strip() for line in shown[begin + 1 : -1])
    assert found.next.endswith(command) and command.startswith("fa2tune tune --")
    assert all(line.endswith(" \\") for line in shown[begin + 1 : -2]) and not shown[-2].endswith("\\")
    assert f"Next: {found.next}" in explain._short(found, None, verbose=False), "whole, where lines may be long"


def test_the_lines_of_report_are_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [path] = [path for path in reader.shipped_paths() if path.name == "a100.sqlite"]
    monkeypatch.setattr(_tables, "width", lambda: 80)
    out = tmp_path / "a-name-that-is-long-as-those-of-real-runs-are.html"
    shown = CliRunner().invoke(report.report, ["--cache", str(path), "--out", str(out)]).stdout
    assert "chart library" in " ".join(shown.split())
    assert [line for line in shown.splitlines() if len(line) > 80 and " " in line.strip()] == []
