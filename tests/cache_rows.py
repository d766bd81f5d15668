"""Rows for the tests of store, reader, lookup and their commands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fa2tune.compiling import fingerprint
from fa2tune.rows.row import MEASURED, PREDICTED, Row
from fa2tune.spec.key import TuningKey

KEY = TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, "causal", 4096)

CONFIG = {
    "BLOCK_M": 128, "BLOCK_N": 64, "LOADS": "pointer", "MASKED": "last", "HEADS_PER_WAVE": 4,
    "num_warps": 8, "num_stages": 3, "maxnreg": 0,
}  # fmt: skip

#: Every field differs from its default, but for the strategy, which a kernel has none of.
FULL = Row(
    key=KEY, implementation="pointer", config=CONFIG, obtained=MEASURED, proof="target", obtained_on="NVIDIA H200",
    time_us=812.25, time_low_us=810.5, time_high_us=820.125, samples=200, default_time_us=900.0, gain=1.108, gain_low=1.1,
    gain_high=1.12, tflops=640.5, batch=2, heads_q=24, heads_kv=8, seqlen_q=4000, seqlen_k=3900,
    errors={"o": {"max": 0.0039, "max_allowed": 0.0086, "rms": 1e-4, "rms_allowed": 2.5e-4}},
    registers=255, spills=8, shared_bytes=98304, tried=120, pruned={"shared_memory": 31, "rows_per_warp_block_m": 7},
    clock_mhz=1980, power_limit_w=700, throttled=4, driver="580.159.04", triton="3.6.0", torch="2.11.0",
    kernel_hash="0123456789abcdef", space_hash="fedcba9876543210", created="2026-01-31T12:00:00Z",
    binary_hash="89abcdef" * 8,
)  # fmt: skip

#: Only what a row cannot do without.
BARE = Row(
    key=replace(KEY, gpu="a100-sxm-80gb", sm_count=108, arch=80), implementation="pointer", config={}, obtained=PREDICTED,
    proof="interpreter",
)  # fmt: skip

#: Every field differs from its default.
WHOLE = replace(FULL, key=replace(KEY, kernel="bwd"), strategy="split", implementation="warp_specialized")


def row(key: dict[str, Any] | None = None, **changes: Any) -> Row:
    """FULL with other fields; ``key`` holds those of its key."""
    return replace(FULL, key=replace(KEY, **(key or {})), **changes)


#: The Triton that every shipped row has a counterpart of; of others there are some.
TUNED_WITH = "3.6.0"


def stale_here(parts: Iterable[str]) -> bool:
    """Whether shipped rows are stale, given what each names that differs today. That may be Triton, where it is another one
    than all were tuned with; never the kernel source."""
    differing = {part.partition(" ")[0] for part in parts}
    assert differing <= (set() if fingerprint.triton_version() == TUNED_WITH else {"triton"}), differing
    return bool(differing)
