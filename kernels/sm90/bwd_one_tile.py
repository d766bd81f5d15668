"""A whole backward of few keys for Hopper: one tile has all keys of a key head, so a program sees every key of its query rows.
It makes delta, dQ in the call's dtype, dK and dV: no kernel before, no sums of dQ in memory, the same bits on every run.

Query blocks of a key head, over all of its query heads, may be split into parts, each a program's, whose dK and dV
kernels/portable/bwd_gather.py adds up. HALVES 2: each of two programs has half of the columns of dQ, dK and dV, where registers
do not hold all of them; both compute S and dP. PERSISTENT: as many programs as multiprocessors take every n-th key head, and
load the next one's K and V while they compute.

Each group of four warps has 64 keys; all warps are one partition, which loads for itself: with a block or two a key head there
is little that a warp of its own could do ahead."""

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
from fa2tune.spec.variant import WARP_THREADS, Variant

LOG2E = gl.constexpr(1.4426950408889634)


class Shared(NamedTuple):
    """Shared memory, of each the halves: [slots, 1, 1, rows, columns]; ds [1, M, N]; terms [2, M]."""

    q: tuple
    k: tuple
    v: tuple
    do: tuple
    dq: gl.shared_memory_descriptor  #: of the own half, as those of dk and dv
    dk: gl.shared_memory_descriptor
    dv: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    terms: gl.shared_memory_descriptor


class Rows(NamedTuple):
    """What plain loads bring of a query block."""

    o: tuple  #: of each half [M, columns]
    lse: gl.tensor  #: [M], past the end +inf, so that p = exp2(s - inf) = 0
    dlse: gl.tensor  #: [M]


class Place(NamedTuple):
    """A query block of a key head."""

    tile: gl.tensor  #: key head, over the batch, times parts, plus part
    lap: gl.tensor  #: which of the program's tiles
    b: gl.tensor
    h_kv: gl.tensor
    member: gl.tensor  #: query head of the key head
    row: gl.tensor  #: first


class Work(NamedTuple):
    """What a program walks."""

    parts: gl.tensor
    heads_kv: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    programs: gl.tensor  #: that take tiles in turns


class Memory(NamedTuple):
    """Pointers, and how to walk them."""

    o: gl.tensor
    lse: gl.tensor
    dlse: gl.tensor
    stride_ob: gl.tensor
    stride_oh: gl.tensor
    stride_om: gl.tensor
    stride_dlseb: gl.tensor
    stride_dlseh: gl.tensor
    stride_dlsem: gl.tensor
    has_dlse: gl.tensor


