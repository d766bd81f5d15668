"""Tables of the command line, at the widths that terminals have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_rows import BARE, FULL

from fa2tune.cli import _tables
from fa2tune.cli.tune import _table
from fa2tune.rows import reader
from fa2tune.rows.row import Row

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
