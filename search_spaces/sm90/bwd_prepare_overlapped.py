"""kernels/sm90/bwd_prepare_overlapped.py keeps a few multiprocessors busy with memory: a single point, not searched."""

from fa2tune.spec.variant import SearchSpace

WARPS = 8  #: that work out delta
ZERO_ROWS = 64  #: of the sums that one TMA sets to zero
SLOTS = 16  #: chunks whose terms may be written before their flags
BATCH = 4  #: chunks that are signalled behind one fence
#: Chunks of O and dO each that are on their way, by the sums' columns: what shared memory holds beside the zeros. What the
#: fused kernel does not serve (more columns) needs none.
STAGES = {32: 8, 64: 5, 128: 3, 256: 1}

SPACE = SearchSpace(
    name="bwd_prepare_overlapped_hopper",
    dimensions={"num_warps": (WARPS,), "num_stages": (1,), "maxnreg": (0,)},
    constraints=(),
    default=lambda spec, arch: {"num_warps": WARPS, "num_stages": 1, "maxnreg": 0},
)
