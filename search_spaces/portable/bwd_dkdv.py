"""Search space of the bwd_dkdv variant of kernels/lib/bwd_keys.py."""

from fa2tune.search_spaces.lib.common import (
    accumulators_fit,
    default_config,
    tile_space,
    tiles_fit,
)
from fa2tune.spec.problem import Config, Specialization

# OLDER serves GPUs without TMA and those with 99 KiB of shared memory a block.
DESCRIBED = {64: (128, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 64, 8, 2)}
BY_POINTER = {64: (128, 64, 4, 2), 128: (32, 64, 4, 2), 256: (64, 64, 8, 1)}
OLDER = {64: (64, 128, 8, 1), 128: (32, 64, 4, 1), 256: (16, 64, 8, 1)}
FP32 = {64: (32, 64, 8, 1), 128: (16, 64, 8, 1), 256: (16, 16, 4, 1)}


def default(spec: Specialization, arch: int) -> Config:
    """The config that serves when no row does."""
    # with 256 columns the branch inside the loop costs 80 registers more than a loop of its own
    masked = "first" if max(spec.head_dim, spec.head_dim_v) > 128 else "inside"
    return default_config(spec, arch, DESCRIBED, BY_POINTER, OLDER, FP32, MASKED=masked)


SPACE = tile_space(
    "bwd_dkdv",
    block_m=(16, 32, 64, 128),
    block_n=(16, 32, 64, 128),
    stages=(1, 2, 3),
    own=(
        accumulators_fit("dk_dv_s_dp", lambda c, d, dv: c["BLOCK_N"] * (d + dv + 2 * c["BLOCK_M"]), 288),
        tiles_fit(
            lambda c, d, dv, size: (
                size * (c["BLOCK_N"] * (d + dv) + c["BLOCK_M"] * (d + dv) * max(1, c["num_stages"] - 1))
            )
        ),
    ),
    default=default,
)
