"""What a winner is filed under.

Pure data: importable without torch or triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fa2tune.spec.extent import DENSE, RAGGED, WHOLE, Extent
from fa2tune.spec.mask import BAND, ROW_MASKS, band, row_mask_named
from fa2tune.spec.problem import WORKLOAD_HIDDEN, WORKLOAD_TOKENS, Problem, Specialization

#: What kind of workload a row is for: whole tensors; windows; packed sequences of their own lengths; a few new queries and a
#: long cache; 8-bit tensors. Rows of "dense" also serve windows and packed sequences, where no row of their own does; otherwise
#: those of one never serve another.
DENSE_FAMILY, BANDED_FAMILY, RAGGED_FAMILY = "dense", "banded", "ragged"
FAMILIES = (DENSE_FAMILY, BANDED_FAMILY, RAGGED_FAMILY, "decode", "fp8")
#: Families that are tuned -> masks of their rows: windows are causal ones.
TUNED_FAMILIES = {DENSE_FAMILY: ROW_MASKS, BANDED_FAMILY: ("causal",), RAGGED_FAMILY: ROW_MASKS}
#: The window that banded rows are tuned with: a query sees so many times fewer keys before it than a sequence has.
WINDOW_SHARE = 8
#: The sequences that ragged rows are tuned with lie in no order: each next one is the so-and-so-many-th longer, around.
STRIDE = 11


def family_of(problem: Problem) -> str:
    """Which rows are for such a call before dense ones."""
    if problem.extent.ragged:
        return RAGGED_FAMILY
    window = problem.mask.window is not None and problem.mask.row_mask in TUNED_FAMILIES[BANDED_FAMILY]
    return BANDED_FAMILY if window else DENSE_FAMILY


def unmeasured(problem: Problem, family: str) -> str:
    """What of a call no row of a family was measured with, for people."""
    if family == BANDED_FAMILY:
        problem = replace(problem, mask=row_mask_named(problem.mask.row_mask))
    return (replace(problem, extent=WHOLE) if family == RAGGED_FAMILY else problem).unmeasured


def specialization_of(
    family: str, dtype: str, head_dim: int, head_dim_v: int, mask: str, precision: str = "ieee"
) -> Specialization:
    """Of what a family's rows are measured with. ``mask``: one of ROW_MASKS."""
    name = BAND if family == BANDED_FAMILY else mask
    extent = RAGGED if family == RAGGED_FAMILY else DENSE
    return Specialization(dtype, head_dim, head_dim_v, name, precision, extent=extent)


def row_mask_of(spec: Specialization) -> str:
    """The mask that rows of a specialization are filed under."""
    return "causal" if spec.mask == BAND else spec.mask


@dataclass(frozen=True, slots=True, order=True)
class TuningKey:
    """What a winner is filed under. Every field is stored as a column of its own, so that a miss can be explained field
    by field."""

    gpu: str  #: catalogue name, e.g. "a100-sxm-80gb"; for an unlisted GPU the name its driver gives
    sm_count: int  #: streaming multiprocessors: tells a MIG slice or a cut-down part from the whole
    arch: int  #: compute capability, 10 * major + minor
    kernel: str  #: one of KERNELS, or BACKWARD
    dtype: str
    precision: str
    head_dim: int
    head_dim_v: int
    mask: str  #: of the workload that was measured: one of ROW_MASKS
    bucket: int
    family: str = DENSE_FAMILY  #: one of FAMILIES

    def specialization(self) -> Specialization:
        return specialization_of(
            self.family, self.dtype, self.head_dim, self.head_dim_v, self.mask, self.precision
        )  # fmt: skip

    @property
    def hooks(self) -> str:
        """The mask whose hooks a row's kernels were measured with."""
        return BAND if self.family == BANDED_FAMILY else self.mask

    @property
    def kind(self) -> str:
        """The mask, and the family where that is another than dense, for people."""
        return self.mask if self.family == DENSE_FAMILY else f"{self.mask} {self.family}"

    def workload(self) -> Problem:
        """The problem this key is tuned on: the FlashAttention-2 paper's, at the bucket's length. Of "banded" rows with a
        causal window of an eighth of that; of "ragged" ones as many tokens, in sequences of up to that length (``lengths``)."""
        heads = max(1, WORKLOAD_HIDDEN // self.head_dim)
        dense = Problem(
            dtype=self.dtype, batch=max(1, WORKLOAD_TOKENS // self.bucket), heads_q=heads, heads_kv=heads,
            seqlen_q=self.bucket, seqlen_k=self.bucket, head_dim=self.head_dim, head_dim_v=self.head_dim_v,
            mask=row_mask_named(self.mask), precision=self.precision,
        )  # fmt: skip
        if self.family == BANDED_FAMILY:
            return replace(dense, mask=band(self.bucket // WINDOW_SHARE, 0))
        if self.family == RAGGED_FAMILY:
            found = self.lengths()
            extent = Extent(RAGGED, len(found), self.bucket)
            return replace(dense, batch=1, seqlen_q=sum(found), seqlen_k=sum(found), extent=extent)
        return dense

    def flops(self) -> float:
        """Of the kernel on that workload, as ``Problem.flops``; of packed sequences the sum over each."""
        problem = self.workload()
        if self.family != RAGGED_FAMILY:
            return problem.flops(self.kernel)
        return problem.flops_of_sequences(self.kernel, self.lengths())

    def lengths(self) -> tuple[int, ...]:
        """Of the packed sequences that a ragged key is tuned on, from a short one up to the bucket's length in even steps, as
        many tokens as a dense key has."""
        count = max(1, 2 * max(1, WORKLOAD_TOKENS // self.bucket) - 1)
        ends = [self.bucket * n * (n + 1) // (2 * count) for n in range(count + 1)]
        steps = [end - start for start, end in pairwise(ends)]
        return tuple(steps[STRIDE * n % count] for n in range(count))

    def with_(self, **changes: Any) -> TuningKey:
        return replace(self, **changes)
