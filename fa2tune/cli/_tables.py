"""Tables of text that fit the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence

from fa2tune.cli._output import echo, echo_all
from fa2tune.spec.problem import BUCKETS
from fa2tune.text import plain

INDENT = "    "  #: of columns that are moved below a row


def lines(
    titles: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, *, right: Collection[str] = (),
    below: Collection[str] = (), spare: Collection[str] = (),
) -> Iterator[str]:  # fmt: skip
    """A heading and the rows, no line longer than ``width`` if possible (None: any length, where the output is no terminal).
    If a table is too wide, the columns ``below`` go below each row, indented, with their titles, or once below the table where
    all rows have the same value; then empty columns are left out, and then the ``spare`` ones. ``right``: columns of
    figures."""
    everything = list(range(len(titles)))
    columns = [i for i in everything if titles[i] not in below]
    filled = [i for i in columns if any(row[i] for row in rows)]
    needed = [i for i in filled if titles[i] not in spare]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    chosen = next(
        (some for some in (everything, columns, filled) if width is None or _wide([widths[i] for i in some]) <= width),
        needed,
    )

    def line(cells: Sequence[str]) -> str:
        put = (cells[i].rjust(widths[i]) if titles[i] in right else cells[i].ljust(widths[i]) for i in chosen)
        return "  ".join(put).rstrip()

    def under(columns: Sequence[int], row: Sequence[str], indent: str) -> Iterator[str]:
        text = "; ".join(f"{titles[i]}: {row[i]}" for i in columns if row[i])
        yield from textwrap.wrap(
            text, max(width or 0, 40), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )

    moved = [i for i in everything if titles[i] in below] if chosen is not everything else []
    alike = [i for i in moved if len(rows) > 1 and len({row[i] for row in rows}) == 1]
    yield line(titles)
    for row in rows:
        yield line(row)
        yield from under([i for i in moved if i not in alike], row, INDENT)
    if rows:
        yield from under(alike, rows[0], "")


def following(text: str, width: int | None) -> Iterator[str]:
    """What to run next; where it is longer than ``width`` (None: any length), the command has lines of its own, which a shell
    takes as one."""
    if width is None or len(text) + len("Next: ") <= width:
        yield f"Next: {text}"
        return
    place, _, command = text.rpartition(": ")
    yield from textwrap.wrap(f"Next, {place}:" if place else "Next:", width, break_on_hyphens=False)
    yield from shell_lines(command, width)


def shell_lines(command: str, width: int | None) -> list[str]:
    """A command, indented; on several lines of a shell where it is longer than the terminal is wide; broken before options
    only."""
    found = ["  "]
    for word in command.replace(" --", "\n--").split("\n"):
        if width and len(found[-1]) + len(word) + 3 > width and found[-1].strip():
            found.append("    ")
        found[-1] += f"{word} "
    return [f"{line}\\" for line in found[:-1]] + [found[-1].rstrip()]


def _wide(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def spans(lengths: Collection[int]) -> list[str]:
    """Length buckets for people: neighbouring ones as one range, "512-16384"."""
    runs: list[list[int]] = []
    for length in sorted(lengths):
        if runs and _follows(runs[-1][-1], length):
            runs[-1].append(length)
        else:
            runs.append([length])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def _follows(one: int, other: int) -> bool:
    """Whether no bucket lies between them. A file may hold rows with a length that is no bucket of this fa2tune."""
    known = one in BUCKETS and other in BUCKETS
    return known and BUCKETS.index(other) == BUCKETS.index(one) + 1


def merged(rows: Sequence[tuple[str, ...]], columns: Sequence[int]) -> list[tuple[str, ...]]:
    """Rows that are alike but for one of ``columns`` as one row, with its values side by side; column by column. Nothing is
    lost: the rows are those that a merged row spells out."""
    for column in columns:
        alike: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            values = alike.setdefault((*row[:column], *row[column + 1 :]), [])
            if row[column] not in values:
                values.append(row[column])
        rows = [(*about[:column], " ".join(values), *about[column:]) for about, values in alike.items()]
    return list(rows)


def width() -> int | None:
    """Columns of the terminal; None where the output is not one, so that lines may be of any length."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def show(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = (), below: Collection[str] = ()
) -> None:  # fmt: skip
    """Print a table, see ``lines``, at the width of the terminal. Cells may hold text from elsewhere."""
    cells = [[plain(cell, None) for cell in row] for row in rows]
    echo_all(lines(titles, cells, width(), right=right, below=below))


def folded(text: str, indent: int = 2) -> list[str]:
    """A line at the width of the terminal; what follows its first part is indented."""
    columns, text = width(), plain(text, None)
    if columns is None or len(text) <= columns:
        return [text]
    return textwrap.wrap(
        text, max(columns, 40), subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )


def say(text: str, indent: int = 2) -> None:
    """Print a line, ``folded``."""
    for part in folded(text, indent):
        echo(part)
