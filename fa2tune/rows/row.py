"""A cache row: a config for one tuning key and one implementation, with the evidence for it.

Pure data, shared by the tuner (which makes rows), the store (which writes them), the reader and the lookup.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import BACKWARD, FUSED
from fa2tune.spec.variant import DESCRIPTOR, IMPLEMENTATIONS, POINTER, PORTABLE, WARP_SPECIALIZED

#: How a row was obtained, best evidence first: measured on its GPU, on another of the same silicon, on one of another
#: architecture that ran the code of this one (sm_80 code on an sm_90 GPU), or by the model.
OBTAINED = MEASURED, SIBLING, PORTED, PREDICTED = ("measured", "sibling", "ported", "predicted")
#: Where its numerics were proved, best first: on the target, on other silicon, in the interpreter.
PROOFS = ("target", "sibling", "interpreter")
#: Rows for pointer loads and of the fused strategy must be faster than the others of their key by this share to be taken
#: where both can serve: the default takes neither, and two times that are closer may differ by noise alone.
TIE_MARGIN = 0.005
#: Fields of a row that say on which problem it was timed; the head dims and the mask are the key's.
WORKLOAD = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k")

#: An object as files have it: JSON without spaces, sorted by name.
canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True)
class Row:
    """Rows of one key, strategy, implementation, workload and kind of evidence fill a slot together, each with another config
    (``record.SLOT``). Times are microseconds for the workload; None where nothing was timed."""

    key: TuningKey
    #: of a kernel one of ``variant.IMPLEMENTATIONS``, or the name that a kernel gives itself; of a whole backward
    #: "warp_specialized" where one of its kernels is, else "portable"
    implementation: str
    config: Mapping[
        str, Any
    ]  #: plain ints, strings and bools; of a whole backward the implementation of each of its kernels
    obtained: str  #: one of ``OBTAINED``; "sibling" and "ported" were measured on ``obtained_on``
    proof: str  #: "target", "sibling" or "interpreter"
    obtained_on: str = ""  #: name of the GPU that measured it, as its driver says; "" if predicted
    time_us: float | None = None  #: median measured, or predicted by the model
    time_low_us: float | None = None  #: 10 % quantile of the samples
    time_high_us: float | None = None  #: 90 % quantile
    samples: int = 0
    #: of the portable default config, interleaved with this one (or predicted alike); in a row for pointer loads, of the
    #: default for tensors that no descriptor can address
    default_time_us: float | None = None
    gain: float | None = None  #: median over pairs of default time / this time
    gain_low: float | None = None  #: lower end of the 95 % interval of that median
    gain_high: float | None = None
    tflops: float | None = None
    batch: int = 0  #: the workload it was tuned on; 0, here and below: as ``key.workload()`` has it
    heads_q: int = 0
    heads_kv: int = 0
    seqlen_q: int = 0
    seqlen_k: int = 0
    #: tensor -> {"max": error, "max_allowed": .., "rms": .., "rms_allowed": ..} against float64
    errors: Mapping[str, Any] = field(default_factory=dict)
    registers: int | None = None  #: per thread
    spills: int | None = None  #: 32-bit words per thread
    shared_bytes: int | None = None  #: per block
    tried: int = 0  #: candidates compiled
    pruned: Mapping[str, int] = field(default_factory=dict)  #: reason -> how many candidates
    clock_mhz: int | None = None  #: SM clock while measuring
    power_limit_w: int | None = None
    #: launches rejected because the GPU was throttled, and taken again; None: not monitored. (Where the GPU does not
    #: recover, times are of a throttled GPU, and replace no default.)
    throttled: int | None = None
    driver: str = ""
    triton: str = ""
    torch: str = ""
    kernel_hash: str = ""  #: of the kernel's source without comments, see fingerprint.py
    space_hash: str = ""
    created: str = ""  #: UTC, ISO 8601, seconds
    strategy: str = ""  #: of a whole backward, "split" or "fused"; of a kernel ""
    #: of the machine code that was measured, 64 hex digits, see launching/machine_code.py (in older rows that of a cubin, which
    #: is compared with nothing); None: not known, and of a whole backward, whose kernels have rows of their own
    binary_hash: str | None = None

    def __post_init__(self) -> None:
        if lacking := [name for name in WORKLOAD if not getattr(self, name)]:
            workload = self.key.workload()
            for name in lacking:
                object.__setattr__(self, name, getattr(workload, name))

    @property
    def warp_specialized(self) -> bool:
        """Whether it rests on a warp-specialised kernel."""
        return self.implementation == WARP_SPECIALIZED

    @property
    def names_itself(self) -> bool:
        """Whether it rests on a kernel that names itself."""
        return bool(self._named if self.key.kernel == BACKWARD else self_named([self.implementation]))

    @cached_property
    def filed_as(self) -> str:
        """For people: the implementation, of a whole backward after its strategy: "pointer", "split warp_specialized"; where
        kernels of a whole backward name themselves, these names: "fused sm80"."""
        return f"{self.strategy} {'+'.join(self._named) or self.implementation}".lstrip()

    @cached_property
    def source(self) -> str:
        """What fingerprint.kernel_hashes calls the hash of the source that it rests on."""
        return hashed_as(self.key.kernel, self.implementation, self.key.hooks, self.strategy, self._named)

    @property
    def _named(self) -> tuple[str, ...]:
        """Of a whole backward, the implementations that name themselves."""
        return self_named(self.config.values()) if self.key.kernel == BACKWARD else ()

    @cached_property
    def config_hash(self) -> str:
        """Of the config, 16 hex digits. TypeError or ValueError: no file may hold it."""
        return digest_of(canonical(dict(self.config)))

    @property
    def barred(self) -> str:
        """Why no call ever gets it, whatever else there is; "": a call may."""
        if self.key.kernel == BACKWARD and self.strategy == FUSED and self.obtained == PREDICTED:
            return "sums dQ in no fixed order, and only a measurement, not a prediction, makes up for that"
        return ""

    @property
    def rank_us(self) -> float:
        """The time by which the rows of one key compete."""
        if self.time_us is None:
            return math.inf
        second_choice = self.implementation == POINTER or self.strategy == FUSED
        return self.time_us * (1 + TIE_MARGIN if second_choice else 1)


def precedence(row: Row) -> tuple[Any, ...]:
    """For sorting the rows of one key: as the lookup takes them where all can serve, those that no call gets behind them."""
    return bool(row.barred), OBTAINED.index(row.obtained), row.rank_us, row.filed_as, row.config_hash


def winner(rows: Iterable[Row]) -> Row | None:
    """Of the rows of one key, what a call gets where all can serve; None: none ever does."""
    best = min(rows, key=precedence, default=None)
    return None if best is None or best.barred else best


def digest_of(config: str) -> str:
    """``Row.config_hash`` of a config as files have it, see ``canonical``."""
    return hashlib.sha256(config.encode()).hexdigest()[:16]


def backward_implementation(warp_specialized: bool) -> str:
    """Of a whole backward, by whether one of its kernels is warp-specialised."""
    return WARP_SPECIALIZED if warp_specialized else PORTABLE


def self_named(implementations: Iterable[Any]) -> tuple[str, ...]:
    """Of the implementations of a whole backward's kernels, those that name themselves, in order."""
    return tuple(sorted({str(name) for name in implementations} - set(IMPLEMENTATIONS)))


