"""Search space of the bwd_fused variant of kernels/lib/bwd_keys.py."""

from fa2tune.search_spaces.lib.common import Default, keys_space

DEFAULT = Default(
    described={64: (128, 64, 4, 2), 128: (64, 128, 8, 2), 256: (64, 64, 8, 1)},
    by_pointer={64: (32, 128, 4, 1), 128: (32, 128, 8, 3), 256: (64, 64, 8, 1)},
    older={64: (64, 128, 8, 1), 128: (32, 64, 4, 1), 256: (16, 64, 8, 1)},
    fp32={64: (32, 64, 8, 1), 128: (16, 32, 4, 1), 256: (16, 16, 4, 1)},
    # with 256 columns the branch inside the loop spills 196 registers: 1.5 times as slow
    masked=lambda widest: "first" if widest > 128 else "inside",
)

SPACE = keys_space("bwd_fused", DEFAULT)
