"""A tuning job: what one worker tunes at a time, under one lease (``leases.py``): a pass of one head dim and mask, in
every dtype and length that was asked for.

No job needs anything of another one. A config's binary serves all lengths; the other 16-bit dtype starts from the winners of
the first; the variants of a kernel race each other in one final; and a whole backward is put together from its kernels'
winners. Anything smaller would be compiled, or waited for, by two workers.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from fa2tune.compiling import fingerprint, registry
from fa2tune.rows.row import PREDICTED
from fa2tune.spec.key import DENSE_FAMILY, TuningKey, row_mask_of
from fa2tune.spec.mask import ROW_MASKS
from fa2tune.spec.problem import BACKWARD, Specialization
from fa2tune.tuning.request.plan import KERNELS_OF_PASS, TuningPlan
from fa2tune.tuning.request.provenance import Provenance

#: What predictions come from, and what is compiled at all on their word.
MODEL_FILES = (
    "predicting/model.py", "predicting/by_mma_sync.py", "predicting/by_wgmma.py", "predicting/prior.py", "predicting/tiles.py",
    "spec/visits.py",
    "compiling/limits.py", "compiling/sass.py", "gpus.py", "catalogue.py",
)  # fmt: skip
#: Of a request, what makes a settled job another's: the rest says where to put things, and how fast.
ASKED = ("retry_failed", "dtypes", "kernels", "buckets", "trials", "portable_trials", "time_budget_s", "sampler")


@dataclass(frozen=True)
class TuningJob:
    pass_: str  #: "fwd" or "bwd"
    head_dim: int
    head_dim_v: int
    mask: str  #: one of ROW_MASKS
    family: str = DENSE_FAMILY

    @property
    def name(self) -> str:
        """For a lease, and for people: "bwd 128 causal"."""
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        return f"{self.pass_} {dims} {self.mask}" + (f" {self.family}" if self.family != DENSE_FAMILY else "")

    @property
    def kernels(self) -> tuple[str, ...]:
        return KERNELS_OF_PASS[self.pass_]

    def covers(self, key: TuningKey | Specialization) -> bool:
        """Whether a key's rows are this job's; of a specialization, whether its dims and mask are."""
        mask = row_mask_of(key) if isinstance(key, Specialization) else key.mask
        same = (key.head_dim, key.head_dim_v, mask) == (self.head_dim, self.head_dim_v, self.mask)
        if isinstance(key, Specialization):
            return same
        same = same and key.family == self.family
        return same and (key.kernel in self.kernels or (self.pass_ == "bwd" and key.kernel == BACKWARD))


def tuning_jobs(plan: TuningPlan) -> list[TuningJob]:
    """What a request comes to, the most work first: what is begun last should be over soon."""
    found = {
        TuningJob(pass_, spec.head_dim, spec.head_dim_v, row_mask_of(spec), plan.request.family)
        for spec in plan.specializations()
        for pass_, kernels in KERNELS_OF_PASS.items()
        if pass_ != "both" and set(kernels) & set(plan.kernels)
    }
    return sorted(
        found,
        key=lambda job: (
            -len(set(job.kernels) & set(plan.kernels)),
            -job.head_dim,
            ROW_MASKS.index(job.mask),
            job.name,
        ),
    )


def stamp(provenance: Provenance) -> str:
    """What trials of one kernel and search space must have in common: how times are obtained, of which GPU, with which
    toolchain."""
    made = f"{provenance.obtained} triton={provenance.stamp()['triton']}"
    if provenance.obtained == PREDICTED:
        return f"{made} model={_model_hash()}"
    # times, and rows kept with them, are of this GPU under this driver
    return f"{made} on={provenance.obtained_on.replace(' ', '_')} driver={provenance.driver}"


def campaign(plan: TuningPlan, provenance: Provenance) -> str:
    """What workers must have in common to share jobs: comparable trials of the same kernels and search spaces for the same GPU,
    in the same studies. Several files of studies may share the file with the leases."""
    gpu, url = plan.target.gpu, plan.storage.url
    searched = [variant for kernel in KERNELS_OF_PASS["both"] for variant in registry.variants_of(kernel)]
    hashes = sorted({
        (each.name, mask, fingerprint.kernel_hash(each, mask), fingerprint.space_hash(each))
        for each in searched
        for mask in (ROW_MASKS if plan.request.family == DENSE_FAMILY else fingerprint.MEASURED_MASKS)
    })  # fmt: skip
    sources = hashlib.sha256(repr(hashes).encode()).hexdigest()[:16]
    studies = "" if url is None or plan.storage.shared else f" studies={Path(url.database or '').resolve()}"
    return f"{gpu.name} {gpu.sm_count} SMs {stamp(provenance)} sources={sources}{studies}"


def request_token(plan: TuningPlan) -> str:
    """What a job is settled for: equal tokens ask for the same, in the same cache. What was not asked for is no part of it:
    it is the same everywhere."""
    asked = {name: value for name, value in asdict(plan.request).items() if name in ASKED}
    if plan.request.family != DENSE_FAMILY:  # what older versions settled stays settled
        asked["family"] = plan.request.family
    cache = "" if plan.cache is None else str(plan.cache.resolve())
    return hashlib.sha256(repr((sorted(asked.items()), plan.kernels, cache)).encode()).hexdigest()[:16]


def _model_hash() -> str:
    """Of what predictions come from: they are worth nothing when it changes."""
    folder = Path(__file__).parents[2]
    text = b"".join((folder / name).read_bytes() for name in MODEL_FILES)
    return hashlib.sha256(text).hexdigest()[:16]
