"""Words of this project only, or of a story, with the field's term for each: what names, texts and pages say instead."""

from __future__ import annotations

import re
from collections.abc import Collection

#: Of whatever is read: names in the code, texts of errors and screens, pages.
EVERYWHERE = {
    "astray": "operand check", "beside": "next to, overlapped with", "books": "log", "crown": "select",
    "crowned": "selected", "fate": "status", "hands": "workers; passes", "heard": "received", "joined": "merged",
    "judge": "check", "judged": "checked", "ledger": "failure record", "lot": "job", "lots": "jobs", "nobody": "nothing",
    "regret": "lookup cost", "road": "strategy", "roads": "strategies", "rung": "step of the lookup",
    "rungs": "steps of the lookup", "shelf": "store", "tells": "says", "today": "now", "told": "signalled",
    "ways": "implementations", "who": "that", "whom": "that", "witness": "clock monitor",
}  # fmt: skip
#: Of prose, besides. Code may have a book, a way and a session of another library.
IN_PROSE = {
    "book": "log", "hand": "pass", "handed": "passed", "way": "implementation", "evening": "the date",
    "morning": "the date", "night": "the date", "session": "run",
}  # fmt: skip
#: Of names, besides.
IN_NAMES = {"hopeless": "predicted to be too slow", "shelves": "stores"}


def found_in(text: str, words: Collection[str]) -> list[str]:
    """Those of ``words`` that a text has; what is in capitals is a parameter of a config."""
    every = re.findall(r"[A-Za-z]+", text)
    return [word for word in every if word.lower() in words and not (word.isupper() and len(word) > 1)]
