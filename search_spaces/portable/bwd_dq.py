"""Search space of kernels/portable/bwd_dq.py."""

from fa2tune.search_spaces.lib.common import (
    accumulators_fit,
    default_config,
    register_cap_holds,
    rows_per_warp,
    tile_space,
    tiles_fit,
)
from fa2tune.spec.problem import Config, Specialization

# OLDER serves GPUs without TMA and those with 99 KiB of shared memory a block.
DESCRIBED = {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 3)}
BY_POINTER = {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 3)}
OLDER = {64: (128, 64, 8, 2), 128: (64, 32, 4, 2), 256: (64, 16, 4, 2)}
FP32 = {64: (64, 32, 8, 1), 128: (64, 16, 8, 1), 256: (32, 16, 8, 1)}


def default(spec: Specialization, arch: int) -> Config:
    """The config that serves when no row does."""
    # a loop of its own for the mask: 5 to 11 % over the branch, by the first tuning of an H200
    masked = "first" if max(spec.head_dim, spec.head_dim_v) > 64 else "last"
    return default_config(spec, arch, DESCRIBED, BY_POINTER, OLDER, FP32, MASKED=masked)


SPACE = tile_space(
    "bwd_dq",
    block_m=(32, 64, 128, 256),  # 32: float32 only
    block_n=(16, 32, 64, 128),
    stages=(1, 2, 3),
    own=(
        register_cap_holds(lambda d, dv: d),
        rows_per_warp("BLOCK_M"),
        accumulators_fit("dq_s_dp", lambda c, d, dv: c["BLOCK_M"] * (d + 2 * c["BLOCK_N"]), 256),
        tiles_fit(
            lambda c, d, dv, size: (
                size * (c["BLOCK_M"] * (d + dv) + c["BLOCK_N"] * (d + dv) * max(1, c["num_stages"] - 1))
            )
        ),
    ),
    default=default,
)
