"""Kernels are compiled without line numbers: with them ptxas may order instructions otherwise, and a binary is a third larger.

So what a tune measures, what a file of binaries holds, and what a user's call compiles is the same machine code. Triton has one
switch for the whole process; it is set while kernels of this package are compiled, in however many threads.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "TRITON_DISABLE_LINE_INFO"

_lock = threading.Lock()
_compiling = 0  #: threads within ``no_line_numbers``


def asked_for() -> bool:
    """Whether the environment or the program asks for line numbers."""
    if VARIABLE in os.environ:
        return os.environ[VARIABLE] in ("", "0", "false", "off", "no", "n", "f")
    knobs = sys.modules.get("triton.knobs")
    return getattr(getattr(knobs, "compilation", None), "__dict__", {}).get("disable_line_info") is False


@contextmanager
def no_line_numbers() -> Iterator[None]:
    """Compile without them. Where the environment or the program says ``disable_line_info``, either way, that holds: a profiler
    that shows source lines needs TRITON_DISABLE_LINE_INFO=0."""
    global _compiling
    from triton import knobs

    switch = vars(knobs.compilation)
    with _lock:
        ours = _compiling > 0 or (VARIABLE not in os.environ and "disable_line_info" not in switch)
        if ours:
            knobs.compilation.disable_line_info = True
            _compiling += 1
    try:
        yield
    finally:
        if ours:
            with _lock:
                _compiling -= 1
                if not _compiling:
                    switch.pop("disable_line_info", None)
                    os.environ.pop(VARIABLE, None)
