"""What bwd_finish_hopper.py does after the fused Hopper backward, done beside it: programs start where rows were prepared
(bwd_beside_hopper.py), and each waits until all tiles have added to dQ of its head.

Main starts it early (griddepcontrol), once all programs of its own have started: nobody is waited for that could not run."""

import triton
import triton.language as tl

from fa2tune.kernels.bwd_finish_hopper import dq_of
from fa2tune.kernels.common import head_base, store_tile
from fa2tune.search_spaces import bwd_fused_hopper
from fa2tune.search_spaces.bwd_finish_hopper import SPACE
from fa2tune.variant import Variant

#: Keys of a tile of the main kernel.
BLOCK_N = tl.constexpr(bwd_fused_hopper.GROUPS * bwd_fused_hopper.KEYS)
CHUNK = tl.constexpr(bwd_fused_hopper.CHUNK)
_REST = tl.constexpr("nanosleep.u32 200; mov.b32 $0, 0;")
_MAIN_IS_OVER = tl.constexpr("griddepcontrol.wait; mov.b32 $0, 0;")


@triton.jit
def _do_once(PTX: tl.constexpr):
    """PTX that takes nothing and sets $0."""
    tl.inline_asm_elementwise(PTX, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def bwd_finish_beside_hopper_kernel(
    words, dq, flags, softmax_scale, stride_dqb, stride_dqh, stride_dqm, batch, heads_q, seqlen_q, seqlen_k, rows_padded,
    HEAD_DIM: tl.constexpr, SUM_COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, PERMUTED_COLUMNS: tl.constexpr,
):  # fmt: skip
    """words [B, Hq, rows_padded, SUM_COLUMNS] float32 -> dq [B, Hq, Sq, D], as bwd_finish_hopper.py. flags: int32, behind those
    of rows [B, Hq] counts of the tiles that have added to a head's dQ."""
    tiles = tl.cdiv(seqlen_q, BLOCK_R)
    head = tl.program_id(0) // tiles
    start_m = tl.program_id(0) % tiles * BLOCK_R
    count = flags + batch * heads_q * (rows_padded // CHUNK) + head
    while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < tl.cdiv(seqlen_k, BLOCK_N):
        _do_once(_REST)
    dq = head_base(dq, head // heads_q, head % heads_q, stride_dqb, stride_dqh, "pointer")
    words += (head.to(tl.int64) * rows_padded + start_m) * SUM_COLUMNS
    tile = dq_of(words, softmax_scale, BLOCK_R, SUM_COLUMNS, PERMUTED_COLUMNS)
    store_tile(dq, tile, start_m, stride_dqm, seqlen_q, BLOCK_R, HEAD_DIM, SUM_COLUMNS)
    if tl.program_id(0) == tl.num_programs(0) - 1:  # who comes after this kernel comes after main too
        _do_once(_MAIN_IS_OVER)


VARIANT = Variant(
    name="bwd_finish_beside_hopper",
    kernel=bwd_finish_beside_hopper_kernel,
    space=SPACE,
    tensors={"words": "fp32", "dq": "", "flags": "i32"},
    descriptors={},
    grid=lambda problem, config: triton.cdiv(problem.seqlen_q, config["BLOCK_R"]) * problem.batch * problem.heads_q,
    early=lambda config: True,
    min_arch=90, max_arch=90,
)  # fmt: skip
