"""What a tuning run was asked for, checked before anything is compiled: request -> TuningPlan."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fa2tune import gpus, versions
from fa2tune.compiling import fingerprint
from fa2tune.compiling.registry import variants_of
from fa2tune.gpus import Gpu
from fa2tune.launching import ported
from fa2tune.rows import reader
from fa2tune.rows.row import MEASURED, PORTED, PREDICTED, SIBLING
from fa2tune.sharing.storage import Storage, parsed
from fa2tune.spec.key import DENSE_FAMILY, TUNED_FAMILIES, TuningKey, row_mask_of, specialization_of
from fa2tune.spec.mask import ROW_MASKS
from fa2tune.spec.problem import BUCKETS, DTYPES, HEAD_DIM_STEP, KERNELS, MAX_HEAD_DIM, MIN_HEAD_DIM, Specialization
from fa2tune.spec.variant import Variant

KERNELS_OF_PASS = {"fwd": ("fwd",), "bwd": tuple(kernel for kernel in KERNELS if kernel != "fwd"), "both": KERNELS}

SAMPLERS = ("guided", "tpe", "random", "grid", "gp", "cmaes")

#: Binaries. In the replays of benchmarks/search_quality.py the winners of all six tables are among the first 32.
MEASURED_TRIALS = 48
#: Without the GPU a trial costs 1 to 4 s of one core and nothing else: two cores end a head dim in two minutes or so. However
#: many cores there are: how good rows are should not hang on the host that made them.
PREDICTED_TRIALS = 12
PREDICTED_SECONDS = 240.0  #: time budget without the GPU, unless trials or a budget are asked for
#: A 16-bit dtype that follows the other starts from its winners and needs fewer trials of its own, or as many as these are.
FOLLOWER_SHARE, FOLLOWER_TRIALS_AT_LEAST = 3, 4


@dataclass(frozen=True)
class TuneRequest:
    """What to tune. ``None`` takes what the comment says."""

    gpu: str | None = None  #: a catalogue name; None: the GPU that is present
    head_dims: tuple[int, ...] = (128,)
    head_dim_v: int | None = None  #: None: as head_dim
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    masks: tuple[str, ...] = ROW_MASKS
    family: str = DENSE_FAMILY  #: of TUNED_FAMILIES: whole tensors, windows (causal ones), or packed sequences
    pass_: str = "both"  #: "fwd", "bwd" or "both"
    kernels: tuple[str, ...] | None = None  #: None: every kernel of the pass
    buckets: tuple[int, ...] = BUCKETS
    trials: int | None = None  #: binaries compiled per kernel, dtype, mask and head dim; None: 48, or 12 if absent
    #: the same of portable variants, where a kernel has others as well; None: as trials
    portable_trials: int | None = None
    #: no new candidates when what is left is for finals; None: no limit, but for an absent GPU whose trials are None: 240
    time_budget_s: float | None = None
    sampler: str = "guided"
    seed: int = 0
    cache: Path | None = None  #: the file that takes the rows; None: the user's
    studies: Path | None = None  #: the file with the Optuna studies; None: studies.sqlite beside the cache
    record: Path | None = None  #: JSON lines, one per candidate and bucket
    retry_failed: bool = False  #: try what the failure record says failed before
    workers: int | None = None  #: compiling at a time; None: one per core
    #: CUDA devices that measure, by number, or "all"; None: the current one
    devices: tuple[int, ...] | Literal["all"] | None = None
    #: URL of a database that several workers share: PostgreSQL takes the place of cache and studies, SQLite that of studies
    storage: str | None = field(default=None, repr=False)  # it may hold a password


@dataclass(frozen=True)
class Target:
    """The GPU the rows are for, and how they will be obtained."""

    gpu: Gpu
    #: MEASURED (it is present), SIBLING (another of its silicon is), PORTED (a GPU that can run its code is), PREDICTED
    obtained: str
    present: Gpu | None


@dataclass(frozen=True)
class TuningPlan:
    request: TuneRequest
    target: Target
    kernels: tuple[str, ...]
    trials: int
    time_budget_s: float | None
    workers: int
    cache: Path | None  #: None: the rows go into the storage, too
    storage: Storage  #: of studies, failures and leases
    devices: tuple[str, ...]  #: of each measuring process its CUDA_VISIBLE_DEVICES; "": as it is

    @property
    def where(self) -> str:
        """What holds the rows, for people."""
        return self.storage.name if self.cache is None else str(self.cache)

    def specializations(self) -> list[Specialization]:
        r = self.request
        return [
            specialization_of(r.family, dtype, dim, r.head_dim_v or dim, mask)
            for dim in r.head_dims
            for dtype in r.dtypes
            for mask in TUNED_FAMILIES[r.family]
            if mask in r.masks
        ]

    def keys(self, spec: Specialization, kernel: str) -> list[TuningKey]:
        """What the rows of a kernel are filed under, at every length of the request."""
        gpu = self.target.gpu
        return [
            TuningKey(gpu.name, gpu.sm_count, gpu.arch, kernel, spec.dtype, spec.precision, spec.head_dim, spec.head_dim_v,
                      row_mask_of(spec), bucket, self.request.family)
            for bucket in self.request.buckets
        ]  # fmt: skip

    def leader_of(self, spec: Specialization) -> str | None:
        """The dtype whose winners ``spec`` starts from: bf16 for fp16, if both are tuned."""
        return "bf16" if spec.dtype == "fp16" and "bf16" in self.request.dtypes else None

    def trials_of(self, spec: Specialization, variant: Variant) -> int:
        trials, portable = self.trials, self.request.portable_trials
        if portable is not None and variant.portable and len(variants_of(variant.serves)) > 1:
            trials = portable
        if self.leader_of(spec) is None:
            return trials
        return min(trials, max(FOLLOWER_TRIALS_AT_LEAST, trials // FOLLOWER_SHARE))


def _among(name: str, values: Collection[object], allowed: Collection[object]) -> None:
    if not values:
        raise ValueError(f"{name}: got none, allowed are {', '.join(map(str, allowed))}")
    for value in values:
        if value not in allowed:
            raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(map(str, allowed))}")


def _head_dim(name: str, value: int) -> None:
    if not MIN_HEAD_DIM <= value <= MAX_HEAD_DIM or value % HEAD_DIM_STEP:
        raise ValueError(
            f"{name}: got {value}, allowed are {MIN_HEAD_DIM} to {MAX_HEAD_DIM} in steps of {HEAD_DIM_STEP}"
        )


def resolve_target(name: str | None) -> Target:
    """Which GPU, and whether it is here. A family name ("a100") that fits the GPU present means that one."""
    present = gpus.present()
    if name is not None and present is not None and gpus.is_called(present, name):
        return Target(present, MEASURED, present)  # such a name may fit several entries; here it is this one
    asked = gpus.named(name) if name is not None else None
    if asked is None or name is None:
        if present is None:
            raise ValueError(f"gpu: none is present here, so name one ({gpus.LISTED})")
        return Target(present, MEASURED, present)
    if present is None:
        return Target(asked, PREDICTED, None)
    if present.name == asked.name:
        return Target(present, MEASURED, present)
    if gpus.same_silicon(present, asked):
        return Target(asked, SIBLING, present)
    if ported.can_stand_for(asked.arch, present.arch):
        return Target(asked, PORTED, present)
    return Target(asked, PREDICTED, present)


def _writable(name: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            with path.open("ab"):
                pass
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be written: {error.strerror or error}") from error


def _devices(request: TuneRequest) -> tuple[str, ...]:
    """What each measuring process sees. The first device becomes the current one, so that it is the one that is asked."""
    if request.devices is None:
        return ("",)
    found = gpus.visible()
    if not found:
        raise ValueError("devices: no GPU is present here")
    chosen = list(range(len(found))) if request.devices == "all" else list(dict.fromkeys(request.devices))
    for number in chosen:
        if not 0 <= number < len(found):
            raise ValueError(f"devices: got {number}, allowed are 0 to {len(found) - 1}, or all")
    if not chosen:
        raise ValueError("devices: got none")
    if len({found[number] for number in chosen}) > 1:
        named = ", ".join(f"{number} is {found[number].name}" for number in chosen)
        raise ValueError(f"devices: {named}; one run tunes for one GPU model, so name those of one")
    gpus.use(chosen[0])
    outer = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    return tuple(outer[number] if outer else str(number) for number in chosen)


def _places(request: TuneRequest) -> tuple[Path | None, Storage]:
    """Where the rows go (None: into the storage), and the storage."""
    url = None if request.storage is None else parsed(request.storage)
    if url is not None and request.studies is not None:
        raise ValueError("studies: not with storage, which holds them")
    if url is not None and (storage := Storage.at(url)).shared:
        if request.cache is not None:
            raise ValueError(
                "cache: not with a PostgreSQL storage, which holds the rows (fa2tune cache export reads them)"
            )
        return None, storage
    cache = request.cache or reader.user_path()
    studies = request.studies or cache.with_name("studies.sqlite") if url is None else Path(url.database or "")
    for name, path in (("cache", cache), ("studies", studies)):
        _writable(name, path)
    if cache.exists():
        reader.read(cache)
    return cache, Storage.of_studies(studies)


def make_plan(request: TuneRequest) -> TuningPlan:
    """Check everything. ValueError names the argument, what came and what is allowed; VersionError, what is too old."""
    versions.check("torch", importlib.metadata.version("torch"))
    versions.check("triton", fingerprint.triton_version())
    r = request
    for head_dim in r.head_dims:
        _head_dim("headdim", head_dim)
    if not r.head_dims:
        raise ValueError("headdim: got none")
    if r.head_dim_v is not None:
        _head_dim("headdim-v", r.head_dim_v)
    _among("dtype", r.dtypes, DTYPES)
    _among("mask", r.masks, ROW_MASKS)
    _among("family", (r.family,), TUNED_FAMILIES)
    allowed = TUNED_FAMILIES[r.family]
    if not set(r.masks) & set(allowed):
        raise ValueError(f"mask: got {', '.join(r.masks)} for {r.family} rows, allowed are {', '.join(allowed)}")
    if r.family != DENSE_FAMILY and "fp32" in r.dtypes:
        raise ValueError(f"dtype: got fp32 for {r.family} rows, allowed are bf16 and fp16")
    _among("pass", (r.pass_,), KERNELS_OF_PASS)
    _among("seqlen", r.buckets, BUCKETS)
    _among("sampler", (r.sampler,), SAMPLERS)
    if r.kernels is not None:
        _among("kernel", r.kernels, KERNELS_OF_PASS[r.pass_])
    for name, count in (("trials", r.trials), ("portable-trials", r.portable_trials)):
        if count is not None and count < 1:
            raise ValueError(f"{name}: got {count}, allowed are 1 and more")
    if r.time_budget_s is not None and not r.time_budget_s > 0:
        raise ValueError(f"time-budget: got {r.time_budget_s}, allowed is anything above 0 seconds")
    if r.workers is not None and r.workers < 1:
        raise ValueError(f"workers: got {r.workers}, allowed are 1 and more")
    devices = _devices(r)
    target = resolve_target(r.gpu)
    if r.devices is not None and target.obtained == PREDICTED:
        raise ValueError(f"devices: {target.gpu.name} is not here, so nothing can be measured for it")
    if r.family != DENSE_FAMILY and target.obtained == PREDICTED:
        raise ValueError(
            f"family: got {r.family} for {target.gpu.name}, which is not here: no model predicts such calls"
        )
    if r.record is not None:
        _writable("record", r.record)
    cache, storage = _places(r)
    workers = r.workers or len(os.sched_getaffinity(0))
    trials, budget = r.trials, r.time_budget_s
    if trials is None:
        trials = MEASURED_TRIALS
        if target.obtained == PREDICTED:
            trials = PREDICTED_TRIALS
            budget = budget or PREDICTED_SECONDS * len(r.head_dims)
    kernels = tuple(kernel for kernel in KERNELS_OF_PASS[r.pass_] if r.kernels is None or kernel in r.kernels)
    return TuningPlan(request, target, kernels, trials, budget, workers, cache, storage, devices)
