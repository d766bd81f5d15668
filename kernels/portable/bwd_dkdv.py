"""The half of the split backward that makes dK and dV: lib/bwd_keys.py without dQ."""

from fa2tune.kernels.lib.bwd_keys import described
from fa2tune.search_spaces.portable.bwd_dkdv import SPACE

VARIANT = described(space=SPACE, with_dq=False, serves="bwd_dkdv")
