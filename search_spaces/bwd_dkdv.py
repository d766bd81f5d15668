"""Search space of the bwd_dkdv variant of kernels/bwd_keys.py."""

from fa2tune.problem import Config, Specialization, padded_head_dim
from fa2tune.search_spaces.common import DESCRIPTOR_NEEDS_TMA, REGISTER_CAP_BINDS, accumulators_fit, tiles_fit
from fa2tune.variant import DESCRIPTOR, POINTER, SearchSpace


def default(spec: Specialization, arch: int) -> Config:
    """The config that serves when no row does."""
    dim = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v))
    block_m, block_n, warps, stages = (64, 128, 8, 2) if dim <= 128 else (32, 64, 8, 1)
    if spec.dtype == "fp32":
        block_m, block_n, warps, stages = (32, 64, 8, 1) if dim <= 128 else (16, 32, 8, 1)
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "LOADS": POINTER, "MASKED_FIRST": True, "HEADS_PER_WAVE": 4,
        "num_warps": warps, "num_stages": stages, "maxnreg": 0,
    }  # fmt: skip


SPACE = SearchSpace(
    name="bwd_dkdv",
    dimensions={
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_N": (32, 64, 128),
        "LOADS": (POINTER, DESCRIPTOR),
        "MASKED_FIRST": (False, True),
        "HEADS_PER_WAVE": (1, 4, 16),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3),
        "maxnreg": (0, 128, 168),
    },
    constraints=(
        DESCRIPTOR_NEEDS_TMA,
        REGISTER_CAP_BINDS,
        accumulators_fit("dk_dv_s_dp", lambda c, d, dv: c["BLOCK_N"] * (d + dv + 2 * c["BLOCK_M"]), 288),
        tiles_fit(
            lambda c, d, dv, size: (
                size * (c["BLOCK_N"] * (d + dv) + c["BLOCK_M"] * (d + dv) * max(1, c["num_stages"] - 1))
            )
        ),
    ),
    default=default,
)
