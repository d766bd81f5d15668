"""What a winner is filed under.

Pure data: importable without torch or triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fa2tune.spec.mask import row_mask_named
from fa2tune.spec.problem import WORKLOAD_HIDDEN, WORKLOAD_TOKENS, Problem, Specialization

#: What kind of kernel a row is for: over whole tensors; of its own for bands that few blocks see; for sequences of their own
#: lengths; for a few new queries and a long cache; with 8-bit tensors. Rows of one never serve another.
DENSE_FAMILY = "dense"
FAMILIES = (DENSE_FAMILY, "banded", "ragged", "decode", "fp8")


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
        return Specialization(self.dtype, self.head_dim, self.head_dim_v, self.mask, self.precision)

    def workload(self) -> Problem:
        """The problem this key is tuned on: the FlashAttention-2 paper's, at the bucket's length."""
        heads = max(1, WORKLOAD_HIDDEN // self.head_dim)
        return Problem(
            dtype=self.dtype, batch=max(1, WORKLOAD_TOKENS // self.bucket), heads_q=heads, heads_kv=heads,
            seqlen_q=self.bucket, seqlen_k=self.bucket, head_dim=self.head_dim, head_dim_v=self.head_dim_v,
            mask=row_mask_named(self.mask), precision=self.precision,
        )  # fmt: skip

    def with_(self, **changes: Any) -> TuningKey:
        return replace(self, **changes)
