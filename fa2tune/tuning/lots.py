"""A lot: what one worker tunes at a time, and holds one lease on (``leases.py``): a pass of one head dim and mask, in every
dtype and length that was asked for.

No lot needs anything of another one. A config's binary serves all lengths; the other 16-bit dtype starts from the winners of
the first; the variants of a kernel race each other in one final; and a whole backward is put together from its kernels'
winners. Anything smaller would be compiled, or waited for, by two workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fa2tune.compiling import compiler, fingerprint
from fa2tune.problem import BACKWARD, ROADS, Specialization, TuningKey
from fa2tune.rows.row import PREDICTED, Row
from fa2tune.tuning import crown
from fa2tune.tuning.family import Family
from fa2tune.tuning.plan import PASSES, Plan
from fa2tune.tuning.search import incumbents, winners
from fa2tune.variant import Variant

if TYPE_CHECKING:
    from fa2tune.sharing.shelf import Shelf
    from fa2tune.tuning.ledger import Ledger

#: What predictions come from, and what is compiled at all on their word.
MODEL_FILES = (
    "predicting/model.py", "predicting/prior.py", "predicting/tiles.py", "compiling/limits.py", "compiling/sass.py", "gpus.py",
)  # fmt: skip
#: Of a request, what makes a settled lot another's: the rest says where to put things, and how fast.
ASKED = ("retry_failed", "dtypes", "kernels", "buckets", "trials", "portable_trials", "time_budget_s", "sampler")


@dataclass(frozen=True)
class Lot:
    pass_: str  #: "fwd" or "bwd"
    head_dim: int
    head_dim_v: int
    causal: bool

    @property
    def name(self) -> str:
        """For a lease, and for people: "bwd 128 causal"."""
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        return f"{self.pass_} {dims} {'causal' if self.causal else 'full'}"

    @property
    def kernels(self) -> tuple[str, ...]:
        return PASSES[self.pass_]

    def covers(self, key: TuningKey | Specialization) -> bool:
        """Whether a key's rows are this lot's; of a specialization, whether its dims and mask are."""
        same = (key.head_dim, key.head_dim_v, key.causal) == (self.head_dim, self.head_dim_v, self.causal)
        if isinstance(key, Specialization):
            return same
        return same and (key.kernel in self.kernels or (self.pass_ == "bwd" and key.kernel == BACKWARD))

    def covers_family(self, family: Family) -> bool:
        return family.kernel in self.kernels and self.covers(family.spec)


def lots(plan: Plan) -> list[Lot]:
    """What a request comes to, the most work first: what is begun last should be over soon."""
    found = {
        Lot(pass_, spec.head_dim, spec.head_dim_v, spec.causal)
        for spec in plan.specializations()
        for pass_, kernels in PASSES.items()
        if pass_ != "both" and set(kernels) & set(plan.kernels)
    }
    return sorted(
        found, key=lambda lot: (-len(set(lot.kernels) & set(plan.kernels)), -lot.head_dim, lot.causal, lot.name)
    )


def stamp(toolchain: crown.Toolchain) -> str:
    """What trials of one kernel and search space must have in common: how times are obtained, of which GPU, with which
    toolchain."""
    made = f"{toolchain.obtained} triton={toolchain.stamp()['triton']}"
    if toolchain.obtained == PREDICTED:
        return f"{made} model={_model_hash()}"
    # times, and rows kept with them, are of this GPU under this driver
    return f"{made} on={toolchain.obtained_on.replace(' ', '_')} driver={toolchain.driver}"


def campaign(plan: Plan, toolchain: crown.Toolchain) -> str:
    """What workers must have in common to share lots: comparable trials of the same kernels and search spaces for the same GPU,
    in the same studies. Several files of studies may share the file with the leases."""
    gpu, url = plan.target.gpu, plan.storage.url
    searched = [variant for kernel in PASSES["both"] for variant in compiler.variants_of(kernel)]
    hashes = sorted({(each.name, fingerprint.kernel_hash(each), fingerprint.space_hash(each)) for each in searched})
    sources = hashlib.sha256(repr(hashes).encode()).hexdigest()[:16]
    studies = "" if url is None or plan.storage.shared else f" studies={Path(url.database or '').resolve()}"
    return f"{gpu.name} {gpu.sm_count} SMs {stamp(toolchain)} sources={sources}{studies}"


def request_token(plan: Plan) -> str:
    """What a lot is settled for: equal tokens ask for the same, in the same cache. What nobody asked for is no part of it:
    it is the same everywhere."""
    asked = {name: value for name, value in asdict(plan.request).items() if name in ASKED}
    cache = "" if plan.cache is None else str(plan.cache.resolve())
    return hashlib.sha256(repr((sorted(asked.items()), plan.kernels, cache)).encode()).hexdigest()[:16]


def _model_hash() -> str:
    """Of what predictions come from: they are worth nothing when it changes."""
    folder = Path(__file__).parent.parent
    text = b"".join((folder / name).read_bytes() for name in MODEL_FILES)
    return hashlib.sha256(text).hexdigest()[:16]


@dataclass(eq=False)
class OpenLot:
    """A lot that is worked on here."""

    lot: Lot
    families: list[Family]
    under_way: int = 0  #: tasks
    dropped: bool = False  #: given back, or lost: whatever still comes of it counts no more
    #: backward specializations that are put together, or are being so
    whole_begun: set[Specialization] = field(default_factory=set)

    def __post_init__(self) -> None:
        contests: dict[tuple[str, Specialization], list[Family]] = {}
        for family in self.families:
            contests.setdefault((family.kernel, family.spec), []).append(family)
        #: the variants of a kernel are crowned together, in one race
        self.contests = list(contests.values())

    @property
    def settled(self) -> bool:
        """Whether nothing is left to do."""
        return not self.under_way and all(family.crowned for family in self.families) and not self.wholes()

    @property
    def idle(self) -> bool:
        """Whether it can be given back: nothing is timed just now, nothing is decided yet."""
        return not self.under_way and not any(family.crowning for family in self.families)

    def wholes(self) -> list[list[Family]]:
        """Specializations whose backward kernels are all crowned, and not yet put together."""
        kernels = {kernel for road in ROADS.values() for kernel in road}
        by_spec: dict[Specialization, list[Family]] = {}
        for family in self.families:
            if family.kernel in kernels and family.crowned and family.spec not in self.whole_begun:
                by_spec.setdefault(family.spec, []).append(family)
        return [members for members in by_spec.values() if {family.kernel for family in members} == kernels]


def opened(lot: Lot, plan: Plan, shelf: Shelf, stamp: str, ledger: Ledger, known: Sequence[Row],
           say: Callable[[str], None], retry: bool = False) -> OpenLot:  # fmt: skip
    """The families of a lot, with every trial there is of them. ``known``: rows whose configs are tried early; ``retry``:
    strike out what failed before."""
    families = []
    gpu = plan.target.gpu
    for spec in filter(lot.covers, plan.specializations()):
        for variant in _variants(lot, plan):
            family = Family(variant, spec, plan, shelf, stamp, ledger, retry)
            own = [row for row in known if row.variant in variant.ways]
            family.search.also(incumbents(own, family.keys))
            family.search.seeds.extend(winners(own, family.kernel, spec, gpu.arch))
            if family.legal.configs:
                families.append(family)
            elif not variant.serves:  # another way of a kernel need not have one
                reasons = ", ".join(f"{rule} {n}" for rule, n in family.pruned(family.keys[0]).items())
                say(f"{family.title}: no legal config ({reasons})")
    for family in families:
        leader = plan.leader_of(family.spec)
        family.leader = next((f for f in families if f.variant is family.variant and f.spec.dtype == leader), None)
    return OpenLot(lot, families)


def _variants(lot: Lot, plan: Plan) -> list[Variant]:
    """What is searched: every variant of every kernel, of which only the portable ones can be predicted."""
    predicted = plan.target.obtained == PREDICTED
    return [
        variant for kernel in plan.kernels if kernel in lot.kernels for variant in compiler.variants_of(kernel)
        if not variant.serves or (not predicted and variant.min_arch <= plan.target.gpu.arch <= variant.max_arch)
    ]  # fmt: skip


def trials(lot: Lot, plan: Plan) -> int:
    """About how many candidates a lot will cost."""
    specs = list(filter(lot.covers, plan.specializations()))
    return sum(plan.trials_of(spec, variant) for spec in specs for variant in _variants(lot, plan))


def acquaint(families: Sequence[Family]) -> None:
    """Tell each who its neighbours are: the other mask, or the other dtype; not both."""
    for family in families:
        spec = family.spec
        alike = [f for f in families if f.variant is family.variant and f.spec.head_dim == spec.head_dim]
        family.neighbours = [f for f in alike if (f.spec.dtype != spec.dtype) != (f.spec.causal != spec.causal)]
