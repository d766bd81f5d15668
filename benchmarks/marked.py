"""A part of a Markdown page that a script writes: what stands between two marker lines."""

from __future__ import annotations

from pathlib import Path

import click

#: The option of scripts whose output is such a part.
page_option = click.option(
    "--page", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Write it between its markers."
)


def replaced(page: str, name: str, script: str, text: str) -> str:
    """``page`` with ``text`` between the markers of ``name``. ValueError unless each is there exactly once, in order."""
    begin, end = markers(name, script)
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"page: needs the lines {begin!r} and {end!r}, once each and in this order")
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"


def markers(name: str, script: str) -> tuple[str, str]:
    """The two marker lines of a part."""
    return f"<!-- {name}: begin, written by benchmarks/{script}.py -->", f"<!-- {name}: end -->"


def write(path: Path, name: str, script: str, text: str) -> None:
    """Replaces the part ``name`` of the page at ``path``. Raises what ``replaced`` raises, before anything is written."""
    path.write_text(replaced(path.read_text(encoding="utf-8"), name, script, text), encoding="utf-8")


def publish(page: Path | None, name: str, script: str, text: str) -> None:
    """Print ``text``; with ``page``, write it there between the markers of ``name``. ClickException: the page lacks them."""
    if page is None:
        click.echo(text)
        return
    try:
        write(page, name, script, text)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
