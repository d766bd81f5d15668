"""The fused backward: lib/bwd_keys.py, which adds each tile's share of dQ to float32 sums by atomics."""

from fa2tune.kernels.lib.bwd_keys import described
from fa2tune.search_spaces.portable.bwd_fused import SPACE

VARIANT = described(space=SPACE, with_dq=True, serves="bwd_fused")
