"""Settings of the public call, from the environment. Importable without torch."""

from __future__ import annotations

#: Environment variable: what a call does that finds a kernel not loaded while a CUDA graph is captured, see
#: ``dispatch._plan_in_capture``.
CAPTURE_MISS = "FA2TUNE_CAPTURE_MISS"
RAISE, TAKE_DEFAULT = "error", "default"
