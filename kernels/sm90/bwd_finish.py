"""After the fused Hopper backward, or overlapped with its last tiles: dq = softmax_scale * the float32 sums, in dq's dtype and
memory order.

Overlapped, programs start where rows were prepared (sm90/bwd_prepare_overlapped.py), once all programs of the main kernel have
started (griddepcontrol), so no program is waited for that could not run; each waits until all tiles have added to dQ of its
head. EARLY_START: they may start then, too, and wait for the main kernel's end.

Bound by memory, so it has no search space: one fixed config."""

import triton
import triton.language as tl

from fa2tune.kernels.lib.common import head_base, store_tile
from fa2tune.kernels.lib.division import divided
from fa2tune.kernels.lib.extent import place
from fa2tune.search_spaces.sm90 import bwd_fused as bwd_fused_hopper
from fa2tune.search_spaces.sm90.bwd_finish import SPACE
from fa2tune.spec.variant import Variant

#: Keys of a tile of the main kernel, and query rows of a flag, or of a block of packed sequences' workspaces.
BLOCK_N = tl.constexpr(bwd_fused_hopper.GROUPS * bwd_fused_hopper.KEYS)
CHUNK = tl.constexpr(bwd_fused_hopper.CHUNK)

_REST = tl.constexpr("nanosleep.u32 200; mov.b32 $0, 0;")
_MAIN_IS_OVER = tl.constexpr("griddepcontrol.wait; mov.b32 $0, 0;")