def hashed_as(kernel: str, implementation: str, mask: str, strategy: str = "", named: Iterable[str] = ()) -> str:
    """What fingerprint.kernel_hashes calls the hash of the source that a row of this implementation rests on: the kernel's; for
    a whole backward, that of the portable and warp-specialised kernels of its strategy, and of those ``named``: "bwd fused
    portable+sm80 full"."""
    if kernel == BACKWARD:
        return f"{kernel} {strategy} {'+'.join([implementation, *named])} {mask}"
    if implementation in ("", POINTER, DESCRIPTOR):
        return f"{kernel} {mask}"
    return f"{kernel} {implementation} {mask}"


def over_portable(row: Row, rows: Iterable[Row]) -> float | None:
    """How many times as fast a row with warp-specialised kernels is as the best portable row of its key, obtained alike; None
    where there is nothing to compare."""
    if not row.warp_specialized or not row.time_us:
        return None
    alike = [
        other for other in rows if (other.key, other.obtained) == (row.key, row.obtained) and not other.warp_specialized
    ]
    # implementations of a whole backward are compared with one default; times of one that was verified later have another clock
    leads = [other.gain for other in alike if other.gain]
    if row.key.kernel == BACKWARD and row.gain and leads:
        return row.gain / max(leads)
    rivals = [other.time_us for other in alike if other.time_us]
    return min(rivals) / row.time_us if rivals else None
