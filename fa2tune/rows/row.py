"""A cache row: the winner for one tuning key and one variant, with the evidence for it.

Pure data, shared by the tuner (which makes rows), the store (which writes them), the reader and the lookup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fa2tune.problem import BACKWARD, FUSED, TuningKey
from fa2tune.variant import POINTER, WARP_SPECIALIZED

#: How a row was obtained, best evidence first.
MEASURED, SIBLING, PREDICTED = "measured", "sibling", "predicted"
OBTAINED = (MEASURED, SIBLING, PREDICTED)
#: Where its numerics were proved, best first: on the target, on other silicon, in the interpreter.
PROOFS = ("target", "sibling", "interpreter")
#: Variants that must be faster than the others of their key by ``MARGIN`` to be taken where both can serve: the default
#: takes neither, and two times that are closer may be told apart by nothing but noise.
SECOND_CHOICE, MARGIN = (POINTER, FUSED, f"{FUSED}_{WARP_SPECIALIZED}"), 0.005


@dataclass(frozen=True)
class Row:
    """Unique per (key, variant, obtained). Times are microseconds for the key's workload; None where nothing was timed."""

    key: TuningKey
    #: which way this row takes: one of variant.WAYS for a kernel; for a whole backward the road, "split" or "fused", with
    #: "_warp_specialized" behind it where a kernel on it is
    variant: str
    config: Mapping[str, Any]  #: plain ints, strings and bools; of a whole backward the way of each kernel on the road
    obtained: str  #: "measured", "sibling" (measured on ``obtained_on``) or "predicted"
    proof: str  #: "target", "sibling" or "interpreter"
    obtained_on: str = ""  #: name of the GPU that measured it, as its driver says; "" if predicted
    time_us: float | None = None  #: median measured, or predicted by the model
    time_low_us: float | None = None  #: 10 % quantile of the samples
    time_high_us: float | None = None  #: 90 % quantile
    samples: int = 0
    #: of the default config, interleaved with this one (or predicted alike); in a row for pointer loads, of the default for
    #: tensors that no descriptor can address
    default_time_us: float | None = None
    gain: float | None = None  #: median over pairs of default time / this time
    gain_low: float | None = None  #: lower end of the 95 % interval of that median
    gain_high: float | None = None
    tflops: float | None = None
    batch: int = 0  #: the workload it was tuned on
    heads_q: int = 0
    heads_kv: int = 0
    #: tensor -> {"max": error, "max_allowed": .., "rms": .., "rms_allowed": ..} against float64
    errors: Mapping[str, Any] = field(default_factory=dict)
    registers: int | None = None  #: per thread
    spills: int | None = None  #: 32-bit words per thread
    shared_bytes: int | None = None  #: per block
    tried: int = 0  #: candidates compiled
    pruned: Mapping[str, int] = field(default_factory=dict)  #: reason -> how many candidates
    clock_mhz: int | None = None  #: SM clock while measuring
    power_limit_w: int | None = None
    #: launches rejected because the card was throttled, and taken again; None: nobody watched. (Where the card does not
    #: recover, times are of a throttled card, and replace no default.)
    throttled: int | None = None
    driver: str = ""
    triton: str = ""
    torch: str = ""
    kernel_hash: str = ""  #: of the kernel's source without comments, see fingerprint.py
    space_hash: str = ""
    created: str = ""  #: UTC, ISO 8601, seconds

    @property
    def specialized(self) -> bool:
        """Whether it rests on a warp-specialised kernel."""
        return self.variant.endswith(WARP_SPECIALIZED)

    @property
    def road(self) -> str:
        """Of a whole backward."""
        return self.variant.removesuffix(f"_{WARP_SPECIALIZED}")

    @property
    def barred(self) -> str:
        """Why no call ever gets it, whatever else there is; "": a call may."""
        if self.key.kernel == BACKWARD and self.road == FUSED and self.obtained == PREDICTED:
            return "sums dQ in no fixed order, and only a measurement, not a prediction, makes up for that"
        return ""

    @property
    def rank_us(self) -> float:
        """The time by which the rows of one key compete."""
        if self.time_us is None:
            return math.inf
        return self.time_us * (1 + MARGIN if self.variant in SECOND_CHOICE else 1)


def precedence(row: Row) -> tuple[Any, ...]:
    """For sorting the rows of one key: as the lookup takes them where all can serve, those that no call gets behind them."""
    return bool(row.barred), OBTAINED.index(row.obtained), row.rank_us, row.variant


def winner(rows: Iterable[Row]) -> Row | None:
    """Of the rows of one key, what a call gets where all can serve; None: none ever does."""
    best = min(rows, key=precedence, default=None)
    return None if best is None or best.barred else best


def backward_way(road: str, specialized: bool) -> str:
    """What the row of a whole backward is filed as."""
    return f"{road}_{WARP_SPECIALIZED}" if specialized else road


def hashed_as(kernel: str, variant: str) -> str:
    """What fingerprint.kernel_hashes calls the hash of the source that a row filed as ``variant`` rests on: the kernel's; for a
    whole backward, that of the kernels on its road."""
    if kernel == BACKWARD:
        return f"{kernel} {variant}"
    return f"{kernel} {WARP_SPECIALIZED}" if variant == WARP_SPECIALIZED else kernel


def over_portable(row: Row, rows: Iterable[Row]) -> float | None:
    """How many times as fast a row with warp-specialised kernels is as the best portable row of its key, obtained alike; None
    where there is nothing to compare."""
    if not row.specialized or not row.time_us:
        return None
    alike = [
        other for other in rows if (other.key, other.obtained) == (row.key, row.obtained) and not other.specialized
    ]
    # the ways of a whole backward are held against one default; times of one that was verified later have another clock
    leads = [other.gain for other in alike if other.gain]
    if row.key.kernel == BACKWARD and row.gain and leads:
        return row.gain / max(leads)
    rivals = [other.time_us for other in alike if other.time_us]
    return min(rivals) / row.time_us if rivals else None
