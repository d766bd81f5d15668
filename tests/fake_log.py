"""What fake hands did, told by several processes at once: a line of JSON each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write(path: str, *what: Any) -> None:
    """In one go: lines of two processes never mix."""
    line = json.dumps(what, default=repr) + "\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, line.encode())
    os.close(fd)


def read(path: str | Path) -> list[list[Any]]:
    """What was done up to now. Another process may be in the midst of a line: all is read in one go, for a file's iterator goes
    on behind a half line, with its other half."""
    if not os.path.exists(path):
        return []
    text = Path(path).read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
