"""Scripts of benchmarks/, which is no package, as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def script(name: str) -> ModuleType:
    """``benchmarks/<name>.py``. The folder stays on the path: a script imports its helpers by name, some of them late."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)
