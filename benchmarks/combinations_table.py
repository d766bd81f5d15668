"""Writes what combines with what, and what is refused, as tables of docs/drop-ins.md.

python benchmarks/combinations_table.py [--page docs/drop-ins.md]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click
import marked

from fa2tune.spec import combinations as table


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"|{'|'.join('---' if cell == '---' else f' {cell} ' for cell in cells)}|"


def calls() -> Iterator[str]:
    yield from _rows(
        ("", *table.CALLS),
        [
            *((feature, *cells) for feature, cells in table.TAKEN.items()),
            ("warp-specialised kernels", *["yes"] * len(table.CALLS)),
            ("rows tuned for it", "yes", "no", "dense calls", "dense calls", "no", "without padding or packing"),
        ],
    )


def conflicts(found: Iterable[table.Clash]) -> Iterator[str]:
    asked = table.FEATURES
    names = ((asked.get(pair.one, pair.one), asked.get(pair.other, pair.other), pair.why) for pair in found)
    return _rows(("", "does not combine with", "why"), names)


def refused() -> Iterator[str]:
    arguments: dict[str, list[str]] = {}
    for name, absent in table.LACKING.items():
        free = " or ".join(f"`{value!r}`" for value in absent.neutral if value is not None)
        arguments.setdefault(absent.what, []).append(f"`{name}`{f' other than {free}' if free else ''}")
    yield from _rows(("argument", "needs"), ((", ".join(names), what) for what, names in arguments.items()))


def text() -> str:
    features = ", ".join(table.FEATURES.values())
    return "\n".join(
        [
            *calls(), "",
            f"In `attention` and `attention_varlen` any two of these combine: {features}. Except for:",
            "", *conflicts(table.CONFLICTS), "",
            f"No call takes {', '.join(list(table.TRANSFORMS)[:-1])} or {list(table.TRANSFORMS)[-1]}. In Transformers:", "",
            *conflicts(table.IN_TRANSFORMERS), "", "## Refused", "", *refused(),
        ]
    )  # fmt: skip


@click.command(help=(__doc__ or "").splitlines()[0])
@marked.page_option
def main(page: Path | None) -> None:
    marked.publish(page, "combinations", "combinations_table", text())


if __name__ == "__main__":
    main()
