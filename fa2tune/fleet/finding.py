"""What can be found of a cache row on this machine: what is here to look with, and how what was seen is called."""

from __future__ import annotations

from dataclasses import dataclass

from fa2tune import gpus
from fa2tune.compiling import compiler, fingerprint, limits
from fa2tune.gpus import Gpu
from fa2tune.problem import BACKWARD, BUCKETS, DTYPES, HEAD_DIM_STEP, KERNELS, MAX_HEAD_DIM, MIN_HEAD_DIM, TuningKey
from fa2tune.rows import lookup
from fa2tune.rows.row import Row
from fa2tune.variant import Variant

HOLDS = "holds"  #: all that it claims was shown again
LOST = (
    "lost"  #: it runs and is right, but is slower than it says by more than ``TOLERANCE``, or than the default config
)
FAILS = "fails"  #: it does not compile or launch, breaks a limit, is wrong, hangs or crashes
UNTIMED = "not timed"  #: nothing speaks against it, but the GPU that measured it is not here
UNTOLD = "cannot tell"  #: the host or the card got in the way
STATES = (HOLDS, LOST, FAILS, UNTIMED, UNTOLD)

TOLERANCE = 0.03  #: share of its time that a row may lose


@dataclass(frozen=True)
class Card:
    """The GPU that is here."""

    gpu: Gpu
    name: str  #: as its driver says
    driver: str  #: version


@dataclass(frozen=True)
class Finding:
    """What was found of one row."""

    row: Row
    state: str  #: one of STATES
    why: str = ""  #: on one line; "" where there is nothing to say
    stale: tuple[str, ...] = ()  #: what it was made with that is not so today
    time_us: float | None = None  #: today's
    loss: float | None = None  #: share of the time it says, at the clock it says
    #: the row with today's evidence, where everything it claims could be shown again
    fresh: Row | None = None
    #: it was launched and failed: a call that it serves would, too
    dangerous: bool = False


def card_here() -> Card | None:
    """The current CUDA device; None without one. Imports torch."""
    gpu = gpus.present()
    if gpu is None:
        return None
    import torch

    return Card(gpu, torch.cuda.get_device_name(), fingerprint.driver_version())


def toolchain_here(card: Card | None) -> lookup.Toolchain:
    """What is installed here; without a GPU no driver is compared."""
    return fingerprint.toolchain(card.driver if card else "")


def variant_of(row: Row) -> Variant:
    """The kernel that a row configures. ValueError: this fa2tune has none of that name."""
    return compiler.variant_of(row.key.kernel, row.config)


def gpu_of(key: TuningKey, card: Card | None) -> Gpu:
    """The GPU that a row is filed under."""
    if card and (card.gpu.name, card.gpu.sm_count) == (key.gpu, key.sm_count):
        return card.gpu
    try:
        known = gpus.named(key.gpu)
    except ValueError:
        known = None
    if known and (known.name, known.arch, known.sm_count) == (key.gpu, key.arch, key.sm_count):
        return known
    return gpus.identify(key.gpu, key.arch, key.sm_count)


def odd_key(key: TuningKey) -> str | None:
    """Why no call can ask for a key, or None: files are data from somewhere else."""
    dims = range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP)
    precisions = ("ieee", "tf32") if key.dtype == "fp32" else ("ieee",)
    for name, value, allowed in (
        ("kernel", key.kernel, (*KERNELS, BACKWARD)),
        ("dtype", key.dtype, DTYPES),
        ("precision", key.precision, precisions),
        ("head dim", key.head_dim, dims),
        ("V head dim", key.head_dim_v, dims),
        ("length bucket", key.bucket, BUCKETS),
    ):
        if value not in allowed:
            return f"no call has {name} {value!r:.40}"
    return None


def misfit(row: Row, gpu: Gpu) -> str | None:
    """Why arithmetic alone refuses a row, as every call does; None: it does not."""
    if (odd := odd_key(row.key)) is not None:
        return odd
    if (odd := compiler.misfit(row.key.kernel, row.variant, row.config)) is not None:
        return odd
    refused = limits.before_compile(variant_of(row), row.key.specialization(), row.config, gpu)
    return refused.why if refused else None
