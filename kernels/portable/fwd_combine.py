"""After kernels/portable/fwd_split.py: the output and lse out of what was summed over each part of the keys.

Bound by memory, so it has no search space."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import LOWEST
from fa2tune.kernels.lib.packed_heads import QueryHeads, store_output
from fa2tune.search_spaces.portable.fwd_combine import SPACE
from fa2tune.spec.variant import Variant

_PARTS_ARE_WRITTEN = tl.constexpr("griddepcontrol.wait; mov.b32 $0, 0;")


@triton.jit
def fwd_combine_kernel(
    o_parts, stats, o, lse, stride_ob, stride_oh, stride_om, batch, heads_q, heads_kv, group, seqlen_q, SPLITS,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, TWO_WORDS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """o_parts and stats as the kernel before writes them -> o [B, Hq, Sq, DV], lse as kernels/portable/fwd.py has it. A program
    has BLOCK_R rows, and BLOCK_S of their parts at once. EARLY: it may have started before the parts are written."""
    if EARLY:
        tl.inline_asm_elementwise(_PARTS_ARE_WRITTEN, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
    rows_of_head = seqlen_q * group
    all_rows = (batch * heads_q).to(tl.int64) * seqlen_q
    own = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [R]
    inside = own < all_rows
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    peak = tl.full([BLOCK_R], LOWEST, tl.float32)
    for first in tl.range(0, SPLITS, BLOCK_S):
        there = inside[:, None] & (first + s < SPLITS)[None, :]
        places = (first + s).to(tl.int64)[None, :] * all_rows + own[:, None]  # [R, S]
        mask = there[:, :, None]
        if HEAD_DIM_V != BLOCK_DV:
            mask = mask & (d < HEAD_DIM_V)[None, None, :]
        part = tl.load(o_parts + (places[:, :, None] * HEAD_DIM_V + d[None, None, :]), mask=mask, other=0.0)
        peaks = tl.load(stats + places, mask=there, other=LOWEST)
        totals = tl.load(stats + SPLITS * all_rows + places, mask=there, other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, 1))
        weight = tl.math.exp2(peaks - new_peak[:, None])  # [R, S]
        shrink = tl.math.exp2(peak - new_peak)
        total = total * shrink + tl.sum(totals * weight, 1)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 1)
        peak = new_peak
    hidden = total < 0  # the row sees no key
    out = tl.where(hidden[:, None], 0.0, acc / total[:, None])
    head = own // rows_of_head
    b = head // heads_kv
    h_kv = head - b * heads_kv
    store_output(
        o, lse, out, peak, total, ~hidden, b, h_kv, own - head * rows_of_head, inside,
        QueryHeads(batch, heads_q, group, seqlen_q), (stride_ob, stride_oh, stride_om), HEAD_DIM_V, BLOCK_DV, TWO_WORDS,
    )  # fmt: skip


VARIANT = Variant(
    role="fwd_combine",
    kernel=fwd_combine_kernel,
    space=SPACE,
    tensors={"o_parts": "fp32", "stats": "fp32", "o": "", "lse": "fp32"},
    descriptors={},
    grid=lambda problem, config, _sm_count, _early: triton.cdiv(
        problem.batch * problem.heads_q * problem.seqlen_q, config["BLOCK_R"]
    ),
    constants=lambda spec, _config: {"TWO_WORDS": spec.dtype == "fp32"},
    early=lambda _problem, config, _sm_count: bool(config["EARLY"]),
)
