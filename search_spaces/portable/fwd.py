"""Search space of kernels/portable/fwd.py."""

from fa2tune.search_spaces.lib.common import (
    Default,
    accumulators_fit,
    is_narrow,
    register_cap_holds,
    rows_per_warp,
    tile_space,
    tiles_fit,
)
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import POINTER

DEFAULT = Default(
    described={64: (64, 128, 4, 2), 128: (64, 128, 4, 1), 256: (64, 128, 4, 1)},
    by_pointer={64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)},
    older={64: (128, 64, 4, 2), 128: (128, 32, 4, 3), 256: (64, 32, 4, 2)},
    fp32={64: (64, 32, 8, 1), 128: (64, 16, 8, 1), 256: (32, 16, 8, 1)},
    masked=lambda widest: "inside",
)


def default(spec: Specialization, arch: int) -> Config:
    """``DEFAULT``, with fewer keys in the tiles whose V ``is_narrow``."""
    config = DEFAULT(spec, arch)
    hopper = 90 <= arch < 120 and spec.dtype != "fp32" and config["LOADS"] == POINTER
    return {**config, "BLOCK_N": 32} if hopper and config["BLOCK_M"] == 64 and is_narrow(spec) else config


SPACE = tile_space(
    "fwd",
    block_m=(32, 64, 128, 256),  # 32: float32 only
    block_n=(16, 32, 64, 128),
    stages=(1, 2, 3, 4),
    own=(
        register_cap_holds(lambda d, dv: dv),
        rows_per_warp("BLOCK_M"),
        accumulators_fit("output", "scores, output", lambda c, d, dv: c["BLOCK_M"] * (dv + c["BLOCK_N"]), 224),
        tiles_fit(lambda c, d, dv, size: size * c["BLOCK_N"] * (d + dv) * max(1, c["num_stages"] - 1)),
    ),
    default=default,
)
