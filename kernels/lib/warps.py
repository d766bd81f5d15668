"""How many threads go together, for device code."""

from triton.experimental.gluon import language as gl

from fa2tune.spec.variant import WARP_THREADS, WARPGROUP_THREADS

WARP = gl.constexpr(WARP_THREADS)
WARPGROUP = gl.constexpr(WARPGROUP_THREADS)
