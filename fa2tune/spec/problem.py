"""What a call asks for (Problem), and what a binary depends on (Specialization).

Pure data: importable without torch or triton.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from fa2tune.spec import tuned, visits
from fa2tune.spec.extent import DENSE, RAGGED, WHOLE, Extent
from fa2tune.spec.mask import Mask
from fa2tune.spec.maskfile import MaskHooks, mask_named
from fa2tune.spec.score import NONE, Score

#: A point of a search space: constexpr meta-parameters in capitals (``BLOCK_M``), compile options in small letters
#: (``num_warps``, ``num_stages``, ``maxnreg``; ``maxnreg`` 0 means uncapped).
Config = Mapping[str, Any]

DTYPES = ("bf16", "fp16", "fp32")
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 8

#: How rows of the query heads of a key head lie, where at one stride: one head after the other, or one query after the other.
HEADS_FIRST, QUERIES_FIRST = "heads first", "queries first"

#: Sequence-length buckets a winner is filed under: the lengths of the FlashAttention-2 paper, section 4.1.
BUCKETS = (512, 1024, 2048, 4096, 8192, 16384)

#: The FlashAttention-2 paper's workload at every length: 16k tokens in all, hidden size 2048.
WORKLOAD_TOKENS, WORKLOAD_HIDDEN = 16384, 2048

#: Kernel that is studied by itself -> its matrix products for a visible pair: over the head dim of Q and K, over that of V.
PRODUCTS = {name: one.products for name, one in tuned.tuned().items()}
KERNELS = tuple(PRODUCTS)
BACKWARD = "bwd"  #: the whole backward, whose rows say which strategy (split, fused) is faster
SPLIT, FUSED = "split", "fused"
#: The tuned kernels of each strategy of the backward, in order. bwd_dq also makes delta.
STRATEGIES = tuned.strategies()


def padded_head_dim(head_dim: int) -> int:
    """The power of two a head dim is masked up to inside the kernel."""
    return max(MIN_HEAD_DIM, 1 << (head_dim - 1).bit_length())


@cache
def head_dim_parts(head_dim: int) -> tuple[int, int]:
    """A head dim as a sum of two powers of two, the larger first, where that is less than ``padded_head_dim``: 80 = 64 + 16.
    Where it is not, the second is 0: 112 needs 64 + 64 as well."""
    padded = padded_head_dim(head_dim)
    first = padded // 2
    rest = padded_head_dim(head_dim - first) if head_dim > first else 0
    return (padded, 0) if rest in (0, first) or first < MIN_HEAD_DIM else (first, rest)


def bucket_of(seqlen_q: int, seqlen_k: int) -> int:
    """The bucket a call falls into: the longer length, rounded up to a bucket; lengths beyond the ends take the end."""
    length = max(seqlen_q, seqlen_k)
    for bucket in BUCKETS:  # torch.compile traces this, and no bisect
        if length <= bucket:
            return bucket
    return BUCKETS[-1]


@dataclass(frozen=True, slots=True)
class Specialization:
    """Everything beside the config that changes the machine code of a kernel."""

    dtype: str  #: "bf16", "fp16" or "fp32"
    head_dim: int  #: of Q and K, unpadded
    head_dim_v: int  #: of V and O, unpadded
    mask: str  #: name of its file in kernels/masks/, see ``Mask.name``
    precision: str = "ieee"  #: float32 products: "ieee" or "tf32"; "ieee" for 16-bit dtypes, which ignore it
    aligned: bool = True  #: every base pointer and every row stride is a multiple of 16 bytes
    wide: bool = False  #: a stride times a block may pass 2^31: 64-bit strides
    negate: bool = False  #: softmax_scale is negative (the forward flips the sign of Q K^T)
    score: str = "none"  #: name of its file in kernels/scores/
    extent: str = DENSE  #: ``Extent.name``

    @property
    def ragged(self) -> bool:
        return self.extent == RAGGED

    @property
    def mask_hooks(self) -> MaskHooks:
        """What the mask's file says."""
        return mask_named(self.mask)

    @property
    def scored(self) -> bool:
        """Whether scores have a term."""
        return self.score != NONE.name


