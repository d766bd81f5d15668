"""Search space of kernels/portable/bwd_dq.py."""

from fa2tune.search_spaces.lib.common import (
    Default,
    accumulators_fit,
    loop_tiles_fit,
    register_cap_holds,
    rows_per_warp,
    tile_space,
)

DEFAULT = Default(
    described={64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 3)},
    by_pointer={64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 3)},
    older={64: (128, 64, 8, 2), 128: (64, 32, 4, 2), 256: (64, 16, 4, 2)},
    fp32={64: (64, 32, 8, 1), 128: (64, 16, 8, 1), 256: (32, 16, 8, 1)},
    # a loop of its own for the mask: 5 to 11 % over the branch, by the first tuning of an H200
    masked=lambda widest: "first" if widest > 64 else "last",
)

SPACE = tile_space(
    "bwd_dq",
    block_m=(32, 64, 128, 256),  # 32: float32 only
    block_n=(16, 32, 64, 128),
    stages=(1, 2, 3),
    own=(
        register_cap_holds(lambda d, dv: d),
        rows_per_warp("BLOCK_M"),
        accumulators_fit("dq_s_dp", "dQ, scores, dP", lambda c, d, dv: c["BLOCK_M"] * (d + 2 * c["BLOCK_N"]), 256),
        loop_tiles_fit("BLOCK_M", "BLOCK_N"),
    ),
    default=DEFAULT,
)
