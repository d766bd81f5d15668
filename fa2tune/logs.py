"""Warnings that come once in the life of a process, by the logger "fa2tune"."""

from __future__ import annotations

import logging
from functools import cache


@cache
def warn_once(message: str) -> None:
    logging.getLogger("fa2tune").warning("fa2tune: %s", message)
