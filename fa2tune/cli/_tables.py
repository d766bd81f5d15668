"""A table of text as wide as the terminal lets it be."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence

from fa2tune.problem import BUCKETS

INDENT = "    "  #: of what stands below a row


def lines(
    titles: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, *, right: Collection[str] = (),
    below: Collection[str] = (), spare: Collection[str] = (),
) -> Iterator[str]:  # fmt: skip
    """A heading and the rows, no line longer than ``width`` if that can be (None: any length, where the output is no terminal).
    What does not fit gives way in this order: the columns ``below`` go below each row, indented, with their titles, and below
    the whole where all rows say the same; those that hold nothing, and then the ``spare`` ones, are left out. ``right``:
    columns of figures."""
    everything = list(range(len(titles)))
    beside = [i for i in everything if titles[i] not in below]
    filled = [i for i in beside if any(row[i] for row in rows)]
    needed = [i for i in filled if titles[i] not in spare]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    chosen = next(
        (some for some in (everything, beside, filled) if width is None or _wide([widths[i] for i in some]) <= width),
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


def _wide(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def spans(lengths: Collection[int]) -> list[str]:
    """Length buckets for people: neighbours as one, "512-16384"."""
    runs: list[list[int]] = []
    for length in sorted(lengths):
        if runs and BUCKETS.index(length) == BUCKETS.index(runs[-1][-1]) + 1:
            runs[-1].append(length)
        else:
            runs.append([length])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
