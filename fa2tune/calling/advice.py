"""What to do about rows that could be better: commands to run next. Importable without torch."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from fa2tune import versions

if TYPE_CHECKING:
    from fa2tune.rows.reader import Layer

NOTHING_TO_DO = "nothing to do"


def install_command(package: str) -> str:
    """What installs a torch or a Triton that works."""
    return f"pip install --upgrade '{package}>={'.'.join(map(str, versions.REQUIRED[package]))}'"


def refresh_command(layer: Layer) -> str:
    """What renews the stale rows of a cache file. Those that came with fa2tune are copied into the user's file first."""
    path = shlex.quote(str(layer.path))
    if layer.name == "shipped":
        return f"fa2tune cache merge {path} && fa2tune cache verify --stale --repair"
    file = "" if layer.name == "user" else f"--cache {path} "
    return f"fa2tune cache verify {file}--stale --repair"