@triton.jit
def _do_once(PTX: tl.constexpr):
    """PTX that takes nothing and sets $0."""
    tl.inline_asm_elementwise(PTX, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def bwd_finish_hopper_kernel(
    words, dq, softmax_scale, stride_dqb, stride_dqh, stride_dqm, heads_q, seqlen_q, rows_padded, flags, batch, seqlen_k,
    cu_seqlens_q, cu_seqlens_k, by_finished, by_query_heads,
    HEAD_DIM: tl.constexpr, RAGGED: tl.constexpr, SUM_COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr,
    PERMUTED_COLUMNS: tl.constexpr, FINISH_BESIDE: tl.constexpr, USED_COLUMNS: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """words [B, Hq, rows_padded, SUM_COLUMNS] float32 -> dq [B, Hq, Sq, D]. The words of each 64 rows lie as pieces
    [64, PERMUTED_COLUMNS] in the register order of a wgmma accumulator (sm90/bwd_fused.py). BLOCK_R is a multiple of 64 that
    divides rows_padded. Columns from USED_COLUMNS on, the last words of each 64 rows, are not read. flags int32, only if
    FINISH_BESIDE: behind those of rows (sm90/bwd_prepare_overlapped.py), [B, Hq] counts of the tiles that have added to dQ of a
    head.
    EARLY_START, of a dense call: by_finished and by_query_heads are the divisors of a head's programs and of heads_q.
    RAGGED: as sm90/bwd_fused.py has it, counts as kernels/lib/hopper_dq_accumulation.py; rows behind the last
    sequence: dq = 0."""
    tiles = rows_padded // BLOCK_R if RAGGED else tl.cdiv(seqlen_q, BLOCK_R)
    if EARLY_START and not RAGGED:
        head = divided(tl.program_id(0), by_finished)
        start_m = (tl.program_id(0) - head * tiles) * BLOCK_R
    else:
        head = tl.program_id(0) // tiles
        start_m = tl.program_id(0) % tiles * BLOCK_R
    if FINISH_BESIDE and RAGGED:
        if tl.program_id(0) == tl.num_programs(0) - 1:  # a kernel that follows this one follows main too
            _do_once(_MAIN_IS_OVER)
    elif FINISH_BESIDE:
        count = flags + batch * heads_q * (rows_padded // CHUNK) + head
        while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < tl.cdiv(seqlen_k, BLOCK_N):
            _do_once(_REST)
    elif EARLY_START:
        _do_once(_MAIN_IS_OVER)
    if EARLY_START and not RAGGED:
        b = divided(head, by_query_heads)
        dq = head_base(dq, b, head - b * heads_q, stride_dqb, stride_dqh, "pointer")
    else:
        dq = head_base(dq, head // heads_q, head % heads_q, stride_dqb, stride_dqh, "pointer")
    words += (head.to(tl.int64) * rows_padded + start_m) * SUM_COLUMNS
    if RAGGED:
        chunk = start_m // CHUNK
        block, first_q, seqlen_q, _, keys = place(cu_seqlens_q, cu_seqlens_k, batch, seqlen_q, seqlen_k, chunk, CHUNK)
        start_m = block * CHUNK + start_m % CHUNK
        if start_m >= seqlen_q:  # no row of any sequence
            return
        dq += first_q.to(tl.int64) * stride_dqm
        if FINISH_BESIDE:
            counts = flags + heads_q * (rows_padded // CHUNK)
            count = counts + head * (rows_padded // CHUNK) + chunk - block
            over = counts + heads_q * (rows_padded // CHUNK) + 1  # wrong offsets: a count may never be reached
            while (tl.atomic_add(count, 0, sem="acquire", scope="gpu") < tl.cdiv(keys, BLOCK_N)) & (
                tl.atomic_add(over, 0, sem="acquire", scope="gpu") == 0
            ):
                _do_once(_REST)
    at = tl.arange(0, BLOCK_R * SUM_COLUMNS)
    if USED_COLUMNS == SUM_COLUMNS:
        sums = tl.load(words + at) * softmax_scale
    else:
        sums = tl.load(words + at, mask=at % (64 * SUM_COLUMNS) < 64 * USED_COLUMNS, other=0.0) * softmax_scale
    if FINISH_BESIDE and RAGGED:  # where there are no keys, no tile has waited for the zeros
        sums = tl.where(keys > 0, sums, 0.0)
    PIECES: tl.constexpr = SUM_COLUMNS // PERMUTED_COLUMNS
    # (64 rows, piece), column / 8, row / 16, row % 8, column % 8 / 2, row / 8 % 2, column % 2
    tile = tl.reshape(sums, [BLOCK_R // 64 * PIECES, PERMUTED_COLUMNS // 8, 4, 8, 4, 2, 2])
    tile = tl.permute(tile, (0, 2, 5, 3, 1, 4, 6))
    tile = tl.reshape(tile, [BLOCK_R // 64, PIECES, 64, PERMUTED_COLUMNS])
    tile = tl.reshape(tl.permute(tile, (0, 2, 1, 3)), [BLOCK_R, SUM_COLUMNS])
    store_tile(dq, tile, start_m, stride_dqm, seqlen_q, BLOCK_R, HEAD_DIM, SUM_COLUMNS)
    if FINISH_BESIDE and not RAGGED:
        if tl.program_id(0) == tl.num_programs(0) - 1:  # a kernel that follows this one follows main too
            _do_once(_MAIN_IS_OVER)


def _grid(problem, config, _sm_count, _early):
    rows = bwd_fused_hopper.padded_rows(problem) if problem.extent.ragged else problem.seqlen_q
    return triton.cdiv(rows, config["BLOCK_R"]) * problem.batch * problem.heads_q


#: Programs for each multiprocessor that the main kernel leaves free, up to which an early start is faster: set by 42 calls
#: (docs/experiments/fused-backward-ends.md).
_AT_ONCE = 8


def _starts_early(problem, config, sm_count):
    """FINISH_BESIDE; or EARLY_START where the main kernel leaves room: programs that start early fill the multiprocessors that
    are free first. Next to as many tiles as there are, all of them would be in the few that are done first. Of packed
    sequences, whose tiles are not known here, they always start early."""
    if config.get("FINISH_BESIDE") or not config.get("EARLY_START") or problem.extent.ragged:
        return bool(config.get("FINISH_BESIDE") or config.get("EARLY_START"))
    tiles = problem.batch * problem.heads_kv * triton.cdiv(problem.seqlen_k, BLOCK_N.value)
    return _grid(problem, config, sm_count, True) <= _AT_ONCE * max(0, sm_count - tiles)


VARIANT = Variant(
    kernel=bwd_finish_hopper_kernel,
    space=SPACE,
    tensors={"words": "fp32", "dq": "", "flags": "i32", "cu_seqlens_q": "i32", "cu_seqlens_k": "i32"},
    descriptors={},
    grid=_grid,
    constants=lambda spec, config: {
        "USED_COLUMNS": config.get("USED_COLUMNS", config["SUM_COLUMNS"]),
        "EARLY_START": config.get("EARLY_START", False),
    },
    early=_starts_early,
)
