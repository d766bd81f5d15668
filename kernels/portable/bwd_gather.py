"""After a backward whose query groups, query blocks or tiles of queries have dK and dV of their own: the sums of these, in a
fixed order.

Bound by memory, so nothing is searched: its tile is fixed."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import head_base, load_tile, store_tile
from fa2tune.search_spaces.portable.bwd_gather import SPACE
from fa2tune.spec.variant import Variant

_PARTS_ARE_WRITTEN = tl.constexpr("griddepcontrol.wait; mov.b32 $0, 0;")
#: Parts whose loads are under way at once, and one more: a call of few tiles waits for memory again and again.
STAGES = tl.constexpr(8)


@triton.jit
def _sum(
    source, target, b, h, head, parts, start_n, stride_b, stride_h, stride_n, seqlen_k,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows of all parts of head (b, h), which is the head-th over the batch, summed in float32."""
    first = source + head.to(tl.int64) * parts * seqlen_k * DIM
    total = tl.zeros([BLOCK_N, BLOCK_DIM], tl.float32)
    # float32 halves them: at 256 columns 8 stages are 112 KiB, and there are GPUs that have 99
    for part in tl.range(0, parts, num_stages=STAGES // 2 if source.dtype.element_ty == tl.float32 else STAGES):
        own = first + tl.cast(part, tl.int64) * seqlen_k * DIM
        total += load_tile(own, b, h, start_n, DIM, seqlen_k, BLOCK_N, DIM, BLOCK_DIM, True, "pointer").to(tl.float32)
    target = head_base(target, b, h, stride_b, stride_h, "pointer")
    store_tile(target, total, start_n, stride_n, seqlen_k, BLOCK_N, DIM, BLOCK_DIM)


@triton.jit
def bwd_gather_kernel(
    dk_parts, dv_parts, dk, dv, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn, heads_kv, parts,
    seqlen_k, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """dk_parts, dv_parts [B, Hkv * parts, Sk, D / DV], contiguous -> dk, dv [B, Hkv, Sk, D / DV]: head h is the sum of the
    heads h * parts to h * parts + parts - 1. Every other program has a tile of dv. EARLY: it may have started before the parts
    are written."""
    if EARLY:
        tl.inline_asm_elementwise(_PARTS_ARE_WRITTEN, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
    tiles = tl.cdiv(seqlen_k, BLOCK_N)
    tile = tl.program_id(0) // 2
    head = tile // tiles
    start_n = tile % tiles * BLOCK_N
    b = head // heads_kv
    h = head - b * heads_kv
    is_dv = tl.program_id(0) % 2 == 1
    if HEAD_DIM == HEAD_DIM_V:  # one loop, and shared memory for one
        source, target, stride_b, stride_h, stride_n = dk_parts, dk, stride_dkb, stride_dkh, stride_dkn
        if is_dv:
            source, target, stride_b, stride_h, stride_n = dv_parts, dv, stride_dvb, stride_dvh, stride_dvn
        _sum(
            source, target, b, h, head, parts, start_n, stride_b, stride_h, stride_n, seqlen_k, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    else:  # two ifs: of one with an else Triton 3.6 may add up the shared memory of both
        if is_dv:
            _sum(
                dv_parts, dv, b, h, head, parts, start_n, stride_dvb, stride_dvh, stride_dvn, seqlen_k, HEAD_DIM_V, BLOCK_DV,
                BLOCK_N,
            )  # fmt: skip
        if not is_dv:
            _sum(
                dk_parts, dk, b, h, head, parts, start_n, stride_dkb, stride_dkh, stride_dkn, seqlen_k, HEAD_DIM, BLOCK_D,
                BLOCK_N,
            )  # fmt: skip


VARIANT = Variant(
    role="bwd_gather",
    kernel=bwd_gather_kernel,
    space=SPACE,
    tensors={"dk_parts": "", "dv_parts": "", "dk": "", "dv": ""},
    descriptors={},
    grid=lambda problem, config, _sm_count, _early: (
        2 * triton.cdiv(problem.seqlen_k, config["BLOCK_N"]) * problem.batch * problem.heads_kv
    ),
    early=lambda _problem, config, _sm_count: bool(config["EARLY"]),
)
