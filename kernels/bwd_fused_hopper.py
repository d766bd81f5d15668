"""FlashAttention backward for Hopper, all five products in one kernel: a warp feeds Q and dO by TMA, two groups of four warps
own 64 keys each. dK and dV stay in registers; dQ is summed over the key blocks by reductions into a float32 workspace."""
# ruff: noqa: RUF059  # tuples of tiles and barriers are unpacked whole, by name

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor

from fa2tune.kernels.hopper import (
    fence_async_shared,
    mbarrier,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fa2tune.problem import Config, Problem
from fa2tune.search_spaces import bwd_fused_hopper as space
from fa2tune.variant import Variant, Workspaces

GROUPS = gl.constexpr(space.GROUPS)
#: Keys of a consumer group: the rows of one wgmma.
KEYS = gl.constexpr(space.KEYS)


@gluon.jit
def _query_blocks(start_n, seqlen_q, seqlen_k, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """(first, full, end), counted in blocks: queries of [first, full) see some keys of the tile, of [full, end) all."""
    end = gl.cdiv(seqlen_q, BLOCK_M)
    first = 0
    full = 0
    if IS_CAUSAL:
        offset = seqlen_k - seqlen_q
        first = gl.minimum(gl.maximum(start_n - offset, 0) // BLOCK_M, end)
        full = gl.minimum(gl.cdiv(gl.maximum(start_n + BLOCK_N - 1 - offset, 0), BLOCK_M), end)
    if start_n + BLOCK_N > seqlen_k:  # the last, ragged tile: everything under the mask
        full = end
    return first, full, end


#: Triton 3.9 has it in public.
_PUBLIC = gl.constexpr(hasattr(shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _as_block_of(stage, descriptor):
    """The start of a shared tile, as a block of the tensor behind the descriptor."""
    if _PUBLIC:
        return stage.reinterpret(descriptor.dtype, descriptor.block_shape, descriptor.layout)
    else:
        return stage._reinterpret(descriptor.dtype, descriptor.block_shape, descriptor.layout)


@gluon.jit
def _work(
    lap, batch, heads_kv, seqlen_q, seqlen_k, heads_per_wave,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """(whether there is one, batch entry, key head, first key, query blocks) of this program's key tile of a lap. As
    tile_and_head of kernels/common.py; causal: the first tiles are the longest, and programs that take several go through
    their order forth and back, which evens the lengths out."""
    programs = gl.num_programs(0)
    lane = gl.program_id(0)
    if IS_CAUSAL:
        lane = gl.where(lap % 2 == 0, lane, programs - 1 - lane)
    index = lap * programs + lane
    tiles = gl.cdiv(seqlen_k, BLOCK_N)
    heads = batch * heads_kv
    band = index // (tiles * heads_per_wave)
    first_head = band * heads_per_wave
    width = gl.maximum(gl.minimum(heads - first_head, heads_per_wave), 1)  # the last band may be narrower
    inside = index - band * (tiles * heads_per_wave)
    head = first_head + inside % width
    start_n = inside // width * BLOCK_N
    first, full, end = _query_blocks(start_n, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, IS_CAUSAL)
    return index < tiles * heads, head // heads_kv, head % heads_kv, start_n, first, full, end


@gluon.jit
def _produce(
    q, k, v, do, stats, smem, barriers, batch, heads_kv, group, seqlen_q, seqlen_k, heads_per_wave,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """One warp: K and V of each tile, and for every query head of the group Q with lse and dO with delta through rings."""
    q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, out_smem = smem
    k_ready, v_ready, kv_empty, q_ready, empty, do_ready, ds_ready = barriers
    BLOCK_N: gl.constexpr = GROUPS * KEYS
    laps = gl.cdiv(gl.cdiv(seqlen_k, BLOCK_N) * batch * heads_kv, gl.num_programs(0))
    base = 0  # turns of the rings before this tile
    filled = 0  # tiles before this one that any query sees
    for lap in range(laps):
        alive, b, h_kv, start_n, first, full, end = _work(
            lap, batch, heads_kv, seqlen_q, seqlen_k, heads_per_wave, BLOCK_M, BLOCK_N, IS_CAUSAL
        )
        n_blocks = end - first
        total = gl.where(alive, group * n_blocks, 0)
        for i in range(total):
            turn = base + i
            h = h_kv * group + i // n_blocks
            row = (first + i % n_blocks) * BLOCK_M
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            mbarrier.expect(q_ready.index(stage), q.block_type.nbytes + stats.block_type.nbytes)
            tma_load(q, [b, h, row, 0], q_ready.index(stage), q_smem.index(stage))
            tma_load(stats, [0, b, h, row], q_ready.index(stage), lse_smem.index(stage))
            if i == 0:
                mbarrier.wait(kv_empty, (filled & 1) ^ 1)
                mbarrier.expect(k_ready, GROUPS * k.block_type.nbytes)
                for c in gl.static_range(GROUPS):
                    tma_load(k, [b, h_kv, start_n + c * KEYS, 0], k_ready, k_smem.index(c))
                mbarrier.expect(v_ready, GROUPS * v.block_type.nbytes)
                for c in gl.static_range(GROUPS):
                    tma_load(v, [b, h_kv, start_n + c * KEYS, 0], v_ready, v_smem.index(c))
            mbarrier.expect(do_ready.index(stage), do.block_type.nbytes + stats.block_type.nbytes)
            tma_load(do, [b, h, row, 0], do_ready.index(stage), do_smem.index(stage))
            tma_load(stats, [1, b, h, row], do_ready.index(stage), delta_smem.index(stage))
        base += total
        filled += gl.where(total > 0, 1, 0)


@gluon.jit
def _probabilities(
    s, lse_smem, stage, row, key, offset, seqlen_k, qk_scale,
    BLOCK_M: gl.constexpr, IS_CAUSAL: gl.constexpr, MASK: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """P^T [KEYS, M] of scores S^T."""
    lse = lse_smem.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, layout))
    p = gl.exp2(s * qk_scale - lse[None, :])
    if MASK:
        # how far into the block the first query lies that sees the key: two numbers a thread
        keys = key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
        seen_from = 0
        if IS_CAUSAL:
            seen_from = keys - offset - row
        seen_from = gl.where(keys < seqlen_k, seen_from, BLOCK_M)
        rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
        p = gl.where(seen_from[:, None] <= rows[None, :], p, 0.0)
    return p


@gluon.jit
def _opaque(x):
    """x, which LLVM cannot see through."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _issue_dq(ds_smem, k_smem, buffer, zero, CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    """This group's piece [64, BLOCK_M * BLOCK_D / 128] of dS K, over both groups' keys: of 64 query rows its half of the
    columns, of 128 query rows its half of the rows."""
    HALF: gl.constexpr = BLOCK_D // 2
    dq = zero
    for c in gl.static_range(GROUPS):
        ds = ds_smem.index(buffer * GROUPS + c)
        k = k_smem.index(c).reshape([KEYS, BLOCK_D])
        if BLOCK_M == 64:
            k = k.slice(CONSUMER * HALF, HALF, dim=1)
        else:
            ds = ds.slice(CONSUMER * 64, 64, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def _quads(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A wgmma accumulator as four tensors: the four registers that a thread holds of each 8 columns. Moves nothing."""
    y0, y1 = gl.split(x.reshape([ROWS // 16, 2, 8, COLUMNS // 8, 4, 2]))
    a0, a2 = gl.split(y0.permute((0, 2, 3, 4, 1)))
    a1, a3 = gl.split(y1.permute((0, 2, 3, 4, 1)))
    return a0, a1, a2, a3


_VECTOR_REDUCTION = gl.constexpr("red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;")


@gluon.jit
def _reduce_dq(
    sums, tile, dq_smem, words, b, h, row, heads_q, rows_padded,
    CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, REDUCE: gl.constexpr,
):  # fmt: skip
    """This group's piece of dQ, added to its sums."""
    COLUMNS: gl.constexpr = BLOCK_M * BLOCK_D // 128
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    if REDUCE == "tma":
        stage = dq_smem.index(CONSUMER)
        tma_store_wait(0)
        stage.reshape([64, COLUMNS]).store(tile)
        fence_async_shared()
        if BLOCK_M == 64:
            tma_reduce_add(sums, [b, h, row, CONSUMER * COLUMNS], stage)
        else:
            tma_reduce_add(sums, [b, h, row + CONSUMER * 64, 0], stage)
    else:
        # register order: a thread's four values of each 8 columns are 16 bytes, a warp's lie side by side
        r = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        of_rows = (r // 16) * 128 + (r % 8) * 16 + ((r // 8) % 2) * 2
        of_columns = (c // 8) * 512 + ((c % 8) // 2) * 4 + (c % 2)
        o0, _, _, _ = _quads(of_rows[:, None] + of_columns[None, :], 64, COLUMNS)
        v0, v1, v2, v3 = _quads(tile, 64, COLUMNS)
        first = ((b * heads_q + h).to(gl.int64) * rows_padded + row) * BLOCK_D + CONSUMER * (64 * COLUMNS)
        gl.inline_asm_elementwise(
            _VECTOR_REDUCTION, "=r,l,f,f,f,f", [(words + first + o0).to(gl.int64), v0, v1, v2, v3], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _over_queries(
    dk_acc, dv_acc, s, h_dq, row_dq, begin, end, done, base, limit, sums, words, smem, barriers,
    b, h, heads_q, rows_padded, key, offset, seqlen_k, qk_scale,
    CONSUMER: gl.constexpr, IS_CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr, REDUCE: gl.constexpr, SCORES_AHEAD: gl.constexpr,
    EXPONENTIALS_FIRST: gl.constexpr, DQ_BEHIND: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Query blocks [begin, end) of one head. Turns of the rings: done before block 0 of this head, base before this tile,
    limit with it.
    SCORES_AHEAD: s holds S^T of block begin, and S^T of the next block is computed beside this block's reduction."""
    q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, out_smem = smem
    k_ready, v_ready, kv_empty, q_ready, empty, do_ready, ds_ready = barriers
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    DQ_COLUMNS: gl.constexpr = BLOCK_M * BLOCK_D // 128
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    zero_s = gl.zeros([KEYS, BLOCK_M], gl.float32, s_layout)
    zero_dq = gl.zeros([64, DQ_COLUMNS], gl.float32, dq_layout)
    for j in range(begin, end):
        turn = done + j
        # LLVM would keep the descriptors of all operands in registers through the loop, and ptxas spill them
        mine = _opaque(turn * 0 + CONSUMER)
        k_tile = k_smem.index(mine).reshape([KEYS, BLOCK_D])
        v_tile = v_smem.index(mine).reshape([KEYS, BLOCK_D])
        stage = turn % STAGES
        phase = (turn // STAGES) & 1
        buffer = turn % DS_STAGES
        q_tile = q_smem.index(stage).reshape([BLOCK_M, BLOCK_D])
        do_tile = do_smem.index(stage).reshape([BLOCK_M, BLOCK_D])
        if not SCORES_AHEAD:
            mbarrier.wait(q_ready.index(stage), phase)
            s_next = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        mbarrier.wait(do_ready.index(stage), phase)
        dp_next = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        if not SCORES_AHEAD:
            s = warpgroup_mma_wait(1, deps=[s_next])
        p = _probabilities(
            s, lse_smem, stage, j * BLOCK_M, key, offset, seqlen_k, qk_scale, BLOCK_M, IS_CAUSAL, MASK, s_layout
        )
        p_operand = gl.convert_layout(p.to(dtype), a_layout)
        if EXPONENTIALS_FIRST:
            # long since over: a branch that keeps ptxas from waiting for dP before the exponentials are computed
            mbarrier.wait(do_ready.index(stage), phase)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        dv_next = warpgroup_mma(p_operand, do_tile, dv_acc, is_async=True)
        delta = delta_smem.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, s_layout))
        ds = (p * (dp - delta[None, :])).to(dtype)
        ds_operand = gl.convert_layout(ds, a_layout)
        if SCORES_AHEAD:
            dk_next = warpgroup_mma(ds_operand, q_tile, dk_acc, is_async=True)
        if DQ_BEHIND:
            # the buffer held dS of three blocks ago, which both groups read two blocks ago
            before = gl.maximum(turn - 2, 0)
            mbarrier.wait(empty.index(before % STAGES), (before // STAGES) & 1, pred=turn >= 2)
        ds_smem.index(buffer * GROUPS + CONSUMER).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_ready.index(buffer), count=1)
        if DQ_BEHIND:
            # the first block multiplies whatever lies in the buffer; its reduction is aimed past the end
            before = gl.maximum(turn - 1, 0)
            mbarrier.wait(ds_ready.index(before % DS_STAGES), (before // DS_STAGES) & 1, pred=turn >= 1)
            dq_next = _issue_dq(
                ds_smem, k_smem, (turn + DS_STAGES - 1) % DS_STAGES, zero_dq, CONSUMER, BLOCK_M, BLOCK_D
            )
        else:
            mbarrier.wait(ds_ready.index(buffer), (turn // DS_STAGES) & 1)
            dq_next = _issue_dq(ds_smem, k_smem, buffer, zero_dq, CONSUMER, BLOCK_M, BLOCK_D)
            h_dq = h
            row_dq = j * BLOCK_M
        if SCORES_AHEAD:
            # with dV still in flight ptxas would serialise every product (C7512)
            dv_acc, p_operand = warpgroup_mma_wait(3, deps=[dv_next, p_operand])
            # the last block multiplies whatever lies in the ring, and nobody reads the product
            following = turn + 1
            mbarrier.wait(q_ready.index(following % STAGES), (following // STAGES) & 1, pred=following < limit)
            ahead = q_smem.index(following % STAGES).reshape([BLOCK_M, BLOCK_D])
            s_next = warpgroup_mma(k_tile, ahead.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            dk_acc, ds_operand, piece = warpgroup_mma_wait(1, deps=[dk_next, ds_operand, dq_next])
            mbarrier.arrive(empty.index(stage), count=1)
        else:
            dk_next = warpgroup_mma(ds_operand, q_tile, dk_acc, is_async=True)
            dv_acc, p_operand, piece = warpgroup_mma_wait(1, deps=[dv_next, p_operand, dq_next])
        if DQ_BEHIND and REDUCE != "tma":
            if turn > base:
                _reduce_dq(
                    sums, piece, dq_smem, words, b, h_dq, row_dq, heads_q, rows_padded, CONSUMER, BLOCK_M, BLOCK_D, REDUCE,
                )  # fmt: skip
        else:
            _reduce_dq(
                sums, piece, dq_smem, words, b, h_dq, row_dq, heads_q, rows_padded, CONSUMER, BLOCK_M, BLOCK_D, REDUCE,
            )  # fmt: skip
        h_dq = h
        row_dq = j * BLOCK_M
        if SCORES_AHEAD:
            s = warpgroup_mma_wait(0, deps=[s_next])
        else:
            dk_acc, ds_operand = warpgroup_mma_wait(0, deps=[dk_next, ds_operand])
            mbarrier.arrive(empty.index(stage), count=1)
    return dk_acc, dv_acc, s, h_dq, row_dq


@gluon.jit
def _consume(
    sums, words, dk, dv, smem, barriers,
    batch, heads_q, heads_kv, group, seqlen_q, seqlen_k, rows_padded, heads_per_wave, qk_scale, softmax_scale,
    CONSUMER: gl.constexpr, IS_CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr, OUT_STAGES: gl.constexpr,
    REDUCE: gl.constexpr, SCORES_AHEAD: gl.constexpr, EXPONENTIALS_FIRST: gl.constexpr, DQ_BEHIND: gl.constexpr,
):  # fmt: skip
    """Four warps: dK and dV of KEYS keys of each tile, and their piece of every dQ."""
    q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, out_smem = smem
    k_ready, v_ready, kv_empty, q_ready, empty, do_ready, ds_ready = barriers
    BLOCK_N: gl.constexpr = GROUPS * KEYS
    DQ_COLUMNS: gl.constexpr = BLOCK_M * BLOCK_D // 128
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    offset = seqlen_k - seqlen_q
    laps = gl.cdiv(gl.cdiv(seqlen_k, BLOCK_N) * batch * heads_kv, gl.num_programs(0))
    k_tile = k_smem.index(CONSUMER).reshape([KEYS, BLOCK_D])
    base = 0  # turns of the rings before this tile
    filled = 0  # tiles before this one that any query sees
    for lap in range(laps):
        alive, b, h_kv, start_n, first, full, end = _work(
            lap, batch, heads_kv, seqlen_q, seqlen_k, heads_per_wave, BLOCK_M, BLOCK_N, IS_CAUSAL
        )
        if alive:
            key = start_n + CONSUMER * KEYS
            n_blocks = end - first
            total = group * n_blocks
            dk_acc = gl.zeros([KEYS, BLOCK_D], gl.float32, d_layout)
            dv_acc = gl.zeros([KEYS, BLOCK_D], gl.float32, d_layout)
            s = gl.zeros([KEYS, BLOCK_M], gl.float32, s_layout)
            mbarrier.wait(k_ready, filled & 1, pred=total > 0)
            if SCORES_AHEAD:
                mbarrier.wait(q_ready.index(base % STAGES), (base // STAGES) & 1, pred=total > 0)
                q_tile = q_smem.index(base % STAGES).reshape([BLOCK_M, BLOCK_D])
                s_next = warpgroup_mma(k_tile, q_tile.permute((1, 0)), s, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s_next])
            mbarrier.wait(v_ready, filled & 1, pred=total > 0)
            h_dq = h_kv * group
            row_dq = rows_padded
            for g in range(group):  # every query head that reads this key head
                h = h_kv * group + g
                done = base + g * n_blocks - first
                for part in gl.static_range(2):  # queries under the mask, then those that see every key
                    dk_acc, dv_acc, s, h_dq, row_dq = _over_queries(
                        dk_acc, dv_acc, s, h_dq, row_dq, full if part else first, end if part else full,
                        done, base, base + total, sums, words, smem, barriers,
                        b, h, heads_q, rows_padded, key, offset, seqlen_k, qk_scale,
                        CONSUMER, IS_CAUSAL, BLOCK_M, BLOCK_D, STAGES, DS_STAGES, REDUCE, SCORES_AHEAD, EXPONENTIALS_FIRST,
                        DQ_BEHIND, part == 0,
                    )  # fmt: skip
            if DQ_BEHIND:
                final = gl.maximum(base + total - 1, 0)
                mbarrier.wait(ds_ready.index(final % DS_STAGES), (final // DS_STAGES) & 1, pred=total > 0)
                zero_dq = gl.zeros([64, DQ_COLUMNS], gl.float32, dq_layout)
                dq_next = _issue_dq(ds_smem, k_smem, final % DS_STAGES, zero_dq, CONSUMER, BLOCK_M, BLOCK_D)
                piece = warpgroup_mma_wait(0, deps=[dq_next])
                if total > 0:
                    _reduce_dq(
                        sums, piece, dq_smem, words, b, h_dq, row_dq, heads_q, rows_padded, CONSUMER, BLOCK_M, BLOCK_D, REDUCE,
                    )  # fmt: skip
            mbarrier.arrive(kv_empty, count=1, pred=total > 0)
            tma_store_wait(0)
            stage = out_smem.index(CONSUMER * OUT_STAGES)
            if REDUCE == "tma":  # what stages dQ is large enough
                stage = _as_block_of(stage, dk)
            stage.reshape([KEYS, BLOCK_D]).store(dv_acc.to(dtype))
            fence_async_shared()
            tma_store(dv, [b, h_kv, key, 0], stage)
            if OUT_STAGES == 1:
                tma_store_wait(0)
            else:
                stage = out_smem.index(CONSUMER * OUT_STAGES + 1)
            stage.reshape([KEYS, BLOCK_D]).store((dk_acc * softmax_scale).to(dtype))
            fence_async_shared()
            tma_store(dk, [b, h_kv, key, 0], stage)
            base += total
            filled += gl.where(total > 0, 1, 0)
    tma_store_wait(0)


@gluon.jit
def bwd_fused_hopper_kernel(
    q, k, v, do, stats, sums, words, dk, dv, qk_scale, softmax_scale, batch, heads_q, group, seqlen_q, seqlen_k,
    rows_padded, HEADS_PER_WAVE,
    IS_CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, REDUCE: gl.constexpr, SCORES_AHEAD: gl.constexpr, EXPONENTIALS_FIRST: gl.constexpr,
    DQ_BEHIND: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q, do [B, Hq, Sq, D], k, v [B, Hkv, Sk, D] by descriptors, D <= BLOCK_D; stats [2, B, Hq, rows_padded] float32:
    lse * log2(e), +inf where p is to be zero, and delta -> dk, dv, and dS K added to a float32 workspace [B, Hq, rows_padded,
    BLOCK_D] of zeros: by the descriptor sums (REDUCE "tma"), or by the pointer words (REDUCE "vector", in register order)."""
    dtype: gl.constexpr = q.dtype
    heads_kv = heads_q // group
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], q.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], do.layout)
    k_smem = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, KEYS, BLOCK_D], k.layout)
    v_smem = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, KEYS, BLOCK_D], v.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, 1, BLOCK_M], stats.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, 1, BLOCK_M], stats.layout)
    DS_STAGES: gl.constexpr = 3 if DQ_BEHIND else 2
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_smem = gl.allocate_shared_memory(dtype, [DS_STAGES * GROUPS, KEYS, BLOCK_M], ds_layout)
    OUT_STAGES: gl.constexpr = 1 if REDUCE == "tma" or DQ_BEHIND else 2
    if REDUCE == "tma":
        dq_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, 1, 1, 64, BLOCK_M * BLOCK_D // 128], sums.layout)
        out_smem = dq_smem
    else:
        dq_smem = lse_smem  # there is none
        out_smem = gl.allocate_shared_memory(dtype, [GROUPS * OUT_STAGES, 1, 1, KEYS, BLOCK_D], dk.layout)
    once = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_ready = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], mbarrier.MBarrierLayout())
    k_ready = once.index(0)
    v_ready = once.index(1)
    kv_empty = once.index(2)
    for i in gl.static_range(3):
        mbarrier.init(once.index(i), count=GROUPS if i == 2 else 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(do_ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    for i in gl.static_range(DS_STAGES):
        mbarrier.init(ds_ready.index(i), count=GROUPS)
    fence_async_shared()
    smem = (q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, out_smem)
    barriers = (k_ready, v_ready, kv_empty, q_ready, empty, do_ready, ds_ready)
    gl.warp_specialize([
        (_consume, (
            sums, words, dk, dv, smem, barriers,
            batch, heads_q, heads_kv, group, seqlen_q, seqlen_k, rows_padded, HEADS_PER_WAVE, qk_scale, softmax_scale,
            0, IS_CAUSAL, BLOCK_M, BLOCK_D, STAGES, DS_STAGES, OUT_STAGES,
            REDUCE, SCORES_AHEAD, EXPONENTIALS_FIRST, DQ_BEHIND)),
        (_consume, (
            sums, words, dk, dv, smem, barriers,
            batch, heads_q, heads_kv, group, seqlen_q, seqlen_k, rows_padded, HEADS_PER_WAVE, qk_scale, softmax_scale,
            1, IS_CAUSAL, BLOCK_M, BLOCK_D, STAGES, DS_STAGES, OUT_STAGES,
            REDUCE, SCORES_AHEAD, EXPONENTIALS_FIRST, DQ_BEHIND)),
        (_produce, (
            q, k, v, do, stats, smem, barriers, batch, heads_kv, group, seqlen_q, seqlen_k, HEADS_PER_WAVE,
            BLOCK_M, STAGES, IS_CAUSAL)),
    ], [4, 1], [CONSUMER_REGISTERS, 24])  # fmt: skip


def _grid(problem: Problem, config: Config, sm_count: int) -> int:
    tiles = triton.cdiv(problem.seqlen_k, space.GROUPS * space.KEYS) * problem.batch * problem.heads_kv
    return min(tiles, sm_count) if config["PERSISTENT"] else tiles


def _workspaces(problem: Problem, config: Config) -> Workspaces:
    rows = (problem.batch, problem.heads_q, space.padded_rows(problem))
    words = ((*rows, space.columns(problem.specialization)), "fp32")
    return {"stats": ((2, *rows), "fp32"), "words": words, "sums": "words"}


VARIANT = Variant(
    name="bwd_fused_hopper",
    serves="bwd_fused",
    kernel=bwd_fused_hopper_kernel,
    space=space.SPACE,
    tensors={"q": "", "k": "", "v": "", "do": "", "stats": "fp32", "sums": "fp32", "words": "fp32", "dk": "", "dv": ""},
    descriptors={"q": ("BLOCK_M", "BLOCK_D"), "do": ("BLOCK_M", "BLOCK_D"), "k": (space.KEYS, "BLOCK_D"),
                 "v": (space.KEYS, "BLOCK_D"), "dk": (space.KEYS, "BLOCK_D"), "dv": (space.KEYS, "BLOCK_D"),
                 "stats": (1, "BLOCK_M"), "sums": (64, "PIECE_COLUMNS")},
    grid=_grid,
    grid_dimensions=("PERSISTENT",),
    constants=lambda spec, config: {
        "BLOCK_D": space.columns(spec), "PIECE_COLUMNS": config["BLOCK_M"] * space.columns(spec) // 128,
        "DQ_BEHIND": config["ORDER"] != "together", "SCORES_AHEAD": config["ORDER"] == "ahead",
        "CONSUMER_REGISTERS": space.REGISTERS,
    },
    min_arch=90,
    max_arch=90,
    before=("bwd_prepare_hopper",),
    after=("bwd_finish_hopper",),
    passes_on=lambda spec, config: {
        "SUM_COLUMNS": space.columns(spec),
        "PERMUTED_COLUMNS": config["BLOCK_M"] * space.columns(spec) // 128 if config["REDUCE"] == "vector" else 0,
    },
    workspaces=_workspaces,
    scalars=lambda problem, config: {"rows_padded": space.padded_rows(problem)},
)  # fmt: skip
