"""The states of a checked cache row, and the GPU and toolchain that it is checked with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fa2tune import gpus
from fa2tune.compiling import fingerprint, limits, measured_code, registry
from fa2tune.gpus import Gpu
from fa2tune.rows import lookup
from fa2tune.rows.row import Row
from fa2tune.spec.key import TUNED_FAMILIES, TuningKey
from fa2tune.spec.problem import (
    BACKWARD,
    BUCKETS,
    DTYPES,
    HEAD_DIM_STEP,
    KERNELS,
    MAX_HEAD_DIM,
    MIN_HEAD_DIM,
    STRATEGIES,
)
from fa2tune.spec.variant import Variant

HOLDS = "holds"  #: everything it claims was reproduced
LOST = "lost"  #: correct, but slower than its time by more than ``MOST_LOSS``, or slower than the default config
FAILS = "fails"  #: it does not compile or launch, breaks a limit, is wrong, hangs or crashes
UNTIMED = "not timed"  #: no fault was found, but the GPU that measured it is not here
UNTOLD = "cannot tell"  #: the host or the GPU prevented a check
STATES = (HOLDS, LOST, FAILS, UNTIMED, UNTOLD)

MOST_LOSS = 0.03  #: share of its time that a row may lose


@dataclass(frozen=True)
class PresentGpu:
    """The GPU that is present."""

    gpu: Gpu
    name: str  #: as its driver names it
    driver: str  #: version


@dataclass(frozen=True)
class Finding:
    """The result for one row."""

    row: Row
    state: str  #: one of STATES
    why: str = ""  #: on one line; "" without a remark
    stale: tuple[str, ...] = ()  #: what it was made with that differs today
    driver: str = ""  #: that it was timed under another driver, which makes it not stale; "" if it was not
    time_us: float | None = None  #: today's
    loss: float | None = None  #: share of its recorded time, at its recorded clock
    #: the row with today's evidence, where everything it claims was reproduced
    fresh: Row | None = None
    #: it was launched and failed, so a call that it serves would fail
    dangerous: bool = False


def present_gpu() -> PresentGpu | None:
    """The current CUDA device; None without one. Imports torch."""
    gpu = gpus.present()
    if gpu is None:
        return None
    import torch

    return PresentGpu(gpu, torch.cuda.get_device_name(), fingerprint.driver_version())


def toolchain_here(present: PresentGpu | None) -> lookup.Toolchain:
    """The versions installed here; without a GPU no driver is compared."""
    return measured_code.toolchain(present.driver if present else "")


def variant_of_row(row: Row) -> Variant:
    """The kernel that a row configures. ValueError: this fa2tune has none of that name."""
    return registry.variant_of(row.key.kernel, row.config)


def gpu_of_key(key: TuningKey, present: PresentGpu | None) -> Gpu:
    """The GPU that a row is filed under."""
    if present and (present.gpu.name, present.gpu.sm_count) == (key.gpu, key.sm_count):
        return present.gpu
    try:
        known = gpus.named(key.gpu)
    except ValueError:
        known = None
    if known and (known.name, known.arch, known.sm_count) == (key.gpu, key.arch, key.sm_count):
        return known
    return gpus.identify(key.gpu, key.arch, key.sm_count)


def odd_key(key: TuningKey) -> str | None:
    """Why no call can ask for a key, or None. Files may hold anything."""
    dims = range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP)
    precisions = ("ieee", "tf32") if key.dtype == "fp32" else ("ieee",)
    for name, value, allowed in (
        ("kernel", key.kernel, (*KERNELS, BACKWARD)),
        ("family", key.family, tuple(TUNED_FAMILIES)),
        ("dtype", key.dtype, DTYPES),
        ("precision", key.precision, precisions),
        ("head dim", key.head_dim, dims),
        ("V head dim", key.head_dim_v, dims),
        ("length bucket", key.bucket, BUCKETS),
    ):
        if value not in allowed:
            return f"no call has {name} {value!r:.40}"
    return None


def parts_of(row: Row, among: Sequence[Row]) -> dict[str, Row | None]:
    """Per kernel of a whole backward, the row of ``among`` that serves it: of the implementation that it names, else the best
    portable one."""
    found: dict[str, Row | None] = {}
    for name in STRATEGIES.get(row.strategy, ()):
        key, named = row.key.with_(kernel=name), row.config.get(name)
        alike = [other for other in among if (other.key, other.obtained) == (key, row.obtained)]
        alike = [other for other in alike if (other.implementation == named if named else not other.warp_specialized)]
        found[name] = min(alike, key=lambda other: other.rank_us, default=None)
    return found


def row_misfit(row: Row, gpu: Gpu) -> str | None:
    """Why a row is refused before a compile, as every call refuses it; None: it is not."""
    if (odd := odd_key(row.key)) is not None:
        return odd
    if (odd := registry.misfit(row.key.kernel, row.implementation, row.config)) is not None:
        return odd
    refused = limits.before_compile(variant_of_row(row), row.key.specialization(), row.config, gpu)
    return refused.why if refused else None
