"""What the search spaces of kernels/sm80/ share."""

from fa2tune.search_spaces.lib.common import sixteen_bit
from fa2tune.spec.problem import Config, Problem, Specialization, padded_head_dim
from fa2tune.spec.variant import Constraint

NAME = "sm80"  #: the implementation that these kernels' configs name
#: Bytes of shared memory a block may have, by compute capability; others have 99 KiB or are not served
SHARED_BYTES = {80: 163 * 1024, 87: 163 * 1024, 90: 227 * 1024}
LEAST_SHARED_BYTES = 99 * 1024
#: Compute capabilities whose limits the defaults were raced under, as sm_80 code on an H200: an A100's (80, 87: 163 KiB of
#: shared memory a block) and an L4's (the others).
RACED_LIMITS = (80, 86, 87, 88, 89, 120, 121)
#: Keys of all heads of a band of the forward, at least: its short tiles can fill what its long ones leave. K and V of so many
#: fit the L2 of an A100.
BAND_KEYS = 1 << 15


def shared_limit(arch: int) -> int:
    return SHARED_BYTES.get(arch, LEAST_SHARED_BYTES)


def block_dims(spec: Specialization) -> tuple[int, int]:
    """Columns of the tiles of Q and K, and of those of V, O and dO."""
    return padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v)


def even_bands(problem: Problem, config: Config, heads: int, keys: int = 0) -> Config:
    """A row's config for a call of so many heads whose mask is bounded on the right alone: bands of as many heads as the
    row's or more, and of ``keys`` keys or more, all nearly alike. Longest tiles come first in a band: those of a narrow last
    one would begin when others end."""
    hooks = problem.mask.hooks
    if not hooks.right or hooks.left or problem.extent.ragged:
        return config
    least = max(config["HEADS_PER_WAVE"], keys // max(1, problem.seqlen_k))
    bands = max(1, heads // least)
    return {**config, "HEADS_PER_WAVE": max(config["HEADS_PER_WAVE"], -(-heads // bands))}


SIXTEEN_BIT = sixteen_bit("these kernels multiply bf16 and fp16 only")
COPIES_ARE_ALIGNED = Constraint(
    "copies_are_aligned",
    "tensors that are not 16-byte aligned",
    "an asynchronous copy past L1 moves 16 bytes, from a multiple of 16; other tensors are left to the portable kernel",
    lambda config, spec, arch: spec.aligned,
)
WITHOUT_WGMMA = Constraint(
    "without_wgmma",
    "mma.sync where the GPU has faster instructions",
    "compute capability 9.0 to 11.0 multiplies at its full rate by other instructions (wgmma, tcgen05), which the "
    "warp-specialised and portable kernels use; by mma.sync it reaches some 60 % or less",
    lambda config, spec, arch: not 90 <= arch < 120,
)


def register_cap_leaves(needed: int, config: Config) -> bool:
    """Whether a cap leaves as many registers a thread as the values need that live through the loop, and some to work with."""
    return config["maxnreg"] == 0 or needed + 40 <= config["maxnreg"]
