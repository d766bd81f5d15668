"""``packed_order`` for tiles of every number of queries that ``TABLES`` of its search space names: calls share it."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.packed_order import WORDS, write_order
from fa2tune.search_spaces.portable import packed_order as space
from fa2tune.spec.variant import Variant

BLOCKS = tl.constexpr(tuple(block for block, _ in space.TABLES))
TURNS = tl.constexpr(tuple(turns for _, turns in space.TABLES))
COUNT = tl.constexpr(len(space.TABLES))


@triton.jit
def packed_orders_kernel(cu_seqlens_q, cu_seqlens_k, order, batch, seqlen_q, seqlen_k):
    """cu_seqlens_q, cu_seqlens_k [batch + 1] int32 -> order [entries of all tables, WORDS] int32, each as ``write_order`` has
    it. One program a sequence and table."""
    own = tl.program_id(0) % (batch + 1)
    table = tl.program_id(0) // (batch + 1)
    for nth in tl.static_range(COUNT):
        if table == nth:
            write_order(cu_seqlens_q, cu_seqlens_k, order, own, batch, seqlen_q, seqlen_k, BLOCKS[nth], TURNS[nth])
        order += (seqlen_q // BLOCKS[nth] + batch + 2) * WORDS


VARIANT = Variant(
    role="packed_orders",
    kernel=packed_orders_kernel,
    space=space.TABLES_SPACE,
    tensors={"cu_seqlens_q": "i32", "cu_seqlens_k": "i32", "order": "i32"},
    descriptors={},
    grid=lambda problem, _config, _sm_count, _early: (problem.extent.sequences + 1) * len(space.TABLES),
)
