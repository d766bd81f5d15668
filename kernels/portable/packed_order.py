"""Before a kernel over packed sequences: where each of its tiles lies, the longest sequences first. The host knows no length.

A few numbers a sequence, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.packed_order import write_order
from fa2tune.search_spaces.portable import packed_order as space
from fa2tune.spec.variant import Variant

_START_NEXT = tl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")


@triton.jit
def packed_order_kernel(
    cu_seqlens_q, cu_seqlens_k, order, batch, seqlen_q, seqlen_k, BLOCK_Q: tl.constexpr, IN_TURNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """As ``write_order``: one program a sequence. EARLY: the next kernel may start when all programs of this one have."""
    if EARLY:
        tl.inline_asm_elementwise(_START_NEXT, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
    own = tl.program_id(0)
    write_order(cu_seqlens_q, cu_seqlens_k, order, own, batch, seqlen_q, seqlen_k, BLOCK_Q, IN_TURNS)


VARIANT = Variant(
    role="packed_order",
    kernel=packed_order_kernel,
    space=space.SPACE,
    tensors={"cu_seqlens_q": "i32", "cu_seqlens_k": "i32", "order": "i32"},
    descriptors={},
    grid=lambda problem, _config, _sm_count, _early: problem.extent.sequences + 1,
)