class Form(NamedTuple):
    """What is compiled in. Kept as gl.constexpr: assigned without, its fields would be values of the running program."""

    M: gl.constexpr
    WIDTH_V: gl.constexpr
    HEAD_DIM_V: gl.constexpr
    HALVES: gl.constexpr
    PERSISTENT: gl.constexpr
    rows_layout: gl.constexpr


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
    across = min(WARP_THREADS, columns // 8)
    return gl.BlockedLayout([1, 8], [WARP_THREADS // across, across], [warps, 1], [1, 0])


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
def _key_head(tile, work):
    """(batch entry, key head) of a tile."""
    head = tile // work.parts
    b = head // work.heads_kv
    return b, head - b * work.heads_kv


@gluon.jit
def _behind(at, work, form):
    """The query block that follows; behind the last of a tile the first of the program's next one."""
    wraps = at.row + form.M >= work.seqlen_q
    row = gl.where(wraps, 0, at.row + form.M)
    member = gl.where(wraps, at.member + 1, at.member)
    found = Place(at.tile, at.lap, at.b, at.h_kv, member, row)
    if form.PERSISTENT:
        over = member == work.group
        tile = gl.where(over, at.tile + work.programs, at.tile)
        b, h_kv = _key_head(tile, work)
        found = Place(tile, gl.where(over, at.lap + 1, at.lap), b, h_kv, gl.where(over, 0, member), row)
    return found


@gluon.jit
def _columns_of_o(o, rows, inside, stride_om, first, WIDTH: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    columns = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    mask = inside[:, None] & (columns < DIM)[None, :]
    return gl.load(o + (rows.to(gl.int64)[:, None] * stride_om + columns[None, :]), mask=mask, other=0.0)


@gluon.jit
def _rows_of(memory, at, half, alive, work, form):
    """Of a query block; not alive: nothing is read."""
    rows = at.row + gl.arange(0, form.M, layout=gl.SliceLayout(1, form.rows_layout))
    inside = (rows < work.seqlen_q) & alive
    h = at.h_kv * work.group + at.member
    o = memory.o + at.b.to(gl.int64) * memory.stride_ob + h.to(gl.int64) * memory.stride_oh
    own = _columns_of_o(
        o, rows, inside, memory.stride_om, half * form.WIDTH_V, form.WIDTH_V, form.HEAD_DIM_V, form.rows_layout
    )  # fmt: skip
    tiles = (own,)
    if form.HALVES == 2:
        rest = _columns_of_o(
            o, rows, inside, memory.stride_om, (1 - half) * form.WIDTH_V, form.WIDTH_V, form.HEAD_DIM_V, form.rows_layout
        )  # fmt: skip
        tiles = (tiles[0], rest)
    head = (at.b * work.heads_kv * work.group + h).to(gl.int64)
    lse = gl.load(memory.lse + head * work.seqlen_q + rows, mask=inside, other=float("inf"))
    dlse = memory.dlse + at.b.to(gl.int64) * memory.stride_dlseb + h.to(gl.int64) * memory.stride_dlseh
    has_it = inside & (memory.has_dlse != 0)
    return Rows(
        tiles, lse * LOG2E, gl.load(dlse + rows.to(gl.int64) * memory.stride_dlsem, mask=has_it, other=0.0)
    )  # fmt: skip


@gluon.jit
def _put_terms(rows, do, smem, layout: gl.constexpr):
    """lse and delta = rowsum(dO * O) - dlse of a block to shared memory, where the columns of S^T find them. The gradient of
    lse enters here: d lse / d s = p."""
    sums = gl.sum(rows.o[0].to(gl.float32) * do[0].load(layout).to(gl.float32), 1)
    if len(do) == 2:
        sums += gl.sum(rows.o[1].to(gl.float32) * do[1].load(layout).to(gl.float32), 1)
    smem.terms.index(0).store(rows.lse)
    smem.terms.index(1).store(sums - rows.dlse)


@gluon.jit
def bwd_hopper_one_tile_kernel(
    q, k, v, o, do, dlse, lse, dq, dk, dv, qk_scale, softmax_scale,
    stride_ob, stride_oh, stride_om, stride_dlseb, stride_dlseh, stride_dlsem,
    batch, heads_q, group, seqlen_q, seqlen_k, has_dlse, PARTS, window_left, window_right, score_first, score_second,
    HEAD_DIM_V: gl.constexpr, WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, HIDE_QUERIES: gl.constexpr,
    APPLY: gl.constexpr, GRAD: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """q, do [B, Hq, Sq, D / DV], k, v [B, Hkv, Sk, D / DV] by descriptors of half of their columns, o by pointer, lse
    [B, Hq, Sq] as the forward leaves it, dlse [B, Hq, Sq] float32 (read only if has_dlse) -> dq [B, Hq, Sq, D]; dk, dv
    [B, Hkv * PARTS, Sk, D / DV], head h * PARTS + p of part p of key head h. 1 <= Sk <= BLOCK_N.

    PERSISTENT: any number of programs, and PARTS is 1. Else a program for each half of each tile."""
    WARPS: gl.constexpr = space.WARPS
    KV_STAGES: gl.constexpr = 2 if PERSISTENT else 1
    #: registers hold O of the next block beside S and dP
    O_EARLY: gl.constexpr = HALVES * WIDTH_V <= 128
    dtype: gl.constexpr = q.dtype
    s_layout: gl.constexpr = _layout(BLOCK_N, BLOCK_M, WARPS)
    k_layout: gl.constexpr = _layout(BLOCK_N, WIDTH, WARPS)
    v_layout: gl.constexpr = _layout(BLOCK_N, WIDTH_V, WARPS)
    dq_layout: gl.constexpr = _layout(BLOCK_M, WIDTH, WARPS)
    o_layout: gl.constexpr = _rows_layout(WIDTH_V, WARPS)
    p_operand: gl.constexpr = gl.DotOperandLayout(0, v_layout, 2)
    ds_operand: gl.constexpr = gl.DotOperandLayout(0, k_layout, 2)
    of_row: gl.constexpr = gl.SliceLayout(0, s_layout)
    form: gl.constexpr = Form(
        M=BLOCK_M, WIDTH_V=WIDTH_V, HEAD_DIM_V=HEAD_DIM_V, HALVES=HALVES, PERSISTENT=PERSISTENT, rows_layout=o_layout,
    )  # fmt: skip

    # programs that read the same keys and queries run at the same time
    index = gl.program_id(0) // HALVES
    half = gl.program_id(0) - index * HALVES
    work = Work(PARTS, heads_q // group, group, seqlen_q, gl.num_programs(0) // HALVES)
    b, h_kv = _key_head(index, work)
    blocks = gl.cdiv(seqlen_q, BLOCK_M)  # of a query head
    part = index - (b * work.heads_kv + h_kv) * PARTS
    begin = blocks * group * part // PARTS
    count = blocks * group * (part + 1) // PARTS - begin  # of a tile: of one part it is the same for all
    member = begin // blocks
    # a part without blocks has one behind the last query: loads give zeros, and what it stores is dropped
    row = gl.where(count > 0, begin - member * blocks, blocks) * BLOCK_M
    count = gl.maximum(count, 1)
    laps = 1
    if PERSISTENT:
        laps = gl.cdiv(batch * work.heads_kv - index, work.programs)
    total = laps * count

    smem = Shared(
        _slots(q, STAGES, BLOCK_M, WIDTH, HALVES), _slots(k, KV_STAGES, BLOCK_N, WIDTH, HALVES),
        _slots(v, KV_STAGES, BLOCK_N, WIDTH_V, HALVES), _slots(do, STAGES, BLOCK_M, WIDTH_V, HALVES),
        gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_M, WIDTH], dq.layout),
        gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, WIDTH], dk.layout) if PERSISTENT else None,
        gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, WIDTH_V], dv.layout) if PERSISTENT else None,
        gl.allocate_shared_memory(dtype, [1, BLOCK_M, BLOCK_N], gl.NVMMASharedLayout(128, 16, 2)),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )  # fmt: skip
    kv_ready = gl.allocate_shared_memory(gl.int64, [KV_STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(KV_STAGES):
        mbarrier.init(kv_ready.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    now = Place(index, index * 0, b, h_kv, member, row)
    following = _behind(now, work, form)
    _load_both(k, v, b, h_kv, 0, half, kv_ready.index(0), smem.k, smem.v, 0)
    _load_both(q, do, b, h_kv * group + member, row, half, ready.index(0), smem.q, smem.do, 0)
    later = following
    if STAGES == 2:
        later = _behind(following, work, form)
        if total > 1:
            its_h = following.h_kv * group + following.member
            _load_both(q, do, following.b, its_h, following.row, half, ready.index(1), smem.q, smem.do, 1)
    if PERSISTENT:
        if laps > 1:
            its_b, its_head = _key_head(index + work.programs, work)
            _load_both(k, v, its_b, its_head, 0, half, kv_ready.index(1), smem.k, smem.v, 1)
    memory = Memory(
        o, lse, dlse, stride_ob, stride_oh, stride_om, stride_dlseb, stride_dlseh, stride_dlsem, has_dlse
    )  # fmt: skip
    rows = _rows_of(memory, now, half, True, work, form)

    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, s_layout))
    window = (window_left, window_right)
    zero_s = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, s_layout)
    zero_dq = gl.zeros([BLOCK_M, WIDTH], gl.float32, dq_layout)
    dk_acc = gl.zeros([BLOCK_N, WIDTH], gl.float32, k_layout)
    dv_acc = gl.zeros([BLOCK_N, WIDTH_V], gl.float32, v_layout)
    done = 0  # blocks of the tile
    for turn in range(total):
        # LLVM would keep the descriptors of all operands in registers through the loop, and ptxas spill them
        only = opaque(turn * 0)
        stage = turn % STAGES
        k_stage = now.lap % KV_STAGES + only
        k_tile, v_tile, ds_tile = tiles_in(smem.k, k_stage), tiles_in(smem.v, k_stage), smem.ds.index(only)
        q_tile, do_tile = tiles_in(smem.q, stage), tiles_in(smem.do, stage)
        mbarrier.wait(kv_ready.index(now.lap % KV_STAGES), (now.lap // KV_STAGES) & 1)
        mbarrier.wait(ready.index(stage), (turn // STAGES) & 1)
        if not O_EARLY:
            _put_terms(rows, do_tile, smem, o_layout)
        s_next = product_of_rows(k_tile, q_tile, zero_s)
        dp_next = product_of_rows(v_tile, do_tile, zero_s)
        if O_EARLY:
            _put_terms(rows, do_tile, smem, o_layout)
            rows = _rows_of(memory, following, half, turn + 1 < total, work, form)
        s = warpgroup_mma_wait(HALVES, deps=[s_next])
        lse_row = smem.terms.index(0).load(of_row)
        delta_row = smem.terms.index(1).load(of_row)
        # all vanish without a score term
        score, offset = (score_first, score_second), seqlen_k - seqlen_q
        queries, columns = (now.row + gl.arange(0, BLOCK_M, layout=of_row))[None, :], keys[:, None]
        its_head = now.h_kv * group + now.member
        s = APPLY(s, score, queries, columns, offset, now.b, its_head)
        p = gl.exp2(gl.fma(s, qk_scale, -lse_row[None, :]))
        p = HIDE_QUERIES(p, keys, now.row, seqlen_k - seqlen_q, seqlen_k, window, s_layout)
        slope = GRAD(p, s, score, queries, columns, offset, now.b, its_head)
        left = gl.convert_layout(p.to(dtype), p_operand)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        ds = (slope * (dp - delta_row[None, :])).to(dtype)
        left_ds = gl.convert_layout(ds, ds_operand)
        ds_tile.permute((1, 0)).store(ds)
        # not before dS: ptxas would pack P between the steps of dS, and the product wait for it
        dv_next = warpgroup_mma(left, do_tile[0], dv_acc, use_acc=done > 0, is_async=True)
        fence_async_shared()
        thread_barrier()
        dq_next = warpgroup_mma(ds_tile, k_tile[0], zero_dq, use_acc=False, is_async=True)
        dk_next = warpgroup_mma(left_ds, q_tile[0], dk_acc, use_acc=done > 0, is_async=True)
        if not O_EARLY:
            rows = _rows_of(memory, following, half, turn + 1 < total, work, form)
        dv_acc, left, dq_block = warpgroup_mma_wait(1, deps=[dv_next, left, dq_next])
        dk_acc, left_ds = warpgroup_mma_wait(0, deps=[dk_next, left_ds])
        dq_block = (dq_block * softmax_scale).to(dtype)
        tma_store_wait(0)
        thread_barrier()  # all warps have read this stage, and what was stored before has left
        if turn + STAGES < total:
            its_h = later.h_kv * group + later.member
            _load_both(q, do, later.b, its_h, later.row, half, ready.index(stage), smem.q, smem.do, stage)
        smem.dq.index(0).reshape([BLOCK_M, WIDTH]).store(dq_block)
        done += 1
        if done == count:
            if PERSISTENT:
                if now.lap + 2 < laps:
                    its_b, its_head = _key_head(now.tile + 2 * work.programs, work)
                    its_ready = kv_ready.index(now.lap % KV_STAGES)
                    _load_both(k, v, its_b, its_head, 0, half, its_ready, smem.k, smem.v, now.lap % KV_STAGES)
                dk_place, dv_place = smem.dk.index(0), smem.dv.index(0)
            else:  # nothing reads K and V any more
                dk_place, dv_place = smem.k[0].index(0), smem.v[0].index(0)
            dk_place.reshape([BLOCK_N, WIDTH]).store((dk_acc * softmax_scale).to(dtype))
            dv_place.reshape([BLOCK_N, WIDTH_V]).store(dv_acc.to(dtype))
            fence_async_shared()
            place = now.tile - now.b * work.heads_kv * PARTS
            tma_store(dk, [now.b, place, 0, half * WIDTH], dk_place)
            tma_store(dv, [now.b, place, 0, half * WIDTH_V], dv_place)
            done = 0
        fence_async_shared()
        tma_store(dq, [now.b, now.h_kv * group + now.member, now.row, half * WIDTH], smem.dq.index(0))
        now = following
        following = later if STAGES == 2 else _behind(following, work, form)
        later = _behind(following, work, form) if STAGES == 2 else following
    tma_store_wait(0)


VARIANT = Variant(
    kernel=bwd_hopper_one_tile_kernel,
    space=space.SPACE,
    tensors={"q": "", "k": "", "v": "", "o": "", "do": "", "dlse": "fp32", "lse": "fp32", "dq": "", "dk": "", "dv": ""},
    descriptors={"q": ("BLOCK_M", "WIDTH"), "k": ("BLOCK_N", "WIDTH"), "v": ("BLOCK_N", "WIDTH_V"),
                 "do": ("BLOCK_M", "WIDTH_V"), "dq": ("BLOCK_M", "WIDTH"), "dk": ("BLOCK_N", "WIDTH"),
                 "dv": ("BLOCK_N", "WIDTH_V")},
    grid=lambda problem, config, sm_count, _early: space.programs(problem, config, sm_count),
    constants=space.widths,
    min_arch=90,
    max_arch=90,
)  # fmt: skip
