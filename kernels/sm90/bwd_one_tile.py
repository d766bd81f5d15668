"""A whole backward of few keys for Hopper: one tile has all keys of a key head, so a program sees every key of its query rows.
It makes delta, dQ in the call's dtype, dK and dV: no kernel before, no sums of dQ in memory, the same bits on every run.

Query blocks of a key head, over all of its query heads, may be split into parts, each a program's, whose dK and dV
kernels/portable/bwd_gather.py adds up. HALVES 2: each of two programs has half of the columns of dQ, dK and dV, where registers
do not hold all of them; both compute S and dP. Each group of four warps has 64 keys; all warps are one partition, which loads
for itself: with a block or two a program there is little that a warp of its own could do ahead."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2tune.kernels.lib.hopper import (
    fence_async_shared,
    mbarrier,
    opaque,
    thread_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fa2tune.kernels.lib.hopper_parts import product_of_rows, tiles_in
from fa2tune.search_spaces.sm90 import bwd_one_tile as space
from fa2tune.spec.variant import Variant

LOG2E = gl.constexpr(1.4426950408889634)


class Shared(NamedTuple):
    """Shared memory, of each the halves: [slots, 1, 1, rows, columns]; ds [M, N]; terms [2, M]."""

    q: tuple
    k: tuple
    v: tuple
    do: tuple
    dq: gl.shared_memory_descriptor  #: of the own half
    ds: gl.shared_memory_descriptor
    terms: gl.shared_memory_descriptor


class Rows(NamedTuple):
    """What plain loads bring of a query block."""

    o: tuple  #: of each half [M, columns]
    lse: gl.tensor  #: [M], past the end +inf, so that p = exp2(s - inf) = 0
    dlse: gl.tensor  #: [M]


class Memory(NamedTuple):
    """Pointers, and how to walk them."""

    o: gl.tensor
    lse: gl.tensor
    dlse: gl.tensor
    stride_oh: gl.tensor
    stride_om: gl.tensor
    stride_dlseh: gl.tensor
    stride_dlsem: gl.tensor
    seqlen_q: gl.tensor
    has_dlse: gl.tensor


@gluon.constexpr_function
def _layout(rows, columns, warps):
    """Of a product of all warps: groups have 64 rows each or, where there are not as many, some of the columns."""
    groups = warps // 4
    if rows >= 64 * groups:
        return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])
    return gl.NVMMADistributedLayout([3, 0], [4, groups], [16, columns // groups, 16])


@gluon.constexpr_function
def _rows_layout(columns, warps):
    """Rows of so many columns, 16 bytes a thread."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def _slots(descriptor, SLOTS: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, HALVES: gl.constexpr):
    found = (gl.allocate_shared_memory(descriptor.dtype, [SLOTS, 1, 1, HEIGHT, WIDTH], descriptor.layout),)
    if HALVES == 2:
        rest = gl.allocate_shared_memory(descriptor.dtype, [SLOTS, 1, 1, HEIGHT, WIDTH], descriptor.layout)
        found = (found[0], rest)
    return found


@gluon.jit
def _load(descriptor, b, h, row, half, barrier, smem, slot):
    """A tile, its own half of the columns first."""
    WIDTH: gl.constexpr = smem[0].shape[-1]
    tma_load(descriptor, [b, h, row, half * WIDTH], barrier, smem[0].index(slot))
    if len(smem) == 2:
        tma_load(descriptor, [b, h, row, (1 - half) * WIDTH], barrier, smem[1].index(slot))


@gluon.jit
def _load_both(descriptor, other, b, h, row, half, barrier, smem, other_smem, slot):
    """Tiles of Q and dO, or of K and V, on one barrier: Triton has all warps meet at each that awaits bytes."""
    mbarrier.expect(barrier, len(smem) * (descriptor.block_type.nbytes + other.block_type.nbytes))
    _load(descriptor, b, h, row, half, barrier, smem, slot)
    _load(other, b, h, row, half, barrier, other_smem, slot)


