"""Foreign text, made safe to show."""

from __future__ import annotations

import pytest

from fa2tune.text import MOST_CHARACTERS, count, plain, plain_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a plain é 語", "a plain é 語"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("\x9b31m", "\\x9b31m"),  # the one-byte form of ESC [
        ("two\nlines\tand\rmore", "two\\nlines\\tand\\rmore"),
        ("\u202egpj.exe", "\\u202egpj.exe"),  # written from right to left
        ("caf\udce9", "caf\\udce9"),  # a file name that is not UTF-8
        (OSError(2, "no such file"), "[Errno 2] no such file"),
        ("", ""),
    ],
)
def test_what_a_terminal_would_act_on_is_escaped(text: object, shown: str) -> None:
    assert plain(text) == shown


def test_a_long_text_is_cut() -> None:
    assert plain("x" * 1000) == "x" * (MOST_CHARACTERS - 3) + "..."
    assert plain("x" * 1000, 10) == "xxxxxxx..."
    assert len(plain("\x1b" * 299)) == MOST_CHARACTERS
    assert plain("x" * 1000, None) == "x" * 1000


def test_lines_stay_apart() -> None:
    assert plain_lines("one\ntwo\x1b[0m\n") == "one\ntwo\\x1b[0m\n"
    assert len(plain_lines("x\n" * 10000)) < 3001


def test_one_thing_has_no_plural() -> None:
    assert [count(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
