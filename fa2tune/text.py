"""Text for people: what came from somewhere else made safe to show (file names, values of a cache file, error texts of
SQLite), and numbers of things."""

from __future__ import annotations

MOST_CHARACTERS = 300  #: characters of a value or an error text that are shown


def plain(value: object, most: int | None = MOST_CHARACTERS) -> str:
    """``value`` as printable text on one line. A character that a terminal would act on is written as its escape (``\\x1b``),
    and what is longer than ``most`` characters is cut and ends in "...". ``most`` None: any length, for file names."""
    text = str(value)
    if most is not None and len(text) > most:
        text = f"{text[: most - 3]}..."
    if text.isprintable():
        return text
    escaped = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return escaped if most is None or len(escaped) <= most else f"{escaped[: most - 3]}..."


def count(number: int, noun: str) -> str:
    """ "1 row", "2 rows"; of nouns whose plural ends in s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def plain_lines(value: object) -> str:
    """As ``plain``, for a text of several lines, which stay apart; ten times as long at most."""
    return "\n".join(plain(line, None) for line in str(value)[: 10 * MOST_CHARACTERS].split("\n"))
