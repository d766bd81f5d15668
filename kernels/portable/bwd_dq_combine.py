"""After kernels/sm90/bwd_dq_split.py or bwd_query_tiles.py: dQ as the sum over the parts of the keys, in a fixed order, scaled
and rounded once.

Bound by memory, so nothing is searched: its tile is fixed."""

import triton
import triton.language as tl

from fa2tune.search_spaces.portable.bwd_dq_combine import SPACE
from fa2tune.spec.variant import Variant

_START_NEXT = tl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")
_PARTS_ARE_WRITTEN = tl.constexpr("griddepcontrol.wait; mov.b32 $0, 0;")


@triton.jit
def bwd_dq_combine_kernel(
    dq_parts, dq, softmax_scale, stride_dqb, stride_dqh, stride_dqm, batch, heads_q, seqlen_q, SPLITS,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """dq_parts [SPLITS, B, Hq, Sq, D] float32 -> dq [B, Hq, Sq, D]. A program has BLOCK_R rows, and BLOCK_S of their parts at
    once. EARLY: it may have started before the parts are written, and the next kernel may start before it has ended."""
    if EARLY:
        tl.inline_asm_elementwise(_START_NEXT, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(_PARTS_ARE_WRITTEN, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
    all_rows = (batch * heads_q).to(tl.int64) * seqlen_q
    own = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [R]
    inside = own < all_rows
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for first in tl.range(0, SPLITS, BLOCK_S):
        places = (first + s).to(tl.int64)[None, :] * all_rows + own[:, None]  # [R, S]
        mask = (inside[:, None] & (first + s < SPLITS)[None, :])[:, :, None]
        if HEAD_DIM != BLOCK_D:
            mask = mask & (d < HEAD_DIM)[None, None, :]
        part = tl.load(dq_parts + (places[:, :, None] * HEAD_DIM + d[None, None, :]), mask=mask, other=0.0)
        total += tl.sum(part, 1)
    head = own // seqlen_q
    b = head // heads_q
    start = b * stride_dqb + (head - b * heads_q) * stride_dqh + (own - head * seqlen_q) * stride_dqm
    kept = inside[:, None]
    if HEAD_DIM != BLOCK_D:
        kept = kept & (d < HEAD_DIM)[None, :]
    tl.store(dq + (start[:, None] + d[None, :]), (total * softmax_scale).to(dq.dtype.element_ty), mask=kept)


VARIANT = Variant(
    role="bwd_dq_combine",
    kernel=bwd_dq_combine_kernel,
    space=SPACE,
    tensors={"dq_parts": "fp32", "dq": ""},
    descriptors={},
    grid=lambda problem, config, _sm_count, _early: triton.cdiv(
        problem.batch * problem.heads_q * problem.seqlen_q, config["BLOCK_R"]
    ),
    early=lambda _problem, config, _sm_count: bool(config["EARLY"]),
)