#: Asked for dozens of times where a plan is made.
_specialization = lru_cache(maxsize=1024)(Specialization)


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention call, as far as choosing and launching a kernel goes."""

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    mask: Mask
    precision: str = "ieee"
    aligned: bool = True
    wide: bool = False
    negate: bool = False
    score: Score = NONE
    tma: bool = True  #: descriptors can address every tensor read: aligned, and no row stride of 0
    extent: Extent = WHOLE  #: of a ragged call batch is 1, and the lengths are those of all its sequences together
    #: Of a dense call of grouped heads, how rows of the query heads of a key head lie in q, and in a backward in o and do:
    #: HEADS_FIRST, QUERIES_FIRST, or "", not at one stride.
    stacked: str = ""

    @property
    def group(self) -> int:
        """Query heads per key/value head (1: multi-head, heads_q: multi-query)."""
        return self.heads_q // self.heads_kv

    @property
    def is_empty(self) -> bool:
        """Whether there is no pair of a query and a key."""
        return 0 in (self.batch, self.heads_q, self.seqlen_q, self.seqlen_k)

    @property
    def bucket(self) -> int:
        return bucket_of(self.extent.length(self.seqlen_q), self.extent.length(self.seqlen_k))

    def query_tiles(self, block: int) -> int:
        """Tiles of ``block`` queries that are launched for a head, over the whole batch."""
        return self.extent.tiles(self.batch, self.seqlen_q, block)

    def key_blocks(self, rows: int, keys: int) -> list[int]:
        """How many blocks of so many keys each tile of so many queries of a head visits, in kernels in Gluon."""
        first, end = visits.key_blocks(self.mask, self.seqlen_q, self.seqlen_k, rows, keys)
        counts: list[int] = (end - first).tolist()
        return counts

    def key_tiles(self, block: int) -> int:
        return self.extent.tiles(self.batch, self.seqlen_k, block)

    @property
    def specialization(self) -> Specialization:
        return _specialization(
            self.dtype, self.head_dim, self.head_dim_v, self.mask.name, self.precision, self.aligned, self.wide, self.negate,
            self.score.name, self.extent.name,
        )  # fmt: skip

    @property
    def unmeasured(self) -> str:
        """What rows are measured without, for people: "a window and a soft cap"; "" if nothing."""
        found = [] if self.mask.measured else [self.mask.kind]
        found += [] if self.score == NONE else [self.score.kind]
        return " and ".join([*found, "packed sequences"] if self.extent.ragged else found)

    @property
    def keys_seen(self) -> float:
        """Keys that a query row sees, on average over the rows; of a ragged call, in a sequence of ``Extent.length`` rows."""
        seqlen_q, seqlen_k = self.extent.length(self.seqlen_q), self.extent.length(self.seqlen_k)
        return self.mask.pairs(seqlen_q, seqlen_k) / max(1, seqlen_q)

    def flops(self, pass_: str) -> float:
        """Floating-point operations as the FlashAttention-2 paper counts them (section 4.1): 4 b h s^2 d, halved for
        causal, times 2.5 for the backward. Of another mask the pairs that are attended count. Kernels of the backward are
        counted by the products they run (dkdv 4, dq 3, fused and whole backward 5; a forward is 2)."""
        pairs = self.batch * self.heads_q * self.seqlen_q * self.seqlen_k * (0.5 if self.mask.name == "causal" else 1.0)
        if not self.mask.measured:  # counted one by one
            pairs = float(self.batch * self.heads_q * self.mask.pairs(self.seqlen_q, self.seqlen_k))
        over_d, over_dv = PRODUCTS["bwd_fused" if pass_ == BACKWARD else pass_]
        return 2.0 * pairs * (over_d * self.head_dim + over_dv * self.head_dim_v)

    def flops_of_sequences(self, pass_: str, lengths: Sequence[int]) -> float:
        """Of packed sequences of these lengths in place of its own, each as ``flops`` of it alone."""
        alone = {one: replace(self, seqlen_q=one, seqlen_k=one, extent=WHOLE) for one in {*lengths}}
        return sum(count * Problem.flops(alone[one], pass_) for one, count in Counter(lengths).items())