@gluon.jit
def _columns_of_o(o, rows, inside, stride_om, first, WIDTH: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    columns = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    mask = inside[:, None] & (columns < DIM)[None, :]
    return gl.load(o + (rows.to(gl.int64)[:, None] * stride_om + columns[None, :]), mask=mask, other=0.0)


@gluon.jit
def _rows_of(
    memory, b_heads, h, row, half, alive, M: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr, HALVES: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Of query rows [row, row + M) of head h; not alive: nothing is read."""
    rows = row + gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    inside = (rows < memory.seqlen_q) & alive
    o = memory.o + h.to(gl.int64) * memory.stride_oh
    tiles = (_columns_of_o(o, rows, inside, memory.stride_om, half * WIDTH, WIDTH, DIM, layout),)
    if HALVES == 2:
        rest = _columns_of_o(o, rows, inside, memory.stride_om, (1 - half) * WIDTH, WIDTH, DIM, layout)
        tiles = (tiles[0], rest)
    lse = gl.load(memory.lse + (b_heads + h).to(gl.int64) * memory.seqlen_q + rows, mask=inside, other=float("inf"))
    dlse = memory.dlse + h.to(gl.int64) * memory.stride_dlseh
    dlse = gl.load(dlse + rows.to(gl.int64) * memory.stride_dlsem, mask=inside & (memory.has_dlse != 0), other=0.0)
    return Rows(tiles, lse * LOG2E, dlse)


@gluon.jit
def _delta(rows, do, layout: gl.constexpr):
    """rowsum(dO * O) - dlse [M]. The gradient of lse enters here: d lse / d s = p."""
    sums = gl.sum(rows.o[0].to(gl.float32) * do[0].load(layout).to(gl.float32), 1)
    if len(do) == 2:
        sums += gl.sum(rows.o[1].to(gl.float32) * do[1].load(layout).to(gl.float32), 1)
    return sums - rows.dlse


@gluon.jit
def bwd_hopper_one_tile_kernel(
    q, k, v, o, do, dlse, lse, dq, dk, dv, qk_scale, softmax_scale,
    stride_ob, stride_oh, stride_om, stride_dlseb, stride_dlseh, stride_dlsem,
    heads_q, group, seqlen_q, seqlen_k, has_dlse, PARTS, window_left, window_right,
    HEAD_DIM_V: gl.constexpr, WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, HIDE_QUERIES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """q, do [B, Hq, Sq, D / DV], k, v [B, Hkv, Sk, D / DV] by descriptors of half of their columns, o by pointer, lse
    [B, Hq, Sq] as the forward leaves it, dlse [B, Hq, Sq] float32 (read only if has_dlse) -> dq [B, Hq, Sq, D]; dk, dv
    [B, Hkv * PARTS, Sk, D / DV], head h * PARTS + p of part p of key head h. 1 <= Sk <= BLOCK_N."""
    WARPS: gl.constexpr = BLOCK_N // 16
    dtype: gl.constexpr = q.dtype
    s_layout: gl.constexpr = _layout(BLOCK_N, BLOCK_M, WARPS)
    k_layout: gl.constexpr = _layout(BLOCK_N, WIDTH, WARPS)
    v_layout: gl.constexpr = _layout(BLOCK_N, WIDTH_V, WARPS)
    dq_layout: gl.constexpr = _layout(BLOCK_M, WIDTH, WARPS)
    o_layout: gl.constexpr = _rows_layout(WIDTH_V, WARPS)
    p_operand: gl.constexpr = gl.DotOperandLayout(0, v_layout, 2)
    ds_operand: gl.constexpr = gl.DotOperandLayout(0, k_layout, 2)
    of_row: gl.constexpr = gl.SliceLayout(0, s_layout)

    # programs that read the same keys and queries run at the same time
    index = gl.program_id(0) // HALVES
    half = gl.program_id(0) - index * HALVES
    head = index // PARTS
    part = index - head * PARTS
    heads_kv = heads_q // group
    b = head // heads_kv
    h_kv = head - b * heads_kv
    blocks = gl.cdiv(seqlen_q, BLOCK_M)  # of a query head
    begin = blocks * group * part // PARTS
    count = blocks * group * (part + 1) // PARTS - begin

    smem = Shared(
        _slots(q, STAGES, BLOCK_M, WIDTH, HALVES), _slots(k, 1, BLOCK_N, WIDTH, HALVES),
        _slots(v, 1, BLOCK_N, WIDTH_V, HALVES), _slots(do, STAGES, BLOCK_M, WIDTH_V, HALVES),
        gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_M, WIDTH], dq.layout),
        gl.allocate_shared_memory(dtype, [1, BLOCK_M, BLOCK_N], gl.NVMMASharedLayout(128, 16, 2)),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )  # fmt: skip
    kv_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    _load_both(k, v, b, h_kv, 0, half, kv_ready, smem.k, smem.v, 0)
    for i in gl.static_range(STAGES):
        if i < count:
            its_member = (begin + i) // blocks
            its_row = (begin + i - its_member * blocks) * BLOCK_M
            its_h = h_kv * group + its_member
            _load_both(q, do, b, its_h, its_row, half, ready.index(i), smem.q, smem.do, i)
    memory = Memory(
        o + b.to(gl.int64) * stride_ob, lse, dlse + b.to(gl.int64) * stride_dlseb, stride_oh, stride_om, stride_dlseh,
        stride_dlsem, seqlen_q, has_dlse,
    )  # fmt: skip
    b_heads = b * heads_q
    member = begin // blocks
    row = (begin - member * blocks) * BLOCK_M
    h = h_kv * group + member
    if HALVES == 1:
        rows = _rows_of(memory, b_heads, h, row, half, count > 0, BLOCK_M, WIDTH_V, HEAD_DIM_V, HALVES, o_layout)

    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, s_layout))
    window = (window_left, window_right)
    zero_s = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, s_layout)
    zero_dq = gl.zeros([BLOCK_M, WIDTH], gl.float32, dq_layout)
    dk_acc = gl.zeros([BLOCK_N, WIDTH], gl.float32, k_layout)
    dv_acc = gl.zeros([BLOCK_N, WIDTH_V], gl.float32, v_layout)
    mbarrier.wait(kv_ready, 0)
    for n in range(count):
        stage = n % STAGES
        phase = (n // STAGES) & 1
        # LLVM would keep the descriptors of all operands in registers through the loop, and ptxas spill them
        only = opaque(n * 0)
        k_tile, v_tile, ds_tile = tiles_in(smem.k, only), tiles_in(smem.v, only), smem.ds.index(only)
        q_tile, do_tile = tiles_in(smem.q, stage), tiles_in(smem.do, stage)
        if HALVES == 2:  # registers do not hold O beside S and dP
            rows = _rows_of(memory, b_heads, h, row, half, True, BLOCK_M, WIDTH_V, HEAD_DIM_V, HALVES, o_layout)
        mbarrier.wait(ready.index(stage), phase)
        if HALVES == 2:
            smem.terms.index(0).store(rows.lse)
            smem.terms.index(1).store(_delta(rows, do_tile, o_layout))
        s_next = product_of_rows(k_tile, q_tile, zero_s)
        dp_next = product_of_rows(v_tile, do_tile, zero_s)
        following = begin + n + 1
        member = following // blocks
        next_row = (following - member * blocks) * BLOCK_M
        next_h = h_kv * group + member
        if HALVES == 1:
            smem.terms.index(0).store(rows.lse)
            smem.terms.index(1).store(_delta(rows, do_tile, o_layout))
            rows = _rows_of(
                memory, b_heads, next_h, next_row, half, n + 1 < count, BLOCK_M, WIDTH_V, HEAD_DIM_V, HALVES, o_layout
            )
        lse_row = smem.terms.index(0).load(of_row)  # as the columns of S^T
        delta_row = smem.terms.index(1).load(of_row)
        s = warpgroup_mma_wait(HALVES, deps=[s_next])
        p = gl.exp2(gl.fma(s, qk_scale, -lse_row[None, :]))
        p = HIDE_QUERIES(p, keys, row, seqlen_k - seqlen_q, seqlen_k, window, s_layout)
        left = gl.convert_layout(p.to(dtype), p_operand)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        ds = (p * (dp - delta_row[None, :])).to(dtype)
        left_ds = gl.convert_layout(ds, ds_operand)
        ds_tile.permute((1, 0)).store(ds)
        # not before dS: ptxas would pack P between the steps of dS, and the product wait for it
        dv_next = warpgroup_mma(left, do_tile[0], dv_acc, is_async=True)
        fence_async_shared()
        thread_barrier()
        dq_next = warpgroup_mma(ds_tile, k_tile[0], zero_dq, use_acc=False, is_async=True)
        dk_next = warpgroup_mma(left_ds, q_tile[0], dk_acc, is_async=True)
        dv_acc, left, dq_block = warpgroup_mma_wait(1, deps=[dv_next, left, dq_next])
        dq_block = (dq_block * softmax_scale).to(dtype)
        tma_store_wait(0)
        dk_acc, left_ds = warpgroup_mma_wait(0, deps=[dk_next, left_ds])
        thread_barrier()  # all warps have read this stage, and dQ of the block before has left
        ahead = n + STAGES
        if ahead < count:
            member = (begin + ahead) // blocks
            its_row = (begin + ahead - member * blocks) * BLOCK_M
            its_h = h_kv * group + member
            _load_both(q, do, b, its_h, its_row, half, ready.index(stage), smem.q, smem.do, stage)
        smem.dq.index(0).reshape([BLOCK_M, WIDTH]).store(dq_block)
        fence_async_shared()
        tma_store(dq, [b, h, row, half * WIDTH], smem.dq.index(0))
        h, row = next_h, next_row

    # through the memory of K and V, which nothing reads any more
    place = h_kv * PARTS + part
    smem.k[0].index(0).reshape([BLOCK_N, WIDTH]).store((dk_acc * softmax_scale).to(dtype))
    smem.v[0].index(0).reshape([BLOCK_N, WIDTH_V]).store(dv_acc.to(dtype))
    fence_async_shared()
    tma_store(dk, [b, place, 0, half * WIDTH], smem.k[0].index(0))
    tma_store(dv, [b, place, 0, half * WIDTH_V], smem.v[0].index(0))
    tma_store_wait(0)


VARIANT = Variant(
    kernel=bwd_hopper_one_tile_kernel,
    space=space.SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "do": "", "dlse": "fp32", "lse": "fp32", "dq": "", "dk": "", "dv": ""},
    descriptors={"q": ("BLOCK_M", "WIDTH"), "k": ("BLOCK_N", "WIDTH"), "v": ("BLOCK_N", "WIDTH_V"),
                 "do": ("BLOCK_M", "WIDTH_V"), "dq": ("BLOCK_M", "WIDTH"), "dk": ("BLOCK_N", "WIDTH"),
                 "dv": ("BLOCK_N", "WIDTH_V")},
    grid=lambda problem, config, _sm_count, _early: space.programs(problem, config),
    constants=space.widths,
    min_arch=90,
    max_arch=90,
)  # fmt: skip
