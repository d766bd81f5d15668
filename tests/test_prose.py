"""README and docs/ are plain technical English: short sentences, the field's terms, no diary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from private_words import EVERYWHERE, IN_PROSE

import fa2tune
from fa2tune.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
         *(ROOT / "docs").rglob("*.md"), *(ROOT / "cache").glob("*.md")]  # fmt: skip
LONGEST = 35  #: words of a sentence
LONGEST_CELL = 60  #: words of a table's cell, figures included

PRIVATE = {**EVERYWHERE, **IN_PROSE}
DATE_OR_COMMIT = r"\d{4}-\d\d-\d\d|(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}"
DIARY = re.compile(rf"\b(as before|this time|(that|of the) day|so far as was seen|{DATE_OR_COMMIT})\b", re.IGNORECASE)


def stripped(text: str) -> str:
    """Without what is not prose: code, links' targets, and the parts that scripts write."""
    text = re.sub(r"<!-- ([\w-]+): begin.*?<!-- \1: end -->", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->|^```.*?^```|^(?: {4}|\t).*?$|^:::.*?$", "", text, flags=re.S | re.M)
    text = re.sub(r"`[^`\n]+`", "CODE", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of each heading, paragraph, list item and cell of a table."""
    paragraph: list[str] = []
    for line in [*stripped(text).splitlines(), ""]:
        begins = re.match(r"\s*([-*]|\d+\.) |#|\||>", line)
        if paragraph and (begins or not line.strip()):
            yield "text", " ".join(paragraph)
            paragraph = []
        if line.startswith("#"):
            yield "heading", line.lstrip("# ")
        elif line.startswith("|"):
            yield from (("cell", cell.strip()) for cell in line.strip().strip("|").split("|"))
        elif line.strip():
            paragraph.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip())


def sentences(text: str) -> list[str]:
    return [each for each in re.split(r"(?<=[.!?:;])[*)\"]*\s+", text) if each.strip()]


def words(sentence: str, kind: str) -> int:
    """In a table figures do not count: a cell may be a list of them."""
    return sum(1 for word in sentence.split() if re.search(r"[A-Za-z]" if kind == "cell" else r"\w", word))


def faults(text: str) -> list[str]:
    found = []
    for kind, block in blocks(text):
        if kind == "cell" and (length := words(block, "text")) > LONGEST_CELL:
            found.append(f"{length} words in a cell: {block}")
        for sentence in sentences(block):
            if (length := words(sentence, kind)) > LONGEST:
                found.append(f"{length} words: {sentence}")
        found += [
            f"{word!r} (say {PRIVATE[word.lower()]}): {block}"
            for word in re.findall(r"[A-Za-z]+", block)
            if word.lower() in PRIVATE
        ]
        if kind == "text" and not block.startswith("NVIDIA "):  # the caption of a page's tables
            found += [f"{match[0]!r} belongs into a heading or a caption: {block}" for match in DIARY.finditer(block)]
    return found


def helps(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    """(command, text) of every help text."""
    yield name, command.help or ""
    yield from ((name, getattr(one, "help", None) or "") for one in command.params)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from helps(found, f"{name} {each}")


def test_help_and_public_docstrings_are_so_too() -> None:
    """The site's reference is made of them."""
    public = (fa2tune.attention, fa2tune.explain, fa2tune.is_supported, fa2tune.manifest)
    texts = [*helps(main, "fa2tune"), *((one.__name__, one.__doc__ or "") for one in public)]
    assert len(texts) > 100
    assert [(name, found) for name, text in texts if (found := faults(" ".join(text.split())))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short_sentences_of_the_fields_terms(page: Path) -> None:
    assert faults(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("A warp waits. " * 20, 0), ("so " * 36, 1), ("- " + "so " * 20 + "\n- " + "so " * 20, 0),
        ("so " * 20 + "\n" + "so " * 16, 1), ("| " + "1.0 " * 40 + "|", 0), ("| " + "so " * 36 + "|", 1),
        ("| " + "So. " * 61 + "|", 1), ("| " + "So. " * 60 + "|", 0),
        ("a warp, who waits", 1), ("`who` and\n```\nwho\n```", 0), ("<!-- x: begin, by y -->\nwho\n<!-- x: end -->", 0),
        ("It ran on 2026-11-21.", 1), ("## Run of 2026-11-21\n\n| 2026-11-21 |", 0), ("at commit c87cb09", 1),
    ],
)  # fmt: skip
def test_the_check_finds_what_it_names(text: str, count: int) -> None:
    assert len(faults(text)) == count
